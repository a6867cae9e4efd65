"""The rules of loss scaling: each reads the ledger that an event meets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from precisionlint.checks import engine_scales
from precisionlint.checks.base import Change, Evidence, Family, Hit, Remedy, Seen, frozen
from precisionlint.checks.own_scales import (
    A_SCALER,
    by_hand,
    clipped_before_division,
    divided,
    hand_needs,
    is_scale,
    never_divided,
)
from precisionlint.checks.scale_ledger import (
    AUTOMATON,
    left_scaled,
    optimizer_of,
    owned,
    pending_over,
    perhaps_plain,
    seen,
    still_scaled,
    unscaled_others,
)
from precisionlint.checks.scale_records import Ledger, Left, Own, Pending, Progress
from precisionlint.events import (
    Backward,
    Closed,
    Engine,
    Grads,
    LossUnscaled,
    Named,
    Step,
    Update,
    overlap,
)
from precisionlint.findings import Confidence

ALWAYS_BITES = "the threshold meets a norm 65536 times too large (the scale's default), so it always bites"
TOO_LARGE = "the number is as many times too large as the scale is"
BITES = {
    True: "so it always bites; Adam divides the constant out again, until its eps no longer is small against what is left",
    False: "so it always bites and the update shrinks by as much",
    None: "so it always bites: SGD's update shrinks by as much, Adam's by its eps alone",
}
"""What comes of a clip of scaled gradients, by whether the optimizer divides a constant factor out again."""
ADAPTIVE = ("Adam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Rprop", "LAMB", "Lion", "NovoGrad")

FAMILY = Family(AUTOMATON)


# -- what the rules share


def adaptive(owns: Iterable[Own]) -> bool | None:
    """Whether an optimizer, one of these, divides a constant factor out again; None where that depends on which."""
    kinds = {any(word in own.cls for word in ADAPTIVE) for own in owns}
    return kinds.pop() if len(kinds) == 1 else None


def trace(pending: Pending, *more: Seen) -> tuple[Seen, ...]:
    return tuple(s for s in (pending.scaled, pending.backward, *more) if s is not None)


def never_unscaled(ledger: Ledger, event: Step, rule: str, how: str, does: str, follows: str) -> Iterator[Hit]:
    """What was clipped or read (``how``) before a step through a scaler, in a function that is entered with gradients that others have made.
    That these have unscaled them as well, nothing in the program may show. ``does``, ``follows``: the call's verb, and what comes of it."""
    if event.via is None:
        return
    scaler = event.via.name
    confidence: Confidence = "likely" if any(m.scaler == event.via for m in ledger.made) else "possible"
    mine = owned(ledger, event.optimizer)
    for touched in sorted(ledger.touched, key=lambda one: one.api):
        if touched.how == how and overlap(touched.weights, mine) is not False:
            yield Hit(
                rule,
                touched.seen.at,
                f"{touched.api} {does} gradients that '{scaler}' has not unscaled, and that its step() divides by the scale afterwards: {follows}",
                (touched.seen, seen(event, f"'{scaler}' unscales them here, where it steps")),
                confidence=confidence,
                unless=(("unscaled", scaler),),
            )


def unscaled_later(ledger: Ledger, event: Grads, rule: str, how: str, does: str, follows: str) -> Iterator[Hit]:
    """What was clipped or read (``how``) in such a function before it unscales the same gradients."""
    if event.how != "unscale" and (event.how, event.factor, event.part) != ("mul", "1/scale", False):
        return
    scaler = event.scaler
    weights = event.weights if event.weights is not None or event.optimizer is None else owned(ledger, event.optimizer)
    made = any(m.scaler == scaler for m in ledger.made)
    by = f"'{scaler.name}'" if scaler is not None and scaler.name else "the loss scale"
    for touched in sorted(ledger.touched, key=lambda one: one.api):
        if touched.how == how and overlap(touched.weights, weights) is not False:
            yield Hit(
                rule,
                touched.seen.at,
                f"{touched.api} {does} gradients that still carry {by}, which are divided by it only afterwards: {follows}",
                (
                    replace(touched.seen, text=f"{touched.api} meets them here"),
                    seen(event, "unscaled here, after that"),
                ),
                confidence="likely" if made else "possible",
            )


