"""``precisionlint check``: files in, a report out. Reads code and never runs it.

Finds the files, has each read by the plan that its settings make, and judges what was found by these settings: rules left out
for some files, severities, comments, a baseline, changed lines.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from precisionlint import baseline, documents, files, suppress
from precisionlint.baseline import Baseline
from precisionlint.cache import Kept
from precisionlint.config import Configuration, Settings
from precisionlint.findings import Coverage, Finding, Place, Replacement, Report, Suppressed
from precisionlint.memory import uncollected
from precisionlint.reader import (
    NOTHING,
    FileResult,
    Plan,
    Reader,
    Reading,
    concerns,
    digest,
    holds_subject,
    rendered,
    spelled,
    unreadable,
    with_deep_stack,
)
from precisionlint.report.excerpt import Sources
from precisionlint.source.root import find_root, surveyed_files

if TYPE_CHECKING:
    from precisionlint.changes import Changes
    from precisionlint.source.requirements import Range
    from precisionlint.worker import Answer, Task

PAYS = 300_000
"""Bytes of training code for which another process is worth its start."""

Progress = Callable[[str, int, int], None]
"""Told before a file is read: its name, how many were read before it, how many there are."""


class Request(Struct, frozen=True):
    """What a run is asked for. ``texts`` stand for files: name -> content, not read from the disk; ``markdown``: blocks of Python in
    Markdown texts are read too. ``baseline``: the file that stands above those of the settings, None for theirs, empty for none;
    ``since``: a revision of git; ``jobs``: how many processes read, None for as many as it pays."""

    paths: Sequence[str]
    configuration: Configuration
    texts: Mapping[str, bytes] = field(default_factory=dict)
    markdown: bool = False
    baseline: str | None = None
    since: str = ""
    cache: bool = False
    jobs: int | None = 1
    progress: Progress | None = None


def check(request: Request) -> Report:
    """Reads what a request names and reports what is wrong there.

    Raises ConfigError, catalogue.UnknownNameError, baseline.BaselineError, changes.ChangesError.
    """
    on_disk = [path for path in request.paths if path not in request.texts]
    kinds = files.Kinds(suffixes(markdown=request.markdown), holds_subject)
    found, errors = files.find(on_disk, request.configuration, kinds)
    found += [
        (name, Path(name)) for name in request.texts if not files.left_out(Path(name).resolve(), request.configuration)
    ]
    settings = {display: request.configuration.of(path) for display, path in found}
    baselines = _baselines(request, settings)
    changes = _changes(request.since)
    with uncollected():
        results = _read(request, found, settings)

    sources = Sources(request.texts)
    paths = dict(found)
    findings: list[Finding] = []
    suppressed: list[Suppressed] = []
    torches = Torches()
    for display, path in found:
        result = torches.gated(results[display], settings[display], path)
        errors += result.errors
        kept, silenced = judged(result, settings[display], path)
        suppressed += silenced
        kept, known = _new(kept, baselines.get(display), changes, sources)
        suppressed += known
        findings += kept
    findings = [torches.fixable(each, settings[each.place.path], paths[each.place.path]) for each in findings]
    looked_at = {os.path.realpath(path) for _, path in found} if baselines else set()
    stale = [entry for each in dict.fromkeys(baselines.values()) for entry in each.stale(looked_at)]
    replacements = _replacements(findings, results, paths, request.texts)
    findings = [each if each.fix is None or each in replacements else replace(each, fix=None) for each in findings]
    return Report(
        tuple(sorted(findings, key=_order)),
        tuple(sorted(errors, key=lambda e: (e.path, e.line or 0))),
        coverage(results.values()),
        tuple(sorted(suppressed, key=lambda each: _order(each.finding))),
        tuple(map(str, stale)),
        _unheard(request, found, settings),
        _idle(request, found, settings, results),
        request.texts,
        replacements,
    )


def _new(
    findings: list[Finding], known: Baseline | None, changes: Changes | None, sources: Sources
) -> tuple[list[Finding], list[Suppressed]]:
    """What is new of a file's findings beside a baseline and a revision, and what is not."""
    suppressed: list[Suppressed] = []
    if known is not None:
        findings, old = known.split(findings, sources)
        suppressed += (Suppressed(each, "baseline") for each in old)
    if changes is not None:
        near = {index for index, each in enumerate(findings) if changes.touch(each)}
        suppressed += (Suppressed(each, "unchanged") for index, each in enumerate(findings) if index not in near)
        findings = [each for index, each in enumerate(findings) if index in near]
    return findings, suppressed


