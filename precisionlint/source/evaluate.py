"""What an expression is worth in one state. Nothing here forks a path or changes a state's events.

Knows Python's data model as far as precision needs it: attributes through classes, containers, arithmetic on losses and
scales, comparisons as conditions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from precisionlint.events import Known, Named, WeightPath, Weights
from precisionlint.source import program as p
from precisionlint.source.state import NOTHING, State, decide
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    TRUE,
    UNSURE,
    Class,
    Cond,
    Const,
    External,
    Flow,
    Func,
    Many,
    Method,
    ModuleRef,
    Obj,
    Partial,
    Stream,
    Super,
    Sym,
    Tensors,
    Tup,
    Value,
    const,
    flow_of,
    join,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter

HAND_SCALE = re.compile(r"^_*(?:cur_|lg_|current_)?loss_?scal(?:e|er|ing)(?:_factor)?$|^cur_scale$", re.I)
"""What a loss scale kept by hand is called; nothing else says of a plain number that it is one."""

DTYPES = frozenset(f"torch.{name}" for name in ("float16", "bfloat16", "float32", "float64"))
WRAPPER_ATTRIBUTES = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})


def evaluate(it: Interpreter, state: State, expr: p.Expr) -> Value:
    """The value of an expression."""
    match expr:
        case p.Name():
            return it.lookup(state, expr.slot)
        case p.Const():
            return const(expr.value)
        case p.Attr():
            return attribute(it, state, evaluate(it, state, expr.obj), expr.name)
        case p.Index(key=p.Opaque(at=site)):
            return slice_of(it, state, evaluate(it, state, expr.obj), site)
        case p.Index():
            return index(it, state, evaluate(it, state, expr.obj), evaluate(it, state, expr.key))
        case p.Sequence():
            return sequence(it, state, expr)
        case p.Mapping():
            return mapping(it, state, expr)
        case p.Binary(op="and" | "or"):
            left = evaluate(it, state, expr.left)
            known = truth(state, left)
            if known is not None:
                return evaluate(it, state, expr.right) if known == (expr.op == "and") else left
            right = evaluate(it, state, expr.right)
            return it.derived(
                ("op", expr.op, left, right), f"{text_of(left)} {expr.op} {text_of(right)}", (left, right)
            )
        case p.Binary():
            return binary(it, expr.op, evaluate(it, state, expr.left), evaluate(it, state, expr.right))
        case p.Unary():
            return unary(it, state, expr.op, evaluate(it, state, expr.value))
        case p.Compare(op="in" | "not in"):
            left, right = evaluate(it, state, expr.left), evaluate(it, state, expr.right)
            if is_container(right):
                return within(it, state, expr.op, left, right)
            return compare(it, expr.op, left, right)
        case p.Compare():
            return compare(it, expr.op, evaluate(it, state, expr.left), evaluate(it, state, expr.right))
        case p.Closure():
            return Func(expr.function, it.module_of(state), state.frame)
        case p.Star():
            return evaluate(it, state, expr.value)
        case p.Opaque():
            parts = tuple(evaluate(it, state, part) for part in expr.parts)
            if len(parts) == 1 and isinstance(parts[0], Sym):  # an f-string, a slice: the same thing, as conditions go
                return it.derived(("opaque", id(expr), parts[0]), parts[0].text, parts)
            return it.site(state, expr.at, "…", combine(parts), ())
    raise AssertionError(expr)


def combine(values: Iterable[Value]) -> Flow:
    flow = PLAIN
    for value in values:
        flow = join(flow, flow_of(value))
    # A scale that goes into something unreadable may or may not come out of it.
    return replace(flow, factor="", scaled=UNSURE) if flow.factor else flow


def sequence(it: Interpreter, state: State, expr: p.Sequence) -> Value:
    items: list[Value] = []
    for item in expr.items:
        value = evaluate(it, state, item)
        if isinstance(item, p.Star):
            known = elements(it, state, value)
            if known is None:
                return Many(element_of(it, state, value, expr.at))
            items.extend(known)
        else:
            items.append(value)
    if expr.kind == "tuple" or len(items) > 64:
        return Tup(tuple(items))
    obj = Obj(it.here(state, expr.at), External("builtins.list"))
    state.allocate(obj, dict(enumerate(items)))
    return obj


def mapping(it: Interpreter, state: State, expr: p.Mapping) -> Value:
    obj = Obj(it.here(state, expr.at), External("builtins.dict"))
    attributes: dict[Any, Value] = {}
    for key, item in expr.items:
        value = evaluate(it, state, item)
        if key is None:
            attributes.update(state.heap.get(value, {"*": value}))
            continue
        name = evaluate(it, state, key)
        attributes[name.value if isinstance(name, Const) else "*"] = value
    state.allocate(obj, attributes)
    return obj


# -- attributes


def attribute(it: Interpreter, state: State, obj: Value, name: str) -> Value:
    """``obj.name``."""
    stored = state.heap.get(obj)
    if stored is not None and name in stored and not is_container(obj):
        return stored[name]
    match obj:
        case External():
            return External(it.apis.canonical(f"{obj.name}.{name}"), obj.benign)
        case ModuleRef():
            return it.global_of(state, obj.module, name)
        case Obj(cls=Class() as cls):
            found = class_attribute(it, state, cls, name)
            if found is not None:
                return bind(it, state, found, obj, name)
            return outside_attribute(it, state, obj, name)
        case Obj():
            return outside_attribute(it, state, obj, name)
        case Class():
            if name == "__name__":
                return const(obj.cls.name)
            found = class_attribute(it, state, obj, name)
            return found if found is not None else Method(obj, name)
        case Tensors():
            if name == "grad" and obj.kind == "param":
                return replace(obj, kind="grad")
            if name == "requires_grad":
                return TRUE  # what is frozen is said where it is frozen
            if name in ("data", "main_grad", "_local_tensor"):
                return replace(obj, kind="grad") if name == "main_grad" else obj
            return Method(obj, name)
        case Super():
            found = it.super_attribute(state, obj, name)
            return found if found is not None else Method(obj, name)
        case Sym():
            if name == "param_groups":
                return Tensors("groups", None)
            if name in ("grad", "main_grad"):
                if obj.key[0] == "site":  # a loop's variable: one after the other, all of what it runs over
                    return Tensors("grad", None)
                return Tensors("grad", model_weights(it, obj), obj.key[0] == "index")
            return it.derived(("attr", obj, name), f"{obj.text}.{name}", (obj,))
        case Const():
            if obj == NONE:  # this path raises; what would be read from the object that is not there is unknown
                return it.derived(("attr", obj, name), name, ())
    return Method(obj, name)


def outside_attribute(it: Interpreter, state: State, obj: Obj, name: str) -> Value:
    """An attribute that no code of the project sets."""
    if name == "param_groups" and it.kind(state, obj) == "optimizer":
        return Tensors("groups", weights_of(it, state, state.heap.get(obj, {}).get("params", NONE)))
    if is_container(obj):
        return Method(obj, name)
    if name in WRAPPER_ATTRIBUTES:
        return obj
    return it.derived(("attr", obj, name), f"{it.object_name(obj)}.{name}", ())


def class_attribute(it: Interpreter, state: State, cls: Class, name: str) -> Value | None:
    for current in it.mro(state, cls):
        if isinstance(current, Class):
            found = state.heap.get(current, {}).get(name)
            if found is not None:
                return found
    return None


def bind(it: Interpreter, state: State, found: Value, receiver: Value, name: str) -> Value:
    """An attribute found on the class, as the instance has it."""
    if not isinstance(found, Func) or found.receiver is not None:
        return found
    decorators = it.decorators(state, found)
    if "staticmethod" in decorators:
        return found
    if "classmethod" in decorators and isinstance(receiver, Obj):
        return replace(found, receiver=receiver.cls)
    bound = replace(found, receiver=receiver)
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        return it.property_value(state, bound, receiver, name)
    return bound


def is_container(value: Value) -> bool:
    return isinstance(value, Obj) and isinstance(value.cls, External) and value.cls.name.startswith("builtins.")


# -- containers


def index(it: Interpreter, state: State, obj: Value, key: Value) -> Value:
    """``obj[key]``."""
    match obj:
        case Tup() if isinstance(key, Const) and isinstance(key.value, int):
            if -len(obj.items) <= key.value < len(obj.items):
                return obj.items[key.value]
        case Many():
            return obj.element
        case Tensors(kind="groups"):
            if isinstance(key, Const) and isinstance(key.value, str):
                return (
                    replace(obj, kind="params")
                    if key.value == "params"
                    else it.derived(("index", obj, key), key.value, ())
                )
            return obj
        case Tensors():
            if obj.kind == "params" and isinstance(key, Const):
                return Tensors("param", obj.weights, True, obj.flow)
            return replace(obj, part=True) if isinstance(key, Const) else obj
        case Obj() if is_container(obj):
            items = state.heap.get(obj, {})
            if isinstance(key, Const):
                at = key.value
                if isinstance(at, int) and at < 0:
                    at += len(items)
                try:
                    if at in items:
                        return items[at]
                except TypeError:
                    pass
            if "*" in items and not stateful(it, state, items["*"]):
                return items["*"]
            if items and "*" not in items and not isinstance(key, Const):
                first = next(iter(items.values()))
                if all(value == first for value in items.values()) and not stateful(it, state, first):
                    return first
        case Sym():
            if isinstance(key, (Sym, Const)):
                label = key.text if isinstance(key, Sym) else repr(key.value)
                return it.derived(("index", obj, key), f"{obj.text}[{label}]", (obj, key))
    return it.derived(("index", obj, key), f"{text_of(obj)}[{text_of(key)}]", (obj, key))


def slice_of(it: Interpreter, state: State, obj: Value, site: Any) -> Value:
    """``obj[a:b]``: some of the same."""
    match obj:
        case Obj() if is_container(obj):
            return Many(element_of(it, state, obj, site))
        case Tup():
            return Many(element_of(it, state, obj, site))
        case Tensors():
            return replace(obj, part=True)
        case Sym() | Many():
            return obj
    return it.derived(("index", obj, "slice"), f"{text_of(obj)}[:]", (obj,))


def elements(it: Interpreter, state: State, value: Value) -> list[Value] | None:
    """The items of a sequence whose items are all known."""
    match value:
        case Tup():
            return list(value.items)
        case Stream():
            return stream_elements(it, state, value)
        case Obj(cls=External(name="torch.nn.Sequential" | "torch.nn.ModuleList")):
            parts = [item for key, item in state.heap.get(value, {}).items() if isinstance(key, int)]
            return parts if parts and all(isinstance(part, Obj) for part in parts) else None
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            if "*" in items:
                return None
            if value.cls == External("builtins.dict"):
                return [const(key) for key in items]
            return list(items.values())
    return None


def stateful(it: Interpreter, state: State, value: Value) -> bool:
    """Whether a value is an object of which each has a state of its own: one that stands for many stands for none."""
    return isinstance(value, Obj) and it.kind(state, value) in ("optimizer", "scaler")


def stream_elements(it: Interpreter, state: State, stream: Stream) -> list[Value] | None:
    inner = [elements(it, state, part) for part in stream.parts]
    first = inner[0] if inner else None
    match stream.kind:
        case "same":
            return first
        case "enumerate" if first is not None:
            return [Tup((const(position), item)) for position, item in enumerate(first)]
        case "zip" if None not in inner:
            return [Tup(items) for items in zip(*(part for part in inner if part is not None), strict=False)]
        case "items" | "values" if first is not None and is_container(stream.parts[0]):
            items = state.heap.get(stream.parts[0], {})
            if stream.kind == "values":
                return list(items.values())
            return [Tup((const(key), item)) for key, item in items.items()]
    return None


def stream_element(it: Interpreter, state: State, stream: Stream, site: Any) -> Value:
    def part(position: int) -> Value:
        return element_of(it, state, stream.parts[position], (site, position))

    match stream.kind:
        case "same":
            return part(0)
        case "enumerate":
            return Tup((it.site(state, (site, "index"), "…", PLAIN, ()), part(0)))
        case "zip":
            return Tup(tuple(part(position) for position in range(len(stream.parts))))
        case "items" | "values":
            owner = stream.parts[0]
            items = state.heap.get(owner, {}) if is_container(owner) else {}
            value = items.get("*")
            if value is None or stateful(it, state, value):
                value = it.site(state, (site, "value"), f"{text_of(owner)}[…]", flow_of(owner), ())
            if stream.kind == "values":
                return value
            return Tup((it.site(state, (site, "key"), "…", PLAIN, ()), value))
    raise AssertionError(stream.kind)


def element_of(it: Interpreter, state: State, value: Value, site: Any) -> Value:
    """What a loop's variable is, over a sequence whose items are not all known."""
    match value:
        case Many():
            return value.element
        case Stream():
            return stream_element(it, state, value, site)
        case Tensors(kind="params"):
            return replace(value, kind="param")
        case Tensors(kind="named"):
            return Tup((it.site(state, (site, "name"), "name", PLAIN, ()), replace(value, kind="param")))
        case Tensors():
            return value
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            values = list(items.values())
            if value.cls == External("builtins.list") and values and not stateful(it, state, values[0]):
                if "*" in items:
                    return items["*"]
                if all(v == values[0] for v in values):
                    return values[0]
    flow = flow_of(value)
    of = (value,) if isinstance(value, Obj) else ()
    return it.site(state, (site, "element"), f"{text_of(value)}[…]", flow, of)


