"""Where trained weights live: half weights under an optimizer that keeps no fp32 copy lose most small updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.events import Event, Named, Owns, Step, Trains, Weights, WeightsTake, covers, overlap
from precisionlint.findings import Severity
from precisionlint.recipes import UNKNOWN, Recipe

HALF = {"float16": "fp16", "bfloat16": "bf16"}
SMALL_RATE = 1e-3
SIGNIFICANT = {"fp16": 11, "bf16": 8}
MANY = 4


@dataclass(frozen=True, slots=True)
class Took:
    """Weights in half, and how they came to be; ``by``: the framework that cast them, if one did."""

    weights: Weights
    dtype: str
    by: str
    how: str = field(compare=False)
    seen: Seen = field(compare=False)


@dataclass(frozen=True, slots=True)
class Owned:
    """Weights under a plain optimizer."""

    optimizer: Named
    weights: Weights
    cls: str
    lr: float | None
    seen: Seen = field(compare=False)


@dataclass(frozen=True, slots=True)
class Storage:
    took: frozenset[Took] = frozenset()
    frozen: Weights = frozenset()
    owned: frozenset[Owned] = frozenset()


def advance(storage: Storage, event: Event) -> Storage:
    if isinstance(event, WeightsTake):
        if event.trainable is not None:
            frozen = (
                storage.frozen | event.weights
                if event.trainable is False
                else frozenset(path for path in storage.frozen if not covers(event.weights, frozenset({path})))
            )
            return replace(storage, frozen=frozen)
        took = frozenset(t for t in storage.took if not covers(event.weights, t.weights))
        if event.dtype in HALF:
            assert event.dtype is not None
            seen = Seen(event.at, f"weights become {HALF[event.dtype]}: {event.how}", event.when)
            took |= {Took(event.weights, event.dtype, event.by, event.how, seen)}
        elif any(overlap(event.weights, t.weights) for t in took):
            took = frozenset(t for t in took if not overlap(event.weights, t.weights))
        return replace(storage, took=took)
    if isinstance(event, Owns) and event.weights is not None and event.masters is False:
        seen = Seen(event.at, f"{event.cls.rpartition('.')[2]} takes them", event.when)
        others = frozenset(o for o in storage.owned if o.optimizer != event.optimizer)
        return replace(storage, owned=others | {Owned(event.optimizer, event.weights, event.cls, event.lr, seen)})
    return storage


FAMILY = Family(Automaton("master-weights", Storage(), advance))


def roots(weights: Weights) -> tuple[Any, ...]:
    return tuple(sorted({("frozen", path[0]) for path in weights}, key=str))


def halves(storage: Storage, weights: Weights) -> list[Took]:
    """How these weights came to be in half, where all of them are and none is known to be frozen."""
    if overlap(storage.frozen, weights):
        return []
    found = [took for took in storage.took if covers(took.weights, weights)]
    return sorted(found, key=lambda took: (took.dtype, took.seen.text))


def severity_at(lr: float | None) -> Severity:
    """At large learning rates most updates survive."""
    return "warning" if lr is not None and lr >= SMALL_RATE else "error"


@FAMILY.rule("bf16-only-weights", Step, WeightsTake, Trains, Recipe)
def bf16_only_weights(storage: Storage, event: Step | WeightsTake | Trains | Recipe) -> Iterator[Any]:
    if isinstance(event, Recipe):
        yield from _half_weights_configured(event)
        return
    if isinstance(event, WeightsTake):
        if event.trainable is False:
            for fact in roots(event.weights):
                yield Evidence(fact)
        return
    if isinstance(event, Trains):
        if not event.precision:
            for took in halves(storage, event.weights):
                here = Seen(event.at, f"'{event.trainer.name}' trains them with {event.optimizer}", event.when)
                yield lost_updates(took, event.weights, event.optimizer, event.lr, (took.seen, here))
        return
    for own in storage.owned:
        if own.optimizer != event.optimizer:
            continue
        for took in halves(storage, own.weights):
            if not took.by:
                seen = (took.seen, own.seen, Seen(event.at, "stepped here", event.when))
                yield lost_updates(took, own.weights, own.cls.rpartition(".")[2], own.lr, seen)


def lost_updates(took: Took, weights: Weights, optimizer: str, lr: float | None, trace: tuple[Seen, ...]) -> Hit:
    name = HALF[took.dtype]
    rate = f" at lr {lr:g}" if lr is not None else ""
    return Hit(
        "bf16-only-weights",
        took.seen.at,
        f"{optimizer} steps {name} weights with no fp32 copy{rate}: an update smaller than half a {name} step rounds to nothing, "
        "and most do at fine-tuning rates; keep the weights in fp32 and use autocast",
        trace,
        unless=roots(weights),
        severity=severity_at(lr),
    )


def _half_weights_configured(recipe: Recipe) -> Iterator[Hit]:
    """A configuration that leaves trained weights without an fp32 copy."""
    weights, rate = recipe.weights, recipe.rate.number if recipe.rate is not None else None
    if weights is None or recipe.framework == "Lightning":
        return
    by = (
        f" steps {weights.half} weights"
        if recipe.optimizer is not None
        else f"{recipe.framework} steps {weights.half} weights"
    )
    if recipe.optimizer is not None:
        by = str(recipe.optimizer.value).rpartition(".")[2] + by
    at = f" at lr {rate:g}" if rate is not None else ""
    stations = ((recipe.optimizer, "stepped by"), (recipe.rate, "learning rate"))
    yield Hit(
        "bf16-only-weights",
        weights.at,
        f"{by} with no fp32 copy{at}: an update smaller than half a {weights.half} step rounds to nothing, and most do at fine-tuning "
        f"rates; {recipe.remedy}",
        tuple(
            Seen(each.at, f"{what}: {each.value}")
            for each, what in stations
            if each is not None and each.value is not UNKNOWN
        ),
        severity=severity_at(rate),
        confidence="certain" if recipe.sure else "likely",
    )


@FAMILY.rule("half-gradient-accumulation", Recipe)
def half_gradient_accumulation(storage: Storage, recipe: Recipe) -> Iterator[Hit]:
    """Micro-batches summed in half, from four an update on: the sum of fewer is rounded at most twice. A number that is set elsewhere is
    likely to be one of them."""
    dtype, steps = recipe.accumulates, recipe.steps
    if dtype is None or not dtype.half or steps is None or recipe.framework == "Megatron":
        return
    number = steps.number
    if (number is None and steps.value is not UNKNOWN) or (number is not None and number < MANY):
        return
    many = (
        f"the gradients of {number:g} micro-batches" if number is not None else "the gradients of several micro-batches"
    )
    yield Hit(
        "half-gradient-accumulation",
        dtype.at,
        f"{many} are summed in {dtype.half}: each addition rounds the sum to {SIGNIFICANT[dtype.half]} bits; keep the sum in fp32",
        (
            Seen(
                steps.at,
                f"{number:g} micro-batches an update"
                if number is not None
                else "micro-batches an update: set elsewhere",
            ),
        ),
        confidence="certain" if number is not None else "likely",
    )
