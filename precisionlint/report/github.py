"""A report as workflow commands, which GitHub shows as annotations on the lines of a pull request."""

from collections.abc import Iterator

from precisionlint.findings import Finding, Report
from precisionlint.report.excerpt import shown
from precisionlint.report.outputs import Style, clean
from precisionlint.report.text import verdict

LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def render(report: Report, style: Style) -> Iterator[str]:
    """A command a finding and a file that could not be read, then what was found in all."""
    for finding in report.findings:
        yield _annotation(finding)
    for error in report.errors:
        line = {} if error.line is None else {"line": str(error.line)}
        yield _command("error", {"file": error.path, **line, "title": "precisionlint"}, [error.message])
    yield verdict(report, False)


def _annotation(finding: Finding) -> str:
    place = finding.place
    properties = {"file": place.path}
    if not place.cell:  # a line of a cell is none of the file
        properties |= {"line": str(place.line), "endLine": str(place.end_line)}
        if place.line == place.end_line:
            properties |= {"col": str(place.column), "endColumn": str(place.end_column)}
    when = f" (when {finding.when})" if finding.when else ""
    steps = [f"{number}. {step.place.where}: {step.message}" for number, step in enumerate(finding.trace, 1)]
    text = [f"{place.where}: {finding.message}{when}", *steps]
    return _command(LEVELS[finding.severity], properties | {"title": finding.rule}, text)


def _command(level: str, properties: dict[str, str], text: list[str]) -> str:
    told = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::{level} {told}::{_escaped(chr(10).join(map(shown, text)))}"


def _escaped(text: str, more: str = "") -> str:
    """As GitHub's own toolkit escapes data and, with ``more``, properties."""
    lines = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    for each in more:
        lines = lines.replace(each, f"%{ord(each):02X}")
    return shown(clean(lines))