# -- arithmetic


def unary(it: Interpreter, state: State, op: str, value: Value) -> Value:
    if op == "not":
        return negate(it, state, value)
    if isinstance(value, Const) and isinstance(value.value, (int, float)) and op in "+-":
        return const(-value.value if op == "-" else +value.value)
    return it.derived(("op", op, value), f"{op}{text_of(value)}", (value,))


def negate(it: Interpreter, state: State, value: Value) -> Value:
    if isinstance(value, Cond):
        return replace(value, positive=not value.positive)
    if isinstance(value, Sym):
        return Cond(value, "truth", None, False)
    known = truth(state, value)
    if known is not None:
        return FALSE if known else TRUE
    return it.derived(("op", "not", value), f"not {text_of(value)}", (value,))


FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b,
    "<": lambda a, b: a < b, "==": lambda a, b: a == b, "in": lambda a, b: a in b,
}  # fmt: skip


def fold(op: str, left: Const, right: Const) -> Const | None:
    """The constant that two constants make, where it is small and Python allows it."""
    a, b = left.value, right.value
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    if op == "**" and (not numbers or abs(a) > 1e6 or abs(b) > 64):
        return None
    if op == "*" and not numbers:
        return None
    if op == "%" and not numbers:
        return None
    try:
        result = FOLD[op](a, b)
    except (TypeError, ValueError, ArithmeticError, KeyError):
        return None
    if isinstance(result, (int, float, bool)) or (isinstance(result, str) and len(result) < 200):
        return const(result)
    return None