def unscaled(event: Grads) -> Iterator[Evidence]:
    """The fact that a program unscales with this scaler somewhere."""
    if event.how == "unscale" and event.scaler is not None:
        yield Evidence(("unscaled", event.scaler.name))


# -- the rules


@FAMILY.rule("clip-before-unscale", Grads, Step)
def clip_before_unscale(ledger: Ledger, event: Grads | Step) -> Iterator[Any]:
    if isinstance(event, Step):
        yield from never_unscaled(ledger, event, "clip-before-unscale", "clip", "sees", ALWAYS_BITES)
        for left in ledger.left:
            if (left.pending.scaler, left.own.optimizer) == (event.via, event.optimizer):
                yield clipped_scaled(left, seen(event, f"'{event.optimizer.name}' steps with them"))
        return
    yield from unscaled(event)
    yield from unscaled_later(ledger, event, "clip-before-unscale", "clip", "sees", ALWAYS_BITES)
    yield from divided(event)
    yield from engine_scales.clipped(ledger.engines, event, ALWAYS_BITES)
    if event.how != "clip" or event.factor == "scale":
        return
    pending = still_scaled(ledger, event.weights)
    if pending is not None:
        own = optimizer_of(ledger, event.weights)
        other = next(iter(unscaled_others(ledger, pending.scaler, own)), None)
        hit = scaled_at_clip(event, own, pending, other, adapts=adaptive(ledger.owns if own is None else [own]))
        yield replace(hit, confidence="possible") if perhaps_plain(ledger, event, pending) else hit
        return
    lefts = list(left_scaled(ledger, event))
    for left in lefts:
        hit = clipped_scaled(left)
        yield hit if left.reached else replace(hit, confidence="possible")
    if not lefts:
        own = optimizer_of(ledger, event.weights)
        adapts = adaptive(ledger.owns if own is None else [own])
        yield from clipped_before_division(ledger, event, BITES[adapts])


def clipped_scaled(left: Left, *more: Seen) -> Hit:
    """A clip over the weights of several optimizers, of which only those of others have been unscaled."""
    hit = scaled_at_clip(left.clip, left.own, left.pending, left.other, *more, adapts=adaptive([left.own]))
    return replace(hit, unless=frozen(left.own.weights or frozenset()))


def scaled_at_clip(
    event: Grads, own: Own | None, pending: Pending, other: Progress | None, *more: Seen, adapts: bool | None
) -> Hit:
    """A clip that meets scaled gradients, those of ``own`` where that is known; ``other``: whose the scaler has unscaled."""
    scaler = pending.scaler
    whose = f" of '{own.optimizer.name}'" if own is not None and own.optimizer.name else ""
    how_large = f"'{scaler.name}' times too large" if by_hand(scaler) else "65536 times too large (the scale's default)"
    instead = f"; '{scaler.name}' has unscaled those of '{other.optimizer.name}'" if other is not None else ""
    before = [other.seen] if other is not None else []
    return Hit(
        "clip-before-unscale",
        event.at,
        f"{event.api} sees gradients{whose} still scaled by '{scaler.name}': its threshold meets a norm {how_large}, {BITES[adapts]}{instead}",
        trace(pending, *before, seen(event, "clipped here, not unscaled since"), *more),
        needs=hand_needs(scaler),
        fix=unscaled_first(event, scaler, own),
    )


def unscaled_first(event: Grads, scaler: Named, own: Own | None) -> Remedy | None:
    """unscale_ before a clip, where the step follows in its block."""
    if by_hand(scaler) or own is None or not own.optimizer.name or not scaler.name:
        return None
    step = f"{scaler.name}.step({own.optimizer.name})"
    return Remedy((Change("before", event.at, step, f"{scaler.name}.unscale_({own.optimizer.name})"),))


