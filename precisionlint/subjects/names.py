"""What names of a Python file stand for, by its imports: ``jnp.einsum`` is ``jax.numpy.einsum``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precisionlint.subjects import File


class Names:
    """The imports of a file, at whatever depth they stand."""

    def __init__(self, file: File) -> None:
        self.imported: dict[str, str] = {}
        for node in file.every(ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                self.imported[alias.asname or name] = name
        for origin in file.every(ast.ImportFrom):
            if origin.module and not origin.level:
                for alias in origin.names:
                    self.imported[alias.asname or alias.name] = f"{origin.module}.{alias.name}"

    def of(self, node: ast.expr) -> str:
        """The dotted name of an expression, from the package on; nothing for anything else."""
        root, dot, rest = spelled(node).partition(".")
        return f"{self.imported.get(root, root)}{dot}{rest}"

    def has(self, *packages: str) -> bool:
        """Whether anything of one of these packages is imported."""
        return any(name.partition(".")[0] in packages for name in self.imported.values())


def spelled(node: ast.expr) -> str:
    """A name, or attributes of one, as they are written; nothing for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def last_name(node: ast.expr) -> str:
    """The last part of a dotted name, whatever it is an attribute of; nothing for anything else."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def argument(call: ast.Call, keyword: str, position: int | None = None) -> ast.expr | None:
    """An argument of a call, by its keyword or its position."""
    for each in call.keywords:
        if each.arg == keyword:
            return each.value
    if (
        position is None
        or len(call.args) <= position
        or any(isinstance(a, ast.Starred) for a in call.args[: position + 1])
    ):
        return None
    return call.args[position]
