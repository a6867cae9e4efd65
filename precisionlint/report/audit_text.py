"""An audit's report as text: the verdict first, then findings, what happened in which order, ops by phase and dtype,
storage, settings.

In a pipe it is the same text without colours, so that two runs can be compared by a diff.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from precisionlint.audit_report import AuditReport, CastRecord, OpRecord, Station
from precisionlint.findings import SEVERITIES, Place
from precisionlint.report.excerpt import lines, shown
from precisionlint.report.text import counted, finding_lines, paint, suppressed_line

PHASES = ("forward", "recompute", "backward", "unscale", "clip", "optimizer", "update", "collective", "other")
LIMIT = 8
"""How many lines of a section are shown without ``all``."""
SHORT = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def render(report: AuditReport, *, color: bool = False, all: bool = False) -> Iterator[str]:
    """The report's lines; ``all``: one line an op and place instead of groups that fit on a screen."""
    source = cache(lines)
    yield _verdict(report, color)
    yield _extent(report)
    if report.error:
        yield paint(f"the step raised {shown(report.error)}; what follows is what ran before", "warning", color)
    for finding in report.findings:
        yield ""
        yield from finding_lines(finding, source(finding.place.path), color)
    if report.suppressed:
        yield ""
        yield from (suppressed_line(each, color) for each in report.suppressed)
    yield from _section("order", _order(report.order), color)
    yield from _section("ops (input -> accumulation -> output)", _every(report) if all else _groups(report), color)
    yield from _section("casts", _casts(report, all), color)
    yield from _section("storage", _storage(report), color)
    yield from _section("saved for the backward", _activations(report, all), color)
    yield from _section("updates of half weights", _updates(report, all), color)
    yield from _section("range of the gradients", _ranges(report), color)
    yield from _section("settings", _settings(report, all), color)
    yield from _section("notes", map(shown, report.notes), color)


def _verdict(report: AuditReport, color: bool) -> str:
    counts = {each: sum(finding.severity == each for finding in report.findings) for each in SEVERITIES}
    found = [paint(counted(number, each), each, color) for each, number in counts.items() if number]
    subject = f"audit of {shown(report.name)}" if report.name else "audit"
    return f"{subject}: {'found ' + ', '.join(found) if found else 'found nothing'}"


def _extent(report: AuditReport) -> str:
    ran = sum(op.count for op in report.ops)
    whole = "" if report.complete else ", of a window that may not hold the whole iteration"
    amount = f"{counted(ran, 'op')} in {counted(len(report.ops), 'kind')}"
    return f"measured {counted(report.steps, 'optimizer step')}, {amount}{whole}"


def _section(title: str, body: Iterable[str], color: bool) -> Iterator[str]:
    body = list(body)
    if body:
        yield ""
        yield paint(title, "strong", color)
        yield from (f"  {line}" for line in body)


def _order(stations: Iterable[Station]) -> Iterator[str]:
    """Stations in order; a run of equal ones as one."""
    previous, count = "", 0
    for station in stations:
        line = f"{located(station.place)}: {shown(station.what)}" if station.place else shown(station.what)
        if line != previous and previous:
            yield _times(previous, count)
            count = 0
        previous, count = line, count + 1
    if previous:
        yield _times(previous, count)


def _times(line: str, count: int) -> str:
    return line if count == 1 else f"{line} ({count} times)"


def dtypes(op: OpRecord) -> str:
    """``bf16 -> fp32 -> bf16``; without accumulation ``bf16 -> bf16``."""
    inputs, outputs = (
        ", ".join(dict.fromkeys(SHORT.get(each, each) for each in side)) or "none" for side in (op.inputs, op.outputs)
    )
    middle = [SHORT.get(op.accumulation, op.accumulation)] if op.accumulation else []
    return " -> ".join([inputs, *middle, outputs])


