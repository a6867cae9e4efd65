"""Running averages in half: of weights, and the moments of optimizers that a program writes itself."""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.checks.base import Family, Hit, Seen
from precisionlint.checks.master_weights import AUTOMATON, HALF, Storage
from precisionlint.events import Written, covers, overlap
from precisionlint.facts import Average, Moment

FAMILY = Family(AUTOMATON)

SLOW_DECAY = 0.99
"""From here on an average moves by so little a step that half precision loses it."""


@FAMILY.rule("half-ema", Written, Average)
def half_ema(storage: Storage, event: Written | Average) -> Iterator[Hit]:
    if isinstance(event, Average):
        own, it_is = "weights are averaged in their own dtype", "they are"
        if event.cast:
            own, it_is = f"the average of the weights is kept in '{event.cast}', which may be half", "it is"
        elif event.half:
            own, it_is = f"weights are cast by {event.half} where they are averaged", "the average is"
        yield Hit(
            "half-ema",
            event.at,
            f"{own}: where {it_is} half, what a step adds at decay 0.999 is below half the spacing and rounds "
            "away, so the average stands still; keep it in fp32",
            (),
            confidence="possible",
        )
        return
    if event.how != "average" or (event.decay is not None and event.decay < SLOW_DECAY):
        return
    ways: list[tuple[str | None, tuple[Seen, ...]]] = [(event.dtype, ())] if event.weights is None else []
    if event.weights is not None:
        if any(overlap(own.weights, event.weights) for own in storage.owned):
            return  # weights that an optimizer steps: no average of others
        ways = [(took.dtype, (took.seen,)) for took in storage.took if covers(took.weights, event.weights)]
    share = f" (1 - {event.decay:g})" if event.decay is not None else ""
    for dtype, where in ways:
        if dtype not in HALF:
            continue
        name = HALF[dtype]
        yield Hit(
            "half-ema",
            event.at,
            f"{event.api} averages in {name}: what each step adds{share} is below half a {name} step of what is there and rounds away, so the "
            "average stands still; keep it in fp32 and cast a copy for export",
            (*where, Seen(event.at, "averaged here", event.when)),
        )


@FAMILY.rule("half-optimizer-state", Moment)
def half_optimizer_state(storage: Storage, moment: Moment) -> Iterator[Hit]:
    name = moment.dtype or "half"
    done = "kept" if moment.made else "averaged"
    how = f"is kept in {name}" if moment.dtype else f"is {done} in the dtype of the parameters: where these are half"
    changes = (
        f"'{moment.name}', which gradients are averaged in, {how}, each step rounds it, and what a step changes, a hundredth of it at beta "
        "0.99, is about its spacing in bf16"
        if moment.first
        else f"the second moment '{moment.name}' {how}{',' if not moment.dtype else ':'} what a step changes, a thousandth of it at beta 0.999, "
        "is less than its spacing and rounds away"
    )
    yield Hit(
        "half-optimizer-state",
        moment.at,
        f"{changes}; keep it and compute with it in fp32",
        (),
        severity="warning",
        confidence="likely" if moment.dtype else "possible",
    )
