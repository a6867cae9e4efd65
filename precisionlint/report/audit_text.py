"""An audit's report as text that an engineer reads in a minute: the verdict, the findings with what was seen, what
happened in which order, families of ops by phase and dtype, storage, the range of the gradients, settings.

It is made of rich's texts, which know their width in a terminal's cells. In a pipe it is the same text without styles
and of a fixed width, so that two runs can be compared by a diff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from rich.text import Text

from precisionlint.audit_report import AuditReport, Judged, RangeRecord, Station, UpdateRecord
from precisionlint.findings import SEVERITIES, Finding, Place
from precisionlint.patterns import regex
from precisionlint.report import audit_ops
from precisionlint.report.audit_ops import SHORT, grouped, layer_part, located, short, starred
from precisionlint.report.excerpt import lines, shown
from precisionlint.report.layout import PIPE, colored, cut, filled, plain, share, size, table
from precisionlint.report.text import counted, finding_lines, suppressed_line

LIMIT = 3
"""How many lines of a section are shown without ``all``."""
INDENT = 12
"""Where the text of a section begins, beside its title."""
REGION = regex(r"\bb?float16\b|\S*/site-packages/")
"""What of a region is told shorter, or not at all."""
SETTING = regex(r"^torch\.(?:backends\.)?(?:get_)?|\(\)$")
"""What of a setting's name a reader does not need."""
MODULES = 3
"""How many modules are named in a line."""
STYLES = {
    "error": "bold red",
    "warning": "bold yellow",
    "info": "bold cyan",
    "strong": "bold",
    "gutter": "blue",
}
"""What the styles of a line mean to rich: the colours of ``check``."""


def render(
    report: AuditReport,
    *,
    color: bool = False,
    all: bool = False,
    width: int = PIPE,
    read: Sequence[Judged] = (),
    ended: str = "",
) -> Iterator[str]:
    """The report's lines, at most ``width`` long where words allow; ``all``: every finding, op, cast and module in
    full; ``read``: what ``check`` read before the run, and what the run says of it; ``ended``: what became of the
    script; ``color``: with a terminal's codes.
    """
    page = _page(report, all, width, read, ended)
    return colored(page, STYLES) if color else plain(page)


def _page(report: AuditReport, all: bool, width: int, read: Sequence[Judged], ended: str) -> Iterator[Text]:
    yield _verdict(report)
    yield Text(f"{_extent(report)}{f'; {shown(ended)}' if ended else ''}")
    if report.error:
        yield Text(f"the step raised {shown(report.error)}; what follows is what ran before", "warning")
    yield from _findings(report, all, width)
    if report.suppressed:
        yield Text()
        yield from (Text(suppressed_line(each, False)) for each in report.suppressed)
    yield from _read(read, width)
    yield from _section("order", _order(report.order, width))
    yield from _table(audit_ops.families(report, width - 2))
    yield from _section("casts", audit_ops.casts(report, None if all else LIMIT))
    yield from _section("storage", _storage(report, all, width))
    yield from _section("updates", _updates(report, all))
    yield from _section("gradients", _ranges(report, all, width))
    yield from _section("settings", _settings(report, all, width))
    yield from _section("notes", (line for note in report.notes for line in filled(shown(note), width - INDENT)))
    if all:
        yield from _table(audit_ops.every(report))


def _verdict(report: AuditReport) -> Text:
    counts = {each: sum(finding.severity == each for finding in report.findings) for each in SEVERITIES}
    found = [Text(counted(number, each), each) for each, number in counts.items() if number]
    subject = Text(f"audit of {shown(report.name)}" if report.name else "audit", "strong")
    unseen = ["the step raised"] if report.error else []
    unseen += [f"did not see inside {counted(len(report.compiled), 'compiled region')}"] if report.compiled else []
    unseen += [f"this machine has no {shown(', '.join(report.absent))}"] if report.absent else []
    where = " (see notes)" if report.compiled or report.absent else ""
    but = Text(f", but {' and '.join(unseen)}{where}" if unseen else "", "warning")
    return Text.assemble(subject, ": found ", Text(", ").join(found) if found else "nothing", but)


