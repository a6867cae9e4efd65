"""Operators in one state: arithmetic on losses and scales, comparisons as conditions, and what is true."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint.events import Named
from precisionlint.patterns import regex
from precisionlint.source.blur import is_kept
from precisionlint.source.objects import is_container
from precisionlint.source.state import NOTHING, State, decide
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    TRUE,
    Class,
    Cond,
    Const,
    External,
    Flow,
    Func,
    ModuleRef,
    Obj,
    Partial,
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

FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b,
    "<": lambda a, b: a < b, "==": lambda a, b: a == b, "in": lambda a, b: a in b,
}  # fmt: skip


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
        return replace(left, flow=flow, divided=divisor(op, right))
    if isinstance(right, Tensors) and right.kind in ("grad", "param"):
        return replace(right, flow=flow)
    return it.derived(("op", op, left, right), f"{text_of(left)} {op} {text_of(right)}", (left, right), flow)


def factor(op: str, value: Value) -> Named | None:
    """The number above 1 that an operation with a constant multiplies by: its inverse for a division."""
    if not isinstance(value, Const) or value.kind not in ("int", "float") or op not in ("*", "/") or value.value <= 0:
        return None
    if not 1e-300 < value.value < 1e300:
        return None
    number = float(f"{value.value if op == '*' else 1 / value.value:.9g}")
    return Named(("number", number), f"{number:g}") if number > 1 else None


OPPOSITE = {"*": "/", "/": "*"}


def divisor(op: str, value: Value) -> Named | None:
    """The number above 1 by which an operation with a constant divides."""
    return factor(OPPOSITE.get(op, ""), value)


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


CLASS_NAME = regex(r"_*[A-Z]\w*[a-z]\w*$")


def is_made(sym: Sym) -> bool:
    """Whether a value that nobody knows is what a call of a class gave, by the name: an object, and never None."""
    node = sym.key[1] if sym.key[0] == "site" else None
    func = node.func if isinstance(node, ast.Call) else None
    name = func.attr if isinstance(func, ast.Attribute) else func.id if isinstance(func, ast.Name) else ""
    return CLASS_NAME.match(name) is not None


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
            return Cond(left, "none", None, True) if isinstance(left, Sym) and not is_made(left) else const(False)
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
    """``x in container``: decided where nothing is in it, where every item is a constant and x is one, or by what is known of x; the same
    each time for a setting of precision; else it may be either, each time. A registry, empty where its file makes it, is filled by others."""
    items = state.heap.get(container, {})
    known = (
        list(items)
        if isinstance(container, Obj) and container.cls == External("builtins.dict")
        else list(items.values())
    )
    if not items and not is_registry(it, state, container):
        return const(op == "not in")
    if "*" not in items and items and isinstance(left, Const):
        constants = [item.value if isinstance(item, Const) else item for item in known]
        return const((left.value in constants) == (op == "in"))
    texts = [const(item) if isinstance(item, str) else item for item in known]
    if "*" not in items and items and isinstance(left, Sym) and all(is_text(item) for item in texts):
        asked = compare(it, op, left, Tup(tuple(sorted(texts, key=repr))))
        if is_kept(left.text) or truth(state, asked) is not None:
            return asked
    return it.site(state, (container, op), f"{text_of(left)} {op} …", PLAIN, ())


def is_registry(it: Interpreter, state: State, container: Value) -> bool:
    """Whether a container was made at the top of a file or class, and a function asks what is in it."""
    if not isinstance(container, Obj) or it.frames[state.frame].function is None:
        return False
    frame = container.site[1]
    return isinstance(frame, int) and it.frames[frame].function is None


def is_text(value: Any) -> bool:
    return isinstance(value, Const) and isinstance(value.value, str)


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
    """The truth of ``a and b`` / ``a or b`` by that of its sides, of ``x in (texts)`` by what is known of x."""
    if sym.key[:2] == ("op", "in") and isinstance(sym.key[2], Sym) and isinstance(sym.key[3], Tup):
        left, texts = sym.key[2], sym.key[3].items
        if left in state.facts and all(is_text(text) for text in texts):
            each = {decide(state.facts[left], Cond(left, "eq", t, True)) for t in texts if isinstance(t, Const)}
            return True if True in each else None if None in each else False
    if sym.key[0] == "op" and sym.key[1] in ("and", "or"):
        sides = [truth(state, side) for side in sym.key[2:]]
        decisive: bool = sym.key[1] == "or"
        if decisive in sides:
            return decisive
        if None not in sides:
            return not decisive
    return None
