"""A report as JSON for programs; the schema's number changes when a field goes or comes to mean another thing."""

import json
from dataclasses import asdict
from typing import Any

from precisionlint.findings import Finding, Report

SCHEMA = 1


def dumps(report: Report) -> str:
    """The report as one JSON object, in ASCII, so that it survives any console; without a newline at its end."""
    return json.dumps(
        {
            "schema": SCHEMA,
            "findings": [finding_dict(finding) for finding in report.findings],
            "suppressed": [
                {**finding_dict(each.finding), "suppressed_by": each.by, "reason": each.reason}
                for each in report.suppressed
            ],
            "errors": [asdict(error) for error in report.errors],
            "coverage": asdict(report.coverage),
        },
        indent=2,
    )


def finding_dict(finding: Finding) -> dict[str, Any]:
    """One finding as the schema has it."""
    return {
        "rule": finding.rule,
        "family": finding.family,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "message": finding.message,
        "when": finding.when,
        **asdict(finding.place),
        "trace": [
            {"path": step.place.path, "line": step.place.line, "cell": step.place.cell, "message": step.message}
            for step in finding.trace
        ],
        "fix": None,
    }
