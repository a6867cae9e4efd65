"""The branches around a place in a Python file, for what is read as it is written: the tests that must come out one way for it to run, and
what the file itself, or an assumption, decides of them.

A name decides only where the file sets it once, to a constant: at its top level, or in the function that asks.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import Struct

from precisionlint.findings import Place
from precisionlint.recipes import UNKNOWN
from precisionlint.source.parsing import DEFINITIONS, LEAVES, FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.names import last_name, spelled
from precisionlint.subjects.stated import defaults
from precisionlint.subjects.tree import constant

RUNS_TEXT = frozenset({"exec", "globals"})
"""What may set any name of a module."""
OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Lt: ">=",
    ast.LtE: ">", ast.Gt: "<=", ast.GtE: "<",
}  # fmt: skip


class Branch(Struct, frozen=True):
    """A test, how it must come out, and the functions around it from without."""

    test: ast.expr
    truth: bool
    within: tuple[FunctionDef, ...] = ()


class Way(Struct, frozen=True):
    """What the way to a place hangs on, in words; ``closed``: it is never taken."""

    when: tuple[str, ...] = ()
    closed: bool = False


def way(file: File, place: Place, assumed: Mapping[str, Any]) -> Way:
    """The way to a place of the file.

    Raises: UnreadableError.
    """
    when: list[str] = []
    for branch in around(file, place):
        decided = truth(file, branch.test, branch.within, assumed)
        if decided is not None and decided != branch.truth:
            return Way(closed=True)
        when += words(branch.test, branch.truth) if decided is None else ()
    return Way(tuple(dict.fromkeys(when)))


def around(file: File, place: Place) -> Iterator[Branch]:
    """The branches on the way to a place, from without."""
    node: ast.AST | None = file.syntax
    within: tuple[FunctionDef, ...] = ()
    while node is not None:
        if isinstance(node, FunctionDef):
            within = (*within, node)
        inner = next((each for each in ast.iter_child_nodes(node) if holds(file, each, place)), None)
        if inner is not None:
            yield from (Branch(test, truth, within) for test, truth in between(node, inner))
        node = inner


def enclosing(file: File, node: ast.expr | ast.stmt) -> tuple[FunctionDef, ...]:
    """The functions around a node, from without."""
    around = [each for each in file.functions if each.lineno <= node.lineno <= (each.end_lineno or each.lineno)]
    return tuple(sorted(around, key=lambda each: each.lineno))


def holds(file: File, node: ast.AST, place: Place) -> bool:
    """Whether a place begins within a node."""
    if not isinstance(node, (ast.stmt, ast.expr, ast.keyword, ast.excepthandler)):
        return any(holds(file, each, place) for each in ast.iter_child_nodes(node))  # an item of a with, arguments
    if not node.lineno <= place.line <= (node.end_lineno or node.lineno):
        return False
    first = file.column(node.lineno, node.col_offset)
    last = file.column(node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, first) <= (place.line, place.column) < (node.end_lineno or node.lineno, last)


def between(node: ast.AST, inner: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
    """The tests that stand between a node and one of its own."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)) and inner is not node.test:
        body = node.body if isinstance(node.body, list) else [node.body]
        if inner in body or isinstance(node, ast.If | ast.IfExp):
            yield node.test, inner in body
    elif isinstance(node, ast.BoolOp):
        for value in node.values[: node.values.index(inner)] if isinstance(inner, ast.expr) else ():
            yield value, isinstance(node.op, ast.And)
    for block in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
        if isinstance(block, list) and inner in block:
            for before in block[: block.index(inner)]:
                if isinstance(before, ast.If) and isinstance(before.body[-1], LEAVES) and not before.orelse:
                    yield before.test, False


