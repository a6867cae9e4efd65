"""What stands in a program as it is written, whichever way it is run: a backward in the block of an autocast, a region that is made and
never entered.

Paths are not followed here, and what a program may decide is not weighed: what the timeline shows of the same line is surer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Literal

from precisionlint.facts import EnclosedBackward, UnenteredRegion
from precisionlint.patterns import regex
from precisionlint.source.parsing import FunctionDef
from precisionlint.subjects import File

ENGINE = regex(r"accelerator|fabric", re.I)
NAMED = regex(r"auto_?cast|(?:^|_)amp(?:_|$)|mixed_precision")
"""What a context is called that a caller, or a method, makes an autocast."""
MANAGERS = frozenset(
    {"no_grad", "inference_mode", "enable_grad", "set_grad_enabled", "nullcontext", "no_sync", "device", "stream"}
)
"""What else makes a context manager, which is true in a test."""
NAMED_OFF = regex(r"no_|dis|off|without|null|fp32|float32|full|fp8|suspend")


def read(file: File) -> Iterator[EnclosedBackward | UnenteredRegion]:
    """The facts of a file."""
    names = imported(file)
    yield from unentered(file, names)
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
    function = context.func if isinstance(context, ast.Call) else context
    if not isinstance(function, ast.Name | ast.Attribute):
        return ""
    words = ast.unparse(function)
    region = is_autocast(words, names) or is_named(words)
    if isinstance(context, ast.Call):
        if is_off(context):
            return ""
        words += "(…)"
    return words if region else ""


def is_autocast(words: str, names: frozenset[str]) -> bool:
    """Whether what a program calls by these words is torch's autocast, or that of an engine."""
    owner, _, last = words.rpartition(".")
    engine = owner.startswith("torch") or owner == "amp" or ENGINE.search(owner) is not None
    return words in names or (last == "autocast" and engine)


def is_named(words: str) -> bool:
    """Whether what a program calls by these words is an autocast that it was handed, or made, by its name."""
    last = words.rpartition(".")[2]
    return NAMED.search(last) is not None and NAMED_OFF.search(last) is None and last != "autocast"


def unentered(file: File, names: frozenset[str]) -> Iterator[UnenteredRegion]:
    """The regions that are made and never entered: of managers that ``and`` or ``or`` joins one alone is, of a statement none."""
    for node in file.every(ast.With):
        for item in node.items:
            if isinstance(item.context_expr, ast.BoolOp):
                yield from unentered_of(file, item.context_expr, names)
    for statement in file.every(ast.Expr):
        made = statement.value
        if isinstance(made, ast.Call) and is_autocast(ast.unparse(made.func), names):
            yield UnenteredRegion(file.place(made), (), briefly(made), is_off(made))


def unentered_of(file: File, joined: ast.BoolOp, names: frozenset[str]) -> Iterator[UnenteredRegion]:
    """Managers are true, all of them: ``and`` gives the last one, ``or`` the first. What may be anything else is let be."""
    ends = isinstance(joined.op, ast.And)
    kept = joined.values[-1 if ends else 0]
    managers = [each for each in joined.values if isinstance(each, ast.Call) and is_manager(each, names)]
    if len(managers) < len(joined.values) - ends or not isinstance(kept, ast.Call):
        return
    for made in managers:
        if made is not kept and is_region(made, names):
            word: Literal["and", "or"] = "and" if ends else "or"
            yield UnenteredRegion(
                file.place(made), (), briefly(made), is_off(made), word, briefly(kept), file.place(kept)
            )


def is_region(call: ast.Call, names: frozenset[str]) -> bool:
    words = ast.unparse(call.func)
    return is_autocast(words, names) or is_named(words)


def is_manager(call: ast.Call, names: frozenset[str]) -> bool:
    return is_region(call, names) or ast.unparse(call.func).rpartition(".")[2] in MANAGERS


def briefly(call: ast.Call) -> str:
    """A call in the program's words, short."""
    return f"{ast.unparse(call.func)}({'…' if call.args or call.keywords else ''})"


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
