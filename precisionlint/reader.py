"""One file read: its programs through the front end and the subjects, and the comments that speak for what was found.

What comes out, ``FileResult``, depends on nothing but the file, the files that it leads to and what the ``Reader`` was told:
the settings that judge findings come later. So it can be kept, or made in another process.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from precisionlint import documents, suppress
from precisionlint.files import CONFIGURATIONS, LARGEST
from precisionlint.findings import FileError, Finding, GaveUp, Place, Replacement, Spot, best
from precisionlint.source.screen import own_words, worth_parsing
from precisionlint.subjects import SUBJECTS

if TYPE_CHECKING:
    from precisionlint.source.run import Run

T = TypeVar("T")
Looked = dict[Path, dict[Path, "Path | None"]]
"""See ``source.project.Project.looked``."""
STACK = 512 * 1024 * 1024
"""Bytes of stack for reading: deep but legal code needs more than a thread has by default."""

TREES = (".json", ".yaml", ".yml")
"""How the names of configurations end that have a syntax of their own."""

BUDGET = ("too many paths", "more paths at once", "nested too deeply")
"""How the reasons begin for which a program was not read to its end."""


class Plan(Struct, frozen=True, dict=True):
    """What readings have in common: the rules looked for, the configuration assumed, the device trained on, what classes and functions of
    others act as, and whether what is only possible is looked for."""

    rules: frozenset[str]
    assume: tuple[tuple[str, str], ...] = ()
    device: str = ""
    frameworks: tuple[tuple[str, str], ...] = ()
    possible: bool = False

    @cached_property
    def words(self) -> tuple[bytes, ...]:
        """The words for which a file is worth parsing beside those of ``source.screen``."""
        return tuple(own_words(self.frameworks))


class Totals(Struct):
    """How far reading went in one file."""

    read: int = 0
    programs: int = 0
    loops: tuple[Spot, ...] = ()
    optimizers: tuple[Spot, ...] = ()
    scalers: tuple[Spot, ...] = ()
    recipes: tuple[str, ...] = ()
    gave_up: tuple[GaveUp, ...] = ()
    assumed: tuple[str, ...] = ()
    """The names of assumptions that some undecided value has."""


class FileResult(Struct, frozen=True):
    """What reading a file gave. ``covered`` holds for each finding the indices of the ``comments`` that speak for it."""

    findings: tuple[Finding, ...] = ()
    covered: tuple[tuple[int, ...], ...] = ()
    comments: tuple[suppress.Comment, ...] = ()
    errors: tuple[FileError, ...] = ()
    totals: Totals = field(default_factory=Totals)
    made: tuple[tuple[Replacement, ...] | None, ...] = ()
    """The fix of each finding as text, None where there is none; nothing where no finding has one."""

    @property
    def complete(self) -> bool:
        """Whether the file was read to its end, so that what was not found is not there."""
        return not self.errors and not any(each.what.startswith(BUDGET) for each in self.totals.gave_up)

    @property
    def unread(self) -> bool:
        """Whether there was nothing in the file to read."""
        return not self.errors and not self.totals.read


NOTHING = FileResult()


Survey = Literal["precision", "names", "all"]
"""What of a whole project a result rests on: which files set the precision of products, which files import which, or all that they hold."""


class Reading(Struct, frozen=True):
    """A file's result with what it rests on: the hash of the content read (empty where there was none), what of the whole project, and the
    files that were asked how they call it (absolute paths)."""

    display: str
    result: FileResult
    digest: str = ""
    surveyed: tuple[Survey, ...] = ()
    callers: tuple[str, ...] = ()


def digest(data: bytes) -> str:
    """The hash by which a file's content is known."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def concerns(display: str, data: bytes, own: tuple[bytes, ...] = ()) -> bool:
    """Whether there is anything in a file to read: training, a subject of ``subjects``, a comment for this program; ``own``: see
    ``Plan.words``."""
    kind = documents.kind(display)
    if kind == "notebook":
        return True
    if kind != "other" and (suppress.speaks(data) or worth_parsing(data, own)):
        return True
    return holds_subject(display, data)


def holds_subject(display: str, data: bytes) -> bool:
    """Whether a file holds one of the ``subjects``, by its name and bytes."""
    return any(subject.wants(display, data) for subject in SUBJECTS)


