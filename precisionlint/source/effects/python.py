"""Python's own calls: builtins, containers, functools, argparse, as far as values flow through them."""

from __future__ import annotations

import contextlib
from collections import ChainMap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint.events import Weights
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import ANY_OPTIMIZER, Outcome, argument, one, open_ended, result
from precisionlint.source.effects.unread import call_unknown
from precisionlint.source.evaluate import attribute, class_attribute, element_of, elements
from precisionlint.source.objects import is_container, state_dict_weights
from precisionlint.source.operators import as_cond, truth
from precisionlint.source.settings import objects
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    TRUE,
    Class,
    Cond,
    Const,
    External,
    Many,
    Method,
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
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


DTYPE_NAMES = frozenset({"float16", "fp16", "half", "bfloat16", "bf16", "float32", "fp32"})

BUILTINS = frozenset(
    [
        "isinstance",
        "issubclass",
        "len",
        "hasattr",
        "getattr",
        "setattr",
        "enumerate",
        "zip",
        "range",
        "list",
        "tuple",
        "dict",
        "set",
        "frozenset",
        "iter",
        "next",
        "filter",
        "map",
        "sorted",
        "reversed",
        "super",
        "print",
        "type",
        "bool",
        "str",
        "int",
        "float",
        "any",
        "all",
        "sum",
        "max",
        "min",
        "abs",
        "callable",
        "id",
        "repr",
        "vars",
        "property",
        "staticmethod",
        "classmethod",
        "open",
        "exit",
        "quit",
        "round",
    ]
)


STATEFUL = {
    "state_dict": ("optimizer", "scaler", "module"),
    "load_state_dict": ("optimizer", "scaler", "module"),
    "parameters": ("module",),
    "param_groups": ("optimizer",),
}
"""Attribute -> the kinds of object that have it."""
PURE = frozenset(
    [
        "builtins.isinstance",
        "builtins.issubclass",
        "builtins.len",
        "builtins.hasattr",
        "builtins.callable",
        "builtins.bool",
        "builtins.str",
        "builtins.int",
        "builtins.float",
        "builtins.abs",
        "builtins.round",
        "builtins.type",
        "torch.cuda.is_available",
        "torch.cuda.is_bf16_supported",
        "torch.distributed.is_initialized",
        "torch.distributed.is_available",
        "torch.distributed.get_rank",
        "torch.distributed.get_world_size",
        "os.environ.get",
        "os.getenv",
        "os.path.exists",
    ]
)


WORD = regex(r"\w+")
EXITS = frozenset({"sys.exit", "os._exit", "builtins.exit", "builtins.quit", "os.abort"})


SAME = frozenset({"tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "tqdm", "builtins.reversed", "builtins.iter", "builtins.sorted",
                  "builtins.list", "builtins.tuple", "builtins.set", "rich.progress.track"})  # fmt: skip


def same(it: Interpreter, state: State, instr: p.Call, name: str, inner: Value) -> Value:
    known = elements(it, state, inner)
    if known is not None:
        if name == "builtins.list":
            obj = Obj(it.here(state, instr.at), External("builtins.list"))
            state.allocate(obj, dict(enumerate(known)))
            return obj
        return Tup(tuple(known))
    if isinstance(inner, (Tensors, Many, Obj)):
        return inner
    return Stream("same", (inner,))


def empty(it: Interpreter, state: State, instr: p.Call, name: str) -> Value:
    obj = Obj(it.here(state, instr.at), External("builtins.list"))
    state.allocate(obj, {})
    return obj