def located(place: Place) -> str:
    """Path and line; of an installed package's file only what follows ``site-packages``."""
    return f"{shown(place.path.rpartition('/site-packages/')[2])}:{place.line}"


def starred(module: str) -> str:
    """A module's path with its layer numbers as one: ``layers.3.attn`` is ``layers.*.attn``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


def _groups(report: AuditReport) -> Iterator[str]:
    """One line for each phase, family and dtypes, the most floating point operations first."""
    total = sum(op.flops for op in report.ops) or 1
    groups: dict[tuple[int, str, str], list[OpRecord]] = {}
    for op in report.ops:
        if op.family:
            groups.setdefault((PHASES.index(op.phase), op.family, dtypes(op)), []).append(op)
    rows = []
    for (phase, family, kinds), members in sorted(
        groups.items(), key=lambda each: (each[0][0], -sum(op.flops for op in each[1]), each[0])
    ):
        flops = sum(op.flops for op in members)
        share = f"{flops / total:.0%} of FLOPs" if flops / total >= 0.005 else ""
        verdict = next((op.verdict for op in members if op.verdict), "")
        modules = list(dict.fromkeys(starred(op.module) for op in members if op.module))
        where = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        times = f"{sum(op.count for op in members)} x"
        rows.append((PHASES[phase], family, kinds, times, share, verdict, where))
    yield from _table(rows)
    rest = sum(op.count for op in report.ops if not op.family)
    if rest:
        yield f"and {counted(rest, 'op')} without sums of their own: views, copies and the like (--all lists them)"


def _every(report: AuditReport) -> Iterator[str]:
    yield from _table(
        [
            (
                op.phase,
                op.op,
                dtypes(op),
                f"{op.count} x",
                op.verdict,
                op.parameter or op.module,
                located(op.place) if op.place else "",
            )
            for op in sorted(report.ops, key=lambda op: PHASES.index(op.phase))
        ]
    )


def _casts(report: AuditReport, all: bool) -> Iterator[str]:
    """The total, then the lines that cast what had been cast, the most bytes first."""
    casts = report.casts
    if not casts:
        return
    count, written = sum(each.count for each in casts), sum(each.bytes for each in casts)
    yield f"{counted(count, 'cast')} between floating dtypes wrote {_size(written)}"
    groups: dict[tuple[str, str, str, str], list[CastRecord]] = {}
    for each in casts:
        if all or each.again or each.back:
            where = located(each.place) if each.place else "(no line)"
            kind = f"{SHORT.get(each.source, each.source)} -> {SHORT.get(each.target, each.target)}"
            groups.setdefault((where, each.phase, kind, starred(each.module)), []).append(each)
    rows = []
    for (where, phase, kind, module), members in groups.items():
        again, back = sum(each.again for each in members), sum(each.back for each in members)
        said = [f"{again} of a tensor cast before"] if again else []
        said += [f"{back} back to the dtype it came from"] if back else []
        total, times = sum(each.bytes for each in members), f"{sum(each.count for each in members)} x"
        rows.append((total, (where, phase, kind, times, _size(total), "; ".join(said), module)))
    rows.sort(key=lambda row: (-row[0], row[1]))
    limit = len(rows) if all else LIMIT
    yield from _table([row for _, row in rows[:limit]])
    if len(rows) > limit:
        yield f"and {counted(len(rows) - limit, 'line')} more with such casts (--all lists them)"


def _storage(report: AuditReport) -> Iterator[str]:
    if not report.storage:
        return
    held = report.bytes_per_parameter
    if held is not None:
        yield f"{held:.1f} bytes of model state for each trained parameter (mixed precision with Adam: 16)"
    yield from _table(
        [
            (each.kind, SHORT.get(each.dtype, each.dtype), counted(each.tensors, "tensor"), _size(each.bytes))
            for each in report.storage
        ]
    )


def _activations(report: AuditReport, all: bool) -> Iterator[str]:
    """The total by dtype, then by module and dtype, the most bytes first."""
    kept = report.activations
    if not kept:
        return
    dtypes: dict[str, int] = {}
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for each in kept:
        dtype = SHORT.get(each.dtype, each.dtype)
        dtypes[dtype] = dtypes.get(dtype, 0) + each.bytes
        key = (each.module if all else starred(each.module)) or "(no module)", dtype
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + each.tensors, total + each.bytes)
    parts = ", ".join(f"{_size(size)} {name}" for name, size in sorted(dtypes.items(), key=lambda each: -each[1]))
    yield f"{_size(sum(dtypes.values()))}, casts of weights included: {parts}"
    rows = sorted(groups.items(), key=lambda each: (-each[1][1], each[0]))
    limit = len(rows) if all else LIMIT
    yield from _table(
        [(*key, counted(count, "tensor"), _size(size)) for key, (count, size) in rows[:limit]],
    )
    if len(rows) > limit:
        rest = sum(size for _, (_, size) in rows[limit:])
        yield f"and {counted(len(rows) - limit, 'module')} more with {_size(rest)} (--all lists them)"


def _updates(report: AuditReport, all: bool) -> Iterator[str]:
    if not report.updates:
        return
    meant, lost = sum(each.meant for each in report.updates), sum(each.lost for each in report.updates)
    yield f"{_share(lost, meant)} of {counted(meant, 'update')} rounded away: the weight stands where it stood"
    rows = sorted(report.updates, key=lambda each: (-each.lost / max(each.meant, 1), each.parameter))
    limit = len(rows) if all else LIMIT
    yield from _table(
        [
            (each.parameter, SHORT.get(each.dtype, each.dtype), f"{_share(each.lost, each.meant)} of {each.meant} lost")
            for each in rows[:limit]
        ]
    )
    if len(rows) > limit:
        yield f"and {counted(len(rows) - limit, 'weight')} that lost less (--all lists them)"


def _ranges(report: AuditReport) -> Iterator[str]:
    found = report.gradients
    if found is None:
        return
    beyond = f", {found.nonfinite} infinite or NaN" if found.nonfinite else ""
    exponents = f"from 2^{found.least} to 2^{found.greatest}"
    yield f"{exponents}, {_share(found.zeros, found.elements)} zeros{beyond}, of {counted(found.elements, 'element')}"
    rows: dict[str, list[str]] = {}
    for each in found.formats:
        whose = "the best" if each.chosen == "best" else each.chosen
        scale = "unscaled" if each.chosen == "none" else f"at {whose} scale 2^{math.log2(each.scale):.0f}"
        shares = [(each.zero, "become 0"), (each.subnormal, "subnormal"), (each.over, "overflow")]
        said = ", ".join(f"{share:.1%} {what}" for share, what in shares if share >= 0.0005)
        rows.setdefault(each.format, []).append(f"{scale}: {said or 'all normal'}")
    yield from _table([(name, "; ".join(said)) for name, said in rows.items()])


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "none"


def _size(bytes_: int) -> str:
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if bytes_ >= one:
            return f"{bytes_ / one:.1f} {unit}"
    return f"{bytes_} bytes"


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(shown(cell)) for cell in column) for column in zip(*rows, strict=True)] if rows else []
    for row in rows:
        yield "  ".join(shown(cell).ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()


def _settings(report: AuditReport, all: bool) -> Iterator[str]:
    """Regions, what the settings mean, and the settings; those of CUDA where it ran."""
    for region in report.regions:
        yield f"autocast {shown(region)}"
    yield from report.meaning
    cuda = all or any(op.device == "cuda" for op in report.ops)
    rest = [name for name in report.settings if not cuda and (".cuda." in name or ".cudnn." in name)]
    for name, value in report.settings.items():
        if name not in rest:
            yield f"{name} = {shown(value)}"
    if rest:
        yield f"and {counted(len(rest), 'setting')} of CUDA, which did not run (--all lists them)"
