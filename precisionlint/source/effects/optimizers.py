"""Optimizers: made over weights, stepped, set to zero."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from precisionlint.events import Named, Owns, Step, ZeroGrad
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.checkpoints import handed_over
from precisionlint.source.effects.common import (
    ANY_OPTIMIZER,
    FINITE,
    Outcome,
    argument,
    one,
    open_ended,
    optimizer_weights,
    receiver_text,
    when,
)
from precisionlint.source.effects.copies import copied_from
from precisionlint.source.effects.engines import engine_of, stepping
from precisionlint.source.effects.scaling import make_scaler
from precisionlint.source.effects.trainers import equip
from precisionlint.source.effects.weights import born
from precisionlint.source.evaluate import class_attribute, elements
from precisionlint.source.objects import named, weights_of
from precisionlint.source.state import State
from precisionlint.source.values import NONE, Class, Const, External, Func, Obj, Sym, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


HANDED_ON = regex(r"\.step\(|scal(?:e|ing)", re.I)
"""What the step of an optimizer holds that wraps another, or undoes the loss scale by itself."""
IN_PLACE = regex(r"\b(\w+)(?:\.data)?(?:\.(?:add_|sub_|addcdiv_)\(| [-+]= )")
PART_OF = regex(
    r"(?m)^\s*(\w+)(?: *:[^=\n]+)? = (\w+)(?:\.data|\[(?!['\"])[^\n]*\]|\.(?:view|flatten|narrow|detach)\([^\n]*\))*$"
)
"""A variable that is another one, an element or a slice of it: what is added to it is added to that."""
HAS_GRADIENT = regex(r"\b(\w+)(?:\[[^\]\n]*\])?\.grad\b")
CAREFUL = regex(
    r"float\(|float32|fp32|double|master|kahan|compensat|stochastic|round|residual|shift|half|b?f(?:loat)?16|copy_\(|\.to\(",
    re.I,
)
"""What the class of an optimizer may hold that keeps what half weights lose."""


def make_optimizer(it: Interpreter, state: State, instr: p.Call, cls: str, args: Args, obj: Obj) -> Outcome:
    params = argument(args, 0, "params", "optimizer_grouped_parameters", "parameters") or NONE
    weights = weights_of(it, state, params)
    lr = rate_of(it, state, params, rate(argument(args, 1, "lr")))
    settings = tuple((k, v.value) for k, v in args if k not in (None, "*", "**") and isinstance(v, Const))
    eps = next((v for k, v in args if k == "eps"), None)
    if isinstance(eps, Sym):  # an option: its default, where it has one
        settings += (("eps", eps.default.value if isinstance(eps.default, Const) else None),)
    if open_ended(args):
        settings += (("eps", None), ("fused", None))
    state.allocate(obj, {"params": params})
    it.coverage.optimizers.setdefault(instr.at, it.where(state, instr.at))
    it.coverage.recipe.optimizers.add(cls.rpartition(".")[2])
    plain = cls in it.apis.optimizers or cls == ANY_OPTIMIZER or adds_in_place(it, state, obj.cls)
    masters = False if plain else None
    it.emit(
        state,
        Owns(
            it.where(state, instr.at),
            when(state),
            Named(obj, instr.name or it.names.get(obj.site, "")),
            weights,
            cls,
            lr,
            masters,
            settings,
            copied_from(it, state, params) if weights is None else None,
            any(isinstance(path[0], Sym) and path[0].key[0] == "param" for path in weights or ()),
        ),
    )
    return one(state, obj)


def rate(value: Value | None) -> float | None:
    """A learning rate as far as it is known: a number, or the default of an option."""
    if isinstance(value, Const) and isinstance(value.value, (int, float)):
        return value.value
    if isinstance(value, Sym) and isinstance(value.default, Const) and isinstance(value.default.value, float):
        return value.default.value
    return None


def rate_of(it: Interpreter, state: State, params: Value, lr: float | None) -> float | None:
    """The smallest rate at which an optimizer updates any of its groups, ``lr`` being that of those that give none; None where that of
    one is not known."""
    groups = [state.heap.get(each, {}) for each in elements(it, state, params) or () if isinstance(each, Obj)]
    rates = [rate(group["lr"]) if "lr" in group else lr for group in groups if "params" in group]
    known = [each for each in rates if each is not None]
    if not rates or len(known) < len(rates):
        return None if rates else lr
    return min((each for each in known if each), default=0)


def made(it: Interpreter, state: State, instr: p.Call, obj: Obj, args: Args, again: bool) -> Outcome | None:
    """An object of a project class that is a scaler or an optimizer by inheritance. ``again``: one was made here before."""
    assert isinstance(obj.cls, Class)
    kind = it.external_base(state, obj.cls)
    if any(isinstance(base, External) for base in it.mro(state, obj.cls)):  # which may read what it is given
        handed_over(it, state, instr, obj.cls.cls.name, [value for _, value in args])
    if kind == "module":
        born(it, state, instr, obj, again)
    if kind == "scaler":
        return make_scaler(it, state, instr, f"{obj.cls.module.name}.{obj.cls.cls.name}", args, obj)
    if (
        kind == "owner"
        and engine_of(it, state, obj) == "transformers"
        and class_attribute(it, state, obj.cls, "__init__") is None
    ):
        equip(it, state, instr, obj, args)
        return one(state, obj)
    if kind == "optimizer":
        return make_optimizer(it, state, instr, by_its_name(it, state, obj.cls), args, obj)
    return None


def by_its_name(it: Interpreter, state: State, cls: Class) -> str:
    """What an optimizer of the project's own is: the one that it inherits all of its making and stepping from, else itself."""
    if all(class_attribute(it, state, cls, method) is None for method in ("__init__", "step")):
        bases = (base.name for base in it.mro(state, cls) if isinstance(base, External))
        inherited = next((name for name in bases if name in it.apis.optimizers), None)
        if inherited is not None:
            return inherited
    return f"{cls.module.name}.{cls.cls.name}"