class Reader:
    """Reads files by one plan; what they share (projects, parsed modules) is kept between them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.run: Run | None = None

    def file(self, display: str, path: Path, data: bytes) -> FileResult:
        """Reads a file, whatever kind of document it is."""
        try:
            programs = documents.programs(display, data)
        except documents.DocumentError as error:
            return FileResult(errors=(FileError(display, None, str(error)),))
        results = [
            self.program(display, _path(path, program, number), program) for number, program in enumerate(programs)
        ]
        return _with_fixes(display, data, results[0] if len(results) == 1 else _joined(results))

    def read(self, display: str, path: Path) -> Reading:
        """Reads a file of the disk."""
        try:
            data = path.read_bytes()
        except OSError as error:
            return Reading(display, FileResult(errors=(unreadable(display, error),)))
        result = self.file(display, path, data)
        absolute = Path(os.path.abspath(path))
        project = self.run.project(absolute) if self.run is not None else None
        if project is None:
            return Reading(display, result, digest(data))
        asked: dict[Survey, bool] = {
            "precision": absolute in project.surveyed,
            "names": absolute in project.called,
            "all": absolute in project.weighed,
        }
        callers = tuple(sorted(map(str, project.called.get(absolute, ()))))
        return Reading(display, result, digest(data), tuple(what for what in asked if asked[what]), callers)

    def taken(self) -> dict[Path, Looked]:
        """What reading led to since this was last asked: project -> file -> answers."""
        taken: dict[Path, Looked] = {}
        for root, project in self.run.projects.items() if self.run is not None else ():
            taken[root], project.looked = project.looked, {}
        return taken

    def program(self, display: str, path: Path, program: documents.Program) -> FileResult:
        """Reads one program of a file."""
        data = program.data
        python = documents.kind(display) != "other"
        written = b"\n".join((data, *(each.data for each in program.broken)))
        trains = python and worth_parsing(written, self.plan.words)
        subjects = [subject for subject in SUBJECTS if subject.wants(display, data)]
        comments = (suppress.comments if python else suppress.configuration_comments)(display, data)
        statements = (suppress.statements(data) if python else suppress.Statements(())) if comments else None
        if statements is None:
            comments = ()  # there are none, or the file is no Python, which is told elsewhere
        if not trains and not subjects:
            return replace(NOTHING, comments=_located(comments, program)) if comments else NOTHING
        if self.run is None:
            from precisionlint.source.run import Run

            self.run = Run(self.plan.rules, dict(self.plan.assume), self.plan.device, self.plan.frameworks)
        self.run.possible = self.plan.possible or bool(comments)  # a comment may silence what is only possible
        errors = list(program.errors(display))
        findings: list[Finding] = []
        totals = Totals()
        if trains:
            findings += self.run.file(display, path, data, errors, totals)
        if subjects:
            totals.read = 1
            findings = best([*findings, *self.run.facts(display, path, data, subjects, errors)])
        if not program.whole and any(error.line is not None for error in errors):
            return NOTHING  # a block of a text that is no Python is none of ours
        findings.sort(key=lambda f: (f.place, f.rule, f.message))
        covered: tuple[tuple[int, ...], ...] = ((),) * len(findings)
        if statements is not None:
            covered = tuple(suppress.covering(each.place.line, comments, statements) for each in findings)
        return FileResult(
            tuple(_moved(each, display, program) for each in findings),
            covered,
            _located(comments, program),
            tuple(_placed(each, program) for each in errors),
            replace(totals, gave_up=tuple(_at_line(each, display, program) for each in totals.gave_up)),
        )


def _path(path: Path, program: documents.Program, number: int) -> Path:
    """The path under which a program is read: blocks of one text are files of their own, in its folder."""
    return path if program.whole else path.with_name(f"{path.name}#{number + 1}")


def _joined(results: list[FileResult]) -> FileResult:
    comments: tuple[suppress.Comment, ...] = ()
    covered: list[tuple[int, ...]] = []
    for each in results:
        covered += [tuple(index + len(comments) for index in indices) for indices in each.covered]
        comments += each.comments
    totals = [each.totals for each in results]
    return FileResult(
        tuple(finding for each in results for finding in each.findings),
        tuple(covered),
        comments,
        tuple(error for each in results for error in each.errors),
        Totals(
            max((each.read for each in totals), default=0),
            sum(each.programs for each in totals),
            tuple(spot for each in totals for spot in each.loops),
            tuple(spot for each in totals for spot in each.optimizers),
            tuple(spot for each in totals for spot in each.scalers),
            tuple(recipe for each in totals for recipe in each.recipes),
            tuple(place for each in totals for place in each.gave_up),
            tuple(name for each in totals for name in each.assumed),
        ),
    )


def _with_fixes(display: str, data: bytes, result: FileResult) -> FileResult:
    """A result with its fixes as text. One that cannot be made in the file as it stands is none, and is not spoken of."""
    if all(each.fix is None for each in result.findings):
        return result
    made = rendered(display, data, result.findings)
    findings = tuple(each if each in made else replace(each, fix=None) for each in result.findings)
    return replace(result, findings=findings, made=tuple(map(made.get, findings)))


def rendered(display: str, data: bytes, findings: Iterable[Finding]) -> dict[Finding, tuple[Replacement, ...]]:
    """The fixes of a file's findings that can be made, as text: in Python files and notebooks."""
    from precisionlint import notebook_fixes
    from precisionlint.source import fixes

    makers = {"python": fixes.rendered, "notebook": notebook_fixes.rendered}
    maker = makers.get(documents.kind(display))
    return maker(data, findings) if maker is not None else {}


