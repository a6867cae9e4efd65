"""The project's own ops: torch.library, autograd.Function, Triton launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from precisionlint.events import CustomOp
from precisionlint.source import program as p
from precisionlint.source.effects.common import Outcome, known_region, one, region_of, result, when
from precisionlint.source.op_bodies import SENSITIVE, is_complex, launches_on_one, launches_settled, settles
from precisionlint.source.state import State
from precisionlint.source.values import Class, Const, External, Func, Obj, Value, const, text_of

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


def decorated(it: Interpreter, state: State, func: Func) -> Value:
    """What a function's name is bound to, once its decorators are through with it."""
    for value in it.decorator_values.get(func.function, ()):
        if isinstance(value, Obj) and value.cls == External("torch.library.impl"):
            it.implementations[state.heap[value]["name"].value] = func  # type: ignore[union-attr]
        if isinstance(value, Obj) and value.cls == External("torch.library.custom_op"):
            op = Obj((func.function.node, "op"), External("custom op"))
            state.allocate(op, {"impl": func})
            return op
    return func


def library_impl(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``@torch.library.impl(lib, "name", "CUDA")``: the older spelling of an op's implementation."""
    name = next((v.value for _, v in args if isinstance(v, Const) and isinstance(v.value, str)), "")
    obj = Obj((instr.at, "decorator"), External("torch.library.impl"))
    state.allocate(obj, {"name": const(name.rpartition("::")[2])})
    return one(state, obj)


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
        casts = around is not None and settles(it.module_of(state).source_of(around))
        own_op(it, state, instr, kernel, "launch", casts)
    return one(state, result(it, state, instr, kernel, args))


def own_op(
    it: Interpreter, state: State, instr: p.Call, func: Func, kind: Literal["op", "launch"], autocast: bool
) -> None:
    region = known_region(region_of(state))
    if region is not None and region.device == "cpu":
        region = None
    if kind == "op":
        source = func.module.source_of(func.function).partition("def ")[2]
        autocast = autocast or settles(source)
    node: Any = func.function.node
    if kind == "op":
        node = next(iter(node.decorator_list), node)  # where the op is made, and where its rule would be registered
    defined = it.where_in(state, func.module, node, instr.at)
    it.emit(
        state, CustomOp(it.where(state, instr.at), when(state), func.function.name, kind, autocast, region, defined)
    )


def function_apply(it: Interpreter, state: State, instr: p.Call, cls: Class, args: Args) -> Outcome:
    """``SomeFunction.apply(…)`` of a torch.autograd.Function."""
    forward = state.heap.get(cls, {}).get("forward")
    if External("torch.autograd.Function") in it.mro(state, cls) and isinstance(forward, Func):
        decorators, _, source = forward.module.source_of(forward.function).partition("def ")
        backward = state.heap.get(cls, {}).get("backward")
        casts = (
            settles(source)
            or is_complex(source)
            or (isinstance(backward, Func) and settles(backward.module.source_of(backward.function)))
            or launches_settled(source, forward.module.tree)
            or launches_on_one((param.name for param in forward.function.params[1:] if param.default is None), source)
        )
        sound = "custom_fwd" in decorators or casts or not SENSITIVE.search(source)
        region = known_region(region_of(state))
        if region is not None and region.device == "cpu":
            region = None
        defined = it.where_in(state, cls.module, cls.cls.node, instr.at)
        it.emit(
            state, CustomOp(it.where(state, instr.at), when(state), cls.cls.name, "function", sound, region, defined)
        )
    return one(state, result(it, state, instr, cls, args))
