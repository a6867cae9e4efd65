"""What stands in a program as it is written, whichever way it is run: a backward in the block of an autocast, and a checkpoint with an
optimizer's state and no scaler's in a file that scales.

Paths are not followed here, and what a program may decide is not weighed: what the timeline shows of the same line is surer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from precisionlint.facts import EnclosedBackward, UnsavedScaler
from precisionlint.source.parsing import walk
from precisionlint.subjects import File

ENGINE = re.compile(r"accelerator|fabric", re.I)
OPTIMIZER = re.compile(r"optim|(?:^|[._])opt(?:$|_)", re.I)
SCALES = re.compile(r"GradScaler\(")
KEEPS = re.compile(
    r"scal\w*(?:\[[^\]]*\])?\.state_dict\(|['\"](?:\w*scaler\w*|amp)['\"]\s*[:\]]|save_state\(|scaler_state|add_checkpointable|amp\.state_dict"
    r"|torch\.save\(\w*scaler|enabled\s*=\s*False"
)
"""What saves a scaler's state, by whatever name, or says that there is none."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def read(file: File) -> Iterator[EnclosedBackward | UnsavedScaler]:
    """The facts of a file."""
    if any(isinstance(node, ast.With) for node in file.nodes) and "backward(" in file.text:
        names = imported(file)
        for node in file.nodes:
            if isinstance(node, ast.With):
                region = next((words for item in node.items if (words := entered(item.context_expr, names))), "")
                if region:
                    for call in enclosed(node.body):
                        yield EnclosedBackward(file.place(call), (), region, file.place(node.items[0].context_expr))
    if SCALES.search(file.text) and "backward(" in file.text and not KEEPS.search(file.text):
        for function in file.nodes:
            if isinstance(function, FUNCTIONS):
                for call in saves(function):
                    yield UnsavedScaler(file.place(call), ())


def imported(file: File) -> frozenset[str]:
    """The names by which a file calls torch's autocast."""
    return frozenset(
        each.asname or each.name
        for node in file.nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for each in node.names
        if each.name == "autocast"
    )


def entered(context: ast.expr, names: frozenset[str]) -> str:
    """An autocast that a ``with`` enters, in the program's words; "" where it enters none, or one that is off."""
    if isinstance(context, ast.IfExp):
        return entered(context.body, names) or entered(context.orelse, names)
    if not isinstance(context, ast.Call):
        return ""
    words = ast.unparse(context.func)
    owner, _, last = words.rpartition(".")
    known = words in names or (
        last == "autocast" and (owner.startswith("torch") or owner == "amp" or ENGINE.search(owner))
    )
    return f"{words}(…)" if known and not is_off(context) else ""


def is_off(call: ast.Call) -> bool:
    values = [each.value for each in call.keywords if each.arg == "enabled"] + call.args[:1]
    return any(isinstance(value, ast.Constant) and value.value is False for value in values)


def enclosed(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """The calls of backward in a block: not in what it only defines, in a loop of its own (the region is around the training then), or where
    a block within turns autocast off."""
    todo: list[ast.AST] = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef, ast.For, ast.While)):
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


def saves(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.Call]:
    """The calls of ``torch.save`` in a function that write an optimizer's state, the first for each name by which it is written."""
    nodes = walk(function)
    holding = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and holds(node.value)
        for target in node.targets
        for target in [target.value if isinstance(target, ast.Subscript) else target]
        if isinstance(target, ast.Name)
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.save")]
    told: set[str] = set()
    for call in sorted(calls, key=lambda each: each.lineno):
        given = call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == "obj"), None)
        name = given.id if isinstance(given, ast.Name) else ""
        if given is not None and (holds(given) or name in holding - told):
            told.add(name)
            yield call


def holds(value: ast.expr) -> bool:
    """Whether an expression takes an optimizer's state."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "state_dict"
        and OPTIMIZER.search(ast.unparse(node.func.value)) is not None
        for node in walk(value)
    )
