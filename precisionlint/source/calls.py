"""Calls into the project: arguments to parameters, bodies entered to a bounded depth and cost, outcomes merged."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from precisionlint.patterns import regex
from precisionlint.source import effects, repeats
from precisionlint.source import program as p
from precisionlint.source.binding import bind_fields, bind_params
from precisionlint.source.evaluate import attribute, class_attribute, elements, evaluate
from precisionlint.source.objects import dtype_of, holds_gradients, is_container, name_of
from precisionlint.source.records import SHARE, Args, BudgetError, FrameInfo, Paths
from precisionlint.source.settings import SETTINGS
from precisionlint.source.state import State
from precisionlint.source.values import (
    FALSE,
    NONE,
    PLAIN,
    Class,
    Cond,
    Const,
    External,
    Func,
    Manager,
    Method,
    Obj,
    Partial,
    Sym,
    Value,
    text_of,
)
from precisionlint.subjects.names import last_name

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter


DEPTH = 14
"""How deep calls are followed."""


HELPER_BUDGET = 500
HELPER_WIDTHS = (4, 1)
"""How many instructions a call may take that cannot train, and on how many paths it is followed: on one where that is too much for
several; where one is too much too, what it builds is unknown."""

LAUNCHES = regex(r"(?:^|[._])(?:spawn|start_processes|launch\w*|notebook_launcher|Process|Thread|run_distributed)$")
"""Calls that run a function in processes or threads of their own."""

RESULTS = 4
"""So many different outcomes of a call are always kept apart."""


def call(it: Interpreter, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    args = arguments(it, instr, state)
    for _, value in args:
        if isinstance(value, Sym) and value.key[:2] == ("op", "/"):
            effects.loss_divided(it, state, value)
    func = instr.func
    if isinstance(func, p.Attr):
        receiver = evaluate(it, state, func.obj)
        callee = attribute(it, state, receiver, func.name)
        if isinstance(callee, Method) or (isinstance(callee, Sym) and callee.key[0] == "attr"):
            return effects.call_method(it, state, instr, receiver, func.name, args)
        if isinstance(callee, Func) and effects.updates(it, state, receiver, callee):
            outcome = call_value(it, instr, state, callee, args)
            return [end for after, value in outcome for end in effects.stepped(it, after, instr, receiver, value)]
    elif isinstance(func, p.Index):
        kernel = evaluate(it, state, func.obj)
        if isinstance(kernel, Func):
            return effects.launch(it, state, instr, kernel, args)
        callee = evaluate(it, state, func)
    else:
        callee = evaluate(it, state, func)
    return call_value(it, instr, state, callee, args)


def arguments(it: Interpreter, instr: p.Call, state: State) -> Args:
    args: list[tuple[str | None, Value]] = []
    for keyword, expr in instr.args:
        value = evaluate(it, state, expr)
        if keyword == "*":
            items = elements(it, state, value)
            if items is not None:
                args.extend((None, item) for item in items)
            else:
                args.append(("*", value))
        elif keyword == "**":
            items_of = state.heap.get(value) if is_container(value) else None
            if items_of is not None and "*" not in items_of:
                args.extend((key, item) for key, item in items_of.items() if isinstance(key, str))
            else:
                args.append(("**", value))
        else:
            args.append((keyword, value))
    return tuple(args)


def call_value(it: Interpreter, instr: p.Call, state: State, callee: Value, args: Args) -> list[tuple[State, Value]]:
    effects.module_called(it, state, instr, callee)
    match callee:
        case Obj(cls=External(name="torch.nn.Sequential")):
            return call_sequential(it, instr, state, callee, args)
        case Func():
            return call_function(it, callee, args, instr, state)
        case Class():
            return instantiate(it, callee, args, instr, state)
        case Partial():
            return call_value(it, instr, state, callee.func, (*callee.args, *args))
        case Method():
            return effects.call_method(it, state, instr, callee.receiver, callee.name, args)
        case External():
            return effects.call_external(it, state, instr, callee, args)
        case Obj(cls=External(name="custom op")):
            return effects.call_custom_op(it, state, instr, callee, args)
        case Obj(cls=Class() as cls):
            method = class_attribute(it, state, cls, "__call__")
            if method is None and it.external_base(state, cls) == "module":
                method = class_attribute(it, state, cls, "forward")
            if isinstance(method, Func):
                bound = Func(method.function, method.module, method.frame, callee, method.owner)
                return call_function(it, bound, args, instr, state)
        case Sym() if callee.options or callee.key[0] == "index":
            chosen = effects.choices(it, state, callee)
            if all(value is not callee for _, value in chosen):
                return [out for branch, value in chosen for out in call_value(it, instr, branch, value or NONE, args)]
        case Sym(default=External(name=name)) if it.apis.kind(name) == "optimizer":
            return effects.call_external(it, state, instr, External(name), args)
        case Sym() if callee.key[0] == "attr":
            return effects.call_method(it, state, instr, callee.key[1], callee.key[2], args)
    return effects.call_unknown(it, state, instr, callee, args)


def call_sequential(it: Interpreter, instr: p.Call, state: State, callee: Obj, args: Args) -> list[tuple[State, Value]]:
    """``nn.Sequential``: its modules one after the other, each on what the one before gave."""
    outcome = [(state, args)]
    many = state.heap.get(callee, {}).get("*")
    for part in elements(it, state, callee) or ([many] if isinstance(many, Obj) else []):
        outcome = [
            (after, ((None, value),))
            for before, given in outcome
            for after, value in call_value(it, instr, before, part, given)
        ]
    return [(after, effects.result(it, after, instr, callee, given)) for after, given in outcome]


def call_function(it: Interpreter, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    """A function of the project: entered where it can matter, else its result is unknown and nothing else happens."""
    function, module = func.function, func.module
    module.body(function)
    decorators = it.decorators(state, func)
    if any(name.rpartition(".")[2] == "contextmanager" for name in decorators) and function.generator:
        it.entered.add(function)
        return [(state, Manager(func, args, instr.at))]
    if function.generator and not any(value is not None for value in it.yields[-1:]):
        # What a generator does, it does while somebody iterates: it is read beside the path, which may never see it end.
        if module.is_strong(function) and function not in it.entered:
            run_function(it, func, args, instr, state.fork())
        return [(state, effects.result(it, state, instr, func, args))]
    if not module.is_relevant(function) and not any(holds_gradients(state, value) for _, value in args):
        states = [state]
        for _, value in args:
            if isinstance(value, (Func, Partial)):
                states = [after for before in states for after in call_back(it, instr, before, value)]
        for one in states:
            forget_set(it, instr, one, func)
        return [(one, effects.result(it, one, instr, func, args)) for one in states]
    if is_left_open(function):
        return effects.call_unknown(it, state, instr, func, args)
    depth = it.frames[state.frame].depth
    recursive = sum(1 for _, node in state.stack if node is instr.at) >= 1
    if depth >= DEPTH or recursive:
        if depth >= DEPTH:
            it.gave_up(state, instr.at, f"calls more than {DEPTH} deep", func)
        return effects.call_unknown(it, state, instr, func, args)
    key = repeats.key_of(it, func, args, instr, state)
    if key is None:
        return follow(it, func, args, instr, state)
    known = repeats.replay(it, key, instr, state)
    if known is not None:
        return known
    before = repeats.Before(key, state.fork(), it.events)
    results = follow(it, func, args, instr, state)
    repeats.remember(it, before, instr, results)
    return results


def forget_set(it: Interpreter, instr: p.Call, state: State, method: Func) -> None:
    """What a method sets that is not run: the constants that its object's attributes were are no longer known, nor all that is in a list."""
    obj = method.receiver
    own = state.heap.get(obj) if isinstance(obj, Obj) else None
    if not own:
        return
    assert isinstance(obj, Obj)
    for name in method.module.sets(method.function):
        held = own.get(name)
        fills = held is not None and is_container(held) and "*" not in state.heap.get(held, {})
        if fills or isinstance(held, Const):
            value = it.derived(("attr", obj, name), f"{it.object_name(obj)}.{name}", ())
            if isinstance(value, Sym):
                it.renew(state, instr.at, value)
            state.attributes(held if fills and held is not None else obj)["*" if fills else name] = value


