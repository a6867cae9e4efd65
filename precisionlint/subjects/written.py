"""What stands in a program as it is written, whichever way it is run: a backward in the block of an autocast.

Paths are not followed here, and what a program may decide is not weighed: what the timeline shows of the same line is surer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precisionlint.facts import EnclosedBackward
from precisionlint.patterns import regex
from precisionlint.source.parsing import FunctionDef
from precisionlint.subjects import File

ENGINE = regex(r"accelerator|fabric", re.I)
NAMED = regex(r"auto_?cast|(?:^|_)amp(?:_|$)|mixed_precision")
"""What a context is called that a caller, or a method, makes an autocast."""
NAMED_OFF = regex(r"no_|dis|off|without|null|fp32|float32|full|fp8|suspend")


def read(file: File) -> Iterator[EnclosedBackward]:
    """The facts of a file."""
    names = imported(file)
    for node in file.every(ast.With):
        region = next((words for item in node.items if (words := entered(item.context_expr, names))), "")
        if region:
            for call in enclosed(node.body):
                yield EnclosedBackward(file.place(call), (), region, file.place(node.items[0].context_expr))


def imported(file: File) -> frozenset[str]:
    """The names by which a file calls torch's autocast."""
    return frozenset(
        each.asname or each.name
        for node in file.every(ast.ImportFrom)
        if (node.module or "").startswith("torch")
        for each in node.names
        if each.name == "autocast"
    )


def entered(context: ast.expr, names: frozenset[str]) -> str:
    """An autocast that a ``with`` enters, in the program's words; "" where it enters none, or one that is off."""
    if isinstance(context, ast.IfExp):
        return entered(context.body, names) or entered(context.orelse, names)
    called = context.func if isinstance(context, ast.Call) else context
    if not isinstance(called, ast.Name | ast.Attribute):
        return ""
    words = ast.unparse(called)
    owner, _, last = words.rpartition(".")
    known = words in names or (
        last == "autocast" and (owner.startswith("torch") or owner == "amp" or ENGINE.search(owner))
    )
    if isinstance(context, ast.Call):
        if is_off(context):
            return ""
        words += "(…)"
    handed = NAMED.search(last) and not NAMED_OFF.search(last) and last != "autocast"
    return words if known or handed else ""


def is_off(call: ast.Call) -> bool:
    """Whether a region is switched off where it is entered."""
    values = [each.value for each in call.keywords if each.arg == "enabled"] + call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def enclosed(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of backward in a block: not in what it only defines, in a loop of its own (the region is around the training then), or where
    a block within turns autocast off."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (FunctionDef, ast.Lambda, ast.ClassDef, ast.For, ast.While)):
            continue
        if isinstance(node, ast.With) and any(
            isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func).endswith("autocast")
            for item in node.items
        ):
            continue  # a region of its own
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "backward":
            assert isinstance(node, ast.Call)
            if ast.unparse(called.value) not in ("super()", "ctx"):
                yield node
        todo.extend(ast.iter_child_nodes(node))