def truth(file: File, test: ast.expr, within: tuple[FunctionDef, ...], assumed: Mapping[str, Any]) -> bool | None:
    """Whether a test is true, where the file or an assumption decides it."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(file, test.operand, within, assumed)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        sides = [truth(file, each, within, assumed) for each in test.values]
        decisive = isinstance(test.op, ast.Or)
        return decisive if decisive in sides else None if None in sides else not decisive
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return compared(
            test.ops[0],
            value(file, test.left, within, assumed),
            value(file, test.comparators[0], within, assumed),
        )
    held = value(file, test, within, assumed)
    return None if held is UNKNOWN else bool(held)


def compared(op: ast.cmpop, left: Any, right: Any) -> bool | None:
    if left is UNKNOWN or right is UNKNOWN:
        return None
    match op:
        case ast.Eq() | ast.Is():
            return bool(left == right)
        case ast.NotEq() | ast.IsNot():
            return bool(left != right)
        case ast.In() | ast.NotIn() if isinstance(right, tuple):
            return (left in right) == isinstance(op, ast.In)
    return None


def value(file: File, node: ast.expr, within: tuple[FunctionDef, ...], assumed: Mapping[str, Any]) -> Any:
    """What an expression is, ``UNKNOWN`` where neither the file nor an assumption says."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        items = tuple(value(file, each, within, assumed) for each in node.elts)
        return UNKNOWN if UNKNOWN in items else items
    if isinstance(node, (ast.Name, ast.Attribute)):
        dotted = spelled(node)
        for name, meant in assumed.items():
            if name == last_name(node) or (not name.isidentifier() and f".{dotted}".endswith(f".{name}")):
                return meant
    if isinstance(node, ast.Name):
        held = set_once(file, node.id, within)
        return UNKNOWN if held is None else constant(held)
    return constant(node)


def set_once(file: File, name: str, within: tuple[FunctionDef, ...]) -> ast.expr | None:
    """What a name is set to, in the innermost of these functions that has it or at the top level of the file; None where that is done in
    several places, in a branch, by a caller, or by text that is run."""
    scope = next((each for each in reversed(within) if sets(each, name)), None)
    if scope is not None:
        return None if name in defaults(scope) else only(walk(scope), scope.body, name)
    if file.called & RUNS_TEXT or any(name in node.names for node in file.every(ast.Global)):
        return None
    return only(outside(file.syntax), file.syntax.body, name)


def sets(function: FunctionDef, name: str) -> bool:
    """Whether a name is the function's own."""
    given = function.args
    rest = [each.arg for each in (given.vararg, given.kwarg) if each is not None]
    return name in defaults(function) or name in rest or any(binds(node, name) for node in walk(function))


def only(nodes: Iterable[ast.AST], body: list[ast.stmt], name: str) -> ast.expr | None:
    """What a name is set to by a statement of the body itself, if nothing else among these nodes, which hold the body, sets it."""
    places = [node for node in nodes if binds(node, name)]
    for each in body if len(places) == 1 else ():
        targets = (
            each.targets if isinstance(each, ast.Assign) else [each.target] if isinstance(each, ast.AnnAssign) else []
        )
        if places[0] in targets:
            assert isinstance(each, (ast.Assign, ast.AnnAssign))
            return each.value
    return None


def outside(module: ast.Module) -> Iterator[ast.AST]:
    """The nodes of a module that run where it is imported: not those within its functions."""
    todo: list[ast.AST] = [module]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*DEFINITIONS, ast.Lambda)):
            todo.extend(ast.iter_child_nodes(node))


def binds(node: ast.AST, name: str) -> bool:
    """Whether a node gives a name a value."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        given = [(each.asname or each.name).partition(".")[0] for each in node.names]
        return name in given or "*" in given
    return isinstance(node, DEFINITIONS) and node.name == name


def words(test: ast.expr, truth: bool) -> list[str]:
    """What holds where a test comes out one way, each part of it by itself."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return words(test.operand, not truth)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is truth:
        return [word for each in test.values for word in words(each, truth)]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and not truth:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        return [f"{left} {OPPOSITE[type(test.ops[0])]} {right}"]
    return [ast.unparse(test) if truth else f"not {ast.unparse(test)}"]
