"""Where trained weights live: half weights under an optimizer that keeps no fp32 copy lose most small updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Evidence, Family, Hit, Seen
from precisionlint.events import Event, Named, Owns, Step, Weights, WeightsTake, covers, overlap

HALF = {"float16": "fp16", "bfloat16": "bf16"}
SMALL_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Took:
    """Weights in half, and how they came to be."""

    weights: Weights
    dtype: str
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
            took |= {Took(event.weights, event.dtype, seen)}
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


@FAMILY.rule("bf16-only-weights", Step, WeightsTake)
def bf16_only_weights(storage: Storage, event: Step | WeightsTake) -> Iterator[Any]:
    if isinstance(event, WeightsTake):
        if event.trainable is False:
            for fact in roots(event.weights):
                yield Evidence(fact)
        return
    for own in storage.owned:
        if own.optimizer != event.optimizer or overlap(storage.frozen, own.weights):
            continue
        for took in sorted(storage.took, key=lambda t: (t.dtype, t.seen.text)):
            if not covers(took.weights, own.weights):
                continue
            name = HALF[took.dtype]
            optimizer = own.cls.rpartition(".")[2]
            rate = f" at lr {own.lr:g}" if own.lr is not None else ""
            yield Hit(
                "bf16-only-weights",
                took.seen.at,
                f"{optimizer} steps {name} weights with no fp32 copy{rate}: an update smaller than half a {name} step rounds to nothing, "
                "and most do at fine-tuning rates; keep the weights in fp32 and use autocast",
                (took.seen, own.seen, Seen(event.at, "stepped here", event.when)),
                unless=roots(own.weights),
                severity="warning" if own.lr is not None and own.lr >= SMALL_RATE else "error",
            )