@FAMILY.rule("scaled-gradients-read", Grads, Step, LossUnscaled)
def scaled_gradients_read(ledger: Ledger, event: Grads | Step | LossUnscaled) -> Iterator[Any]:
    if isinstance(event, LossUnscaled):
        if (event.scaler, event.at) in ledger.stale:
            yield Hit(
                "scaled-gradients-read",
                event.at,
                f"the loss is divided by a scale that '{event.scaler.name}' did not scale it with: update() has changed it by then, and the value "
                "is off by a factor of 2 each time it does; read the scale before update(), or log the loss as it was before scaling",
                (seen(event, "read here, after update()"),),
            )
        return
    if isinstance(event, Step):
        yield from never_unscaled(ledger, event, "scaled-gradients-read", "read", "reads", TOO_LARGE)
        return
    yield from unscaled(event)
    yield from divided(event)
    if event.how == "unscale":  # of a norm that is read, a scale kept by hand may be taken out where it is used
        yield from unscaled_later(ledger, event, "scaled-gradients-read", "read", "reads", TOO_LARGE)
    yield from engine_scales.read(ledger.engines, event)
    if event.how != "read":
        return
    if event.factor == "scale" and event.scaler is not None:
        yield Hit(
            "scaled-gradients-read",
            event.at,
            f"{event.api} of gradients of a loss that '{event.scaler.name}' scaled: divide them by the scale first",
            (seen(event, "read here, the scale still in them"),),
        )
        return
    pending = still_scaled(ledger, event.weights)
    if pending is not None:
        yield Hit(
            "scaled-gradients-read",
            event.at,
            f"{event.api} reads gradients still scaled by '{pending.scaler.name}': the number is as many times too large as the scale is at "
            "that step",
            trace(pending, seen(event, "read here, not unscaled since")),
            needs=hand_needs(pending.scaler),
        )


def by_another_scaler(ledger: Ledger, event: Grads | Step) -> Iterator[Hit]:
    """A scaler that unscales or steps gradients of losses that only others have scaled, and with which those have not stepped."""
    scaler = event.via if isinstance(event, Step) else event.scaler if event.how == "unscale" else None
    optimizer = event.optimizer
    if scaler is None or optimizer is None or ledger.unknown or ledger.is_plain:
        return
    made = {m.scaler for m in ledger.made}
    reached = [p for p in ledger.pending if overlap(p.weights, owned(ledger, optimizer)) is not False]
    if scaler not in made or any(p.scaler == scaler or p.scaler not in made for p in reached):
        return
    if scaler in ledger.hidden:
        return
    if any(p.optimizer == optimizer for p in ledger.progress):
        return  # said at its unscale_
    if any(w.scaler == scaler and optimizer not in w.stepped for w in ledger.waiting):
        return  # its gradients may be of the loss before the update
    for pending in sorted(reached, key=lambda p: p.scaler.name):
        if any(p.scaler == pending.scaler for p in ledger.progress):
            continue
        does = "steps" if isinstance(event, Step) else "unscales"
        yield Hit(
            "step-bypasses-scaler",
            event.at,
            f"'{scaler.name}' {does} '{optimizer.name}', whose gradients '{pending.scaler.name}' scaled: it divides them by a scale of its own, "
            "which is another after the first overflow or growth, and an overflow lowers the wrong one; if it has scaled no loss, it raises",
            trace(pending, seen(event, f"'{scaler.name}' {does} '{optimizer.name}'")),
        )
        return


