"""A report as text for people: each finding with its source line and the path that led there, then a summary.

Colours are plain terminal codes: a library for them would cost a quarter of a small run's time.
"""

from collections.abc import Iterator
from functools import cache

from precisionlint.findings import SEVERITIES, Coverage, FileError, Finding, Report, Suppressed
from precisionlint.report.excerpt import excerpt, lines, shown

RECIPES = 3
"""How many recipes the summary of a run shows, the most frequent first."""
COLORS = {"error": "1;31", "warning": "1;33", "info": "1;36", "strong": "1", "faint": "2", "gutter": "34"}


def render(report: Report, *, color: bool = False, verbose: bool = False, suppressed: bool = False) -> Iterator[str]:
    """The report's lines, without the errors (`error_line`), which belong on another stream. ``suppressed``: with what does not count."""
    source = cache(lines)
    for finding in report.findings:
        yield from finding_lines(finding, source(finding.place.path, finding.place.cell), color)
        yield ""
    for each in report.suppressed if suppressed else ():
        yield suppressed_line(each, color)
    if suppressed and report.suppressed:
        yield ""
    yield _verdict(report, color)
    recipes = report.coverage.recipes
    for recipe in recipes[:RECIPES]:
        yield f"recipe: {shown(recipe)}"
    if len(recipes) > RECIPES:
        yield f"and {len(recipes) - RECIPES} more recipes"
    yield _reach(report.coverage, verbose)
    if verbose:
        for place in report.coverage.gave_up:
            yield f"  {shown(place.path)}:{place.line}: {shown(place.what)}"


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
    where = paint(f"{shown(place.where)}:{place.column}", "strong", color)
    what = f"{paint(finding.severity, finding.severity, color)} {paint(finding.rule, 'strong', color)}"
    doubt = " [likely]" if finding.confidence == "likely" else ""
    when = paint(f" (when {shown(finding.when)})", "faint", color) if finding.when else ""
    yield f"{where}: {what}{doubt}: {shown(finding.message)}{when}"
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


def _verdict(report: Report, color: bool) -> str:
    counts = {each: sum(finding.severity == each for finding in report.findings) for each in SEVERITIES}
    found = [paint(counted(number, each), each, color) for each, number in counts.items() if number]
    verdict = f"found {', '.join(found)}" if found else "found nothing"
    if report.suppressed:
        verdict += f"; {len(report.suppressed)} suppressed (--show-suppressed lists them)"
    return f"{verdict}; could not read {counted(len(report.errors), 'file')}" if report.errors else verdict


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
    reach = f"read {coverage.read} of {counted(coverage.files, 'file')}: {', '.join(parts) or 'no training program'}"
    if not coverage.gave_up:
        return reach
    hint = ":" if verbose else " (--verbose names them)"
    return f"{reach}; gave up on {counted(len(coverage.gave_up), 'place')}{hint}"


def counted(number: int, word: str) -> str:
    """`1 error`, `2 errors`, `2 info`."""
    return f"{number} {word}{'' if number == 1 or word == 'info' else 's'}"


def paint(text: str, style: str, color: bool) -> str:
    """The text with the codes of a style around it, where colour is on."""
    return f"\x1b[{COLORS[style]}m{text}\x1b[0m" if color else text
