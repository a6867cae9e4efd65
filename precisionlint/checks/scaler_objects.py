"""The rules of loss scaling that ask of a scaler itself: whether there is one and ought to be, how it is made, updated, read and kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from precisionlint.checks.base import Change, Evidence, Family, Hit, Remedy, Seen, frozen
from precisionlint.checks.own_scales import A_SCALER, divided, is_scale, taken_out
from precisionlint.checks.scale_ledger import AUTOMATON, fp16_unscaled, in_half, seen
from precisionlint.checks.scale_records import Ledger, Made
from precisionlint.events import (
    Backward,
    Checkpoint,
    Grads,
    Known,
    LossScaled,
    Named,
    Region,
    ScaleRead,
    ScalerMade,
    SchedulerStep,
    Step,
    Update,
    ZeroGrad,
    covers,
    overlap,
)
from precisionlint.facts import HalfModel, UnsavedScaler
from precisionlint.findings import Confidence
from precisionlint.patterns import regex

FAMILY = Family(AUTOMATON)


@FAMILY.rule("scaler-with-bf16", LossScaled)
def scaler_with_bf16(ledger: Ledger, event: LossScaled) -> Iterator[Any]:
    if event.region is not None and event.region.setting:
        yield from whatever_dtype(ledger, event, event.region)
    if event.region is not None and event.region.dtype == "bfloat16" and event.region.device != "cpu":
        maker = next((m for m in ledger.made if m.scaler == event.scaler), None)
        made = maker.seen if maker is not None else None
        if made is None and event.region.when:
            return  # a scaler from outside may depend on the same choice
        yield Hit(
            "scaler-with-bf16",
            made.at if made is not None else event.at,
            f"'{event.scaler.name}' scales a loss computed under bf16 autocast: bf16 has fp32's range, so the scale protects nothing, while "
            "its inf checks synchronise each step and can skip steps in silence",
            tuple(
                s
                for s in (
                    made,
                    Seen(event.region.at, "bf16 autocast", event.region.when),
                    seen(event, f"scaled by '{event.scaler.name}'"),
                )
                if s
            ),
            fix=switched_off(maker, event) if maker is not None else None,
        )


OF_FP16 = regex(r"scal|16|half|dtype [!=]= ", re.I)
"""What a condition says that may hold for fp16 alone."""


def whatever_dtype(ledger: Ledger, event: LossScaled, region: Region) -> Iterator[Hit]:
    """A scaler that is made whichever half precision the program is given."""
    maker = next((m for m in ledger.made if m.scaler == event.scaler), None)
    if maker is not None and not any(OF_FP16.search(label) for label in (*maker.seen.when, *event.when)):
        yield Hit(
            "scaler-with-bf16",
            maker.seen.at,
            f"'{event.scaler.name}' scales whatever '{region.setting}' is: given bfloat16, the scale protects nothing, while its inf checks "
            "synchronise each step and can skip steps in silence; make it with enabled=dtype == torch.float16",
            (maker.seen, Seen(region.at, "autocast in a dtype that is given", region.when)),
            confidence="possible",
        )


def switched_off(maker: Made, event: LossScaled) -> Remedy | None:
    """The scaler made disabled, where nothing decides between this and another way to train."""
    assert event.region is not None
    if event.region.when or event.when or maker.seen.when or not maker.cls.startswith("torch."):
        return None
    position = 3 if maker.cls.startswith("torch.cuda.amp.") else 4
    return Remedy((Change("argument", maker.seen.at, f"enabled@{position}", "False"),))


@FAMILY.rule("fp16-without-scaler", Backward, Grads, ScalerMade, LossScaled, Step, ZeroGrad)
def fp16_without_scaler(
    ledger: Ledger, event: Backward | Grads | ScalerMade | LossScaled | Step | ZeroGrad
) -> Iterator[Any]:
    """Reported where a step follows; where none is seen, as possible (what only measures or compares gradients loses little by theirs), and
    not at all where the gradients are dropped."""
    match event:
        case Backward():
            if fp16_unscaled(event) and not is_scale(event.times):
                seen = {} if ledger.window else {"confidence": "possible"}
                hit = unprotected(event)
                yield replace(hit, unless=(*hit.unless, dropped(event)), **seen)
        case Grads():
            yield from divided(event)
        case Step():
            if event.via is not None:
                yield Evidence(A_SCALER)
            elif ledger.fp16 is not None and not is_scale(ledger.fp16.times):  # else see step-bypasses-scaler
                for other in (m for m in ledger.made if m.stepped and event.optimizer not in m.stepped):
                    yield beside_others(ledger.fp16, event, other)
                yield unprotected(ledger.fp16, min((m.seen for m in ledger.made), key=str, default=None))
        case ZeroGrad():
            if ledger.fp16 is not None:
                yield Evidence(dropped(ledger.fp16))
        case ScalerMade() if event.idle or event.enabled == Known(False):
            return
        case _:
            yield Evidence(A_SCALER)


def dropped(backward: Backward) -> tuple[str, Any]:
    """The fact that the gradients of this backward are set to zero before any optimizer steps."""
    return ("dropped", backward.at)


def beside_others(backward: Backward, step: Step, scaler: Made) -> Hit:
    """One optimizer steps by itself on gradients of fp16 that nothing scaled, where others step through a scaler: it was forgotten."""
    hit = unprotected(backward)
    others = " and ".join(sorted(f"'{each.name}'" for each in scaler.stepped))
    return replace(
        hit,
        message=f"backward of a loss computed under fp16 autocast that '{scaler.scaler.name}' did not scale, for '{step.optimizer.name}', while "
        f"{others} steps through it: gradients below 6e-8 become 0",
        trace=(scaler.seen, *hit.trace, seen(step, f"'{step.optimizer.name}' steps by itself")),
        unless=tuple(each for each in hit.unless if each != A_SCALER),
    )


def unprotected(backward: Backward, idle: Seen | None = None) -> Hit:
    """``idle``: where a scaler is made that nothing uses."""
    region = backward.loss_region
    assert region is not None  # see fp16_unscaled
    how = "autocast's default dtype on CUDA" if region.default_dtype else "float16"
    unused = "with no GradScaler that is on" if idle is None else "past the GradScaler, which nothing uses"
    return Hit(
        "fp16-without-scaler",
        backward.at,
        f"backward of a loss computed under fp16 autocast ({how}) {unused}: gradients below 6e-8 become 0",
        (
            *([idle] if idle is not None else []),
            Seen(region.at, "fp16 autocast", region.when),
            seen(backward, "backward, the loss not scaled"),
        ),
        confidence="certain" if region.device == "cuda" and idle is None else "likely",
        unless=(A_SCALER,) if backward.times is None else (A_SCALER, taken_out(backward.times)),
    )


@FAMILY.rule("scaler-with-half-weights", Grads, Step, HalfModel)
def scaler_with_half_weights(ledger: Ledger, event: Grads | Step | HalfModel) -> Iterator[Any]:
    if isinstance(event, HalfModel):
        if event.scaled:
            yield Hit(
                "scaler-with-half-weights",
                event.at,
                f"'{event.name}' can be fp16 from here on, {event.optimizer} takes its parameters, and {event.scaled}: where it is "
                "enabled, it raises 'Attempting to unscale FP16 gradients'; keep the weights in fp32 and let autocast cast them",
                (Seen(event.taken, f"{event.optimizer} takes its parameters"),),
                confidence="possible",
            )
        return
    engine = event.engine if isinstance(event, Step) else None
    scaler = event.via if isinstance(event, Step) else event.scaler
    if (scaler is None and engine is None) or event.optimizer is None:
        return
    if isinstance(event, Grads) and event.how != "unscale":
        return
    if any(p.optimizer == event.optimizer and p.phase == "unscaled" for p in ledger.progress):
        return  # said at its unscale_
    own = next((o for o in ledger.owns if o.optimizer == event.optimizer), None)
    if own is None or own.weights is None:
        return
    if own.fused and isinstance(event, Step):
        return  # a fused optimizer unscales in its own kernel, which takes fp16 gradients
    if engine is None and not any(
        m.scaler == scaler and m.cls.startswith(("torch.", "fairscale.")) for m in ledger.made
    ):
        return
    name = engine.name if engine is not None else scaler.name if scaler is not None else ""
    confidence: Confidence = "likely" if engine is not None and not engine.sure else "certain"
    for adapter in ledger.adapters:
        if overlap(adapter.weights, own.weights):
            yield Hit(
                "scaler-with-half-weights",
                adapter.cast.at,
                f"the adapters that are put into this model are fp16 like the model, and '{name}' unscales their gradients: GradScaler raises "
                "'Attempting to unscale FP16 gradients'. Cast what is trained to fp32 once the adapters are in",
                (adapter.cast, adapter.seen, own.seen, seen(event, "unscaled here")),
                confidence=confidence,
            )
    if not covers(in_half(ledger), own.weights):
        return
    yield Hit(
        "scaler-with-half-weights",
        event.at,
        f"'{name}' unscales gradients of fp16 weights: GradScaler raises 'Attempting to unscale FP16 gradients'. Keep the weights in "
        "fp32 and let autocast cast them",
        (own.seen, seen(event, "unscaled here")),
        confidence=confidence,
        unless=frozen(own.weights),
    )


@FAMILY.rule("scaler-rebuilt-in-loop", Step)
def scaler_rebuilt_in_loop(ledger: Ledger, event: Step) -> Iterator[Any]:
    for m in ledger.made:
        if m.scaler == event.via and event.optimizer in m.before:
            yield Hit(
                "scaler-rebuilt-in-loop",
                m.seen.at,
                "a new scaler is made each time round although the optimizer goes on: the scale starts again at 65536, and the first "
                "steps after it are skipped until it has settled",
                (
                    Seen(m.seen.at, "made again, after the one made here before has stepped", m.seen.when),
                    seen(event, f"steps '{event.optimizer.name}', which the one before has stepped as well"),
                ),
            )


UNSAVED = {
    "state": "the checkpoint holds an optimizer's state, and nothing in this file saves that of its GradScaler",
    "handed": "what writes the checkpoint is handed the optimizer and no GradScaler, and nothing in this file saves the scaler's state",
    "owner": "this scaler belongs to what steps through it, and no state_dict of that holds its state",
}
"""What an ``UnsavedScaler`` shows, in words."""


@FAMILY.rule("scaler-not-checkpointed", Checkpoint, UnsavedScaler)
def scaler_not_checkpointed(ledger: Ledger, event: Checkpoint | UnsavedScaler) -> Iterator[Any]:
    if isinstance(event, UnsavedScaler):
        yield Hit(
            "scaler-not-checkpointed",
            event.at,
            f"{UNSAVED[event.how]}: a resumed run starts its scale again at its first value and skips steps until it has settled",
            (),
            confidence="possible",
        )
        return
    if event.scalers:
        yield Evidence("a saved scaler")
    if not (event.write and (event.complete or event.handed) and event.optimizers and not event.scalers):
        return
    made = {m.scaler for m in ledger.made}
    used = sorted({p.scaler for p in ledger.progress} | made, key=lambda s: s.name)
    handed_in = not used  # the caller's scaler, which has stepped here
    used = used or sorted(ledger.used, key=lambda s: s.name)
    if used:
        optimizer, scaler = stepped_by(ledger, event.optimizers, used)
        yield Hit(
            "scaler-not-checkpointed",
            event.at,
            f"the checkpoint holds '{optimizer.name}' but not '{scaler.name}': a resumed run starts its scale again at 65536 and "
            "skips steps until it has settled",
            (
                *(m.seen for m in sorted(ledger.made, key=lambda m: (m.scaler != scaler, m.scaler.name))[:1]),
                seen(event, "saved without the scaler's state"),
            ),
            confidence="possible" if event.handed else "likely" if handed_in else "certain",
            unless=("a saved scaler",),
            once=None if event.handed else scaler,
        )


def stepped_by(ledger: Ledger, saved: tuple[Named, ...], used: list[Named]) -> tuple[Named, Named]:
    """A saved optimizer and the scaler that steps it, of several the first that go together; where nothing has stepped yet, any two."""
    together = {(m.scaler, optimizer) for m in ledger.made for optimizer in m.stepped}
    together |= {(each.scaler, each.optimizer) for each in ledger.progress}
    pairs = [(optimizer, scaler) for scaler in used for optimizer in saved if (scaler, optimizer) in together]
    return pairs[0] if pairs else (saved[0], used[0])


def updated_for_nothing(ledger: Ledger, event: Update) -> Iterator[Any]:
    """An update() after a scaled backward that nothing was unscaled or stepped with. A path that only passes by the step (a loop over no
    optimizers, none of the cases of a choice) shows none, but where the step hangs on the number of the micro-batch."""
    scaler = event.scaler
    here = (scaler.id, event.at)
    fresh = [p.seen for p in ledger.progress if p.scaler == scaler and not p.older]
    if fresh:
        yield Evidence(("stepped before update", *here))
        if all(any("%" in word for word in set(stepped.when) - set(event.when)) for stepped in fresh):
            yield Evidence(("updated each micro-batch", *here))
        return
    made = any(m.scaler == scaler and m.cls.startswith("torch.") for m in ledger.made)
    if event.by_hand or not made or ledger.clean or any(p.scaler == scaler for p in ledger.progress):
        return
    for pending in ledger.pending:
        if pending.scaler == scaler:
            hit = Hit(
                "scaler-updated-per-optimizer",
                event.at,
                f"'{scaler.name}' is updated where nothing was unscaled or stepped since it scaled the loss: update() raises AssertionError "
                "'No inf checks were recorded'. Update once after each step, and only there",
                (pending.backward, seen(event, f"'{scaler.name}' is updated here, with no step between")),
                severity="error",
            )
            later = ("steps where it was handed on", scaler.id)
            yield replace(hit, unless=(("stepped before update", *here), later))
            yield replace(hit, needs=(("updated each micro-batch", *here),), unless=(later,))


@FAMILY.rule("scaler-updated-per-optimizer", Step, Update)
def scaler_updated_per_optimizer(ledger: Ledger, event: Step | Update) -> Iterator[Any]:
    if isinstance(event, Update):
        yield from updated_for_nothing(ledger, event)
        return
    if event.later and event.via is not None:
        yield Evidence(("steps where it was handed on", event.via.id))
    for w in ledger.waiting:
        if w.scaler == event.via and event.optimizer not in w.stepped:
            whose = f"the next '{event.optimizer.name}'" if w.renewed else f"'{event.optimizer.name}'"
            yield Hit(
                "scaler-updated-per-optimizer",
                w.update.at,
                f"'{w.scaler.name}' is updated before {whose} has stepped on gradients with the old scale: update once, after all optimizers",
                (w.update, seen(event, f"{whose} steps afterwards, with no scaled backward between")),
                confidence="possible" if w.guess else "likely" if w.renewed else "certain",
            )


@FAMILY.rule("plain-scaler-with-fsdp1", Step)
def plain_scaler_with_fsdp1(ledger: Ledger, event: Step) -> Iterator[Any]:
    for m in ledger.made:
        if m.scaler == event.via and ledger.sharded and m.cls.endswith(".GradScaler") and m.cls.startswith("torch."):
            yield Hit(
                "plain-scaler-with-fsdp1",
                m.seen.at,
                f"'{m.scaler.name}' is a plain GradScaler over FSDP1 shards: each rank looks for inf in its own shard alone, so ranks disagree "
                "on skipping; use ShardedGradScaler",
                (m.seen, seen(event, "steps sharded weights")),
            )


@FAMILY.rule("scaler-settings", ScalerMade, Update)
def scaler_settings(ledger: Ledger, event: ScalerMade | Update) -> Iterator[Any]:
    if isinstance(event, Update):
        if event.by_hand:
            made_here = any(maker.scaler == event.scaler for maker in ledger.made)
            yield Evidence(("scale set by hand", event.scaler.id if made_here else None))
        return
    if event.enabled == Known(False):
        return
    settings = dict(event.settings)

    def number(name: str, default: float) -> float:
        value = settings.get(name, default)
        return float(value) if isinstance(value, (int, float)) else default

    init, growth = number("init_scale", 65536.0), number("growth_factor", 2.0)
    backoff, interval = number("backoff_factor", 0.5), number("growth_interval", 2000)
    fault = ""
    if growth <= 1.0:
        fault = f"growth_factor={growth:g} is not above 1: GradScaler raises"
    elif backoff >= 1.0:
        fault = f"backoff_factor={backoff:g} is not below 1: GradScaler raises, as the scale could never recover from an overflow"
    elif init <= 1.0 and interval >= 100:
        fault = f"init_scale={init:g} protects nothing until the scale has grown, once in {interval:g} steps"
    elif init >= 2.0**24:
        fault = (
            f"init_scale={init:g} overflows fp16 gradients at once: steps are skipped until it has halved often enough"
        )
    elif interval >= 1_000_000 and "init_scale" not in settings:
        fault = f"growth_interval={interval:g} is longer than a run: after an overflow the scale never comes back"
    if fault:
        # One that is handed to a function that sets it may be this one.
        by_hand = (("scale set by hand", event.scaler.id), ("scale set by hand", None))
        yield Hit("scaler-settings", event.at, fault, (seen(event, "made with these settings"),), unless=by_hand)


@FAMILY.rule("scheduler-steps-when-skipped", SchedulerStep, Step)
def scheduler_steps_when_skipped(ledger: Ledger, event: SchedulerStep | Step) -> Iterator[Any]:
    if isinstance(event, Step):
        if event.via is not None:
            yield Evidence(("steps in", event.loop))
        return
    stepped = sorted((p.seen for p in ledger.progress if p.phase == "stepped"), key=lambda s: s.text) or sorted(
        (w.update for w in ledger.waiting if not w.guess), key=lambda s: s.text
    )
    if stepped and not event.guarded:
        yield Hit(
            "scheduler-steps-when-skipped",
            event.at,
            f"'{event.scheduler.name}' advances also when the scaler skipped the step: compare get_scale() before and after update()",
            (stepped[0], seen(event, "advances whether or not the step was skipped")),
            needs=(("steps in", event.loop),),
        )


@FAMILY.rule("scale-read-on-host", ScaleRead, Step)
def scale_read_on_host(ledger: Ledger, event: ScaleRead | Step) -> Iterator[Any]:
    if isinstance(event, Step):
        yield Evidence(("trains in", event.loop))
        return
    if event.loop is not None and not event.compared and not any("%" in label for label in event.when):
        yield Hit(
            "scale-read-on-host",
            event.at,
            f"'{event.scaler.name}'.get_scale() waits for the GPU each time round: read it where you log, every N steps",
            (seen(event, "read each time round"),),
            needs=(("trains in", event.loop),),
        )
