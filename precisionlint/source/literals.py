"""Long tables of numbers, left out of what is parsed: a file of some megabytes of them costs gigabytes as a tree, and says nothing more.

What is left out are whole elements in the middle of a list or tuple that holds nothing but numbers and brackets. Blanks stand in their
place, so that all else keeps its line and column.
"""

from __future__ import annotations

import re

from precisionlint.patterns import regex

LONG = 500_000
"""Bytes of a file from which on it is worth looking for such tables."""
TABLE = 4096
"""Bytes of a table worth to be left out."""
FIRST = 16
"""So many numbers of a row are kept."""
NUMBERS = regex(rb"[\d\s.,eE+\-_]{%d,}" % TABLE)
NESTED = regex(rb"[\d\s.,eE+\-_\[\]()]{%d,}" % TABLE)
BRACKET = regex(rb"[\[(]|[\])](?:\s*,)?")
BLANK = bytes(each if each in b"\r\n" else ord(" ") for each in range(256))


def thinned(data: bytes, long: int = LONG) -> bytes:
    """Source of at least so many bytes with blanks for the middle of its tables of numbers. It may be no Python where the source is none,
    or unlike any other."""
    if len(data) < long:
        return data
    data = _without(data, [span for run in NESTED.finditer(data) for span in _elements(run)])
    return _without(data, [span for run in NUMBERS.finditer(data) for span in _numbers(run)])


def _without(data: bytes, spans: list[tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    last = 0
    for start, end in sorted(spans):
        if start >= last:  # else it lies in one that is left out
            parts += [data[last:start], data[start:end].translate(BLANK)]
            last = end
    return b"".join([*parts, data[last:]])


def _numbers(run: re.Match[bytes]) -> list[tuple[int, int]]:
    """The numbers of a row from the first few to the last comma."""
    start = run.start()
    for _ in range(FIRST):
        start = run.string.find(b",", start, run.end()) + 1
        if not start:
            return []
    end = run.string.rfind(b",", start, run.end()) + 1
    return [(start, end)] if end - start >= TABLE else []


def _elements(run: re.Match[bytes]) -> list[tuple[int, int]]:
    """The elements of lists of lists, from the end of the first to that of the last, each with its comma."""
    found: list[tuple[int, int]] = []
    spans: dict[int, tuple[int, int]] = {}
    depth = 0
    for bracket in BRACKET.finditer(run.string, run.start(), run.end()):
        if bracket[0] in b"[(":
            depth += 1
            continue
        if depth in spans:  # the list that these elements are of ends here
            found.append(spans.pop(depth))
        depth -= 1
        if bracket[0].endswith(b","):
            spans[depth] = spans.get(depth, (bracket.end(), 0))[0], bracket.end()
    return [(start, end) for start, end in [*found, *spans.values()] if end - start >= TABLE]
