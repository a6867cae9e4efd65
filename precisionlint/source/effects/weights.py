"""Modules and their weights: made, loaded, cast, wrapped, called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from precisionlint.events import AdapterAdded, Cast, Known, Op, Region, Setting, Sharded, WeightsTake, Wrapped, ZeroGrad
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    CASTS,
    MODEL_NAME,
    Outcome,
    argument,
    choices,
    detached,
    dtype_in,
    is_model,
    last_word,
    one,
    receiver_text,
    region_of,
    when,
)
from precisionlint.source.effects.copies import cast_value, is_average, requires_grad
from precisionlint.source.effects.engines import may_run_half
from precisionlint.source.effects.kept import asked_for
from precisionlint.source.effects.unread import call_unknown
from precisionlint.source.evaluate import element_of, elements
from precisionlint.source.objects import COPY, DTYPES, dtype_of, is_container, model_weights, weight_path, weights_of
from precisionlint.source.records import ADAPTED
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    UNSURE,
    Class,
    Const,
    External,
    Func,
    Many,
    Method,
    Obj,
    Sym,
    Tensors,
    Tup,
    Value,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


CONVERSIONS = {"convert_to_fp16": "float16", "convert_to_fp32": "float32"}
"""Methods of guided-diffusion's models and of what was made after them: they cast the weights of the layers."""
SAME_RECEIVER = frozenset(
    [
        *CONVERSIONS,
        "to",
        "cuda",
        "cpu",
        "half",
        "bfloat16",
        "float",
        "double",
        "type",
        "eval",
        "train",
        "requires_grad_",
        "contiguous",
        "detach",
        "clone",
        "share_memory",
        "to_empty",
        "apply",
        "compile",
        "xpu",
        "type_as",
        "expand",
        "view",
        "reshape",
        "data",
    ]
)


def wrap(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> Outcome:
    inner = argument(args, 0, "module", "model")
    if inner is None:
        return one(state, External(name))
    how = "fsdp1" if name in it.apis.fsdp1 else "fsdp2" if name in it.apis.fsdp2 else "ddp"
    if isinstance(inner, (Obj, Sym)):
        policy = argument(args, 99, "mixed_precision", "mp_policy")
        with_policy = policy is not None and policy != NONE
        it.emit(state, Sharded(it.where(state, instr.at), when(state), model_weights(it, inner), how, with_policy))
    return one(state, inner)


def load_weights(it: Interpreter, state: State, instr: p.Call, args: Args) -> Outcome:
    """``Model.from_pretrained(name, torch_dtype=…)``: a model whose weights have that dtype."""
    value = next((v for k, v in args if k in it.apis.load_arguments), None)
    outcome: Outcome = []
    for branch, chosen in choices(it, state, value):
        model = Obj(it.here(branch, instr.at), External("torch.nn.loaded.Model"))
        branch.allocate(model, {})
        dtype = dtype_in(branch, chosen)
        if isinstance(chosen, Const) and f"torch.{chosen.value}" in DTYPES:  # transformers takes the name as well
            dtype = str(chosen.value)
        if dtype is not None:
            how = f"from_pretrained(dtype={dtype})"
            keywords = getattr(instr.at, "keywords", ())
            said = next((k.value for k in keywords if k.arg in it.apis.load_arguments), instr.at)
            weights = frozenset({weight_path(it, model)})
            labels = (*when(branch), *asked_for(it, branch, instr, dtype))
            it.emit(branch, WeightsTake(it.where(branch, said), labels, weights, dtype, how))
        if any(k in it.apis.quantised and v not in (NONE, FALSE) for k, v in args):
            freeze(it, branch, instr, model, "quantised")
        outcome.append((branch, model))
    return outcome


def with_adapters(it: Interpreter, state: State, instr: p.Call, args: Args) -> Outcome:
    """peft: the model that is given, frozen, with adapters in it."""
    model = argument(args, 0, "model")
    if not isinstance(model, (Obj, Sym)):
        return call_unknown(it, state, instr, External("peft"), args)
    freeze(it, state, instr, model, ADAPTED)
    it.adapted.add(model)
    if argument(args, 99, "autocast_adapter_dtype") == FALSE:
        add_adapter(it, state, instr, model, "get_peft_model(autocast_adapter_dtype=False)", args)
    return one(state, model)


def add_adapter(it: Interpreter, state: State, instr: p.Call, model: Value, name: str, args: Args) -> Outcome:
    """``model.add_adapter(config)``: trainable adapters, each in the dtype of the layer that it is put beside."""
    if is_model(it, state, model):
        weights = frozenset({weight_path(it, model)})
        it.emit(state, AdapterAdded(it.where(state, instr.at), when(state), weights, name))
    return call_unknown(it, state, instr, Method(model, name), args, model)


def cast_trained(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """diffusers: ``cast_training_params(model or models, dtype=torch.float32)`` casts what is trained."""
    given = argument(args, 0, "model") or NONE
    wanted = argument(args, 1, "dtype")
    dtype = "float32" if wanted is None else dtype_in(state, wanted)
    models = (elements(it, state, given) or []) if is_container(given) or isinstance(given, Tup) else [given]
    for model in models:
        if isinstance(model, (Obj, Sym)) and dtype is not None:
            weights = frozenset({weight_path(it, model)})
            how = f"cast_training_params({dtype})"
            it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, dtype, how))
    return one(state, NONE)


