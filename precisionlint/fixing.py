"""Makes the fixes of a report: ``check --fix`` and ``--diff``.

A file is fixed in passes: what does not get in each other's way is changed, the new text is read, and so on until nothing is left to
fix. It is written whole or not at all, and never as something that does not parse.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from msgspec import Struct

from precisionlint import documents, notebook_fixes
from precisionlint.findings import FileError, Finding, Report
from precisionlint.source import fixes
from precisionlint.source.fixes import NoFixError
from precisionlint.writing import replace_file

PASSES = 50
"""After how many passes a file is left as it is then: fixes that bring each other back would never end."""


class Fixed(Struct, frozen=True):
    """A file before and after, and how many of its findings were fixed."""

    before: bytes
    after: bytes
    count: int


def fixable(report: Report, finding: Finding, *, unsafe: bool) -> bool:
    """Whether a finding can be fixed in its file as it stands."""
    return finding.fix is not None and finding in report.replacements and (unsafe or finding.fix.safe)


def fix(
    report: Report, check_text: Callable[[str, bytes], Report], *, unsafe: bool
) -> tuple[dict[str, Fixed], list[FileError]]:
    """The files that a report's fixes change, and those that cannot be changed. Writes nothing.

    ``check_text`` checks a text as if it were the file of a name.
    """
    paths = {finding.place.path for finding in report.findings if fixable(report, finding, unsafe=unsafe)}
    fixed: dict[str, Fixed] = {}
    errors: list[FileError] = []
    for path in sorted(paths):
        try:
            before = report.texts[path] if path in report.texts else _read(path)
            after, count = _passes(path, before, report, check_text, unsafe=unsafe)
        except OSError as error:
            errors.append(FileError(path, None, f"cannot be read: {(error.strerror or str(error)).lower()}"))
        except NoFixError as error:
            errors.append(FileError(path, None, f"cannot be fixed: {error}"))
        else:
            if after != before:
                fixed[path] = Fixed(before, after, count)
    return fixed, errors


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _passes(
    path: str, data: bytes, report: Report, check_text: Callable[[str, bytes], Report], *, unsafe: bool
) -> tuple[bytes, int]:
    """A file's content after all passes, of which the first has its findings in ``report``, and how many fixes were made."""
    total = 0
    refused: set[tuple[str, bytes]] = set()
    for _ in range(PASSES):
        found = [each for each in report.findings if each.place.path == path and fixable(report, each, unsafe=unsafe)]
        found = [each for each in found if _known(each, data) not in refused]
        if not found:
            break
        changed, count = _applied(path, data, report, found)
        after = check_text(path, changed)
        open_ones = [each for each in found if each.fix is not None and not each.fix.safe and not each.place.cell]
        if open_ones and _brings(path, data, changed, report, after):
            alone = [(each, _applied(path, data, report, [each])[0]) for each in open_ones]
            guilty = [each for each, text in alone if _brings(path, data, text, report, check_text(path, text))]
            refused.update(_known(each, data) for each in guilty or open_ones)
            continue
        data, report, total = changed, after, total + count
    return data, total


def _applied(path: str, data: bytes, report: Report, found: list[Finding]) -> tuple[bytes, int]:
    """A text with the fixes of some findings made, and how many."""
    wanted = [(each.fix, report.replacements[each]) for each in found if each.fix is not None]
    if documents.kind(path) == "notebook":
        return notebook_fixes.applied(data, wanted)
    return fixes.applied(data, wanted)


def _known(finding: Finding, data: bytes) -> tuple[str, bytes]:
    """A finding by its rule and the text of its line, whatever has moved it since."""
    lines = data.split(b"\n")
    return finding.rule, lines[finding.place.line - 1].strip() if finding.place.line <= len(lines) else b""


def _brings(path: str, before: bytes, after: bytes, was: Report, is_now: Report) -> bool:
    """Whether a change brings a finding to a line that had none of its rule, and that nothing can fix: a fault that was moved, not mended.
    What was only possible before, and is surer now, is one."""

    def told(report: Report) -> set[tuple[str, int]]:
        sure = (each for each in report.findings if each.place.path == path and each.confidence != "possible")
        return {
            (each.rule, each.place.line) for each in sure if report is was or not fixable(report, each, unsafe=True)
        }

    moved = told(is_now)
    old, new = before.split(b"\n"), after.split(b"\n")
    for _, first, last, start, end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for rule, line in told(was):
            if first < line <= last:
                same = last - first == end - start
                moved -= {(rule, start + line - first)} if same else {(rule, n + 1) for n in range(start, end)}
    return bool(moved)


def write(fixed: dict[str, Fixed]) -> tuple[int, list[FileError]]:
    """Writes what was fixed: how many findings that takes away, and the files that could not be written, which stay as they were."""
    count = 0
    errors: list[FileError] = []
    for path, each in fixed.items():
        try:
            if _read(path) != each.before:
                errors.append(FileError(path, None, "cannot be fixed: it changed while it was read"))
                continue
            replace_file(path, each.after)
            count += each.count
        except OSError as error:
            errors.append(FileError(path, None, f"cannot be written: {(error.strerror or str(error)).lower()}"))
    return count, errors


def diff(fixed: dict[str, Fixed]) -> Iterator[str]:
    """What would change, as a unified diff."""
    for path, each in fixed.items():
        before, after = (_lines(data) for data in (each.before, each.after))
        for line in difflib.unified_diff(before, after, path, path):
            yield from (
                line.rstrip("\r\n").split("\n") if line.endswith("\n") else (line, "\\ No newline at end of file")
            )


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", errors="backslashreplace").splitlines(keepends=True)