def binary(it: Interpreter, op: str, left: Value, right: Value) -> Value:
    """``left op right``."""
    if isinstance(left, Const) and isinstance(right, Const):
        folded = fold(op, left, right)
        if folded is not None:
            return folded
    if isinstance(left, Tensors) and isinstance(right, Tensors) and op == "+":
        if left.weights is None or right.weights is None:
            return replace(left, weights=None)
        return replace(left, weights=left.weights | right.weights, part=left.part and right.part)
    flow = scaled_flow(op, flow_of(left), flow_of(right))
    if isinstance(left, Tensors) and left.kind == "grad" and op == "**":
        return replace(left, kind="square")
    if isinstance(left, Tensors) and left.kind in ("grad", "param", "square"):
        return replace(left, flow=flow)
    if isinstance(right, Tensors) and right.kind in ("grad", "param"):
        return replace(right, flow=flow)
    return it.derived(("op", op, left, right), f"{text_of(left)} {op} {text_of(right)}", (left, right), flow)


def scaled_flow(op: str, left: Flow, right: Flow) -> Flow:
    """What arithmetic does to the scale that a loss or a number carries."""
    if op == "*":
        for value, by in ((left, right), (right, left)):
            if by.factor == "1/scale":
                if value.factor == "scale" or (value.scaled is not None and not value.factor):
                    return Flow(None, value.region)
                return replace(by, region=value.region or by.region)
            if by.factor == "scale" and value.factor != "scale":
                return Flow(by.scaled, value.region, "", by.scaled_at)
        return join(left, right)
    if op == "/":
        if right.factor == "scale":
            if left.scaled is not None and not left.factor:
                return Flow(None, left.region)
            return Flow(right.scaled, left.region, "1/scale", right.scaled_at)
        if right.factor == "1/scale":
            return Flow(right.scaled, left.region, "", right.scaled_at)
        return left if right.scaled is None else join(left, right)
    if op == "**" and right.factor == "scale":
        return right  # 2 ** log2(scale)
    if op in ("-", "+") and (left.factor or right.factor):
        return replace(join(left, right), factor="scale" if "scale" in (left.factor, right.factor) else "")
    return join(left, right)


