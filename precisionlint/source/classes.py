"""Classes and what their objects have: bases in order, kinds, attributes of classes above, properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from precisionlint.source import program as p
from precisionlint.source.evaluate import evaluate
from precisionlint.source.operators import as_cond, flip, truth
from precisionlint.source.records import FrameInfo
from precisionlint.source.state import State
from precisionlint.source.values import Class, External, Func, Obj, Super, Sym, Tup, Value, text_of

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter


def is_choice(body: list[p.Instr]) -> bool:
    """Whether a body is ``return A if test else B``, as it is lowered."""
    if len(body) != 2 or not isinstance(body[0], p.If) or not isinstance(body[1], p.Return):
        return False
    sides = (body[0].then.code, body[0].other.code)
    return all(len(side) == 1 and isinstance(side[0], p.Assign) for side in sides)


def returns_at_once(body: list[p.Instr]) -> bool:
    """Whether a body is ``return self.x``, or any other expression, with nothing before it but tests of which each raises."""
    if not body or not isinstance(last := body[-1], p.Return):
        return False
    return len(body) == 1 or (
        isinstance(last.value, p.Attr)
        and isinstance(last.value.obj, p.Name)
        and all(isinstance(each, p.Call) or refuses(each) for each in body[:-1])
    )


def refuses(instr: p.Instr) -> bool:
    """Whether an instruction is ``if test: raise``."""
    return (
        isinstance(instr, p.If)
        and not instr.other.code
        and any(isinstance(each, p.Raise) for each in instr.then.code[-1:])
    )


def mro(it: Interpreter, state: State, cls: Class) -> list[Value]:
    """A class and its bases, depth first; a class that inherits from itself ends there."""
    if cls not in it.mros:
        order: list[Value] = []

        def visit(current: Value) -> None:
            if current in order or len(order) > 30:
                return
            order.append(current)
            if isinstance(current, Class):
                bases = state.heap.get(current, {}).get("__bases__")
                for base in bases.items if isinstance(bases, Tup) else ():
                    visit(base)

        visit(cls)
        it.mros[cls] = order
    return it.mros[cls]


def is_enum(it: Interpreter, state: State, cls: Class) -> bool:
    """Whether the members of a class are constants."""
    return any(isinstance(base, External) and base.name.startswith("enum.") for base in it.mro(state, cls))


def external_base(it: Interpreter, state: State, cls: Class) -> str:
    """The kind of the first outside base that has one ("optimizer", "module" …)."""
    for base in it.mro(state, cls):
        if isinstance(base, External):
            kind = it.apis.kind(base.name)
            if kind:
                return kind
    return ""


def external_name(it: Interpreter, state: State, cls: Class) -> str:
    """The name of the first outside base of a class."""
    return next((base.name for base in it.mro(state, cls) if isinstance(base, External)), "")


def kind(it: Interpreter, state: State, obj: Value) -> str:
    """What an object is, as far as precision goes."""
    if isinstance(obj, Obj):
        if isinstance(obj.cls, External):
            return it.apis.kind(obj.cls.name) or ("param_group" if obj.cls.name == "param_group" else "")
        if isinstance(obj.cls, Class):
            return it.external_base(state, obj.cls)
    return ""


def super_attribute(it: Interpreter, state: State, sup: Super, name: str) -> Value | None:
    order = it.mro(state, sup.owner)
    receiver_cls = sup.receiver.cls if isinstance(sup.receiver, Obj) else sup.owner
    if isinstance(receiver_cls, Class):
        full = it.mro(state, receiver_cls)
        if sup.owner in full:
            order = full[full.index(sup.owner) :]
    for current in order[1:]:
        if isinstance(current, Class):
            found = state.heap.get(current, {}).get(name)
            if isinstance(found, Func):
                return Func(found.function, found.module, found.frame, sup.receiver, found.owner)
            if found is not None:
                return found
    return None


def decorators(it: Interpreter, state: State, func: Func) -> frozenset[str]:
    """The names of a function's decorators, as far as they are outside names."""
    values = it.decorator_values.get(func.function, ())
    return frozenset(value.name.removeprefix("builtins.") for value in values if isinstance(value, External))


def property_value(it: Interpreter, state: State, func: Func, receiver: Value, name: str) -> Value:
    """A property: what its single return says, else an unknown value that stays the same."""
    body = func.module.body(func.function).code
    if is_choice(body) and func.function.params:
        return chosen_property(it, state, func, receiver, name, body)
    if returns_at_once(body) and func.function.params:
        return inside(it, state, func, receiver, lambda: evaluate(it, state, body[-1].value))  # type: ignore[union-attr]
    return it.derived(("attr", receiver, name), f"{text_of(receiver)}.{name}", (receiver,))


def inside(it: Interpreter, state: State, func: Func, receiver: Value, run: Callable[[], Value]) -> Value:
    """What ``run`` gives in the scope of a property's function."""
    frame = it.new_frame(
        ("property", func.function, receiver, state.frame), FrameInfo(func.module, func.frame, func.function)
    )
    outer = state.frame
    state.frame = frame
    state.frames[frame] = {func.function.params[0].name: receiver}
    state.owned.discard(frame)
    value = run()
    state.frame = outer
    state.drop_frame(frame)
    return value


def chosen_property(
    it: Interpreter, state: State, func: Func, receiver: Value, name: str, body: list[p.Instr]
) -> Value:
    """``return A if test else B``: A or B where the test is decided, else a symbol that knows both."""
    choice = body[0]
    assert isinstance(choice, p.If)
    sides: list[Value] = []
    for block in (choice.then, choice.other):
        only = block.code[0]
        assert isinstance(only, p.Assign)
        expr = only.value
        sides.append(inside(it, state, func, receiver, lambda expr=expr: evaluate(it, state, expr)))  # type: ignore[misc]
    test = inside(it, state, func, receiver, lambda: evaluate(it, state, choice.test))
    decided = truth(state, test)
    if decided is not None:
        return sides[0] if decided else sides[1]
    value = it.derived(("attr", receiver, name), f"{text_of(receiver)}.{name}", (receiver,))
    cond = as_cond(test)
    if isinstance(value, Sym) and cond is not None:
        value.options = ((cond, sides[0]), (flip(cond), sides[1]))
    return value
