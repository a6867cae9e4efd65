"""What a run says of a finding that ``check`` read: confirmed, refuted, not reached, another configuration, or not
measurable here.

A finding is matched by its rule and its places, never by its words.
"""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
CASTS = frozenset(
    {"half", "bfloat16", "float", "double", "to", "type", "type_as", "dtype", "autocast", "float32", "float16"}
)
"""Attributes and keyword arguments that decide about a dtype."""
GRAVER = {"backward-under-autocast": "autocast-around-training-loop"}
"""A rule that the run reports under the name of a graver one, which takes in what it found."""


def judge(
    finding: Finding,
    report: AuditReport | None,
    own: Finding | None,
    known: Mapping[str, Any] | None = None,
) -> Judged:
    """What a run says of a finding that was read. ``own``: the same as it is read under the run's own configuration,
    of which ``known`` holds values of names; None where it is not read there.

    The same fault is one of the same rule whose place is a station of the other's way: a fault of weights may be read
    where they are cast and measured where they are stepped. It is refuted where the run came to its place and through
    every station of its way (the objects made there took part) and shows no such fault, a fault of arithmetic where
    its line ran and no dtype there was half. Nothing is refuted that hangs on a branch of which nobody knows whether
    the run took it, nor on a machine that lacks a device that the program asked for.
    """
    if report is None:
        return Judged(finding, "not reached")
    if _found(finding, report):
        return Judged(finding, "confirmed", stands=True)
    known = known or {}
    ways = () if own is None else own.decided
    possible = [way for way in ways if not any(_holds(text, known) is False for text in way)]
    if own is None or (ways and not possible):
        return Judged(finding, "another configuration", _against(finding, known))
    undecided = min(([text for text in way if not _holds(text, known)] for way in possible), key=len, default=[])
    if finding.rule not in MEASURED and finding.family not in ARITHMETIC:
        return Judged(finding, "not measurable here", stands=True)
    if report.absent:
        return Judged(finding, "not measurable here", f"this machine has no {', '.join(report.absent)}", stands=True)
    if finding.rule not in MEASURED:
        return _of_arithmetic(finding, report)
    return _of_order(finding, report, undecided)


def _against(finding: Finding, known: Mapping[str, Any]) -> str:
    """The values that a configuration does not have: of the conditions of a finding that do not hold, else of all."""
    conditions = {*finding.when.split(" and "), *(text for way in finding.decided for text in way)}
    false = [text for text in conditions if _holds(text, known) is False] or conditions
    return ", ".join(f"{name} is {value!r}" for name, value in known.items() if any(name in text for text in false))


def _found(finding: Finding, report: AuditReport) -> bool:
    mine = way(finding)
    same = _same if finding.rule in MEASURED else _same_line  # an op's span is not that of what was read around it
    for each in report.findings:
        if each.rule == GRAVER.get(finding.rule):
            region = [step.place for step in finding.trace[:-1]]  # its backward may be another one
            if any(_same_line(place, other) for place in region for other in way(each)):
                return True
        if each.rule == finding.rule and (
            any(same(finding.place, other) for other in way(each)) or any(same(each.place, other) for other in mine)
        ):
            return True
    return False


def _of_order(finding: Finding, report: AuditReport, undecided: Sequence[str]) -> Judged:
    met = [station.place for station in (*report.order, *report.objects) if station.place is not None]
    if not all(_among(place, met) for place in way(finding)):
        return Judged(finding, "not reached")
    return _unknown(finding, undecided) or Judged(finding, "refuted")


def _unknown(finding: Finding, undecided: Sequence[str]) -> Judged | None:
    """No verdict on a finding that the step does not show, where it hangs on what nobody knows."""
    if not undecided:
        return None
    few = ", ".join(f"'{text}'" for text in undecided[:2]) + (" and others" if len(undecided) > 2 else "")
    return Judged(finding, "not measurable here", f"the step shows no fault, but whether {few} holds here is not known")


def _holds(text: str, known: Mapping[str, Any]) -> bool | None:
    """Whether a decision in words holds by the values that are known of its names, or None."""
    try:
        value = _evaluated(ast.parse(text, mode="eval").body, known)
    except (SyntaxError, LookupError, TypeError):
        return None
    return bool(value)


