"""Optimizers that a program writes itself: the dtype of their second moment, and of the arithmetic with it.

Read where it stands, by the names that Adam's descendants give it. What makes up for the rounding (a compensation, stochastic
rounding, fp32 masters) is left alone, and so is a moment that is cast to fp32 where it is used.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precisionlint.facts import Moment
from precisionlint.recipes import HALVES
from precisionlint.subjects import File
from precisionlint.subjects.tree import constant

SECOND = re.compile(r"(?<!max_)(?:exp_avg_sq|square_avg|second_moment)|(?:^|_)variance$|^nu$")
"""What the running average of squared gradients is called."""
MADE = ("zeros_like", "zeros", "empty_like", "empty", "full_like", "full", "new_zeros", "clone")
CAREFUL = re.compile(r"kahan|compensat|stochastic|master|error_feedback|residual|round", re.I)
WIDE = re.compile(r"\.float\(\)|\.double\(\)|float32|float64|fp32|\.to\(\s*dtype\s*=|promote")


def read(file: File) -> Iterator[Moment]:
    """The second moments of a file's optimizers, in its order."""
    for node in file.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not _is_outer(node):
            text = "\n".join(file.lines[node.lineno - 1 : node.end_lineno])
            if not SECOND.search(text) or CAREFUL.search(_around(file, node)):
                continue
            own = [each for each in ast.walk(node) if isinstance(each, (ast.Assign, ast.Call))]
            for each in own:
                if (
                    isinstance(each, ast.Assign)
                    and isinstance(each.targets[0], ast.Subscript)
                    and _second(each.targets[0])
                ):
                    half = _made_in_half(each.value)
                    if half:
                        yield Moment(file.place(each), (), _words(each.targets[0]), half)
            if not WIDE.search(text):
                yield from _averages(file, own)


def _is_outer(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function holds others, each of which is read by itself."""
    return any(isinstance(each, ast.FunctionDef) for each in ast.walk(function) if each is not function)


def _around(file: File, function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The text of the class that a function is part of, or of the function."""
    classes = [each for each in file.nodes if isinstance(each, ast.ClassDef) and function in each.body]
    outer: ast.stmt = classes[0] if classes else function
    return "\n".join(file.lines[outer.lineno - 1 : outer.end_lineno])


def _averages(file: File, own: list[ast.Assign | ast.Call]) -> Iterator[Moment]:
    """``v.lerp(g.square(), 1 - beta)``, ``v.mul_(beta).addcmul_(g, g, …)``: in the dtype of ``v`` and ``g``."""
    for call in own:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        inner = call.func.value
        blended = call.func.attr in ("lerp", "lerp_") and _second(inner) and bool(call.args) and _square(call.args[0])
        summed = call.func.attr == "addcmul_" and isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute)
        if summed and isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute):
            summed = inner.func.attr == "mul_" and _second(inner.func.value)
        if blended or summed:
            holder = (
                inner.func.value if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else inner
            )
            yield Moment(file.place(call), (), _words(holder), "")


def _words(node: ast.expr) -> str:
    return ast.unparse(node)


def _second(node: ast.expr) -> bool:
    """Whether a target is the second moment: a variable, or an item of the state by its name."""
    if isinstance(node, ast.Subscript):
        key = constant(node.slice)
        return isinstance(key, str) and bool(SECOND.search(key))
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(SECOND.search(name))


def _square(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(attr="square" | "pow" | "conj")):
            return True
        case ast.BinOp(op=ast.Pow() | ast.Mult()):
            return True
    return False


def _made_in_half(value: ast.expr) -> str:
    """The half in which a tensor is made, by its ``dtype`` argument or a cast at the end."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return ""
    if value.func.attr in ("half", "bfloat16") and not value.args:
        return "fp16" if value.func.attr == "half" else "bf16"
    given = [keyword.value for keyword in value.keywords if keyword.arg == "dtype"]
    if value.func.attr == "to":
        given += value.args
    elif value.func.attr not in MADE:
        return ""
    halves = (HALVES.get(str(constant(each)), "") for each in given)
    return next((half for half in halves if half), "")
