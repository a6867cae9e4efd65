"""Fixes as text: what a finding's fix changes, rendered with libcst, and the text with such changes made.

Only what changes is written anew; formatting and comments around it stay as they are. A fix is not rendered at all where the file's
tree does not give back the file's bytes, where a name that the fix needs stands for something else there, or where the changed text
would not parse. Nothing here knows a rule.
"""

from __future__ import annotations

import ast
import contextlib
import io
import tokenize
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from precisionlint.findings import Finding, Fix, Place, Replacement
from precisionlint.patterns import regex

NEWLINE = regex(r"\r\n|\r|\n")
Span = tuple[int, int, str]
"""Offsets of what is replaced, and the text to stand there."""


class NoFixError(Exception):
    """A fix that cannot be made where the finding stands; the text says why."""


class Text(Struct, frozen=True):
    """The text of a Python file, and what its bytes need besides. Lines count as Python counts them."""

    text: str
    encoding: str

    @classmethod
    def of(cls, data: bytes) -> Text:
        """The text of a file's content. Raises NoFixError where it could not be written back unchanged."""
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
            if text.encode(encoding) != data:
                raise NoFixError("its text does not give back its bytes")
        except (SyntaxError, UnicodeError, LookupError) as error:
            raise NoFixError("its text cannot be decoded") from error
        return cls(text, encoding)

    @property
    def starts(self) -> list[int]:
        """The offset at which each line begins."""
        return [0, *(match.end() for match in NEWLINE.finditer(self.text))]

    def with_spans(self, spans: Iterable[Span]) -> Text:
        """The text with parts replaced that do not overlap."""
        parts: list[str] = []
        last = 0
        for start, end, new in sorted(set(spans)):
            parts += [self.text[last:start], new]
            last = end
        return Text("".join([*parts, self.text[last:]]), self.encoding)

    @property
    def data(self) -> bytes:
        return self.text.encode(self.encoding)

    def parses(self) -> bool:
        try:
            compile(self.data, "<fixed>", "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return True


def rendered(data: bytes, findings: Iterable[Finding]) -> dict[Finding, tuple[Replacement, ...]]:
    """The fixes of a Python file's findings as replacements, of those that can be made there."""
    wanted = [finding for finding in findings if finding.fix is not None]
    if not wanted:
        return {}
    from precisionlint.source.fix_trees import Renderer

    try:
        text = Text.of(data)
        edits = [edit for finding in wanted if finding.fix is not None for edit in finding.fix.edits]
        renderer = Renderer(text.text, edits)
    except NoFixError:
        return {}
    spans: dict[Finding, list[Span]] = {}
    for finding in wanted:
        assert finding.fix is not None
        with contextlib.suppress(NoFixError):
            changed = sorted({trimmed(text.text, span) for edit in finding.fix.edits for span in renderer.render(edit)})
            if not overlapping(changed):
                spans[finding] = changed
    starts = text.starts
    return {
        finding: tuple(_replacement(finding.place.path, starts, span) for span in spans[finding])
        for finding in parsing(text, spans)
    }


def parsing(text: Text, spans: Mapping[Finding, list[Span]]) -> list[Finding]:
    """The findings whose fixes leave text that parses. Those that do not get in each other's way are tried together: a text is parsed
    a few times, however many findings are in it."""
    times = Counter(span for each in spans.values() for span in each)
    own = {finding: [span for span in each if times[span] == 1] for finding, each in spans.items()}
    rest = sorted(spans, key=lambda finding: own[finding])
    found: list[Finding] = []
    while rest:
        apart: list[Finding] = []
        others: list[Finding] = []
        end = -1
        for finding in rest:
            fits = not own[finding] or own[finding][0][0] > end  # many may need the same import
            (apart if fits else others).append(finding)
            end = own[finding][-1][1] if fits and own[finding] else end
        found += _parsing_together(text, spans, apart)
        rest = others
    return found


def _parsing_together(text: Text, spans: Mapping[Finding, list[Span]], findings: list[Finding]) -> list[Finding]:
    changed = sorted({span for finding in findings for span in spans[finding]})
    if not overlapping(changed) and text.with_spans(changed).parses():
        return findings
    if len(findings) == 1:
        return []
    half = len(findings) // 2
    return _parsing_together(text, spans, findings[:half]) + _parsing_together(text, spans, findings[half:])


def trimmed(text: str, span: Span) -> Span:
    """A span without what stays the same at its beginning and its end."""
    start, end, new = span
    old = text[start:end]
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    rest = min(len(old), len(new)) - head
    tail = next((i for i in range(rest) if old[-1 - i] != new[-1 - i]), rest)
    return start + head, end - tail, new[head : len(new) - tail]


def overlapping(spans: Sequence[Span]) -> bool:
    """Whether sorted spans overlap or touch."""
    return any(one[1] >= two[0] for one, two in pairwise(spans))


def _replacement(path: str, starts: Sequence[int], span: Span) -> Replacement:
    (line, column), (end_line, end_column) = (position(starts, offset) for offset in span[:2])
    return Replacement(Place(path, line, column, end_line, end_column), span[2])


def position(starts: Sequence[int], offset: int) -> tuple[int, int]:
    """The line and the column, both from 1, of an offset."""
    line = bisect_right(starts, offset)
    return line, offset - starts[line - 1] + 1


def applied(data: bytes, fixes: Sequence[tuple[Fix, tuple[Replacement, ...]]]) -> tuple[bytes, int]:
    """A file's content with fixes made that do not get in each other's way, and how many; the others wait for the next pass.

    Raises NoFixError where the content would not parse then.
    """
    text = Text.of(data)
    spans, count = chosen(text, fixes)
    return text.with_spans(spans).data, count


def chosen(text: Text, fixes: Sequence[tuple[Fix, tuple[Replacement, ...]]]) -> tuple[set[Span], int]:
    """What the fixes change that do not get in each other's way, and how many these are.

    Raises NoFixError where the text would not parse then.
    """
    starts = text.starts
    taken: set[Span] = set()
    statements = False
    count = 0
    for fix, replacements in fixes:
        spans = {_span(starts, each) for each in replacements}
        if any(edit.kind == "before" for edit in fix.edits):
            if statements:
                continue  # two statements that one place needs once would both be written
            statements = True
        if not overlapping(sorted(taken | spans)):
            taken |= spans
            count += 1
    if not text.with_spans(taken).parses():
        raise NoFixError("its fixes together would leave no Python")
    return taken, count


def _span(starts: Sequence[int], each: Replacement) -> Span:
    place = each.place
    return (
        starts[place.line - 1] + place.column - 1,
        starts[place.end_line - 1] + place.end_column - 1,
        each.text,
    )
