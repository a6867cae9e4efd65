"""FP8: how numbers are brought into its range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.events import Event
from precisionlint.kernel_facts import ScaledByAmax


def advance(state: None, event: Event) -> None:
    return state


FAMILY = Family(Automaton("fp8", None, advance))


@FAMILY.rule("fp8-zero-amax", ScaledByAmax)
def fp8_zero_amax(state: None, event: ScaledByAmax) -> Iterator[Any]:
    if event.floored:
        return
    what = "0 times an infinite scale" if event.inverse else "0 divided by a scale of 0"
    yield Hit(
        "fp8-zero-amax",
        event.at,
        f"where all of the numbers are zero this is {what}, NaN, and stays it in FP8: raise the largest magnitude to a floor first, such "
        "as 1e-12",
        (
            Seen(event.amax, "the largest magnitude, which may be 0"),
            Seen(event.at, "scaled by it, with no floor in between"),
        ),
    )