def _extent(report: AuditReport) -> str:
    ran = sum(op.count for op in report.ops)
    whole = "" if report.complete else ", of a window that may not hold the whole iteration"
    amount = f"{counted(ran, 'op')} in {counted(len(report.ops), 'kind')}"
    return f"measured {counted(report.steps, 'optimizer step')}, {amount}{whole}"


def _section(title: str, body: Iterable[str | Text]) -> Iterator[Text]:
    """A section, whose first line stands beside its title."""
    for number, line in enumerate(body):
        yield Text.assemble((f"{title:<{INDENT}}", "strong") if number == 0 else " " * INDENT, line)


def _table(rows: Iterable[str]) -> Iterator[Text]:
    """A table under its heads, the first of which is the section's title."""
    for number, row in enumerate(rows):
        yield Text(row, "strong") if number == 0 else Text(f"  {row}")


# -- findings


def _findings(report: AuditReport, all: bool, width: int) -> Iterator[Text]:
    """The gravest first; the same fault in several places once, with its other places."""
    source = cache(lines)
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for each in sorted(report.findings, key=lambda each: SEVERITIES.index(each.severity)):
        key = (each.rule, each.message, str(each.place) if all else "")
        groups.setdefault(key, []).append(each)
    yield Text()
    for number, (first, *others) in enumerate(groups.values()):
        if number and all:
            yield Text()
        if all:
            yield from map(Text.from_ansi, finding_lines(first, source(first.place.path), True))
        else:
            yield from _finding(report, first, source(first.place.path), width)
        if others:
            also = ", ".join(shown(each.place.where) for each in others)
            yield from (Text(f"    {line}") for line in filled(f"also at {also}", width - 4))
    if report.findings:
        yield Text()


def _finding(report: AuditReport, finding: Finding, source: Sequence[str], width: int) -> Iterator[Text]:
    """A finding with its line, the modules in which it ran, and the way that led there."""
    where = f"{shown(finding.place.where)}:{finding.place.column}:"
    doubt = " [likely]" if finding.confidence == "likely" else ""
    rule = shown(finding.rule)
    first, *rest = map(Text, filled(f"{where} {finding.severity} {rule}{doubt}: {shown(finding.message)}", width, 4))
    end = 0
    for word, style in ((where, "strong"), (finding.severity, finding.severity), (rule, "strong")):
        start = max(first.plain.find(word, end), end)  # a long path stands on a line of its own
        end = min(start + len(word), len(first.plain))
        first.stylize(style, start, end)
    yield first
    yield from rest
    modules = _modules(report, finding.place)
    line = shown(source[finding.place.line - 1].strip()) if finding.place.line <= len(source) else ""
    if line:
        inside = f"  (in {modules})" if modules else ""
        number = str(finding.place.line)
        text = cut(line, width - 4 - len(number) - 3 - len(inside))
        yield Text.assemble("    ", (f"{number} |", "gutter"), f" {text}{inside}")
    if len(finding.trace) > 1:
        way = "seen: " + " > ".join(_way((step.place, step.message) for step in finding.trace)[0])
        yield from (Text(f"    {each}") for each in filled(way, width - 4))


def _modules(report: AuditReport, at: Place) -> str:
    """The modules that ran a line: ``layers.*.attn: 48 modules``."""
    ran = {
        layer_part(op.module) for op in report.ops if op.module and op.place is not None and _same_line(op.place, at)
    }
    names = sorted({starred(each) for each in ran})
    if not names:
        return ""
    few = ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
    return few if len(ran) == len(names) else f"{few}: {len(ran)} modules"


def _same_line(left: Place, right: Place) -> bool:
    return (left.path, left.line) == (right.path, right.line)


def read_lines(read: Sequence[Judged], color: bool, width: int) -> Iterator[str]:
    """What ``check`` read, and what the run says of it, where there is no report of a step."""
    page = _read(read, width)
    return colored(page, STYLES) if color else plain(page)


