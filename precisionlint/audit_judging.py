"""What a run says of a finding that ``check`` read: confirmed, refuted, not reached, another configuration, or not
measurable here.

A finding is matched by its rule and its places, never by its words.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from precisionlint.audit_report import AuditReport, Judged, OpRecord
from precisionlint.findings import Finding, Place
from precisionlint.policy import RANKS

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
ARITHMETIC = frozenset({"half-arithmetic"})
"""The families whose rules say that a line computes in half: where it computed in fp32 alone, they are wrong."""
ONLY_FP16 = frozenset({"epsilon-underflow", "mask-constant-overflow"})
"""The rules among them whose fault bf16 does not have."""
GRAVER = {"backward-under-autocast": "autocast-around-training-loop"}
"""A rule that the run reports under the name of a graver one, which takes in what it found."""


def judge(
    finding: Finding, report: AuditReport | None, of_this_run: bool = True, known: Mapping[str, Any] | None = None
) -> Judged:
    """What a run says of a finding that was read. ``of_this_run``: it is also read under the run's own configuration,
    of which ``known`` holds values of names.

    The same fault is one of the same rule whose place is a station of the other's way: a fault of weights may be read
    where they are cast and measured where they are stepped. It is refuted where the run came to its place and through
    every station of its way (the objects made there took part) and shows no such fault, a fault of arithmetic where
    its line ran and no dtype there was half. Nothing is refuted on a machine that lacks a device that the program
    asked for.
    """
    if report is None:
        return Judged(finding, "not reached")
    if _found(finding, report):
        return Judged(finding, "confirmed")
    if not of_this_run:
        values = (f"{name} is {value!r}" for name, value in (known or {}).items() if name in finding.when)
        return Judged(finding, "another configuration", ", ".join(values))
    if finding.rule not in MEASURED and finding.family not in ARITHMETIC:
        return Judged(finding, "not measurable here")
    if report.absent:
        return Judged(finding, "not measurable here", f"this machine has no {', '.join(report.absent)}")
    return _of_order(finding, report) if finding.rule in MEASURED else _of_arithmetic(finding, report)


def _found(finding: Finding, report: AuditReport) -> bool:
    mine = way(finding)
    same = _same if finding.rule in MEASURED else _same_line  # an op's span is not that of what was read around it
    for each in report.findings:
        if each.rule == GRAVER.get(finding.rule):
            return True
        if each.rule == finding.rule and (
            any(same(finding.place, other) for other in way(each)) or any(same(each.place, other) for other in mine)
        ):
            return True
    return False


def _of_order(finding: Finding, report: AuditReport) -> Judged:
    met = [station.place for station in (*report.order, *report.objects) if station.place is not None]
    came_through = all(_among(place, met) for place in way(finding))
    return Judged(finding, "refuted" if came_through else "not reached")


def _of_arithmetic(finding: Finding, report: AuditReport) -> Judged:
    """By the ops on the finding's own lines, or, where these only call what computes, on those of its way."""
    ran = _ops(report, [finding.place]) or _ops(report, [step.place for step in finding.trace])
    floats = {each for op in ran for text in (*op.inputs, *op.outputs) for each in text.split("|") if each in RANKS}
    if not floats:
        compiled = "what ran compiled is not seen" if report.compiled else ""
        return Judged(finding, "not measurable here" if compiled else "not reached", compiled)
    narrow = {each for each in floats if each == "float16" or (RANKS[each] < 4 and finding.rule not in ONLY_FP16)}
    count = sum(op.count for op in ran)
    if narrow:
        return Judged(
            finding, "not measurable here", f"{', '.join(sorted(narrow))} met its ops, and one step shows no fault"
        )
    return Judged(
        finding, "refuted", f"{count} {'op' if count == 1 else 'ops'} there, all in {', '.join(sorted(floats))}"
    )


def _ops(report: AuditReport, places: Iterable[Place]) -> list[OpRecord]:
    spans = [(_base(each.path), each.line, max(each.line, each.end_line)) for each in places]
    return [
        op
        for op in report.ops
        if op.place is not None
        and any(_base(op.place.path) == path and first <= op.place.line <= last for path, first, last in spans)
    ]


def way(finding: Finding) -> tuple[Place, ...]:
    """The place of a finding and the stations that led there."""
    return (finding.place, *(step.place for step in finding.trace))


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
    return os.path.realpath(path)


# -- the configuration of a run


def configuration_names(path: str) -> frozenset[str]:
    """The names that a file's branches and ``enabled=`` ask about and that no loop changes: what tells one
    configuration from another. Empty for a file that cannot be parsed.
    """
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    asked: set[str] = set()
    changing: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            asked |= _names(node.test)
        elif isinstance(node, ast.keyword) and node.arg == "enabled":
            asked |= _names(node.value)
        elif isinstance(node, ast.For | ast.While | ast.AsyncFor):
            changing |= {name for each in ast.walk(node) for name in _names(each, ast.Store)}
    return frozenset(asked - changing)


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
