"""The typestate of loss scaling: gradients are scaled, unscaled, stepped with; a scaler is updated.

The ledger keeps, for every scaler, whose gradients stand scaled and how far each optimizer has come since the last update.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from precisionlint.checks import engine_scales
from precisionlint.checks.base import Automaton, Seen
from precisionlint.checks.scale_records import (
    Adapter,
    Clean,
    Half,
    Ledger,
    Left,
    Made,
    Own,
    Pending,
    Progress,
    Touched,
    Waiting,
)
from precisionlint.events import (
    AdapterAdded,
    Adopted,
    Backward,
    Event,
    Grads,
    Iteration,
    Known,
    LossScaled,
    Lost,
    Named,
    Opened,
    Owns,
    Renewed,
    ScaleRead,
    ScalerMade,
    Sharded,
    Step,
    Update,
    Weights,
    WeightsTake,
    ZeroGrad,
    covers,
    moved,
    overlap,
)


def seen(event: Event, text: str) -> Seen:
    return Seen(event.at, text, event.when)


def advance(ledger: Ledger, event: Event) -> Ledger:
    """The ledger after an event."""
    handler = ADVANCE.get(type(event))
    if ledger.touched and type(event) in MAKES_KNOWN:
        ledger = replace(ledger, touched=frozenset())
    engines = engine_scales.after(ledger.engines, event)
    if engines is not ledger.engines:
        ledger = replace(ledger, engines=engines)
    return ledger if handler is None else handler(ledger, event)


def after_backward(ledger: Ledger, event: Backward) -> Ledger:
    if any(w.guess for w in ledger.waiting):
        ledger = replace(ledger, waiting=frozenset(w for w in ledger.waiting if not w.guess))
    if ledger.left:  # what they step with next may be of this loss
        still = (one for one in ledger.left if overlap(event.weights, one.own.weights) is False)
        ledger = replace(ledger, left=frozenset(still))
    if event.scale is None:
        return replace(ledger, unknown=True)
    scaler = event.scale.value
    if scaler is None:
        here = seen(event, "backward of a loss that nothing scaled")
        times = after_times(ledger, event)
        fp16 = event if fp16_unscaled(event) else ledger.fp16
        return replace(ledger, plain=here, is_plain=True, fp16=fp16, times=times)
    here = seen(event, f"backward: gradients carry the scale of '{scaler.name}'")
    scaled = None
    if event.scaled_at is not None:
        at, when = event.scaled_at
        scaled = Seen(at, f"the loss is scaled by '{scaler.name}'", when)
    clean = frozenset(
        c
        if c.consumed or overlap(c.weights, event.weights) is False
        else replace(c, mixed=True, mixed_by=c.mixed_by or here)
        for c in ledger.clean
    )
    again = {p for p in ledger.pending if p.scaler == scaler and event.weights in (None, p.weights)}
    fixed = event.times == scaler and event.only and under_fp16(event)
    pending = ledger.pending - again | {Pending(scaler, here, scaled, event.weights, fixed)}
    waiting = frozenset(w for w in ledger.waiting if w.scaler != scaler)
    progress = frozenset(replace(p, older=True) if p.scaler == scaler else p for p in ledger.progress)
    return replace(ledger, pending=pending, clean=clean, waiting=waiting, progress=progress)


def after_times(ledger: Ledger, event: Backward) -> Pending | None:
    """The gradients of a loss that was multiplied by a number, after a backward that no scaler has scaled."""
    times = ledger.times
    if event.times is None:
        return None if times is None else replace(times, joined=True)
    alone = not ledger.is_plain if times is None else times.scaler == event.times and not times.joined
    here = seen(event, f"backward of a loss times {event.times.name}")
    return Pending(event.times, here, None, event.weights, event.only and under_fp16(event), not alone)


def fp16_unscaled(event: Backward) -> bool:
    """Whether a loss that was computed under fp16 autocast of a GPU runs backward as it is."""
    return event.scale == Known(None) and under_fp16(event)


def under_fp16(event: Backward) -> bool:
    """Whether a loss was computed under fp16 autocast of a GPU."""
    region = event.loss_region
    return region is not None and not region.opener and region.dtype == "float16" and region.device != "cpu"


def after_grads(ledger: Ledger, event: Grads) -> Ledger:
    if ledger.times is not None and event.divided == ledger.times.scaler:
        ledger = replace(ledger, times=None)
    if event.how in ("clip", "read") and event.factor != "scale" and nothing_known(ledger):
        here = seen(event, f"{event.api} meets them here, and nothing unscales them before the step")
        return replace(ledger, touched=ledger.touched | {Touched(event.weights, event.how, event.api, here)})
    if ledger.touched and event.how in ("unscale", "mul"):
        ledger = replace(ledger, touched=frozenset())
    if event.how == "clip":
        left = ledger.left.union(unsure(ledger, event))
        return replace(ledger, left=left) if len(left) > len(ledger.left) else ledger
    if event.how == "unscale" and event.scaler is not None and event.optimizer is not None:
        here = seen(event, f"'{event.scaler.name}' unscales the gradients of '{event.optimizer.name}'")
        others = frozenset(p for p in ledger.progress if (p.scaler, p.optimizer) != (event.scaler, event.optimizer))
        before = next((c for c in ledger.clean if c.optimizer == event.optimizer), None)
        weights = event.weights if event.weights is not None else owned(ledger, event.optimizer)
        now = Clean(event.optimizer, weights, False, False, here)
        if before is not None and before.mixed and len(others) == len(ledger.progress):
            # Unscaling a sum of scaled and unscaled gradients leaves it mixed (a second unscale_ before update() raises instead).
            now = replace(now, mixed=True, mixed_by=before.mixed_by, seen=before.seen)
        return replace(
            ledger,
            progress=others | {Progress(event.scaler, event.optimizer, "unscaled", False, here)},
            clean=ledger.clean - {c for c in ledger.clean if c.optimizer == event.optimizer} | {now},
        )
    if event.how == "mul" and event.factor == "1/scale":
        if event.part and event.scaler is not None:
            return replace(
                ledger,
                partial=ledger.partial | {(event.scaler, seen(event, "part of the gradients are divided by it"))},
            )
        here = seen(event, "gradients are divided by the scale")
        ledger = replace(ledger, partial=frozenset())
        if event.weights is None:
            pending = frozenset(p for p in ledger.pending if event.scaler is not None and p.scaler != event.scaler)
            return replace(ledger, pending=pending)
        return replace(ledger, clean=ledger.clean | {Clean(None, event.weights, False, False, here)})
    return ledger


def nothing_known(ledger: Ledger) -> bool:
    """Whether a function was entered with gradients that others have made, and has done nothing to them."""
    under_way = ledger.pending or ledger.clean or ledger.progress or ledger.waiting or ledger.partial
    return not (under_way or ledger.is_plain or ledger.unknown or ledger.window)


def still_scaled(ledger: Ledger, weights: Weights | None) -> Pending | None:
    """The scaled backward whose gradients these still are, as far as can be known."""
    if any(overlap(c.weights, weights) is not False for c in ledger.clean):
        return None
    return pending_over(ledger, weights)


def pending_over(ledger: Ledger, weights: Weights | None) -> Pending | None:
    """The scaled backward that may have reached these weights, the first by name."""
    reached = (p for p in ledger.pending if overlap(p.weights, weights) is not False)
    return min(reached, key=lambda p: p.scaler.name, default=None)


def unscaled_others(ledger: Ledger, scaler: Named, own: Own | None) -> list[Progress]:
    """The optimizers whose gradients a scaler has unscaled since its last update, another one's among them."""
    found = [p for p in ledger.progress if p.scaler == scaler and p.phase == "unscaled" and not p.dropped]
    return sorted(
        (p for p in found if own is not None and p.optimizer != own.optimizer), key=lambda p: p.optimizer.name
    )


