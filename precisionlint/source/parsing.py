"""Bytes to trees: the two that a file is read as, and the lines of its definitions.

``ast`` goes first: it names the true place of a syntax error and refuses what would bring libcst down.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import libcst as cst


class UnreadableError(Exception):
    """A file that cannot be read as Python: its line, and what is wrong in one sentence."""

    def __init__(self, line: int | None, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


def parse_ast(data: bytes) -> ast.Module:
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


def parse(data: bytes) -> tuple[cst.Module, ast.Module]:
    """The two trees of a file.

    Raises: UnreadableError.
    """
    syntax = parse_ast(data)
    try:
        return cst.parse_module(data), syntax
    except cst.ParserSyntaxError as error:
        raise UnreadableError(error.raw_line, "libcst cannot parse this file") from None
    except (UnicodeDecodeError, LookupError, SyntaxError) as error:
        raise UnreadableError(None, f"cannot be decoded: {error}") from None
    except (RecursionError, MemoryError):
        raise UnreadableError(None, "nested too deeply to be parsed") from None


def definitions(body: Iterable[Any]) -> Iterator[tuple[Any, int, int]]:
    """(node, first line, last line) of every def and class of an ast, decorators included, in source order."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node, min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno or node.lineno
            yield from definitions(node.body)
            continue
        for name in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                yield from definitions(inner)


def definition_nodes(node: Any) -> Iterator[Any]:
    """Every def and class of a libcst tree, in the same order as ``definitions``."""
    for child in getattr(node, "body", ()) if isinstance(node, (cst.Module, cst.IndentedBlock)) else ():
        kind = type(child)
        if kind is cst.SimpleStatementLine:
            continue
        if kind is cst.FunctionDef or kind is cst.ClassDef:
            yield child
        if kind is cst.Match:
            for case in child.cases:
                yield from definition_nodes(case.body)
            continue
        yield from definition_nodes(child.body)
        for handler in getattr(child, "handlers", ()):
            yield from definition_nodes(handler.body)
        orelse = getattr(child, "orelse", None)
        while isinstance(orelse, cst.If):
            yield from definition_nodes(orelse.body)
            orelse = orelse.orelse
        if orelse is not None:
            yield from definition_nodes(orelse.body)
        final = getattr(child, "finalbody", None)
        if final is not None:
            yield from definition_nodes(final.body)
