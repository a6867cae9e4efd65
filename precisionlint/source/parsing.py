"""Bytes to text and to the ast, and the places and lines of what stands in it."""

from __future__ import annotations

import ast
import codecs
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Definition: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef"

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
CODING = re.compile(rb"(?:[ \t\f]*(?:#.*)?(?:\r\n?|\n))?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
"""PEP 263: the encoding that one of the first two lines declares."""


class UnreadableError(Exception):
    """A file that cannot be read as Python: its line, and what is wrong in one sentence."""

    def __init__(self, line: int | None, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


def parse(data: bytes) -> ast.Module:
    """The file as Python's own parser sees it.

    Raises: UnreadableError.
    """
    if b"\0" in data:
        raise UnreadableError(data.count(b"\n", 0, data.index(b"\0")) + 1, "holds a NUL byte: not Python source")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(data)
    except SyntaxError as error:
        raise UnreadableError(error.lineno or None, f"syntax error: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise UnreadableError(None, "nested too deeply to be parsed") from None
    except ValueError as error:
        raise UnreadableError(None, f"cannot be decoded: {error}") from None


def decode(data: bytes) -> str:
    """The text of Python source, in the encoding that it declares; without a byte order mark."""
    declared = CODING.match(data)
    encoding = declared[1].decode("ascii", "replace") if declared and not data.startswith(codecs.BOM_UTF8) else "utf-8"
    try:
        return data.decode(encoding, errors="replace").removeprefix("\ufeff")
    except LookupError:
        return data.decode("utf-8-sig", errors="replace")


def split_lines(text: str) -> list[str]:
    """The lines as Python counts them: form feeds and the like end none."""
    return text.replace("\r\n", "\n").replace("\r", "\n").split("\n")


def column(lines: Sequence[str], line: int, offset: int) -> int:
    """The column of a byte offset into a line (from 1) of UTF-8, as the ast counts, in characters from 1."""
    text = lines[line - 1] if line <= len(lines) else ""
    return len(text.encode()[:offset].decode(errors="replace")) + 1


def lines_spanned(node: Definition) -> tuple[int, int]:
    """The first and the last line of a def or class, decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno


BLOCKS: dict[type, tuple[str, ...]] = {
    ast.FunctionDef: ("body",), ast.AsyncFunctionDef: ("body",), ast.ClassDef: ("body",), ast.If: ("body", "orelse"),
    ast.For: ("body", "orelse"), ast.AsyncFor: ("body", "orelse"), ast.While: ("body", "orelse"), ast.With: ("body",),
    ast.AsyncWith: ("body",), ast.Try: ("body", "handlers", "orelse", "finalbody"),
    getattr(ast, "TryStar", ast.Try): ("body", "handlers", "orelse", "finalbody"), ast.ExceptHandler: ("body",),
    ast.Match: ("cases",), ast.match_case: ("body",),
}  # fmt: skip
"""The blocks of each compound statement, in source order."""


def statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every statement in these and in the blocks inside them (handlers and cases among them), in source order."""
    todo: list[ast.AST] = [*reversed(body)]
    while todo:
        node = todo.pop()
        yield node
        for name in reversed(BLOCKS.get(type(node), ())):
            todo.extend(reversed(getattr(node, name)))