def left_scaled(ledger: Ledger, event: Grads) -> Iterator[Left]:
    """The optimizers of which a clip meets gradients that are scaled still, where those of another have been unscaled."""
    if event.how != "clip" or event.factor == "scale" or still_scaled(ledger, event.weights) is not None:
        return
    for own in sorted(ledger.owns, key=lambda one: one.optimizer.name):
        mine = overlap(own.weights, event.weights) is True
        if mine and all(overlap(c.weights, own.weights) is False for c in ledger.clean):
            pending = pending_over(ledger, own.weights)
            if pending is not None:
                yield Left(own, pending, event, next(iter(unscaled_others(ledger, pending.scaler, own)), None))


def optimizer_of(ledger: Ledger, weights: Weights | None) -> Own | None:
    """The optimizer that these gradients belong to: the one over these weights, or the only one there is."""
    if weights is not None:
        found = [o for o in ledger.owns if overlap(o.weights, weights)]
        if len(found) == 1:
            return found[0]
    return next(iter(ledger.owns)) if len(ledger.owns) == 1 else None


def unsure(ledger: Ledger, event: Grads) -> Iterator[Left]:
    """The optimizers of which a clip may meet scaled gradients: that they have any, or any of the loss that was scaled, a step through the
    scaler shows."""
    yield from (one for one in left_scaled(ledger, event) if not one.reached)
    pending, own = still_scaled(ledger, event.weights), optimizer_of(ledger, event.weights)
    if pending is not None and own is not None and perhaps_plain(ledger, event, pending):
        yield Left(own, pending, event, next(iter(unscaled_others(ledger, pending.scaler, own)), None))