class Torches:
    """Holds findings against the versions of torch that their projects run with: those of the settings, else those that the files of
    the project's root declare. A file is looked at when a finding first depends on it."""

    def __init__(self) -> None:
        self._of: dict[str | Path, Range] = {}

    def _range(self, settings: Settings, path: Path) -> Range:
        from precisionlint.source import requirements

        key = settings.torch_version or find_root(path.absolute())
        if key not in self._of:
            self._of[key] = requirements.parse(key) if isinstance(key, str) else requirements.versions(key)
        return self._of[key]

    def gated(self, result: FileResult, settings: Settings, path: Path) -> FileResult:
        """A file's result without what is no fault in these versions."""
        if not any(each.torch for each in result.findings):
            return result
        held = self._range(settings, path)
        kept = [pair for pair in zip(result.findings, result.covered, strict=True) if held.meets(pair[0].torch)]
        return replace(result, findings=tuple(one for one, _ in kept), covered=tuple(other for _, other in kept))

    def fixable(self, finding: Finding, settings: Settings, path: Path) -> Finding:
        """A finding, with an unsafe fix where the oldest of these versions does not know what it writes."""
        fix = finding.fix
        if fix is None or not fix.torch or not fix.safe:
            return finding
        from precisionlint.source.requirements import shown, version

        oldest = self._range(settings, path).oldest
        if oldest is None or oldest >= version(fix.torch):
            return finding
        return replace(
            finding, fix=replace(fix, unsafe=f"it needs torch {fix.torch}, and the project allows {shown(oldest)}")
        )


def _rendered(
    display: str, path: Path, findings: Iterable[Finding], texts: Mapping[str, bytes]
) -> dict[Finding, tuple[Replacement, ...]]:
    """The fixes of a file's findings that can be made, as text. A file that cannot be read any more has none."""
    with contextlib.suppress(OSError):
        data = texts[display] if display in texts else path.read_bytes()
        return with_deep_stack(lambda: rendered(display, data, findings))
    return {}


def _replacements(
    findings: Iterable[Finding],
    results: Mapping[str, FileResult],
    paths: Mapping[str, Path],
    texts: Mapping[str, bytes],
) -> dict[Finding, tuple[Replacement, ...]]:
    """The fixes of findings that can be made, as text: those that came with the results, and those of what comments gave rise to."""
    known = {
        _fault(finding): replacements
        for result in results.values()
        for finding, replacements in zip(result.findings, result.made, strict=False)
    }
    made: dict[Finding, tuple[Replacement, ...]] = {}
    others: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.fix is None:
            continue
        if _fault(finding) not in known:
            others.setdefault(finding.place.path, []).append(finding)
        elif replacements := known[_fault(finding)]:
            made[finding] = replacements
    for display, each in others.items():
        made |= _rendered(display, paths[display], each, texts)
    return made


def _fault(finding: Finding) -> tuple[str, Place, str]:
    """What a finding is of, whatever severity the settings give it."""
    return finding.rule, finding.place, finding.message


def suffixes(*, markdown: bool) -> tuple[str, ...]:
    """How the names end of the files that a folder is read for."""
    return documents.SUFFIXES + files.CONFIGURATIONS + (documents.MARKDOWN if markdown else ())


def _changes(since: str) -> Changes | None:
    if not since:
        return None
    from precisionlint.changes import Changes

    return Changes(since, Path.cwd())


def _baselines(request: Request, settings: Mapping[str, Settings]) -> dict[str, Baseline]:
    """The baseline of each file that has one."""
    loaded: dict[Path, Baseline] = {}
    by_name: dict[str, Baseline] = {}
    for display, each in settings.items():
        if request.baseline is not None:
            file = Path(request.baseline) if request.baseline else None
        else:
            file = each.base / each.baseline if each.baseline else None
        if file is not None:
            if file not in loaded:
                loaded[file] = baseline.load(file)
            by_name[display] = loaded[file]
    return by_name


def _order(finding: Finding) -> tuple[object, ...]:
    place = finding.place
    return (place.path, place.cell, place, finding.rule, finding.message)


def _unheard(request: Request, found: Sequence[tuple[str, Path]], settings: Mapping[str, Settings]) -> tuple[str, ...]:
    """The names of assumptions that no file mentions: neither those named nor the others of their projects."""
    missing = {name: _word(name) for each in settings.values() for name in each.assume}
    for path in _projects(found) if missing else ():
        try:
            data = request.texts.get(os.fspath(path)) or path.read_bytes()
        except OSError:
            continue
        missing = {name: word for name, word in missing.items() if not word.search(data)}
        if not missing:
            break
    return tuple(sorted(missing))


def _idle(
    request: Request,
    found: Sequence[tuple[str, Path]],
    settings: Mapping[str, Settings],
    results: Mapping[str, FileResult],
) -> tuple[str, ...]:
    """The names of assumptions that stand in programs of the run, and that no undecided value there has."""
    heard = {name for result in results.values() for name in result.totals.assumed}
    idle: set[str] = set()
    for display, path in found:
        names = settings[display].assume.keys() - heard - idle
        if names and results[display].totals.programs:
            with contextlib.suppress(OSError):
                data = request.texts.get(display) or path.read_bytes()
                idle.update(name for name in names if _word(name).search(data))
    return tuple(sorted(idle))


def _word(name: str) -> re.Pattern[bytes]:
    """The last part of a name where it stands alone."""
    return re.compile(rb"(?<![\w])" + re.escape(name.rpartition(".")[2].encode()) + rb"(?![\w])")


