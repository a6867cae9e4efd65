"""What calls outside the project do: to values, and to the timeline.

Knows torch's API by meaning (a scaler scales, an optimizer steps, a clip clips); which names have which meaning is the table of
``apis.py``. Nothing of a rule stands here: this module only says what happened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from precisionlint.events import (
    Autocast,
    Backward,
    Cast,
    Checkpoint,
    CustomOp,
    Grads,
    Known,
    Lost,
    LossScaled,
    Named,
    Op,
    Owns,
    Region,
    ScaleRead,
    ScalerMade,
    SchedulerStep,
    Setting,
    Sharded,
    Step,
    Update,
    Weights,
    WeightsTake,
    ZeroGrad,
)
from precisionlint.source import program as p
from precisionlint.source.evaluate import (
    DTYPES,
    as_cond,
    combine,
    dtype_of,
    elements,
    element_of,
    is_container,
    name_of,
    named,
    truth,
    model_weights,
    weight_path,
    weights_of,
)
from precisionlint.source.state import NOTHING, State, decide, reachable
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    TRUE,
    UNSURE,
    Class,
    Cond,
    Const,
    External,
    Flow,
    Func,
    Manager,
    Many,
    Method,
    ModuleRef,
    Obj,
    Partial,
    Stream,
    Super,
    Sym,
    Tensors,
    Tup,
    Value,
    const,
    flow_of,
    join,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Args, Interpreter

joined = join
Outcome = list[tuple[State, Value]]

BUILTINS = frozenset(
    "isinstance issubclass len hasattr getattr setattr enumerate zip range list tuple dict set frozenset iter next filter map "
    "sorted reversed super print type bool str int float any all sum max min abs callable id repr vars property staticmethod "
    "classmethod open exit quit round".split()
)
PURE = frozenset(
    "builtins.isinstance builtins.issubclass builtins.len builtins.hasattr builtins.callable builtins.bool builtins.str builtins.int "
    "builtins.float builtins.abs builtins.round builtins.type torch.cuda.is_available torch.cuda.is_bf16_supported "
    "torch.distributed.is_initialized torch.distributed.is_available torch.distributed.get_rank torch.distributed.get_world_size "
    "os.environ.get os.getenv os.path.exists".split()
)
EXITS = frozenset({"sys.exit", "os._exit", "builtins.exit", "builtins.quit", "os.abort"})
SAME = frozenset({"tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.trange", "tqdm", "builtins.reversed", "builtins.iter", "builtins.sorted",
                  "builtins.list", "builtins.tuple", "builtins.set", "rich.progress.track"})  # fmt: skip
HARMLESS = re.compile(
    r"^(?:print|log\w*|info|debug|warn\w*|error|write\w*|add_\w+|summary|format|len|str|repr|id|type|is_\w+|has_\w+|get_\w+|"
    r"state_dict|load_state_dict|load\w*|save\w*|resume\w*|restore\w*|register\w*|watch|isinstance|hasattr|getattr|setattr|append|"
    r"extend|insert|setdefault|to|cuda|cpu|deepcopy|copy|asdict|vars|update_\w*(?:lr|meter|log)\w*|dict|list|tuple|set|prepare\w*|init\w*|"
    r"train|eval)$"
)
SCALER_NAME = re.compile(r"scaler", re.I)
OPTIMIZER_NAME = re.compile(r"optim|(?:^|_)opt(?:$|_|\d)|^opt[a-zA-Z]?$|_opts?$", re.I)
SCHEDULER_NAME = re.compile(r"sched", re.I)
AUTOCAST_NAME = re.compile(r"autocast|(?:^|_)amp(?:_|$)|precision", re.I)
OWNER_NAME = re.compile(r"accelerator|fabric|engine|booster|deepspeed|strategy|(?:^|\.)ds_", re.I)
FINITE = re.compile(r"finite|(?:^|_)is_?(?:nan|inf)|nan|overflow|(?:^|_)inf(?:$|_)|skip|valid", re.I)
SCALER_METHODS = frozenset({"scale", "unscale_", "step", "update", "get_scale", "is_enabled", "state_dict", "load_state_dict"})
SAME_RECEIVER = frozenset(
    "to cuda cpu half bfloat16 float double type eval train requires_grad_ contiguous detach clone share_memory "
    "to_empty apply compile xpu type_as expand view reshape data".split()
)
CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
GRAD_READS = frozenset({"norm", "abs", "square", "pow", "sum", "mean", "max", "min", "std", "var", "dot", "view", "flatten", "item", "histc"})
NORM_CALLS = frozenset({"torch.norm", "torch.linalg.vector_norm", "torch.linalg.norm", "torch._foreach_norm", "torch.stack", "torch.cat"})


READS_GIVEN = re.compile(r"hist|log|scalar|record|write|print|norm", re.I)
READS_GRADS = re.compile(r"grad\w*_norm|norm\w*_grad|log\w*_grad|grad\w*_log|gradient_norm|plot_grad", re.I)
CLIPS_GRADS = re.compile(r"^clip_\w*grad|grad\w*_clip(?:$|_|p)", re.I)


# -- helpers


def one(state: State, value: Value) -> Outcome:
    return [(state, value)]


def when(state: State) -> tuple[str, ...]:
    return tuple(label for label in state.control if label)


def argument(args: Args, position: int, *names: str) -> Value | None:
    """The argument at a position, or by one of its names."""
    for keyword, value in args:
        if keyword in names:
            return value
    index = 0
    for keyword, value in args:
        if keyword is None:
            if index == position:
                return value
            index += 1
    return None


def arg_name(instr: p.Call, position: int, *names: str) -> str:
    """How the program writes that argument."""
    for keyword, expr in instr.args:
        if keyword in names:
            return name_of(expr)
    index = 0
    for keyword, expr in instr.args:
        if keyword is None:
            if index == position:
                return name_of(expr)
            index += 1
    return ""


def open_ended(args: Args) -> bool:
    return any(keyword in ("*", "**") for keyword, _ in args)


def region_of(state: State) -> Region | str | None:
    """The autocast region in force: a Region, None, or UNSURE."""
    return state.regions[-1] if state.regions else None


def known_region(region: Region | str | None) -> Region | None:
    return region if isinstance(region, Region) else None


def last_name(value: Value) -> str:
    match value:
        case Sym():
            text = value.text.rstrip(")(…")
            while text.endswith("]"):
                text = text[: text.rfind("[")]
            return text.rpartition(".")[2]
        case External():
            return value.name.rpartition(".")[2]
    return ""


def dtype_in(state: State, value: Value | None) -> str | None:
    """The dtype that a value is on this path."""
    if isinstance(value, Sym):
        fact = state.facts.get(value)
        if fact is not None and isinstance(fact.eq, External):
            return dtype_of(fact.eq)
    return dtype_of(value)


def choices(it: Interpreter, state: State, value: Value | None) -> list[tuple[State, Value | None]]:
    """A value looked up in a table by an unknown key: one path for each entry that the path still allows."""
    if isinstance(value, Sym) and value.key[0] == "index":
        table, key = value.key[1], value.key[2]
        if is_container(table) and isinstance(key, Sym):
            items = state.heap.get(table, {})
            if items and "*" not in items and len(items) <= 6:
                result: list[tuple[State, Value | None]] = []
                for name, item in items.items():
                    branch = state.fork()
                    if not it.assume_cond(branch, Cond(key, "eq", const(name), True)):
                        continue
                    if isinstance(item, (Const, External)):
                        if not it.assume_cond(branch, Cond(value, "eq", item, True)):
                            continue
                    result.append((branch, item))
                if result:
                    return result
    return [(state, value)]


def is_optimizer(it: Interpreter, state: State, value: Value) -> bool:
    if isinstance(value, Obj):
        return it.kind(state, value) == "optimizer"
    return isinstance(value, Sym) and not SCHEDULER_NAME.search(last_name(value)) and bool(
        OPTIMIZER_NAME.search(last_name(value))
    )


def is_scaler(it: Interpreter, state: State, value: Value, method: str = "") -> bool:
    """Whether a value is a gradient scaler: made as one, or unknown and used as only a scaler is."""
    if isinstance(value, Obj):
        return it.kind(state, value) == "scaler"
    if isinstance(value, Sym):
        name = last_name(value)
        return (
            method == "unscale_"
            or bool(SCALER_NAME.search(name) and not re.search(r"standard|min_?max|feature|data|target|label|robust", name, re.I))
            or name in it.module_of(state).scaler_names
        )
    return False


# -- results


def result(it: Interpreter, state: State, instr: p.Call, callee: Value, args: Args, extra: Value | None = None) -> Sym:
    """The unknown value that a call returns, with what flowed into it."""
    values = [value for _, value in args] + ([extra] if extra is not None else [])
    flow = combine(values)
    if any(is_scaler(it, state, value) for value in values) and flow.scaled is None:
        flow = replace(flow, scaled=UNSURE)
    region = region_of(state)
    if region is not None and flow.region != region:
        flow = replace(flow, region=region)
    of = tuple(value for value in values if isinstance(value, Obj))[:3]
    return it.site(state, instr.at, f"{name_of(instr.func) or text_of(callee)}(…)", flow, of)


def call_unknown(it: Interpreter, state: State, instr: p.Call, callee: Value, args: Args, receiver: Value | None = None) -> Outcome:
    """A call that cannot be read. It can do what its arguments allow: who gets the scaler may unscale, step and update."""
    name = name_of(instr.func).rpartition(".")[2] or last_name(callee)
    values = [value for _, value in args] + ([receiver] if receiver is not None else [])
    if not HARMLESS.match(name) and not (isinstance(callee, External) and (callee.benign or callee.name.startswith("builtins."))):
        for value in values:
            for reached in reachable(state, value, 2):
                if is_scaler(it, state, reached):
                    it.emit(state, Lost(it.where(state, instr.at), (), reached))
    handed_gradients(it, state, instr, name, args)
    states = [state]
    for value in values:
        if isinstance(value, (Func, Partial)):
            states = [after for before in states for after in it.call_back(instr, before, value)]
    return [(after, result(it, after, instr, callee, args, receiver)) for after in states]


def handed_gradients(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> None:
    """An unread function that gets gradients, or a model whose gradients it is named after: a log of them, their norm, a clip."""
    if READS_GIVEN.search(name):
        for _, value in args:
            if isinstance(value, Tensors) and value.kind == "grad":
                read_grads(it, state, instr, value, name)
                return
    if not (READS_GRADS.search(name) or CLIPS_GRADS.search(name)):
        return
    for _, value in args[:2]:
        weights = grads_weights(it, state, value)
        if isinstance(value, Sym) and MODEL_NAME.search(last_name(value)):
            weights = model_weights(it, value)
        if weights is None:
            continue
        if CLIPS_GRADS.search(name):
            emit_clip(it, state, instr, value, argument(args, 1, "max_norm", "clip_value"), name)
        else:
            it.emit(state, Grads(it.where(state, instr.at), when(state), weights, "read", name))
        return


def annotated(it: Interpreter, state: State, annotation: p.Expr, value: Sym) -> Value:
    """A value whose annotation names a class that matters."""
    name = name_of(annotation)
    if name.endswith("GradScaler") and not SCALER_NAME.search(last_name(value)):
        it.module_of(state).scaler_names.add(last_name(value))
    return value


# -- attributes that are set


def attribute_set(it: Interpreter, state: State, obj: Value, target: p.Attr, value: Value, at: Any) -> bool:
    """``obj.name = value`` where that is an event of its own; False where it only stores an attribute."""
    if isinstance(obj, Sym) and target.name == "grad":
        part = obj.key[0] == "index" or one_of_many(target.obj)
        obj = Tensors("param", None if obj.key[0] == "site" else model_weights(it, obj), part)
    if isinstance(obj, Tensors):
        if target.name == "grad" and obj.kind == "param":
            if value == NONE:
                it.emit(state, ZeroGrad(it.where(state, at), when(state), None if obj.part else obj.weights, None))
            elif isinstance(value, Tensors):
                scale_grads(it, state, at, obj, flow_of(value), "p.grad =")
        elif target.name == "data" and obj.kind == "grad" and isinstance(value, Tensors):
            scale_grads(it, state, at, obj, flow_of(value), "p.grad.data =")
        elif target.name == "requires_grad" and value == FALSE and obj.weights is not None:
            it.emit(state, WeightsTake(it.where(state, at), when(state), obj.weights, None, "requires_grad = False", False))
        return True
    if isinstance(obj, External):
        setting(it, state, f"{obj.name}.{target.name}", value, at)
        return True
    return False


def scale_grads(it: Interpreter, state: State, at: Any, grads: Tensors, flow: Flow, api: str) -> None:
    """Gradients times something: that is unscaling by hand where the something is 1/scale."""
    factor = flow.factor if flow.factor else "other"
    scaler = flow.scaled if isinstance(flow.scaled, Named) else None
    it.emit(
        state,
        Grads(it.where(state, at), when(state), grads.weights, "mul", api, factor, scaler, None, grads.part),
    )


def setting(it: Interpreter, state: State, name: str, value: Value, at: Any) -> None:
    it.emit(state, Setting(it.where(state, at), when(state), name, Known(value.value) if isinstance(value, Const) else None))


# -- context managers and decorators


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
        obj = Obj((instr.at, branch.frame), External(cls))
        branch.heap[obj] = {
            "device": device if device is not None else (const(device_of_class) if device_of_class else NONE),
            "dtype": chosen if chosen is not None else NONE,
            "enabled": enabled if enabled is not None else (FALSE if False else TRUE),
            "cache": cache if cache is not None else TRUE,
            "open": const(open_ended(args)),
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
    device = device_value.value.partition(":")[0] if isinstance(device_value, Const) and isinstance(device_value.value, str) else ""
    where = it.where(state, at)
    cache = attributes.get("cache") != FALSE
    if dtype_value == NONE:
        return Region(device, "bfloat16" if device == "cpu" else "float16", cache, True, where)
    dtype = dtype_in(state, dtype_value)
    return Region(device, dtype or "", cache, False, where)


Leave = Callable[[State], None]


def enter(it: Interpreter, state: State, context: Value, instr: p.With) -> Iterator[tuple[State, Value, Leave]]:
    """Enters a context manager: the paths inside it, what ``as`` binds, and how each path leaves it."""
    if isinstance(context, Obj) and it.kind(state, context) == "autocast":
        for branch, leave in enter_autocast(it, state, context, instr.at):
            yield branch, context, leave
        return
    if isinstance(context, Obj) and context.cls == External("scale_loss"):
        yield state, state.heap[context]["loss"], lambda _: None
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


def restore_regions(saved: tuple[Any, ...]) -> Leave:
    def leave(state: State) -> None:
        state.regions = saved

    return leave


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
            it.coverage.recipe.add(f"{short(known.dtype) or 'half'} autocast")
        it.emit(branch, Autocast(it.where(branch, at), when(branch), known, on, True))

        def leave(one: State, known: Region | None = known, on: bool = on) -> None:
            one.regions = saved
            it.emit(one, Autocast(it.where(one, at), when(one), known, on, False))

        yield branch, leave


def short(dtype: str) -> str:
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype)


def enter_decorators(it: Interpreter, state: State, func: Func) -> Iterator[tuple[State, Leave]]:
    """The regions that a function's decorators put around its body."""
    for value in it.decorator_values.get(func.function, ()):
        if isinstance(value, Obj) and it.kind(state, value) == "autocast":
            yield from enter_autocast(it, state, value, func.function.node)
            return
    yield state, lambda _: None


