"""A report as GitLab's code quality report (the part of Code Climate's format that it reads)."""

import json
import os
from collections.abc import Iterator

from precisionlint.findings import Place, Report
from precisionlint.report.excerpt import Sources
from precisionlint.report.outputs import Style, clean, fingerprints

SEVERITIES = {"error": "critical", "warning": "major", "info": "info"}


def render(report: Report, style: Style) -> Iterator[str]:
    """One JSON array, in ASCII."""
    issues = []
    for finding, name in zip(report.findings, fingerprints(report.findings, Sources(report.texts)), strict=True):
        when = f" (when {finding.when})" if finding.when else ""
        where = f"cell {finding.place.cell}, line {finding.place.line}: " if finding.place.cell else ""
        issues.append(
            {
                "description": clean(f"{where}{finding.message}{when}"),
                "check_name": finding.rule,
                "fingerprint": name,
                "severity": SEVERITIES[finding.severity],
                "location": _location(finding.place),
            }
        )
    for error in report.errors:
        place = Place(error.path, error.line or 1, 1, error.line or 1, 1)
        issues.append(
            {
                "description": clean(error.message),
                "check_name": "unreadable-file",
                "fingerprint": clean(f"unreadable-file:{error.path}"),
                "severity": "blocker",
                "location": _location(place),
            }
        )
    yield json.dumps(issues, indent=2)


def _location(place: Place) -> dict[str, object]:
    """Where GitLab shows it: a path from the repository's root, where the job runs; a notebook's lines are not its file's."""
    path = os.path.relpath(place.path).replace(os.sep, "/") if os.path.isabs(place.path) else place.path
    begin, end = (1, 1) if place.cell else (place.line, place.end_line)
    return {"path": clean(path.removeprefix("./")), "lines": {"begin": begin, "end": end}}
