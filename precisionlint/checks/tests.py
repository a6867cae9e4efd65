"""Tests of half precision: what they hold results to, and how they take them out of torch."""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.facts import HeldTo, ToNumpy

FAMILY = Family(Automaton("tests", None))

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""The most by which a result near 1 is off when it is rounded once (half of the spacing above 1)."""
SMALL = 2.0**-4
"""An absolute bound on the largest error counts from here down: results may be much smaller than 1."""


@FAMILY.rule("tight-half-tolerance", HeldTo)
def tight_half_tolerance(state: None, event: HeldTo) -> Iterator[Hit]:
    limit = {"close": 1.0, "mean": 0.5, "most": SMALL}[event.kind] * ROUNDING[event.dtype]
    if max(event.rtol, event.atol) >= limit or event.rtol == event.atol == 0:  # bitwise comparisons are meant
        return
    held = {
        "close": f"rtol={event.rtol:g}, atol={event.atol:g}",
        "mean": f"a mean relative error of {event.rtol:g}",
        "most": f"a largest error of {event.atol:g}",
    }[event.kind]
    reference = {"fp32": "an fp32 reference", "half": "another op's result", "reference": "what a reference gives"}[
        event.against
    ]
    when = f" (when {event.parameter} is {event.dtype})" if event.parameter else ""
    yield Hit(
        "tight-half-tolerance",
        event.at,
        f"a {event.dtype} result is held to {held} of {reference}{when}: rounding it once already moves it by up to "
        f"{ROUNDING[event.dtype]:.1g} of itself; expect about {'1e-2' if event.dtype == 'bf16' else '1e-3'}",
        (Seen(event.made, f"{event.op} in {event.dtype}"),),
        confidence="possible" if event.against == "reference" else "likely",
    )


@FAMILY.rule("half-to-numpy", ToNumpy)
def half_to_numpy(state: None, event: ToNumpy) -> Iterator[Hit]:
    when = f" when {event.parameter} is bf16" if event.parameter else ""
    yield Hit(
        "half-to-numpy",
        event.at,
        f"{event.call} of a bf16 tensor raises{when}: numpy has no bf16 ('Got unsupported ScalarType BFloat16'); .float() first",
        (Seen(event.made, "bf16 here"),),
        confidence="likely" if event.parameter else "certain",
    )
