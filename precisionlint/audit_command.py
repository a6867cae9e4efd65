"""``precisionlint audit``: reads a script as ``check`` does, runs it under the audit, and says of each finding what
the run makes of it.

A finding of ``check`` is matched by its rule and its places, never by its words.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from precisionlint.audit_report import AuditReport, Judged, Verdict
from precisionlint.dataclass import dataclass
from precisionlint.findings import Finding, Place

MEASURED = frozenset(
    {
        "adam-epsilon-underflow",
        "backward-after-unscale",
        "backward-under-autocast",
        "backward-without-scale",
        "bf16-only-weights",
        "clip-before-unscale",
        "double-unscale",
        "function-without-custom-fwd",
        "half-ema",
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
        findings = _read(path, {})

    from precisionlint.trace import script

    names = set() if path is None or not findings else configuration_names(path)
    outcome = script.run(command, module=module, step=step, keep_running=keep_running, values=values, names=names)
    known = outcome.configuration
    if path is not None and findings and known:
        own = {(each.rule, each.place) for each in _read(path, {name: str(value) for name, value in known.items()})}
    else:
        own = {(each.rule, each.place) for each in findings}
    read = tuple(Judged(each, judge(each, outcome.report, (each.rule, each.place) in own)) for each in findings)
    return Audited(command[0], outcome.report, read, step, outcome.steps, outcome.ended, outcome.failed)


def _read(path: str, assume: dict[str, str]) -> tuple[Finding, ...]:
    from precisionlint import check

    return check([path], assume=assume).findings


def configuration_names(path: str) -> set[str]:
    """The names that a file's branches and ``enabled=`` ask about and that no loop changes: what tells one
    configuration from another. Empty for a file that cannot be parsed.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    asked: set[str] = set()
    changing: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            asked |= _names(node.test)
        elif isinstance(node, ast.keyword) and node.arg == "enabled":
            asked |= _names(node.value)
        elif isinstance(node, ast.For | ast.While | ast.AsyncFor):
            changing |= {name for each in ast.walk(node) for name in _names(each, ast.Store)}
    return asked - changing


def _names(tree: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """The dotted names in a tree, the longest of each."""
    found: set[str] = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        name = _dotted(node)
        if name and isinstance(getattr(node, "ctx", None), context):
            found.add(name)
        elif not name:
            todo.extend(ast.iter_child_nodes(node))
    return found


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


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


def judge(finding: Finding, report: AuditReport | None, of_this_run: bool = True) -> Verdict:
    """What a run says of a finding that was read. ``of_this_run``: it is also read under the run's own configuration.

    The same fault is one of the same rule whose place is a station of the other's way: a fault of weights may be read
    where they are cast and measured where they are stepped. It is refuted where the run came to its place and through
    every station of its way (the objects made there took part) and shows no such fault.
    """
    if report is None:
        return "not reached"
    mine = (finding.place, *(step.place for step in finding.trace))
    same = _same if finding.rule in MEASURED else _same_line  # an op's span is not that of what was read around it
    for each in report.findings:
        theirs = (each.place, *(step.place for step in each.trace))
        if each.rule == finding.rule and (
            any(same(finding.place, other) for other in theirs) or any(same(each.place, other) for other in mine)
        ):
            return "confirmed"
        if each.rule == GRAVER.get(finding.rule):
            return "confirmed"
    if finding.rule not in MEASURED:
        return "not measurable here"
    if not of_this_run:
        return "another configuration"
    met = [station.place for station in (*report.order, *report.objects) if station.place is not None]
    return "refuted" if all(_among(place, met) for place in mine) else "not reached"


def _among(place: Place, others: Iterable[Place]) -> bool:
    return any(_same(place, other) for other in others)


def _same(left: Place, right: Place) -> bool:
    """The same call: the same span, or the same line where one of the two (Python 3.10's) knows no columns."""
    if not _same_line(left, right):
        return False
    spans = [(each.column, each.end_line, each.end_column) for each in (left, right)]
    known = all(each.end_line > each.line or each.end_column > each.column for each in (left, right))
    return spans[0] == spans[1] or not known


def _same_line(left: Place, right: Place) -> bool:
    return left.line == right.line and _base(left.path) == _base(right.path)


@cache
def _base(path: str) -> str:
    import os

    return os.path.realpath(path)


def lines(audited: Audited, *, format: str, color: bool, all: bool, width: int) -> Iterator[str]:
    """The report of the command, as text or as one JSON object."""
    if format == "json":
        import json

        yield json.dumps(to_dict(audited), indent=2)
        return
    from precisionlint.report.audit_text import read_lines, render
    from precisionlint.report.text import paint

    if audited.report is None:
        said = f"step {audited.step} never came: {audited.script} {audited.ended} after {audited.steps}"
        yield paint(f"audit of {audited.script}: {said}", "warning", color)
        yield from read_lines(audited.read, color, width)
    else:
        ended = f"{audited.script} {audited.ended}"
        yield from render(audited.report, color=color, all=all, width=width, read=audited.read, ended=ended)


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
