"""Frameworks that train: what their objects do to precision, by each one's contract.

Knows who scales, unscales and steps: accelerate's Accelerator and lightning's Fabric, whose scaler is on while their mixed precision is
fp16. Which classes these are stands in rules/frameworks.toml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from precisionlint.events import Backward, Engine, Grads, WeightsTake
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import (
    Outcome,
    argument,
    choices,
    is_model,
    is_optimizer,
    known_region,
    last_word,
    one,
    open_ended,
    receiver_text,
    region_of,
    result,
    when,
)
from precisionlint.source.evaluate import attribute
from precisionlint.source.objects import model_weights
from precisionlint.source.records import MIXED_BF16, MIXED_FP16
from precisionlint.source.state import NOTHING, State, decide
from precisionlint.source.values import (
    NONE,
    TRUE,
    Class,
    Cond,
    Const,
    External,
    Func,
    Method,
    Obj,
    Partial,
    Sym,
    Tup,
    Value,
    const,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args

NAMED = {"accelerate": regex(r"^_?accelerator$"), "fabric": regex(r"^_?fabric$")}
"""What an engine is called that comes from a caller that is not read."""
TRUE_HALF = {"bf16-true": "bfloat16", "16-true": "float16"}
"""What lightning calls half precision throughout: the weights are cast, and nothing keeps fp32 copies."""
FULL = ("no", "32", "32-true", "64", "64-true")
"""What they call computing in what the weights are stored in."""
SHOWS_FP16 = regex(r"fp16|float16|16-mixed|\bhalf\b")
OTHER_BACKENDS = ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "fsdp_plugin")
"""Arguments of Accelerator that hand scaling and clipping to another engine."""
PRECISION = {"accelerate": (2, "mixed_precision"), "fabric": (4, "precision"), "lightning": (99, "precision")}
"""Position and name of the argument that says what an engine computes in."""


def engine_of(it: Interpreter, state: State, value: Value) -> str:
    """The framework whose object a value is, or ``""``."""
    match value:
        case Obj(cls=External(name=name)):
            return it.apis.engines.get(name, "")
        case Obj(cls=Class() as cls):
            bases = (base for base in it.mro(state, cls) if isinstance(base, External))
            return next((it.apis.engines[base.name] for base in bases if base.name in it.apis.engines), "")
        case Sym():
            name = last_word(value)
            text = it.module_of(state).text
            return next(
                (framework for framework, known in NAMED.items() if known.match(name) and framework in text), ""
            )
    return ""


def make_engine(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``Accelerator(mixed_precision=…)``, ``Fabric(precision=…)``: an object that knows what it computes in."""
    framework = it.apis.engines[callee.name]
    obj = Obj(it.here(state, instr.at), callee)
    attributes: dict[str, Value] = {"open": TRUE} if open_ended(args) else {}
    state.allocate(obj, attributes)
    if framework in PRECISION:
        position, name = PRECISION[framework]
        given = argument(args, position, name)
        if given is not None and given != NONE:
            attributes[name] = given
        elif argument(args, 99, "fp16") == TRUE:  # accelerate before 0.10
            attributes[name] = const("fp16")
        it.coverage.recipe.computes(framework, attributes.get(name))
    backends = (argument(args, 99, backend) for backend in OTHER_BACKENDS)
    strategy = argument(args, 1 if framework == "fabric" else 99, "strategy")
    if any(value is not None and value != NONE for value in backends) or (
        strategy is not None and "deepspeed" in text_of(strategy).lower()
    ):
        attributes["another backend"] = TRUE
    attributes["made"] = const(it.where(state, instr.at))
    return one(state, obj)