def _read(read: Sequence[Judged], width: int) -> Iterator[Text]:
    """What ``check`` read, by what the run says of it; what it confirmed is told by its places alone."""
    confirmed = [
        f"{each.finding.rule} {shown(each.finding.place.where)}" for each in read if each.verdict == "confirmed"
    ]
    told = list(map(Text, filled(f"confirmed: {'; '.join(confirmed)}", width - INDENT) if confirmed else []))
    for each in read:
        if each.verdict != "confirmed":
            when = f" (when {shown(each.finding.when)})" if each.finding.when else ""
            why = f": {shown(each.why)}" if each.why else ""
            said = f"{each.verdict}: {each.finding.rule} {shown(each.finding.place.where)}{when}{why}"
            first, *rest = map(Text, filled(said, width - INDENT))
            first.stylize("strong", 0, len(each.verdict))
            told += [first, *rest]
    yield from _section("check read", told)


# -- order


def _order(stations: Sequence[Station], width: int) -> Iterator[str]:
    """Stations in order, what repeats as one."""
    told, file = [], ""
    for run, count in _runs(stations):
        names, file = _way(((each.place, each.what) for each in run), file)
        said = " > ".join(names)
        told.append(said if count == 1 else f"{said if len(run) == 1 else f'({said})'} {count} times")
    yield from filled(" > ".join(told), width - INDENT)


def _way(stations: Iterable[tuple[Place | None, str]], file: str = "") -> tuple[list[str], str]:
    """``train.py:30 backward``, then only the line while the file stays the same; and the file in the end."""
    told = []
    for place, what in stations:
        path, _, line = located(place).rpartition(":") if place is not None else ("", "", "")
        told.append(f"{'' if path == file else path}:{line} {shown(what)}" if place is not None else shown(what))
        file = path or file
    return told, file


