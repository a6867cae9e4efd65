"""The forms in which a report of ``check`` can be told, by name. Each is a module, imported when it is asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from importlib import import_module

from msgspec import Struct

from precisionlint.findings import Finding, Report
from precisionlint.patterns import regex
from precisionlint.report.excerpt import Sources

FORMATS = {
    "text": "precisionlint.report.text",
    "concise": "precisionlint.report.concise",
    "json": "precisionlint.report.json",
    "jsonl": "precisionlint.report.json",
    "sarif": "precisionlint.report.sarif",
    "github": "precisionlint.report.github",
    "gitlab": "precisionlint.report.gitlab",
    "junit": "precisionlint.report.junit",
    "markdown": "precisionlint.report.markdown",
}
"""Name -> module; the function that tells is the module's ``render``, or the name's own where it has several."""

SURROGATE = regex("[\ud800-\udfff]")


class Style(Struct, frozen=True):
    """How much is told, and whether in colours; forms for programs tell everything, always."""

    color: bool = False
    verbose: bool = False
    suppressed: bool = False
    statistics: bool = False


def render(name: str, report: Report, style: Style) -> Iterator[str]:
    """The report's lines in a form."""
    module = import_module(FORMATS[name])
    tell: Callable[[Report, Style], Iterator[str]] = getattr(module, f"render_{name}", None) or module.render
    return tell(report, style)


def fingerprints(findings: tuple[Finding, ...], sources: Sources) -> list[str]:
    """What names a finding in the next run too, when its line has moved: rule, path, text of the line, and which of several."""
    seen: dict[tuple[str, ...], int] = {}
    prints = []
    for finding in findings:
        text = " ".join(sources.line(finding.place).split())
        key = (finding.rule, finding.place.path, text)
        seen[key] = seen.get(key, 0) + 1
        data = "\0".join((*key, str(seen[key]))).encode("utf-8", errors="surrogatepass")
        prints.append(hashlib.sha256(data).hexdigest()[:32])
    return prints


def clean(text: str) -> str:
    """The text without halves of surrogate pairs, which no encoding of Unicode can hold: names of files may have them."""
    return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)
