"""What the effects share: arguments by position or name, what a value is known or named to be, and the result of a call."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from precisionlint.events import Region, Weights
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.evaluate import combine
from precisionlint.source.objects import dtype_of, is_container, name_of, weights_of
from precisionlint.source.settings import parsed
from precisionlint.source.state import State
from precisionlint.source.values import UNSURE, Cond, Const, External, Flow, Method, Obj, Sym, Value, const, text_of

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


Outcome = list[tuple[State, Value]]


CASTS = {"half": "float16", "bfloat16": "bfloat16", "float": "float32", "double": "float64"}
"""Methods that cast -> the dtype that they cast to."""


SCALER_NAME = regex(r"scaler", re.I)


OPTIMIZER_NAME = regex(r"optim|(?:^|_)opt(?:$|_|\d)|^opt[a-zA-Z]?$|_opts?$", re.I)


SCHEDULER_NAME = regex(r"sched", re.I)


OTHER_SCALER = regex(r"standard|min_?max|feature|data|target|label|robust", re.I)
"""What the scalers of data are called."""
ANY_OPTIMIZER = "torch.optim.Optimizer"
"""One of torch.optim by a name that is not known: none of them keeps an fp32 copy."""
FINITE = regex(r"finite|(?:^|_)is_?(?:nan|inf)|nan|overflow|(?:^|_)inf(?:$|_)|skip|valid", re.I)


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


def last_word(value: Value) -> str:
    """The last word of what a value is called in the program."""
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
    """A value chosen by a condition, or looked up by an unknown key: one path for each that this path still allows."""
    if isinstance(value, Sym) and value.options:
        chosen: list[tuple[State, Value | None]] = []
        for cond, option in value.options:
            branch = state.fork()
            if not (isinstance(cond, Cond) and it.assume_cond(branch, cond)):
                continue
            if isinstance(option, (Const, External)) and not it.assume_cond(branch, Cond(value, "eq", option, True)):
                continue
            chosen.append((branch, option))
        return chosen or [(state, value)]
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
                    if isinstance(item, (Const, External)) and not it.assume_cond(
                        branch, Cond(value, "eq", item, True)
                    ):
                        continue
                    result.append((branch, item))
                if result:
                    return result
    return [(state, value)]


def is_optimizer(it: Interpreter, state: State, value: Value, called: str = "") -> bool:
    """Whether a value is an optimizer: made as one, or unknown and called so where it was made or, in the program's words, here."""
    if isinstance(value, Obj):
        return it.kind(state, value) == "optimizer"
    names = (last_word(value), called.rpartition(".")[2]) if isinstance(value, Sym) else ()
    return not any(map(SCHEDULER_NAME.search, names)) and any(map(OPTIMIZER_NAME.search, names))


def is_scaler(it: Interpreter, state: State, value: Value, method: str = "", called: str = "") -> bool:
    """Whether a value is a gradient scaler: made as one, or unknown and used as only a scaler is. What was picked out of others by its
    place is what the program calls it here."""
    if isinstance(value, Obj):
        return it.kind(state, value) == "scaler"
    if isinstance(value, Sym):
        names = {last_word(value)} | ({called.rpartition(".")[2]} if value.key[0] in ("index", "item") else set())
        return method == "unscale_" or any(
            (SCALER_NAME.search(name) and not OTHER_SCALER.search(name)) or name in it.module_of(state).scaler_names
            for name in names
        )
    return False


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
    made = it.site(state, instr.at, f"{name_of(instr.func) or text_of(callee)}(…)", flow, of)
    receiver = callee.receiver if isinstance(callee, Method) else None
    parsed(it, state, values, made)
    models = [value for value in (*values, receiver) if value is not None and is_model(it, state, value)]
    if models:
        made.loose = True  # part of the model, a wrapper around it, or nothing of the kind
        for model in models[1:] if len(models) > 1 else ():
            if isinstance(model, Sym):
                model.loose = True  # one model handed to another
    return made


def detached(it: Interpreter, value: Value) -> Value:
    """What is left of a value that no gradient flows through: what is computed of it outside of its region is not computed in that."""
    if not isinstance(value, Sym) or value.flow.region is None:
        return value
    flow = Flow(value.flow.scaled, None, value.flow.factor, value.flow.scaled_at)
    return it.derived(("detached", value), value.text, (value,), flow)


def short(dtype: str) -> str:
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}.get(dtype, dtype)


def receiver_text(instr: p.Call) -> str:
    return name_of(instr.func.obj) if isinstance(instr.func, p.Attr) else name_of(instr.func)


def optimizer_weights(it: Interpreter, state: State, optimizer: Value) -> Weights | None:
    params = state.heap.get(optimizer, {}).get("params") if isinstance(optimizer, Obj) else None
    return weights_of(it, state, params) if params is not None else None


def one_of_many(expr: p.Expr) -> bool:
    """Whether an expression picks one parameter out of a list: ``params[0].grad.data.mul_``."""
    while isinstance(expr, p.Attr):
        expr = expr.obj
    return isinstance(expr, p.Index) and isinstance(expr.key, p.Const) and isinstance(expr.key.value, int)


def is_model(it: Interpreter, state: State, value: Value) -> bool:
    """Whether a value is a module: made as one, or unknown and used as only a module is."""
    if isinstance(value, Obj):
        return it.kind(state, value) == "module"
    if not isinstance(value, Sym):
        return False
    name = last_word(value)
    if value.key[0] in ("part", "cast"):
        return bool(value.key[0] == "part")
    return bool(MODEL_NAME.search(name)) or name in it.module_of(state).model_names or value in it.weight_roots


MODEL_NAME = regex(
    r"model|net(?:work)?(?:$|_|[A-Z])|encoder|decoder|generator|discriminator|critic|actor|policy|backbone|student",
    re.I,
)
