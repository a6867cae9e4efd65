"""What a run says in the end: findings, the files it could not read, and how far reading went.

It knows neither how a finding was made nor how one is printed. Lines and columns count from 1, columns in characters,
`end_column` is the column after the last character; paths are as the user gave them, with `/`.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from precisionlint.records import Record

Severity = Literal["error", "warning", "info"]
Confidence = Literal["certain", "likely", "possible"]
"""All that leads to it is known; a dtype follows something, and the project shows half precision that reaches it; a library's callers
decide on it. What is only possible is of severity info, and is shown to who asks for it."""
Suppressor = Literal["comment", "baseline", "unchanged"]
"""A comment in the source, an entry of a baseline, or a line that has not changed since the revision compared with."""

CONFIDENCES: tuple[Confidence, ...] = ("certain", "likely", "possible")
"""From the surest down."""

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""From the gravest down: the order in which they are counted and listed."""


class Place(Struct, frozen=True, order=True):
    """A span of source text. In a notebook ``cell`` counts all its cells from 1 and lines count within the cell; else it is 0."""

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    cell: int = 0

    @property
    def where(self) -> str:
        """``train.py:3``, or ``notes.ipynb:cell 2:3``."""
        return f"{self.path}:cell {self.cell}:{self.line}" if self.cell else f"{self.path}:{self.line}"


class Step(Struct, frozen=True):
    """One station on the way that led to a finding."""

    place: Place
    message: str


EditKind = Literal["argument", "rename", "receiver", "operands", "before", "comment"]
"""See ``checks.base.Change``."""


class Edit(Struct, frozen=True):
    """What is to change at a place of the program that holds the finding (a notebook's cells are one, see ``documents``);
    ``source.fixes`` makes text of it."""

    kind: EditKind
    place: Place
    name: str = ""
    text: str = ""


class Fix(Struct, frozen=True):
    """A change of the source that takes a fault away: all of its edits, or none. ``unsafe``: what else it changes; empty where it is safe."""

    edits: tuple[Edit, ...]
    unsafe: str = ""
    torch: str = ""
    """The version of torch that first knows what it writes, where that is a recent one."""

    @property
    def safe(self) -> bool:
        """Whether it cannot raise, keeps every dtype that other code sees, and changes training only by taking the fault away."""
        return not self.unsafe


class Replacement(Struct, frozen=True):
    """A span of the source (of no width: a point between characters) and the text to stand there."""

    place: Place
    text: str


class Finding(Struct, frozen=True):
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
    fix: Fix | None = None
    torch: str = ""
    """The versions of torch in which it is a fault, ``>=2.9`` or ``<2.12``; empty where it is one in all."""
    decided: tuple[tuple[str, ...], ...] = ()
    """What else it hangs on: what each way there decided at branches that no place of it stands in, such as `not args.unscale`;
    none where a way decided nothing."""


def best(findings: Iterable[Finding]) -> list[Finding]:
    """The better of findings of one rule at one place: the surer one, that with fewer conditions, the shorter way. What is possible in a
    line gives way to what is surer there."""

    def rank(finding: Finding) -> tuple[object, ...]:
        way = tuple((step.place, step.message) for step in finding.trace)
        conditions = finding.when.count(" and ") + bool(finding.when)
        return (CONFIDENCES.index(finding.confidence), conditions, len(way), finding.message, finding.when, way)

    found: dict[tuple[str, Place], Finding] = {}
    for finding in findings:
        key = (finding.rule, finding.place)
        known = found.get(key)
        chosen = finding if known is None or rank(finding) < rank(known) else known
        if known is not None and (known.decided or finding.decided):
            ways = known.decided + finding.decided if known.decided and finding.decided else ()
            chosen = replace(chosen, decided=tuple(dict.fromkeys(ways)))
        found[key] = chosen
    surer = {(each.rule, each.place.path, each.place.line) for each in found.values() if each.confidence != "possible"}
    return [
        each
        for each in found.values()
        if each.confidence != "possible" or (each.rule, each.place.path, each.place.line) not in surer
    ]


class Suppressed(Struct, frozen=True):
    """A finding that does not count, what says so, and the reason given there. ``at`` is the comment's place."""

    finding: Finding
    by: Suppressor
    reason: str = ""
    at: Place | None = None


class FileError(Struct, frozen=True):
    """A path that could not be read or parsed; `line` is known for syntax errors."""

    path: str
    line: int | None
    message: str


class Spot(Struct, frozen=True):
    """Where something stands: two files that lead to it have come across one thing."""

    path: str
    line: int
    column: int


class GaveUp(Struct, frozen=True):
    """A place where reading stopped following the program, and what it left unread there."""

    path: str
    line: int
    what: str


class Coverage(Struct, frozen=True):
    """How far reading went: `files` were looked at, `read` of them hold something that concerns precision."""

    files: int
    read: int
    programs: int
    loops: int
    optimizers: int
    scalers: int
    recipes: tuple[str, ...] = ()
    gave_up: tuple[GaveUp, ...] = ()


class Report(Record, frozen=True, eq=False):
    """The outcome of one run."""

    aside: ClassVar[tuple[str, ...]] = ("texts", "replacements")

    findings: tuple[Finding, ...]
    errors: tuple[FileError, ...]
    coverage: Coverage
    suppressed: tuple[Suppressed, ...] = ()
    stale: tuple[str, ...] = ()
    """Entries of the baseline that no finding fits any more, in words."""
    unheard: tuple[str, ...] = ()
    """Names that a configuration was assumed for and that nothing in the projects read is called by."""
    idle: tuple[str, ...] = ()
    """Such names that stand in the files read, where no value that is undecided is called by them."""
    texts: Mapping[str, bytes] = field(default_factory=dict)
    """What was read instead of files: name -> content."""
    replacements: Mapping[Finding, tuple[Replacement, ...]] = field(default_factory=dict)
    """The fixes of findings as text, where the run was asked for it and the file as it stands allows it."""

    @property
    def exit_code(self) -> int:
        """2 where a file could not be read, 1 where an error or a warning was found, else 0."""
        return self.exit_code_at("warning")

    def exit_code_at(self, fail_on: Severity) -> int:
        """2 where a file could not be read, 1 where a finding is at least as grave as ``fail_on``, else 0."""
        if self.errors:
            return 2
        grave = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
        return int(any(finding.severity in grave for finding in self.findings))