def freeze(it: Interpreter, state: State, instr: p.Call, model: Value, how: str) -> None:
    weights = frozenset({weight_path(it, model)})
    it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, None, how, False))


def children(it: Interpreter, state: State, args: Args, at: Any) -> Iterator[tuple[int | str, Value]]:
    """The modules that a module is made of, where they are handed to it, by their positions; ``"*"``: one that stands for many of its kind."""
    position = 0
    for _, value in args:
        known = elements(it, state, value) if not isinstance(value, Sym) else None
        if isinstance(value, Obj) and value.cls == External("builtins.dict"):
            yield from state.heap.get(value, {}).items()
            continue
        if known is None and (is_container(value) or isinstance(value, Many)):
            yield "*", element_of(it, state, value, at)
            continue
        for child in known if known is not None else [value]:
            yield position, child
            position += 1


TAKES_IN = frozenset({"append", "extend", "insert", "update", "add_module", "register_module"})
"""Methods by which a module takes others in."""


def take_in(it: Interpreter, state: State, module: Obj, args: Args, at: Any) -> Outcome:
    """``layers.append(module)``, ``model.add_module(name, module)`` and the like: modules become part of the one that they are given to."""
    held = state.attributes(module)
    for _, part in children(it, state, tuple(each for each in args if not isinstance(each[1], Const)), at):
        key = "*" if it.one_of_many() or "*" in held else len(held)
        it.adopt(state, module, key, part)
        held[key] = part
    return one(state, module)


def born(it: Interpreter, state: State, instr: p.Call, module: Obj, again: bool, args: Args = ()) -> None:
    """A module is made: its weights take the dtype that it is given, or the default one. ``again``: one was made here before, whatever it
    has become."""
    given = argument(args, len(args), "dtype")
    default = state.heap.get(External("torch"), {}).get("default dtype")
    dtype = dtype_of(given) or dtype_of(default)
    if dtype is not None or again:
        weights = frozenset({weight_path(it, module)})
        how = "made anew"
        if dtype is not None:
            how = f"made with dtype={dtype}" if dtype == dtype_of(given) else f"made under set_default_dtype({dtype})"
        it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, dtype or "float32", how))


