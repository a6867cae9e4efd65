"""What the ops of a step did, as tables: families by dtypes and phase on one screen, or each op and place."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from precisionlint.audit_report import AuditReport, CastRecord, OpRecord
from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.report.excerpt import shown
from precisionlint.report.layout import cut, share, size, table
from precisionlint.report.text import counted

PHASES = {
    "forward": "fwd",
    "recompute": "recomp",
    "backward": "bwd",
    "unscale": "unscale",
    "clip": "clip",
    "optimizer": "optim",
    "update": "update",
    "collective": "coll",
    "other": "other",
}
"""The phases of a step in order, and the heads of their columns."""
SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}
FLOATS = regex(r"float|complex")


def short(dtype: str) -> str:
    """``bf16`` for ``bfloat16``; ``bf16|fp32`` for a list that mixes them."""
    return "|".join(SHORT.get(each, each) for each in dtype.split("|"))


def dtypes(op: OpRecord) -> str:
    """``bf16 -> fp32 -> bf16``; without accumulation ``bf16 -> bf16``. Beside floats, integers are not told."""
    sides = []
    for side in (op.inputs, op.outputs):
        floats = [each for each in side if FLOATS.search(each)]
        sides.append(", ".join(dict.fromkeys(map(short, floats or side))) or "none")
    middle = [re.sub(r"\w+", lambda each: SHORT.get(each[0], each[0]), op.accumulation)] if op.accumulation else []
    return " -> ".join([sides[0], *middle, sides[1]])


def brief(kinds: str) -> str:
    """``fp32`` for ``fp32 -> fp32 -> fp32``."""
    parts = set(kinds.split(" -> "))
    return parts.pop() if len(parts) == 1 else kinds


def several(ops: Iterable[OpRecord]) -> str:
    """``bf16, fp32, mixed`` for ops in bf16, in fp32 and with both."""
    kinds = {brief(dtypes(op)) for op in ops}
    if len(kinds) == 1:
        return kinds.pop()
    return ", ".join(sorted({"mixed" if "->" in kind else kind for kind in kinds}))


def located(place: Place) -> str:
    """Path and line; of an installed package's file only what follows ``site-packages``."""
    return f"{shown(place.path.rpartition('/site-packages/')[2])}:{place.line}"


