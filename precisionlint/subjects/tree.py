"""Configurations as one kind of tree, whatever they are written in: YAML, JSON, or a dict of Python source; each part knows its place.

JSON is read as the YAML that it almost is, comments and trailing commas included, as DeepSpeed's own reader (hjson) takes them. Nothing
is constructed: tags of YAML name no classes here.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml
from msgspec import Struct

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import UNKNOWN, Setting
from precisionlint.source.parsing import UnreadableError
from precisionlint.subjects import File

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TEMPLATE = regex(r"\{\{|\{%|<%|\$\{|%\w+%|@\w+@")
"""What a file that some program fills in before anybody reads it shows."""
VARIABLE = regex(r"\$\w+")
JSON_PART = regex(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\t', re.DOTALL)
SURROGATE = regex(r"\\u[dD][89a-fA-F]..")


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


def documents(file: File, is_json: bool | None = None) -> list[Node]:
    """The documents of a YAML or JSON file; none of a template, which is not yet either.

    Raises: UnreadableError.
    """
    is_json = file.display.endswith(".json") if is_json is None else is_json
    try:
        file.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = file.data.count(b"\n", 0, error.start) + 1
        raise UnreadableError(line, f"not UTF-8 (byte 0x{file.data[error.start]:02x}): save it as UTF-8") from None
    text = _plain(file.text) if is_json else file.text
    try:
        return [_Reader(file).node(node) for node in yaml.compose_all(text, Loader=LOADER) if node is not None]
    except yaml.YAMLError as error:
        if TEMPLATE.search(file.text) or (is_json and _is_json(file.text)):
            return []
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be parsed"
        kind = "JSON" if is_json else "YAML"
        raise UnreadableError(mark.line + 1 if mark else None, f"not {kind}: {what}") from None


def _plain(text: str) -> str:
    """JSON as YAML reads it, every character in its place: no tabs, no comments, no halves of a character."""

    def blank(match: re.Match[str]) -> str:
        part = match.group()
        if part.startswith('"'):
            return SURROGATE.sub(r"\\u003f", part)
        return re.sub(r"[^\n]", " ", part)

    return JSON_PART.sub(blank, text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class _Reader:
    """Nodes of YAML to nodes of ours; what is repeated by an alias is made once."""

    def __init__(self, file: File) -> None:
        self.path = file.display
        self.made: dict[int, Node] = {}

    def node(self, node: Any) -> Node:
        key = id(node)
        if key not in self.made:
            self.made[key] = Scalar(UNKNOWN, self.place(node, node))  # what holds itself: unknown there
            self.made[key] = self.make(node)
        return self.made[key]

    def make(self, node: Any) -> Node:
        at = self.place(node, node)
        if isinstance(node, yaml.ScalarNode):
            return Scalar(_value(node), at)
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(self.node(item) for item in node.value), at)
        entries: dict[str, Entry] = {}
        merged: dict[str, Entry] = {}
        open_ = False
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in reversed(sources):
                    table = self.node(source)
                    merged |= table.entries if isinstance(table, Table) else {}
                    open_ |= not isinstance(table, Table)
            elif isinstance(key, yaml.ScalarNode):
                entries[key.value] = Entry(key.value, self.node(value), self.place(key, value))
        return Table(merged | entries, at, open_ or "defaults" in entries)

    def place(self, first: Any, last: Any) -> Place:
        start, end = first.start_mark, last.end_mark
        if start.line != end.line:
            end = first.end_mark
        if start.line != end.line:
            return Place(self.path, start.line + 1, start.column + 1, start.line + 1, start.column + 2)
        return Place(self.path, start.line + 1, start.column + 1, end.line + 1, end.column + 1)


def _value(node: Any) -> Any:
    """The value of a scalar by its tag; what an interpolation gives is unknown."""
    kind = node.tag.rpartition(":")[2]
    text: str = node.value
    if "${" in text or "{{" in text or VARIABLE.fullmatch(text):
        return UNKNOWN
    if kind == "bool":
        return text.lower() in ("true", "yes", "on")
    if kind == "null":
        return None
    if kind == "int":
        return _number(text, lambda text: int(text, 0))
    if kind == "float":
        return _number(text, float)
    return text


def _number(text: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(text.replace("_", ""))
    except ValueError:
        return text


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
