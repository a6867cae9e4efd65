"""Gradient scalers and backward: what happens to the scale."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint.events import (
    Backward,
    Grads,
    Known,
    LossScaled,
    LossUnscaled,
    Named,
    ScaleRead,
    ScalerMade,
    Step,
    Update,
)
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    SCALER_NAME,
    Outcome,
    arg_name,
    argument,
    known_region,
    last_word,
    one,
    open_ended,
    optimizer_weights,
    receiver_text,
    region_of,
    result,
    when,
)
from precisionlint.source.effects.kept import chosen_half
from precisionlint.source.objects import name_of, named
from precisionlint.source.operators import as_cond, factor, opened_up, truth
from precisionlint.source.parsing import walk
from precisionlint.source.settings import declare
from precisionlint.source.state import State
from precisionlint.source.values import (
    NONE,
    TRUE,
    UNSURE,
    Cond,
    Const,
    External,
    Flow,
    Obj,
    Sym,
    Value,
    const,
    flow_of,
    text_of,
)
from precisionlint.subjects.names import last_name

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


OWNER_NAME = regex(r"accelerator|fabric|engine|booster|deepspeed|strategy|(?:^|\.)ds_", re.I)


SCALER_METHODS = frozenset(
    {"scale", "unscale_", "step", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict"}
)


def annotated(it: Interpreter, state: State, annotation: p.Expr, value: Sym) -> Value:
    """A value whose annotation names a class that matters."""
    name = name_of(annotation)
    if name.endswith("GradScaler") and not SCALER_NAME.search(last_word(value)):
        it.module_of(state).scaler_names.add(last_word(value))
    else:
        declare(it, state, annotation, value)
    return value


def branched(it: Interpreter, state: State, test: Value, side: bool, label: str, at: Any) -> None:
    """A branch is taken: what its label says holds there, and by a scale that is 1 nothing was scaled."""
    cond = as_cond(opened_up(it, test))
    if cond is None:
        return
    cond = replace(cond, positive=cond.positive == side)
    if label:
        it.labelled.setdefault(label, set()).add(cond)
    flow = cond.sym.flow
    is_one = cond.kind == "eq" and cond.positive and isinstance(cond.const, Const) and cond.const.value == 1
    if is_one and flow.factor == "scale" and isinstance(flow.scaled, Named):
        where, labels = it.where(state, at), when(state)
        it.emit(state, Grads(where, labels, None, "mul", "", "1/scale", flow.scaled, None, False))


def make_scaler(it: Interpreter, state: State, instr: p.Call, cls: str, args: Args, obj: Obj) -> Outcome:
    shift = 1 if cls.startswith(("torch.amp.", "torch.GradScaler")) else 0
    enabled = argument(args, 4 + shift, "enabled")
    if enabled is None:
        enabled = TRUE if not open_ended(args) else it.derived(("attr", obj, "enabled"), "enabled", ())
    settings: list[tuple[str, Any]] = []
    for position, setting_name in enumerate(it.apis.scaler_settings):
        value = argument(args, position + shift, setting_name)
        if isinstance(value, Const):
            settings.append((setting_name, value.value))
    decided = chosen_half(it, state, "fp16")
    state.allocate(obj, {"enabled": enabled, "chosen": const(decided)})
    it.coverage.scalers.setdefault(instr.at, it.where(state, instr.at))
    known = truth(state, enabled)
    if known is not False:
        it.coverage.recipe.scalers.add("GradScaler")
    condition = as_cond(enabled) if known is None else None
    labels = (*when(state), *((condition.text,) if condition is not None else decided))
    it.emit(
        state,
        ScalerMade(
            it.where(state, instr.at), labels, Named(obj, instr.name or it.names.get(obj.site, "")), cls,
            Known(known) if known is not None else None, tuple(settings), it.innermost_loop(state),
            it.module_of(state) is it.entry and (instr.at.lineno, instr.at.col_offset) in it.entry.idle_scalers,
        ),
    )  # fmt: skip
    return one(state, obj)


def autograd_backward(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    loss = argument(args, 0, "tensors")
    backward(it, state, instr, loss if loss is not None else NONE)
    return one(state, NONE)


def scaler_method(it: Interpreter, state: State, instr: p.Call, scaler: Value, name: str, args: Args) -> Outcome:
    it.come_across(it.coverage.scalers, state, scaler, instr.at)
    if isinstance(scaler, Sym):  # what a method of it is called on is there: a later `if scaler` is no question
        state.assume(Cond(scaler, "truth", None, True))
    enabled: Value = state.heap.get(scaler, {}).get("enabled", TRUE)
    if name == "is_enabled":
        return one(state, enabled)
    if name == "state_dict":
        return one(state, it.derived(("state_dict", scaler), f"{receiver_text(instr)}.state_dict()", ()))
    if name == "load_state_dict":
        return one(state, NONE)
    me = named(scaler, receiver_text(instr))
    outcome: Outcome = []
    condition = as_cond(enabled)
    chosen = state.heap.get(scaler, {}).get("chosen", NONE)
    for on, branch in it.fork(state, enabled):
        act = SCALER_ON[name] if on else SCALER_OFF[name]
        saved = branch.control
        if on and condition is not None:  # what enables the scaler is a condition of all that it does
            branch.control = (*saved, condition.text)
        elif on and isinstance(chosen, Const) and chosen.value:  # or the dtype for which it was made
            branch.control = (*saved, *chosen.value)
        for after, value in act(it, branch, instr, me, args):
            after.control = saved
            outcome.append((after, value))
    return outcome


def scaler_scale(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    loss = argument(args, 0, "outputs") or NONE
    flow = flow_of(loss)
    where = it.where(state, instr.at)
    labels = when(state)
    it.emit(state, LossScaled(where, labels, me, known_region(flow.region)))
    value = it.derived(("scaled", loss, me), text_of(loss), (loss,), Flow(me, flow.region, "", (where, labels)))
    return one(state, value)


def scaler_unscale(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    optimizer = argument(args, 0, "optimizer") or NONE
    name = arg_name(instr, 0, "optimizer")
    it.emit(
        state,
        Grads(
            it.where(state, instr.at), when(state), optimizer_weights(it, state, optimizer), "unscale", "unscale_", "1/scale", me,
            named(optimizer, name),
        ),
    )  # fmt: skip
    return one(state, NONE)


def scaler_step(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    optimizer = argument(args, 0, "optimizer") or NONE
    name = arg_name(instr, 0, "optimizer")
    it.emit(
        state,
        Step(
            it.where(state, instr.at), when(state), named(optimizer, name), me, False, it.innermost_loop(state),
            later=it.calling_back > 0,
        ),
    )  # fmt: skip
    return one(state, result(it, state, instr, External("step"), ()))


def scaler_update(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    read = any("get_scale" in module.text for module in it.global_frames)
    it.emit(state, Update(it.where(state, instr.at), when(state), me, bool(args), read))
    return one(state, NONE)


def scaler_get(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    where = it.where(state, instr.at)
    compared = (instr.at.lineno, instr.at.col_offset) in where.module.compared_scales
    it.emit(state, ScaleRead(where, when(state), me, it.innermost_loop(state), compared))
    flow = Flow(me, None, "scale", (where, when(state)))
    return one(state, it.site(state, instr.at, f"{me.name}.get_scale()", flow, ()))


def loss_divided(it: Interpreter, state: State, quotient: Sym) -> None:
    """A loss that was scaled is handed on, divided by a scale that was read: ``log(loss.item() / scaler.get_scale())``."""
    loss, scale = flow_of(quotient.key[2]), flow_of(quotient.key[3])
    scaler = scale.scaled
    if scale.factor != "scale" or scale.scaled_at is None:
        return
    if isinstance(scaler, Named) and loss.scaled == scaler and not loss.factor:
        at, labels = scale.scaled_at
        it.emit(state, LossUnscaled(at, labels, scaler))


def plain_scale(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, argument(args, 0, "outputs") or NONE)


def plain_step(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    optimizer = argument(args, 0, "optimizer") or NONE
    name = arg_name(instr, 0, "optimizer")
    it.emit(
        state,
        Step(it.where(state, instr.at), when(state), named(optimizer, name), None, False, it.innermost_loop(state)),
    )
    return one(state, NONE)


def no_effect(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, NONE)


def plain_get(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, const(1.0))


SCALER_ON = {
    "scale": scaler_scale,
    "unscale_": scaler_unscale,
    "step": scaler_step,
    "update": scaler_update,
    "get_scale": scaler_get,
}


SCALER_OFF = {
    "scale": plain_scale,
    "unscale_": no_effect,
    "step": plain_step,
    "update": no_effect,
    "get_scale": plain_get,
}


def backward_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, args: Args) -> Outcome:
    owner = isinstance(receiver, Obj) and it.kind(state, receiver) == "owner"
    text = receiver_text(instr)
    if owner or OWNER_NAME.search(text) or any(k is None for k, _ in args):
        # accelerator.backward(loss), engine.backward(loss), y.backward(gradient): who scales what is not seen here
        it.emit(state, Backward(it.where(state, instr.at), when(state), None, None, known_region(region_of(state))))
        return one(state, NONE)
    backward(it, state, instr, receiver)
    return one(state, NONE)


def backward(it: Interpreter, state: State, instr: p.Call, loss: Value) -> None:
    flow = flow_of(loss)
    scale: Known[Named | None] | None
    if isinstance(flow.scaled, Named):
        scale = Known(flow.scaled)
    elif flow.scaled == UNSURE or from_outside(loss):
        scale = None
    else:
        scale = Known(None)
    times = multiplied(it, loss)
    only = times is not None and used_once(it.module_of(state).tree, times)
    it.emit(
        state,
        Backward(
            it.where(state, instr.at), when(state), scale, known_region(flow.region), known_region(region_of(state)), flow.scaled_at,
            times=times, only=only,
        ),
    )  # fmt: skip


def multiplied(it: Interpreter, loss: Value) -> Named | None:
    """The number by which a loss was multiplied, where the program gives one: by itself, or as the loss scale that it keeps."""
    scale = flow_of(loss).scaled
    if isinstance(scale, Named):
        held = it.syms.get(scale.id) if isinstance(scale.id, tuple) else None
        return scale if held is not None and isinstance(held.default, Const) else None
    while isinstance(loss, Sym) and loss.key[:2] in (("op", "*"), ("op", "/")):
        op, left, right = loss.key[1:4]
        found = factor(op, right) or (factor(op, left) if op == "*" else None)
        if found is not None:
            return found
        loss = right if isinstance(left, Const) else left
    return it.multiplied.get(loss) if isinstance(loss, Sym) else None


def used_once(tree: ast.Module, number: Named) -> bool:
    """Whether a file uses a number once, by its name or as it is written: what uses it twice may divide by it in some way that is not read."""
    if not isinstance(number.id, tuple):
        return False
    kind, value = number.id[:2]
    nodes = walk(tree)
    names = {value[1]} if kind == "hand" else set()
    written = [node for node in nodes if isinstance(node, ast.Constant) and node.value == value and kind == "number"]
    for node in nodes:
        if isinstance(node, ast.Assign) and node.value in written:
            names |= {last_name(target) for target in node.targets}
            written.remove(node.value)
    named = [node for node in nodes if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) in names]
    return len(written) + sum(isinstance(node.ctx, ast.Load) for node in named) == 1


def from_outside(value: Value) -> bool:
    """Whether a value came in from a caller that is not read: it may carry anything."""
    while isinstance(value, (Sym, Cond)):
        if isinstance(value, Cond):
            value = value.sym
            continue
        kind = value.key[0]
        if kind in ("param", "free"):
            return True
        if kind in ("attr", "index", "item", "cast"):
            value = value.key[1]
        elif kind == "op":
            return any(from_outside(side) for side in value.key[2:] if isinstance(side, (Sym, Cond)))
        else:
            return False
    return isinstance(value, Obj) or value == NONE
