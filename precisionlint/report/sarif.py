"""A report as SARIF 2.1.0: rules with their pages as help, the way to a finding as a code flow, what is silenced as suppressed.

Paths are relative to the folder in which the run began (``%SRCROOT%``); columns count characters, as this program's do.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from precisionlint import __version__, catalogue
from precisionlint.findings import FileError, Finding, Fix, Place, Replacement, Report, Suppressed
from precisionlint.report.excerpt import Sources
from precisionlint.report.outputs import Style, clean, fingerprints
from precisionlint.report.page import page

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {"error": "error", "warning": "warning", "info": "note"}
KINDS = {"comment": "inSource", "baseline": "external"}
"""What stands in the source silences there, a baseline from outside; lines that did not change are no part of the result."""


def render(report: Report, style: Style) -> Iterator[str]:
    """One JSON object, in ASCII."""
    yield json.dumps(log(report), indent=2)


def log(report: Report) -> dict[str, Any]:
    """The report as SARIF's objects."""
    silenced = [each for each in report.suppressed if each.by in KINDS]
    findings = (*report.findings, *(each.finding for each in silenced))
    names = sorted({finding.rule for finding in findings})
    prints = fingerprints(findings, Sources(report.texts))
    results = [
        _result(finding, names.index(finding.rule), name, report.replacements.get(finding, ()))
        for finding, name in zip(findings, prints, strict=True)
    ]
    for result, each in zip(results[len(report.findings) :], silenced, strict=True):
        result["suppressions"] = [_suppression(each)]
    run = {
        "tool": {
            "driver": {
                "name": "precisionlint",
                "version": __version__,
                "semanticVersion": __version__,
                "rules": [_rule(catalogue.find(name)) for name in names],
            }
        },
        "invocations": [
            {
                "executionSuccessful": not report.errors,
                "toolExecutionNotifications": [_notification(error) for error in report.errors],
            }
        ],
        "originalUriBaseIds": {"%SRCROOT%": {"uri": Path.cwd().as_uri().rstrip("/") + "/"}},
        "columnKind": "unicodeCodePoints",
        "results": results,
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: catalogue.Rule) -> dict[str, Any]:
    text = page(rule)
    return {
        "id": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": rule.summary},
        "help": {"text": text, "markdown": text},
        "defaultConfiguration": {"level": LEVELS[rule.severity], "enabled": rule.on_by_default},
        "properties": {
            "tags": [rule.family, "precision"],
            "problem.severity": "recommendation" if rule.severity == "info" else rule.severity,
        },
    }


def _result(finding: Finding, index: int, fingerprint: str, replacements: tuple[Replacement, ...]) -> dict[str, Any]:
    when = f" (when {finding.when})" if finding.when else ""
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": LEVELS[finding.severity],
        "message": {"text": clean(f"{finding.message}{when}")},
        "locations": [_location(finding.place)],
        "partialFingerprints": {"precisionlint/v1": fingerprint},
        "properties": {"confidence": finding.confidence, "when": clean(finding.when)},
    }
    if finding.trace:
        steps = [_location(step.place, step.message) for step in finding.trace]
        result["codeFlows"] = [{"threadFlows": [{"locations": [{"location": step} for step in steps]}]}]
        result["relatedLocations"] = [{"id": number, **step} for number, step in enumerate(steps, 1)]
    if finding.fix is not None and replacements and not finding.place.cell:
        result["fixes"] = [_fix(finding.fix, replacements)]
    return result


def _fix(fix: Fix, replacements: tuple[Replacement, ...]) -> dict[str, Any]:
    what = clean(f"an unsafe fix: {fix.unsafe}") if fix.unsafe else "a safe fix"
    made = [
        {"deletedRegion": _region(each.place), "insertedContent": {"text": clean(each.text)}} for each in replacements
    ]
    artifact = _artifact(replacements[0].place.path)
    return {"description": {"text": what}, "artifactChanges": [{"artifactLocation": artifact, "replacements": made}]}


def _location(place: Place, message: str = "") -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _artifact(place.path)}
    location: dict[str, Any] = {"physicalLocation": physical}
    if place.cell:  # a line of a cell is none of the file's
        location["logicalLocations"] = [{"name": f"cell {place.cell}, line {place.line}"}]
    else:
        physical["region"] = _region(place)
    if message:
        location["message"] = {"text": clean(message)}
    return location


def _region(place: Place) -> dict[str, int]:
    return {
        "startLine": place.line,
        "startColumn": place.column,
        "endLine": place.end_line,
        "endColumn": place.end_column,
    }


def _artifact(path: str) -> dict[str, str]:
    data = path.encode("utf-8", errors="surrogateescape" if _escapes(path) else "surrogatepass")
    if os.path.isabs(path):
        return {"uri": f"file://{quote(data)}"}
    return {"uri": quote(data.removeprefix(b"./")), "uriBaseId": "%SRCROOT%"}


def _escapes(path: str) -> bool:
    """Whether the surrogates in a name stand for bytes that are no UTF-8, as names of files have them."""
    return all("\udc80" <= each <= "\udcff" for each in path if "\ud800" <= each <= "\udfff")


def _suppression(each: Suppressed) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": KINDS[each.by], "status": "accepted"}
    if each.reason:
        told["justification"] = clean(each.reason)
    if each.at is not None:
        told["location"] = _location(each.at)
    return told


def _notification(error: FileError) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _artifact(error.path)}
    if error.line is not None:
        physical["region"] = {"startLine": error.line}
    return {"level": "error", "message": {"text": clean(error.message)}, "locations": [{"physicalLocation": physical}]}
