"""Gradients as they are touched: clipped, read, multiplied, and the settings that are assigned like attributes."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint.events import Copied, Grads, Known, Named, Setting, WeightsTake, ZeroGrad
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    CASTS,
    Outcome,
    argument,
    dtype_in,
    is_model,
    one,
    one_of_many,
    receiver_text,
    result,
    when,
)
from precisionlint.source.effects.copies import copy_and_dtype, requires_grad, write_parameters, written_with
from precisionlint.source.effects.unread import call_unknown, emit_clip, goes_out, read_grads
from precisionlint.source.evaluate import element_of
from precisionlint.source.objects import COPY, PARAMETER, dtype_of, model_weights, name_of, weight_path, weights_of
from precisionlint.source.operators import divisor
from precisionlint.source.parsing import walk
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    TRUE,
    UNSURE,
    Const,
    External,
    Flow,
    Many,
    Method,
    Obj,
    Sym,
    Tensors,
    Tup,
    Value,
    flow_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.module import ProjectModule
    from precisionlint.source.records import Args


NORM_CALLS = frozenset(
    {"torch.norm", "torch.linalg.vector_norm", "torch.linalg.norm", "torch._foreach_norm", "torch.stack", "torch.cat"}
)


STATISTICS = frozenset({"mean", "std", "var", "max", "min", "amax", "median", "quantile"})
"""What is taken of gradients to be shown, and as often for arithmetic with them, where the scale is in both."""


def attribute_set(it: Interpreter, state: State, obj: Value, target: p.Attr, value: Value, at: Any) -> bool:
    """``obj.name = value`` where that is an event of its own; False where it only stores an attribute."""
    replaced(it, state, obj, target.name, value, at)
    if isinstance(obj, Sym) and target.name == "requires_grad" and value == TRUE:
        requires_grad(it, state, at, obj)
    if PARAMETER in state.heap.get(obj, {}) and target.name == "requires_grad":
        obj = Tensors("param", weights_of(it, state, obj))
    if isinstance(obj, Sym) and target.name == "grad":
        part = obj.key[0] == "index" or one_of_many(target.obj)
        obj = Tensors("param", None if obj.key[0] == "site" else model_weights(it, obj), part)
    if isinstance(obj, Tensors):
        if target.name == "grad" and obj.kind == "param":
            if value == NONE:
                it.emit(state, ZeroGrad(it.where(state, at), when(state), None if obj.part else obj.weights, None))
            elif isinstance(value, Tensors):
                scale_grads(it, state, at, obj, flow_of(value), "p.grad =", value.divided)
        elif target.name == "data" and obj.kind == "grad" and isinstance(value, Tensors):
            scale_grads(it, state, at, obj, flow_of(value), "p.grad.data =", value.divided)
        elif target.name == "data" and obj.weights is not None:
            dtype = dtype_of(state.heap.get(value, {}).get("dtype"))
            if dtype is None:
                written_with(it, state, at, obj.weights, value, "p.data =")
            else:
                take = WeightsTake(it.where(state, at), when(state), obj.weights, dtype, f"p.data = p.to({dtype})")
                it.emit(state, take)
        elif target.name == "requires_grad" and value == FALSE and obj.weights is not None:
            it.emit(
                state, WeightsTake(it.where(state, at), when(state), obj.weights, None, "requires_grad = False", False)
            )
        return True
    if isinstance(obj, External):
        setting(it, state, f"{obj.name}.{target.name}", value, at)
        return True
    if isinstance(obj, Sym) and target.name == "data" and obj.key[0] == "attr" and obj.key[2] in ("weight", "bias"):
        dtype = copy_and_dtype(state, value)[1]
        if dtype is not None:
            weights, how = frozenset({weight_path(it, obj)}), f"{name_of(target)} = … in {dtype}"
            it.emit(state, WeightsTake(it.where(state, at), when(state), weights, dtype, how))
            return True
    part_cast(it, state, obj, target, value, at)
    return False


def part_cast(it: Interpreter, state: State, obj: Value, target: p.Attr, value: Value, at: Any) -> None:
    """``model.head = model.head.to(dtype)``: a part of a model that goes by no name of one. What a module casts of itself is a buffer."""
    if not (isinstance(value, Sym) and value.key[0] == "cast" and isinstance(obj, Sym) and is_model(it, state, obj)):
        return
    part, dtype = value.key[1:3]
    if isinstance(part, Sym) and part.key[:3] == ("attr", obj, target.name):
        weights, how = frozenset({weight_path(it, part)}), f"{name_of(target)} is cast to {dtype}"
        it.emit(state, WeightsTake(it.where(state, at), when(state), weights, dtype, how))


def replaced(it: Interpreter, state: State, obj: Value, name: str, value: Value, at: Any) -> None:
    """A tensor that is a weight of its own gets other data, or a module another parameter in its place: half no longer, unless that is."""
    own = state.heap.get(obj, {})
    data = name == "data" and (PARAMETER in own or COPY in own)
    old = obj if data else own.get(name)
    if old is None or old == value or not (data or PARAMETER in state.heap.get(old, {})):
        return
    dtype = copy_and_dtype(state, value)[1] or "unknown"
    if data and dtype in ("float16", "bfloat16"):
        return
    how = f"other data in {dtype}" if data else "another parameter in its place"
    weights = weights_of(it, state, old)
    if weights is not None:
        it.emit(state, WeightsTake(it.where(state, at), when(state), weights, dtype, how))
    if COPY in own and data:
        state.attributes(obj)["dtype"] = External(f"torch.{dtype}")


def scale_grads(
    it: Interpreter, state: State, at: Any, grads: Tensors, flow: Flow, api: str, divided: Named | None = None
) -> None:
    """Gradients times something: that is unscaling by hand where the something is 1/scale, or the number that the loss was multiplied by."""
    factor = flow.factor if flow.factor else "other"
    scaler = flow.scaled if isinstance(flow.scaled, Named) else None
    part = grads.part and not is_alone(it, state, at)
    it.emit(
        state,
        Grads(it.where(state, at), when(state), grads.weights, "mul", api, factor, scaler, None, part, divided=divided),
    )


def is_alone(it: Interpreter, state: State, at: Any) -> bool:
    """Whether the list that a gradient's parameter is taken from holds no other: something stores there what a function returns as ``[one]``."""
    lists = [node.value for node in walk(at) if isinstance(node, ast.Subscript)] if isinstance(at, ast.AST) else []
    names = {each.attr for each in lists if isinstance(each, ast.Attribute)}
    if not names:
        return False
    module = it.module_of(state)
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and any(isinstance(target, ast.Attribute) and target.attr in names for target in node.targets)
        and returns_one(it, module, node.value.func.id)
        for node in walk(module.tree)
    )


