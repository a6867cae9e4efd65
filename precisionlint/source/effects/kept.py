"""What variables and attributes keep, by their names and by how they were set: numbers that are a loss scale, and half dtypes that only some
paths choose."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source import program as p
from precisionlint.source.objects import dtype_of, name_of
from precisionlint.source.state import State
from precisionlint.source.values import PLAIN, Const, Sym, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter

Holder = tuple[Any, str]
"""A frame or an object, and the name in it."""
HAND_SCALE = regex(r"^_*(?:cur_|lg_|current_)?loss_?scal(?:e|er|ing)(?:_factor)?$|^cur_scale$", re.I)
"""What a loss scale kept by hand is called; nothing else says of a plain number that it is one."""


def kept(it: Interpreter, state: State, holder: Holder, target: p.Expr, value: Value, at: Any) -> Value:
    """What a name keeps of a value that it is given: a number that is kept as the loss scale is that scale."""
    if half_of(value) and (state.control or (isinstance(at, ast.Assign) and chooses(it, at.value))):
        it.chosen[holder] = name_of(target)
    short = holder[1]
    if not HAND_SCALE.search(short) or short.endswith("er"):
        return value
    held = held_by(state, holder)
    scale = held if isinstance(held, Sym) and held.flow.factor == "scale" else None
    if scale is not None and isinstance(value, Sym) and value.flow.scaled == scale.flow.scaled:
        return scale  # raised or lowered: it is the scale still, of what comes next
    number = isinstance(value, Const) and value.kind in ("int", "float") and value.value != 1
    if number or (isinstance(value, Sym) and value.key[0] == "param" and value.flow == PLAIN):
        hand = it.intern(("hand", holder), short, PLAIN, frozenset(), ())
        if number:
            hand.default = value
        return hand
    return value


def chooses(it: Interpreter, value: ast.expr) -> bool:
    """Whether an expression gives one of several values: by a condition in it, or in the function that it calls."""
    return isinstance(value, ast.IfExp) or value in it.varied


def held_by(state: State, holder: Holder) -> Value | None:
    """What a name holds."""
    where, name = holder
    return (state.frames.get(where, {}) if isinstance(where, int) else state.heap.get(where, {})).get(name)


def half_of(value: Value | None) -> str:
    """``"fp16"`` or ``"bf16"`` where a value is such a dtype, or its name; else empty."""
    name = value.value if isinstance(value, Const) and isinstance(value.value, str) else dtype_of(value) or ""
    return HALVES.get(name, "")


def chosen_half(it: Interpreter, state: State, half: str) -> tuple[str, ...]:
    """The variable that holds this half dtype on this path and another on others, in words: ``dtype == 'float16'``."""
    for (where, short), name in it.chosen.items():
        value = held_by(state, (where, short))
        if value is not None and half_of(value) == half:
            written = repr(value.value) if isinstance(value, Const) else f"torch.{dtype_of(value)}"
            return (f"{name} == {written}",)
    return ()


def asked_for(it: Interpreter, state: State, instr: p.Call, dtype: str) -> tuple[str, ...]:
    """The same where a call is handed that variable: ``model.to(dtype)``."""
    decided = chosen_half(it, state, HALVES.get(dtype, "-"))
    given = (*instr.at.args, *(each.value for each in instr.at.keywords)) if isinstance(instr.at, ast.Call) else ()
    return tuple(label for label in decided if any(ast.unparse(each) == label.partition(" == ")[0] for each in given))
