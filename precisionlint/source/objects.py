"""What objects are to the timeline: whose weights they hold, their dtypes, and what the program calls them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from precisionlint.events import Known, Named, WeightPath, Weights
from precisionlint.source import program as p
from precisionlint.source.state import State
from precisionlint.source.values import (
    NONE,
    Const,
    External,
    Many,
    Obj,
    Sym,
    Tensors,
    Tup,
    Value,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter

WRAPPER_ATTRIBUTES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
DTYPES = frozenset(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64"))


def is_container(value: Value) -> bool:
    return isinstance(value, Obj) and isinstance(value.cls, External) and value.cls.name.startswith("builtins.")


def holds_gradients(state: State, value: Value) -> bool:
    """Whether a value is gradients, or a list of them: whoever is handed these may read them without a word of gradients."""
    held = (value, *state.heap.get(value, {}).values()) if is_container(value) else (value,)
    return any(isinstance(each, Tensors) and each.kind == "grad" for each in held)


PARAMETER = "parameter"
"""Where a tensor that is a weight of its own keeps what stands for that weight."""


COPY = "own copy"
"""The same of a copy of a weight in the dtype that this has."""


def weights_of(it: Interpreter, state: State, value: Value) -> Weights | None:
    """Which weights a model, or a sequence of parameters, stands for; None where nobody knows, and where it holds none."""
    return held_weights(it, state, value) or None


def held_weights(it: Interpreter, state: State, value: Value) -> Weights | None:
    """The weights in a value; an empty list holds none of any."""
    match value:
        case Tensors():
            return rerooted(it, value.weights)
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            if value.cls == External("builtins.dict") and "params" in items:
                return held_weights(it, state, items["params"])
            return union(held_weights(it, state, item) for item in items.values() if item != NONE)
        case Tup():
            return union(held_weights(it, state, item) for item in value.items)
        case Many():
            return held_weights(it, state, value.element)
        case Obj():
            params = state.heap.get(value, {}).get("params")
            if params is not None and it.kind(state, value) in ("", "param_group"):
                return held_weights(it, state, params)
            return None
        case Sym(key=("attr", _, "weight" | "bias")):  # one parameter of a layer
            path = weight_path(it, value)
            return frozenset({path}) if isinstance(path[0], Obj) and it.kind(state, path[0]) == "module" else None
        case Sym() if (root := own_root(state, value)) is not None:
            return frozenset({weight_path(it, root)})
    return None


def own_root(state: State, tensor: Value) -> Value | None:
    """What stands for the weight that a tensor is by itself."""
    held = state.heap.get(tensor, {})
    return held.get(PARAMETER) or held.get(COPY)


def union(parts: Iterable[Weights | None]) -> Weights | None:
    result: frozenset[WeightPath] = frozenset()
    for part in parts:
        if part is None:
            return None
        result |= part
    return result


def rerooted(it: Interpreter, weights: Weights | None) -> Weights | None:
    """Weights as they are spoken of now: their model may have become part of another since."""
    if weights is None or it.parents.keys().isdisjoint(path[0] for path in weights):
        return weights
    return frozenset((*weight_path(it, path[0]), *path[1:]) for path in weights)  # type: ignore[arg-type]


def model_weights(it: Interpreter, value: Value) -> Weights | None:
    """The weights of a model; None where it is one of several on paths that have become one."""
    path = weight_path(it, value)
    root = path[0]
    return None if isinstance(root, Sym) and root.key[:2] == ("site", "several") else frozenset({path})


def state_dict_weights(it: Interpreter, value: Sym) -> Weights | None:
    """The weights that a ``state_dict()`` holds: those of the model, not copies of them. None where it is another object's."""
    return model_weights(it, value.key[1]) if value.key[0] == "state_dict" and value.key[2:] == ("model",) else None


def weight_path(it: Interpreter, value: Value, depth: int = 0) -> WeightPath:
    """A model as a path of weights: ``model.encoder`` is part of ``model``."""
    if depth > 12:
        return (value,)
    if isinstance(value, Sym) and value.key[0] in ("attr", "index", "item", "part"):
        base = weight_path(it, value.key[1], depth + 1)
        return base if value.key[2] in WRAPPER_ATTRIBUTES else (*base, value.key[2])
    parent = it.parents.get(value)
    if parent is not None and parent[0] != value:
        return (*weight_path(it, parent[0], depth + 1), parent[1])
    return (value,)


def dtype_of(value: Value | None) -> str | None:
    """ "float16", "bfloat16" … of a dtype value; None where it is not one that is known."""
    if isinstance(value, External) and value.name in DTYPES:
        return value.name.removeprefix("torch.")
    if isinstance(value, Sym) and value.default is not None:
        return dtype_of(value.default)
    return None


def name_of(expr: p.Expr, fallback: str = "") -> str:
    """An expression as the program writes it, for messages."""
    match expr:
        case p.Name(slot=str(slot)):
            return slot
        case p.Attr():
            base = name_of(expr.obj)
            return f"{base}.{expr.name}" if base else expr.name
        case p.Index():
            base = name_of(expr.obj)
            key = repr(expr.key.value) if isinstance(expr.key, p.Const) else name_of(expr.key)
            return f"{base}[{key}]" if base else fallback
    return fallback


def walk_exprs(expr: p.Expr) -> Iterator[p.Expr]:
    yield expr
    for name in ("obj", "key", "left", "right", "value"):
        child = getattr(expr, name, None)
        if child is not None and type(child).__module__ == p.__name__:
            yield from walk_exprs(child)


def known(value: Value | None) -> Known[Any] | None:
    return Known(value.value) if isinstance(value, Const) else None


def named(value: Value, name: str) -> Named:
    return Named(value, name or text_of(value))
