"""Autocast regions: what runs inside one that should not, and the half copies of weights that one keeps.

Autocast casts an fp32 weight that needs a gradient when it is first used, and keeps the copy until the outermost region is left.
Whatever changes the weight meanwhile is not seen by a forward inside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.events import (
    Autocast,
    Backward,
    Event,
    Named,
    Op,
    Owns,
    Region,
    Step,
    Weights,
    WeightsTake,
    Written,
    covers,
    overlap,
)

HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Changed:
    """Weights that were changed after the region had cast them: by an optimizer's step, or written over. ``how``: ``"step"`` or the name
    of what wrote them."""

    weights: Weights
    how: str
    seen: Seen = field(compare=False)


@dataclass(frozen=True, slots=True)
class Open:
    """The regions that are open on a path. ``used``: weights of which a copy is kept; ``own``: whose weights each optimizer steps; ``bare``:
    weights of which no copy is kept, being half themselves or frozen."""

    depth: int = 0
    outer: Region | None = None
    used: Weights = frozenset()
    changed: frozenset[Changed] = frozenset()
    own: frozenset[tuple[Named, Weights]] = frozenset()
    bare: Weights = frozenset()


def advance(state: Open, event: Event) -> Open:
    match event:
        case Autocast(enter=True):
            outer = state.outer if state.depth else event.region
            return replace(state, depth=state.depth + 1, outer=outer)
        case Autocast():
            if state.depth > 1:
                return replace(state, depth=state.depth - 1)
            return replace(state, depth=0, outer=None, used=frozenset(), changed=frozenset())
        case Op(family="module") if state.depth and event.dtypes[0] in HALF:
            path = event.inputs[0]
            assert isinstance(path, tuple)
            weights: Weights = frozenset({path})
            return state if covers(state.bare, weights) else replace(state, used=state.used | weights)
        case Step() | Written() if state.used:
            changed = changed_by(state, event)
            return state if changed is None else replace(state, changed=state.changed | {changed})
        case Owns() if event.weights is not None:
            others = frozenset((o, w) for o, w in state.own if o != event.optimizer)
            return replace(state, own=others | {(event.optimizer, event.weights)})
        case WeightsTake() if event.trainable is False or event.dtype in HALF:
            return replace(state, bare=state.bare | event.weights)
        case WeightsTake():
            kept = frozenset(path for path in state.bare if not covers(event.weights, frozenset({path})))
            return replace(state, bare=kept)
    return state


def changed_by(state: Open, event: Step | Written) -> Changed | None:
    """The weights that an event changes although the region keeps copies of them."""
    if isinstance(event, Written):
        weights, how, text = event.weights, event.api, f"{event.api} changes weights that the region has cast"
    else:
        weights = next((w for o, w in state.own if o == event.optimizer), None)
        how, text = "step", f"'{event.optimizer.name}' changes weights that the region has cast"
    if weights is None or not overlap(state.used, weights):
        return None
    return Changed(weights, how, Seen(event.at, text, event.when))


def settle(state: Open) -> Open:
    return Open(own=state.own, bare=state.bare)


FAMILY = Family(Automaton("autocast", Open(), advance, settle, lambda state: len(state.changed)))


@FAMILY.rule("backward-under-autocast", Backward)
def backward_under_autocast(state: Open, event: Backward) -> Iterator[Any]:
    region = event.open_region
    if region is None or region.dtype not in HALF:
        return
    yield Hit(
        "backward-under-autocast",
        event.at,
        "backward runs inside the autocast region: its ops already run in their forward's dtypes, and what it runs anew (recomputation, "
        "hooks, double backward) is cast once more; leave the region first",
        (Seen(region.at, f"{region.dtype} autocast is entered"), Seen(event.at, "backward, still inside", event.when)),
        unless=(("spans steps", region.at),),
    )


def stale(state: Open, event: Op) -> list[Changed]:
    """What has changed the weights that a forward in the region uses a copy of."""
    path = event.inputs[0] if event.family == "module" else None
    if not isinstance(path, tuple) or event.dtypes[0] not in HALF or covers(state.bare, frozenset({path})):
        return []
    mine: Weights = frozenset({path})
    found = [c for c in state.changed if overlap(c.weights, mine) and overlap(state.used, mine)]
    return sorted(found, key=lambda c: c.seen.text)


@FAMILY.rule("autocast-around-training-loop", Op)
def autocast_around_training_loop(state: Open, event: Op) -> Iterator[Any]:
    steps = [changed for changed in stale(state, event) if changed.how == "step"]
    region = state.outer
    if not steps or (region is not None and not region.cache):
        return
    if region is not None:
        yield Evidence(("spans steps", region.at))
    entered = (
        (Seen(region.at, f"{region.dtype or 'half'} autocast is entered", region.when),) if region is not None else ()
    )
    for step in steps:
        yield Hit(
            "autocast-around-training-loop",
            event.at,
            "this forward uses half copies of weights that an optimizer has changed since: the autocast region spans the step, and its cache "
            "hands out the old weights, so the model stops learning; enter the region anew for each forward",
            (*entered, step.seen, Seen(event.at, "the old copies are used again", event.when)),
            unless=tuple(sorted({("frozen", path[0]) for path in step.weights}, key=str)),
        )


@FAMILY.rule("weights-changed-under-autocast", Op)
def weights_changed_under_autocast(state: Open, event: Op) -> Iterator[Any]:
    region = state.outer
    if region is not None and not region.cache:
        return
    for changed in stale(state, event):
        if changed.how != "step":
            yield Hit(
                "weights-changed-under-autocast",
                changed.seen.at,
                f"{changed.how} changes weights inside the autocast region that has cast them: until the region is left, its cache hands "
                "out the half copies of the old ones; change them outside the region, or enter it anew",
                (changed.seen, Seen(event.at, "the old copies are used again", event.when)),
                unless=tuple(sorted({("frozen", path[0]) for path in changed.weights}, key=str)),
            )