def perhaps_plain(ledger: Ledger, event: Grads, pending: Pending) -> bool:
    """Whether, of several optimizers, these may be the gradients of a loss that nothing scaled."""
    reached = len(ledger.owns) == 1 or overlap(pending.weights, event.weights) is True
    return ledger.is_plain and not reached


def owned(ledger: Ledger, optimizer: Named) -> Weights | None:
    return next((own.weights for own in ledger.owns if own.optimizer == optimizer), None)


def after_step(ledger: Ledger, event: Step) -> Ledger:
    here = seen(event, f"'{event.optimizer.name}' steps")
    clean = frozenset(c for c in ledger.clean if c.optimizer != event.optimizer)
    clean |= {Clean(event.optimizer, owned(ledger, event.optimizer), True, False, here)}
    left = frozenset(one for one in ledger.left if one.own.optimizer != event.optimizer)
    ledger = replace(ledger, clean=clean, left=left)
    if event.via is None:
        return replace(ledger, plain=None, is_plain=False, fp16=None, times=None, partial=frozenset())
    here = seen(event, f"'{event.via.name}' steps '{event.optimizer.name}'")
    others = frozenset(p for p in ledger.progress if (p.scaler, p.optimizer) != (event.via, event.optimizer))
    made = frozenset(
        replace(m, stepped=m.stepped | {event.optimizer}, before=frozenset()) if m.scaler == event.via else m
        for m in ledger.made
    )
    return replace(
        ledger,
        progress=others | {Progress(event.via, event.optimizer, "stepped", False, here)},
        made=made,
        used=ledger.used if any(m.scaler == event.via for m in made) else ledger.used | {event.via},
        plain=None,
        is_plain=False,
        fp16=None,
        times=None,
    )


def after_update(ledger: Ledger, event: Update) -> Ledger:
    stepped = frozenset(p.optimizer for p in ledger.progress if p.scaler == event.scaler and p.phase == "stepped")
    waiting = ledger.waiting
    pending = ledger.pending
    if any(p.scaler == event.scaler for p in pending) and stepped:
        waiting |= {Waiting(event.scaler, stepped, seen(event, f"'{event.scaler.name}' is updated here"))}
        pending = frozenset(p for p in pending if p.scaler != event.scaler)
    elif stepped and not (ledger.unknown or ledger.is_plain or ledger.window or waiting):
        waiting |= {Waiting(event.scaler, stepped, seen(event, f"'{event.scaler.name}' is updated here"), guess=True)}
    progress = frozenset(p for p in ledger.progress if p.scaler != event.scaler)
    moved_on = ledger.moved_on | {event.scaler} if event.read and stepped else ledger.moved_on
    hidden = ledger.hidden - {event.scaler}
    left = frozenset(one for one in ledger.left if one.pending.scaler != event.scaler)
    return replace(
        ledger, waiting=waiting, pending=pending, progress=progress, moved_on=moved_on, hidden=hidden, left=left
    )  # fmt: skip


def after_loss_scaled(ledger: Ledger, event: LossScaled) -> Ledger:
    if event.scaler not in ledger.moved_on:
        return ledger
    stale = frozenset(one for one in ledger.stale if one[0] != event.scaler)
    return replace(ledger, moved_on=ledger.moved_on - {event.scaler}, stale=stale)


def after_read(ledger: Ledger, event: ScaleRead) -> Ledger:
    if event.scaler not in ledger.moved_on:
        return ledger
    return replace(ledger, stale=ledger.stale | {(event.scaler, event.at)})


