"""Trainers: what their settings say of autocast, scaler and weights, held against the weights and calls that meet them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from msgspec.structs import replace

from precisionlint.checks import engine_scales, master_weights
from precisionlint.checks.base import Automaton, Family, Hit, Seen, frozen
from precisionlint.checks.engine_scales import Scaled
from precisionlint.checks.master_weights import HALF, Storage, halves, severity_at
from precisionlint.events import (
    Adopted,
    Backward,
    Copied,
    Engine,
    Event,
    Grads,
    Known,
    Owns,
    Step,
    Trains,
    WeightsTake,
    ZeroGrad,
)
from precisionlint.recipes import Recipe
from precisionlint.records import Record

NOTHING_STORED = Storage()


class Trained(Record, frozen=True, eq=False):
    """What the engines of a path have done to its gradients, and where its weights live. ``plain``: a backward that no engine scaled,
    since the last step."""

    aside: ClassVar[tuple[str, ...]] = ("plain",)

    scaled: frozenset[Scaled] = frozenset()
    is_plain: bool = False
    plain: Seen | None = None
    storage: Storage = NOTHING_STORED


HEARS = (Backward, Grads, Step, ZeroGrad, WeightsTake, Owns, Copied, Adopted)


def advance(state: Trained, event: Event) -> Trained:
    match event:
        case Backward(scale=Known(value=None)):
            seen = Seen(event.at, "backward of a loss that nothing scaled", event.when)
            return replace(state, is_plain=True, plain=seen)
        case Backward(engine=Engine()) | Grads():
            scaled = engine_scales.after(state.scaled, event)
            return state if scaled is state.scaled else replace(state, scaled=scaled)
        case Step() | ZeroGrad():
            return Trained(storage=state.storage)
        case WeightsTake() | Owns() | Copied() | Adopted():
            return replace(state, storage=master_weights.advance(state.storage, event))
    return state


def settle(state: Trained) -> Trained:
    return Trained(storage=state.storage)


FAMILY = Family(Automaton("trainers", Trained(), advance, settle, lambda state: len(state.scaled), HEARS))


@FAMILY.rule("accelerate-raw-clip", Grads)
def accelerate_raw_clip(state: Trained, event: Grads) -> Iterator[Any]:
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
            f"scale's default), so it always bites; {engine.name}.clip_grad_norm_ and clip_grad_value_ unscale first",
            (scaled.seen, Seen(event.at, f"clipped here past '{engine.name}'", event.when)),
            confidence="certain" if engine.sure else "likely",
        )


@FAMILY.rule("accelerate-raw-backward", Step)
def accelerate_raw_backward(state: Trained, event: Step) -> Iterator[Any]:
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


@FAMILY.rule("hf-half-load", Trains)
def hf_half_load(state: Trained, event: Trains) -> Iterator[Any]:
    """The trainer's own autocast, over weights that were loaded in half."""
    if not event.precision:
        return
    for took in halves(state.storage, event.weights):
        name = HALF[took.dtype]
        if event.precision == "?":
            yield Hit(
                "hf-half-load",
                took.seen.at,
                f"'{event.trainer.name}' trains {name} weights, and {event.elsewhere}: unless that names an engine that keeps fp32 copies "
                f"(deepspeed, fsdp), its optimizer adds to the {name} weights and loses small updates; load them in fp32",
                (took.seen, Seen(event.at, "trained here", event.when)),
                confidence="possible",
            )
            continue
        rate = f" at lr {event.lr:g}" if event.lr is not None else ""
        if event.precision == "fp16" and took.dtype == "float16":
            consequence = "its scaler raises 'Attempting to unscale FP16 gradients' at the first step"
        else:
            consequence = f"{event.optimizer}{rate} has no fp32 copy to add small updates to, and loses most of them"
        yield Hit(
            "hf-half-load",
            took.seen.at,
            f"'{event.trainer.name}' trains {name} weights with {event.precision}=True, which is autocast over fp32 weights: {consequence}; "
            "load them in fp32, or freeze them and train adapters",
            (took.seen, Seen(event.told, f"{event.precision}=True"), Seen(event.at, "trained here", event.when)),
            unless=frozen(event.weights),
            severity=severity_at(event.lr),
        )


@FAMILY.rule("lightning-true-precision", Step, Recipe)
def lightning_true_precision(state: Trained, event: Step | Recipe) -> Iterator[Any]:
    if isinstance(event, Recipe):
        yield from true_precision_configured(event)
        return
    for own in state.storage.owned:
        if own.optimizer != event.optimizer:
            continue
        for took in halves(state.storage, own.weights):
            if took.by != "lightning":
                continue
            name, optimizer = HALF[took.dtype], own.cls.rpartition(".")[2]
            rate = f" at lr {own.lr:g}" if own.lr is not None else ""
            yield Hit(
                "lightning-true-precision",
                took.seen.at,
                f"{took.how} casts the weights to {name}, and {optimizer}{rate} keeps no fp32 copy: an update smaller than half a {name} "
                f"step rounds to nothing; {took.how.replace('true', 'mixed')} keeps the weights in fp32",
                (took.seen, own.seen, Seen(event.at, "trained here", event.when)),
                unless=frozen(own.weights),
            )


def true_precision_configured(recipe: Recipe) -> Iterator[Hit]:
    """The same in a configuration of Lightning's."""
    weights, optimizer = recipe.weights, recipe.optimizer
    if recipe.framework != "Lightning" or weights is None or optimizer is None:
        return
    name, lr = weights.half, recipe.rate.number if recipe.rate is not None else None
    rate = f" at lr {lr:g}" if lr is not None else ""
    yield Hit(
        "lightning-true-precision",
        weights.at,
        f"this precision casts the weights to {name}, and {str(optimizer.value).rpartition('.')[2]}{rate} keeps no fp32 copy: an update "
        f"smaller than half a {name} step rounds to nothing; {recipe.remedy}",
        (Seen(optimizer.at, f"stepped by {optimizer.value}"),),
        confidence="possible" if recipe.left else "certain",
    )


@FAMILY.rule("deepspeed-precision-config", Recipe)
def deepspeed_precision_config(state: Trained, recipe: Recipe) -> Iterator[Hit]:
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
            f"'{scale.name}': a loss scale of {number:g} scales nothing up: fp16 gradients below 3e-8 become 0; loss_scale 0 with the default "
            "initial_scale_power of 16 finds the scale",
            (Seen(fp16.at, "fp16 is on"),),
        )


@FAMILY.rule("megatron-precision-args", Recipe)
def megatron_precision_args(state: Trained, recipe: Recipe) -> Iterator[Hit]:
    if recipe.framework != "Megatron":
        return
    rule = "megatron-precision-args"
    scale, fp16 = recipe.scale, recipe.fp16
    number = scale.number if scale is not None else None
    if scale is not None and number is not None and 0 < number <= 1 and fp16 is not None:
        yield Hit(
            rule,
            scale.at,
            f"a static loss scale of {number:g} scales nothing: fp16 gradients below 3e-8 become 0; without '{scale.name}' Megatron finds the "
            "scale",
            (Seen(fp16.at, "fp16 is on"),),
        )