def set_default_dtype(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    outcome: Outcome = []
    for branch, chosen in choices(it, state, argument(args, 0, "d")):
        dtype = dtype_in(branch, chosen)
        it.emit(
            branch, Setting(it.where(branch, instr.at), when(branch), "default_dtype", Known(dtype) if dtype else None)
        )
        branch.attributes(External("torch"))["default dtype"] = External(f"torch.{dtype}") if dtype else NONE
        outcome.append((branch, NONE))
    return outcome


def module_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """Methods that return the same thing: moves and casts of a model (or of a tensor, which owns no weights)."""
    if name in CONVERSIONS and is_model(it, state, receiver):
        take(it, state, instr, receiver, CONVERSIONS[name], f".{name}()")
        return one(state, NONE)
    if name in ("to", "type", "type_as") and COPY in state.heap.get(receiver, {}):
        state.attributes(receiver).pop(COPY)  # its dtype may be any from here on
    if name in CASTS and not args:
        return one(state, take(it, state, instr, receiver, CASTS[name], f".{name}()"))
    if name == "to":
        outcome: Outcome = []
        wanted = argument(args, 9, "dtype")
        if wanted is None:
            wanted = next((v for k, v in args if k is None and (dtype_of(v) or looked_up(v))), None)
        if wanted is None and any(is_read(value) for _, value in args) and is_model(it, state, receiver):
            return one(state, take(it, state, instr, receiver, "unknown", ".to(a dtype that was read)"))
        for branch, chosen in choices(it, state, wanted):
            dtype = dtype_in(branch, chosen)
            after = receiver if dtype is None else take(it, branch, instr, receiver, dtype, f".to({dtype})")
            outcome.append((branch, after))
        return outcome
    if name == "detach":
        return one(state, detached(it, receiver))
    if name == "apply" and isinstance(given := argument(args, 0, "fn"), Func) and isinstance(receiver, (Sym, Obj)):
        return [(after, receiver) for after, _ in it.call_function(given, ((None, part(it, receiver)),), instr, state)]
    if name == "requires_grad_":
        trainable = argument(args, 0, "requires_grad") != FALSE
        if trainable and isinstance(receiver, Sym) and not is_model(it, state, receiver):
            requires_grad(it, state, instr.at, receiver)
        own = weights_of(it, state, receiver) if isinstance(receiver, Sym) else None
        weights = own or frozenset({weight_path(it, receiver)})
        it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, None, "requires_grad_", trainable))
    return one(state, receiver)


def is_read(value: Value) -> bool:
    """``next(model.parameters()).dtype``"""
    return isinstance(value, Sym) and value.key[0] == "attr" and value.key[2] == "dtype"


def looked_up(value: Value) -> bool:
    return isinstance(value, Sym) and value.key[0] == "index" and is_container(value.key[1])


def take(it: Interpreter, state: State, instr: p.Call, receiver: Value, dtype: str, how: str) -> Value:
    """A model (or a tensor) takes a dtype; what the cast gives back."""
    where = it.where(state, instr.at)
    if not is_model(it, state, receiver) and not is_average(it, receiver):
        it.emit(state, Cast(where, when(state), receiver, dtype))
        if not isinstance(receiver, Sym):
            return receiver
        if dtype in ("float32", "float64"):
            it.cast_at.pop(receiver, None)  # a model goes back where it stands
        made = cast_value(it, receiver, dtype)
        it.cast_at.setdefault(made, (where, how))
        return made
    half = dtype in ("float16", "bfloat16")
    weights, norms = frozenset({weight_path(it, receiver)}), half and has_batchnorm(it, state, receiver)
    labels = (*when(state), *asked_for(it, state, instr, dtype))
    it.emit(state, WeightsTake(where, labels, weights, dtype, how, norms=norms))
    if half and receiver in it.adapted:  # the adapters in it are cast with it
        it.emit(state, AdapterAdded(where, when(state), weights, how))
    return receiver


WITH_BATCHNORM = regex(
    r"^torch\.nn\.(?:Sync)?BatchNorm|^torchvision\.models\.(?:\w+\.)*(?:resnet|resnext|wide_resnet|densenet|mobilenet|shufflenet|mnasnet|"
    r"regnet|efficientnet|inception|googlenet|vgg\d+_bn)"
)
"""Modules that are known to hold BatchNorm layers."""
PUT_BACK = regex(
    r"isinstance\([^\n]*Norm[^\n]*\):\s*\w+(?:\.\w+)*\.(?:float\(|to\()|BN_convert_float|keep_batchnorm_fp32|convert_network"
)
"""How a program casts its BatchNorm layers back to fp32."""