def _projects(found: Sequence[tuple[str, Path]]) -> Iterator[Path]:
    """The files of a run, then the other Python files of their projects."""
    yield from (path for _, path in found)
    for root in dict.fromkeys(find_root(path.absolute()) for _, path in found):
        yield from surveyed_files(root)


def plan_of(settings: Settings) -> Plan:
    """The plan by which files of these settings are read."""
    return Plan(
        settings.rules,
        tuple(sorted(settings.assume.items())),
        settings.device,
        tuple(sorted(settings.frameworks.items())),
        settings.least == "possible",
    )


def _read(
    request: Request, found: Sequence[tuple[str, Path]], settings: Mapping[str, Settings]
) -> dict[str, FileResult]:
    """What each file holds, by its name: from the cache where that still holds, else read, in several processes if it is much."""
    results: dict[str, FileResult] = {}
    kept = Kept(enabled=request.cache)
    tasks: dict[Plan, list[tuple[str, str]]] = {}
    size = 0
    plans: dict[int, Plan] = {}  # by the identity of settings, which live as long as the run
    for display, path in found:
        plan = plans.get(id(settings[display])) or plans.setdefault(id(settings[display]), plan_of(settings[display]))
        if display in request.texts:
            reader = Reader(plan)
            data = request.texts[display]
            results[display] = with_deep_stack(lambda r=reader, d=display, p=path, b=data: r.file(d, p, b))  # type: ignore[misc]
            continue
        result = kept.get(settings[display], plan, display, path)
        if result is not None:
            results[display] = result
            continue
        try:
            data = path.read_bytes()
        except OSError as error:
            results[display] = FileResult(errors=(unreadable(display, error),))
            continue
        if concerns(display, data, plan.words):
            tasks.setdefault(plan, []).append((display, os.fspath(path)))
            size += len(data)
        else:
            results[display] = NOTHING
            kept.put(Reading(display, NOTHING, digest(data)), path)
    paths = dict(found)
    for readings, looked in _answers(list(tasks.items()), jobs_for(request.jobs, size, sum(map(len, tasks.values())))):
        kept.learn(looked)
        for reading in readings:
            if request.progress is not None:
                request.progress(reading.display, len(results), len(found))
            results[reading.display] = reading.result
            kept.put(reading, paths[reading.display])
    kept.save()
    for display, path in found:
        # A file that is named is looked at, even if nothing in it trains.
        if display in request.paths and results[display].unread and documents.kind(display) != "markdown":
            told = spelled(display, path, request.texts.get(display))
            results[display] = told if told.errors else results[display]
    return {display: results[display] for display, _ in found}


def jobs_for(asked: int | None, size: int, count: int) -> int:
    """How many processes read so many bytes in so many files: as many as asked for, else as many as it pays to start."""
    if asked is not None:
        return max(1, min(asked, count))
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(processors, size // PAYS, count))


def _answers(tasks: list[Task], jobs: int) -> Iterator[Answer]:
    if jobs > 1:
        from precisionlint import pool

        yield from pool.read(pool.tasks_of(tasks, jobs), jobs)
        return
    for plan, held in tasks:
        reader = Reader(plan)
        for display, path in held:
            reading = with_deep_stack(lambda r=reader, d=display, p=path: r.read(d, Path(p)))  # type: ignore[misc]
            yield [reading], reader.taken()


def judged(result: FileResult, settings: Settings, path: Path) -> tuple[list[Finding], list[Suppressed]]:
    """What counts of a file's findings by its settings and comments, and what these comments silence."""
    off = settings.ignores(path.resolve().as_posix()) if settings.per_file_ignores else frozenset()
    findings = [
        (replace(each, severity=settings.severity_of(each)), covered)
        for each, covered in zip(result.findings, result.covered, strict=True)
        if each.rule not in off
    ]
    if not result.comments:
        return [each for each, _ in findings if settings.shows(each)], []
    # A block of text is a part of something: what would be found in the whole of it, nobody can tell.
    judge = result.complete and not settings.assume and documents.kind(path.name) != "markdown"
    kept, suppressed = suppress.apply(findings, result.comments, settings.rules - off, judge=judge)
    shown = [replace(each, severity=settings.severity_of(each)) for each in kept if settings.shows(each)]
    return shown, [each for each in suppressed if settings.shows(each.finding)]


def coverage(results: Iterable[FileResult]) -> Coverage:
    """How far reading went, summed over files."""
    results = list(results)
    totals = [each.totals for each in results]
    recipes = Counter(recipe for each in totals for recipe in each.recipes)
    places = [place for each in totals for place in each.gave_up]
    return Coverage(
        len(results),
        sum(each.totals.read for each in results if not each.errors),
        sum(each.programs for each in totals),
        len({spot for each in totals for spot in each.loops}),
        len({spot for each in totals for spot in each.optimizers}),
        len({spot for each in totals for spot in each.scalers}),
        tuple(name for name, _ in recipes.most_common()),
        tuple(sorted(places, key=lambda place: (place.path, place.line, place.what))),
    )