def scaling(
    it: Interpreter, state: State, engine: Value, framework: str, name: str
) -> Iterator[tuple[State, Engine | None]]:
    """The paths on which an engine's own scaler is on (with the engine as the checks know it), and those on which it is not."""
    own = state.heap.get(engine, {})
    precision = attribute(it, state, engine, PRECISION[framework][1])
    if own.get("another backend") == TRUE:
        yield state, None
    elif isinstance(precision, Const):
        yield state, Engine(engine, framework, name) if precision.value in MIXED_FP16 else None
    elif not isinstance(precision, Sym):
        yield state, None
    else:
        mixed = Cond(precision, "eq", const(MIXED_FP16[0] if framework == "accelerate" else MIXED_FP16[1]), True)
        decided = decide(state.facts.get(precision, NOTHING), mixed)
        launched = precision.key[0] == "attr" and precision.key[1] == engine
        if decided is None and not can_be_fp16(it, state, precision, own.get("open") == TRUE):
            yield state, None
            return
        for on, branch in it.fork(state, mixed):
            yield branch, Engine(engine, framework, name, sure=decided is True or not launched) if on else None


def can_be_fp16(it: Interpreter, state: State, precision: Sym, handed_in: bool) -> bool:
    """Whether the program shows that a precision that it takes from outside may be fp16."""
    if isinstance(precision.default, Const) and precision.default.value in MIXED_FP16:
        return True
    return handed_in or any(SHOWS_FP16.search(module.text) for module in it.global_frames)


def labelled(it: Interpreter, state: State, value: Value, engine: Engine | None) -> tuple[str, ...]:
    """The branches that are open, with what turns the engine's scaler on among them."""
    name = PRECISION[engine.framework][1] if engine is not None else ""
    if engine is None or isinstance(attribute(it, state, value, name), Const):
        return when(state)
    return (*when(state), f"{engine.name}.{name} == 'fp16'")


