"""Gradients that a framework's own scaler has scaled: accelerate's, fabric's, lightning's. It unscales them in its own clip, or inside the
optimizer's step; whoever touches them before meets the scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

from precisionlint.checks.base import Hit, Seen
from precisionlint.events import Backward, Engine, Event, Grads, Step, ZeroGrad
from precisionlint.findings import Confidence
from precisionlint.records import Record

UNSCALES = {
    "accelerate": "{0}.unscale_gradients() does it first",
    "fabric": "{0}.clip_gradients does it first",
    "lightning": "on_before_optimizer_step comes after that",
}
"""What a framework offers to whoever wants gradients without the scale."""


class Scaled(Record, frozen=True, eq=False):
    """Gradients that stand scaled by an engine's own scaler, since that backward."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    engine: Engine
    seen: Seen


def after(scaled: frozenset[Scaled], event: Event) -> frozenset[Scaled]:
    """What stands scaled after an event, the very same where none has changed."""
    match event:
        case Backward(engine=Engine() as engine):
            seen = Seen(event.at, f"backward: '{engine.name}' scales the loss, and the gradients with it", event.when)
            return frozenset(one for one in scaled if one.engine != engine) | {Scaled(engine, seen)}
        case Grads(how="unscale") | Grads(how="mul", factor="1/scale") | Step() | ZeroGrad() if scaled:
            return frozenset()
    return scaled


def clipped(scaled: frozenset[Scaled], event: Grads, consequence: str) -> Iterator[Hit]:
    """A clip by hand: torch's, or in lightning's manual optimisation its own. (accelerate's has a rule of its own.)"""
    if event.how == "clip" and event.factor != "scale":
        others = [one for one in scaled if one.engine.framework != "accelerate"]
        yield from told(others, event, "clip-before-unscale", ("sees", "clipped"), consequence)


def read(scaled: frozenset[Scaled], event: Grads) -> Iterator[Hit]:
    """A norm, or a log, of gradients as they are."""
    if event.how == "read" and event.factor != "scale":
        follows = "the number is as many times too large as the scale is at that step"
        yield from told(scaled, event, "scaled-gradients-read", ("reads", "read"), follows)


def told(scaled: Iterable[Scaled], event: Grads, rule: str, does: tuple[str, str], follows: str) -> Iterator[Hit]:
    """What meets scaled gradients; ``does``: what it does with them, and what is done to them."""
    for one in scaled:
        engine = one.engine
        yield Hit(
            rule,
            event.at,
            f"{event.api} {does[0]} gradients still scaled by the scaler of '{engine.name}', which unscales them inside the optimizer's step: "
            f"{follows}; {UNSCALES[engine.framework].format(engine.name)}",
            (one.seen, Seen(event.at, f"{does[1]} here, not unscaled since", event.when)),
            confidence=confidence(engine),
        )


def confidence(engine: Engine) -> Confidence:
    """Of lightning's hooks it is not known which trainer runs them, unless the program shows it."""
    if engine.sure:
        return "certain"
    return "possible" if engine.framework == "lightning" else "likely"
