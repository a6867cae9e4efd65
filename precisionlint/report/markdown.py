"""A report as Markdown, short enough for a comment on a pull request. Nothing in it is markup but what is written here."""

from collections.abc import Iterator

from precisionlint.findings import Finding, Report
from precisionlint.patterns import regex
from precisionlint.report.excerpt import shown
from precisionlint.report.outputs import Style, clean
from precisionlint.report.text import verdict

LIMIT = 60_000
"""Characters after which findings are only counted: GitHub takes 65,536."""
MARKUP = regex(r"([\\`*_{}\[\]<>()#+~!|&$^=:-])")


def render(report: Report, style: Style) -> Iterator[str]:
    """A heading with the outcome, a table of findings, and the way that leads to each."""
    yield f"### precisionlint: {verdict(report, False, hint=False)}"
    used = 0
    if report.findings:
        yield ""
        yield "| | where | rule | what |"
        yield "| --- | --- | --- | --- |"
    for number, finding in enumerate(report.findings):
        row = _row(finding)
        used += len(row)
        if used > LIMIT:
            yield ""
            yield f"and {len(report.findings) - number} more"
            break
        yield row
    for error in report.errors:
        yield ""
        where = error.path if error.line is None else f"{error.path}:{error.line}"
        yield f"{_code(where)} could not be read: {_escaped(error.message)}"


def _row(finding: Finding) -> str:
    doubt = f" ({finding.confidence})" if finding.confidence != "certain" else ""
    when = f" (when {_code(finding.when)})" if finding.when else ""
    steps = "".join(f"<li>{_code(step.place.where)} {_escaped(step.message)}</li>" for step in finding.trace)
    way = f"<details><summary>how</summary><ol>{steps}</ol></details>" if steps else ""
    what = f"{_escaped(finding.message)}{when}{way}"
    return f"| {finding.severity}{doubt} | {_code(finding.place.where)} | `{finding.rule}` | {what} |"


def _escaped(text: str) -> str:
    """The text with nothing in it that Markdown, a table, HTML or a mention would be made of."""
    entities = MARKUP.sub(lambda match: f"&#{ord(match[1])};", shown(clean(text)))
    return entities.replace("@", "@\N{ZERO WIDTH SPACE}")


def _code(text: str) -> str:
    """The text as code; HTML rather than backticks, which a table would still take apart at a bar."""
    return f"<code>{_escaped(text)}</code>"
