"""Dicts of Python source as they are once a program has filled them in: ``config["fp16"] = …``, ``update``, ``setdefault``.

Followed from the statement that makes a dict through the ones after it in the same block. What an ``if`` adds is one dict of its own: its
branches exclude each other, and what two of them say never stands together.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from precisionlint.source.parsing import BLOCKS
from precisionlint.subjects.names import last_name, spelled


def grown(nodes: list[ast.AST]) -> dict[ast.expr, list[ast.Dict]]:
    """The expressions of a file that make a dict to which something is added -> what it is then, one for each way."""
    found = {}
    for node in nodes:
        for name in BLOCKS.get(type(node), ("body",) if isinstance(node, ast.Module) else ()):
            block = [each for each in getattr(node, name) if isinstance(each, ast.stmt)]
            for index, statement in enumerate(block):
                made = literal(statement.value) if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
                target = target_of(statement)
                if made is not None and target and (ways := filled(made, target, block[index + 1 :])):
                    assert isinstance(statement, (ast.Assign, ast.AnnAssign))
                    assert statement.value is not None
                    found[statement.value] = ways
    return found


def filled(made: ast.Dict, name: str, later: list[ast.stmt]) -> list[ast.Dict]:
    """A dict with what the statements after it add; none where they add nothing."""
    whole, ways = made, []
    for statement in later:
        if target_of(statement) == name:
            break
        whole = added(whole, name, statement)
        if isinstance(statement, ast.If):
            for body in (statement.body, statement.orelse):
                way = whole
                for each in body:
                    way = added(way, name, each)
                ways += [way] if way is not whole else []
    return [whole, *ways] if whole is not made or ways else []


def added(table: ast.Dict, name: str, statement: ast.stmt) -> ast.Dict:
    """A dict after one statement, the very same where that adds nothing to it."""
    match statement:
        case ast.Assign([ast.Subscript() as target], value):
            keys = keys_of(target, name)
            return put(table, keys, value, statement) if keys else table
        case ast.AugAssign(target, ast.BitOr(), value) if spelled(target) == name:
            return merged(table, literal(value))
        case ast.Expr(ast.Call(ast.Attribute(of, "update"), handed, keywords)) if spelled(of) == name:
            for each in handed:
                table = merged(table, literal(each))
            return merged(table, of_keywords(keywords, statement))
        case ast.Expr(ast.Call(ast.Attribute(of, "setdefault"), [ast.Constant(str(key)), value])) if (
            spelled(of) == name
        ):
            return table if key in dict(entries(table)) else put(table, [key], value, statement)
    return table


def put(table: ast.Dict, keys: list[str], value: ast.expr, at: ast.AST) -> ast.Dict:
    """A dict with a value under some keys, one in the other."""
    first, *others = keys
    if others:
        inner = dict(entries(table)).get(first)
        below = literal(inner) if inner is not None else ast.copy_location(ast.Dict([], []), value)
        if below is None:
            return table
        value = put(below, others, value, at)
    key = ast.copy_location(ast.Constant(first), at)
    return merged(table, ast.copy_location(ast.Dict([key], [literal(value) or value]), value))


def merged(table: ast.Dict, other: ast.Dict | None) -> ast.Dict:
    """A dict with the entries of another, where that is known; these stand last, as the ones that count."""
    if other is None or not other.keys:
        return table
    return ast.copy_location(ast.Dict([*table.keys, *other.keys], [*table.values, *other.values]), table)


def literal(node: ast.expr | None) -> ast.Dict | None:
    """A dict that is written out, ``dict(…)`` as well; None for anything else."""
    if isinstance(node, ast.Dict):
        return node
    if isinstance(node, ast.Call) and last_name(node.func) == "dict" and not node.args:
        return of_keywords(node.keywords, node)
    return None


def of_keywords(keywords: list[ast.keyword], at: ast.AST) -> ast.Dict:
    keys: list[ast.expr | None] = []
    for each in keywords:
        keys.append(ast.copy_location(ast.Constant(each.arg), each) if each.arg else None)
    return ast.copy_location(ast.Dict(keys, [literal(each.value) or each.value for each in keywords]), at)


def entries(table: ast.Dict) -> Iterator[tuple[str, ast.expr]]:
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value, value


def keys_of(target: ast.expr, name: str) -> list[str]:
    """The keys under which ``name["a"]["b"]`` stands; none for anything else."""
    keys: list[str] = []
    while isinstance(target, ast.Subscript):
        if not (isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str)):
            return []
        keys.insert(0, target.slice.value)
        target = target.value
    return keys if spelled(target) == name else []


def target_of(statement: ast.stmt) -> str:
    """The name that a statement sets anew."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        return spelled(statement.targets[0])
    return spelled(statement.target) if isinstance(statement, ast.AnnAssign) else ""
