"""Fixes in notebooks: the program that the code cells are together is fixed, and the cells are written back with outputs untouched.

A fix is made where all that it changes stands in lines of one cell that are Python as they are: magics and shell lines stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from precisionlint import documents
from precisionlint.findings import Finding, Fix, Place, Replacement
from precisionlint.source import fixes
from precisionlint.source.fixes import NoFixError, Span


class _Notebook:
    """A notebook's program, and the way from its lines to those of the cells and back."""

    def __init__(self, data: bytes) -> None:
        try:
            self.program = documents.notebook(data)
            self.cells: Any = documents.load(data)["cells"]
        except documents.DocumentError as error:
            raise NoFixError(str(error)) from error

    @cached_property
    def lines(self) -> dict[tuple[int, int], int]:
        """(cell, line of the cell) -> line of the program."""
        return {place: number for number, place in enumerate(self.program.cells, 1)}

    @cached_property
    def own(self) -> list[bool]:
        """Whether each line of the program stands in its cell as it is."""
        program = fixes.NEWLINE.split(self.program.data.decode("utf-8"))
        sources = {cell: documents.source_of(self.cells[cell - 1]).split("\n") for cell, _ in set(self.program.cells)}
        return [sources[cell][line - 1] == program[at] for at, (cell, line) in enumerate(self.program.cells)]

    def in_cell(self, each: Replacement) -> Replacement | None:
        """A replacement in the program as one in a cell; None where it leaves the cell, or what is Python there."""
        first, last = each.place.line, each.place.end_line
        if last > len(self.own) or not all(self.own[first - 1 : last]):
            return None
        if self.program.line(first)[0] != self.program.line(last)[0]:
            return None
        return replace(each, place=self.program.locate(each.place))

    def in_program(self, each: Replacement) -> Replacement:
        place = each.place
        line, end_line = self.lines[place.cell, place.line], self.lines[place.cell, place.end_line]
        return replace(each, place=Place(place.path, line, place.column, end_line, place.end_column))

    def by_cell(self, starts: Sequence[int], spans: Iterable[Span]) -> dict[int, list[Span]]:
        """Spans of the program as spans of the cells' sources."""
        found: dict[int, list[Span]] = {}
        for start, end, text in spans:
            at, column = fixes.position(starts, start)
            cell, line = self.program.line(at)
            above = documents.source_of(self.cells[cell - 1]).split("\n")[: line - 1]  # a magic is as long as it is
            begin = sum(len(each) + 1 for each in above) + column - 1
            found.setdefault(cell, []).append((begin, begin + end - start, text))
        return found


def rendered(data: bytes, findings: Iterable[Finding]) -> dict[Finding, tuple[Replacement, ...]]:
    """The fixes of a notebook's findings as replacements in its cells, of those that can be made there."""
    try:
        notebook = _Notebook(data)
    except NoFixError:
        return {}
    made: dict[Finding, tuple[Replacement, ...]] = {}
    for finding, replacements in fixes.rendered(notebook.program.data, findings).items():
        moved = [each for one in replacements if (each := notebook.in_cell(one)) is not None]
        if len(moved) == len(replacements):
            made[finding] = tuple(moved)
    return made


def applied(data: bytes, wanted: Sequence[tuple[Fix, tuple[Replacement, ...]]]) -> tuple[bytes, int]:
    """As ``source.fixes.applied``, for a notebook. Raises NoFixError also where it could not be written back as it is laid out."""
    notebook = _Notebook(data)
    text = fixes.Text(notebook.program.data.decode("utf-8"), "utf-8")
    in_program = [(fix, tuple(map(notebook.in_program, each))) for fix, each in wanted]
    spans, count = fixes.chosen(text, in_program)
    by_cell = notebook.by_cell(text.starts, spans)

    def changed(cell: int, source: str) -> str:
        if "\r" in source:
            raise NoFixError(f"the lines of cell {cell} end otherwise than Jupyter writes them")
        return fixes.Text(source, "utf-8").with_spans(by_cell[cell]).text

    try:
        return documents.with_sources(data, sorted(by_cell), changed), count
    except documents.DocumentError as error:
        raise NoFixError(str(error)) from error
