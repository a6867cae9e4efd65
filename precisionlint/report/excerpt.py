"""One source line as a terminal may show it: cut to a readable length and without what a terminal would obey."""

import unicodedata
from collections.abc import Mapping

from msgspec import Struct

from precisionlint import documents, suppress
from precisionlint.findings import Place

WIDTH = 120
"""Longer lines are cut to this many characters around the marked span."""
LEAD = 40
"""How many characters before the marked span stay when a line is cut."""


class Excerpt(Struct, frozen=True):
    """The line as it is shown, and the span of it to mark, counted in the terminal's cells."""

    text: str
    offset: int
    length: int


def lines(path: str, cell: int = 0, text: bytes | None = None) -> tuple[str, ...]:
    """The lines of a file, or of a notebook's cell, as Python counts them; none where it cannot be read any more."""
    try:
        if text is None:
            with open(path, "rb") as file:
                text = file.read()
        if cell:
            cells = documents.load(text)["cells"]
            return tuple(documents.source_of(cells[cell - 1]).split("\n"))  # type: ignore[index]
        return tuple(suppress.decoded(text).split("\n"))
    except (OSError, SyntaxError, ValueError, LookupError, documents.DocumentError):
        return ()


class Sources:
    """The source text that findings stand in, each file read once. ``texts`` stand for files: name -> content."""

    def __init__(self, texts: Mapping[str, bytes] | None = None) -> None:
        self._texts = texts or {}
        self._lines: dict[tuple[str, int], tuple[str, ...]] = {}

    def lines(self, place: Place) -> tuple[str, ...]:
        """The lines of the file, or of the notebook's cell, that a place is in."""
        key = (place.path, place.cell)
        if key not in self._lines:
            self._lines[key] = lines(place.path, place.cell, self._texts.get(place.path))
        return self._lines[key]

    def line(self, place: Place, offset: int = 0) -> str:
        """The line on which a place begins, or one so many lines after it; empty where there is none."""
        held, index = self.lines(place), place.line - 1 + offset
        return held[index] if 0 <= index < len(held) else ""


def excerpt(line: str, place: Place) -> Excerpt:
    """The line of a place with its span marked; of a span over several lines the part on the first."""
    start = min(place.column - 1, len(line))
    end = place.end_column - 1 if place.end_line == place.line else len(line.rstrip())
    left = max(0, start - LEAD) if len(line) > WIDTH else 0
    right = min(left + WIDTH, len(line))
    end = min(max(end, start), right)
    before = ("…" if left else "") + shown(line[left:start])
    marked = shown(line[start:end])
    after = shown(line[end:right]) + ("…" if right < len(line) else "")
    return Excerpt(before + marked + after, _cells(before), max(1, _cells(marked)))


def shown(text: str) -> str:
    """The text with tabs as spaces, and a mark for each character that is not meant to be seen (control, direction)."""
    if text.isprintable():
        return text
    text = text.replace("\t", "    ")
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _cells(text: str) -> int:
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )
