"""Copies of models and tensors: made, averaged into, written over.

Knows which weights a copy has and which it does not share, and how an exponential average is spelled. Not whether it is one that matters.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from precisionlint.events import Copied, Weights, WeightsTake, Written
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.checkpoints import half_of
from precisionlint.source.effects.common import Outcome, argument, is_model, one, receiver_text, result, when
from precisionlint.source.effects.unread import call_unknown
from precisionlint.source.evaluate import evaluate
from precisionlint.source.objects import (
    PARAMETER,
    dtype_of,
    is_container,
    model_weights,
    name_of,
    own_root,
    weight_path,
)
from precisionlint.source.state import State
from precisionlint.source.values import FALSE, TRUE, Class, Const, External, Many, Method, Obj, Sym, Tensors, Value
from precisionlint.subjects.names import spelled

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args

DECAY = regex(r"decay|momentum|beta|ema|alpha|tau|\bm\b|keep", re.I)
"""What the number is called by which an average keeps its old value."""
AVERAGING = frozenset({"update_parameters", "update", "step", "ema_step"})
"""Methods by which classes of averages take up new weights."""


def deep_copy(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``copy.deepcopy(model)``: a model with weights of its own, in the same dtype."""
    model = argument(args, 0, "x")
    if model is None or not is_model(it, state, model):
        return call_unknown(it, state, instr, callee, args)
    cls = model.cls if isinstance(model, Obj) and isinstance(model.cls, Class) else External("torch.nn.copied.Model")
    copied = Obj(it.here(state, instr.at), cls)
    state.allocate(copied, {})
    tell_copied(it, state, instr, model_weights(it, model), copied)
    return one(state, copied)