@FAMILY.rule("step-bypasses-scaler", Grads, Step)
def step_bypasses_scaler(ledger: Ledger, event: Grads | Step) -> Iterator[Any]:
    yield from by_another_scaler(ledger, event)
    if isinstance(event, Grads):
        yield from divided(event)
        return
    if event.via is not None:
        yield Evidence(A_SCALER)
    if event.via is not None or ledger.unknown:
        return
    own = next((o for o in ledger.owns if o.optimizer == event.optimizer), None)
    if ledger.is_plain:
        if ledger.times is not None and is_scale(ledger.times.scaler):
            yield from never_divided(event, ledger.times, adaptive([] if own is None else [own]))
        return
    name = event.optimizer.name
    for scaler, here in ledger.partial:
        yield Hit(
            "step-bypasses-scaler",
            event.at,
            f"'{name}' steps although only part of its gradients were divided by '{scaler.name}': the others still carry the whole scale",
            (here, seen(event, f"'{name}' steps on all of them")),
        )
        return
    for p in ledger.progress:
        if p.optimizer == event.optimizer and p.phase == "unscaled" and not p.dropped and not event.guarded:
            yield Hit(
                "step-bypasses-scaler",
                event.at,
                f"'{name}' steps past '{p.scaler.name}', which unscaled its gradients: a step with inf or NaN gradients is no longer skipped "
                "but written into the weights",
                (p.seen, seen(event, f"'{name}'.step() is called directly")),
            )
            return
    mine = owned(ledger, event.optimizer)
    for c in ledger.clean:
        another = c.consumed and c.optimizer not in (None, event.optimizer) and c.weights is None and mine is None
        if c.optimizer == event.optimizer or (overlap(c.weights, mine) is not False and not another):
            return
    pending = pending_over(ledger, mine)
    if pending is None:
        return
    if by_hand(pending.scaler):  # a weight of the loss may be called its scale, where nothing else needs one
        yield from never_divided(event, pending, adaptive([] if own is None else [own]))
        return
    consequence = {
        True: "Adam divides the constant out, but its eps no longer counts and no step with inf or NaN is skipped",
        False: "the update is 65536 times too large (the scale's default)",
        None: "SGD's update is 65536 times too large (the scale's default); Adam's is not, but its eps no longer counts and no step with inf "
        "or NaN is skipped",
    }[adaptive([] if own is None else [own])]
    yield Hit(
        "step-bypasses-scaler",
        event.at,
        f"'{name}' steps on gradients still scaled by '{pending.scaler.name}': {consequence}",
        trace(pending, seen(event, f"'{name}'.step() is called directly")),
    )


PASSED_BY = {
    "lightning": "the step divides all of its gradients by the scale, or raises where nothing was scaled before; call "
    "self.manual_backward(loss)",
    "fabric": "Fabric raises RuntimeError here, before lightning 2.2 where it steps; call {0}.backward(loss)",
}
"""What comes of a loss that goes past the backward of a framework which scales there (accelerate has a rule of its own)."""


def past_an_engine(engine: Engine, event: Step, plain: Seen) -> Hit:
    does = f"'{event.optimizer.name}' steps through the scaler of '{engine.name}'"
    return Hit(
        "backward-without-scale",
        plain.at,
        f"{does}, but this loss was never scaled: {PASSED_BY[engine.framework].format(engine.name)}",
        (plain, seen(event, does)),
        confidence="certain" if engine.sure else "likely",
    )


@FAMILY.rule("backward-without-scale", Backward, Step)
def backward_without_scale(ledger: Ledger, event: Backward | Step) -> Iterator[Any]:
    if isinstance(event, Backward):
        if event.scale is not None and event.scale.value is not None:
            yield Evidence(("scaled", event.scale.value.id))
        return
    if ledger.unknown or ledger.plain is None or not ledger.is_plain:
        return
    if event.engine is not None and event.engine.framework in PASSED_BY:
        yield past_an_engine(event.engine, event, ledger.plain)
    if event.via is None:
        return
    if ledger.pending and (len(ledger.owns) != 1 or any(own.optimizer != event.optimizer for own in ledger.owns)):
        return  # the other loss may be another optimizer's
    made = any(m.scaler == event.via for m in ledger.made)
    yield Hit(
        "backward-without-scale",
        ledger.plain.at,
        f"'{event.via.name}' steps '{event.optimizer.name}', but this loss was never scaled: small gradients are not protected, and the "
        "step divides all of them by the scale (65536 at first)",
        (ledger.plain, seen(event, f"'{event.via.name}' divides the gradients by its scale and steps")),
        unless=() if made else (("scaled", event.via.id),),
        fix=Remedy(
            (
                Change(
                    "receiver",
                    ledger.plain.at,
                    f"{event.via.name}.step({event.optimizer.name})",
                    f"{event.via.name}.scale({{}})",
                ),
            )
        ),
    )


