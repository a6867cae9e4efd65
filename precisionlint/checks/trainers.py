"""Trainers that own scaler and clip: what goes around them meets gradients in a state that they alone know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.events import Backward, Engine, Event, Grads, Known, Step, ZeroGrad
from precisionlint.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Scaled:
    """Gradients that stand scaled by an engine's own scaler, since that backward."""

    engine: Engine
    seen: Seen = field(compare=False)


@dataclass(frozen=True, slots=True)
class Gradients:
    """What the engines of a path have done to its gradients. ``plain``: a backward that no engine scaled, since the last step."""

    scaled: frozenset[Scaled] = frozenset()
    is_plain: bool = False
    plain: Seen | None = field(compare=False, default=None)


def advance(state: Gradients, event: Event) -> Gradients:
    match event:
        case Backward(engine=Engine() as engine):
            seen = Seen(event.at, f"backward: '{engine.name}' scales the loss, and the gradients with it", event.when)
            others = frozenset(s for s in state.scaled if s.engine != engine)
            return replace(state, scaled=others | {Scaled(engine, seen)})
        case Backward(scale=Known(value=None)):
            return replace(
                state, is_plain=True, plain=Seen(event.at, "backward of a loss that nothing scaled", event.when)
            )
        case Grads(how="unscale") | Grads(how="mul", factor="1/scale"):
            return replace(state, scaled=frozenset())
        case Step() | ZeroGrad():
            return Gradients()
    return state


FAMILY = Family(Automaton("trainers", Gradients(), advance, lambda _: Gradients(), lambda state: len(state.scaled)))


@FAMILY.rule("accelerate-raw-clip", Grads)
def accelerate_raw_clip(state: Gradients, event: Grads) -> Iterator[Any]:
    if event.how != "clip" or event.factor == "scale":
        return
    for scaled in state.scaled:
        engine = scaled.engine
        if engine.framework != "accelerate":
            continue
        yield Hit(
            "accelerate-raw-clip",
            event.at,
            f"{event.api} sees gradients still scaled by the scaler of '{engine.name}': its threshold meets a norm 65536 times too large (the "
            f"initial scale), so it always bites; {engine.name}.clip_grad_norm_ and clip_grad_value_ unscale first",
            (scaled.seen, Seen(event.at, f"clipped here past '{engine.name}'", event.when)),
            confidence="certain" if engine.sure else "likely",
        )


@FAMILY.rule("accelerate-raw-backward", Step)
def accelerate_raw_backward(state: Gradients, event: Step) -> Iterator[Any]:
    engine = event.engine
    if engine is None or engine.framework != "accelerate" or not state.is_plain or state.plain is None:
        return
    yield Hit(
        "accelerate-raw-backward",
        state.plain.at,
        f"'{event.optimizer.name}' was prepared by '{engine.name}' and steps through its scaler, but this loss was never scaled: small "
        f"gradients are not protected and the step divides all of them by the scale (or fails, where nothing was ever scaled); call "
        f"{engine.name}.backward(loss)",
        (
            state.plain,
            Seen(event.at, f"'{event.optimizer.name}' steps through the scaler of '{engine.name}'", event.when),
        ),
        confidence="certain" if engine.sure else "likely",
    )


@FAMILY.rule("deepspeed-precision-config", Recipe)
def deepspeed_precision_config(state: Gradients, recipe: Recipe) -> Iterator[Hit]:
    if recipe.framework != "DeepSpeed":
        return
    rule = "deepspeed-precision-config"
    fp16, bf16, scale = recipe.fp16, recipe.bf16, recipe.scale
    if recipe.stray:
        first, *others = recipe.stray
        yield Hit(
            rule,
            first.at,
            f"'{first.name}': bf16 has no loss scale. DeepSpeed before 0.17 ignores the setting, later ones refuse it ('Extra inputs are not "
            "permitted'); loss-scale settings belong in the fp16 block",
            tuple(Seen(each.at, f"as does '{each.name}'") for each in others),
        )
    if fp16 is not None and bf16 is not None and fp16.value is True and bf16.value is True:
        yield Hit(
            rule,
            max(fp16.at, bf16.at),
            "fp16 and bf16 are both switched on: DeepSpeed stops with 'bfloat16 and fp16 modes cannot be simultaneously enabled'",
            (Seen(min(fp16.at, bf16.at), "the other one"),),
        )
        return
    number = scale.number if scale is not None else None
    if scale is not None and number is not None and 0 < number <= 1 and fp16 is not None and fp16.value is True:
        yield Hit(
            rule,
            scale.at,
            f"a static loss scale of {number:g} scales nothing: fp16 gradients below 3e-8 become 0; 0 lets DeepSpeed find the scale",
            (Seen(fp16.at, "fp16 is on"),),
        )