# -- conditions


def compare(it: Interpreter, op: str, left: Value, right: Value) -> Value:
    """A comparison: True or False where it is known, else the condition, in a form that it shares with its complement."""
    if op == "is not":
        return flip(compare(it, "is", left, right))
    if op == "!=":
        return flip(compare(it, "==", left, right))
    if op == "not in":
        return flip(compare(it, "in", left, right))
    if op == ">":
        return compare(it, "<", right, left)
    if op == ">=":
        return flip(compare(it, "<", left, right))
    if op == "<=":
        return flip(compare(it, "<", right, left))
    left, right = opened_up(it, left), opened_up(it, right)
    if op in ("is", "=="):
        if isinstance(left, (Const, External)) and not isinstance(right, (Const, External)):
            left, right = right, left
        if isinstance(left, (Const, External)) and isinstance(right, (Const, External)):
            return equal(left, right)
        if right == NONE:
            return Cond(left, "none", None, True) if isinstance(left, Sym) else const(False)
        if isinstance(right, Const) and isinstance(right.value, bool):
            if isinstance(left, Cond):
                return left if right.value else flip(left)
            if isinstance(left, Sym):
                return Cond(left, "truth", None, right.value)
        if isinstance(right, (Const, External)) and isinstance(left, Sym):
            return Cond(left, "eq", right, True)
        if left == right and not isinstance(left, Sym):
            return TRUE
    if isinstance(left, Const) and isinstance(right, Const):
        folded = fold(op, left, right)
        if folded is not None:
            return folded
    if (
        op == "in"
        and isinstance(left, (Const, External))
        and isinstance(right, Tup)
        and all(isinstance(item, (Const, External)) for item in right.items)
    ):
        return const(left in right.items)
    sym = it.derived(("op", op, left, right), f"{text_of(left)} {op} {text_of(right)}", (left, right))
    return Cond(sym, "truth", None, True) if isinstance(sym, Sym) else sym


