"""How arguments meet parameters, and the fields of a dataclass; what a call leaves open has its default, or is unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from precisionlint.source import effects
from precisionlint.source import program as p
from precisionlint.source.evaluate import evaluate, fields_of
from precisionlint.source.state import State
from precisionlint.source.values import PLAIN, Class, External, Func, Obj, Sym, Tup, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


def bind_params(it: Interpreter, func: Func, args: Args, state: State, scope: dict[p.Slot, Value]) -> None:
    """Arguments to parameters, as Python binds them; what the call leaves open is unknown."""
    function = func.function
    positional = [value for keyword, value in args if keyword is None]
    keywords = {keyword: value for keyword, value in args if keyword not in (None, "*", "**")}
    open_ended = any(keyword in ("*", "**") for keyword, _ in args)
    if func.receiver is not None:
        positional.insert(0, func.receiver)
    for param in function.params:
        if param.kind == "*":
            scope[param.name] = Tup(tuple(positional))
            positional = []
        elif param.kind == "**" and open_ended and not keywords:
            scope[param.name] = parameter(it, func, param, state)
        elif param.kind == "**":
            obj = Obj((function.node, "kwargs", state.frame), External("builtins.dict"))
            state.allocate(obj, dict(keywords))
            scope[param.name] = obj
        elif param.kind == "plain" and positional:
            scope[param.name] = positional.pop(0)
        elif param.name in keywords:
            scope[param.name] = keywords.pop(param.name)
        elif param.default is not None and not open_ended:
            scope[param.name] = default(it, func, param, state)
        else:
            scope[param.name] = parameter(it, func, param, state)


def default(it: Interpreter, func: Func, param: p.Param, state: State) -> Value:
    assert param.default is not None
    if (assumed := it.assumed(param.name)) is not None:
        return assumed
    known = it.default_values.get(func.function)
    if known is not None:
        return known[param.name]
    outer = state.frame
    state.frame = func.frame
    value = evaluate(it, state, param.default)
    state.frame = outer
    return value


def parameter(it: Interpreter, func: Func, param: p.Param, state: State) -> Value:
    """A parameter of which nothing is known but its name, its annotation and its default."""
    if (assumed := it.assumed(param.name)) is not None:
        return assumed
    key = ("param", func.function, param.name)
    value: Value = it.intern(key, param.name, PLAIN, frozenset(), ())
    assert isinstance(value, Sym)
    if param.default is not None:
        value.default = default(it, func, param, state)
    if param.annotation is not None:
        outer = state.frame
        state.frame = func.frame
        value = effects.annotated(it, state, param.annotation, value)
        state.frame = outer
    return value


def bind_fields(it: Interpreter, cls: Class, obj: Obj, args: Args, state: State) -> None:
    """A dataclass: arguments to fields, in the order of the fields."""
    fields = fields_of(cls)
    attributes = state.attributes(obj)
    positional = [value for keyword, value in args if keyword is None]
    for name, value in zip(fields, positional, strict=False):
        attributes[name] = value
    for keyword, value in args:
        if keyword not in (None, "*", "**"):
            attributes[keyword] = value
    if any(keyword in ("*", "**") for keyword, _ in args):
        for name in fields:
            if name not in attributes:
                attributes[name] = it.derived(("attr", obj, name), f"{cls.cls.name}.{name}", ())