@FAMILY.rule("missing-scaler-update", Grads, Step, Update, Closed)
def missing_scaler_update(ledger: Ledger, event: Grads | Step | Update | Closed) -> Iterator[Any]:
    if isinstance(event, Update):
        yield Evidence(("updated", event.scaler.id))
        return
    if isinstance(event, Closed):
        for p in sorted(ledger.progress, key=lambda p: (p.scaler.name, p.optimizer.name)):
            if event.complete and p.phase == "stepped":
                yield Hit(
                    "missing-scaler-update",
                    p.seen.at,
                    f"'{p.scaler.name}' is never updated after it steps '{p.optimizer.name}': its scale never adapts, and the next step raises",
                    (p.seen,),
                    unless=(("updated", p.scaler.id),),
                    never=f"{p.scaler.name}.update(",
                )
        return
    scaler = event.via if isinstance(event, Step) else event.scaler
    if scaler is None or (isinstance(event, Grads) and event.how != "unscale"):
        return
    for p in ledger.progress:
        if (p.scaler, p.optimizer) != (scaler, event.optimizer):
            continue
        if p.phase == "stepped":
            yield Hit(
                "missing-scaler-update",
                p.seen.at,
                f"'{p.scaler.name}' steps '{p.optimizer.name}' and comes back to it with no update() between: the second time raises "
                "RuntimeError, and the scale never adapts",
                (p.seen, seen(event, "reached again, not updated since")),
            )
        elif isinstance(event, Grads) and p.dropped:
            yield Hit(
                "missing-scaler-update",
                p.seen.at,
                f"a path unscales the gradients of '{p.optimizer.name}', drops them and never reaches '{p.scaler.name}'.update(): the next "
                "unscale_ raises RuntimeError",
                (p.seen, seen(event, "unscaled again, not updated since")),
                unless=(("unscaled twice", p.scaler.id, p.optimizer.id),),  # which is told by itself
            )


@FAMILY.rule("double-unscale", Grads)
def double_unscale(ledger: Ledger, event: Grads) -> Iterator[Any]:
    if event.how != "unscale":
        return
    for p in ledger.progress:
        if (p.scaler, p.optimizer) == (event.scaler, event.optimizer) and p.phase == "unscaled" and not p.dropped:
            yield Evidence(("unscaled twice", p.scaler.id, p.optimizer.id))
            yield Hit(
                "double-unscale",
                event.at,
                f"'{p.scaler.name}'.unscale_('{p.optimizer.name}') runs again before update(): RuntimeError. Unscale only where the step "
                "follows",
                (p.seen, seen(event, "unscaled again, not updated since")),
            )


@FAMILY.rule("backward-after-unscale", Step)
def backward_after_unscale(ledger: Ledger, event: Step) -> Iterator[Any]:
    for c in ledger.clean:
        if c.optimizer == event.optimizer and c.mixed and c.mixed_by is not None:
            if any(p.optimizer != event.optimizer for p in ledger.progress) or len(ledger.owns) > 1:
                continue  # with several optimizers the later loss may be another one's
            yield Hit(
                "backward-after-unscale",
                c.mixed_by.at,
                f"this backward adds scaled gradients to those of '{event.optimizer.name}' that were already unscaled: the sum is "
                "dominated by the scaled part",
                (c.seen, c.mixed_by, seen(event, f"'{event.optimizer.name}' steps on the sum")),
            )
