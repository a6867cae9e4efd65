"""The ranks of one job compared: settings in force, and the dtypes in which the same module ran the same op.

They meet in the key-value store through which torch.distributed was set up, so no collective is added to the step.
Ranks that are not audited, or whose step raised, are named and not waited for. Rank 0 compares itself with all others,
each other rank with rank 0.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from precisionlint.audit_report import AuditReport
from precisionlint.findings import Finding, Place
from precisionlint.trace.verdicts import finding

PREFIX = "precisionlint"
PATIENCE = timedelta(seconds=20)
"""How long a rank waits for one that is audited too: they end the same step within moments of each other."""
TOLD = 3
"""How many lines that differ from one rank's are told."""
CONSEQUENCE = "the gradients that are averaged are not those of one recipe"
PHASES = frozenset({"forward", "recompute", "backward", "collective"})
NO_PRECISION = frozenset({"torch.backends.cudnn.benchmark"})
"""Settings that decide no dtype."""
FLOATS = ("float", "bfloat")

Digest = Mapping[str, str]
"""What of a rank is compared: a setting, or a phase, module and op, and what it was there."""


class Ranks(Struct, frozen=True):
    """One rank's view of the others, for one window."""

    store: Any
    rank: int
    world: int
    window: int
    """The number of this window on this rank; windows of one number belong together."""

    def exchange(self, report: AuditReport, fallback: Place) -> AuditReport:
        """The report with what the comparison found."""
        digest = _digest(report)
        packed = zlib.compress(json.dumps(digest, sort_keys=True).encode())
        try:
            self.store.set(self._key("report", self.rank), packed)
            self.store.set(self._key("hash", self.rank), "" if report.error else sha256(packed).hexdigest())
            if report.error:
                return report
            return self._compared(report, digest, sha256(packed).hexdigest(), fallback)
        except (RuntimeError, ValueError) as error:  # the store went with the rank that held it
            note = f"the ranks were not compared: {str(error).splitlines()[0]}"
            return replace(report, notes=(*report.notes, note))

    def _compared(self, report: AuditReport, digest: Digest, own: str, fallback: Place) -> AuditReport:
        findings, notes, alike = list(report.findings), list(report.notes), 0
        for other in range(self.world) if self.rank == 0 else (0,):
            if other == self.rank:
                continue
            said, theirs = self._hash(other)
            if said:
                notes.append(said)
            elif theirs == own:
                alike += 1
            else:
                packed = self.store.get(self._key("report", other))
                differ = dict(_differences(digest, json.loads(zlib.decompress(packed))))
                alike += not differ
                findings += self._findings(differ, other, report, fallback)
        if alike:
            others = f"{alike} other ranks" if alike > 1 else "1 other rank"
            notes.append(f"rank {self.rank} of {self.world}: {others} compared, with the same settings and dtypes")
        findings.sort(key=lambda each: (each.place, each.rule))
        return replace(report, findings=tuple(findings), notes=tuple(notes))

    def _findings(
        self, differ: Mapping[str, str], other: int, report: AuditReport, fallback: Place
    ) -> Iterator[Finding]:
        """One finding for all settings, and one for each of the first lines whose ops differ."""
        lines: dict[Place, list[str]] = {}
        for op in report.ops:
            name = _name(op.phase, op.module, op.op)
            if name in differ:
                lines.setdefault(op.place or fallback, []).append(f"{name}: {differ[name]}")
        settings = [f"{name}: {text}" for name, text in differ.items() if name in report.settings]
        told = [(fallback, settings)] if settings else []
        for at, said in [*told, *sorted(lines.items())[:TOLD]]:
            more = f" (and {len(said) - 1} more)" if len(said) > 1 else ""
            message = f"rank {other} differs from rank {self.rank} in {said[0]}{more}: {CONSEQUENCE}"
            yield finding("ranks-differ", message, at)

    def _hash(self, other: int) -> tuple[str, str]:
        """Why a rank cannot be compared, or the hash of what it sent."""
        if not self.store.check([self._key("open", other)]):
            return f"rank {other} was not audited", ""
        try:
            self.store.wait([self._key("hash", other)], PATIENCE)
        except (RuntimeError, ValueError):
            return f"rank {other} did not end its step within {PATIENCE.seconds} seconds of this one", ""
        theirs = self.store.get(self._key("hash", other)).decode()
        return ("" if theirs else f"the step of rank {other} raised", theirs)

    def _key(self, what: str, rank: int) -> str:
        return f"{PREFIX}/{self.window}/{what}/{rank}"


def meet() -> Ranks | None:
    """Says that this rank is audited; None where there are no others."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    found = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if world < 2 or found is None:
        return None
    store = found()
    ranks = Ranks(store, rank, world, int(store.add(f"{PREFIX}/windows/{rank}", 1)))
    # Unlike `set` it returns when the store has it: others look, and do not wait.
    store.add(ranks._key("open", rank), 1)
    return ranks


def part() -> None:
    """Waits until every rank has come this far, so that the first to end does not take down the job of the others."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        with suppress(RuntimeError, ValueError, AttributeError):
            store = torch.distributed.distributed_c10d._get_default_store()
            store.set(f"{PREFIX}/done/{rank}", "1")
            store.wait([f"{PREFIX}/done/{each}" for each in range(world)], PATIENCE)


def _name(phase: str, module: str, op: str) -> str:
    return f"{op} of {module} in the {phase}" if module else f"{op} in the {phase}"


def _digest(report: AuditReport) -> Digest:
    found: dict[str, set[str]] = {}
    for op in report.ops:
        if op.family and op.phase in PHASES and (op.module or op.phase == "collective"):
            dtypes = [each for each in (*op.inputs, *op.outputs) if each.startswith(FLOATS)]
            if dtypes:
                found.setdefault(_name(op.phase, op.module, op.op), set()).add(" ".join(dtypes))
    settings = {name: value for name, value in report.settings.items() if name not in NO_PRECISION}
    return {**settings, **{name: "; ".join(sorted(each)) for name, each in found.items()}}


def _differences(own: Digest, theirs: Digest) -> Iterator[tuple[str, str]]:
    """What both have and neither shares with the other; what only one ran (an expert, a stage, a log) is no fault."""
    for name in sorted(own.keys() & theirs.keys()):
        mine, yours = set(own[name].split("; ")), set(theirs[name].split("; "))
        if not mine & yours:
            here, there = (", ".join(sorted(each)) for each in (mine, yours))
            yield name, f"{there} where this rank has {here}"
