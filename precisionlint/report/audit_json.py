"""An audit's report as JSON's types; the schema's number changes when a field goes or comes to mean another thing."""

from typing import Any

from msgspec import to_builtins

from precisionlint.audit_report import SCHEMA, AuditReport
from precisionlint.report.json import finding_dict, suppressed_dict


def to_dict(report: AuditReport) -> dict[str, Any]:
    """The report as dicts, lists, strings and numbers."""
    fields = to_builtins(report)
    fields["findings"] = [finding_dict(finding) for finding in report.findings]
    fields["suppressed"] = [suppressed_dict(each) for each in report.suppressed]
    return {"schema": SCHEMA, "ok": report.ok, **fields}
