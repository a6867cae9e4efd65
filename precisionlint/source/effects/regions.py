"""Autocast regions: made, entered as context managers or decorators, left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from precisionlint.events import Autocast, Region
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    Outcome,
    argument,
    choices,
    detached,
    dtype_in,
    known_region,
    one,
    open_ended,
    short,
    when,
)
from precisionlint.source.effects.kept import chosen_half
from precisionlint.source.effects.unread import call_unknown
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    TRUE,
    UNSURE,
    Cond,
    Const,
    External,
    Flow,
    Func,
    Method,
    Obj,
    Sym,
    Tup,
    Value,
    const,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


DTYPE_NAME = regex(r"dtype|precision|amp", re.I)
ASKS_DTYPE = regex(
    r"(?:[=!]=|\bis|\bnot|\bin) *[(\[{]? *(?:torch\.)?['\"]?(?:b?float16|half|bf16|fp16)\b|16['\"]? *(?:[=!]=|\bin\b)"
)
"""How a program asks which half precision it computes in."""
AUTOCAST_NAME = regex(r"autocast|(?:^|_)amp(?:_|$)|precision", re.I)


def make_autocast(it: Interpreter, state: State, instr: p.Call, cls: str, args: Args) -> Outcome:
    """``autocast(...)``: an object that a ``with`` enters, or a decorator."""
    device_of_class = it.apis.autocast[cls]
    shift = 1 if device_of_class == "" else 0
    device = argument(args, 0, "device_type") if shift else None
    if shift:
        dtype, enabled = argument(args, 1, "dtype"), argument(args, 2, "enabled")
    else:
        enabled, dtype = argument(args, 0, "enabled"), argument(args, 1, "dtype")
    cache = argument(args, 2 + shift, "cache_enabled")
    outcome: Outcome = []
    for branch, chosen in choices(it, state, dtype):
        obj = Obj(it.here(branch, instr.at), External(cls))
        branch.heap[obj] = {
            "device": device if device is not None else (const(device_of_class) if device_of_class else NONE),
            "dtype": chosen if chosen is not None else NONE,
            "enabled": enabled if enabled is not None else TRUE,
            "cache": cache if cache is not None else TRUE,
            "open": const(open_ended(args)),
            "dtype chosen": const(looked_up(branch, dtype, chosen)),
        }
        branch.owned.discard(("heap", obj))
        outcome.append((branch, obj))
    return outcome


def region_from(it: Interpreter, state: State, obj: Value, at: Any) -> Region | str:
    """The region that an enabled autocast object opens."""
    attributes = state.heap.get(obj, {})
    if attributes.get("open") == TRUE:
        return UNSURE
    device_value, dtype_value = attributes.get("device", NONE), attributes.get("dtype", NONE)
    device = (
        device_value.value.partition(":")[0]
        if isinstance(device_value, Const) and isinstance(device_value.value, str)
        else ""
    )
    where = it.where(state, at)
    cache = attributes.get("cache") != FALSE
    if dtype_value == NONE:
        return Region(device, "bfloat16" if device == "cpu" else "float16", cache, True, where)
    dtype = dtype_in(state, dtype_value)
    setting = dtype_value.text if isinstance(dtype_value, Sym) and dtype is None else ""
    if setting and any(ASKS_DTYPE.search(module.text) for module in it.global_frames):
        setting = ""
    own = attributes.get("dtype chosen", NONE)
    asked = own.value if isinstance(own, Const) and isinstance(own.value, tuple) else ()
    decided = asked or chosen(state) or chosen_half(it, state, HALVES.get(dtype or "", "-"))
    return Region(device, dtype or "", cache, False, where, decided, setting)


def looked_up(state: State, dtype: Value | None, found: Value | None) -> tuple[str, ...]:
    """By which word this path has looked up a dtype in a table, and found this one, as a condition."""
    if not isinstance(dtype, Sym):
        return ()
    for cond, option in dtype.options:
        if option == found and isinstance(cond, Cond) and cond.kind == "eq" and cond.positive:
            return (cond.text,)
    if dtype.key[0] != "index" or not isinstance(dtype.key[2], Sym):
        return ()
    fact = state.facts.get(dtype.key[2])
    return (f"{dtype.key[2].text} == {fact.eq!r}",) if fact is not None and isinstance(fact.eq, Const) else ()


def chosen(state: State) -> tuple[str, ...]:
    """What this path has decided about a dtype, in words: the configuration that a region belongs to."""
    return tuple(
        f"{sym.text} == {fact.eq!r}"
        for sym, fact in state.facts.items()
        if isinstance(fact.eq, Const) and isinstance(fact.eq.value, str) and DTYPE_NAME.search(sym.text)
    )[:1]


Leave = Callable[[State], None]


STACK = External("contextlib.ExitStack")


def enter(
    it: Interpreter, state: State, context: Value, instr: p.With | p.Call
) -> Iterator[tuple[State, Value, Leave]]:
    """Enters a context manager: the paths inside it, what ``as`` binds, and how each path leaves it."""
    if isinstance(context, Obj) and context.cls == STACK:
        state.attributes(context)["entered"] = TRUE
        yield state, context, leave_stack(it, context, state.regions, instr.at)
        return
    if isinstance(context, Obj) and it.kind(state, context) == "autocast":
        for branch, leave in enter_autocast(it, state, context, instr.at):
            yield branch, context, leave
        return
    if no_gradient(context):
        yield state, context, leave_detached(it, state)
        return
    if isinstance(context, Obj) and context.cls == External("scale_loss"):
        yield state, state.heap[context]["loss"], lambda _: None
        return
    if isinstance(context, Sym):
        chosen = choices(it, state, context)
        if all(isinstance(value, Obj) for _, value in chosen):  # one of several, by a name that is not known
            for branch, value in chosen:
                assert value is not None
                yield from enter(it, branch, value, instr)
            return
    if isinstance(context, Sym) and AUTOCAST_NAME.search(context.text):
        saved = state.regions
        state.regions = (*saved, UNSURE)
        yield state, context, restore_regions(saved)
        return
    if isinstance(context, External):  # a class without a call: nothing is known of what it makes
        yield state, NONE, lambda _: None
        return
    yield state, context, lambda _: None


NO_GRAD = frozenset({"torch.no_grad", "torch.inference_mode"})


def no_gradient(context: Value) -> bool:
    """Whether a context manager or decorator keeps gradients out."""
    made = context.cls if isinstance(context, Obj) else context
    return isinstance(made, External) and made.name in NO_GRAD


def make_no_grad(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    return one(state, Obj((instr.at, "no gradient"), callee))


def leave_detached(it: Interpreter, state: State) -> Leave:
    """What was assigned where no gradient flows is detached from there on."""
    before = dict(state.frames.get(state.frame, {}))

    def leave(after: State) -> None:
        for slot, value in list(after.frames.get(after.frame, {}).items()):
            if isinstance(slot, str) and before.get(slot) is not value and detached(it, value) is not value:
                after.scope(after.frame)[slot] = detached(it, value)

    return leave


def restore_regions(saved: tuple[Any, ...]) -> Leave:
    def leave(state: State) -> None:
        state.regions = saved

    return leave


def leave_stack(it: Interpreter, stack: Obj, saved: tuple[Any, ...], at: Any) -> Leave:
    """Leaves all regions that were entered through a stack."""

    def leave(state: State) -> None:
        for region in reversed(state.regions[len(saved) :]):
            it.emit(state, Autocast(it.where(state, at), when(state), known_region(region), region is not None, False))
        state.regions = saved
        state.attributes(stack)["entered"] = FALSE

    return leave


def enter_context(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """``stack.enter_context(autocast(...))``: the region holds to the end of the stack's own ``with``."""
    context = argument(args, 0, "cm")
    known = isinstance(context, Obj) and (it.kind(state, context) == "autocast" or context.cls == STACK)
    if not known or context is None or state.heap.get(receiver, {}).get("entered") != TRUE:
        return call_unknown(it, state, instr, Method(receiver, name), args)
    return [(branch, target) for branch, target, _ in enter(it, state, context, instr)]