def partial(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    if not args:
        return call_unknown(it, state, instr, callee, args)
    return one(state, Partial(args[0][1], args[1:]))


def chain(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for keyword, value in args if keyword is None]
    if len(values) == len(args) and values and all(isinstance(v, Tensors) for v in values):
        weights: Weights | None = frozenset()
        for value in values:
            assert isinstance(value, Tensors)
            weights = None if weights is None or value.weights is None else weights | value.weights
        return one(state, replace(values[0], weights=weights))  # type: ignore[type-var]
    return one(state, result(it, state, instr, callee, ()))


def stream(kind: str) -> Callable[..., Outcome]:
    def call(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
        parts = tuple(value for keyword, value in args if keyword in (None, "iterable"))
        if not parts or open_ended(args):
            return one(state, result(it, state, instr, callee, args))
        return one(state, Stream(kind, parts[:1] if kind == "enumerate" else parts))

    return call


def range_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """A range: of one number that is known it is that, and a loop over it does not come round."""
    ends = [value.value for name, value in args if name is None and isinstance(value, Const)]
    if len(ends) == len(args) and all(isinstance(end, int) for end in ends):
        with contextlib.suppress(ValueError, TypeError, OverflowError):  # of no such range, or of one too long
            if len(only := range(*ends)) == 1:
                return one(state, Tup((const(only[0]),)))
    return one(state, it.site(state, instr.at, "range(…)", PLAIN, ()))


def getattr_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for _, value in args]
    if len(values) >= 2 and isinstance(values[1], Const) and isinstance(values[1].value, str):
        found = attribute(it, state, values[0], values[1].value)
        return one(state, result(it, state, instr, callee, ()) if isinstance(found, Method) else found)
    if len(values) >= 2 and isinstance(values[0], External):
        if values[0].name == "torch.optim" and isinstance(values[1], Sym) and values[1].default is None:
            return one(state, External(ANY_OPTIMIZER))
        value = it.derived(
            ("getattr", values[0], values[1]), f"getattr({text_of(values[0])}, {text_of(values[1])})", (values[1],)
        )
        if isinstance(value, Sym) and isinstance(values[1], Sym):
            if isinstance(values[1].default, Const) and isinstance(values[1].default.value, str):
                value.default = External(it.apis.canonical(f"{values[0].name}.{values[1].default.value}"))
            if values[0] == External("torch"):
                # Each half that the program itself names is a configuration of its own.
                words = WORD.findall(it.module_of(state).text)
                value.options = tuple(
                    (Cond(values[1], "eq", const(name), True), External(f"torch.{name}"))
                    for name in ("bfloat16", "float16")
                    if name in words
                )
        return one(state, value)
    return one(state, result(it, state, instr, callee, ()))


def hasattr_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``hasattr(x, name)``: known for constants, and for objects whose class is."""
    values = [value for _, value in args]
    if len(values) == 2 and isinstance(values[1], Const):
        obj, name = values[0], values[1].value
        if isinstance(obj, Const):
            return one(state, const(hasattr(obj.value, str(name))))
        if isinstance(obj, Obj):
            if name in state.heap.get(obj, {}) or it.kind(state, obj) in STATEFUL.get(str(name), ()):
                return one(state, TRUE)
            if isinstance(obj.cls, Class) and class_attribute(it, state, obj.cls, str(name)) is not None:
                return one(state, TRUE)
    text = f"hasattr({', '.join(text_of(value) for value in values)})"
    return one(state, it.derived(("pure", callee.name, *values), text, tuple(values)))


OF_CONSTANTS = ("builtins.", "numbers.", "collections.", "typing.", "six.")
"""Where the classes are of which a constant may be."""


def isinstance_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``isinstance(x, cls)``: known where both are constants or modules; a constant may be one of Python's own classes and of those that
    stand for several of them."""
    values = [value for _, value in args]
    if len(values) == 2:
        obj, cls = values
        if isinstance(obj, Const) and isinstance(cls, External) and not cls.name.startswith(OF_CONSTANTS):
            return one(state, FALSE)
        if cls == External("torch.nn.Module") and isinstance(obj, Obj) and it.kind(state, obj):
            return one(state, const(it.kind(state, obj) == "module"))
    text = f"isinstance({', '.join(text_of(value) for value in values)})"
    return one(state, it.derived(("pure", callee.name, *values), text, tuple(values)))


def setattr_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for _, value in args]
    if len(values) == 3 and isinstance(values[1], Const) and isinstance(values[0], (Obj, Sym)):
        state.attributes(values[0])[values[1].value] = values[2]
    elif len(values) == 3 and isinstance(values[0], Obj) and isinstance(values[0].cls, Class):
        overwritten(it, state, values[0], values[0].cls)
    return one(state, NONE)