def decorated(it: Interpreter, state: State, func: Func) -> Value:
    """What a function's name is bound to, once its decorators are through with it."""
    for value in it.decorator_values.get(func.function, ()):
        if isinstance(value, Obj) and value.cls == External("torch.library.impl"):
            it.implementations[state.heap[value]["name"].value] = func  # type: ignore[union-attr]
        if isinstance(value, Obj) and value.cls == External("torch.library.custom_op"):
            op = Obj((func.function.node, "op"), External("custom op"))
            state.heap[op] = {"impl": func}
            state.owned.discard(("heap", op))
            return op
    return func


# -- calls of outside names


def library_impl(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``@torch.library.impl(lib, "name", "CUDA")``: the older spelling of an op's implementation."""
    name = next((v.value for _, v in args if isinstance(v, Const) and isinstance(v.value, str)), "")
    obj = Obj((instr.at, "decorator"), External("torch.library.impl"))
    state.heap[obj] = {"name": const(name.rpartition("::")[2])}
    state.owned.discard(("heap", obj))
    return one(state, obj)


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
        return make_scaler(it, state, instr, name, args, Obj((instr.at, state.frame), callee))
    if kind == "autocast":
        return make_autocast(it, state, instr, name, args)
    if kind == "optimizer":
        return make_optimizer(it, state, instr, name, args, Obj((instr.at, state.frame), callee))
    if kind in ("module", "owner"):
        obj = Obj((instr.at, state.frame), callee)
        state.heap[obj] = {}
        state.owned.discard(("heap", obj))
        if kind == "module":
            for position, value in enumerate(children(it, state, args)):
                it.adopt(state, obj, position, value)
                state.heap[obj][position] = value
            born(it, state, instr, obj)
        return one(state, obj)
    if name in PURE or name.rpartition(".")[2].startswith("is_main"):
        values = tuple(value for _, value in args)
        text = f"{name_of(instr.func)}({', '.join(text_of(v) for v in values[:2])})"
        return one(state, it.derived(("pure", name, *values), text, values))
    if name in SAME:
        inner = argument(args, 0, "iterable")
        return one(state, same(it, state, instr, name, inner)) if inner is not None else one(state, empty(it, state, instr, name))
    if name in NORM_CALLS or any(isinstance(v, Tensors) and v.kind == "grad" for _, v in args):
        return touch_grads(it, state, instr, callee, args)
    last = name.rpartition(".")[2]
    if last in it.apis.load_methods:
        return load_weights(it, state, instr, args)
    if last in ("custom_op", "triton_op") and name.startswith("torch"):
        return one(state, Obj((instr.at, "decorator"), External("torch.library.custom_op")))
    return call_unknown(it, state, instr, callee, args)


def same(it: Interpreter, state: State, instr: p.Call, name: str, inner: Value) -> Value:
    known = elements(it, state, inner)
    if known is not None:
        if name == "builtins.list":
            obj = Obj((instr.at, state.frame), External("builtins.list"))
            state.heap[obj] = dict(enumerate(known))
            state.owned.discard(("heap", obj))
            return obj
        return Tup(tuple(known))
    if isinstance(inner, (Tensors, Many, Obj)):
        return inner
    return Stream("same", (inner,))


def empty(it: Interpreter, state: State, instr: p.Call, name: str) -> Value:
    obj = Obj((instr.at, state.frame), External("builtins.list"))
    state.heap[obj] = {}
    state.owned.discard(("heap", obj))
    return obj


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
    state.heap[obj] = {"enabled": enabled}
    state.owned.discard(("heap", obj))
    it.coverage.scalers.add(instr.at)
    known = truth(state, enabled)
    it.coverage.recipe.add("GradScaler")
    it.emit(
        state,
        ScalerMade(
            it.where(state, instr.at), when(state), Named(obj, instr.name or it.names.get(obj.site, "")), cls,
            Known(known) if known is not None else None, tuple(settings),
        ),
    )  # fmt: skip
    return one(state, obj)


def make_optimizer(it: Interpreter, state: State, instr: p.Call, cls: str, args: Args, obj: Obj) -> Outcome:
    params = argument(args, 0, "params", "optimizer_grouped_parameters", "parameters") or NONE
    weights = weights_of(it, state, params)
    rate = argument(args, 1, "lr")
    lr = rate.value if isinstance(rate, Const) and isinstance(rate.value, (int, float)) else None
    if isinstance(rate, Sym) and isinstance(rate.default, Const) and isinstance(rate.default.value, float):
        lr = rate.default.value
    settings = tuple((k, v.value) for k, v in args if k not in (None, "*", "**") and isinstance(v, Const))
    state.heap[obj] = {"params": params}
    state.owned.discard(("heap", obj))
    it.coverage.optimizers.add(instr.at)
    it.coverage.recipe.add(cls.rpartition(".")[2])
    masters = False if cls in it.apis.optimizers else None
    it.emit(
        state,
        Owns(it.where(state, instr.at), when(state), Named(obj, instr.name or it.names.get(obj.site, "")), weights, cls, lr, masters, settings),
    )
    return one(state, obj)


def made(it: Interpreter, state: State, instr: p.Call, obj: Obj, args: Args) -> Outcome | None:
    """An object of a project class that is a scaler or an optimizer by inheritance."""
    assert isinstance(obj.cls, Class)
    kind = it.external_base(state, obj.cls)
    if kind == "module":
        born(it, state, instr, obj)
    if kind == "scaler":
        return make_scaler(it, state, instr, f"{obj.cls.module.name}.{obj.cls.cls.name}", args, obj)
    if kind == "optimizer":
        return make_optimizer(it, state, instr, f"{obj.cls.module.name}.{obj.cls.cls.name}", args, obj)
    return None


def clip(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> Outcome:
    grads_at, grads_name, limit_at, limit_name = it.apis.clips[name]
    grads = argument(args, grads_at, grads_name)
    limit = argument(args, limit_at, limit_name)
    emit_clip(it, state, instr, grads, limit, name.rpartition(".")[2])
    return one(state, result(it, state, instr, External(name), ()))


def emit_clip(it: Interpreter, state: State, instr: p.Call, grads: Value | None, limit: Value | None, api: str) -> None:
    weights = grads_weights(it, state, grads)
    measures = limit == NONE or is_infinite(limit)
    factor = "scale" if limit is not None and flow_of(limit).scaled is not None else "other"
    if not measures and isinstance(limit, Const) and isinstance(limit.value, (int, float)):
        it.coverage.recipe.add(f"clip {limit.value}")
    it.emit(
        state,
        Grads(it.where(state, instr.at), when(state), weights, "read" if measures else "clip", api, factor),
    )


def grads_weights(it: Interpreter, state: State, value: Value | None) -> Weights | None:
    if value is None:
        return None
    weights = weights_of(it, state, value)
    if isinstance(value, Tensors) and value.kind == "groups":
        return None
    if weights is None and isinstance(value, Obj) and it.kind(state, value) == "module":
        return model_weights(it, value)
    return weights


def is_infinite(value: Value | None) -> bool:
    if isinstance(value, Const) and isinstance(value.value, float):
        return value.value == float("inf")
    return isinstance(value, External) and value.name in ("math.inf", "torch.inf", "numpy.inf", "np.inf", "numpy.Inf")


def norm_of(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    value = argument(args, 0, "tensors")
    read_grads(it, state, instr, value if value is not None else NONE, callee.name.rpartition(".")[2])
    return one(state, result(it, state, instr, callee, args))


def touch_grads(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """torch functions over gradients: norms read them, tests for finiteness do not count, foreach products may unscale."""
    last = callee.name.rpartition(".")[2]
    found = [v for _, v in args for r in (v, *state.heap.get(v, {}).values()) if isinstance(r, Tensors) and r.kind == "grad" for v in (r,)]
    if not found:
        return call_unknown(it, state, instr, callee, args)
    grads = found[0]
    if last in ("_foreach_mul_", "_foreach_div_"):
        factor = argument(args, 1)
        flow = flow_of(factor) if factor is not None else PLAIN
        inverse = {"scale": "1/scale", "1/scale": "scale"}
        wanted = inverse.get(flow.factor, flow.factor) if last == "_foreach_div_" else flow.factor
        scale_grads(it, state, instr.at, grads, replace(flow, factor=wanted), f"torch.{last}")
    elif last == "_amp_foreach_non_finite_check_and_unscale_":
        scale_grads(it, state, instr.at, grads, Flow(UNSURE, None, "1/scale"), f"torch.{last}")
    elif last in ("norm", "vector_norm", "_foreach_norm", "histc", "histogram", "var", "std"):
        read_grads(it, state, instr, grads, f"torch.{last}")
    elif last in ("stack", "cat", "zeros_like", "empty_like", "clone"):
        return one(state, grads if last in ("stack", "cat", "clone") else result(it, state, instr, callee, ()))
    return one(state, result(it, state, instr, callee, ()))


def read_grads(it: Interpreter, state: State, instr: p.Call, value: Value, api: str) -> None:
    if isinstance(value, Obj):
        value = next((v for v in state.heap.get(value, {}).values() if isinstance(v, Tensors)), value)
    if isinstance(value, Tensors) and value.kind in ("grad", "params", "param"):
        if value.kind != "grad" and api != "get_total_norm":
            return
        if isinstance(value.flow.scaled, Named) and not value.flow.factor and value.weights is None and value.part:
            it.emit(  # a gradient taken as a value (torch.autograd.grad), whose scale nothing has divided out
                state, Grads(it.where(state, instr.at), when(state), None, "read", api, "scale", value.flow.scaled)
            )
            return
        if value.flow.scaled is not None or value.flow.factor:
            return  # a gradient already multiplied by something that carries the scale: not the stored one
        it.emit(state, Grads(it.where(state, instr.at), when(state), value.weights, "read", api))


def wrap(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> Outcome:
    inner = argument(args, 0, "module", "model")
    if inner is None:
        return one(state, External(name))
    how = "fsdp1" if name in it.apis.fsdp1 else "fsdp2" if name in it.apis.fsdp2 else "ddp"
    if isinstance(inner, (Obj, Sym)):
        it.emit(state, Sharded(it.where(state, instr.at), when(state), model_weights(it, inner), how))
    return one(state, inner)


def load_weights(it: Interpreter, state: State, instr: p.Call, args: Args) -> Outcome:
    """``Model.from_pretrained(name, torch_dtype=…)``: a model whose weights have that dtype."""
    value = next((v for k, v in args if k in it.apis.load_arguments), None)
    outcome: Outcome = []
    for branch, chosen in choices(it, state, value):
        model = Obj((instr.at, branch.frame), External("torch.nn.loaded.Model"))
        branch.heap[model] = {}
        branch.owned.discard(("heap", model))
        dtype = dtype_in(branch, chosen)
        if dtype is not None:
            how = f"from_pretrained(dtype={dtype})"
            it.emit(branch, WeightsTake(it.where(branch, instr.at), when(branch), frozenset({weight_path(it, model)}), dtype, how))
        outcome.append((branch, model))
    return outcome


def save(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``torch.save``: what the checkpoint holds."""
    value = argument(args, 0, "obj")
    optimizers: list[Named] = []
    scalers: list[Named] = []
    modules, complete = False, is_container(value) and "*" not in state.heap.get(value, {}) if value is not None else False
    if value is not None:
        for reached in reachable(state, value, 3):
            if isinstance(reached, Sym) and reached.key[0] == "state_dict":
                owner = reached.key[1]
                if is_scaler(it, state, owner):
                    scalers.append(named(owner, text_of(owner)))
                elif is_optimizer(it, state, owner):
                    optimizers.append(named(owner, reached.text.removesuffix(".state_dict()")))
                else:
                    modules = True
            elif isinstance(reached, Sym) and reached is not value and reached.key[0] == "site":
                complete = complete and not any(is_scaler(it, state, o) for o in reached.of)
    it.emit(state, Checkpoint(it.where(state, instr.at), when(state), True, complete, tuple(optimizers), tuple(scalers), modules))
    return one(state, NONE)


def children(it: Interpreter, state: State, args: Args) -> list[Value]:
    """The modules that a module is made of, where they are handed to it."""
    found: list[Value] = []
    for _, value in args:
        known = elements(it, state, value) if not isinstance(value, Sym) else None
        found.extend(known if known is not None else [value])
    return found


def born(it: Interpreter, state: State, instr: p.Call, module: Obj) -> None:
    """A module is made: its weights take the default dtype."""
    default = state.heap.get(External("torch"), {}).get("default dtype")
    dtype = dtype_of(default) if default is not None else None
    if dtype is not None:
        weights = frozenset({weight_path(it, module)})
        it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, dtype, f"made under set_default_dtype({dtype})"))


def set_default_dtype(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    outcome: Outcome = []
    for branch, chosen in choices(it, state, argument(args, 0, "d")):
        dtype = dtype_in(branch, chosen)
        it.emit(branch, Setting(it.where(branch, instr.at), when(branch), "default_dtype", Known(dtype) if dtype else None))
        branch.attributes(External("torch"))["default dtype"] = External(f"torch.{dtype}") if dtype else NONE
        outcome.append((branch, NONE))
    return outcome


def set_precision(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    setting(it, state, "float32_matmul_precision", argument(args, 0, "precision") or NONE, instr.at)
    return one(state, NONE)


def autograd_backward(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    loss = argument(args, 0, "tensors")
    backward(it, state, instr, loss if loss is not None else NONE)
    return one(state, NONE)


def partial(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    if not args:
        return call_unknown(it, state, instr, callee, args)
    return one(state, Partial(args[0][1], args[1:]))


def nullcontext(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    return one(state, Obj((instr.at, "null"), External("contextlib.nullcontext")))


def chain(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for keyword, value in args if keyword is None]
    if len(values) == len(args) and values and all(isinstance(v, Tensors) for v in values):
        weights: Weights | None = frozenset()
        for value in values:
            assert isinstance(value, Tensors)
            weights = None if weights is None or value.weights is None else weights | value.weights
        return one(state, replace(values[0], weights=weights))  # type: ignore[type-var]
    return one(state, result(it, state, instr, callee, ()))


def stream(kind: str) -> Callable[..., Outcome]:
    def call(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
        parts = tuple(value for keyword, value in args if keyword in (None, "iterable"))
        if not parts or open_ended(args):
            return one(state, result(it, state, instr, callee, args))
        return one(state, Stream(kind, parts[:1] if kind == "enumerate" else parts))

    return call


def range_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    return one(state, it.site(state, instr.at, "range(…)", PLAIN, ()))


def getattr_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    from precisionlint.source.evaluate import attribute

    values = [value for _, value in args]
    if len(values) >= 2 and isinstance(values[1], Const) and isinstance(values[1].value, str):
        found = attribute(it, state, values[0], values[1].value)
        return one(state, result(it, state, instr, callee, ()) if isinstance(found, Method) else found)
    if len(values) >= 2 and isinstance(values[0], External):
        value = it.derived(("getattr", values[0], values[1]), f"getattr({text_of(values[0])}, {text_of(values[1])})", (values[1],))
        if isinstance(value, Sym) and isinstance(values[1], Sym) and isinstance(values[1].default, Const):
            default = values[1].default.value
            if isinstance(default, str):
                value.default = External(it.apis.canonical(f"{values[0].name}.{default}"))
        return one(state, value)
    return one(state, result(it, state, instr, callee, ()))


def setattr_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for _, value in args]
    if len(values) == 3 and isinstance(values[1], Const) and isinstance(values[0], (Obj, Sym)):
        state.attributes(values[0])[values[1].value] = values[2]
    return one(state, NONE)


def filter_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = [value for _, value in args]
    if len(values) == 2 and isinstance(values[1], Tensors):
        kind = "params" if values[1].kind == "params" else values[1].kind
        return one(state, replace(values[1], kind=kind))
    return one(state, result(it, state, instr, callee, ()))


def super_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    frame: int | None = state.frame
    while frame is not None:
        info = it.frames[frame]
        if info.function is not None and info.function.params:
            receiver = state.frames.get(frame, {}).get(info.function.params[0].name)
            if isinstance(receiver, Obj) and isinstance(receiver.cls, Class):
                for cls in it.mro(state, receiver.cls):
                    if isinstance(cls, Class) and info.function in cls.cls.methods:
                        return one(state, Super(receiver, cls))
        frame = info.parent
    return one(state, result(it, state, instr, callee, ()))


def float_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    value = argument(args, 0)
    if isinstance(value, Const) and isinstance(value.value, (int, float, str)):
        try:
            return one(state, const(float(value.value)))
        except (ValueError, OverflowError):
            pass
    if value is None:
        return one(state, const(0.0))
    return one(state, it.derived(("pure", callee.name, value), text_of(value), (value,), flow_of(value)))


def bool_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``bool(x)`` asks of x what ``if x`` asks."""
    value = argument(args, 0)
    if value is None:
        return one(state, FALSE)
    known = truth(state, value)
    if known is not None:
        return one(state, const(known))
    return one(state, as_cond(value) or value)


def scale_loss(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """apex: ``with amp.scale_loss(loss, optimizer) as scaled_loss``: it unscales when the block is left."""
    obj = Obj((instr.at, state.frame), External("scale_loss"))
    state.heap[obj] = {"loss": it.site(state, (instr.at, "scaled"), "scaled_loss", Flow(UNSURE), ())}
    state.owned.discard(("heap", obj))
    return one(state, obj)


def amp_initialize(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    values = tuple(value for keyword, value in args if keyword in (None, "models", "optimizers"))[:2]
    return one(state, Tup(values) if len(values) > 1 else (values[0] if values else NONE))


def namedtuple_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    return one(state, result(it, state, instr, callee, ()))


def field_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    default = argument(args, 9, "default")
    return one(state, default if default is not None else result(it, state, instr, callee, ()))


def dict_(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    obj = Obj((instr.at, state.frame), External("builtins.dict"))
    items: dict[Any, Value] = {}
    for keyword, value in args:
        if keyword is None or keyword == "**":
            items.update(state.heap.get(value, {"*": value}) if is_container(value) else {"*": value})
        elif keyword != "*":
            items[keyword] = value
    state.heap[obj] = items
    state.owned.discard(("heap", obj))
    return one(state, obj)


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


EXTERNAL: dict[str, Callable[..., Outcome]] = {
    "torch.autograd.grad": autograd_grad,
    "torch.library.impl": library_impl,
    "builtins.sum": builtin_sum,
    "functools.partial": partial,
    "contextlib.nullcontext": nullcontext,
    "itertools.chain": chain,
    "torch.save": save,
    "torch.set_default_dtype": set_default_dtype,
    "torch.set_float32_matmul_precision": set_precision,
    "torch.autograd.backward": autograd_backward,
    "builtins.enumerate": stream("enumerate"),
    "builtins.zip": stream("zip"),
    "builtins.range": range_,
    "builtins.getattr": getattr_,
    "builtins.setattr": setattr_,
    "builtins.filter": filter_,
    "builtins.super": super_,
    "builtins.float": float_,
    "builtins.bool": bool_,
    "builtins.dict": dict_,
    "dataclasses.field": field_,
    "apex.amp.scale_loss": scale_loss,
    "apex.amp.initialize": amp_initialize,
}


# -- methods


def call_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """A method of something that the project does not define."""
    if isinstance(receiver, Super):
        receiver = receiver.receiver
    if is_container(receiver):
        return container_method(it, state, instr, receiver, name, args)  # type: ignore[arg-type]
    if isinstance(receiver, Tensors):
        return tensors_method(it, state, instr, receiver, name, args)
    if name in SCALER_METHODS and is_scaler(it, state, receiver, name):
        return scaler_method(it, state, instr, receiver, name, args)
    if name == "backward":
        return backward_method(it, state, instr, receiver, args)
    if name in ("step", "zero_grad", "state_dict") and is_optimizer(it, state, receiver):
        return optimizer_method(it, state, instr, receiver, name, args)
    if name == "step" and isinstance(receiver, (Sym, Obj)) and SCHEDULER_NAME.search(receiver_text(instr)):
        guarded = any(FINITE.search(label) or "scale" in label for label in when(state))
        it.emit(state, SchedulerStep(it.where(state, instr.at), when(state), named(receiver, receiver_text(instr)), guarded, it.innermost_loop(state)))
        return one(state, NONE)
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
    callee = Method(receiver, name)
    hidden = receiver if isinstance(receiver, Obj) and hides_scaler(it, state, receiver) else None
    outcome = call_unknown(it, state, instr, callee, args, hidden)
    if isinstance(receiver, Sym) and receiver.flow is not PLAIN:
        flow = receiver.flow
        return [(s, carry(it, s, instr, v, flow)) for s, v in outcome]
    return outcome


def carry(it: Interpreter, state: State, instr: p.Call, value: Value, flow: Flow) -> Value:
    """A method's result carries what its receiver carried."""
    if isinstance(value, Sym):
        return it.site(state, (instr.at, "of"), value.text, join(flow, value.flow), value.of)
    return value


def receiver_text(instr: p.Call) -> str:
    return name_of(instr.func.obj) if isinstance(instr.func, p.Attr) else name_of(instr.func)


def hides_scaler(it: Interpreter, state: State, obj: Obj) -> bool:
    """Whether an unread method of an object can get at a scaler: an object of a class with a base that was not read."""
    return isinstance(obj.cls, Class) and any(
        isinstance(base, (External, Sym)) and not (isinstance(base, External) and it.apis.kind(base.name) == "module")
        for base in it.mro(state, obj.cls)[1:]
    )


def scaler_method(it: Interpreter, state: State, instr: p.Call, scaler: Value, name: str, args: Args) -> Outcome:
    it.coverage.scalers.add(scaler.site if isinstance(scaler, Obj) else scaler)
    enabled: Value = state.heap.get(scaler, {}).get("enabled", TRUE) if isinstance(scaler, Obj) else TRUE
    if name == "is_enabled":
        return one(state, enabled)
    if name == "state_dict":
        return one(state, it.derived(("state_dict", scaler), f"{receiver_text(instr)}.state_dict()", ()))
    if name == "load_state_dict":
        return one(state, NONE)
    me = named(scaler, receiver_text(instr))
    outcome: Outcome = []
    condition = as_cond(enabled)
    for on, branch in it.fork(state, enabled):
        if on and name == "scale" and condition is not None:
            outcome.extend(scaler_scale(it, branch, instr, me, args, condition.text))
            continue
        act = SCALER_ON[name] if on else SCALER_OFF[name]
        outcome.extend(act(it, branch, instr, me, args))
    return outcome


def scaler_scale(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args, condition: str = "") -> Outcome:
    loss = argument(args, 0, "outputs") or NONE
    flow = flow_of(loss)
    where = it.where(state, instr.at)
    labels = (*when(state), condition) if condition else when(state)
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


def optimizer_weights(it: Interpreter, state: State, optimizer: Value) -> Weights | None:
    params = state.heap.get(optimizer, {}).get("params") if isinstance(optimizer, Obj) else None
    return weights_of(it, state, params) if params is not None else None


def scaler_step(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    optimizer = argument(args, 0, "optimizer") or NONE
    name = arg_name(instr, 0, "optimizer")
    it.emit(state, Step(it.where(state, instr.at), when(state), named(optimizer, name), me, False, it.innermost_loop(state)))
    return one(state, result(it, state, instr, External("step"), ()))


def scaler_update(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    it.emit(state, Update(it.where(state, instr.at), when(state), me))
    return one(state, NONE)


def scaler_get(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    where = it.where(state, instr.at)
    it.emit(state, ScaleRead(where, when(state), me, it.innermost_loop(state)))
    return one(state, it.site(state, instr.at, f"{me.name}.get_scale()", Flow(me, None, "scale"), ()))


def plain_scale(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, argument(args, 0, "outputs") or NONE)


def plain_step(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    optimizer = argument(args, 0, "optimizer") or NONE
    name = arg_name(instr, 0, "optimizer")
    it.emit(state, Step(it.where(state, instr.at), when(state), named(optimizer, name), None, False, it.innermost_loop(state)))
    return one(state, NONE)


def no_effect(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, NONE)


def plain_get(it: Interpreter, state: State, instr: p.Call, me: Named, args: Args) -> Outcome:
    return one(state, const(1.0))


SCALER_ON = {"scale": scaler_scale, "unscale_": scaler_unscale, "step": scaler_step, "update": scaler_update, "get_scale": scaler_get}
SCALER_OFF = {"scale": plain_scale, "unscale_": no_effect, "step": plain_step, "update": no_effect, "get_scale": plain_get}


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
    it.emit(
        state,
        Backward(
            it.where(state, instr.at), when(state), scale, known_region(flow.region), known_region(region_of(state)), flow.scaled_at,
        ),
    )  # fmt: skip


def from_outside(value: Value) -> bool:
    """Whether a value came in from a caller that is not read: it may carry anything."""
    while isinstance(value, (Sym, Cond)):
        if isinstance(value, Cond):
            value = value.sym
            continue
        kind = value.key[0]
        if kind in ("param", "free"):
            return True
        if kind in ("attr", "index", "item"):
            value = value.key[1]
        elif kind == "op":
            return any(from_outside(side) for side in value.key[2:] if isinstance(side, (Sym, Cond)))
        else:
            return False
    return isinstance(value, Obj) or value == NONE


def optimizer_method(it: Interpreter, state: State, instr: p.Call, optimizer: Value, name: str, args: Args) -> Outcome:
    it.coverage.optimizers.add(optimizer.site[0] if isinstance(optimizer, Obj) else optimizer)
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
    for one_state in states:
        guarded = any(FINITE.search(label) for label in when(one_state))
        it.emit(one_state, Step(it.where(one_state, instr.at), when(one_state), me, None, guarded, it.innermost_loop(one_state)))
    return [(one_state, NONE) for one_state in states]


def one_of_many(expr: p.Expr) -> bool:
    """Whether an expression picks one parameter out of a list: ``params[0].grad.data.mul_``."""
    while isinstance(expr, p.Attr):
        expr = expr.obj
    return isinstance(expr, p.Index) and isinstance(expr.key, p.Const) and isinstance(expr.key.value, int)


def tensors_method(it: Interpreter, state: State, instr: p.Call, tensors: Tensors, name: str, args: Args) -> Outcome:
    """Methods of parameters and gradients."""
    factor = argument(args, 0)
    flow = flow_of(factor) if factor is not None else PLAIN
    if one_of_many(instr.func):
        tensors = replace(tensors, part=True)
    if tensors.kind == "grad":
        if name in ("mul_", "div_", "mul", "div"):
            inverse = {"scale": "1/scale", "1/scale": "scale"}
            if name.startswith("div"):
                flow = replace(flow, factor=inverse.get(flow.factor, flow.factor))
            if name.endswith("_"):
                scale_grads(it, state, instr.at, tensors, flow, f".grad.{name}")
                return one(state, tensors)
            return one(state, replace(tensors, flow=flow))
        if name in ("copy_", "set_") and factor is not None:
            scale_grads(it, state, instr.at, tensors, flow, f".grad.{name}")
            return one(state, tensors)
        if name in ("zero_", "fill_"):
            it.emit(state, ZeroGrad(it.where(state, instr.at), when(state), None if tensors.part else tensors.weights, None))
            return one(state, tensors)
        if name in ("clamp_", "clip_", "clamp_max_"):
            it.emit(state, Grads(it.where(state, instr.at), when(state), tensors.weights, "clip", f".grad.{name}", "other"))
            return one(state, tensors)
        if name in ("data", "detach", "float", "clone", "to", "cpu", "view", "flatten", "reshape", "type", "double", "half", "coalesce"):
            return one(state, tensors)
        if name in ("norm", "histc") or (name in ("square", "pow") and isinstance(tensors.flow.scaled, Named)):
            read_grads(it, state, instr, tensors, f".grad.{name}" if name != "square" else "a squared norm")
        if name in ("sum", "mean", "sqrt", "square", "pow", "norm"):
            return one(state, result(it, state, instr, Method(tensors, name), ()))
        return one(state, result(it, state, instr, Method(tensors, name), ()))
    if name == "requires_grad_" and tensors.weights is not None:
        trainable = factor != FALSE
        it.emit(state, WeightsTake(it.where(state, instr.at), when(state), tensors.weights, None, "requires_grad_", trainable))
        return one(state, tensors)
    if name in ("clone", "float", "double", "half", "bfloat16", "to", "type"):
        return one(state, it.site(state, instr.at, f"{receiver_text(instr)}.{name}(…)", PLAIN, ()))  # a copy: other weights
    if name in ("detach", "view", "cuda", "cpu", "data"):
        return one(state, tensors)
    return one(state, result(it, state, instr, Method(tensors, name), ()))


def module_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """Methods that return the same thing: moves and casts of a model (or of a tensor, which owns no weights)."""
    if name in CASTS and not args:
        take(it, state, instr, receiver, CASTS[name], f".{name}()")
        return one(state, receiver)
    if name == "to":
        outcome: Outcome = []
        wanted = argument(args, 9, "dtype")
        if wanted is None:
            wanted = next((v for k, v in args if k is None and (dtype_of(v) or looked_up(v))), None)
        for branch, chosen in choices(it, state, wanted):
            dtype = dtype_in(branch, chosen)
            if dtype is not None:
                take(it, branch, instr, receiver, dtype, f".to({dtype})")
            outcome.append((branch, receiver))
        return outcome
    if name == "requires_grad_":
        trainable = argument(args, 0, "requires_grad") != FALSE
        weights = frozenset({weight_path(it, receiver)})
        it.emit(state, WeightsTake(it.where(state, instr.at), when(state), weights, None, "requires_grad_", trainable))
    return one(state, receiver)


def looked_up(value: Value) -> bool:
    return isinstance(value, Sym) and value.key[0] == "index" and is_container(value.key[1])


def take(it: Interpreter, state: State, instr: p.Call, receiver: Value, dtype: str, how: str) -> None:
    where = it.where(state, instr.at)
    if is_model(it, state, receiver):
        it.emit(state, WeightsTake(where, when(state), frozenset({weight_path(it, receiver)}), dtype, how))
    else:
        it.emit(state, Cast(where, when(state), receiver, dtype))


def is_model(it: Interpreter, state: State, value: Value) -> bool:
    """Whether a value is a module: made as one, or unknown and used as only a module is."""
    if isinstance(value, Obj):
        return it.kind(state, value) == "module"
    if not isinstance(value, Sym):
        return False
    name = last_name(value)
    return bool(MODEL_NAME.search(name)) or name in it.module_of(state).model_names or value in it.weight_roots


def parameters(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    if not isinstance(receiver, (Sym, Obj)):
        return call_unknown(it, state, instr, Method(receiver, name), args)
    kind = "named" if name.startswith("named") else "params"
    return one(state, Tensors(kind, model_weights(it, receiver), name not in ("parameters", "named_parameters")))


def parts_of(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """The submodules of a model: each is part of it."""
    if not isinstance(receiver, (Sym, Obj)):
        return call_unknown(it, state, instr, Method(receiver, name), args)
    part = it.derived(("part", receiver, "…"), f"a part of {text_of(receiver)}", (receiver,))
    if name.startswith("named"):
        return one(state, Many(Tup((it.derived(("partname", receiver), "name", (receiver,)), part))))
    return one(state, Many(part))


def model_zero_grad(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    weights = model_weights(it, receiver) if isinstance(receiver, (Sym, Obj)) else None
    it.emit(state, ZeroGrad(it.where(state, instr.at), when(state), weights, None))
    return one(state, NONE)


def model_state_dict(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    return one(state, it.derived(("state_dict", receiver), f"{receiver_text(instr)}.state_dict()", ()))


def items_method(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    if args:
        return call_unknown(it, state, instr, Method(receiver, name), args)
    return one(state, Stream("same" if name == "keys" else name, (receiver,)))


def item(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    return one(state, it.derived(("call", receiver, name), text_of(receiver), (receiver,), flow_of(receiver)))


def parse_args(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    """argparse: the options are unknown, each with its default."""
    options = it.site(state, instr.at, "args", PLAIN, ())
    for key, default in state.heap.get(receiver, {}).items():
        if isinstance(key, tuple) and key[0] == "option":
            value = it.derived(("attr", options, key[1]), f"args.{key[1]}", (options,))
            if isinstance(value, Sym):
                value.default = default
    if name == "parse_known_args":
        return one(state, Tup((options, it.free("…"))))
    return one(state, options)


def add_argument(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    default = argument(args, 99, "default")
    flags = [v.value for k, v in args if k is None and isinstance(v, Const) and isinstance(v.value, str)]
    dest = argument(args, 99, "dest")
    if default is not None and isinstance(receiver, (Sym, Obj)):
        option = dest.value if isinstance(dest, Const) else next((f for f in flags if f.startswith("--")), flags[0] if flags else "")
        state.attributes(receiver)[("option", str(option).lstrip("-").replace("-", "_"))] = default
    return one(state, NONE)


def argument_group(it: Interpreter, state: State, instr: p.Call, receiver: Value, name: str, args: Args) -> Outcome:
    return one(state, receiver)


METHODS: dict[str, Callable[..., Outcome]] = {
    "parameters": parameters,
    "named_parameters": parameters,
    "trainable_parameters": parameters,
    "zero_grad": model_zero_grad,
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
    "add_argument": add_argument,
    "add_argument_group": argument_group,
    "add_mutually_exclusive_group": argument_group,
}


def container_method(it: Interpreter, state: State, instr: p.Call, obj: Obj, name: str, args: Args) -> Outcome:
    """Methods of lists and dicts."""
    values = [value for _, value in args]
    items = state.heap.get(obj, {})
    if name in ("items", "values"):
        return one(state, Stream(name, (obj,)))
    if name == "keys":
        return one(state, Stream("same", (obj,)))
    if name == "append" and values:
        writable = state.attributes(obj)
        if "*" in writable or len(writable) >= 8:
            writable["*"] = values[0]
        else:
            writable[len(writable)] = values[0]
        return one(state, NONE)
    if name in ("extend", "update") and values:
        writable = state.attributes(obj)
        known = elements(it, state, values[0])
        if name == "update" and is_container(values[0]):
            writable.update(state.heap.get(values[0], {}))
        elif name == "extend" and known is not None and "*" not in writable:
            for value in known:
                writable[len(writable)] = value
        else:
            writable["*"] = values[0] if isinstance(values[0], Tensors) else element_of(it, state, values[0], instr.at)
        return one(state, NONE)
    if name in ("get", "pop", "setdefault", "popitem") and values and isinstance(values[0], Const):
        key = values[0].value
        if key in items:
            return one(state, items[key])
        if "*" not in items:
            return one(state, values[1] if len(values) > 1 else NONE)
    if name == "get" and values and isinstance(values[0], Sym):
        return one(state, it.derived(("index", obj, values[0]), f"{text_of(obj)}[{values[0].text}]", (values[0],)))
    if name in ("copy",):
        copied = Obj((instr.at, state.frame), obj.cls)
        state.heap[copied] = dict(items)
        state.owned.discard(("heap", copied))
        return one(state, copied)
    return one(state, result(it, state, instr, Method(obj, name), args))


# -- modules, and ops of the project's own


MODEL_NAME = re.compile(r"model|net(?:work)?(?:$|_|[A-Z])|encoder|decoder|generator|discriminator|critic|actor|policy|backbone|student", re.I)
SENSITIVE = re.compile(
    r"@|matmul|mm\(|einsum|linear|conv|softmax|\bexp\(|\blog\(|\.pow\(|\*\*|\bsum\(|mean\(|norm|rsqrt|\[grid|\[\(|kernel|_cuda\b|triton"
)
"""What a function's body must hold for its dtypes to matter: products, sums, exponentials, launches."""
INSIDE_CASTS = re.compile(
    r"\.(?:float|half|bfloat16|double)\(\)|\.to\((?:dtype=)?(?:torch|tl)\.|\.type\(|dtype=torch\.float32|autocast|\.to\(\w*(?:type|dtype)\)"
)


def module_called(it: Interpreter, state: State, instr: p.Call, callee: Value) -> None:
    """A model runs: in the half region in force, or in fp32."""
    if isinstance(callee, Obj):
        name = callee.cls.name if isinstance(callee.cls, External) else ""
        if it.kind(state, callee) != "module" or name.endswith("Loss"):
            return
    elif not (isinstance(callee, Sym) and MODEL_NAME.search(last_name(callee)) and callee.key[0] != "free"):
        return
    region = region_of(state)
    dtype = region.dtype or "?" if isinstance(region, Region) else "?" if region == UNSURE else None
    path = weight_path(it, callee)
    it.emit(state, Op(it.where(state, instr.at), when(state), "module", (path,), None, (dtype, None, None)))


def call_custom_op(it: Interpreter, state: State, instr: p.Call, op: Obj, args: Args) -> Outcome:
    """An op made with torch.library."""
    func = state.heap.get(op, {}).get("impl")
    assert isinstance(func, Func)
    registered = any((op, name) in it.registered for name in ("register_autocast:cuda", "register_autocast:?"))
    own_op(it, state, instr, func, "op", registered)
    return one(state, result(it, state, instr, op, args))


def launch(it: Interpreter, state: State, instr: p.Call, kernel: Func, args: Args) -> Outcome:
    """``kernel[grid](…)``: a Triton launch."""
    names = it.decorators(state, kernel)
    made = it.decorator_values.get(kernel.function, ())
    if any(name.startswith("triton.") for name in names) or any("triton" in text_of(value) for value in made):
        around = it.frames[state.frame].function
        casts = around is not None and bool(INSIDE_CASTS.search(it.module_of(state).source_of(around)))
        own_op(it, state, instr, kernel, "launch", casts)
    return one(state, result(it, state, instr, kernel, args))


def own_op(it: Interpreter, state: State, instr: p.Call, func: Func, kind: str, autocast: bool) -> None:
    region = known_region(region_of(state))
    if region is not None and region.device == "cpu":
        region = None
    if kind == "op":
        source = func.module.source_of(func.function).partition("def ")[2]
        autocast = autocast or bool(INSIDE_CASTS.search(source))
    defined = it.where_in(state, func.module, func.function.node, instr.at)
    it.emit(state, CustomOp(it.where(state, instr.at), when(state), func.function.name, kind, autocast, region, defined))  # type: ignore[arg-type]


def function_apply(it: Interpreter, state: State, instr: p.Call, cls: Class, args: Args) -> Outcome:
    """``SomeFunction.apply(…)`` of a torch.autograd.Function."""
    forward = state.heap.get(cls, {}).get("forward")
    if External("torch.autograd.Function") in it.mro(state, cls) and isinstance(forward, Func):
        decorators, _, source = forward.module.source_of(forward.function).partition("def ")
        sound = "custom_fwd" in decorators or bool(INSIDE_CASTS.search(source)) or not SENSITIVE.search(source)
        region = known_region(region_of(state))
        if region is not None and region.device == "cpu":
            region = None
        defined = it.where_in(state, cls.module, cls.cls.node, instr.at)
        it.emit(state, CustomOp(it.where(state, instr.at), when(state), cls.cls.name, "function", sound, region, defined))
    return one(state, result(it, state, instr, cls, args))
