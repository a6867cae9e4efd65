"""Configurations as one kind of tree, whatever they are written in: YAML, JSON (see ``yaml_trees``), or a dict of Python source; each part
knows its place.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from precisionlint.findings import Place
from precisionlint.recipes import UNKNOWN, Setting
from precisionlint.subjects import File


class Scalar(Struct, frozen=True, eq=False):
    """A string, number, bool, None, or ``UNKNOWN``."""

    value: Any
    at: Place


class Items(Struct, frozen=True, eq=False):
    """A list."""

    items: tuple[Node, ...]
    at: Place


class Entry(Struct, frozen=True, eq=False):
    """A key with its value; ``at`` spans both where they share a line, else the key."""

    key: str
    node: Node
    at: Place


class Table(Struct, frozen=True, eq=False):
    """A mapping: entry by key, the last one where a key stands twice. Python source and YAML may fill it from elsewhere: ``open``."""

    entries: dict[str, Entry]
    at: Place
    open: bool = False

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def table(self, key: str) -> Table | None:
        """The table under a key."""
        entry = self.entries.get(key)
        return entry.node if entry is not None and isinstance(entry.node, Table) else None

    def text(self, path: str) -> str:
        """The string under a path of keys, or nothing."""
        setting = self.setting(path)
        return setting.value if setting is not None and isinstance(setting.value, str) else ""

    def truth(self, path: str) -> bool:
        """Whether a switch is on."""
        setting = self.setting(path)
        return setting is not None and setting.value is True

    def filled(self, key: str) -> bool:
        """Whether there is anything under a key: more than nothing, an empty string or an empty list."""
        entry = self.entries.get(key)
        if entry is None or (isinstance(entry.node, Scalar) and entry.node.value in (None, "", False)):
            return False
        return not (isinstance(entry.node, Items) and not entry.node.items)

    def setting(self, path: str) -> Setting | None:
        """The scalar under a path of keys (``"bf16.enabled"``); None where there is none."""
        *above, last = path.split(".")
        table: Table | None = self
        for key in above:
            table = table.table(key) if table is not None else None
        entry = table.entries.get(last) if table is not None else None
        return Setting(path, entry.node.value, entry.at) if entry and isinstance(entry.node, Scalar) else None


Node = Scalar | Items | Table


def tables(node: Node, but: re.Pattern[str] | None = None) -> Iterator[Table]:
    """Every table of a tree, from the outermost inwards, each once; none under keys in which ``but`` is found."""
    pending, seen = [node], set()
    while pending:
        node = pending.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Table):
            yield node
            pending.extend(e.node for e in reversed(node.entries.values()) if but is None or not but.search(e.key))
        elif isinstance(node, Items):
            pending.extend(reversed(node.items))


def of_python(file: File, node: ast.expr) -> Node:
    """A literal of Python source as a tree. What is not a literal is unknown."""
    at = file.place(node)
    if isinstance(node, ast.Dict):
        entries = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                entries[key.value] = Entry(
                    key.value, of_python(file, value), joined(file.place(key), file.place(value))
                )
        return Table(entries, at, any(not isinstance(key, ast.Constant) for key in node.keys))
    if isinstance(node, (ast.List, ast.Tuple)):
        return Items(tuple(of_python(file, item) for item in node.elts), at)
    return Scalar(constant(node), at)


def joined(first: Place, last: Place) -> Place:
    """The span from one place to another where they share a line, else the first."""
    if first.line != last.end_line:
        return first
    return Place(first.path, first.line, first.column, last.end_line, last.end_column)


def constant(node: ast.expr) -> Any:
    """The value of an expression that names it: a literal, a signed number, ``torch.bfloat16``; else ``UNKNOWN``."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, (str, int, float, bool, type(None))) else UNKNOWN
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, (int, float)) else UNKNOWN
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        return f"torch.{node.attr}"
    return UNKNOWN
