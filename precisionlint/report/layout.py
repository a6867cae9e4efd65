"""Text of a given width: sentences with a hanging indent, tables, sizes and shares."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from precisionlint.report.excerpt import shown

PIPE = 120
"""The width where no terminal says another, so that two runs can be compared by a diff."""
LEAST, MOST = 80, 160


def width_of(stream: TextIO) -> int:
    """The width to write for: a terminal's, within reason, or that of a pipe."""
    if not stream.isatty():
        return PIPE
    return min(max(shutil.get_terminal_size((PIPE, 1)).columns, LEAST), MOST)


def filled(text: str, width: int, hanging: int = 2) -> list[str]:
    """The words of a text on lines of at most ``width``; those after the first are indented by ``hanging``. A word
    that is longer stays whole, since it may be a path that someone wants to copy.
    """
    indent = " " * hanging
    return textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def table(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Rows as aligned columns, empty columns left out; ``right``: the columns of numbers."""
    widths = [max(len(shown(cell)) for cell in column) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        cells = [
            shown(cell).rjust(width) if number in right else shown(cell).ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ]
        yield "  ".join(cells).rstrip()


def size(bytes_: int) -> str:
    """``1.5 MiB``."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= one:
            return f"{bytes_ / one:.1f} {unit}"
    return f"{bytes_} bytes"


def share(part: int, whole: int) -> str:
    """``1.5%``."""
    return f"{part / whole:.1%}" if whole else "none"