def starred(module: str) -> str:
    """A module's path with its layer numbers as one: ``layers.3.attn`` is ``layers.*.attn``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def grouped(module: str) -> str:
    """A module by the part of a layer that it belongs to: ``layers.3.attn.qkv`` is of ``layers.*.attn``."""
    return starred(layer_part(module))


def layer_part(module: str) -> str:
    """The part of a layer that a module belongs to: ``layers.3.attn`` of ``layers.3.attn.qkv``."""
    parts = module.split(".")
    depth = next((number + 2 for number, part in enumerate(parts) if part.isdigit()), 2)
    return ".".join(parts[:depth])


def families(report: AuditReport, width: int) -> Iterator[str]:
    """The heads, then one line for each family and dtypes, one column for each phase, the most floating point operations
    first. What of a family adds nothing up, and with which nothing is wrong, is one line.
    """
    ops = [op for op in report.ops if op.family]
    phases = [phase for phase in PHASES if any(op.phase == phase for op in ops)]
    total = sum(op.flops for op in ops)
    groups: dict[tuple[str, str], list[OpRecord]] = {}
    for op in ops:
        groups.setdefault((op.family, dtypes(op) if op.accumulation or op.verdict else ""), []).append(op)
    heaviest: dict[str, int] = {}
    for (family, _), members in groups.items():
        heaviest[family] = heaviest.get(family, 0) + sum(op.flops for op in members)
    heads = [PHASES[phase] for phase in phases]
    rows: list[tuple[str, ...]] = [("ops by family", "in -> sum -> out", *heads, "FLOPs" if total else "", "where")]
    for (family, kinds), members in sorted(groups.items(), key=lambda each: (-heaviest[each[0][0]], each[0])):
        counts = [sum(op.count for op in members if op.phase == phase) for phase in phases]
        flops = sum(op.flops for op in members)
        part = f"{flops / total:.0%}" if total and flops / total >= 0.005 else ""
        kinds = brief(kinds) if kinds else several(members)
        rows.append((family, kinds, *(str(count or "") for count in counts), part, _where(members)))
    if ops:
        numbers = frozenset(range(2, len(phases) + 3))
        yield from (cut(line, width) for line in table(rows, right=numbers))
    rest = sum(op.count for op in report.ops if not op.family)
    if rest:
        yield from [] if ops else ["ops by family"]
        yield f"{'and ' if ops else ''}{counted(rest, 'op')} of no family: views, copies, products of elements (--all lists them)"


def _where(members: Sequence[OpRecord]) -> str:
    """What the policy table says against a group, and the modules in which it does; else all its modules."""
    short_of = [op for op in members if op.verdict]
    verdicts = dict.fromkeys(op.verdict for op in short_of)
    modules = dict.fromkeys(grouped(op.module) for op in short_of or members if op.module)
    told = (
        re.sub(r"\w*float\w+", lambda each: short(each[0]), ", ".join(verdicts))
        .replace(" where ", ", ")
        .replace(" is due", " due")
    )
    places = ", ".join(modules)
    return f"! {told}: {places}".removesuffix(": ") if told else places


def casts(report: AuditReport, limit: int | None) -> Iterator[str]:
    """How many and how much, then the lines that cast what had been cast, the most bytes first."""
    found = report.casts
    if not found:
        return
    count, again, back = (sum(getattr(each, name) for each in found) for name in ("count", "again", "back"))
    written = sum(each.bytes for each in found)
    vain = f", {again} of a tensor cast before, {back} back to the dtype it came from" if again or back else ""
    yield f"{counted(count, 'cast')} between floating dtypes wrote {size(written)}{vain}"
    rows = _cast_rows(each for each in found if limit is None or each.again or each.back)
    yield from (f"  {line}" for line in table(rows[:limit]))
    if len(rows) > (limit or len(rows)):
        yield f"  and {counted(len(rows) - (limit or 0), 'line')} more with such casts (--all lists them)"


def _cast_rows(casts: Iterable[CastRecord]) -> list[tuple[str, ...]]:
    groups: dict[tuple[str, str, str, str], list[CastRecord]] = {}
    for each in casts:
        where = located(each.place) if each.place else "(no line)"
        kind = f"{short(each.source)} -> {short(each.target)}"
        groups.setdefault((where, each.phase, kind, starred(each.module)), []).append(each)
    rows = []
    for (where, phase, kind, module), members in groups.items():
        again, back = sum(each.again for each in members), sum(each.back for each in members)
        said = [f"{again} cast before"] if again else []
        said += [f"{back} back"] if back else []
        total, times = sum(each.bytes for each in members), f"{sum(each.count for each in members)} x"
        rows.append((total, (where, phase, kind, times, size(total), ", ".join(said), module)))
    return [row for _, row in sorted(rows, key=lambda each: (-each[0], each[1]))]


def every(report: AuditReport) -> Iterator[str]:
    """The heads, then one line an op, phase, module, line and dtypes."""
    total = sum(op.flops for op in report.ops)
    rows = [("every op", "phase", "in -> sum -> out", "count", "FLOPs", "policy", "module or parameter", "line")]
    for op in sorted(report.ops, key=lambda op: list(PHASES).index(op.phase)):
        part = share(op.flops, total) if op.flops else ""
        where = located(op.place) if op.place else ""
        rows.append((op.op, op.phase, dtypes(op), str(op.count), part, op.verdict, op.parameter or op.module, where))
    yield from table(rows, right=frozenset({3, 4}))