def _runs(stations: Sequence[Station]) -> Iterator[tuple[Sequence[Station], int]]:
    """The stations as runs, each with how often it comes in a row; the shortest that repeats first."""
    start = 0
    while start < len(stations):
        rest = stations[start:]
        period = next((each for each in range(1, len(rest) // 2 + 1) if rest[:each] == rest[each : 2 * each]), None)
        run, count = rest[: period or 1], 1
        while period and rest[count * period : (count + 1) * period] == run:
            count += 1
        yield run, count
        start += len(run) * count


# -- storage


def _storage(report: AuditReport, all: bool, width: int) -> Iterator[str]:
    """Bytes of model state by dtype, and what is saved for the backward."""
    held = report.bytes_per_parameter
    if held is not None:
        yield f"{held:.1f} bytes of model state for each trained parameter (mixed precision with Adam: 16)"
    kinds: dict[str, list[str]] = {}
    for each in report.storage:
        kind = each.kind.removeprefix("optimizer state ")
        tensors = f" ({counted(each.tensors, 'tensor')})" if all else ""
        kinds.setdefault(short(each.dtype), []).append(f"{kind} {size(each.bytes)}{tensors}")
    for dtype, parts in kinds.items():
        yield from filled(f"{dtype}: {', '.join(parts)}", width - INDENT)
    yield from _activations(report, all, width)


def _activations(report: AuditReport, all: bool, width: int) -> Iterator[str]:
    """The total by dtype, then by module and dtype, the most bytes first."""
    kept = report.activations
    if not kept:
        return
    dtypes: dict[str, int] = {}
    groups: dict[tuple[str, str], tuple[int, int]] = {}
    for each in kept:
        dtype = short(each.dtype)
        dtypes[dtype] = dtypes.get(dtype, 0) + each.bytes
        key = (each.module if all else grouped(each.module)) or "(no module)", dtype
        count, total = groups.get(key, (0, 0))
        groups[key] = (count + each.tensors, total + each.bytes)
    kinds = sorted(dtypes.items(), key=lambda each: -each[1])
    total = sum(dtypes.values())
    parts = [f"{size(bytes_)} {name}" for name, bytes_ in kinds if all or 100 * bytes_ >= total]
    rows = sorted(groups.items(), key=lambda each: (-each[1][1], each[0]))
    said = f"saved for the backward (casts of weights included): {', '.join(parts)}"
    if all:
        yield said
        yield from table([("  " + name, dtype, counted(n, "tensor"), size(b)) for (name, dtype), (n, b) in rows])
        return
    told = [f"{name} {size(bytes_)} {dtype}" for (name, dtype), (_, bytes_) in rows[:MODULES]]
    rest = sum(bytes_ for _, (_, bytes_) in rows[MODULES:])
    more = [f"{len(rows) - MODULES} more {size(rest)}"] if rest else []
    yield from filled(f"{said}; by {', '.join([*told, *more])}", width - INDENT)


# -- updates and gradients


def _updates(report: AuditReport, all: bool) -> Iterator[str]:
    if not report.updates:
        return
    meant, lost = sum(each.meant for each in report.updates), sum(each.lost for each in report.updates)
    yield f"{share(lost, meant)} of {counted(meant, 'update')} of half weights rounded away"
    groups: dict[tuple[str, str], list[UpdateRecord]] = {}
    for each in report.updates:
        groups.setdefault((each.parameter if all else starred(each.parameter), short(each.dtype)), []).append(each)
    rows = []
    for (name, dtype), members in groups.items():
        meant, lost = sum(each.meant for each in members), sum(each.lost for each in members)
        rows.append((-lost / max(meant, 1), (name, dtype, f"{share(lost, meant)} of {meant}")))
    rows.sort()
    limit = len(rows) if all else LIMIT
    yield from table([row for _, row in rows[:limit]])
    if len(rows) > limit:
        yield f"and {counted(len(rows) - limit, 'weight')} more, which lost less (--all lists them)"


def _ranges(report: AuditReport, all: bool, width: int) -> Iterator[str]:
    """The exponents of the gradients, and what becomes of them in each format; without ``all`` only in 16 bits."""
    found = report.gradients
    if found is None:
        return
    fates: dict[str, list[str]] = {}
    for each in found.formats:
        where = {"none": "", "best": f"at 2^{math.log2(each.scale):.0f} "}.get(each.chosen, f"at {each.chosen} scale ")
        if (all or each.format in ("fp16", "bf16")) and fates.get(each.format) != ["all normal"]:
            fates.setdefault(each.format, []).append(where + _fate(each))
    beyond = f", {found.nonfinite} infinite or NaN" if found.nonfinite else ""
    zeros = f"{share(found.zeros, found.elements)} zeros{beyond}"
    told = [f"2^{found.least} to 2^{found.greatest}, {zeros}, {counted(found.elements, 'element')}"]
    told += [f"{name}: {', '.join(parts)}" for name, parts in fates.items()]
    yield from told if all else filled("; ".join(told), width - INDENT)


def _fate(each: RangeRecord) -> str:
    shares = [(each.zero, "become 0"), (each.subnormal, "subnormal"), (each.over, "overflow")]
    return ", ".join(f"{part:.1%} {what}" for part, what in shares if part >= 0.0005) or "all normal"


# -- settings


def _settings(report: AuditReport, all: bool, width: int) -> Iterator[str]:
    """Regions, what the settings mean, and the settings; those of CUDA where it ran, without ``all`` those that are set."""
    told = [
        *(f"autocast {shown(REGION.sub(lambda each: SHORT.get(each[0], ''), region))}" for region in report.regions),
        *report.meaning,
    ]
    cuda = all or any(op.device == "cuda" for op in report.ops)
    rest = [name for name in report.settings if not cuda and (".cuda." in name or ".cudnn." in name)]
    for name, value in report.settings.items():
        if name not in rest and (all or value != "none"):
            told.append(f"{name if all else SETTING.sub('', name)} = {shown(value)}")
    yield from told if all else filled("; ".join(told), width - INDENT)
