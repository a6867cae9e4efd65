"""Text of a given width, counted in a terminal's cells as rich counts them: sentences with a hanging indent, tables,
sizes and shares; and rich's lines as plain text or with a terminal's codes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.text import Text

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
    found: list[str] = []
    for word in text.split():
        if found and cell_len(found[-1]) + 1 + cell_len(word) <= width:
            found[-1] += f" {word}"
        else:
            found.append(f"{' ' * hanging if found else ''}{word}")
    return found


def cut(text: str, width: int) -> str:
    """A text on one line of at most ``width``."""
    return text if cell_len(text) <= width else f"{set_cell_size(text, max(width - 1, 0)).rstrip()}…"


def table(rows: Sequence[tuple[str, ...]], *, right: frozenset[int] = frozenset()) -> Iterator[str]:
    """Rows as aligned columns, empty columns left out; ``right``: the columns of numbers."""
    widths = [max(cell_len(shown(cell)) for cell in column) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        cells = []
        for number, (cell, width) in enumerate(zip(map(shown, row), widths, strict=True)):
            room = " " * (width - cell_len(cell))
            cells += [room + cell if number in right else cell + room] if width else []
        yield "  ".join(cells).rstrip()


def plain(lines: Iterable[Text]) -> Iterator[str]:
    """Lines without their styles."""
    return (line.plain for line in lines)


def colored(lines: Iterable[Text], styles: dict[str, str]) -> Iterator[str]:
    """Lines with a terminal's codes; ``styles``: what each name of a style means."""
    from rich.console import Console
    from rich.theme import Theme

    console = Console(
        file=StringIO(),
        force_terminal=True,
        color_system="standard",
        no_color=False,
        legacy_windows=False,
        theme=Theme(styles, inherit=False),
        width=PIPE,
    )
    for line in lines:
        with console.capture() as shown_:
            console.print(line, soft_wrap=True, highlight=False, end="")
        yield shown_.get()


def size(bytes_: int) -> str:
    """``1.5 MiB``."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= one:
            return f"{bytes_ / one:.1f} {unit}"
    return f"{bytes_} bytes"


def share(part: int, whole: int) -> str:
    """``1.5%``."""
    return f"{part / whole:.1%}" if whole else "none"