def backward(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    outcome: Outcome = []
    for branch, scales in scaling(it, state, engine, framework, receiver_text(instr)):
        labels = labelled(it, branch, engine, scales)
        region = known_region(region_of(branch))
        it.emit(branch, Backward(it.where(branch, instr.at), labels, None, None, region, None, scales))
        outcome.append((branch, NONE))
    return outcome


def region(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    """``with accelerator.autocast():``: a region of autocast while its mixed precision is on, in the dtype that this names."""
    outcome: Outcome = []
    for branch, scales in scaling(it, state, engine, framework, receiver_text(instr)):
        chosen = attribute(it, branch, engine, PRECISION[framework][1])
        dtype = "float16" if scales is not None else MIXED_BF16.get(chosen.value) if isinstance(chosen, Const) else None
        if dtype is None:  # off, or it cannot be told
            outcome.append((branch, result(it, branch, instr, Method(engine, "autocast"), args)))
            continue
        obj = Obj(it.here(branch, instr.at), External("torch.autocast"))
        branch.heap[obj] = {"dtype": External(f"torch.{dtype}")}
        outcome.append((branch, obj))
    return outcome


def unscale(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    """A clip of the engine's own, which unscales first."""
    api = f"{receiver_text(instr)}.{instr.func.name}" if isinstance(instr.func, p.Attr) else framework
    mine = Engine(engine, framework, receiver_text(instr))
    it.emit(state, Grads(it.where(state, instr.at), when(state), None, "unscale", api, "1/scale", engine=mine))
    return one(state, result(it, state, instr, Method(engine, "clip"), ()))


def prepare(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    """``prepare`` and ``setup`` give back what they are given: models, and optimizers that step through the engine from here on."""
    values = [value for keyword, value in args if keyword is None or keyword not in ("*", "**")]
    if open_ended(args) or not values:
        return one(state, result(it, state, instr, Method(engine, "prepare"), args))
    for value in values:
        if is_optimizer(it, state, value):
            state.attributes(value)["engine"] = engine
        elif is_model(it, state, value):
            state.attributes(value)["prepared by"] = engine
    given = values[0] if len(values) == 1 else Tup(tuple(values))
    if framework != "fabric":
        return one(state, given)
    outcome: Outcome = []
    for branch, dtype, named_precision in true_half(it, state, engine):
        for value in values:
            if dtype and is_model(it, branch, value):
                cast(it, branch, instr, engine, value, dtype, named_precision)
        outcome.append((branch, given))
    return outcome


def true_half(it: Interpreter, state: State, engine: Value) -> Iterator[tuple[State, str, str]]:
    """The dtype that an engine casts weights to, and its name there; ``""`` where it leaves them as they are."""
    own = state.heap.get(engine, {})
    for branch, chosen in choices(it, state, own.get("precision")):
        if isinstance(chosen, Sym) and chosen.default is not None:
            chosen = chosen.default
        word = chosen.value if isinstance(chosen, Const) and own.get("another backend") != TRUE else None
        yield branch, TRUE_HALF.get(str(word), ""), str(word)


def cast(it: Interpreter, state: State, instr: p.Call, engine: Value, model: Value, dtype: str, word: str) -> None:
    """Lightning casts a model; what says so stands where the engine was made."""
    made = state.heap.get(engine, {}).get("made")
    at = made.value if isinstance(made, Const) else it.where(state, instr.at)
    weights = model_weights(it, model)
    if weights is not None:
        it.emit(state, WeightsTake(at, when(state), weights, dtype, f'precision="{word}"', by="lightning"))


def may_run_half(it: Interpreter, state: State, model: Value) -> bool:
    """Whether a model was handed to an engine that runs it under autocast, as far as nobody knows better."""
    engine = state.heap.get(model, {}).get("prepared by")
    if engine is None:
        return False
    framework = engine_of(it, state, engine)
    own = state.heap.get(engine, {})
    said = own.get(PRECISION[framework][1]) if framework in PRECISION else None
    if said is None:  # what launches the program decides, but for a Fabric that is made here without a precision
        return framework != "fabric" or not own or own.get("open") == TRUE
    return not (isinstance(said, Const) and str(said.value) in FULL)


def given_back(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    value = argument(args, 0, "model")
    return one(state, value if value is not None else NONE)


def launch(it: Interpreter, state: State, instr: p.Call, engine: Value, framework: str, args: Args) -> Outcome:
    """``fabric.launch(main, data, …)``: the function is called in each process, with the engine before what it is given; without one the
    processes are only started."""
    function = argument(args, 0, "function")
    bound: Args = ()
    if isinstance(function, Partial):
        bound, function = function.args, function.func
    if not isinstance(function, Func):
        return one(state, result(it, state, instr, Method(engine, "launch"), args))
    given = args[1:] if args[0][0] is None else tuple(each for each in args if each[0] != "function")
    return it.call_function(function, (*bound, (None, engine), *given), instr, state)


METHODS: dict[tuple[str, str], Callable[..., Outcome]] = {
    ("fabric", "launch"): launch,
    ("accelerate", "backward"): backward,
    ("accelerate", "autocast"): region,
    ("accelerate", "clip_grad_norm_"): unscale,
    ("accelerate", "clip_grad_value_"): unscale,
    ("accelerate", "unscale_gradients"): unscale,
    ("accelerate", "prepare"): prepare,
    ("accelerate", "prepare_model"): prepare,
    ("accelerate", "prepare_optimizer"): prepare,
    ("accelerate", "unwrap_model"): given_back,
    ("fabric", "autocast"): region,
    ("fabric", "backward"): backward,
    ("fabric", "clip_gradients"): unscale,
    ("fabric", "setup"): prepare,
    ("fabric", "setup_module"): prepare,
    ("fabric", "setup_optimizers"): prepare,
}


def stepping(it: Interpreter, state: State, optimizer: Value) -> Iterator[tuple[State, Engine | None]]:
    """The paths on which an optimizer steps through the scaler of the engine that it was handed to, and those on which it does not."""
    engine = state.heap.get(optimizer, {}).get("engine")
    framework = engine_of(it, state, engine) if engine is not None else ""
    if engine is None or framework not in PRECISION:
        yield state, None
        return
    yield from scaling(it, state, engine, framework, engine_name(it, engine))


def engine_name(it: Interpreter, engine: Value) -> str:
    """What the program calls an engine that is not named where it acts."""
    return it.names.get(getattr(engine, "site", None), "") or last_word(engine) or text_of(engine)