def overwritten(it: Interpreter, state: State, obj: Obj, cls: Class) -> None:
    """An attribute whose name is not known is set: what a class gives as the name of a dtype is only where its objects begin."""
    own = state.heap.get(obj, {})
    classes = [each for each in it.mro(state, cls) if isinstance(each, Class)]
    given = ChainMap(own, *(state.heap.get(each, {}) for each in classes))
    names = [
        name for name, value in given.items() if isinstance(value, Const) and str(value.value).lower() in DTYPE_NAMES
    ]
    for name in names:
        state.attributes(obj)[name] = it.derived(("attr", obj, name), str(name), ())


def filter_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for _, value in args]
    if len(values) == 2 and isinstance(values[1], Tensors):
        kind = "params" if values[1].kind == "params" else values[1].kind
        return one(state, replace(values[1], kind=kind))
    return one(state, result(it, state, instr, callee, ()))


def super_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    frame: int | None = state.frame
    while frame is not None:
        info = it.frames[frame]
        if info.function is not None and info.function.params:
            receiver = state.frames.get(frame, {}).get(info.function.params[0].name)
            if isinstance(receiver, Obj) and isinstance(receiver.cls, Class):
                for cls in it.mro(state, receiver.cls):
                    if isinstance(cls, Class) and info.function in cls.cls.methods:
                        return one(state, Super(receiver, cls))
        frame = info.parent
    return one(state, result(it, state, instr, callee, ()))


def float_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    value = argument(args, 0)
    if isinstance(value, Const) and isinstance(value.value, (int, float, str)):
        try:
            return one(state, const(float(value.value)))
        except (ValueError, OverflowError):
            pass
    if value is None:
        return one(state, const(0.0))
    return one(state, it.derived(("pure", callee.name, value), text_of(value), (value,), flow_of(value)))


def bool_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``bool(x)`` asks of x what ``if x`` asks."""
    value = argument(args, 0)
    if value is None:
        return one(state, FALSE)
    known = truth(state, value)
    if known is not None:
        return one(state, const(known))
    return one(state, as_cond(value) or value)


def field_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """A field: what it is by default, or an object of settings of its own (``field(default_factory=OptimConfig)``)."""
    default = argument(args, 0 if callee.name.startswith("pydantic.") else 9, "default")
    if default is not None:
        return one(state, default)
    factory = argument(args, 9, "default_factory")
    return one(state, result(it, state, instr, callee, ((None, factory),) if factory is not None else ()))


def items_of(it: Interpreter, state: State, value: Value) -> dict[Any, Value]:
    """What a dict holds that is made of a value: of another dict, or of pairs."""
    if isinstance(value, Obj) and value.cls == External("builtins.dict"):
        return state.heap.get(value, {"*": value})
    pairs = list(state.heap.get(value, {}).values()) if is_container(value) else elements(it, state, value)
    if pairs is None or not all(isinstance(pair, Tup) and len(pair.items) == 2 for pair in pairs):
        return {"*": value}
    items: dict[Any, Value] = {}
    for pair in pairs:
        assert isinstance(pair, Tup)
        key, item = pair.items
        items[key.value if isinstance(key, Const) else "*"] = item
    return items


def dict_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    obj = Obj(it.here(state, instr.at), External("builtins.dict"))
    items: dict[Any, Value] = {}
    for keyword, value in args:
        if isinstance(value, Tensors) and value.kind == "named":
            items["*"] = replace(value, kind="param")
        elif keyword is None or keyword == "**":
            items.update(items_of(it, state, value))
        elif keyword != "*":
            items[keyword] = value
    state.allocate(obj, items)
    return one(state, obj)


def ordered_dict(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``OrderedDict(model.named_parameters())`` holds what a dict does; one of pairs is not followed."""
    if all(is_container(value) or (isinstance(value, Tensors) and value.kind == "named") for _, value in args):
        return dict_(it, state, instr, callee, args)
    return call_unknown(it, state, instr, callee, args)