def is_left_open(function: p.Function) -> bool:
    """Whether a function is there to be overridden: it is abstract and does nothing, or all that it does is to raise NotImplementedError."""
    node = function.node
    if not isinstance(node.body, list):
        return False
    last = node.body[-1]
    if any(last_name(each) == "abstractmethod" for each in getattr(node, "decorator_list", ())):
        return isinstance(last, (ast.Raise, ast.Pass)) or isinstance(getattr(last, "value", None), ast.Constant)
    if not isinstance(last, ast.Raise):
        return False
    raised = last.exc
    raised = raised.func if isinstance(raised, ast.Call) else raised
    says = all(isinstance(getattr(each, "value", None), (ast.Constant, ast.JoinedStr)) for each in node.body[:-1])
    return isinstance(raised, ast.Name) and raised.id in ("NotImplementedError", "NotImplemented") and says


def follow(it: Interpreter, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    """Enters a function that can matter."""
    if func.module.trains(func.function):
        return train(it, func, args, instr, state)
    if func.module.is_strong(func.function):  # it may lead to what trains, and need not
        return build(it, func, args, instr, state, max(HELPER_BUDGET, (it.limit - it.steps) // SHARE), (it.width, 1))
    if it.limited is not None:
        return run_function(it, func, args, instr, state)
    return build(it, func, args, instr, state, HELPER_BUDGET, HELPER_WIDTHS)


def train(it: Interpreter, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    """A call of what trains: worth all that is left to the program, whatever the calls around it are worth without it."""
    limit, limited, before = it.limit, it.limited, it.steps
    it.limit, it.limited = it.whole, None
    try:
        return run_function(it, func, args, instr, state)
    finally:
        it.limit, it.limited = min(it.whole, limit + it.steps - before), limited


def build(
    it: Interpreter,
    func: Func,
    args: Args,
    instr: p.Call,
    state: State,
    budget: int,
    widths: tuple[int, int],
) -> list[tuple[State, Value]]:
    """A call of what does not train itself and so builds things, or leads to what does: not worth more than so many instructions."""
    limit, limited, width, depths = it.limit, it.limited, it.width, it.open()
    for tried in range(it.costly.get(func.function, 0), len(widths)):
        results, before = None, state.fork()
        mine = min(limit, it.steps + budget)
        it.limit, it.limited, it.width = mine, instr, min(width, widths[tried])
        try:
            results = run_function(it, func, args, instr, before)
        except BudgetError as error:
            if error.call is not instr:
                raise
        finally:
            limit = min(it.whole, limit + it.limit - mine)  # what trains in it does not count
            it.limit, it.limited, it.width = limit, limited, width
        if results is not None:
            return results
        if it.steps > limit:
            raise BudgetError(limited)
        it.close(depths)
        it.costly[func.function] = tried + 1
    it.gave_up(state, instr.at, f"'{func.function.name}' has too many paths: what it returns is taken as unknown", func)
    return effects.call_unknown(it, state, instr, func, args)


def run_function(it: Interpreter, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    """Enters a function, in the regions that its decorators put around it."""
    outer, control, stack = state.frame, state.control, state.stack
    results: list[tuple[State, Value]] = []
    it.yields.append(None)
    for entered, leave in effects.enter_decorators(it, state, func):
        for one, value in enter_function(it, func, args, instr.at, entered):
            leave(one)
            one.frame, one.control, one.stack = outer, control, stack
            results.append((one, effects.returned_by(it, func, value)))
    it.yields.pop()
    return merge_results(it, results, instr)


def merge_results(it: Interpreter, results: list[tuple[State, Value]], instr: p.Call) -> list[tuple[State, Value]]:
    """Outcomes with the same value are merged; too many different ones become one unknown value."""
    if len(results) < 2:
        return results
    for state, value in results:
        state.scope(state.frame)[instr.target] = value  # what is returned is in use
    groups: dict[Value, list[State]] = {}
    for state, value in results:
        groups.setdefault(value, []).append(state)
    if len(groups) > 1 and any(map(effects.half_of, groups)):
        it.varied.add(instr.at)
    merged = [(state, value) for value, states in groups.items() for state in it.merged(states)]
    limit = max(RESULTS, it.width // 2)
    if len(merged) > limit:
        unknown = it.site(merged[0][0], instr.at, f"{name_of(instr.func)}(…)", PLAIN, ())
        states = []
        for state, value in merged:
            if isinstance(value, (Sym, Const, Cond)):
                value = unknown
            states.append((state, value))
        groups = {}
        for state, value in states:
            groups.setdefault(value, []).append(state)
        merged = [(s, value) for value, group in groups.items() for s in it.merged(group, limit)]
    return merged


def enter_function(
    it: Interpreter,
    func: Func,
    args: Args,
    site: Any,
    state: State,
    on_yield: Callable[[State, Value], Paths] | None = None,
    left: list[Any] | None = None,
) -> list[tuple[State, Value]]:
    """Runs a function's body in a scope of its own; what it returns, path by path."""
    function, module = func.function, func.module
    it.entered.add(function)
    caller = it.frames[state.frame]
    caller_module = caller.module
    key = (state.frame, site, function, func.receiver if isinstance(func.receiver, Obj) else None)
    info = FrameInfo(module, func.frame, function, caller.depth + 1)
    frame = it.new_frame(key, info)
    scope: dict[p.Slot, Value] = {}
    bind_params(it, func, args, state, scope)
    if module is not it.entry:
        given = {str(name): value for name, value in scope.items() if value is not func.receiver}
        unread = any("scaler" in name.lower() and isinstance(value, Sym) for name, value in given.items())
        decided = not unread and any(decides(state, value) for value in given.values())
        it.handed[module, function] = it.handed.get((module, function), True) and decided
    state.stack = (*state.stack, (caller_module, site))
    state.frame = frame
    state.frames[frame] = scope
    state.owned.discard(frame)
    if on_yield is not None:
        it.yields.append(on_yield)
    body = module.body(function)
    paths = it.run_block(body, [state])
    if on_yield is not None:
        it.yields.pop()
    results: list[tuple[State, Value]] = [(one, NONE) for one in paths.states]
    for kind, one, value in paths.exits:
        if kind == "return":
            results.append((one, value))
        elif kind.startswith("outer-") and left is not None:
            left.append((kind, one, value))
    for one, _ in results:
        if not function.captured:
            one.drop_frame(frame)
        else:
            scope_after = one.frames.get(frame, {})
            kept: dict[p.Slot, Value] = {k: v for k, v in scope_after.items() if k in function.captured}
            one.frames[frame] = kept
            one.owned.discard(frame)
    return results


def decides(state: State, value: Value) -> bool:
    """Whether an argument decides what a function does about precision: a switch, a dtype or the name of one, a scaler that is off."""
    if isinstance(value, Const):
        return value.value is None or isinstance(value.value, (bool, str))
    return dtype_of(value) is not None or state.heap.get(value, {}).get("enabled") == FALSE


def instantiate(it: Interpreter, cls: Class, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
    """An object of a class of the project."""
    if it.is_enum(state, cls):
        values = tuple(value for _, value in args)
        return [
            (state, it.derived(("pure", cls, *values), f"{cls.cls.name}({', '.join(map(text_of, values))})", values))
        ]
    obj = Obj(it.here(state, instr.at), cls)
    it.instantiated.add(cls.cls)
    again = obj in state.heap
    state.allocate(obj, {})
    made = effects.made(it, state, instr, obj, args, again)
    if made is not None:
        return made
    init = class_attribute(it, state, cls, "__init__")
    if (
        isinstance(init, Func)
        and it.external_base(state, cls) == "module"
        and not init.module.builds_precision(init.function)
    ):
        return [(state, obj)]  # layers and their sizes: parts of the model, whatever they are
    if isinstance(init, Func) and not init.module.trains(init.function):
        if it.external_name(state, cls).startswith("torch.utils.data."):
            return [(state, obj)]  # what reads data holds no weights
        like = it.parts.get(cls)
        if like is not None and any(it.kind(state, pin) == "module" for pin in state.pins):
            state.allocate(obj, like)  # one more block of a model: built as the first one was
            return [(state, obj)]
    events = it.events
    if isinstance(init, Func):
        bound = Func(init.function, init.module, init.frame, obj, init.owner)
        outer = state.pins
        state.pins = (*outer, obj)
        results = call_function(it, bound, args, instr, state)
        for one, _ in results:
            one.pins = outer
        if it.events == events and results and it.external_base(state, cls) == "module":
            it.parts.setdefault(cls, results[0][0].heap.get(obj, {}).copy())
        return [(one, obj) for one, _ in results]
    bind_fields(it, cls, obj, args, state)
    return [(state, obj)]


def call_back(it: Interpreter, instr: p.Call, state: State, func: Value, once: bool = False) -> list[State]:
    """A function of the project handed to something unread: it may be called, more than once, with anything: all but the settings is
    something else the second time. What starts processes calls it once in each."""
    if isinstance(func, Partial):
        func = func.func
    if not isinstance(func, Func) or not func.module.is_relevant(func.function):
        return [state]
    if func.function in it.entered and it.called_back.get(func.function) is not instr.at:
        return [state]  # the program calls it itself; what this call did on one path, it does on the others
    it.called_back[func.function] = instr.at
    states = [state]
    anything: Args = (("*", it.free("…")),)
    plain = [param.name for param in func.function.params if param.kind == "plain" and param.default is None]
    if func.receiver is not None:
        del plain[:1]
    others = [name for name in plain if not SETTINGS.fullmatch(name)]
    again: Args = tuple(
        (name, it.intern(("param", func.function, name, "again"), name, PLAIN, frozenset(), ())) for name in others
    )
    launched = LAUNCHES.search(name_of(instr.func)) is not None
    for args in (anything,) if launched or once else (anything, (*again, *anything)):
        after: list[State] = []
        it.calling_back += not launched
        try:
            for one in states:
                after.extend(s for s, _ in call_function(it, func, args, instr, one))
        finally:
            it.calling_back -= not launched
        states = it.merged(after) or states  # one that ends the program, on a signal say, is not called
    return states
