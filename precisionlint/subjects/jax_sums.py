"""Where the bodies of JAX loops add to what they carry: an array, or each leaf of a tree."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from precisionlint.source.parsing import walk
from precisionlint.subjects.names import Names

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
TREE_MAPS = (
    "jax.tree.map",
    "jax.tree_map",
    "jax.tree_util.tree_map",
    "jax.tree_multimap",
    "jax.tree_util.tree_multimap",
)
FOLDS = {"fold_left": (0, 1), "foldl": (0, 1), "reduce": (0, 2)}
"""Functions that run a body over several inputs, as a program or functools has them -> where they take the body, and what it begins with."""
TREE_ADDS = ("optax.tree_utils.tree_add", "optax.tree.add", "optax.tree_add")


def added_to(
    function: Function, name: str, position: int | None, scan: bool, names: Names, adders: Mapping[str, Function]
) -> ast.expr | ast.stmt | None:
    """Where a body adds to a part of what it carries and hands the sum on as that part; a state that is worked on further is no sum."""
    returned: list[ast.expr | None] = [function.body] if isinstance(function, ast.Lambda) else []
    inner = [] if isinstance(function, ast.Lambda) else walk(function)
    returned += [node.value for node in inner if isinstance(node, ast.Return)]
    for value in returned:
        if scan:
            value = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else None
        if position is not None:
            value = value.elts[position] if isinstance(value, ast.Tuple) and len(value.elts) > position else None
        if value is None:
            continue
        if adds(value, name, names, adders):
            return value
        if isinstance(value, ast.Name):
            for node in inner:
                if (
                    isinstance(node, ast.Assign)
                    and named(node.targets[0]) == value.id
                    and adds(node.value, name, names, adders)
                ):
                    return node
                if (
                    isinstance(node, ast.AugAssign)
                    and isinstance(node.op, ast.Add)
                    and named(node.target) == name == value.id
                ):
                    return node
    return None


def adds(node: ast.expr, name: str, names: Names, adders: Mapping[str, Function]) -> bool:
    """``name + something``, or the other way round, or that for each leaf of a tree; ``adders``: the functions that may do that."""
    if isinstance(node, ast.Call):
        return _adds_trees(node, name, names, adders)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return any(isinstance(each, ast.Name) and each.id == name for each in (node.left, node.right))


def _adds_trees(call: ast.Call, name: str, names: Names, adders: Mapping[str, Function]) -> bool:
    """``tree_map(jnp.add, name, other)``, ``tree_map(lambda a, b: a + b, name, other)``, or with a function of the file's that does so."""
    trees = [each.id if isinstance(each, ast.Name) else "" for each in call.args]
    if names.of(call.func) in TREE_ADDS:
        return name in trees
    if names.of(call.func) not in TREE_MAPS or name not in trees[1:]:
        return False
    function = call.args[0]
    if isinstance(function, ast.Lambda):
        parameters = [each.arg for each in function.args.args]
        return len(parameters) == len(trees) - 1 and adds(
            function.body, parameters[trees.index(name) - 1], names, adders
        )
    own = adders.get(function.id) if isinstance(function, ast.Name) else None
    if own is not None:
        parameters = [each.arg for each in own.args.args]
        same = len(parameters) == len(trees) - 1
        return same and added_to(own, parameters[trees.index(name) - 1], None, False, names, {}) is not None
    return names.of(function) in ("jax.numpy.add", "operator.add")


def is_at(node: ast.expr) -> bool:
    """``array.at[…]``"""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "at"


def named(node: ast.expr) -> str:
    """The name under a subscript: ``ref`` of ``ref[...]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def parts_of(function: Function, parameter: str) -> list[str]:
    """The names of the parts of what a body carries: the parameter itself, or what it is taken apart into."""
    for node in walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == parameter:
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and all(isinstance(each, ast.Name) for each in target.elts):
                return [each.id for each in target.elts if isinstance(each, ast.Name)]
    return [parameter]