def after_zero(ledger: Ledger, event: ZeroGrad) -> Ledger:
    def meant(optimizer: Named | None, weights: Weights | None) -> bool:
        if event.optimizer is not None:
            return optimizer is None or optimizer == event.optimizer or overlap(weights, event.weights) is True
        return event.weights is None or overlap(weights, event.weights) is not False

    clean = frozenset(c for c in ledger.clean if not meant(c.optimizer, c.weights))
    progress = frozenset(
        replace(p, dropped=True) if meant(p.optimizer, owned(ledger, p.optimizer)) else p for p in ledger.progress
    )
    pending = frozenset(p for p in ledger.pending if overlap(p.weights, event.weights) is False)
    left = frozenset(one for one in ledger.left if not meant(one.own.optimizer, one.own.weights))
    hidden: frozenset[Named] = frozenset()
    if event.optimizer is not None or event.weights is not None:
        unsure = (p.scaler for p in ledger.pending - pending if overlap(p.weights, event.weights) is None)
        hidden = ledger.hidden.union(unsure)
    waiting: frozenset[Waiting] = frozenset()
    if event.optimizer is not None:  # which does not wait with them any longer
        waiting = frozenset(replace(w, stepped=w.stepped | {event.optimizer}) for w in ledger.waiting)
    return replace(
        ledger, clean=clean, progress=progress, pending=pending, plain=None, is_plain=False, fp16=None, times=None, unknown=False,
        waiting=waiting, partial=frozenset(), hidden=hidden, left=left,
    )  # fmt: skip


def after_iteration(ledger: Ledger, event: Iteration) -> Ledger:
    """What zero_grad() meets in the next turn is not what was thrown away in this one. In a loop that is entered anew, the optimizers step
    once more, after a backward that may not have been read."""
    if not event.again and ledger.waiting:
        waiting = frozenset(replace(w, left=True) for w in ledger.waiting if not w.guess)
        ledger = replace(ledger, waiting=waiting)
    return replace(ledger, fp16=None) if event.again and ledger.fp16 is not None else ledger


def after_made(ledger: Ledger, event: ScalerMade) -> Ledger:
    if event.enabled == Known(False):
        return ledger
    made = frozenset(m for m in ledger.made if m.scaler != event.scaler)
    # Where no loop is seen, what made it is called again for another run: a program that trains twice has two scalers.
    replaced = ledger.made - made if event.loop is not None else ()
    before = frozenset(optimizer for m in replaced for optimizer in m.stepped | m.before)
    here = seen(event, f"{event.cls.rpartition('.')[2]} made here")
    return replace(
        ledger,
        made=made | {Made(event.scaler, event.cls, frozenset(), here, before)},
        progress=frozenset(p for p in ledger.progress if p.scaler != event.scaler),
        pending=frozenset(p for p in ledger.pending if p.scaler != event.scaler),
        left=frozenset(one for one in ledger.left if one.pending.scaler != event.scaler),
    )


def after_owns(ledger: Ledger, event: Owns) -> Ledger:
    owns = frozenset(o for o in ledger.owns if o.optimizer != event.optimizer)
    here = seen(event, f"{event.cls.rpartition('.')[2]} over these weights")
    # A new optimizer starts a new training run: what stepped, and what stood scaled before it, belongs to the run before.
    made = frozenset(replace(m, stepped=frozenset(), before=frozenset()) for m in ledger.made)
    return replace(
        ledger,
        owns=owns | {Own(event.optimizer, event.weights, event.cls, ("fused", True) in event.settings, here)},
        made=made,
        pending=frozenset(),
        left=frozenset(),
        plain=None,
        is_plain=False,
        fp16=None,
        times=None,
    )


def after_lost(ledger: Ledger, event: Lost) -> Ledger:
    """Whoever got the scaler may have unscaled, stepped and updated."""
    return replace(
        ledger,
        pending=frozenset(p for p in ledger.pending if p.scaler.id != event.object),
        progress=frozenset(p for p in ledger.progress if p.scaler.id != event.object),
        waiting=frozenset(w for w in ledger.waiting if w.scaler.id != event.object),
        clean=frozenset(),
        left=frozenset(),
        plain=None,
        is_plain=False,
        fp16=None,
        times=None,
        unknown=True,
    )