def _evaluated(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """The value of a test over names with plain values; raises LookupError for what is none."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluated(operand, known)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARED:
            return COMPARED[type(op)](_evaluated(left, known), _evaluated(right, known))
    return known[ast.unparse(node)]


def _of_arithmetic(finding: Finding, report: AuditReport) -> Judged:
    """By the ops on the finding's own lines, or, where these only call what computes, on those of its way."""
    ran = _ops(report, [finding.place]) or _ops(report, [step.place for step in finding.trace])
    floats = _floats(ran)
    if not floats:
        compiled = "what ran compiled is not seen" if report.compiled else ""
        return Judged(finding, "not measurable here" if compiled else "not reached", compiled, stands=bool(compiled))
    fp16 = finding.rule in ONLY_FP16
    narrow = _narrow(floats, fp16)
    if narrow:
        why = f"{', '.join(sorted(narrow))} met its ops, and one step shows no fault"
        return Judged(finding, "not measurable here", why, stands=True)
    if not _narrow(_floats(report.ops), fp16):
        kind = "fp16" if fp16 else "half precision"
        return Judged(finding, "another configuration", f"nothing in this step is in {kind}")
    count = sum(op.count for op in ran)
    what = f"{count} {'op' if count == 1 else 'ops'} there, all in {', '.join(sorted(floats))}"
    return _unknown(finding, casting_branches(way(finding))) or Judged(finding, "refuted", what)


def _floats(ops: Iterable[OpRecord]) -> set[str]:
    """The floating dtypes of what ops take and give."""
    return {each for op in ops for text in (*op.inputs, *op.outputs) for each in text.split("|") if each in RANKS}


def _narrow(floats: Iterable[str], fp16: bool) -> set[str]:
    """The half dtypes and those below among some; ``fp16``: this one alone."""
    return {each for each in floats if each == "float16" or (RANKS[each] < 4 and not fp16)}


def casting_branches(places: Iterable[Place]) -> list[str]:
    """What decides about a dtype in the functions around some places: the tests, in words, of branches that cast and
    that none of the places stands in.
    """
    found: dict[str, None] = {}
    for path, lines in _lines(places).items():
        functions = (each for each in ast.walk(_parsed(path)) if isinstance(each, ast.FunctionDef))
        for function in (each for each in functions if any(_within(line, each) for line in lines)):
            for test, *sides in _tests(function):
                inside = any(_within(line, each) for line in lines for each in sides if isinstance(each, ast.stmt))
                if not inside and any(_casts(each) for each in sides):
                    found[ast.unparse(test)] = None
    return list(found)


def _lines(places: Iterable[Place]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for each in places:
        found.setdefault(each.path, set()).add(each.line)
    return found


def _tests(function: ast.AST) -> Iterator[tuple[ast.AST, ...]]:
    """The tests in a function, each with what stands on its two sides."""
    for node in ast.walk(function):
        if isinstance(node, ast.If):
            yield node.test, *node.body, *node.orelse
        elif isinstance(node, ast.IfExp):
            yield node.test, node.body, node.orelse


def _casts(tree: ast.AST) -> bool:
    return any(getattr(node, "attr", getattr(node, "arg", "")) in CASTS for node in ast.walk(tree))


def _within(line: int, node: Any) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)


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
    """The names that a file's branches and ``enabled=`` ask about, that no loop changes and that count nothing: what
    tells one configuration from another. Empty for a file that cannot be parsed.
    """
    tree = _parsed(path)
    asked: set[str] = set()
    changing: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            asked |= _names(node.test)
        elif isinstance(node, ast.Match):
            asked |= _names(node.subject)
        elif isinstance(node, ast.keyword) and node.arg == "enabled":
            asked |= _names(node.value)
        elif isinstance(node, ast.For | ast.While | ast.AsyncFor):
            changing |= {name for each in ast.walk(node) for name in _names(each, ast.Store)}
        elif isinstance(node, ast.AugAssign):
            changing |= _names(node.target, ast.Store)
    return frozenset(asked - changing)


def _parsed(path: str) -> ast.Module:
    """A file's syntax tree; an empty one where it has none."""
    try:
        return ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _names(tree: ast.AST, context: type[ast.expr_context] = ast.Load) -> set[str]:
    """The names in a tree with their attributes and items, the longest of each."""
    found: set[str] = set()
    todo = [tree]
    while todo:
        node = todo.pop()
        name = _written(node)
        if name and isinstance(getattr(node, "ctx", ast.Load()), context):
            found.add(name)
        elif not name:
            todo.extend(ast.iter_child_nodes(node))
    return found


def _written(node: ast.AST) -> str:
    """``cfg``, ``self.cfg.amp``, ``cfg['amp']`` or ``cfg.get('amp')`` as the reader of the program writes it; else empty."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name):
            return f"{written}.{name}" if (written := _written(owner)) else ""
        case ast.Subscript(value=owner, slice=ast.Constant(value=str() | int() as key)):
            return f"{written}[{key!r}]" if (written := _written(owner)) else ""
        case ast.Call(func=ast.Attribute(value=owner, attr="get"), args=[ast.Constant(value=str() as key), *_]):
            return f"{written}.get({key!r})" if (written := _written(owner)) else ""
    return ""
