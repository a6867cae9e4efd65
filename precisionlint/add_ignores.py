"""Writes comments that silence what is found now: ``check --add-ignores``.

A file is written whole or not at all, and only if reading its new text finds nothing any more that a comment can silence.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from precisionlint import documents, suppress
from precisionlint.findings import FileError, Finding, Place, Report
from precisionlint.patterns import regex
from precisionlint.writing import replace_file

BRACKET = regex(r"(#\s*precisionlint\s*:\s*ignore\s*\[)([^\]]*)\]", re.I)


class _Edit(Struct, frozen=True):
    """Rules to name on a line, or, ``above``, on a line of its own above it."""

    cell: int
    line: int
    above: bool
    rules: tuple[str, ...]


def add(
    report: Report, reason: str, check_text: Callable[[str, bytes], Report]
) -> tuple[dict[str, int], list[FileError]]:
    """Writes comments for a report's findings: (how many findings are silenced in each file, what could not be).

    ``check_text`` checks a text as if it were the file of a name.
    """
    by_path: dict[str, list[Finding]] = {}
    for finding in report.findings:
        if finding.rule not in suppress.RULES:
            by_path.setdefault(finding.place.path, []).append(finding)
    written: dict[str, int] = {}
    errors: list[FileError] = []
    for path, findings in by_path.items():
        try:
            with open(path, "rb") as file:
                data = file.read()
            changed = annotated(path, data, findings, reason)
            left = [each for each in check_text(path, changed).findings if each.rule not in suppress.RULES]
            if left:
                errors.append(FileError(path, left[0].place.line, f"no comment can be written for {left[0].rule} here"))
                continue
            replace_file(path, changed)
            written[path] = len(findings)
        except OSError as error:
            errors.append(FileError(path, None, f"cannot be written: {(error.strerror or str(error)).lower()}"))
        except (documents.DocumentError, UnicodeError, SyntaxError) as error:
            errors.append(FileError(path, None, f"cannot be written: {error}"))
    return written, errors


def annotated(path: str, data: bytes, findings: Sequence[Finding], reason: str) -> bytes:
    """A file's content with a comment for each finding. Raises documents.DocumentError, UnicodeError, SyntaxError."""
    kind = documents.kind(path)
    if kind == "other":
        raise documents.DocumentError("a configuration takes no comments for precisionlint")
    programs = documents.programs(path, data)
    edits = _edits(programs, [finding.place for finding in findings], [finding.rule for finding in findings])
    match kind:
        case "notebook":
            return _notebook(data, edits, reason)
        case "markdown":
            return _applied(data.decode("utf-8"), edits, reason).encode("utf-8")
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return _applied(data.decode(encoding), edits, reason).encode(encoding)


def _edits(programs: Sequence[documents.Program], places: Sequence[Place], rules: Sequence[str]) -> list[_Edit]:
    held: dict[tuple[int, int, bool], set[str]] = {}
    layouts = [_Layout(program) for program in programs]
    for place, rule in zip(places, rules, strict=True):
        layout = next((each for each in layouts if each.holds(place)), layouts[0])
        held.setdefault(layout.spot(place), set()).add(rule)
    return [_Edit(*spot, tuple(sorted(names))) for spot, names in sorted(held.items(), reverse=True)]


class _Layout:
    """Where comments can stand in a program."""

    def __init__(self, program: documents.Program) -> None:
        self.program = program
        self.statements = suppress.statements(program.data) or suppress.Statements(())
        text = suppress.decoded(program.data)
        self.first = 1 if program.whole else len(text) - len(text.lstrip("\n")) + 1
        self.last = text.count("\n")
        self.ends: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in (tokenize.NEWLINE, tokenize.NL):
                self.ends.add(token.start[0])
        self.lines = {place: number for number, place in enumerate(program.cells, 1)}

    def holds(self, place: Place) -> bool:
        return self.program.whole or self.first <= place.line <= self.last

    def spot(self, place: Place) -> tuple[int, int, bool]:
        """(cell, line, whether the comment must stand above the line)."""
        line = self.lines.get((place.cell, place.line), place.line)
        first, last = self.statements.around(line)
        for each in (line, first, last):
            if each in self.ends:
                return (*self._document(each), False)
        return (*self._document(first), True)

    def _document(self, line: int) -> tuple[int, int]:
        return self.program.line(line) if self.program.cells else (0, line)


def _applied(text: str, edits: Iterable[_Edit], reason: str) -> str:
    """A text with its edits, which come from the last line to the first."""
    lines = documents.LINE.findall(text)
    for edit in edits:
        line = lines[edit.line - 1]
        body = line.rstrip("\r\n")
        newline = line[len(body) :]
        told = f"# precisionlint: ignore[{', '.join(edit.rules)}]{f' {reason}' if reason else ''}"
        if edit.above:
            indent = body[: len(body) - len(body.lstrip(" \t>"))]
            lines.insert(edit.line - 1, f"{indent}{told}{newline or chr(10)}")
        elif match := BRACKET.search(body):
            names = [name.strip() for name in match[2].split(",") if name.strip()]
            inside = ", ".join(dict.fromkeys((*names, *edit.rules)))
            lines[edit.line - 1] = f"{body[: match.start()]}{match[1]}{inside}]{body[match.end() :]}{newline}"
        else:
            lines[edit.line - 1] = f"{body.rstrip()}  {told}{newline}"
    return "".join(lines)


def _notebook(data: bytes, edits: Iterable[_Edit], reason: str) -> bytes:
    """A notebook with its cells edited and all else as it was. Raises documents.DocumentError."""
    by_cell: dict[int, list[_Edit]] = {}
    for edit in edits:
        by_cell.setdefault(edit.cell, []).append(edit)
    return documents.with_sources(data, by_cell, lambda cell, source: _applied(source, by_cell[cell], reason))
