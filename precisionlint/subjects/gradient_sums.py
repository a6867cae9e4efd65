"""Sums of gradients that a program keeps itself, over micro-batches or over pieces of one, in a dtype that it takes from elsewhere.

Read where they stand, by their spelling. What speaks of dtypes in the same function or class is left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from precisionlint.facts import GradientSum
from precisionlint.patterns import regex
from precisionlint.source.flow.words import TEST_PATH
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.names import last_name

ACCUMULATOR = regex(r"^Grad(?:ient)?s?Accum(?:ulator|ulation|ulate)?$")
KEPT = regex(
    r"^acc(?:um(?:ulated)?)?$|(?:accum\w*|acc|sum\w*|total)_*grads?|grads?(?:ient)?s?_*(?:accum\w*|acc|sums?|buf(?:fer)?s?)",
    re.I,
)
"""What sums of gradients are called."""
COUNTED = regex(r"step|iter|count|norm|num|sq")
AWARE = regex(r"\.float\(\)|\.double\(\)|float32|float64|fp32|\bdtype\b|kahan|stochastic")
SAME = ("data", "detach", "clone", "contiguous", "cpu", "cuda", "flatten")


def read(file: File) -> Iterator[GradientSum]:
    """The sums of gradients in a file, in its order."""
    if TEST_PATH.search(file.display):
        return
    for call in file.every(ast.Call):
        if ACCUMULATOR.search(last_name(call.func)):
            given = next((each.value for each in call.keywords if each.arg == "dtype"), None)
            if isinstance(given, ast.Attribute) and given.attr == "dtype":
                yield GradientSum(file.place(call), (), last_name(call.func), ast.unparse(given.value))
    adding: list[ast.AugAssign | ast.Call | ast.Assign] = [
        *file.every(ast.AugAssign),
        *file.every(ast.Call),
        *file.every(ast.Assign),
    ]
    zeroed = frozenset(name for function in file.functions for name in _zeroed(function))
    for node in adding:
        if name := _added(node, zeroed):
            scopes = (*file.every(ast.ClassDef), *file.functions)
            around = [each for each in scopes if each.lineno <= node.lineno <= (each.end_lineno or 0)]
            if not AWARE.search(file.code(min(around, key=lambda each: each.lineno, default=None))):
                yield GradientSum(file.place(node), (), name)


def _zeroed(function: FunctionDef) -> Iterator[str]:
    """What a function calls each of the tensors that it has made like the parameters of a model, in a loop over them:
    ``bufs = [torch.zeros_like(p) for p in model.parameters()]`` and ``for buf, p in zip(bufs, model.parameters())``; a moving average of
    them is another matter."""
    nodes = walk(function)
    decaying = {
        *(
            ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Attribute) and node.attr in ("mul_", "lerp_")
        ),
        *(
            ast.unparse(node.target)
            for node in nodes
            if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult)
        ),
    }
    lists = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.ListComp) and _like_parameters(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes if lists else ():
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.target, ast.Tuple):
            for given, target in zip(node.iter.args, node.target.elts, strict=False):
                known = isinstance(given, ast.Name) and given.id in lists
                if known and isinstance(target, ast.Name) and target.id not in decaying:
                    yield target.id


def _like_parameters(made: ast.ListComp) -> bool:
    call = made.elt
    return (
        isinstance(call, ast.Call)
        and last_name(call.func) == "zeros_like"
        and not any(each.arg == "dtype" for each in call.keywords)
        and "param" in ast.unparse(made.generators[0].iter)
    )


def _added(node: ast.AugAssign | ast.Call | ast.Assign, zeroed: Collection[str] = ()) -> str:
    """The name of a sum that ``.grad`` is added to, ``""`` for anything else. ``zeroed``: what holds sums besides."""
    match node:
        case ast.AugAssign(target, ast.Add(), value):
            pass
        case ast.Call(ast.Attribute(target, "add_"), [value, *_]):
            pass
        case ast.Assign([ast.Subscript() as target], ast.BinOp(before, ast.Add(), value)) if _stood(before, target):
            pass
        case _:
            return ""
    while isinstance(target, ast.Subscript):
        target = target.value
    name = last_name(target)
    kept = name in zeroed or (KEPT.search(name) and not COUNTED.search(name))
    return name if kept and _gradient(value) else ""


def _stood(before: ast.expr, target: ast.Subscript) -> bool:
    """Whether an entry is read that is set: ``sums[name]``, ``sums.get(name, 0)``."""
    match before:
        case ast.Call(ast.Attribute(table, "get"), [key, *_]):
            return ast.unparse(table) == ast.unparse(target.value) and ast.unparse(key) == ast.unparse(target.slice)
    return ast.unparse(before) == ast.unparse(target)


def _gradient(node: ast.expr) -> bool:
    """Whether this is ``.grad`` of something, or a share of it, in its own dtype."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        return _gradient(node.left) is not _gradient(node.right)
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func
        if not isinstance(node, ast.Attribute):
            return False
        if node.attr == "grad":
            return True
        if node.attr not in SAME:
            return False
        node = node.value
