"""Baselines: the findings of today, so that only new ones count.

An entry holds a finding's rule, its file (from the baseline's folder), the text of its line and of the lines around, and no number: it
still fits when the line has moved. Each entry speaks for one finding; one that fits none any more is stale.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple, fields

from precisionlint.errors import InputError
from precisionlint.findings import Finding
from precisionlint.report.excerpt import Sources
from precisionlint.writing import replace_file

VERSION = 1


class BaselineError(InputError):
    """A baseline that cannot be read or written; the text is one line that says why."""


class Entry(Struct, frozen=True, order=True):
    """One finding, as it is found again: ``before`` and ``after`` are the nearest lines that are not blank."""

    path: str
    rule: str
    text: str
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What must fit; the lines around only tell equal lines apart."""
        return self.path, self.rule, self.text

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}: {self.text}"


class Baseline:
    """The entries of a file, each to be taken once."""

    def __init__(self, file: Path, entries: Iterable[Entry]) -> None:
        self.folder = file.resolve().parent
        self._left: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in entries:
            self._left.setdefault(entry.key, []).append(entry)

    def split(self, findings: Sequence[Finding], sources: Sources) -> tuple[list[Finding], list[Finding]]:
        """(findings that are new, findings that an entry speaks for); what it speaks for is taken."""
        known: set[int] = set()
        wanted = [entry_of(finding, self.folder, sources) for finding in findings]
        for exact in (True, False):
            for index, entry in enumerate(wanted):
                if index not in known and self._take(entry, exact):
                    known.add(index)
        new = [finding for index, finding in enumerate(findings) if index not in known]
        return new, [finding for index, finding in enumerate(findings) if index in known]

    def _take(self, wanted: Entry, exact: bool) -> bool:
        alike = self._left.get(wanted.key, [])
        if exact and wanted in alike:
            alike.remove(wanted)
            return True
        return not exact and bool(alike) and bool(alike.pop(0))

    def stale(self, looked_at: Collection[str]) -> list[Entry]:
        """The entries left of files that were looked at (absolute paths), or that are gone."""
        return [
            entry
            for entry in sorted(entry for alike in self._left.values() for entry in alike)
            if (path := os.path.normpath(self.folder / entry.path)) in looked_at or not os.path.exists(path)
        ]


def entry_of(finding: Finding, folder: Path, sources: Sources) -> Entry:
    """How a finding is found again from a folder."""
    place = finding.place
    path = os.path.relpath(os.path.realpath(place.path), folder).replace(os.sep, "/")
    return Entry(
        path,
        finding.rule,
        _plain(sources.line(place)),
        _near(finding, sources, -1),
        _near(finding, sources, 1),
    )


def _near(finding: Finding, sources: Sources, direction: int) -> str:
    for distance in range(1, 6):
        text = _plain(sources.line(finding.place, direction * distance))
        if text:
            return text
    return ""


def _plain(text: str) -> str:
    return " ".join(text.split())


def write(file: Path, findings: Iterable[Finding], sources: Sources) -> int:
    """Writes a baseline, the whole file or nothing, and returns how many findings it holds. Raises BaselineError."""
    folder = file.resolve().parent
    entries = sorted(entry_of(finding, folder, sources) for finding in findings)
    names = [each.name for each in fields(Entry)]
    content = {
        "precisionlint-baseline": VERSION,
        "findings": [dict(zip(names, astuple(entry), strict=True)) for entry in entries],
    }
    try:
        replace_file(os.fspath(file), (json.dumps(content, indent=1) + "\n").encode("ascii"))
    except OSError as error:
        raise BaselineError(f"{file}: cannot be written: {(error.strerror or str(error)).lower()}") from error
    return len(entries)


def load(file: Path) -> Baseline:
    """The baseline in a file. Raises BaselineError."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{file}: cannot be read: {(error.strerror or str(error)).lower()}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{file}: is no baseline: {error}") from error
    if not isinstance(content, dict) or content.get("precisionlint-baseline") != VERSION:
        raise BaselineError(f"{file}: is no baseline of version {VERSION}; --write-baseline writes one")
    names = [each.name for each in fields(Entry)]
    entries = []
    for number, each in enumerate(content.get("findings") or [], 1):
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in names):
            raise BaselineError(f"{file}: entry {number} must hold {', '.join(names)}")
        entries.append(Entry(*(each[name] for name in names)))
    return Baseline(file, entries)