def returns_one(it: Interpreter, module: ProjectModule, name: str) -> bool:
    """Whether a function of the project returns a list of one."""
    tree, own = module.tree, name
    for node in walk(module.tree):
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                if name == (each.asname or each.name):
                    path = it.project.find(node.module or "", node.level, module)
                    other = it.project.load(path) if path is not None else None
                    if other is not None:
                        tree, own = other.tree, each.name
    made = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == own]
    given = [node.value for each in made for node in walk(each) if isinstance(node, ast.Return)]
    return bool(given) and all(
        isinstance(value, ast.List) and len(value.elts) == 1 and not isinstance(value.elts[0], ast.Starred)
        for value in given
    )


def setting(it: Interpreter, state: State, name: str, value: Value, at: Any) -> None:
    it.emit(
        state, Setting(it.where(state, at), when(state), name, Known(value.value) if isinstance(value, Const) else None)
    )


def clip(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> Outcome:
    grads_at, grads_name, limit_at, limit_name = it.apis.clips[name]
    grads = argument(args, grads_at, grads_name)
    limit = argument(args, limit_at, limit_name)
    emit_clip(it, state, instr, grads, limit, name.rpartition(".")[2])
    return one(state, result(it, state, instr, External(name), ()))


def clip_of_model(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """``model.clip_grad_norm_(max_norm)``, which FSDP has because no rank holds all gradients: it unscales none."""
    if not is_model(it, state, receiver):
        return call_unknown(it, state, instr, Method(receiver, name), args)
    grads = Tensors("params", model_weights(it, receiver))
    emit_clip(it, state, instr, grads, argument(args, 0, "max_norm"), name)
    return one(state, result(it, state, instr, Method(receiver, name), args))


def norm_of(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    value = argument(args, 0, "tensors")
    read_grads(it, state, instr, value if value is not None else NONE, callee.name.rpartition(".")[2])
    return one(state, result(it, state, instr, callee, args))


def touch_grads(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """torch functions over gradients: norms read them, tests for finiteness do not count, foreach products may unscale."""
    last = callee.name.rpartition(".")[2]
    squares = [v for _, v in args[:1] if isinstance(v, Tensors) and v.kind == "square"]
    if squares and last in ("sum", "mean"):
        read_grads(it, state, instr, replace(squares[0], kind="grad"), f"a {last} of squares")
        return one(state, result(it, state, instr, callee, ()))
    found = [
        v
        for _, v in args
        for r in (v, *state.heap.get(v, {}).values())
        if isinstance(r, Tensors) and r.kind == "grad"
        for v in (r,)
    ]
    if not found:
        return call_unknown(it, state, instr, callee, args)
    grads = found[0]
    if last in ("_foreach_mul_", "_foreach_div_"):
        factor = argument(args, 1)
        flow = flow_of(factor) if factor is not None else PLAIN
        inverse = {"scale": "1/scale", "1/scale": "scale"}
        wanted = inverse.get(flow.factor, flow.factor) if last == "_foreach_div_" else flow.factor
        divided = divisor("/" if last == "_foreach_div_" else "*", factor) if factor is not None else None
        scale_grads(it, state, instr.at, grads, replace(flow, factor=wanted), f"torch.{last}", divided)
    elif last == "_amp_foreach_non_finite_check_and_unscale_":
        scale_grads(it, state, instr.at, grads, Flow(UNSURE, None, "1/scale"), f"torch.{last}")
    elif last in ("norm", "vector_norm", "_foreach_norm", "histc", "histogram") or (
        last in ("var", "std") and goes_out(it, state, instr.at)
    ):
        read_grads(it, state, instr, grads, f"torch.{last}")
    elif last in ("stack", "cat", "zeros_like", "empty_like", "clone"):
        return one(state, grads if last in ("stack", "cat", "clone") else result(it, state, instr, callee, ()))
    return one(state, result(it, state, instr, callee, ()))


def set_precision(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    setting(it, state, "float32_matmul_precision", argument(args, 0, "precision") or NONE, instr.at)
    return one(state, NONE)


def autograd_grad(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``torch.autograd.grad``: gradients as values; those of a scaled loss carry its scale."""
    outputs = argument(args, 0, "outputs")
    flow = flow_of(outputs) if outputs is not None else PLAIN
    if isinstance(flow.scaled, Named):
        return one(state, Many(Tensors("grad", None, True, Flow(flow.scaled, flow.region, "", flow.scaled_at))))
    return one(state, result(it, state, instr, callee, args))


def builtin_sum(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    value = argument(args, 0, "iterable")
    inner = element_of(it, state, value, instr.at) if isinstance(value, (Many, Obj, Tup)) else value
    if isinstance(inner, Tensors) and inner.kind == "grad":
        return one(state, inner)
    return one(state, result(it, state, instr, callee, args))


def tensors_method(it: Interpreter, state: State, instr: p.Call, tensors: Tensors, name: str, args: Args) -> Outcome:
    """Methods of parameters and gradients."""
    factor = argument(args, 0)
    if one_of_many(instr.func):
        tensors = replace(tensors, part=True)
    if tensors.kind == "grad":
        return gradient_method(it, state, instr, tensors, name, factor)
    if tensors.kind == "square":
        if name not in ("sum", "mean"):
            return one(state, tensors)  # .float(), .view(…): still squares
        read_grads(it, state, instr, replace(tensors, kind="grad"), f"a {name} of squares")
        return one(state, result(it, state, instr, Method(tensors, name), ()))
    if name in ("mul_", "lerp_", "sub_", "copy_", "set_") and tensors.kind == "param":
        write_parameters(it, state, instr, tensors, name, factor)
        return one(state, tensors)
    if name == "requires_grad_" and tensors.weights is not None:
        trainable = factor != FALSE
        it.emit(
            state,
            WeightsTake(it.where(state, instr.at), when(state), tensors.weights, None, "requires_grad_", trainable),
        )
        return one(state, tensors)
    if name in ("clone", "float", "double", "half", "bfloat16", "to", "type"):
        return one(state, copied_parameter(it, state, instr, tensors, name, args))
    if name in ("detach", "view", "cuda", "cpu", "data"):
        return one(state, tensors)
    return one(state, result(it, state, instr, Method(tensors, name), ()))


SHOWN_AGAIN = frozenset(
    {
        "data", "detach", "float", "clone", "to", "cpu", "view", "flatten", "reshape", "type", "double", "half", "coalesce", "abs",
    }
)  # fmt: skip
"""Methods that give the same gradients again, as far as their scale goes."""


def gradient_method(
    it: Interpreter, state: State, instr: p.Call, grads: Tensors, name: str, factor: Value | None
) -> Outcome:
    """A method of gradients; ``factor``: what it is given first."""
    if name in ("mul_", "div_", "mul", "div"):
        return multiplied_gradients(it, state, instr, grads, name, factor)
    if name in ("copy_", "set_") and factor is not None:
        divided = factor.divided if isinstance(factor, Tensors) else None
        scale_grads(it, state, instr.at, grads, flow_of(factor), f".grad.{name}", divided)
        return one(state, grads)
    if name in ("zero_", "fill_"):
        it.emit(state, ZeroGrad(it.where(state, instr.at), when(state), None if grads.part else grads.weights, None))
        return one(state, grads)
    if name in ("clamp_", "clip_", "clamp_max_"):
        it.emit(state, Grads(it.where(state, instr.at), when(state), grads.weights, "clip", f".grad.{name}", "other"))
        return one(state, grads)
    if name in SHOWN_AGAIN:
        return one(state, grads)
    squares = name in ("square", "pow")
    if squares and not isinstance(grads.flow.scaled, Named):
        return one(state, replace(grads, kind="square"))
    if squares or name in ("norm", "histc") or (name in STATISTICS and goes_out(it, state, instr.at)):
        read_grads(it, state, instr, grads, f".grad.{name}" if name != "square" else "a squared norm")
    return one(state, result(it, state, instr, Method(grads, name), ()))


def multiplied_gradients(
    it: Interpreter, state: State, instr: p.Call, grads: Tensors, name: str, factor: Value | None
) -> Outcome:
    """Gradients times or by something, in place or as others."""
    flow, divides = flow_of(factor) if factor is not None else PLAIN, name.startswith("div")
    if divides:
        inverse = {"scale": "1/scale", "1/scale": "scale"}
        flow = replace(flow, factor=inverse.get(flow.factor, flow.factor))
    divided = divisor("/" if divides else "*", factor) if factor is not None else None
    if not name.endswith("_"):
        return one(state, replace(grads, flow=flow, divided=divided))
    scale_grads(it, state, instr.at, grads, flow, f".grad.{name}", divided)
    return one(state, grads)


def copied_parameter(it: Interpreter, state: State, instr: p.Call, tensors: Tensors, name: str, args: Args) -> Value:
    """A copy of parameters, in the dtype that it is cast to or in their own: other weights."""
    copied = it.site(state, instr.at, f"{receiver_text(instr)}.{name}(…)", PLAIN, ())
    wanted = CASTS.get(name) or next((d for _, v in args if (d := dtype_in(state, v)) is not None), None)
    if wanted is not None:
        state.attributes(copied)["dtype"] = External(f"torch.{wanted}")
    state.attributes(copied)["copy of"] = tensors
    if name == "clone" and tensors.weights is not None:  # in the dtype of the weights, as it is by then
        root = Obj(it.here(state, instr.at), External("torch.Tensor"))
        state.attributes(copied)[COPY] = root
        copy = frozenset({weight_path(it, root)})
        it.emit(state, Copied(it.where(state, instr.at), when(state), tensors.weights, copy))
    return copied
