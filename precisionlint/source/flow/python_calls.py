"""What calls of Python's own functions give."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from precisionlint.source.flow.heap import NOTHING, instance
from precisionlint.source.flow.words import is_number
from precisionlint.valueflow import (
    BOOL,
    INT64,
    NUMBER,
    UNKNOWN,
    Dtypes,
    Value,
    constant,
    is_size,
    number,
    promote_values,
)

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

FLOAT32: Dtypes = frozenset({"float32"})


def builtin(frame: Frame, name: str, args: list[Value], node: ast.Call, options: Mapping[str, Value]) -> Value:
    match name:
        case "dict" if options:
            table = {key: value for key, value in options.items() if key}
            if args and args[0].op == "dict":
                table = {**args[0].ref, **table}
            return Value("dict", tuple(table.values()), at=frame.at(node), ref=table)
        case "enumerate" | "zip":
            return Value(name, tuple(args) if args or name == "zip" else (NOTHING,))  # enumerate(iterable=…)
        case "range":
            return Value("range")
        case "float" | "int" | "len" | "round":
            if name == "float" and args and isinstance(args[0].constant, str):
                try:
                    return constant(float(args[0].constant), frame.at(node))
                except ValueError:
                    return NOTHING
            if args and args[0].op == "constant" and is_number(args[0].constant):
                return constant(float(args[0].constant) if name == "float" else int(args[0].constant), frame.at(node))
            return Value("number", tuple(args), NUMBER, frame.at(node))
        case "str" if args:
            named = args[0].inputs if args[0].op == "constructed" and args[0].name == "torch.device" else args
            if not named or named[0].op == "constant":
                return named[0] if named else NOTHING
            return Value("view", (named[0],), named[0].dtypes, frame.at(node), "str")
        case "super":
            if frame.owner is not None and frame.owner.bases:
                base = frame.owner.bases[0]
                return instance(base.ref) if base.op == "class" else Value("builtin", name="super()")
        case "sum" | "max" | "min" | "abs" if args:
            terms = args[0].inputs if args[0].op == "tuple" else args
            dtypes = promote_values(terms)
            return frame.made({"sum": "running_sum", "abs": "abs"}.get(name, name), args, dtypes, node, name)
        case "list" | "tuple" | "sorted" | "reversed" | "iter" | "next" | "map" | "filter" if args:
            return args[-1]
        case "hasattr":
            return Value("test", tuple(args), BOOL, frame.at(node), name)
        case "getattr" if len(args) >= 2 and args[1].op == "constant" and isinstance(args[1].constant, str):
            return frame.attribute_of(args[0], args[1].constant, node)
    return NOTHING


def held(frame: Frame, node: ast.expr, spread: Value, given: Mapping[str, Value]) -> dict[str, Value]:
    """The arguments that ``**spread`` is seen to hand on, where the call does not give them by itself: those of a table that is written
    there, or by the name of one that nothing else is done with."""
    if spread.op != "dict" or not (isinstance(node, (ast.Dict, ast.Call)) or is_handed_on(frame, node)):
        return {}
    return {key: value for key, value in spread.ref.items() if isinstance(key, str) and key not in given}


def is_handed_on(frame: Frame, node: ast.expr) -> bool:
    """Whether an expression is a variable that its function, or its file, only hands on."""
    if not isinstance(node, ast.Name):
        return False
    return (frame.function is not None and node.id in frame.function.spread) or node.id in frame.source.spread


def folded_math(name: str, args: list[Value]) -> Value | None:
    """The number that a function of ``math`` gives for one that is known."""
    given = number(args[0]) if len(args) == 1 else None
    if given is None or name not in ("sqrt", "log", "exp", "log2"):
        return None
    try:
        return constant(getattr(math, name)(given))
    except (ValueError, OverflowError):
        return None


def dtypes_of_numbers(held: Value | None) -> Dtypes:
    """The dtypes of a tensor that is made of Python numbers; what else it is made of may have any."""
    if held is None:
        return UNKNOWN
    if type(held.constant) is int or held.op == "size" or is_size(held):
        return INT64
    of_floats = held.op == "tuple" and all(type(each.constant) is float for each in held.inputs)
    return FLOAT32 if of_floats or held.op in ("constant", "number") else UNKNOWN
