"""``precisionlint check``: files in, a report out. Reads code and never runs it.

Finds the files, has each read by the plan that its settings make, and judges what was found by these settings: rules left out
for some files, severities, comments, a baseline, changed lines.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from precisionlint import baseline, documents, files, suppress
from precisionlint.baseline import Baseline
from precisionlint.config import Configuration, Settings
from precisionlint.findings import Coverage, FileError, Finding, Report, Suppressed
from precisionlint.reader import FileResult, Plan, Reader, read_bytes
from precisionlint.report.excerpt import Sources

if TYPE_CHECKING:
    from precisionlint.changes import Changes

STACK = 512 * 1024 * 1024
"""Bytes of stack for reading: deep but legal code needs more than a thread has by default."""

Progress = Callable[[str, int, int], None]
"""Told before a file is read: its name, how many were read before it, how many there are."""
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """What a run is asked for. ``texts`` stand for files: name -> content, not read from the disk; ``markdown``: blocks of Python in
    Markdown texts are read too. ``baseline``: the file that stands above those of the settings, None for theirs, empty for none;
    ``since``: a revision of git."""

    paths: Sequence[str]
    configuration: Configuration
    texts: Mapping[str, bytes] = field(default_factory=dict)
    markdown: bool = False
    baseline: str | None = None
    since: str = ""
    progress: Progress | None = None


def check(request: Request) -> Report:
    """Reads what a request names and reports what is wrong there.

    Raises ConfigError, catalogue.UnknownNameError, baseline.BaselineError, changes.ChangesError.
    """
    return with_deep_stack(lambda: _check(request))


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


def _check(request: Request) -> Report:
    suffixes = documents.SUFFIXES + files.CONFIGURATIONS + (documents.MARKDOWN if request.markdown else ())
    on_disk = [path for path in request.paths if path not in request.texts]
    found, errors = files.find(on_disk, request.configuration, suffixes)
    found += [
        (name, Path(name)) for name in request.texts if not files.left_out(Path(name).resolve(), request.configuration)
    ]
    settings = {display: request.configuration.of(path) for display, path in found}
    baselines = _baselines(request, settings)
    changes = _changes(request.since)
    results = _read(request, found, settings)

    sources = Sources(request.texts)
    findings: list[Finding] = []
    suppressed: list[Suppressed] = []
    for display, path in found:
        result = results[display]
        errors += result.errors
        kept, silenced = judged(result, settings[display], path)
        suppressed += silenced
        if display in baselines:
            kept, known = baselines[display].split(kept, sources)
            suppressed += (Suppressed(each, "baseline") for each in known)
        if changes is not None:
            near = {index for index, each in enumerate(kept) if changes.touch(each)}
            suppressed += (Suppressed(each, "unchanged") for index, each in enumerate(kept) if index not in near)
            kept = [each for index, each in enumerate(kept) if index in near]
        findings += kept
    looked_at = {os.path.realpath(path) for _, path in found}
    stale = [entry for each in dict.fromkeys(baselines.values()) for entry in each.stale(looked_at)]
    return Report(
        tuple(sorted(findings, key=_order)),
        tuple(sorted(errors, key=lambda e: (e.path, e.line or 0))),
        coverage(result for display, result in results.items() if _counts(display, result, request)),
        tuple(sorted(suppressed, key=lambda each: _order(each.finding))),
        tuple(map(str, stale)),
        request.texts,
    )


def _counts(display: str, result: FileResult, request: Request) -> bool:
    """Whether a file is one of those looked at: a configuration that a folder holds is, where it is one of a training run."""
    if not display.endswith(files.CONFIGURATIONS) or display in request.paths:
        return True
    return bool(result.totals.read or result.errors)


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


def plan_of(settings: Settings) -> Plan:
    """The plan by which files of these settings are read."""
    return Plan(settings.rules, tuple(sorted(settings.assume.items())), settings.device)


def _read(
    request: Request, found: Sequence[tuple[str, Path]], settings: Mapping[str, Settings]
) -> dict[str, FileResult]:
    """What each file holds, by its name."""
    readers: dict[Plan, Reader] = {}
    results: dict[str, FileResult] = {}
    for number, (display, path) in enumerate(found):
        if request.progress is not None:
            request.progress(display, number, len(found))
        plan = plan_of(settings[display])
        reader = readers.setdefault(plan, Reader(plan))
        data = read_bytes(display, path, request.texts)
        results[display] = (
            FileResult(errors=(data,)) if isinstance(data, FileError) else reader.file(display, path, data)
        )
    return results


def judged(result: FileResult, settings: Settings, path: Path) -> tuple[list[Finding], list[Suppressed]]:
    """What counts of a file's findings by its settings and comments, and what these comments silence."""
    off = settings.ignores(path.resolve().as_posix())
    findings = [
        (replace(each, severity=settings.severity_of(each.rule) or each.severity), covered)
        for each, covered in zip(result.findings, result.covered, strict=True)
        if each.rule not in off
    ]
    if not result.comments:
        return [each for each, _ in findings], []
    judge = result.complete and not settings.assume
    kept, suppressed = suppress.apply(findings, result.comments, settings.rules - off, judge=judge)
    return [replace(each, severity=settings.severity_of(each.rule) or each.severity) for each in kept], suppressed


def coverage(results: Iterable[FileResult]) -> Coverage:
    """How far reading went, summed over files."""
    results = list(results)
    totals = [each.totals for each in results]
    recipes = Counter(recipe for each in totals for recipe in each.recipes)
    places = [place for each in totals for place in each.gave_up]
    return Coverage(
        len(results),
        sum(each.read for each in totals),
        sum(each.programs for each in totals),
        sum(each.loops for each in totals),
        sum(each.optimizers for each in totals),
        sum(each.scalers for each in totals),
        tuple(name for name, _ in recipes.most_common()),
        tuple(sorted(places, key=lambda place: (place.path, place.line, place.what))),
    )
