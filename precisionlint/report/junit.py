"""A report as JUnit's XML, which most CI services show as test results: a finding that fails the run is a failed test."""

import html
from collections.abc import Iterator

from precisionlint.findings import Finding, Report
from precisionlint.report.excerpt import shown
from precisionlint.report.outputs import Style


def render(report: Report, style: Style) -> Iterator[str]:
    """An XML document."""
    failures = sum(finding.severity != "info" for finding in report.findings)
    cases = len(report.findings) + len(report.suppressed) + len(report.errors)
    counts = f'tests="{max(cases, 1)}" failures="{failures}" errors="{len(report.errors)}"'
    yield '<?xml version="1.0" encoding="utf-8"?>'
    yield f'<testsuites name="precisionlint" {counts}>'
    yield f'  <testsuite name="precisionlint" {counts} skipped="{len(report.suppressed)}">'
    for finding in report.findings:
        text = _text(
            f"{finding.place.where}:{finding.place.column}: {finding.message}{_when(finding)}{_steps(finding)}"
        )
        if finding.severity == "info":
            yield from _case(finding, f"<system-out>{text}</system-out>")
        else:
            message = f'type="{finding.severity}" message="{_attribute(finding.message)}"'
            yield from _case(finding, f"<failure {message}>{text}</failure>")
    for each in report.suppressed:
        yield from _case(each.finding, f'<skipped message="{_attribute(f"{each.by}: {each.reason}")}"/>')
    for error in report.errors:
        name = _attribute(error.path)
        yield f'    <testcase classname="{name}" name="read" file="{name}">'
        yield f'      <error type="unreadable-file" message="{_attribute(error.message)}"/>'
        yield "    </testcase>"
    if not cases:
        yield '    <testcase classname="precisionlint" name="check"/>'
    yield "  </testsuite>"
    yield "</testsuites>"


def _case(finding: Finding, inside: str) -> Iterator[str]:
    path = _attribute(finding.place.path)
    yield f'    <testcase classname="{path}" name="{finding.rule}" file="{path}" line="{finding.place.line}">'
    yield f"      {inside}"
    yield "    </testcase>"


def _when(finding: Finding) -> str:
    return f" (when {finding.when})" if finding.when else ""


def _steps(finding: Finding) -> str:
    return "".join(f"\n{number}. {step.place.where}: {step.message}" for number, step in enumerate(finding.trace, 1))


def _text(text: str) -> str:
    """Text that a document may hold, line by line; XML 1.0 knows no control characters, not even as references."""
    return html.escape("\n".join(shown(line) for line in text.split("\n")))


def _attribute(text: str) -> str:
    """A value for an attribute, in which a parser would make spaces of newlines."""
    return _text(text).replace("\n", "&#10;")
