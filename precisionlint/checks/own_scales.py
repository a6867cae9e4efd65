"""Loss scales that a program keeps by itself, without a scaler: a number that the loss is multiplied by and the gradients are divided by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Evidence, Hit
from precisionlint.checks.scale_ledger import seen
from precisionlint.checks.scale_records import Ledger, Pending
from precisionlint.events import Grads, Named, Step, overlap

A_SCALER = "a scaler"
"""The fact that a program makes or uses a scaler."""
LEAST = 8.0
"""By less a loss is weighed, not scaled."""


def by_hand(scaler: Named) -> bool:
    """A loss scale kept by hand: its id is the key of a number, not an object."""
    return isinstance(scaler.id, tuple)


def number_of(scale: Named) -> float | None:
    """The number that a scale is, where it has no name of its own."""
    return float(scale.id[1]) if isinstance(scale.id, tuple) and scale.id[0] == "number" else None


def is_scale(times: Named | None) -> bool:
    """Whether a number is one that a loss is scaled by: a power of two, to lose no bits."""
    number = number_of(times) if times is not None else None
    return number is not None and number >= LEAST and number.hex().startswith("0x1.0000000000000p")


def divided(event: Grads) -> Iterator[Evidence]:
    """The fact that a program divides gradients by a number, or by a loss scale that it keeps."""
    if event.divided is not None:
        yield Evidence(taken_out(event.divided))
    if event.how == "mul" and event.factor == "1/scale" and event.scaler is not None:
        yield Evidence(taken_out(event.scaler))


def taken_out(scale: Named) -> tuple[str, Any]:
    """The fact that gradients are divided by this scale."""
    return ("divided by", scale.id)


def hand_needs(scaler: Named) -> tuple[Any, ...]:
    """A loss scale kept by hand is one only if the program also divides by it."""
    return (taken_out(scaler),) if by_hand(scaler) else ()


def clipped_before_division(ledger: Ledger, event: Grads, consequence: str) -> Iterator[Hit]:
    """A clip of the gradients of a loss that was multiplied by a number, where the program divides gradients by that."""
    times = ledger.times
    if times is None or (number_of(times.scaler) or 0) < LEAST:
        return
    reached = overlap(times.weights, event.weights)
    if reached is False:
        return
    yield Hit(
        "clip-before-unscale",
        event.at,
        f"{event.api} sees gradients of a loss that was multiplied by {times.scaler.name}, and that are divided by it only afterwards: its "
        f"threshold meets a norm {times.scaler.name} times too large, {consequence}",
        (times.backward, seen(event, "clipped here, not divided since")),
        confidence="possible" if times.joined and not reached else "certain",
        needs=(taken_out(times.scaler),),
    )


def never_divided(event: Step, scaled: Pending, adapts: bool | None) -> Iterator[Hit]:
    """A step on gradients of a loss that was multiplied by a number because fp16 autocast computed it, if nothing in the program divides by
    it. ``adapts``: whether the optimizer divides a constant out again, None where that is not known."""
    if not scaled.fixed:
        return
    name, scale = event.optimizer.name, scaled.scaler.name
    consequence = {
        True: "Adam divides the constant out, and no step with inf or NaN is skipped",
        False: f"the update is {scale} times too large, and no step with inf or NaN is skipped",
        None: f"SGD's update is {scale} times too large, and no step with inf or NaN is skipped",
    }[adapts]
    yield Hit(
        "step-bypasses-scaler",
        event.at,
        f"'{name}' steps on gradients of a loss that was multiplied by {scale}, and nothing divides them by it: {consequence}; a GradScaler "
        "does both",
        (scaled.backward, seen(event, f"'{name}' steps")),
        confidence="possible" if adapts else "likely",
        unless=(A_SCALER, taken_out(scaled.scaler)),
    )
