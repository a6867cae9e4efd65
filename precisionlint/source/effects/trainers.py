"""Trainers that hold the whole loop: transformers' Trainer (and trl's, made from it), and lightning's Trainer over a LightningModule.

Knows what their ``train`` and ``fit`` do to weights: which dtype they are in, which optimizer takes them, and whether a scaler stands
between. What they do by configuration that is not in the program (DeepSpeed, FSDP, a launcher) is not known, and nothing is said then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from precisionlint.events import Backward, Engine, Grads, Region, Step, Trains, Weights, WeightsTake
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    Outcome,
    argument,
    is_optimizer,
    one,
    open_ended,
    receiver_text,
    result,
    short,
    when,
)
from precisionlint.source.effects.engines import cast, engine_name, engine_of, scaling, true_half
from precisionlint.source.effects.weights import shown_a_model
from precisionlint.source.evaluate import class_attribute, elements
from precisionlint.source.objects import dtype_of, is_container, model_weights, named
from precisionlint.source.records import MIXED_FP16
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    TRUE,
    Class,
    Cond,
    Const,
    External,
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

ELSEWHERE = regex(r"deepspeed|fsdp|megatron", re.I)
"""A program that names one of these may be launched with it, and then its engine keeps the masters."""
OFF = (NONE, FALSE, const(""))
HALF_NAMES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16", "fp16": "float16"}


# -- transformers and what is made from it


def make_arguments(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``TrainingArguments(…)``: its settings are its attributes."""
    obj = Obj(it.here(state, instr.at), callee)
    state.allocate(obj, {keyword: value for keyword, value in args if keyword not in (None, "*", "**")})
    attributes = state.attributes(obj)
    attributes["open"] = const(open_ended(args))
    attributes["made"] = const(it.where(state, instr.at))
    return one(state, obj)


