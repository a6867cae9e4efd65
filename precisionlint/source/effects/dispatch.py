"""Which outside call has which effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from precisionlint.events import Lost, SchedulerStep
from precisionlint.source import program as p
from precisionlint.source.effects.checkpoints import save
from precisionlint.source.effects.common import (
    FINITE,
    SCHEDULER_NAME,
    Outcome,
    argument,
    is_model,
    is_optimizer,
    is_scaler,
    one,
    receiver_text,
    result,
    when,
)
from precisionlint.source.effects.copies import (
    AVERAGING,
    average_method,
    blend_copy,
    deep_copy,
    is_average,
    load_state_dict,
    make_average,
    make_parameter,
    make_tensor,
)
from precisionlint.source.effects.engines import METHODS as ENGINES
from precisionlint.source.effects.engines import engine_of, make_engine
from precisionlint.source.effects.gradients import (
    NORM_CALLS,
    autograd_grad,
    builtin_sum,
    clip,
    clip_of_model,
    norm_of,
    set_precision,
    tensors_method,
    touch_grads,
)
from precisionlint.source.effects.optimizers import make_optimizer, optimizer_method
from precisionlint.source.effects.own_ops import function_apply, library_impl, own_op
from precisionlint.source.effects.python import (
    EXITS,
    PURE,
    SAME,
    add_argument,
    argument_group,
    bool_,
    chain,
    container_method,
    dict_,
    empty,
    field_,
    filter_,
    float_,
    getattr_,
    hasattr_,
    isinstance_,
    item,
    items_method,
    ordered_dict,
    parse_args,
    parse_settings,
    partial,
    range_,
    same,
    setattr_,
    stream,
    super_,
)
from precisionlint.source.effects.regions import (
    amp_initialize,
    enter_context,
    exit_stack,
    make_autocast,
    make_no_grad,
    nullcontext,
    scale_loss,
)
from precisionlint.source.effects.scaling import (
    SCALER_METHODS,
    autograd_backward,
    backward_method,
    make_scaler,
    scaler_method,
)
from precisionlint.source.effects.trainers import MAKERS, make_trainer_elsewhere
from precisionlint.source.effects.trainers import METHODS as TRAINERS
from precisionlint.source.effects.unread import call_unknown, carry, hides_scaler
from precisionlint.source.effects.weights import (
    SAME_RECEIVER,
    TAKES_IN,
    add_adapter,
    born,
    cast_trained,
    children,
    load_weights,
    model_state_dict,
    model_zero_grad,
    module_method,
    parameters,
    parts_of,
    set_default_dtype,
    take_in,
    with_adapters,
    wrap,
)
from precisionlint.source.objects import is_container, name_of, named
from precisionlint.source.state import State
from precisionlint.source.values import (
    NONE,
    PLAIN,
    Class,
    Const,
    External,
    Method,
    ModuleRef,
    Obj,
    Super,
    Sym,
    Tensors,
    Value,
    const,
    flow_of,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


def call_external(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """A call of something outside the project."""
    name = callee.name
    if name.startswith("torch.ops."):
        implementation = it.implementations.get(name.rpartition(".")[2])
        if implementation is not None:
            own_op(it, state, instr, implementation, "op", "Autocast" in implementation.module.text)
            return one(state, result(it, state, instr, callee, args))
    handler = EXTERNAL.get(name)
    if handler is not None:
        return handler(it, state, instr, callee, args)
    if name in EXITS:
        return []
    if name in it.apis.clips:
        return clip(it, state, instr, name, args)
    if name in it.apis.norms:
        return norm_of(it, state, instr, callee, args)
    if name in it.apis.wrappers:
        return wrap(it, state, instr, name, args)
    kind = it.apis.kind(name)
    if kind == "scaler":
        return make_scaler(it, state, instr, name, args, Obj(it.here(state, instr.at), callee))
    if kind == "autocast":
        return make_autocast(it, state, instr, name, args)
    if kind == "optimizer":
        return make_optimizer(it, state, instr, name, args, Obj(it.here(state, instr.at), callee))
    framework = it.apis.engines.get(name, "")
    if framework and framework != "lightning module":
        return MAKERS.get(framework, make_engine)(it, state, instr, callee, args)
    if name.endswith("Trainer") and {"model", "args"} <= {keyword for keyword, _ in args}:
        return make_trainer_elsewhere(it, state, instr, args)
    if kind in ("module", "owner"):
        obj = Obj(it.here(state, instr.at), callee)
        again = obj in state.heap
        state.allocate(obj, {})
        if kind == "module":
            for position, value in children(it, state, args, instr.at):
                it.adopt(state, obj, position, value)
                state.heap[obj][position] = value
            born(it, state, instr, obj, again, args)
        return one(state, obj)
    if name in PURE or name.rpartition(".")[2].startswith("is_main"):
        values = tuple(value for _, value in args)
        if name == "builtins.str" and len(values) == 1 and is_text(values[0]):
            return one(state, values[0])
        text = f"{name_of(instr.func)}({', '.join(text_of(v) for v in values[:2])})"
        return one(state, it.derived(("pure", name, *values), text, values))
    if name in SAME:
        inner = argument(args, 0, "iterable")
        return (
            one(state, same(it, state, instr, name, inner))
            if inner is not None
            else one(state, empty(it, state, instr, name))
        )
    if name in NORM_CALLS or any(isinstance(v, Tensors) and v.kind in ("grad", "square") for _, v in args):
        return touch_grads(it, state, instr, callee, args)
    if name in it.apis.averages:
        return make_average(it, state, instr, callee, args)
    if name in it.apis.adapters:
        return with_adapters(it, state, instr, args)
    last = name.rpartition(".")[2]
    if last in it.apis.load_methods:
        return load_weights(it, state, instr, args)
    if last in ("custom_op", "triton_op") and name.startswith("torch"):
        return one(state, Obj((instr.at, "decorator"), External("torch.library.custom_op")))
    return call_unknown(it, state, instr, callee, args)


FACTORIES = (
    "zeros", "ones", "full", "empty", "rand", "randn", "tensor", "as_tensor", "zeros_like", "ones_like", "full_like", "empty_like",
    "rand_like", "randn_like",
)  # fmt: skip
EXTERNAL: dict[str, Callable[..., Outcome]] = {
    "torch.autograd.grad": autograd_grad,
    "torch.library.impl": library_impl,
    "builtins.sum": builtin_sum,
    "functools.partial": partial,
    "copy.deepcopy": deep_copy,
    "torch.nn.Parameter": make_parameter,
    **{f"torch.{name}": make_tensor for name in FACTORIES},
    "torch.no_grad": make_no_grad,
    "torch.inference_mode": make_no_grad,
    "contextlib.nullcontext": nullcontext,
    "contextlib.ExitStack": exit_stack,
    "itertools.chain": chain,
    "torch.save": save,
    "torch.set_default_dtype": set_default_dtype,
    "diffusers.training_utils.cast_training_params": cast_trained,
    "torch.set_float32_matmul_precision": set_precision,
    "torch.autograd.backward": autograd_backward,
    "builtins.enumerate": stream("enumerate"),
    "builtins.zip": stream("zip"),
    "builtins.range": range_,
    "builtins.getattr": getattr_,
    "builtins.setattr": setattr_,
    "builtins.hasattr": hasattr_,
    "builtins.isinstance": isinstance_,
    "builtins.filter": filter_,
    "builtins.super": super_,
    "builtins.float": float_,
    "builtins.bool": bool_,
    "builtins.dict": dict_,
    "collections.OrderedDict": ordered_dict,
    "dataclasses.field": field_,
    "pydantic.Field": field_,
    "apex.amp.scale_loss": scale_loss,
    "apex.amp.initialize": amp_initialize,
}


def of_scales(it: Interpreter, label: str) -> bool:
    """Whether a branch hangs on a scale that was read, whatever the program calls it by then."""
    keys = [cond.sym.key for cond in it.labelled.get(label, ())]
    return any(
        isinstance(side, Sym) and side.flow.factor == "scale" for key in keys if key[0] == "op" for side in key[2:]
    )


def call_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """A method of something that the project does not define."""
    if isinstance(receiver, Super):
        receiver = receiver.receiver
    if is_container(receiver):
        return container_method(it, state, instr, receiver, name, args)  # type: ignore[arg-type]
    if isinstance(receiver, Tensors):
        return tensors_method(it, state, instr, receiver, name, args)
    if name in AVERAGING and is_average(it, receiver):
        return average_method(it, state, instr, receiver, name, args)
    framework = engine_of(it, state, receiver)
    if framework:
        method = ENGINE_METHODS.get((framework, name))
        if method is not None:
            return method(it, state, instr, receiver, framework, args)
    if name in SCALER_METHODS and is_scaler(it, state, receiver, name, receiver_text(instr)):
        return scaler_method(it, state, instr, receiver, name, args)
    if name == "backward":
        return backward_method(it, state, instr, receiver, args)
    if name in ("step", "zero_grad", "state_dict") and is_optimizer(it, state, receiver, receiver_text(instr)):
        return optimizer_method(it, state, instr, receiver, name, args)
    if name == "step" and isinstance(receiver, (Sym, Obj)) and SCHEDULER_NAME.search(receiver_text(instr)):
        guarded = any(FINITE.search(label) or "scale" in label or of_scales(it, label) for label in when(state))
        it.emit(
            state,
            SchedulerStep(
                it.where(state, instr.at),
                when(state),
                named(receiver, receiver_text(instr)),
                guarded,
                it.innermost_loop(state),
            ),
        )
        return one(state, NONE)
    if name in TAKES_IN and isinstance(receiver, Obj) and it.kind(state, receiver) == "module":
        return take_in(it, state, receiver, args, instr.at)
    handler = METHODS.get(name)
    if handler is not None:
        return handler(it, state, instr, receiver, name, args)
    if name in SAME_RECEIVER and isinstance(receiver, (Sym, Obj)):
        return module_method(it, state, instr, receiver, name, args)
    if name in it.apis.load_methods:
        return load_weights(it, state, instr, args)
    if isinstance(receiver, Obj) and receiver.cls == External("custom op"):
        device = argument(args, 0, "device_type")
        it.registered.add((receiver, f"{name}:{device.value if isinstance(device, Const) else '?'}"))
        return one(state, receiver)
    if isinstance(receiver, Class) and name == "apply":
        return function_apply(it, state, instr, receiver, args)
    if isinstance(receiver, ModuleRef):
        return call_unknown(it, state, instr, receiver, args)
    if isinstance(receiver, Sym):
        if blend_copy(it, state, instr, receiver, name, args):
            return one(state, receiver)
        # Whoever owns a scaler may step and update it in a method that is not read.
        for scaler in it.scalers_of(receiver):
            it.emit(state, Lost(it.where(state, instr.at), (), scaler))
    if looks_up(receiver, name, args) and not is_model(it, state, receiver):
        key = args[0][1]
        return one(
            state, it.derived(("pure", "get", receiver, key), f"{text_of(receiver)}.get({text_of(key)})", (receiver,))
        )
    if name in SPELLS and all(isinstance(value, Const) for _, value in args):
        spelled = respelled(it, receiver, name, tuple(value for _, value in args))
        if spelled is not None:
            return one(state, spelled)
    callee = Method(receiver, name)
    hidden = receiver if isinstance(receiver, Obj) and hides_scaler(it, state, receiver) else None
    outcome = call_unknown(it, state, instr, callee, args, hidden)
    if isinstance(receiver, Sym) and receiver.flow is not PLAIN:
        flow = receiver.flow
        return [(s, carry(it, s, instr, v, flow)) for s, v in outcome]
    return outcome


SPELLS = frozenset({"lower", "upper", "casefold", "strip", "replace", "removeprefix", "removesuffix"})
"""Methods of a text that give the same text each time."""


def is_text(value: Value) -> bool:
    return (isinstance(value, Const) and isinstance(value.value, str)) or (
        isinstance(value, Sym) and value.key[0] == "pure" and value.key[1] in {"builtins.str", *SPELLS}
    )


def respelled(it: Interpreter, receiver: Value, name: str, given: tuple[Value, ...]) -> Value | None:
    """``precision.lower()``: of a setting it is asked in more places than one, and is the same in all of them."""
    if isinstance(receiver, Const) and isinstance(receiver.value, str):
        try:
            return const(getattr(receiver.value, name)(*(each.value for each in given if isinstance(each, Const))))
        except (TypeError, ValueError, AttributeError):
            return None
    if isinstance(receiver, Sym) and receiver.flow is PLAIN:
        return it.derived(("pure", name, receiver, *given), text_of(receiver), (receiver,))
    return None


def looks_up(receiver: Value, name: str, args: Args) -> bool:
    """``config.get("name")`` of something unknown: like ``config["name"]``, the same each time until the config is another."""
    return (
        name == "get"
        and isinstance(receiver, Sym)
        and receiver.flow is PLAIN
        and 1 <= len(args) <= 2
        and isinstance(args[0][1], Const)
        and all(keyword in (None, "default") for keyword, _ in args)
        and not any(flow_of(value) is not PLAIN for _, value in args)
    )


ENGINE_METHODS = {**ENGINES, **TRAINERS}


METHODS: dict[str, Callable[..., Outcome]] = {
    "parameters": parameters,
    "named_parameters": parameters,
    "trainable_parameters": parameters,
    "zero_grad": model_zero_grad,
    "clip_grad_norm_": clip_of_model,
    "enter_context": enter_context,
    "add_adapter": add_adapter,
    "load_state_dict": load_state_dict,
    "state_dict": model_state_dict,
    "children": parts_of,
    "modules": parts_of,
    "named_children": parts_of,
    "named_modules": parts_of,
    "items": items_method,
    "values": items_method,
    "keys": items_method,
    "item": item,
    "parse_args": parse_args,
    "parse_known_args": parse_args,
    "parse_args_into_dataclasses": parse_settings,
    "parse_args_and_config": parse_settings,
    "add_argument": add_argument,
    "add_argument_group": argument_group,
    "add_mutually_exclusive_group": argument_group,
}
