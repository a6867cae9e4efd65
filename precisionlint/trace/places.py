"""Where the program stands: the user's line in a stack of frames, and the names that it gives its objects.

The user's line is the innermost one outside torch, triton, the standard library's helpers and this package; code of
other packages (a model of transformers) counts as the user's, since that is where the op stands.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch
import typing_extensions

from precisionlint.findings import Place
from precisionlint.patterns import regex

OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
TRITON = os.path.join(os.path.dirname(TORCH), "triton")
FOREIGN = (TORCH + os.sep, TRITON + os.sep, OWN, "<frozen ", "<eval_with_key>")
HELPERS = frozenset(
    {contextlib.__file__, functools.__file__, typing_extensions.__file__, warnings.__file__, "<string>"}
)
"""What wraps functions of others: as context managers, as deprecated ones."""
INSTALLED = regex(r"[/\\](?:site|dist)-packages[/\\]")
"""What marks the files of installed packages."""


def is_users(code: CodeType) -> bool:
    """Whether a line of this code is one that a reader of the report would look at."""
    name = code.co_filename
    return not name.startswith(FOREIGN) and name not in HELPERS


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost of the user's frames, from this one outwards."""
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return frame


def here() -> Place | None:
    """The user's line that led to this call."""
    frame = users_frame(sys._getframe(1))
    return None if frame is None else place(frame.f_code, frame.f_lasti)


def of_program() -> Place | None:
    """The line of the program itself that led to this call, past the packages that it uses; ``here()`` where none did."""
    for each in frames(sys._getframe(1)):
        if is_users(each.f_code) and not INSTALLED.search(each.f_code.co_filename):
            return place(each.f_code, each.f_lasti)
    return here()


def heading() -> Place | None:
    """The user's ``with`` that led to this call. Python 3.11 gives the span of its whole block: then its first line."""
    found = here()
    if found is None or found.end_line == found.line:
        return found
    return Place(found.path, found.line, found.column, found.line, found.column)


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def place(code: CodeType, offset: int) -> Place:
    """The span of the call at a bytecode offset; Python 3.10 knows only its line. Columns count characters, from 1."""
    path = shown_path(code.co_filename)
    if hasattr(code, "co_positions"):
        positions = list(code.co_positions())
        line, end_line, column, end_column = positions[offset // 2]
        if line is not None and end_line is not None and column is not None and end_column is not None:
            name = code.co_filename
            return Place(path, line, _characters(name, line, column), end_line, _characters(name, end_line, end_column))
    line = next(
        (number for start, end, number in code.co_lines() if start <= offset < end and number), code.co_firstlineno
    )
    return Place(path, line, 1, line, 1)


def definition(code: CodeType) -> Place:
    """Where a function's ``def`` stands, below its decorators."""
    line = code.co_firstlineno
    for number in range(line, line + 50):
        text = linecache.getline(code.co_filename, number)
        found = re.match(rf"\s*(?:async )?def {re.escape(code.co_name)}\b", text)
        if found:
            end = found.end() + 1
            return Place(shown_path(code.co_filename), number, end - len(code.co_name), number, end)
    return Place(shown_path(code.co_filename), line, 1, line, 1)


def registration(code: CodeType) -> Place:
    """Where the decorator stands that makes an op of a function; its ``def`` where none is seen."""
    made = definition(code)
    for number in range(code.co_firstlineno, made.line):
        if re.match(r"\s*@.*(?:custom_op|triton_op|impl)\b", linecache.getline(code.co_filename, number)):
            return Place(made.path, number, 1, number, 1)
    return made


def shown_path(path: str) -> str:
    """A path as a report shows it: relative where it lies under the working directory, with ``/``."""
    try:
        relative = os.path.relpath(path)
    except ValueError:  # another drive
        relative = path
    return (path if relative.startswith("..") or not os.path.exists(path) else relative).replace(os.sep, "/")


def _characters(path: str, line: int, column: int) -> int:
    """A column in UTF-8 bytes from 0 as one in characters from 1."""
    text = linecache.getline(path, line)
    return len(text.encode()[:column].decode(errors="ignore")) + 1 if text and not text.isascii() else column + 1


def name_of(thing: Any, frame: FrameType | None) -> str | None:
    """What the user's code calls an object: a variable, or an attribute of ``self`` (``self.scaler``), from inside
    outwards.
    """
    for each in frames(frame):
        if not is_users(each.f_code):
            continue
        for scope in (each.f_locals, each.f_globals):
            for name, value in list(scope.items()):
                if value is thing and not name.startswith("_"):
                    return name
        owner = each.f_locals.get("self")
        attributes = getattr(owner, "__dict__", {}) if owner is not None else {}
        for name, value in list(attributes.items()):
            if value is thing:
                return f"self.{name}"
        modules = attributes.get("_modules")
        if isinstance(modules, dict):
            for name, value in modules.items():
                if value is thing:
                    return f"self.{name}"
    return None