def has_batchnorm(it: Interpreter, state: State, model: Value, depth: int = 0) -> bool:
    """Whether a model holds BatchNorm layers that nothing in the program puts back into fp32."""
    if not isinstance(model, Obj) or depth > 4 or PUT_BACK.search(it.module_of(state).text):
        return False
    match model.cls:
        case External(name=name):
            if WITH_BATCHNORM.search(name):
                return True
        case Class() as cls:
            if "BatchNorm" in cls.module.source_of_class(cls.cls) and not PUT_BACK.search(cls.module.text):
                return True
    return any(has_batchnorm(it, state, part, depth + 1) for part in state.heap.get(model, {}).values())


OTHER_WEIGHTS = regex(
    r"lora|peft|adapt|ema|averag|head|critic|teacher|discrim|float|fp32|32|master|upcast|cast|quant|zero|engine|freeze|copy",
    re.I,
)
"""What a function is called that gives a model other weights, or keeps masters of them."""


def wraps(value: Sym) -> bool:
    """Whether what something unread made of a model is likely to have its weights, by the name of what was called."""
    call = next((part for part in value.key if isinstance(part, ast.Call)), None)
    return call is not None and not OTHER_WEIGHTS.search(ast.unparse(call.func))


def shown_a_model(it: Interpreter, state: State, value: Value) -> None:
    """What was cast before only now turns out to be a model: its parameters are asked for, or it is handed to what trains."""
    if value in it.cast_at:
        where, how = it.cast_at[value]
        dtype = value.key[2] if isinstance(value, Sym) else None
        it.emit(state, WeightsTake(where, when(state), frozenset({weight_path(it, value)}), dtype, how))


def parameters(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    if not isinstance(receiver, (Sym, Obj)):
        return call_unknown(it, state, instr, Method(receiver, name), args)
    kind = "named" if name.startswith("named") else "params"
    shown_a_model(it, state, receiver)
    made = receiver.key[1] if isinstance(receiver, Sym) and receiver.key[0] == "item" else receiver
    if isinstance(made, Sym) and made.loose and wraps(made):
        inner = frozenset(weight_path(it, model) for model in made.of if is_model(it, state, model))
        mine = frozenset({weight_path(it, receiver)})
        it.emit(state, Wrapped(it.where(state, instr.at), when(state), inner, mine))
    return one(state, Tensors(kind, model_weights(it, receiver), name not in ("parameters", "named_parameters")))


def parts_of(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """The submodules of a model: each is part of it."""
    if not isinstance(receiver, (Sym, Obj)):
        return call_unknown(it, state, instr, Method(receiver, name), args)
    if name.startswith("named"):
        return one(state, Many(Tup((it.derived(("partname", receiver), "name", (receiver,)), part(it, receiver)))))
    return one(state, Many(part(it, receiver)))


def part(it: Interpreter, model: Value) -> Value:
    """One submodule of a model, whichever."""
    return it.derived(("part", model, "…"), f"a part of {text_of(model)}", (model,))


def model_zero_grad(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    weights = model_weights(it, receiver) if isinstance(receiver, (Sym, Obj)) else None
    it.emit(state, ZeroGrad(it.where(state, instr.at), when(state), weights, None))
    return one(state, NONE)


def model_state_dict(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    key = ("state_dict", receiver, "model") if is_model(it, state, receiver) else ("state_dict", receiver)
    return one(state, it.derived(key, f"{receiver_text(instr)}.state_dict()", ()))


def module_called(it: Interpreter, state: State, instr: p.Call, callee: Value) -> None:
    """A model runs: in the half region in force, or in fp32."""
    if isinstance(callee, Obj):
        name = callee.cls.name if isinstance(callee.cls, External) else ""
        if it.kind(state, callee) != "module" or name.endswith("Loss"):
            return
    elif not (isinstance(callee, Sym) and MODEL_NAME.search(last_word(callee)) and callee.key[0] != "free"):
        return
    region = region_of(state)
    dtype = region.dtype or "?" if isinstance(region, Region) else "?" if region == UNSURE else None
    if isinstance(callee, Obj) and isinstance(callee.cls, Class) and "autocast" in callee.cls.module.text:
        dtype = dtype or "?"  # it may enter a region of its own
    if may_run_half(it, state, callee):
        dtype = dtype or "?"
    path = weight_path(it, callee)
    it.emit(state, Op(it.where(state, instr.at), when(state), "module", (path,), None, (dtype, None, None)))
