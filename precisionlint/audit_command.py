"""``precisionlint audit``: reads a script as ``check`` does, runs it under the audit, and says of each finding what
the run makes of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

from msgspec import Struct

from precisionlint.audit_judging import configuration_names, judge
from precisionlint.audit_report import AuditReport, Judged
from precisionlint.errors import InputError
from precisionlint.findings import Finding


class Audited(Struct, frozen=True):
    """The outcome of the command. ``report`` is None where the step never came."""

    script: str
    report: AuditReport | None
    read: tuple[Judged, ...]
    step: int
    steps: int
    backwards: int
    ended: str
    failed: bool

    @property
    def exit_code(self) -> int:
        """3 where the script failed or the step never came, 1 where a fault of this run was measured, or read and the
        step could not have shown it, else 0: what belongs to another configuration, was not reached or was refuted is
        none of this run.
        """
        if self.failed or self.report is None:
            return 3
        grave = any(each.finding.severity != "info" and each.stands for each in self.read)
        return int(grave or not self.report.ok)


def run(
    command: Sequence[str], *, module: bool, step: int, keep_running: bool, values: bool, eager: bool = False
) -> Audited:
    """Reads and runs a script (its path and arguments, or a module's name and arguments) and audits its ``step``-th
    iteration; ``eager``: what it compiles runs uncompiled. Then the project's other files that it loaded are read too.
    """
    path = _source(command[0], module)
    findings = _read([path] if path else [])

    from precisionlint.trace import script
    from precisionlint.trace.places import shown_path

    outcome = script.run(
        command,
        module=module,
        step=step,
        keep_running=keep_running,
        values=values,
        eager=eager,
        names=configuration_names,
    )
    known = outcome.configuration
    others = [shown_path(each) for each in outcome.files if path is None or not os.path.samefile(each, path)]
    findings = tuple(sorted((*findings, *_read(others)), key=lambda each: (each.place, each.rule)))
    own = findings
    if findings and known:
        own = _read([path] if path else [], known) + _read(others, known)
    of_this_run = {(each.rule, each.place): each for each in own}
    here = {**known, "torch.cuda.is_available()": outcome.cuda}
    read = tuple(judge(each, outcome.report, of_this_run.get((each.rule, each.place)), here) for each in findings)
    return Audited(
        command[0], outcome.report, read, step, outcome.steps, outcome.backwards, outcome.ended, outcome.failed
    )


def _read(paths: Sequence[str], assume: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    from precisionlint import check

    if not paths:
        return ()
    return check(paths, assume={name: repr(value) for name, value in (assume or {}).items()}).findings


def _source(target: str, module: bool) -> str | None:
    """The file of a script or a module; None for a module without one. Raises InputError where there is no module, or
    a package that cannot be run.
    """
    if not module:
        return target
    found = _spec(target)
    if found is None:
        raise InputError(f"-m {target}: no such module")
    if found.submodule_search_locations is not None:
        found = _spec(f"{target}.__main__")
        if found is None:
            raise InputError(f"-m {target}: a package without __main__.py")
    return os.path.relpath(found.origin) if found.has_location and found.origin is not None else None


def _spec(name: str) -> ModuleSpec | None:
    """Where a module lies, without importing its packages: they run with the script."""
    import sys

    path: Sequence[str] | None = None
    found: ModuleSpec | None = None
    parts = name.split(".")
    sys.path.insert(0, os.getcwd())
    try:
        for number in range(1, len(parts) + 1):
            dotted = ".".join(parts[:number])
            finders = (finder.find_spec(dotted, path) for finder in sys.meta_path)
            found = next((spec for spec in finders if spec is not None), None)
            if found is None:
                return None
            path = found.submodule_search_locations or []
    finally:
        sys.path.pop(0)
    return found


def lines(audited: Audited, *, format: str, color: bool, all: bool, width: int) -> Iterator[str]:
    """The report of the command, as text or as one JSON object."""
    if format == "json":
        import json

        yield json.dumps(to_dict(audited), indent=2)
        return
    from precisionlint.report.audit_text import read_lines, render
    from precisionlint.report.text import counted, paint

    if audited.report is None:
        ran = counted(audited.steps, "step")
        if audited.steps < audited.step:
            hint = f"; --step {audited.steps} audits an earlier one" if audited.steps else ""
            if audited.backwards and not audited.steps:
                hint = (
                    f" of torch.optim's optimizers, though a backward ran {counted(audited.backwards, 'time')}: "
                    "`with precisionlint.audit(model):` around a step audits it with any other optimizer"
                )
            said = f"step {audited.step} never came: {audited.script} {audited.ended} after {ran}{hint}"
        else:
            said = (
                f"no forward or backward was seen that begins step {audited.step}: {audited.script} {audited.ended} "
                f"after {ran}"
            )
        yield paint(f"audit of {audited.script}: {said}", "warning", color)
        yield from read_lines(audited.read, color, width)
    else:
        ended = f"{audited.script} {audited.ended}"
        yield from render(audited.report, color=color, all=all, width=width, read=audited.read, ended=ended)


def together(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a rank, then a wait for the others: a launcher ends the job as soon as one of them has failed."""
    yield from lines
    from precisionlint.trace.ranks import part

    part()


def to_dict(audited: Audited) -> dict[str, Any]:
    """The outcome as JSON's types."""
    from precisionlint.report.json import finding_dict

    return {
        "schema": 1,
        "script": audited.script,
        "step": audited.step,
        "steps": audited.steps,
        "ended": audited.ended,
        "failed": audited.failed,
        "read": [{**finding_dict(each.finding), "verdict": each.verdict, "why": each.why} for each in audited.read],
        "report": None if audited.report is None else audited.report.to_dict(),
    }
