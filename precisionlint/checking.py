"""``precisionlint check``: source files in, a report out. Reads code and never runs it."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precisionlint import files
from precisionlint.findings import Coverage, FileError, Finding, GaveUp, Report

STACK = 512 * 1024 * 1024
"""Bytes of stack for reading: deep but legal code needs more than a thread has by default."""


def check(
    paths: Sequence[str],
    *,
    select: frozenset[str],
    assume: Mapping[str, str] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Reads files and folders and reports what the selected rules find in them.

    ``assume`` limits the reading to one configuration: option name -> value, as the command line gives them. ``progress`` is
    called with the name of each file before it is read.
    """
    outcome: list[Report | BaseException] = []

    def work() -> None:
        try:
            outcome.append(_check(paths, select, dict(assume or {}), progress))
        except BaseException as error:  # handed on to the caller's thread
            outcome.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(STACK)
    sys.setrecursionlimit(100_000)
    try:
        thread = threading.Thread(target=work, name="precisionlint")
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
        sys.setrecursionlimit(limit)
    result = outcome[0]
    if isinstance(result, BaseException):
        raise result
    return result


def _check(
    paths: Sequence[str], select: frozenset[str], assume: dict[str, str], progress: Callable[[str], None] | None
) -> Report:
    from precisionlint.source.screen import worth_parsing
    from precisionlint.subjects import SUBJECTS, File

    found, errors = files.find(paths)

    findings: list[Finding] = []
    total = Totals()
    run: Any = None
    for display, path in found:
        if progress is not None:
            progress(display)
        try:
            data = path.read_bytes()
        except OSError as error:
            errors.append(FileError(display, None, f"cannot be read: {error.strerror or error}"))
            continue
        trains = display.endswith(".py") and worth_parsing(data)
        subjects = [subject for subject in SUBJECTS if subject.wants(display, data)]
        if not trains and not subjects:
            continue
        if run is None:
            from precisionlint.source.run import Run

            run = Run(select, assume)
        if trains:
            findings.extend(run.file(display, path, data, errors, total))
        if subjects:
            total.read += not trains
            findings.extend(run.facts(File(display, path, data), subjects, errors))
    findings.sort(key=lambda f: (f.place, f.rule, f.message))
    return Report(
        tuple(findings), tuple(sorted(errors, key=lambda e: (e.path, e.line or 0))), total.coverage(len(found))
    )


class Totals:
    """How far reading went, summed over files."""

    def __init__(self) -> None:
        self.read = self.programs = self.loops = self.optimizers = self.scalers = 0
        self.recipes: list[str] = []
        self.gave_up: list[GaveUp] = []

    def coverage(self, count: int) -> Coverage:
        recipes = tuple(name for name, _ in Counter(self.recipes).most_common())
        return Coverage(
            count, self.read, self.programs, self.loops, self.optimizers, self.scalers, recipes,
            tuple(sorted(self.gave_up, key=lambda g: (g.path, g.line, g.what))),
        )  # fmt: skip
