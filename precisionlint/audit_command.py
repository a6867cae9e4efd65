"""``precisionlint audit``: reads a script as ``check`` does, runs it under the audit, and says of each finding what
the run makes of it.

A finding of ``check`` is matched by its rule and its line, never by its words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from precisionlint.audit_report import AuditReport
from precisionlint.findings import Finding, Place

Verdict = Literal["confirmed", "refuted", "not reached", "another configuration", "not measurable here"]

MEASURED = frozenset(
    {
        "backward-after-unscale",
        "backward-under-autocast",
        "backward-without-scale",
        "bf16-only-weights",
        "clip-before-unscale",
        "double-unscale",
        "function-without-custom-fwd",
        "missing-scaler-update",
        "scaled-gradients-read",
        "scaler-with-bf16",
        "scaler-with-half-weights",
        "step-bypasses-scaler",
    }
)
"""The rules of ``check`` whose whole fault lies inside one iteration, so that a run that shows none speaks against it.
"""


@dataclass(frozen=True)
class Judged:
    """A finding of ``check``, and what the run says of it."""

    finding: Finding
    verdict: Verdict


@dataclass(frozen=True)
class Audited:
    """The outcome of the command. ``report`` is None where the step never came."""

    script: str
    report: AuditReport | None
    read: tuple[Judged, ...]
    step: int
    steps: int
    ended: str
    failed: bool

    @property
    def exit_code(self) -> int:
        """3 where the script failed or the step never came, 1 where a finding stands that the run did not refute, else
        0.
        """
        if self.failed or self.report is None:
            return 3
        grave = any(each.finding.severity != "info" and each.verdict != "refuted" for each in self.read)
        return int(grave or not self.report.ok)


def run(command: Sequence[str], *, module: bool, step: int, keep_running: bool, values: bool) -> Audited:
    """Reads and runs a script (its path and arguments, or a module's name and arguments) and audits its ``step``-th
    iteration.
    """
    path = _source(command[0], module)
    findings: tuple[Finding, ...] = ()
    if path is not None:
        from precisionlint import check

        findings = check([path]).findings

    from precisionlint.trace import script

    outcome = script.run(command, module=module, step=step, keep_running=keep_running, values=values)
    read = tuple(Judged(each, judge(each, outcome.report)) for each in findings)
    return Audited(command[0], outcome.report, read, step, outcome.steps, outcome.ended, outcome.failed)


def _source(target: str, module: bool) -> str | None:
    """The file of a script or a module; None where there is none."""
    if not module:
        return target
    import os
    import sys
    from importlib.util import find_spec

    sys.path.insert(0, os.getcwd())
    try:
        spec = find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{target}.__main__")
    except (ImportError, ValueError):
        return None
    finally:
        sys.path.pop(0)
    return None if spec is None or not spec.has_location or spec.origin is None else os.path.relpath(spec.origin)


GRAVER = {"backward-under-autocast": "autocast-around-training-loop"}
"""A rule that the run reports under the name of a graver one, which takes in what it found."""


def judge(finding: Finding, report: AuditReport | None) -> Verdict:
    """What a run says of a finding that was read."""
    if report is None:
        return "not reached"
    if any(each.rule == finding.rule and _same_line(each.place, finding.place) for each in report.findings):
        return "confirmed"
    if any(each.rule == GRAVER.get(finding.rule) for each in report.findings):
        return "confirmed"
    if finding.rule not in MEASURED:
        return "not measurable here"
    stations = [station.place for station in report.order]
    if any(place is not None and _same_line(place, finding.place) for place in stations):
        return "refuted"
    return "another configuration" if finding.when else "not reached"


def _same_line(left: Place, right: Place) -> bool:
    return left.line == right.line and _base(left.path) == _base(right.path)


def _base(path: str) -> str:
    import os

    return os.path.realpath(path)


def lines(audited: Audited, *, format: str, color: bool, all: bool) -> Iterator[str]:
    """The report of the command, as text or as one JSON object."""
    if format == "json":
        import json

        yield json.dumps(to_dict(audited), indent=2)
        return
    from precisionlint.report.audit_text import render
    from precisionlint.report.text import paint

    if audited.report is None:
        said = f"step {audited.step} never came: {audited.script} {audited.ended} after {audited.steps}"
        yield paint(f"audit of {audited.script}: {said}", "warning", color)
    else:
        yield from render(audited.report, color=color, all=all)
    if audited.read:
        yield ""
        yield paint("read by check, before the run", "strong", color)
        for each in audited.read:
            place, verdict = each.finding.place, paint(each.verdict, "strong", color)
            when = f" (when {each.finding.when})" if each.finding.when else ""
            yield f"  {place.path}:{place.line}: {each.finding.rule}{when}: {verdict}"
    yield ""
    yield f"{audited.script} {audited.ended}"


def together(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a rank, then a wait for the others: a launcher ends the job as soon as one of them has failed."""
    yield from lines
    from precisionlint.trace.ranks import part

    part()


def to_dict(audited: Audited) -> dict[str, Any]:
    """The outcome as JSON's types."""
    from precisionlint.report.json import finding_dict

    return {
        "schema": 1,
        "script": audited.script,
        "step": audited.step,
        "steps": audited.steps,
        "ended": audited.ended,
        "failed": audited.failed,
        "read": [{**finding_dict(each.finding), "verdict": each.verdict} for each in audited.read],
        "report": None if audited.report is None else audited.report.to_dict(),
    }
