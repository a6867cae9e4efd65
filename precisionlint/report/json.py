"""A report as JSON for programs; the schema's number changes when a field goes or comes to mean another thing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins

from precisionlint.findings import Finding, Report, Suppressed

if TYPE_CHECKING:
    from precisionlint.report.outputs import Style

SCHEMA = 1


def render(report: Report, style: Style) -> Iterator[str]:
    """One JSON object, in ASCII."""
    yield dumps(report)


def render_jsonl(report: Report, style: Style) -> Iterator[str]:
    """A JSON object a line, each with its ``kind``: findings, what is suppressed, errors, then the coverage."""
    for finding in report.findings:
        yield json.dumps({"kind": "finding", **finding_dict(finding, fix_dict(report, finding))})
    for each in report.suppressed:
        yield json.dumps({"kind": "suppressed", **suppressed_dict(each)})
    for error in report.errors:
        yield json.dumps({"kind": "error", **to_builtins(error)})
    yield json.dumps({"kind": "coverage", "schema": SCHEMA, **to_builtins(report.coverage)})


def dumps(report: Report) -> str:
    """The report as one JSON object, in ASCII, so that it survives any console; without a newline at its end."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "findings": [finding_dict(finding, fix_dict(report, finding)) for finding in report.findings],
            "suppressed": [suppressed_dict(each) for each in report.suppressed],
            "stale": list(report.stale),
            "errors": [to_builtins(error) for error in report.errors],
            "coverage": to_builtins(report.coverage),
        },
        indent=2,
    )


def suppressed_dict(each: Suppressed) -> dict[str, Any]:
    """A finding that does not count, as the schema has it."""
    return {**finding_dict(each.finding), "suppressed_by": each.by, "reason": each.reason}


def fix_dict(report: Report, finding: Finding) -> dict[str, Any] | None:
    """A finding's fix as replacements of text, all of them to be made; None where there is none or it was not asked for."""
    if finding.fix is None or finding not in report.replacements:
        return None
    return {
        "safe": finding.fix.safe,
        "unsafe_because": finding.fix.unsafe,
        "edits": [
            {
                "line": each.place.line,
                "column": each.place.column,
                "end_line": each.place.end_line,
                "end_column": each.place.end_column,
                "cell": each.place.cell,
                "text": each.text,
            }
            for each in report.replacements[finding]
        ],
    }


def finding_dict(finding: Finding, fix: dict[str, Any] | None = None) -> dict[str, Any]:
    """One finding as the schema has it."""
    return {
        "rule": finding.rule,
        "family": finding.family,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": finding.message,
        "when": finding.when,
        **to_builtins(finding.place),
        "trace": [
            {"path": step.place.path, "line": step.place.line, "cell": step.place.cell, "message": step.message}
            for step in finding.trace
        ],
        "fix": fix,
    }
