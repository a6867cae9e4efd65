"""What things are by how a text uses them, whatever it calls them."""

from __future__ import annotations

import ast
import re

from precisionlint.patterns import regex
from precisionlint.source.parsing import DEFINITIONS, walk
from precisionlint.subjects.names import last_name

SCALER_USE = regex(r"\.unscale_\(|\.scale\([^\n]*\)\.backward\(")
MODEL_USE = regex(r"\.(?:named_parameters|parameters|train|eval|load_state_dict)\(")
CAST_IN_PLACE = regex(r"\.(?:float|half|bfloat16)\(\)[ \t]*$", re.M)
"""What ends a statement that only casts: done for its effect, that is done to a module."""
LAST_WORD = regex(r"\w+\Z")
LONGEST_NAME = 100


def scalers_used(text: str) -> set[str]:
    """The names of what is used as only a scaler is."""
    return names_before(SCALER_USE, text)


def models_used(text: str) -> set[str]:
    """The names of what is used as a module is, or cast in place as one."""
    return names_before(MODEL_USE, text) | modules_cast(text)


def names_before(use: re.Pattern[str], text: str) -> set[str]:
    """The names that a use of a method follows: a pattern that begins with the name itself would be tried at every word."""
    before = (LAST_WORD.search(text, max(0, at.start() - LONGEST_NAME), at.start()) for at in use.finditer(text))
    return {word[0] for word in before if word is not None}


def modules_cast(text: str) -> set[str]:
    """The names of parts that a statement of its own casts: ``model.head.float()``, whose result nothing takes."""
    found = set()
    for at in CAST_IN_PLACE.finditer(text):
        start = text.rfind("\n", 0, at.start()) + 1
        path = text[start : at.start()].strip().split(".")
        if len(path) > 1 and all(map(str.isidentifier, path)) and text[:start].rstrip()[-1:] not in set("([{,=+-*/\\|"):
            found.add(path[-1])
    return found


def scales_compared(tree: ast.Module) -> frozenset[tuple[int, int]]:
    """The calls of ``get_scale()`` whose results are compared with one another, by line and column: so a program learns whether a step
    was skipped between them."""
    found: set[tuple[int, int]] = set()
    for scope in [tree, *(node for node in walk(tree) if isinstance(node, DEFINITIONS))]:
        held: dict[str, set[tuple[int, int]]] = {}
        for node in walk(scope):
            if isinstance(node, ast.Assign) and (read := scale_read(node.value)):
                for target in node.targets:
                    held.setdefault(ast.unparse(target), set()).update(read)
        for node in walk(scope):
            if isinstance(node, ast.Compare):
                sides = [
                    scale_read(each) or held.get(ast.unparse(each), set()) for each in (node.left, *node.comparators)
                ]
                found |= set().union(*sides) if all(sides) else set()
    return frozenset(found)


def scalers_idle(tree: ast.Module) -> frozenset[tuple[int, int]]:
    """The calls, by line and column, whose result the file keeps by a name under which it is never used again, but for what a scaler says
    of itself and for its state."""
    nodes = walk(tree)
    kept = {
        (node.value.lineno, node.value.col_offset): last_name(node.targets[0])
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and len(node.targets) == 1
    }
    told = {id(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in OF_ITSELF}
    used = {
        last_name(node)
        for node in nodes
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load) and id(node) not in told
    }
    return frozenset(place for place, name in kept.items() if name and name not in used)


OF_ITSELF = frozenset({"state_dict", "load_state_dict", "get_scale", "is_enabled"})
"""The methods of a scaler that do nothing to a loss or its gradients."""


def scale_read(node: ast.expr) -> set[tuple[int, int]]:
    """The place of ``scaler.get_scale()``."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get_scale"
    return {(node.lineno, node.col_offset)} if called else set()
