"""What an audit says of one training step: plain data, free of torch, so that every renderer and a later run can read
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TextIO

from msgspec import Struct

from precisionlint.findings import Finding, Place, Suppressed

SCHEMA = 1


class OpRecord(Struct, frozen=True):
    """All calls of one op that were alike. Dtypes are names such as ``bfloat16``; of a list of tensors that differ,
    joined by ``|``.

    ``accumulation`` is ``unknown`` where nothing is known of it, and empty for an op that adds nothing up. ``flops``
    counts a multiply and an add as two, and is 0 where no formula is known.
    """

    op: str
    phase: str
    module: str
    place: Place | None
    inputs: tuple[str, ...]
    accumulation: str
    outputs: tuple[str, ...]
    count: int
    flops: int = 0
    parameter: str = ""
    family: str = ""
    verdict: str = ""
    device: str = ""


class CastRecord(Struct, frozen=True):
    """The casts of one line from one floating dtype to another; ``bytes`` were written. ``again``: of a tensor that
    had been cast to this dtype and had not changed; ``back``: to the narrower dtype that the tensor came from,
    unchanged.
    """

    phase: str
    module: str
    place: Place | None
    source: str
    target: str
    count: int
    bytes: int
    again: int
    back: int


class StorageRecord(Struct, frozen=True):
    """What is stored in one dtype: ``weights``, ``frozen weights``, ``gradients``, ``buffers``, ``master weights`` or
    ``optimizer state NAME``. ``elements`` is 0 for gradients.
    """

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


class ActivationRecord(Struct, frozen=True):
    """What the ops of a module in one dtype saved for the backward: storages, each counted once, and their bytes."""

    module: str
    dtype: str
    tensors: int
    bytes: int


class UpdateRecord(Struct, frozen=True):
    """The updates of one half weight in the step: elements that the optimizer meant to move, and those of them that
    stood still.
    """

    parameter: str
    dtype: str
    meant: int
    lost: int


class RangeRecord(Struct, frozen=True):
    """What becomes of the gradients in a format at a loss scale: shares of the finite elements that are not 0.

    ``chosen``: ``none`` for scale 1, ``the program's``, or ``best``: the largest power of two that leaves a factor of
    two below the format's maximum.
    """

    format: str
    scale: float
    chosen: str
    zero: float
    subnormal: float
    over: float


class GradientRange(Struct, frozen=True):
    """The gradients that the step used, the loss scale divided out: elements looked at, zeros, infinities and NaN
    among them, the least and the greatest exponent of two, and how each format would hold them.
    """

    elements: int
    zeros: int
    nonfinite: int
    least: int
    greatest: int
    formats: tuple[RangeRecord, ...]


class Station(Struct, frozen=True):
    """One event of the step's order: what happened, and on which line."""

    what: str
    place: Place | None


class AuditReport(Struct, frozen=True):
    """The outcome of one audited step. ``complete``: from the first forward to the first forward after the step."""

    name: str
    findings: tuple[Finding, ...]
    ops: tuple[OpRecord, ...]
    order: tuple[Station, ...]
    objects: tuple[Station, ...]
    """Where what took part came to be: optimizers, scalers, half weights, and where functions of one's own ran."""
    casts: tuple[CastRecord, ...]
    storage: tuple[StorageRecord, ...]
    activations: tuple[ActivationRecord, ...]
    updates: tuple[UpdateRecord, ...]
    gradients: GradientRange | None
    notes: tuple[str, ...]
    settings: Mapping[str, str]
    meaning: tuple[str, ...]
    regions: tuple[str, ...]
    steps: int
    complete: bool
    error: str = ""
    suppressed: tuple[Suppressed, ...] = ()
    """What was measured and does not count, since a comment says so."""
    compiled: tuple[Station, ...] = ()
    """What ran compiled, and where it was called: what the compiler fused was not seen."""
    absent: tuple[str, ...] = ()
    """The devices that autocast regions or scalers were made for and that this machine lacks: those are off."""

    @property
    def ok(self) -> bool:
        """Whether nothing of severity error or warning was found."""
        return all(finding.severity == "info" for finding in self.findings)

    @property
    def bytes_per_parameter(self) -> float | None:
        """Bytes of weights, master weights, gradients and optimizer state for each trained parameter; None where
        nothing is trained.

        Mixed precision with Adam has 16 by fp32 weights, gradients and two moments.
        """
        kinds = ("weights", "master weights", "gradients")
        held = sum(each.bytes for each in self.storage if each.kind in kinds or each.kind.startswith("optimizer state"))
        trained = sum(each.elements for each in self.storage if each.kind == "weights")
        return held / trained if trained else None

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON's types."""
        from precisionlint.report.audit_json import to_dict

        return to_dict(self)

    def save(self, path: str | Path) -> None:
        """Writes the report as JSON."""
        import json

        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def print(self, *, all: bool = False, color: bool | None = None, file: TextIO | None = None) -> None:
        """Prints the report; ``all``: every finding, op and cast in full; ``color`` None: on a terminal, unless NO_COLOR
        is set.
        """
        import sys

        from precisionlint.report.audit_text import render
        from precisionlint.report.color import colored
        from precisionlint.report.layout import width_of

        stream = file or sys.stdout
        styled = colored("auto", stream) if color is None else color
        for line in render(self, color=styled, all=all, width=width_of(stream)):
            print(line, file=stream)


Verdict = Literal["confirmed", "refuted", "not reached", "another configuration", "not measurable here"]


class Judged(Struct, frozen=True):
    """A finding of ``check``, what the run says of it, and why where that needs words. ``stands``: it is a fault of
    this run as far as anybody knows, measured or of a kind that a step cannot show.
    """

    finding: Finding
    verdict: Verdict
    why: str = ""
    stands: bool = False
