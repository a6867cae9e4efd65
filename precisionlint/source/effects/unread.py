"""Calls that cannot be read: what they may have done with what they were given, and what their names say that they did."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from precisionlint.events import Driven, Grads, Lost, Named, Weights, Written
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.checkpoints import handed_over, saved
from precisionlint.source.effects.common import (
    MODEL_NAME,
    Outcome,
    argument,
    is_optimizer,
    is_scaler,
    last_word,
    result,
    when,
)
from precisionlint.source.objects import model_weights, name_of, named, weights_of
from precisionlint.source.parsing import DEFINITIONS, walk
from precisionlint.source.state import State, reachable
from precisionlint.source.values import (
    NONE,
    Class,
    Const,
    External,
    Flow,
    Func,
    Obj,
    Partial,
    Sym,
    Tensors,
    Value,
    flow_of,
    join,
)
from precisionlint.subjects.names import last_name

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


HARMLESS = regex(
    r"^(?:print|log\w*|info|debug|warn\w*|error|write\w*|add_\w+|summary|format|len|str|repr|id|type|is_\w+|has_\w+|get_\w+|"
    r"state_dict|load_state_dict|load\w*|save\w*|resume\w*|restore\w*|register\w*|watch|isinstance|hasattr|getattr|setattr|append|"
    r"extend|insert|setdefault|to|cuda|cpu|deepcopy|copy|asdict|vars|update_\w*(?:lr|meter|log)\w*|dict|list|tuple|set|prepare\w*|init\w*|"
    r"train|eval|track\w*|record\w*|report\w*|plot\w*)$"
)


READS_GIVEN = regex(r"hist|log|scalar|record|write|print|norm", re.I)


READS_GRADS = regex(
    r"grad\w*_norm|norm\w*_grad|log\w*_grad|grad\w*_log|gradient_norm|plot_grad|grad(?:ient)?s?_(?:stat|hist|summar)",
    re.I,
)
OF_GRADS = regex(r"(?:^|[._])grad(?:ient)?s?\.(?:stat|norm|hist|log|summar)\w*$", re.I)
"""A function that measures, of a module or an object that is called after gradients: ``gradients.stats``."""


CLIPS_GRADS = regex(r"^clip_\w*grad|grad\w*_clip(?:$|_|p)", re.I)


def call_unknown(
    it: Interpreter, state: State, instr: p.Call, callee: Value, args: Args, receiver: Value | None = None
) -> Outcome:
    """A call that cannot be read. It can do what its arguments allow: who gets the scaler may unscale, step and update."""
    name = name_of(instr.func).rpartition(".")[2] or last_word(callee)
    values = [value for _, value in args] + ([receiver] if receiver is not None else [])
    if not HARMLESS.match(name) and not (
        isinstance(callee, External) and (callee.benign or callee.name.startswith("builtins."))
    ):
        for value in values:
            for reached in reachable(state, value, 2):
                if is_scaler(it, state, reached):
                    it.emit(state, Lost(it.where(state, instr.at), (), reached))
    saved(it, state, instr, name, args)
    handed_over(it, state, instr, name, values)
    handed_gradients(it, state, instr, name, args)
    handed_weights(it, state, instr, name, values)
    handed_optimizers(it, state, instr, name, values)
    states = [state]
    for value in values:
        if isinstance(value, (Func, Partial)):
            states = [after for before in states for after in it.call_back(instr, before, value)]
    return [(after, result(it, after, instr, callee, args, receiver)) for after in states]


READS_WEIGHTS = regex(r"clip|norm|numel|count|print|log|len|zero_grad|save|watch|compile", re.I)


def handed_weights(it: Interpreter, state: State, instr: p.Call, name: str, values: list[Value]) -> None:
    """An unread function that gets parameters, or a model, may write them."""
    if READS_WEIGHTS.search(name):
        return
    for value in values:
        weights: Weights | None = None
        if isinstance(value, Tensors) and value.kind in ("params", "param", "named"):
            weights = value.weights
        elif isinstance(value, Obj) and it.kind(state, value) == "module":
            weights = model_weights(it, value)
        if weights is not None:
            it.emit(state, Written(it.where(state, instr.at), (), weights, "maybe", name))


TRAINS_GIVEN = regex(r"(?:^|_)(?:train|fit|finetune|fine_tune)(?:$|_)|^(?:train|fit)[A-Z]|_epochs?$")


def handed_optimizers(it: Interpreter, state: State, instr: p.Call, name: str, values: list[Value]) -> None:
    """An unread function that trains by its name, and is given an optimizer, steps it."""
    if TRAINS_GIVEN.search(name):
        for value in values:
            if is_optimizer(it, state, value):
                it.emit(state, Driven(it.where(state, instr.at), when(state), named(value, "optimizer")))


def handed_gradients(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> None:
    """An unread function that gets gradients, or a model whose gradients it is named after: a log of them, their norm, a clip."""
    if READS_GIVEN.search(name):
        for _, value in args:
            if isinstance(value, Tensors) and value.kind == "grad":
                read_grads(it, state, instr, value, name)
                return
    measures = READS_GRADS.search(name) or OF_GRADS.search(name_of(instr.func))
    if not (measures or CLIPS_GRADS.search(name)):
        return
    for _, value in args[:2]:
        weights = grads_weights(it, state, value)
        if isinstance(value, Sym) and MODEL_NAME.search(last_word(value)):
            weights = model_weights(it, value)
        if weights is None:
            continue
        if CLIPS_GRADS.search(name):
            emit_clip(it, state, instr, value, argument(args, 1, "max_norm", "clip_value"), name)
        else:
            it.emit(state, Grads(it.where(state, instr.at), when(state), weights, "read", name))
        return


def emit_clip(it: Interpreter, state: State, instr: p.Call, grads: Value | None, limit: Value | None, api: str) -> None:
    weights = grads_weights(it, state, grads)
    if (limit == NONE or is_infinite(limit)) and divided_by_scale(it, state):
        return
    measures = limit == NONE or is_infinite(limit)
    factor = "scale" if limit is not None and flow_of(limit).scaled is not None else "other"
    if not measures and isinstance(limit, Const) and isinstance(limit.value, (int, float)):
        it.coverage.recipe.clips.add(f"{limit.value:g}")
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


SHOWS = regex(r"^(?:print|pprint|log|log_\w+|info|debug|warn|warning|error|add_scalars?|add_histogram)$")
"""What tells whoever runs the program a number."""
HANDS_ON = regex(
    r"^(?:item|tolist|numpy|detach|cpu|float|double|str|repr|format|round|max|min|sum|sorted|list|tuple|dict)$"
)
"""What gives a number on as it is, or one of several."""
COMPUTES = frozenset({"torch", "math", "np", "numpy", "F", "functional"})
"""Whose ``log`` is a logarithm."""
KEEPS_NUMBER = (
    ast.Attribute,
    ast.keyword,
    ast.Dict,
    ast.List,
    ast.Tuple,
    ast.Starred,
    ast.ListComp,
    ast.GeneratorExp,
    ast.DictComp,
)
"""Syntax around a number that leaves it what it is."""
DIVIDED = regex(r"/=?\s*\(?[\w.]*(?:get_scale\(\)|scale\b|scaler?_value)|\*=?\s*\(?[\w.]*inv\w*_?scale", re.I)


def divided_by_scale(it: Interpreter, state: State) -> bool:
    """Whether the function that reads gradients divides by a scale as well: its number is then put right after it was taken."""
    module = it.module_of(state)
    lines = (module.code[node.lineno - 1 : node.end_lineno] for node in scope_at(it, state))
    source = "\n".join(line for each in lines for line in each)
    return bool(DIVIDED.search(source)) or ("get_scale()" in source and "/" in source)


def scope_at(it: Interpreter, state: State) -> list[Any]:
    """The function that runs, or what stands at the top level of its file beside definitions."""
    function = it.frames[state.frame].function
    if function is not None:
        return [function.node]
    return [node for node in it.module_of(state).tree.body if not isinstance(node, DEFINITIONS)]


def only_normalises(it: Interpreter, state: State, call: Any) -> bool:
    """Whether the norm of gradients is taken to divide gradients by it: the scale is in both, as in an adversarial step
    ``epsilon * p.grad / norm``, or by the norm of other gradients that carry it too. A threshold over the norm is another matter."""
    nodes = [node for each in scope_at(it, state) for node in walk(each)]
    names = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and node.value is call
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    tested = {id(inner) for node in nodes if isinstance(node, (ast.If, ast.IfExp)) for inner in walk(node.test)}
    divides = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div)
        and any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in walk(node.left))
        for inner in walk(node.right)
    }
    read = {
        id(node) for node in nodes if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    }
    taken = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign)
        and any(isinstance(each, ast.Call) and last_name(each.func) == "grad" for each in walk(node.value))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:  # the ratio of two norms, both of gradients
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            sides = walk(node.left), walk(node.right)
            if any(call in side for side in sides) and all(takes_norm_of_gradients(side, taken) for side in sides):
                return True
    return id(call) in divides or (not read.isdisjoint(divides) and read <= divides | tested)


def goes_out(it: Interpreter, state: State, call: Any) -> bool:
    """Whether a number taken of gradients is shown as it is: printed, logged, written into a text, or kept as a plain number in a list.

    Most are taken for arithmetic with the same gradients, which is right at any scale: ``p.grad.sub_(p.grad.mean())``."""
    nodes = [node for each in scope_at(it, state) for node in walk(each)]
    above = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
    if is_shown(call, above):
        return True
    kept = [node for node in nodes if isinstance(node, ast.Assign) and handed_on(node.value, call, above)]
    names = {target.id for node in kept for target in node.targets if isinstance(target, ast.Name)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id in names]
    stored = [node.id for node in uses if isinstance(node.ctx, ast.Store)]
    return len(stored) == len(names) and any(is_shown(node, above) for node in uses if isinstance(node.ctx, ast.Load))


def handed_on(value: ast.expr, call: Any, above: Mapping[int, ast.AST]) -> bool:
    """Whether an expression is a number that is taken by a call, or its like."""
    node: ast.AST | None = call
    while node is not None and node is not value:
        node = above.get(id(node))
        if not (
            isinstance(node, ast.Attribute) or (isinstance(node, ast.Call) and HANDS_ON.search(last_name(node.func)))
        ):
            return False
    return node is value


def is_shown(number: ast.AST, above: Mapping[int, ast.AST]) -> bool:
    """Whether a number reaches what shows it, with no arithmetic and no test between."""
    node, plain = number, False
    while (parent := above.get(id(node))) is not None:
        if isinstance(parent, ast.FormattedValue):
            return True
        if isinstance(parent, ast.Call):
            name = last_name(parent.func)
            given = node is not parent.func and COMPUTES.isdisjoint(ast.unparse(parent.func).split("."))
            if given and (SHOWS.search(name) or (plain and name == "append")):
                return True
            if not HANDS_ON.search(name):
                return False
            plain = plain or name in ("item", "tolist", "float")
        elif isinstance(parent, ast.BinOp):
            if not (isinstance(parent.op, ast.Mod) and isinstance(parent.left, ast.Constant)):  # "%f" % number
                return False
        elif not isinstance(parent, KEEPS_NUMBER):
            return False
        node = parent
    return False


def takes_norm_of_gradients(nodes: list[ast.AST], names: Set[str]) -> bool:
    """Whether a norm is taken in an expression that speaks of gradients: by ``.grad``, or by one of these names."""
    return any(isinstance(each, ast.Call) and "norm" in last_name(each.func) for each in nodes) and any(
        (isinstance(each, ast.Attribute) and each.attr == "grad") or (isinstance(each, ast.Name) and each.id in names)
        for each in nodes
    )


def read_grads(it: Interpreter, state: State, instr: p.Call, value: Value, api: str) -> None:
    if divided_by_scale(it, state) or only_normalises(it, state, instr.at):
        return
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


def carry(it: Interpreter, state: State, instr: p.Call, value: Value, flow: Flow) -> Value:
    """A method's result carries what its receiver carried."""
    if isinstance(value, Sym):
        return it.site(state, (instr.at, "of"), value.text, join(flow, value.flow), value.of)
    return value


def hides_scaler(it: Interpreter, state: State, obj: Obj) -> bool:
    """Whether an unread method of an object can get at a scaler: an object of a class with a base that was not read."""
    return isinstance(obj.cls, Class) and any(
        isinstance(base, (External, Sym)) and not (isinstance(base, External) and it.apis.kind(base.name) == "module")
        for base in it.mro(state, obj.cls)[1:]
    )
