"""Scalers whose state no checkpoint of a file holds, as the file is written: what the timeline shows of the same line is surer.

Whether another file saves it is not known.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from precisionlint.facts import UnsavedScaler
from precisionlint.patterns import regex
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.subjects import File

OPTIMIZER = regex(r"optim|(?:^|[._])opt(?:$|_)", re.I)
SCALER = regex(r"scal[ea]r|(?:^|[._])amp(?:$|_)", re.I)
SCALES = regex(r"GradScaler\(")
KEEPS = regex(
    r"scal\w*(?:\[[^\]]*\])?\.state_dict\(|['\"](?:\w*scaler\w*|amp)['\"]\s*[:\]]|save_state\(|scaler_state|add_checkpointable|amp\.state_dict"
    r"|torch\.save\(\w*scaler|regist\w*\(\s*['\"]\w*scaler|enabled\s*=\s*False"
)
"""What saves a scaler's state, by whatever name, or says that there is none."""
SAVER = regex(r"_*save_*(?:the_|a_|training_)?(?:checkpoint|ckpt|model|state|snapshot)\w*", re.I)
"""What a function is called that writes what it is handed."""
KEPT = regex(r"optim|hook|callback|scaler|plugin|precision", re.I)
"""What a class is called, or one that it is made from, whose state a trainer keeps."""
STEPS = regex(r"scal[ea]r\.(?:step|update)\(", re.I)


def read(file: File) -> Iterator[UnsavedScaler]:
    """The facts of a file."""
    if not SCALES.search(file.text) or KEEPS.search(file.text):
        return
    giving = {each.name for each in file.functions if gives(each)}
    for function in file.functions:
        for call in saves(function, giving):
            yield UnsavedScaler(file.place(call), (), "state")
    mine = {each.name for each in file.functions}
    for call in file.every(ast.Call):
        optimizer = handed(call, mine)
        if optimizer is not None:
            yield UnsavedScaler(file.place(optimizer), (), "handed")
    for owner in file.every(ast.ClassDef) if "torch.save(" not in file.text else ():
        made = owned(owner)
        if made is not None:
            yield UnsavedScaler(file.place(made), (), "owner")


def saves(function: FunctionDef, giving: Collection[str]) -> Iterator[ast.Call]:
    """The calls of ``torch.save`` in a function that write an optimizer's state, the first for each name by which it is written.
    ``giving``: the functions of the file that give one back."""
    nodes = walk(function)
    own = {name for node in nodes if (name := over_optimizers(node))}
    holding = {name for node in nodes for name, value in kept_by(node) if holds(value, giving, own)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.save")]
    told: set[str] = set()
    for call in sorted(calls, key=lambda each: each.lineno):
        given = call.args[0] if call.args else next((each.value for each in call.keywords if each.arg == "obj"), None)
        name = given.id if isinstance(given, ast.Name) else ""
        if given is not None and (holds(given, giving, own) or name in holding - told):
            told.add(name)
            yield call


def over_optimizers(node: ast.AST) -> str:
    """What a loop over optimizers calls each of them, where it does so by one name: ``for o in self.optimizers``."""
    if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
        return node.target.id if OPTIMIZER.search(ast.unparse(node.iter)) else ""
    return ""


def kept_by(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The names in which a statement keeps something, and what that is: by an assignment, or by ``state["optimizers"].append(…)``."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            inner = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(inner, ast.Name):
                yield inner.id, node.value
    elif (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append" and node.args
    ):
        table = node.func.value
        if isinstance(table, ast.Subscript) and isinstance(table.value, ast.Name):
            yield table.value.id, node.args[0]


def holds(value: ast.AST, giving: Collection[str] = (), own: Collection[str] = ()) -> bool:
    """Whether an expression takes an optimizer's state, by itself or through one of the functions that give one back. ``own``: what
    optimizers are called here besides."""
    for node in walk(value):
        if isinstance(node, ast.Call):
            owner, _, last = ast.unparse(node.func).rpartition(".")
            if last == "state_dict" and (OPTIMIZER.search(owner) or owner in own):
                return True
            if last in giving and owner in ("", "self"):
                return True
    return False


def gives(function: FunctionDef) -> bool:
    """Whether a function takes an optimizer's state and gives something back."""
    returns = any(isinstance(node, ast.Return) and node.value is not None for node in walk(function))
    return returns and holds(function)


def handed(call: ast.Call, mine: Collection[str]) -> ast.expr | None:
    """The optimizer that is handed to what writes a checkpoint, and is none of the file's own functions, if no scaler is."""
    last = ast.unparse(call.func).rpartition(".")[2]
    if last in mine or not SAVER.fullmatch(last) or any(each.arg is None for each in call.keywords):
        return None
    given = [*call.args, *(each.value for each in call.keywords)]
    words = [*map(ast.unparse, given), *(each.arg for each in call.keywords if each.arg is not None)]
    if any(map(SCALER.search, words)):
        return None
    named = (each for each in given if isinstance(each, (ast.Name, ast.Attribute)))
    return next((each for each in named if OPTIMIZER.search(ast.unparse(each))), None)


def owned(node: ast.ClassDef) -> ast.Call | None:
    """Where an optimizer, a hook or the like makes the scaler through which it steps, if nothing of it keeps the scaler's state."""
    methods = {each.name: each for each in node.body if isinstance(each, FunctionDef)}
    words = [node.name, *map(ast.unparse, node.bases)]
    if not any(map(KEPT.search, words)) and "load_state_dict" not in methods:
        return None
    text = ast.unparse(node)
    for each in walk(node):
        if not (isinstance(each, ast.Assign) and isinstance(each.value, ast.Call)):
            continue
        name = ast.unparse(each.targets[0])
        if name.startswith("self.") and ast.unparse(each.value.func).endswith("GradScaler") and STEPS.search(text):
            return each.value
    return None