def items_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    if args:
        return call_unknown(it, state, instr, Method(receiver, name), args)
    if isinstance(receiver, Sym) and receiver.key[0] == "state_dict" and name != "keys":
        weights = state_dict_weights(it, receiver)
        if weights is not None:
            return one(state, Tensors("named" if name == "items" else "params", weights))
    return one(state, Stream("same" if name == "keys" else name, (receiver,)))


def item(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    return one(state, it.derived(("call", receiver, name), text_of(receiver), (receiver,), flow_of(receiver)))


def parse_args(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """argparse: the options are unknown, each with its default."""
    options = it.site(state, instr.at, "args", PLAIN, ())
    for key, default in state.heap.get(receiver, {}).items():
        if isinstance(key, tuple) and key[0] == "option":
            value = it.derived(("attr", options, key[1]), f"args.{key[1]}", (options,))
            if isinstance(value, Sym):
                value.default = default
    if name == "parse_known_args":
        return one(state, Tup((options, it.free("…"))))
    return one(state, options)


def parse_settings(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """transformers' and trl's parsers: an object of each of the classes of settings that they were handed."""
    made = objects(it, receiver)
    return one(state, Tup(made) if made is not None else result(it, state, instr, Method(receiver, name), args))


def add_argument(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    default = argument(args, 99, "default")
    flags = [v.value for k, v in args if k is None and isinstance(v, Const) and isinstance(v.value, str)]
    dest = argument(args, 99, "dest")
    if default is not None and isinstance(receiver, (Sym, Obj)):
        option = (
            dest.value
            if isinstance(dest, Const)
            else next((f for f in flags if f.startswith("--")), flags[0] if flags else "")
        )
        state.attributes(receiver)[("option", str(option).lstrip("-").replace("-", "_"))] = default
    return one(state, NONE)


def argument_group(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    return one(state, receiver)


def container_method(it: Interpreter, state: State, instr: p.Call, obj: Obj, name: str, args: Args) -> Outcome:
    """Methods of lists and dicts."""
    values = [value for _, value in args]
    items = state.heap.get(obj, {})
    if name in ("items", "values"):
        return one(state, Stream(name, (obj,)))
    if name == "keys":
        return one(state, Stream("same", (obj,)))
    if name == "append" and values:
        writable = state.attributes(obj)
        if "*" in writable or len(writable) >= 8 or it.one_of_many():
            writable["*"] = values[0]
        else:
            writable[len(writable)] = values[0]
        return one(state, NONE)
    if name == "add" and values:
        state.attributes(obj)["*"] = values[0]
        return one(state, NONE)
    if name == "clear":
        state.attributes(obj).clear()
        return one(state, NONE)
    if name in ("extend", "update") and values:
        writable = state.attributes(obj)
        known = elements(it, state, values[0])
        if name == "update" and args[0][0] not in (None, "*", "**"):  # update(key=value)
            writable.update({keyword: value for keyword, value in args if keyword not in ("*", "**")})
        elif name == "update" and is_container(values[0]):
            writable.update(state.heap.get(values[0], {}))
        elif name == "extend" and known is not None and "*" not in writable:
            for value in known:
                writable[len(writable)] = value
        else:
            writable["*"] = values[0] if isinstance(values[0], Tensors) else element_of(it, state, values[0], instr.at)
        return one(state, NONE)
    if name in ("get", "pop", "setdefault", "popitem") and values and isinstance(values[0], Const):
        key = values[0].value
        if name == "setdefault" and key not in items and len(values) > 1:
            state.attributes(obj)[key] = values[1]
            return one(state, values[1])
        if key in items:
            return one(state, state.attributes(obj).pop(key) if name == "pop" else items[key])
        if "*" not in items:
            return one(state, values[1] if len(values) > 1 else NONE)
    if name == "get" and values and isinstance(values[0], Sym):
        return one(state, it.derived(("index", obj, values[0]), f"{text_of(obj)}[{values[0].text}]", (values[0],)))
    if name in ("copy",):
        copied = Obj(it.here(state, instr.at), obj.cls)
        state.allocate(copied, dict(items))
        return one(state, copied)
    return one(state, result(it, state, instr, Method(obj, name), args))
