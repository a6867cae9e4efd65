"""Bytes to text and to the ast, and the places and lines of what stands in it."""

from __future__ import annotations

import ast
import codecs
import contextlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

from precisionlint.patterns import regex
from precisionlint.source.literals import thinned

FunctionDef = ast.FunctionDef | ast.AsyncFunctionDef
Definition = FunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
CODING = regex(rb"(?:[ \t\f]*(?:#.*)?(?:\r\n?|\n))?[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
"""PEP 263: the encoding that one of the first two lines declares."""


class UnreadableError(Exception):
    """A file that cannot be read as Python: its line, and what is wrong in one sentence."""

    def __init__(self, line: int | None, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


def parse(data: bytes) -> ast.Module:
    """The file as Python's own parser sees it, without most of its long tables of numbers.

    Raises: UnreadableError.
    """
    if b"\0" in data:
        raise UnreadableError(data.count(b"\n", 0, data.index(b"\0")) + 1, "holds a NUL byte: not Python source")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shorter = thinned(data)
            if shorter is not data:
                with contextlib.suppress(SyntaxError):
                    return ast.parse(shorter)
            return ast.parse(data)
    except SyntaxError as error:
        raise UnreadableError(error.lineno or None, f"syntax error: {error.msg}{newer(data, error)}") from None
    except (RecursionError, MemoryError):
        raise UnreadableError(None, "nested too deeply to be parsed") from None
    except ValueError as error:
        raise UnreadableError(None, f"cannot be decoded: {error}") from None


NEWER = (
    ((3, 11), "except* needs Python 3.11", regex(r"\s*except\s*\*")),
    ((3, 12), "the type statement needs Python 3.12", regex(r"\s*type\s+\w+\s*(?:\[.*\]\s*)?=")),
    ((3, 12), "type parameters need Python 3.12", regex(r"\s*(?:(?:async\s+)?def|class)\s+\w+\s*\[")),
    ((3, 14), "a t-string needs Python 3.14", regex(r".*\b(?:[tT][rR]?|[rR][tT])[\"']")),
)
"""Since which Python a line with a syntax error is none: what is new there, and how such a line looks."""
IN_F_STRING = regex(r"f-string|unexpected character after line continuation")
"""What Python before 3.12 says of f-strings that hold the quotes around them, backslashes or comments, and of others that are wrong."""


def newer(data: bytes, error: SyntaxError) -> str:
    """What to add to a syntax error that a newer Python may not see."""
    lines = split_lines(decode(data))
    line = lines[error.lineno - 1] if error.lineno and error.lineno <= len(lines) else ""
    said = next((said for python, said, like in NEWER if sys.version_info < python and like.match(line)), "")
    if not said and sys.version_info < (3, 12) and IN_F_STRING.match(error.msg):
        said = "Python 3.12 reads f-strings that older ones do not"
    mine = ".".join(map(str, sys.version_info[:2]))
    return f"; {said}, and this is {mine}: run precisionlint with a newer one" if said else ""


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


PLAIN = frozenset(
    {
        "ctx", "op", "ops", "id", "attr", "arg", "asname", "module", "level", "kind", "conversion", "simple", "lineno", "tag",
        "rest", "kwd_attrs", "is_async", "type_comment", "type_ignores",
    }
)  # fmt: skip
"""The fields that hold strings and numbers, and those whose nodes say nothing but how the node above them is meant."""
ALL_PLAIN = (ast.Constant, ast.Global, ast.Nonlocal, ast.MatchSingleton)


class Children(dict[type, tuple[str, ...]]):
    """The fields of each type of node that may hold nodes, found when the first of it is met."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        fields = () if issubclass(kind, ALL_PLAIN) else tuple(name for name in kind._fields if name not in PLAIN)
        return self.setdefault(kind, fields)


CHILDREN = Children()
SPARSE = frozenset({"keys", "kw_defaults"})
"""The lists with holes: a key of ``**other``, a default that is not there."""


def walk(node: ast.AST) -> list[ast.AST]:
    """A node and all below it, in the order of ``ast.walk``, which takes more than twice as long: it looks for nodes in strings and numbers
    too, and gives operators and contexts, which are left out here."""
    found = [node]
    for current in found:  # which grows
        for name in CHILDREN[current.__class__]:
            value = getattr(current, name, None)
            if value.__class__ is not list:
                if isinstance(value, ast.AST):  # newer Pythons may have fields that PLAIN does not name
                    found.append(value)
            elif name in SPARSE:
                found += [each for each in value if each is not None]
            else:
                found += value
    return found


WORD = regex(r"[^\W\d]\w*")
APART = bytes(code if chr(code).isalnum() or chr(code) == "_" else ord(" ") for code in range(128)) + bytes(128)
"""A table for ``bytes.translate``, by which what is in no word of ASCII becomes a space."""


def words_in(text: str) -> frozenset[str]:
    """The words of a text, numbers among them. Of ASCII this takes three tenths of the time that the pattern does."""
    return frozenset(text.encode().translate(APART).decode().split() if text.isascii() else WORD.findall(text))


REMARK = r"^[ \t]*#[^\n]*$|(?<=\s)#[^\"'\n]*$"
"""A comment to the end of its line; one behind code that holds quotes may be a part of a string."""
COMMENT = regex(REMARK)
STRING = regex(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'")
"""A string within a line; of one over several lines, what stands between two quotes."""


def unless_prose(string: re.Match[str]) -> str:
    """A string that names something, or an empty one for words: a message is read by people, whatever it speaks of."""
    return string[0] if " " not in string[0] else '""'


def without_remarks(syntax: ast.Module, lines: list[str]) -> list[str]:
    """The lines of a file with blanks for what only a reader reads: comments, docstrings and other strings that stand alone, messages."""
    told = [COMMENT.sub("", line) if "#" in line else line for line in lines]
    told = [STRING.sub(unless_prose, line) if '"' in line or "'" in line else line for line in told]
    for node in statements(syntax.body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            first, last = node.lineno, node.end_lineno or node.lineno
            if not lines[first - 1][
                : node.col_offset
            ].strip():  # a string behind a colon or a semicolon is left standing
                told[first - 1 : last] = [""] * (last - first + 1)
    return told