def within(it: Interpreter, state: State, op: str, left: Value, container: Value) -> Value:
    """``x in container``: decided where nothing is in it, or every item is a constant; else it may be either, each time."""
    items = state.heap.get(container, {})
    known = (
        list(items)
        if isinstance(container, Obj) and container.cls == External("builtins.dict")
        else list(items.values())
    )
    if not items:
        return const(op == "not in")
    if "*" not in items and isinstance(left, Const):
        constants = [item.value if isinstance(item, Const) else item for item in known]
        return const((left.value in constants) == (op == "in"))
    return it.site(state, (container, op), f"{text_of(left)} {op} …", PLAIN, ())


def opened_up(it: Interpreter, value: Value) -> Value:
    """A name from outside as a value: torch's own are what they are, another package's may be anything."""
    if isinstance(value, External) and not value.name.startswith(("torch.", "builtins.")):
        return it.intern(("free", "outside", value.name), value.name.rpartition(".")[2], PLAIN, frozenset(), ())
    return value


def equal(left: Const | External, right: Const | External) -> Value:
    if isinstance(left, Const) and isinstance(right, Const):
        return const(left.value == right.value and (left.kind == right.kind or left.kind != "NoneType" != right.kind))
    if isinstance(left, External) and isinstance(right, External):
        return const(left.name == right.name)
    return FALSE


def flip(value: Value) -> Value:
    if isinstance(value, Cond):
        return replace(value, positive=not value.positive)
    if isinstance(value, Const):
        return const(not value.value)
    return value


def as_cond(value: Value) -> Cond | None:
    """The condition that a value is true, where it is a matter of a condition at all."""
    if isinstance(value, Cond):
        return value
    if isinstance(value, Sym):
        return Cond(value, "truth", None, True)
    return None


def truth(state: State, value: Value) -> bool | None:
    """Whether a value is true, by what this path knows."""
    match value:
        case Const():
            return bool(value.value)
        case Cond():
            known = decide(state.facts.get(value.sym, NOTHING), value)
            if known is None and value.kind == "truth":
                part = both(state, value.sym)
                return None if part is None else part == value.positive
            return known
        case Sym():
            known = decide(state.facts.get(value, NOTHING), Cond(value, "truth", None, True))
            return both(state, value) if known is None else known
        case Tup():
            return bool(value.items)
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            return True if len(items) > ("*" in items) else None
        case Obj() | Func() | Class() | Partial() | ModuleRef() | Tensors():
            return True
        case External():
            return True if value.name.startswith(("torch.", "builtins.")) else None
    return None


def both(state: State, sym: Sym) -> bool | None:
    """The truth of ``a and b`` / ``a or b`` by that of its sides."""
    if sym.key[0] == "op" and sym.key[1] in ("and", "or"):
        sides = [truth(state, side) for side in sym.key[2:]]
        decisive: bool = sym.key[1] == "or"
        if decisive in sides:
            return decisive
        if None not in sides:
            return not decisive
    return None


# -- weights and names


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
    return None


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