def exit_stack(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    obj = Obj((instr.at, "stack"), STACK)
    state.allocate(obj, {})
    return one(state, obj)


def enter_autocast(it: Interpreter, state: State, obj: Value, at: Any) -> Iterator[tuple[State, Leave]]:
    saved = state.regions
    enabled = state.heap.get(obj, {}).get("enabled", TRUE)
    for on, branch in it.fork(state, enabled):
        region = region_from(it, branch, obj, at) if on else None
        if isinstance(region, Region) and region.dtype in ("float32", "float64"):
            region = None  # autocast to fp32 is no autocast
        branch.regions = (*saved, region)
        known = known_region(region)
        if known is not None:
            it.coverage.recipe.regions.add(short(known.dtype) or "half")
        it.emit(branch, Autocast(it.where(branch, at), when(branch), known, on, True))

        def leave(one: State, known: Region | None = known, on: bool = on) -> None:
            one.regions = saved
            it.emit(one, Autocast(it.where(one, at), when(one), known, on, False))

        yield branch, leave


def enter_decorators(it: Interpreter, state: State, func: Func) -> Iterator[tuple[State, Leave]]:
    """The regions that a function's decorators put around its body."""
    for value in it.decorator_values.get(func.function, ()):
        if isinstance(value, Obj) and it.kind(state, value) == "autocast":
            yield from enter_autocast(it, state, value, func.function.node)
            return
    yield state, lambda _: None


def returned_by(it: Interpreter, func: Func, value: Value) -> Value:
    """What a function gives back: detached, where one of its decorators keeps gradients out."""
    kept_out = any(map(no_gradient, it.decorator_values.get(func.function, ())))
    return detached(it, value) if kept_out else value


def nullcontext(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    return one(state, Obj((instr.at, "null"), External("contextlib.nullcontext")))


def scale_loss(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """apex: ``with amp.scale_loss(loss, optimizer) as scaled_loss``: it unscales when the block is left."""
    obj = Obj(it.here(state, instr.at), External("scale_loss"))
    state.allocate(obj, {"loss": it.site(state, (instr.at, "scaled"), "scaled_loss", Flow(UNSURE), ())})
    return one(state, obj)


def amp_initialize(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = tuple(value for keyword, value in args if keyword in (None, "models", "optimizers"))[:2]
    return one(state, Tup(values) if len(values) > 1 else (values[0] if values else NONE))
