"""A report as text for people: each finding with its source line and the path that led there, then a summary.

Colours are plain terminal codes: a library for them would cost a quarter of a small run's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from precisionlint.findings import SEVERITIES, Coverage, FileError, Finding, Report, Suppressed
from precisionlint.report.excerpt import Sources, excerpt, shown

if TYPE_CHECKING:
    from precisionlint.report.outputs import Style

RECIPES = 3
"""How many recipes the summary of a run shows, the most frequent first."""
COLORS = {"error": "1;31", "warning": "1;33", "info": "1;36", "strong": "1", "faint": "2", "gutter": "34"}


def render(report: Report, style: Style) -> Iterator[str]:
    """The report's lines, without the errors (`error_line`), which belong on another stream."""
    sources = Sources(report.texts)
    if style.statistics:
        yield from statistics(report, style.color)
    for finding in report.findings if not style.statistics else ():
        yield from finding_lines(finding, sources.lines(finding.place), style.color)
        yield ""
    for each in report.suppressed if style.suppressed else ():
        yield suppressed_line(each, style.color)
    if style.suppressed and report.suppressed:
        yield ""
    yield verdict(report, style.color)
    if told := _fixable(report):
        yield told
    yield from (f"no longer found, in the baseline: {shown(entry)}" for entry in report.stale)
    recipes = report.coverage.recipes
    for recipe in recipes[:RECIPES]:
        yield f"recipe: {shown(recipe)}"
    if len(recipes) > RECIPES:
        yield f"and {counted(len(recipes) - RECIPES, 'more recipe')}"
    if report.coverage.read or (report.coverage.files and not report.errors):
        yield _reach(report.coverage, style.verbose)
    if style.verbose:
        for place in report.coverage.gave_up:
            yield f"  {shown(place.path)}:{place.line}: {shown(place.what)}"


def statistics(report: Report, color: bool) -> Iterator[str]:
    """How often each rule was found, the most frequent first."""
    counts = Counter((finding.rule, finding.severity) for finding in report.findings)
    width = len(str(max(counts.values(), default=0)))
    for (rule, severity), number in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"{number:>{width}}  {paint(f'{severity:<7}', severity, color)}  {paint(rule, 'strong', color)}"


def error_line(error: FileError) -> str:
    """What standard error says of a file that could not be read."""
    where = error.path if error.line is None else f"{error.path}:{error.line}"
    return f"precisionlint: {shown(where)}: {shown(error.message)}"


def suppressed_line(each: Suppressed, color: bool) -> str:
    """A finding that does not count, and why."""
    finding = each.finding
    where = paint(f"{shown(finding.place.where)}:{finding.place.column}", "faint", color)
    return f"{where}: {each.by}: {finding.rule}: {shown(each.reason or 'no reason given')}"


def finding_lines(finding: Finding, source: tuple[str, ...], color: bool) -> Iterator[str]:
    """A finding with its source line and its path."""
    place = finding.place
    yield heading(finding, color)
    if place.line <= len(source):
        part = excerpt(source[place.line - 1], place)
        bar = paint("|", "gutter", color)
        yield f"{paint(str(place.line), 'gutter', color)} {bar} {part.text}"
        carets = paint("^" * part.length, finding.severity, color)
        yield f"{' ' * len(str(place.line))} {bar} {' ' * part.offset}{carets}"
    width = len(str(len(finding.trace)))
    for number, step in enumerate(finding.trace, 1):
        station = paint(f"{shown(step.place.where)}:", "faint", color)
        yield f"  {number:>{width}}. {station} {shown(step.message)}"


def heading(finding: Finding, color: bool) -> str:
    """Where a finding is, which rule it breaks, how gravely, and what follows."""
    where = paint(f"{shown(finding.place.where)}:{finding.place.column}", "strong", color)
    what = f"{paint(finding.severity, finding.severity, color)} {paint(finding.rule, 'strong', color)}"
    doubt = f" [{finding.confidence}]" if finding.confidence != "certain" else ""
    doubt += " [*]" if finding.fix is not None and finding.fix.safe else ""
    when = paint(f" (when {shown(finding.when)})", "faint", color) if finding.when else ""
    return f"{where}: {what}{doubt}: {shown(finding.message)}{when}"


def verdict(report: Report, color: bool, *, hint: bool = True) -> str:
    """What was found in all; ``hint``: how to see the rest."""
    counts = {each: sum(finding.severity == each for finding in report.findings) for each in SEVERITIES}
    found = [paint(counted(number, each), each, color) for each, number in counts.items() if number]
    told = f"found {', '.join(found)}" if found else "found nothing"
    if report.suppressed:
        told += f"; {len(report.suppressed)} suppressed" + (" (--show-suppressed lists them)" if hint else "")
    return f"{told}; could not read {counted(len(report.errors), 'file')}" if report.errors else told


def _fixable(report: Report) -> str:
    """How many findings have a fix."""
    fixes = [finding.fix for finding in report.findings if finding.fix is not None]
    safe = sum(fix.safe for fix in fixes)
    parts = [f"{safe} with a safe fix [*] (--fix)"] if safe else []
    parts += [f"{len(fixes) - safe} with an unsafe one (--fix --unsafe-fixes)"] if safe < len(fixes) else []
    return f"{', '.join(parts)}; --diff shows what they change" if parts else ""


def _reach(coverage: Coverage, verbose: bool) -> str:
    parts = [
        counted(number, word)
        for number, word in (
            (coverage.programs, "program"),
            (coverage.loops, "loop"),
            (coverage.optimizers, "optimizer"),
            (coverage.scalers, "scaler"),
        )
        if number
    ]
    files = counted(coverage.files, "file")
    if not coverage.read:
        return f"looked at {files}: no training program and no settings of precision"
    reach = f"read {coverage.read} of {files}: {', '.join(parts) or 'no training program'}"
    if not coverage.gave_up:
        return reach
    hint = ":" if verbose else f" (--verbose names {'it' if len(coverage.gave_up) == 1 else 'them'})"
    return f"{reach}; gave up on {counted(len(coverage.gave_up), 'place')}{hint}"


def counted(number: int, word: str) -> str:
    """`1 error`, `2 errors`, `2 info`."""
    return f"{number} {word}{'' if number == 1 or word == 'info' else 's'}"


def paint(text: str, style: str, color: bool) -> str:
    """The text with the codes of a style around it, where colour is on."""
    return f"\x1b[{COLORS[style]}m{text}\x1b[0m" if color else text