def make_trainer(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``Trainer(model=…, args=…)``: it trains when it is told to."""
    obj = Obj(it.here(state, instr.at), callee)
    state.allocate(obj, {})
    equip(it, state, instr, obj, args)
    return one(state, obj)


def make_trainer_elsewhere(it: Interpreter, state: State, instr: p.Call, args: Args) -> Outcome:
    """A trainer that is called like transformers' own, of a package that is not there: what it changes of that is not known."""
    [(branch, trainer)] = make_trainer(it, state, instr, External("transformers.Trainer"), args)
    branch.attributes(trainer)["open"] = branch.attributes(trainer)["elsewhere"] = const(True)
    return one(branch, trainer)


def equip(it: Interpreter, state: State, instr: p.Call, trainer: Value, args: Args) -> None:
    attributes = state.attributes(trainer)
    attributes["model"] = argument(args, 0, "model") or NONE
    settings = argument(args, 99, "args") or argument(args, 1, "args") or NONE
    attributes["args"] = settings
    for name in ("peft_config", "optimizers", "optimizer_cls_and_kwargs"):
        attributes[("given", name)] = argument(args, 99, name) or NONE
    attributes["open"] = const(open_ended(args))


def initialised(it: Interpreter, state: State, instr: p.Call, trainer: Value, framework: str, args: Args) -> Outcome:
    """``super().__init__(…)`` of a class made from Trainer."""
    equip(it, state, instr, trainer, args)
    return one(state, NONE)


def train(it: Interpreter, state: State, instr: p.Call, trainer: Value, framework: str, args: Args) -> Outcome:
    """``trainer.train()``: AdamW over all weights that are not frozen, under autocast and a scaler where its arguments say so."""
    outcome: Outcome = []
    for branch, weights, precision in training(it, state, instr, trainer):
        elsewhere = decided_elsewhere(it, branch, trainer) if precision == "?" else ""
        if weights is not None:
            settings = branch.heap.get(trainer, {}).get("args", NONE)
            own = branch.heap.get(settings, {})
            rate = own.get("learning_rate")
            lr = float(rate.value) if isinstance(rate, Const) and isinstance(rate.value, (int, float)) else None
            made = own.get("made")
            told = made.value if isinstance(made, Const) else None
            me = named(trainer, receiver_text(instr))
            it.emit(
                branch,
                Trains(
                    it.where(branch, instr.at), when(branch), me, weights, precision, optimizer_name(it, own), lr, told, elsewhere,
                ),
            )  # fmt: skip
        outcome.append((branch, result(it, branch, instr, Method(trainer, "train"), ())))
    return outcome


def training(
    it: Interpreter, state: State, instr: p.Call, trainer: Value
) -> Iterator[tuple[State, Weights | None, str]]:
    """The weights that a trainer trains in full by a plain optimizer (None where that is not known), and what it computes in."""
    own = state.heap.get(trainer, {})
    settings = own.get("args", NONE)
    arguments = state.heap.get(settings, {})
    unknown = (
        own.get("open") != FALSE
        or arguments.get("open") != FALSE
        or any(
            own.get(("given", name), NONE) not in OFF
            for name in ("peft_config", "optimizers", "optimizer_cls_and_kwargs")
        )
        or any(arguments.get(name, NONE) not in OFF for name in it.apis.engine_arguments)
        or not optimizer_name(it, arguments)
        or overrides(it, state, trainer, "create_optimizer")
        or speaks_of_engines(it)
    )
    weights = None if unknown else trained_weights(it, state, trainer, arguments)
    if weights is None and decided_elsewhere(it, state, trainer):
        yield state, trained_weights(it, state, trainer, {}), "?"
        return
    if weights is None:
        yield state, None, ""
        return
    for fp16, branch in it.fork(state, arguments.get("fp16", FALSE)):
        if fp16:
            yield branch, weights, "fp16"
            continue
        for bf16, rest in it.fork(branch, arguments.get("bf16", FALSE)):
            yield rest, weights, "bf16" if bf16 else ""


def decided_elsewhere(it: Interpreter, state: State, trainer: Value) -> str:
    """What decides on the precision of a trainer, where that is outside the program and nothing in it adds what would keep masters or
    adapters: who gives its settings, or some of them (``**kwargs``), or a class that is not there."""
    own = state.heap.get(trainer, {})
    given = ("peft_config", "optimizers", "optimizer_cls_and_kwargs")
    if any(own.get(("given", name), NONE) not in OFF for name in given) or overrides(
        it, state, trainer, "create_optimizer"
    ):
        return ""
    settings = own.get("args")
    arguments = state.heap.get(settings, {}) if isinstance(settings, Obj) else {}
    plain = bool(optimizer_name(it, arguments)) and all(
        arguments.get(name, NONE) in OFF for name in it.apis.engine_arguments
    )
    if isinstance(settings, Sym) or (plain and arguments.get("open") == TRUE and "elsewhere" not in own):
        return "its arguments come from outside the program"
    if plain and arguments.get("open") == FALSE and "elsewhere" in own and not speaks_of_engines(it):
        return "its class is not in the program"
    return ""


def speaks_of_engines(it: Interpreter) -> bool:
    return any(ELSEWHERE.search(module.text) for module in it.global_frames)


def overrides(it: Interpreter, state: State, trainer: Value, name: str) -> bool:
    return (
        isinstance(trainer, Obj)
        and isinstance(trainer.cls, Class)
        and class_attribute(it, state, trainer.cls, name) is not None
    )


def optimizer_name(it: Interpreter, arguments: dict[Any, Value]) -> str:
    """What ``optim=`` says, where that is a plain optimizer; AdamW where it says nothing; ``""`` otherwise."""
    value = arguments.get("optim", const("adamw_torch"))
    if not isinstance(value, Const) or value.value not in it.apis.plain_optim:
        return ""
    return "SGD" if value.value == "sgd" else "AdamW" if value.value.startswith("adamw") else str(value.value)


def trained_weights(it: Interpreter, state: State, trainer: Value, arguments: dict[Any, Value]) -> Weights | None:
    """The weights of a trainer's model: handed over, or loaded by the trainer itself from a name."""
    model = state.heap.get(trainer, {}).get("model", NONE)
    if isinstance(model, Const):
        if not isinstance(model.value, str):
            return None
        given = arguments.get("model_init_kwargs", NONE)
        settings = state.heap.get(given, {}) if is_container(given) else {}
        if any(settings.get(name, NONE) not in OFF for name in it.apis.quantised) or "*" in settings:
            return None
        wanted = next((settings[name] for name in it.apis.load_arguments if name in settings), NONE)
        dtype = dtype_of(wanted) or (HALF_NAMES.get(str(wanted.value)) if isinstance(wanted, Const) else None)
        weights: Weights = frozenset({(trainer, "model")})
        made = arguments.get("made")
        if dtype is not None and isinstance(made, Const):
            how = f"model_init_kwargs with dtype {short(dtype)}"
            it.emit(state, WeightsTake(made.value, when(state), weights, dtype, how))
        return weights
    if not isinstance(model, (Obj, Sym)):
        return None
    shown_a_model(it, state, model)
    return model_weights(it, model)


# -- lightning

BY_HAND = regex(r"manual_backward|automatic_optimization\s*=\s*False")
"""What a module says that steps its optimizers itself."""


def fit(it: Interpreter, state: State, instr: p.Call, trainer: Value, framework: str, args: Args) -> Outcome:
    """``trainer.fit(module)``: casts the module where the precision is true half, makes its optimizers, and steps them."""
    module = argument(args, 0, "model")
    configure = method_of(it, state, module, "configure_optimizers")
    if module is None or configure is None or engine_of(it, state, module) != "lightning module":
        return one(state, result(it, state, instr, Method(trainer, "fit"), args))
    outcome: Outcome = []
    for branch, dtype, word in true_half(it, state, trainer):
        branch.attributes(module)["trainer"] = trainer
        if dtype:
            cast(it, branch, instr, trainer, module, dtype, word)
        for after, made in it.call_function(configure, (), instr, branch):
            optimizers = list(optimizers_in(it, after, made))
            if dtype:
                for optimizer in optimizers:
                    it.emit(after, Step(it.where(after, instr.at), when(after), named(optimizer, ""), None))
                outcome.append((after, NONE))
            else:
                for last in step_by_hand(it, after, instr, trainer, module, optimizers):
                    outcome.extend((end, NONE) for end in hooked(it, last, instr, trainer, module))
    return outcome


def method_of(it: Interpreter, state: State, obj: Value | None, name: str) -> Func | None:
    """A method of an object of the project's own class, bound to it."""
    if not isinstance(obj, Obj) or not isinstance(obj.cls, Class):
        return None
    found = class_attribute(it, state, obj.cls, name)
    return Func(found.function, found.module, found.frame, obj, found.owner) if isinstance(found, Func) else None


def optimizers_in(it: Interpreter, state: State, value: Value) -> Iterator[Value]:
    """The optimizers that ``configure_optimizers`` returned, in their order."""
    if is_optimizer(it, state, value):
        yield value
    elif is_container(value) and "optimizer" in state.heap.get(value, {}):
        yield from optimizers_in(it, state, state.heap[value]["optimizer"])
    elif isinstance(value, (Tup, Obj)):
        for item in elements(it, state, value) or ():
            yield from optimizers_in(it, state, item)


def step_by_hand(
    it: Interpreter, state: State, instr: p.Call, trainer: Value, module: Value, optimizers: list[Value]
) -> list[State]:
    """Manual optimisation: ``training_step`` itself runs backward, clips and steps, under the trainer's region and scaler."""
    step = method_of(it, state, module, "training_step")
    if step is None or not BY_HAND.search(step.module.text) or not optimizers:
        return [state]
    after = []
    for mixed, branch in in_mixed_fp16(it, state, state.heap.get(trainer, {}).get("precision")):
        after += stepped(it, branch, instr, trainer, module, optimizers, step) if mixed else [branch]
    return after


HOOK = "on_after_backward"
"""The hook of modules and callbacks that finds the gradients as backward left them: it comes before lightning unscales."""


def hooked(it: Interpreter, state: State, instr: p.Call, trainer: Value, module: Value) -> list[State]:
    """The states after a module's hook has met the gradients of a step under a trainer's fp16 scaler."""
    hook = method_of(it, state, module, HOOK)
    if hook is None:
        return [state]
    after = []
    for mixed, branch in in_mixed_fp16(it, state, state.heap.get(trainer, {}).get("precision")):
        if mixed:
            engine = Engine(trainer, "lightning", engine_name(it, trainer))
            it.emit(branch, Backward(it.where(branch, instr.at), when(branch), None, None, None, None, engine))
            after += [last for last, _ in it.call_function(hook, (), instr, branch)]
        else:
            after.append(branch)
    return after


def enter_hook(it: Interpreter, state: State, func: Func, at: Any) -> None:
    """A hook that lightning calls, of a module or callback that no trainer here is given: one that scales may run it."""
    if func.function.name != HOOK or func.receiver is None:
        return
    if engine_of(it, state, func.receiver) in ("lightning module", "lightning callback"):
        engine = Engine(func.receiver, "lightning", "the trainer", sure=False)
        labels = (*when(state), "precision == '16-mixed'")
        it.emit(state, Backward(it.where(state, at), labels, None, None, None, None, engine))


def in_mixed_fp16(it: Interpreter, state: State, precision: Value | None) -> Iterator[tuple[bool, State]]:
    """The paths on which a precision is mixed fp16, where the program says so itself or it is the default of what it asks for."""
    given = precision.default if isinstance(precision, Sym) else precision
    mixed = isinstance(given, Const) and given.value in MIXED_FP16
    if mixed and isinstance(precision, Sym):
        yield from it.fork(state, Cond(precision, "eq", const(MIXED_FP16[1]), True))
    else:
        yield mixed, state


def stepped(
    it: Interpreter, state: State, instr: p.Call, trainer: Value, module: Value, optimizers: list[Value], step: Func
) -> list[State]:
    """The states after one ``training_step`` under a trainer's fp16 region and scaler."""
    for optimizer in optimizers:
        state.attributes(optimizer)["engine"] = trainer
    state.attributes(module)["its optimizers"] = optimizers[0] if len(optimizers) == 1 else Tup(tuple(optimizers))
    saved = state.regions
    state.regions = (*saved, Region("", "float16", opener="lightning"))
    after = [last for last, _ in it.call_function(step, (("*", it.free("…")),), instr, state)]
    for last in after:
        last.regions = saved
    return after


def manual_backward(it: Interpreter, state: State, instr: p.Call, module: Value, framework: str, args: Args) -> Outcome:
    outcome: Outcome = []
    trainer = state.heap.get(module, {}).get("trainer")
    paths: Iterator[tuple[State, Engine | None]] = iter([(state, None)])
    if trainer is not None:
        paths = scaling(it, state, trainer, "lightning", engine_name(it, trainer))
    for branch, engine in paths:
        # lightning runs the whole step in its region, and backward with it: nothing that the program could change
        it.emit(branch, Backward(it.where(branch, instr.at), when(branch), None, None, None, None, engine))
        outcome.append((branch, NONE))
    return outcome


def its_optimizers(it: Interpreter, state: State, instr: p.Call, module: Value, framework: str, args: Args) -> Outcome:
    known = state.heap.get(module, {}).get("its optimizers")
    return one(state, known if known is not None else result(it, state, instr, Method(module, "optimizers"), ()))


def clip_gradients(it: Interpreter, state: State, instr: p.Call, module: Value, framework: str, args: Args) -> Outcome:
    """``self.clip_gradients(optimizer, …)`` of a LightningModule: in manual optimisation nothing unscales before it."""
    where = it.where(state, instr.at)
    it.emit(state, Grads(where, when(state), None, "clip", "self.clip_gradients", "other"))
    return one(state, NONE)


METHODS: dict[tuple[str, str], Callable[..., Outcome]] = {
    ("transformers", "__init__"): initialised,
    ("transformers", "train"): train,
    ("lightning", "fit"): fit,
    ("lightning module", "manual_backward"): manual_backward,
    ("lightning module", "optimizers"): its_optimizers,
    ("lightning module", "clip_gradients"): clip_gradients,
}

MAKERS: dict[str, Callable[..., Outcome]] = {"transformers": make_trainer, "training arguments": make_arguments}