def adds_in_place(it: Interpreter, state: State, cls: Value | str) -> bool:
    """Whether an optimizer of the project's own adds its updates to the very weights that it is given, and says nothing of precision."""
    if not isinstance(cls, Class) or not isinstance(class_attribute(it, state, cls, "step"), Func):
        return False
    own = [each for each in it.mro(state, cls) if isinstance(each, Class)]
    source = "\n".join(each.module.source_of(method) for each in own for method in each.cls.methods)
    if HANDED_ON.search(source) or CAREFUL.search(source):
        return False
    parts = dict(PART_OF.findall(source))
    return not {origin(name, parts) for name in IN_PLACE.findall(source)}.isdisjoint(
        origin(name, parts) for name in HAS_GRADIENT.findall(source)
    )


def origin(name: str, parts: dict[str, str]) -> str:
    """The variable that one is a part of, over any others."""
    seen = {name}
    while (whole := parts.get(name, name)) not in seen:
        seen.add(whole)
        name = whole
    return name


def optimizer_method(it: Interpreter, state: State, instr: p.Call, optimizer: Value, name: str, args: Args) -> Outcome:
    it.come_across(it.coverage.optimizers, state, optimizer, instr.at)
    me = named(optimizer, receiver_text(instr))
    if name == "zero_grad":
        it.emit(state, ZeroGrad(it.where(state, instr.at), when(state), optimizer_weights(it, state, optimizer), me))
        return one(state, NONE)
    if name == "state_dict":
        return one(state, it.derived(("state_dict", optimizer), f"{receiver_text(instr)}.state_dict()", ()))
    states = [state]
    closure = argument(args, 0, "closure")
    if isinstance(closure, Func):
        states = [after for after, _ in it.call_function(closure, (), instr, state)]
    return [outcome for before in states for outcome in stepped(it, before, instr, optimizer, NONE)]


def stepped(it: Interpreter, state: State, instr: p.Call, optimizer: Value, value: Value) -> Outcome:
    """An optimizer has updated its weights, and gives this."""
    outcome: Outcome = []
    for after, engine in stepping(it, state, optimizer):
        guarded = any(FINITE.search(label) for label in when(after))
        where, loop = it.where(after, instr.at), it.innermost_loop(after)
        me = named(optimizer, receiver_text(instr))
        it.emit(after, Step(where, when(after), me, None, guarded, loop, engine))
        outcome.append((after, value))
    return outcome


def updates(it: Interpreter, state: State, receiver: Value, method: Func) -> bool:
    """Whether a method is the step of an optimizer of the project's own that changes the weights itself: it hands the step to no other
    optimizer, and knows of no scale."""
    if method.function.name != "step" or not isinstance(receiver, Obj) or it.kind(state, receiver) != "optimizer":
        return False
    source = method.module.source_of(method.function)
    return ".grad" in source and not HANDED_ON.search(source)
