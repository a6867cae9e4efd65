"""One source line as a terminal may show it: cut to a readable length and without what a terminal would obey."""

import tokenize
import unicodedata
from dataclasses import dataclass

from precisionlint import documents
from precisionlint.findings import Place

WIDTH = 120
"""Longer lines are cut to this many characters around the marked span."""
LEAD = 40
"""How many characters before the marked span stay when a line is cut."""


@dataclass(frozen=True)
class Excerpt:
    """The line as it is shown, and the span of it to mark, counted in the terminal's cells."""

    text: str
    offset: int
    length: int


def lines(path: str, cell: int = 0) -> tuple[str, ...]:
    """The lines of a file, or of a notebook's cell, as Python counts them; none where it cannot be read any more."""
    try:
        if cell:
            with open(path, "rb") as notebook:
                cells = documents.load(notebook.read())["cells"]
            return tuple(documents.source_of(cells[cell - 1]).split("\n"))  # type: ignore[index]
        with tokenize.open(path) as file:
            return tuple(file.read().split("\n"))
    except (OSError, SyntaxError, ValueError, LookupError, documents.DocumentError):
        return ()


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