def after_renewed(ledger: Ledger, event: Renewed) -> Ledger:
    def kept(optimizers: frozenset[Named]) -> frozenset[Named]:
        return frozenset(one for one in optimizers if one.id != event.object)

    return replace(
        ledger,
        made=frozenset(replace(m, stepped=kept(m.stepped), before=kept(m.before)) for m in ledger.made),
        progress=frozenset(p for p in ledger.progress if event.object not in (p.optimizer.id, p.scaler.id)),
        pending=frozenset(p for p in ledger.pending if p.scaler.id != event.object),
        left=frozenset(one for one in ledger.left if event.object not in (one.own.optimizer.id, one.pending.scaler.id)),
        waiting=frozenset(
            w if w.left else replace(w, stepped=kept(w.stepped), renewed=w.renewed or kept(w.stepped) != w.stepped)
            for w in ledger.waiting
            if w.scaler.id != event.object
        ),
    )


def after_opened(ledger: Ledger, event: Opened) -> Ledger:
    return replace(ledger, window=True) if event.measured else ledger


def after_sharded(ledger: Ledger, event: Sharded) -> Ledger:
    return replace(ledger, sharded=True) if event.how == "fsdp1" else ledger


def after_take(ledger: Ledger, event: WeightsTake) -> Ledger:
    if event.dtype is None:
        return ledger
    half = frozenset(one for one in ledger.half if not covers(event.weights, frozenset({one.path})))
    if event.dtype == "float16":
        here = seen(event, f"weights become fp16: {event.how}")
        return replace(ledger, half=half | {Half(path, here) for path in event.weights})
    adapters = frozenset(adapter for adapter in ledger.adapters if not covers(event.weights, adapter.weights))
    return replace(ledger, half=half, adapters=adapters)


def after_adapter(ledger: Ledger, event: AdapterAdded) -> Ledger:
    if not covers(in_half(ledger), event.weights):
        return ledger
    cast = next(one.seen for one in ledger.half if covers(frozenset({one.path}), event.weights))
    here = seen(event, f"{event.how} makes its adapters in the dtype of the model")
    return replace(ledger, adapters=ledger.adapters | {Adapter(event.weights, cast, here)})


def after_adopted(ledger: Ledger, event: Adopted) -> Ledger:
    half = frozenset(replace(one, path=next(iter(moved(frozenset({one.path}), event)))) for one in ledger.half)
    adapters = frozenset(replace(one, weights=moved(one.weights, event)) for one in ledger.adapters)
    owns = frozenset(
        replace(own, weights=moved(own.weights, event)) if own.weights is not None else own for own in ledger.owns
    )
    return replace(ledger, half=half, adapters=adapters, owns=owns)


def in_half(ledger: Ledger) -> Weights:
    """The weights that are fp16."""
    return frozenset(one.path for one in ledger.half)


ADVANCE: dict[type[Event], Any] = {
    LossScaled: after_loss_scaled, ScaleRead: after_read,
    Opened: after_opened,
    Backward: after_backward, Grads: after_grads, Step: after_step, Update: after_update, ZeroGrad: after_zero,
    ScalerMade: after_made, Owns: after_owns, Lost: after_lost, Renewed: after_renewed, Sharded: after_sharded,
    WeightsTake: after_take, AdapterAdded: after_adapter, Adopted: after_adopted, Iteration: after_iteration,
}  # fmt: skip


MAKES_KNOWN = frozenset({Backward, Step, Update, ZeroGrad, Lost, ScalerMade})
"""After these it is known, or cannot be, what the gradients hold that were touched before."""


def settle(ledger: Ledger) -> Ledger:
    """What is left of a ledger where another program begins: the objects, with nothing under way."""
    return Ledger(
        made=ledger.made, owns=ledger.owns, sharded=ledger.sharded, half=ledger.half, adapters=ledger.adapters
    )


def stakes(ledger: Ledger) -> int:
    """Gradients that stand scaled, or were touched before a step, optimizers between two updates, sums that are mixed."""
    dropped = sum(progress.dropped for progress in ledger.progress)
    mixed = sum(clean.mixed for clean in ledger.clean)
    return (
        len(ledger.pending) + len(ledger.progress) + len(ledger.waiting) + len(ledger.touched) + 2 * dropped + 2 * mixed
    )


AUTOMATON = Automaton("loss-scaling", Ledger(), advance, settle, stakes, tuple(ADVANCE))
"""The state that the rules of loss scaling read, in both of their modules."""
