"""The trees of YAML and JSON. A module of its own: only files of these need PyYAML, which takes a tenth of the start of a run over a script.

JSON is read as the YAML that it almost is, comments and trailing commas included, as DeepSpeed's own reader (hjson) takes them. Nothing
is constructed: tags of YAML name no classes here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import UNKNOWN
from precisionlint.source.parsing import UnreadableError
from precisionlint.subjects import File
from precisionlint.subjects.tree import Entry, Items, Node, Scalar, Table

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TEMPLATE = regex(r"\{\{|\{%|<%|\$\{|%\w+%|@\w+@")
"""What a file that some program fills in before anybody reads it shows."""
VARIABLE = regex(r"\$\w+")
JSON_PART = regex(r'"(?:[^"\\\n]|\\.)*"|//[^\n]*|/\*.*?\*/|\t', re.DOTALL)
SURROGATE = regex(r"\\u[dD][89a-fA-F]..")


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
