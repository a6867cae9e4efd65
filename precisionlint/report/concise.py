"""A report as one line a finding, as editors and ``grep`` like it."""

from collections.abc import Iterator

from precisionlint.findings import Report
from precisionlint.report.outputs import Style
from precisionlint.report.text import heading, statistics, suppressed_line, verdict


def render(report: Report, style: Style) -> Iterator[str]:
    """A line a finding, then what was found in all."""
    if style.statistics:
        yield from statistics(report, style.color)
    else:
        yield from (heading(finding, style.color) for finding in report.findings)
        yield from (suppressed_line(each, style.color) for each in report.suppressed if style.suppressed)
    yield verdict(report, style.color)
