"""What a run says in the end: findings, the files it could not read, and how far reading went.

It knows neither how a finding was made nor how one is printed. Lines and columns count from 1, columns in characters,
`end_column` is the column after the last character; paths are as the user gave them, with `/`.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
Confidence = Literal["certain", "likely"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From the gravest down: the order in which they are counted and listed."""


@dataclass(frozen=True, order=True)
class Place:
    """A span of source text."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int


@dataclass(frozen=True)
class Step:
    """One station on the way that led to a finding."""

    place: Place
    message: str


@dataclass(frozen=True)
class Finding:
    """One fault: where it stands, what follows from it, and the path that leads there."""

    rule: str
    family: str
    severity: Severity
    confidence: Confidence
    message: str
    place: Place
    when: str = ""
    """The configuration in which it happens, such as `args.fp16 is set`; empty where it always does."""
    trace: tuple[Step, ...] = ()


@dataclass(frozen=True)
class FileError:
    """A path that could not be read or parsed; `line` is known for syntax errors."""

    path: str
    line: int | None
    message: str


@dataclass(frozen=True)
class GaveUp:
    """A place where reading stopped following the program, and what it left unread there."""

    path: str
    line: int
    what: str


@dataclass(frozen=True)
class Coverage:
    """How far reading went: `files` were looked at, `read` of them hold something that concerns precision."""

    files: int
    read: int
    programs: int
    loops: int
    optimizers: int
    scalers: int
    recipes: tuple[str, ...] = ()
    gave_up: tuple[GaveUp, ...] = ()


@dataclass(frozen=True)
class Report:
    """The outcome of one run."""

    findings: tuple[Finding, ...]
    errors: tuple[FileError, ...]
    coverage: Coverage

    @property
    def exit_code(self) -> int:
        """2 where a file could not be read, 1 where a finding fails the run, else 0."""
        if self.errors:
            return 2
        return int(any(finding.severity != "info" for finding in self.findings))
