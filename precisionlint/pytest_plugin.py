"""The pytest plugin: ``--precisionlint`` makes a test of each file of training code; the fixture ``precisionlint`` audits a step.

Imports neither the checker nor torch until one of the two is used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from precisionlint.audit_report import AuditReport
    from precisionlint.findings import Report
    from precisionlint.trace.window import Audit

REPORT = pytest.StashKey["dict[str, list[str]]"]()
FILES = pytest.StashKey["list[Path]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("precisionlint")
    group.addoption(
        "--precisionlint", action="store_true", help="check each file of training code, as a test of its own"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A file that holds something to check, if checks are asked for."""
    if not parent.config.getoption("--precisionlint"):
        return None
    from precisionlint.documents import SUFFIXES
    from precisionlint.reader import concerns

    if file_path.suffix not in SUFFIXES or not concerns(file_path.name, file_path.read_bytes()):
        return None
    parent.session.stash.setdefault(FILES, []).append(file_path)
    return _File.from_parent(parent, path=file_path)


class _File(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        yield _Check.from_parent(self, name="precisionlint")


class _FaultError(Exception):
    """What a file's test fails with: the findings, a text."""


class _Check(pytest.Item):
    """The test of one file. The first one checks all that were collected, so that what they share is read once."""

    def runtest(self) -> None:
        stash = self.session.stash
        if REPORT not in stash:
            stash[REPORT] = _told([str(path) for path in stash[FILES]])
        lines = stash[REPORT].get(str(self.path))
        if lines:
            raise _FaultError("\n".join(lines))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _FaultError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"precisionlint: {self.path.name}"


def _told(paths: list[str]) -> dict[str, list[str]]:
    """What fails the run, as text by file."""
    from precisionlint import check
    from precisionlint.report.excerpt import Sources
    from precisionlint.report.text import error_line, finding_lines

    report: Report = check(paths, jobs=None, cache=True)
    sources = Sources(report.texts)
    told: dict[str, list[str]] = {}
    for finding in report.findings:
        if finding.severity != "info":
            place = finding.place
            told.setdefault(place.path, []).extend(finding_lines(finding, sources.lines(place), color=False))
    for error in report.errors:
        told.setdefault(error.path, []).append(error_line(error))
    return told


class StepAudit:
    """What the fixture gives: an audit of a step, and an assertion about its report."""

    def audit(self, model: Any = None, optimizer: Any = None, scaler: Any = None, **options: Any) -> Audit:
        """``precisionlint.audit``: ``with precisionlint.audit(model, optimizer) as audit: train_step(batch)``."""
        from precisionlint import audit

        return audit(model, optimizer, scaler, **options)

    def assert_ok(self, report: AuditReport, allow: Collection[str] = ()) -> None:
        """Fails the test if the step shows an error or a warning of a rule that is not allowed. Raises
        catalogue.UnknownNameError for the name of a rule that is not there.
        """
        from precisionlint import catalogue
        from precisionlint.report.excerpt import lines
        from precisionlint.report.text import finding_lines

        allowed = frozenset().union(*(catalogue.select([name]) for name in allow))
        told: list[str] = []
        for finding in report.findings:
            if finding.severity != "info" and finding.rule not in allowed:
                told += finding_lines(finding, lines(finding.place.path), color=False)
        if told:
            pytest.fail("\n".join(told), pytrace=False)


@pytest.fixture
def precisionlint() -> StepAudit:
    """Audits a training step and asserts on what it shows (see StepAudit). Needs torch."""
    return StepAudit()
