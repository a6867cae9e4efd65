"""What a project has said of measured findings: rules that it ignores, severities of its own, comments that silence.

The same settings and comments as those of ``check``, file by file. A file that cannot be read silences nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from precisionlint import catalogue, suppress
from precisionlint.config import Configuration, Settings
from precisionlint.findings import Finding, Suppressed


def settled(findings: Iterable[Finding]) -> tuple[tuple[Finding, ...], tuple[Suppressed, ...]]:
    """What counts, and what a comment silences. Raises ConfigError, catalogue.UnknownNameError.

    A rule that is off by default (info) is measured all the same; one that the project ignores or does not select is not told.
    """
    configuration = Configuration()
    by_file: dict[str, list[Finding]] = {}
    for each in findings:
        by_file.setdefault(each.place.path, []).append(each)
    kept: list[Finding] = []
    suppressed: list[Suppressed] = []
    for path, members in by_file.items():
        settings = configuration.of(Path(path))
        wanted = _wanted(settings) - settings.ignores(Path(path).resolve().as_posix())
        members = [replace(each, severity=settings.severity_of(each)) for each in members if each.rule in wanted]
        counted, silenced = _by_comments(path, members)
        kept += counted
        suppressed += silenced
    return tuple(sorted(kept, key=lambda each: (each.place, each.rule))), tuple(suppressed)


def _wanted(settings: Settings) -> frozenset[str]:
    return settings.rules if settings.select else catalogue.select(["all"], (), settings.ignore)


def _by_comments(path: str, findings: list[Finding]) -> tuple[list[Finding], list[Suppressed]]:
    try:
        data = Path(path).read_bytes()
    except OSError:
        return findings, []
    comments, statements = suppress.comments(path, data), suppress.statements(data)
    if not comments or statements is None:
        return findings, []
    covered = [(each, suppress.covering(each.place.line, comments, statements)) for each in findings]
    return suppress.apply(covered, comments, frozenset(), judge=False)