def _moved(finding: Finding, display: str, program: documents.Program) -> Finding:
    """A finding with its places led back into the document."""
    if not program.cells and not program.indent:
        return finding

    def moved(place: Place) -> Place:
        return program.locate(place) if place.path == display else place

    trace = tuple(replace(step, place=moved(step.place)) for step in finding.trace)
    return replace(finding, place=moved(finding.place), trace=trace)


def _located(comments: tuple[suppress.Comment, ...], program: documents.Program) -> tuple[suppress.Comment, ...]:
    if not program.cells and not program.indent:
        return comments
    return tuple(
        replace(
            each,
            at=program.locate(each.at),
            rules=tuple((word, program.locate(place)) for word, place in each.rules),
        )
        for each in comments
    )


def _placed(error: FileError, program: documents.Program) -> FileError:
    if not program.cells or error.line is None:
        return error
    cell, line = program.line(error.line)
    return FileError(error.path, None, f"cell {cell}, line {line}: {error.message}")


def _at_line(place: GaveUp, display: str, program: documents.Program) -> GaveUp:
    if not program.cells or place.path != display:
        return place
    cell, line = program.line(place.line)
    return replace(place, line=line, what=f"cell {cell}: {place.what}")


def spelled(display: str, path: Path, text: bytes | None) -> FileResult:
    """What there is to say of a file (or the text that stands for it) in which there is nothing to read: that it is no Python (or a cell
    of it is none), no JSON or YAML, of no kind that is read at all, or nothing."""
    from precisionlint.source.parsing import UnreadableError, parse

    name = display.lower()
    if documents.kind(display) == "other" and not name.endswith(CONFIGURATIONS):
        kinds = ", ".join((*documents.SUFFIXES, ".pyw", *documents.MARKDOWN, *CONFIGURATIONS))
        return FileResult(
            errors=(FileError(display, None, f"nothing that check reads: its name ends in none of {kinds}"),)
        )
    try:
        data = path.read_bytes() if text is None else text
        if name.endswith(TREES) and len(data) <= LARGEST:
            with_deep_stack(lambda: trees(display, path, data))
        elif documents.kind(display) == "python":
            with_deep_stack(lambda: parse(data))
        elif documents.kind(display) == "notebook":
            broken = with_deep_stack(lambda: documents.notebook(data)).errors(display)
            return FileResult(errors=broken) if broken else NOTHING
    except OSError as error:
        return FileResult(errors=(unreadable(display, error),))
    except UnreadableError as error:
        return FileResult(errors=(FileError(display, error.line, error.message),))
    except documents.DocumentError as error:
        return FileResult(errors=(FileError(display, None, str(error)),))
    return NOTHING


def trees(display: str, path: Path, data: bytes) -> None:
    """Reads a configuration as its framework would.

    Raises: UnreadableError.
    """
    from precisionlint.source.project import Project
    from precisionlint.subjects import File, yaml_trees

    yaml_trees.documents(File(display, path, data, Project(path.absolute().parent)))


def unreadable(display: str, error: OSError) -> FileError:
    """Says that a file could not be read."""
    return FileError(display, None, f"cannot be read: {error.strerror or error}")


def with_deep_stack(work: Callable[[], T]) -> T:
    """Runs a function in a thread with ``STACK`` bytes of stack; what it raises is raised here."""
    outcome: list[T] = []
    failure: list[BaseException] = []

    def target() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # handed on to the caller's thread
            failure.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(STACK)
    sys.setrecursionlimit(100_000)
    try:
        thread = threading.Thread(target=target, name="precisionlint", daemon=True)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
    if failure:
        raise failure[0]
    return outcome[0]