def make_average(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``AveragedModel(model)``, ``EMAModel(model.parameters())``: a copy that its own methods average into."""
    average = Obj(it.here(state, instr.at), callee)
    state.allocate(average, {})
    given = argument(args, 0, "model", "parameters")
    weights = given.weights if isinstance(given, Tensors) else None
    if given is not None and is_model(it, state, given):
        weights = model_weights(it, given)
    tell_copied(it, state, instr, weights, average)
    return one(state, average)


def tell_copied(it: Interpreter, state: State, instr: p.Call, weights: Weights | None, copied: Obj) -> None:
    if weights is not None:
        copy = frozenset({weight_path(it, copied)})
        it.emit(state, Copied(it.where(state, instr.at), when(state), weights, copy))


def average_method(it: Interpreter, state: State, instr: p.Call, average: Value, name: str, args: Args) -> Outcome:
    """A method by which an average takes up new weights."""
    weights = frozenset({weight_path(it, average)})
    it.emit(
        state, Written(it.where(state, instr.at), when(state), weights, "average", f"{receiver_text(instr)}.{name}")
    )
    return one(state, result(it, state, instr, Method(average, name), ()))


def is_average(it: Interpreter, value: Value) -> bool:
    return isinstance(value, Obj) and isinstance(value.cls, External) and value.cls.name in it.apis.averages


def write_parameters(
    it: Interpreter, state: State, instr: p.Call, tensors: Tensors, name: str, value: Value | None
) -> None:
    """``p.mul_(decay)``, ``p.lerp_(q, 1 - decay)``, ``p.sub_((1 - decay) * (p - q))``: an average; ``p.copy_(…)``: other weights."""
    if tensors.weights is None:
        return
    api = f"{receiver_text(instr)}.{name}"
    if name == "lerp_" or (name == "mul_" and keeps(value)):
        tell_written(it, state, instr.at, tensors.weights, "average", api, value if name == "mul_" else None)
    elif name == "sub_":
        if is_blend(tensors.weights, value):
            tell_written(it, state, instr.at, tensors.weights, "average", api, None)
    elif name in ("copy_", "set_"):
        written_with(it, state, instr.at, tensors.weights, value, api)


def written_with(it: Interpreter, state: State, at: Any, weights: Weights, value: Value | None, api: str) -> None:
    """Weights get a value: an average where they are part of it themselves, else a copy."""
    tell_written(it, state, at, weights, "average" if is_blend(weights, value) else "copy", api, None)


def is_blend(weights: Weights, value: Value | None) -> bool:
    """Whether a value is made of these weights and of others."""
    return isinstance(value, Tensors) and value.weights is not None and value.weights > weights


def blend_copy(it: Interpreter, state: State, instr: p.Call, receiver: Sym, name: str, args: Args) -> bool:
    """The same methods of a copy of parameters that was cast to half before. Says whether it is one of them."""
    half, value = half_of(it, state, receiver), argument(args, 0)
    if half is None or copy_and_dtype(state, receiver)[0] is None:
        return False
    if not (
        name == "lerp_" or (name == "mul_" and keeps(value)) or (name == "sub_" and holds_difference(receiver, value))
    ):
        return False
    decay = float(value.value) if isinstance(value, Const) and isinstance(value.value, float) else None
    api = f"{receiver_text(instr)}.{name}"
    it.emit(state, Written(it.where(state, instr.at), when(state), None, "average", api, half, decay))
    return True


def holds_difference(tensor: Value, value: Value | None) -> bool:
    """``factor * (tensor - other)``."""
    if not isinstance(value, Sym) or value.key[:2] != ("op", "*"):
        return False
    return any(isinstance(side, Sym) and side.key[:3] == ("op", "-", tensor) for side in value.key[2:4])


def tell_written(
    it: Interpreter, state: State, at: Any, weights: Weights, how: Any, api: str, decay: Value | None
) -> None:
    number = float(decay.value) if isinstance(decay, Const) and isinstance(decay.value, float) else None
    it.emit(state, Written(it.where(state, at), when(state), weights, how, api, None, number))


def keeps(value: Value | None) -> bool:
    """Whether a factor is one by which an average keeps most of its old value."""
    if isinstance(value, Const):
        return isinstance(value.value, float) and 0.5 < value.value < 1.0
    return isinstance(value, Sym) and bool(DECAY.search(value.text))


def load_state_dict(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """``model.load_state_dict(…)`` writes all weights of a model."""
    if is_model(it, state, receiver):
        weights = model_weights(it, receiver)
        if weights is not None:
            tell_written(it, state, instr.at, weights, "copy", f"{receiver_text(instr)}.load_state_dict", None)
    return call_unknown(it, state, instr, Method(receiver, name), args)


# -- averages that are spelled out: x = decay * x + (1 - decay) * y


def blended(it: Interpreter, state: State, instr: p.Assign) -> bool:
    """``p *= decay``: parameters keep most of their old value, and others are added next. Says whether parameters are changed here."""
    old = evaluate(it, state, instr.target)
    if not isinstance(old, Tensors) or old.kind != "param" or old.weights is None:
        return False
    factor = evaluate(it, state, instr.value.right) if isinstance(instr.value, p.Binary) else None
    if instr.op == "*" and keeps(factor):
        tell_written(it, state, instr.at, old.weights, "average", f"{name_of(instr.target)} *=", factor)
    return True


def averaged(it: Interpreter, state: State, instr: p.Assign) -> None:
    """An assignment that blends a tensor into another one, told where both are known to be half."""
    target, value = instr.target, instr.value
    if not isinstance(value, p.Binary) or value.op != "+" or not isinstance(target, (p.Index, p.Attr, p.Name)):
        return
    for own, other in ((value.left, value.right), (value.right, value.left)):
        if not (is_product(own) and is_product(other) and holds(own, target)):
            continue
        old, new = half_of(it, state, evaluate(it, state, target)), half_of(it, state, evaluate(it, state, other))
        if old is not None and old == new:
            factor = evaluate(it, state, own.left if same(own.right, target) else own.right)  # type: ignore[union-attr]
            decay = float(factor.value) if isinstance(factor, Const) and isinstance(factor.value, float) else None
            where = it.where(state, instr.at)
            it.emit(state, Written(where, when(state), None, "average", "a weighted sum", old, decay))
        return


def is_product(expr: p.Expr) -> bool:
    return isinstance(expr, p.Binary) and expr.op == "*"


def holds(product: p.Expr, wanted: p.Expr) -> bool:
    return isinstance(product, p.Binary) and (same(product.left, wanted) or same(product.right, wanted))


def same(left: p.Expr, right: p.Expr) -> bool:
    """Whether two expressions are spelled alike."""
    match left, right:
        case p.Name(), p.Name():
            return left.slot == right.slot
        case p.Attr(), p.Attr():
            return left.name == right.name and same(left.obj, right.obj)
        case p.Index(), p.Index():
            return same(left.obj, right.obj) and same(left.key, right.key)
        case p.Const(), p.Const():
            return bool(left.value == right.value)
    return False


def copied_from(it: Interpreter, state: State, value: Value) -> Weights | None:
    """The weights of which these parameters are fp32 copies that the program made itself; None where they are not, or not all."""
    found: Weights = frozenset()
    items = [value.element] if isinstance(value, Many) else list(state.heap.get(value, {}).values())
    if isinstance(value, Obj) and not is_container(value):
        return None
    for item in items:
        source, dtype = copy_and_dtype(state, item)
        if source is None or dtype != "float32":
            return None
        found |= source
    return found or None


def copy_and_dtype(state: State, value: Value) -> tuple[Weights | None, str | None]:
    """The weights that a tensor is a copy of, and the dtype of the copy, as far as they are known."""
    cast = value.key[2] if isinstance(value, Sym) and value.key[0] == "cast" else None
    base = value.key[1] if isinstance(value, Sym) and cast is not None else value
    own = state.heap.get(base, {}) if isinstance(base, Sym) else {}
    source = own.get("copy of")
    return source.weights if isinstance(source, Tensors) else None, cast or dtype_of(own.get("dtype"))


def make_parameter(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``nn.Parameter(copy)``: the same tensor under another class. One that is made in half is a weight of its own."""
    data = argument(args, 0, "data")
    if data is not None and copy_and_dtype(state, data)[0] is not None:
        return one(state, data)
    outcome = call_unknown(it, state, instr, callee, args)
    dtype = made_in(instr.at, data)
    if dtype is None or argument(args, 1, "requires_grad") == FALSE:
        return outcome
    for after, value in outcome:
        own_weight(it, after, instr.at, value, dtype, f"a parameter made in {dtype}")
    return outcome


def own_weight(it: Interpreter, state: State, at: Any, tensor: Value, dtype: str, how: str) -> None:
    """A tensor that is trained by itself, in half."""
    root = Obj(it.here(state, at), External("torch.nn.Parameter"))
    state.attributes(tensor)[PARAMETER] = root
    weights = frozenset({weight_path(it, root)})
    it.emit(state, WeightsTake(it.where(state, at), when(state), weights, dtype, how))


def make_tensor(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``torch.zeros(…, dtype=torch.bfloat16)``: a tensor that is half; with ``requires_grad=True`` one that is trained."""
    outcome = call_unknown(it, state, instr, callee, args)
    dtype = dtype_of(argument(args, len(args), "dtype"))
    if dtype not in ("float16", "bfloat16"):
        return outcome
    for after, value in outcome:
        after.attributes(value)["dtype"] = External(f"torch.{dtype}")
        if argument(args, len(args), "requires_grad") == TRUE:
            own_weight(it, after, instr.at, value, dtype, f"a trained tensor made in {dtype}")
    return outcome


def requires_grad(it: Interpreter, state: State, at: Any, tensor: Sym) -> None:
    """``tensor.requires_grad_()``: what is half then is trained in it, but where an object's setting says so: that chose it."""
    dtype, cast = half_of(it, state, tensor), it.cast_at.get(tensor)
    if dtype is not None and own_root(state, tensor) is None and not (cast is not None and is_set(cast[0].node)):
        own_weight(it, state, at, tensor, dtype, f"a tensor in {dtype} is to be trained")


def is_set(call: Any) -> bool:
    """Whether a cast is to the dtype that an object keeps (``.to(dtype=self.master_dtype)``)."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(call, ast.Call) else []
    return any(isinstance(each, ast.Attribute) and "dtype" in each.attr for each in given)


def made_in(call: Any, data: Value | None) -> str | None:
    """The half dtype in which a parameter is made, by a cast or by the dtype that the call of its tensor is given."""
    if isinstance(data, Sym) and data.key[0] == "cast":
        return data.key[2] if data.key[2] in ("float16", "bfloat16") else None
    named_data = (k.value for k in call.keywords if k.arg == "data") if isinstance(call, ast.Call) else iter(())
    given = call.args[0] if isinstance(call, ast.Call) and call.args else next(named_data, None)
    asked = next((k.value for k in given.keywords if k.arg == "dtype"), None) if isinstance(given, ast.Call) else None
    named = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "torch.half": "float16"}
    return named.get(spelled(asked)) if asked is not None else None


def cast_value(it: Interpreter, value: Sym, dtype: str) -> Value:
    """A tensor in another dtype: a value of its own, named as before."""
    base = value.key[1] if value.key[0] == "cast" else value
    return it.derived(("cast", base, dtype), value.text, (base,), value.flow)
