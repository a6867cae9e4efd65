"""Which lines have changed since a revision, as git tells it, and whether a finding has to do with them."""

from __future__ import annotations

import codecs
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct, field

from precisionlint.errors import InputError
from precisionlint.findings import Finding, Place
from precisionlint.patterns import regex

HUNK = regex(rb"@@ -\d+(?:,\d+)? \+(\d+)(?:,(\d+))? @@")


class ChangesError(InputError):
    """git could not tell; the text is one line that says why."""


class _File(Struct):
    whole: bool = False
    lines: list[tuple[int, int]] = field(default_factory=list)
    """First and last line of each run of lines that are new."""
    gaps: list[int] = field(default_factory=list)
    """Lines after which others were taken out."""

    def holds(self, place: Place) -> bool:
        changed = self.whole or bool(place.cell and (self.lines or self.gaps))
        return changed or any(first <= place.end_line and place.line <= last for first, last in self.lines)

    def cuts(self, first: int, last: int) -> bool:
        return any(first <= gap < last for gap in self.gaps)


class Changes:
    """The lines that differ from a revision, or from where the present branch left it. Raises ChangesError."""

    def __init__(self, revision: str, folder: Path) -> None:
        self._root = os.fsdecode(_git(folder, "rev-parse", "--show-toplevel").removesuffix(b"\n"))
        commit = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
        base = _git(folder, "merge-base", commit.decode(), "HEAD", missing=commit).strip()
        self._files: dict[str, _File] = {}
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/")
        diff = _git(
            Path(self._root), "diff", "--unified=0", "--no-color", "--no-ext-diff", *prefixes, base.decode(), "--"
        )
        self._read(diff)
        for name in _git(Path(self._root), "ls-files", "--others", "--exclude-standard", "-z").split(b"\0"):
            if name:
                self._file(name).whole = True

    def _file(self, name: bytes) -> _File:
        path = os.path.join(os.path.realpath(self._root), os.fsdecode(name))
        return self._files.setdefault(path, _File())

    def _read(self, diff: bytes) -> None:
        current: _File | None = None
        left = 0
        for line in diff.split(b"\n"):
            if left and line[:1] == b"+":
                left -= 1
            elif line.startswith(b"+++ "):
                name = _name(line[4:])
                current = self._file(name.removeprefix(b"b/")) if name != b"/dev/null" else None
            elif current is not None and (hunk := HUNK.match(line)):
                first, count = int(hunk[1]), int(hunk[2] or 1)
                left = count
                if count:
                    current.lines.append((first, first + count - 1))
                else:
                    current.gaps.append(first)

    def touch(self, finding: Finding) -> bool:
        """Whether a finding, or a station of the way to it, stands on a changed line, or lines were taken out between them."""
        places = [finding.place, *(step.place for step in finding.trace)]
        by_file: dict[str, list[Place]] = {}
        for place in places:
            by_file.setdefault(os.path.realpath(place.path), []).append(place)
        return any(self._touches(self._files[path], held) for path, held in by_file.items() if path in self._files)

    @staticmethod
    def _touches(file: _File, places: Iterable[Place]) -> bool:
        held = list(places)
        first, last = min(place.line for place in held), max(place.end_line for place in held)
        return any(map(file.holds, held)) or file.cuts(first, last)


def _name(quoted: bytes) -> bytes:
    """A name as a diff writes it: in quotes, with escapes, where it holds what needs them; a tab ends one with spaces."""
    if quoted.startswith(b'"'):
        return codecs.escape_decode(quoted[1 : quoted.rindex(b'"')])[0]
    return quoted.removesuffix(b"\r").partition(b"\t")[0]


def _git(folder: Path, *arguments: str, missing: bytes | None = None) -> bytes:
    """What git prints; ``missing``: what stands for it where git fails."""
    command = ["git", "-c", "core.quotePath=false", "-C", str(folder), *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise ChangesError(f"git cannot be run: {(error.strerror or str(error)).lower()}") from error
    if ran.returncode == 0:
        return ran.stdout
    if missing is not None:
        return missing
    said = ran.stderr.decode(errors="replace").strip().splitlines()
    if arguments[:2] == ("rev-parse", "--verify"):
        raise ChangesError(f"git knows no revision '{arguments[-1].removesuffix('^{commit}')}'")
    raise ChangesError(f"git {arguments[0]}: {said[-1] if said else f'failed with {ran.returncode}'}")
