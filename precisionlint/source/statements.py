"""Statements: what each instruction of the program tree does to a path, and where it forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from precisionlint.events import Iteration
from precisionlint.source import effects, imports
from precisionlint.source import program as p
from precisionlint.source.evaluate import element_of, elements, evaluate
from precisionlint.source.inert import passed_over
from precisionlint.source.objects import is_container, name_of
from precisionlint.source.operators import as_cond, opened_up, truth
from precisionlint.source.records import FrameInfo, Paths
from precisionlint.source.state import State
from precisionlint.source.values import (
    NONE,
    PLAIN,
    Class,
    Cond,
    Const,
    External,
    Func,
    Manager,
    Many,
    ModuleRef,
    Obj,
    Sym,
    Tensors,
    Tup,
    Value,
    const,
    flow_of,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter


def counts(instr: p.Assign) -> bool:
    """Whether an assignment is ``x += y`` or ``x = x + y``."""
    if instr.op:
        return True
    target, value = instr.target, instr.value
    return (
        isinstance(target, p.Name)
        and isinstance(value, p.Binary)
        and value.op in "+-"
        and any(isinstance(side, p.Name) and side.slot == target.slot for side in (value.left, value.right))
    )


def value_is_site(value: Value) -> bool:
    return isinstance(value, Sym) and value.key[0] == "site"


COMPLEMENT = {
    "==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "in": "not in", "not in": "in", "is": "is not",
    "is not": "is",
}  # fmt: skip


UNROLLED = 8
"""Up to how many known items a loop is followed item by item."""


def do_assign(it: Interpreter, instr: p.Assign, state: State, after: list[State], exits: list[Any]) -> None:
    value = evaluate(it, state, instr.value)
    if instr.annotation is not None and isinstance(value, Sym):
        value = effects.annotated(it, state, instr.annotation, value)
    elif counts(instr) and (isinstance(value, Sym) or (isinstance(value, Const) and value.kind in ("int", "float"))):
        # A counter or running sum is another value each time round; what it is made of no longer matters.
        times = effects.multiplied(it, value)
        value = it.site(state, instr.at, name_of(instr.target) or "…", flow_of(value), ())
        if times is not None:
            it.multiplied[value] = times
    if not (instr.op and effects.blended(it, state, instr)):
        effects.averaged(it, state, instr)
    assign(it, state, instr.target, value, instr.at)
    after.append(state)


def assign(it: Interpreter, state: State, target: p.Expr, value: Value, at: Any) -> None:
    match target:
        case p.Name():
            if isinstance(target.slot, str) and isinstance(value, (Sym, Cond)):
                value = it.assumed(target.slot) or value
            if isinstance(target.slot, str):
                value = effects.kept(it, state, (state.frame, target.slot), target, value, at)
            it.bind_name(state, target.slot, value)
        case p.Attr():
            obj = evaluate(it, state, target.obj)
            if effects.attribute_set(it, state, obj, target, value, at):
                return
            if isinstance(obj, (Obj, Sym, Class)):
                if isinstance(value, Obj) and value.site not in it.names:
                    it.names[value.site] = name_of(target)
                if isinstance(value, Sym) and value.text.endswith((")", "…")):
                    value.text = name_of(target) or value.text
                if isinstance(obj, Obj) and it.kind(state, obj) == "module":
                    it.adopt(state, obj, target.name, value)
                state.attributes(obj)[target.name] = effects.kept(it, state, (obj, target.name), target, value, at)
            elif isinstance(obj, ModuleRef):
                state.scope(it.globals_frame(obj.module))[target.name] = value
        case p.Index():
            obj = evaluate(it, state, target.obj)
            if is_container(obj):
                key = evaluate(it, state, target.key)
                slot = key.value if isinstance(key, Const) else "*"
                if slot.__hash__ is not None:
                    state.attributes(obj)[slot] = value
            elif isinstance(obj, Obj) and it.kind(state, obj) == "module":
                key = evaluate(it, state, target.key)
                it.adopt(state, obj, key.value if isinstance(key, Const) else "*", value)
        case p.Sequence():
            unpack(it, state, target, value, at)
        case p.Star():
            assign(it, state, target.value, Many(element_of(it, state, value, at)), at)


def unpack(it: Interpreter, state: State, target: p.Sequence, value: Value, at: Any) -> None:
    items = elements(it, state, value)
    if items is not None and len(items) == len(target.items):
        for one, item in zip(target.items, items, strict=True):
            assign(it, state, one, item, at)
        return
    for position, one in enumerate(target.items):
        item = it.derived(("item", value, position), f"{text_of(value)}[{position}]", (value,))
        if isinstance(item, Sym) and isinstance(one, p.Name) and value_is_site(value):
            item.text = str(one.slot)
        assign(it, state, one, item, at)


def do_delete(it: Interpreter, instr: p.Delete, state: State, after: list[State], exits: list[Any]) -> None:
    if isinstance(instr.target, p.Name):
        state.scope(state.frame).pop(instr.target.slot, None)
    after.append(state)


def do_call(it: Interpreter, instr: p.Call, state: State, after: list[State], exits: list[Any]) -> None:
    for result, value in it.call(instr, state):
        result.scope(result.frame)[instr.target] = value
        after.append(result)


def do_if(it: Interpreter, instr: p.If, state: State, after: list[State], exits: list[Any]) -> None:
    saved = state.control
    sides: list[tuple[str, list[State]]] = []
    test = evaluate(it, state, instr.test)
    undecided = truth(state, opened_up(it, test)) is None
    if undecided and (instr.asked or not instr.quiet) and passed_over(it, instr, state):
        after.append(state)
        return
    # How many items pass a filter is unknown anyhow: those that do, do.
    several = instr.filter and undecided and it.one_of_many()
    for side, branch in [(True, state)] if several else it.fork(state, test):
        block = instr.then if side else instr.other
        label = "" if instr.quiet else branch_label(it, branch, instr.test, side)
        effects.branched(it, branch, test, side, label, instr.at)
        if not block.code:
            sides.append((label, [branch]))
            continue
        branch.control = (*saved, label) if label else saved
        paths = it.run_block(block, [branch])
        sides.append((label, paths.states))
        exits.extend(paths.exits)
    going = [label for label, states in sides if states]
    for label, states in sides:
        for one in states:
            # Where the other side left, what follows stands under the condition of this one.
            one.control = (*saved, label) if label and len(sides) == 2 and len(going) == 1 else saved
        after.extend(states)


def branch_label(it: Interpreter, state: State, test: p.Expr, side: bool) -> str:
    """A branch in words, as the reader of the program would say it."""
    if isinstance(test, p.Name) and isinstance(test.slot, int):
        value = evaluate(it, state, test)
        cond = as_cond(value)
        text = cond.text if cond is not None else ""
    elif isinstance(test, p.Unary) and test.op == "not":
        return branch_label(it, state, test.value, not side)
    elif isinstance(test, p.Compare):
        op = test.op if side else COMPLEMENT[test.op]
        left, right = expression_words(it, state, test.left), expression_words(it, state, test.right)
        return f"{left} {op} {right}" if left and right else ""
    else:
        said = text_of(evaluate(it, state, test))
        text = said if "%" in said else name_of(test) or said  # that something is done each nth time, a name would hide
    if not text:
        return ""
    if side:
        return text
    return text[4:] if text.startswith("not ") else f"not {text}"


def expression_words(it: Interpreter, state: State, expr: p.Expr) -> str:
    if isinstance(expr, p.Const):
        return repr(expr.value)
    if isinstance(expr, p.Sequence) and len(expr.items) <= WRITTEN and (opening := BRACKETS.get(expr.kind)):
        items = [expression_words(it, state, item) for item in expr.items]
        return f"{opening[0]}{', '.join(items)}{opening[1]}"
    return name_of(expr) or text_of(evaluate(it, state, expr))


BRACKETS = {"tuple": "()", "list": "[]", "set": "{}"}
WRITTEN = 4
"""How many items of a list a branch in words holds."""


def do_for(it: Interpreter, instr: p.For, state: State, after: list[State], exits: list[Any]) -> None:
    iterable = evaluate(it, state, instr.iter)
    items = elements(it, state, iterable)
    if not instr.comprehension:
        it.coverage.loops.setdefault(instr.at, it.where(state, instr.at))
    if it.trains and passed_over(it, instr, state):
        after.append(state)
        return
    if items and len(items) <= UNROLLED:
        states: list[State] = [state]
        broken: list[State] = []
        outer = state.pins
        it.loops.append(instr.at)
        it.turns.append(True)
        for position, item in enumerate(items):
            for one in states:
                one.pins = (*outer, *items)
                assign(it, one, instr.target, item, instr.at)
            it.unrolled.append(position)
            states, left = run_body(it, instr.body, states, exits)
            it.unrolled.pop()
            broken.extend(left)
        it.turns.pop()
        it.loops.pop()
        for one in (*states, *broken):
            one.pins = outer
        leave_loop(it, instr.other, states, broken, after, exits)
        return

    def enter(one: State) -> None:
        value = element_of(it, one, iterable, instr.at)
        assign(it, one, instr.target, value, instr.at)

    once = instr.comprehension or isinstance(iterable, Tensors)
    run_loop(it, instr, state, enter, once, after, exits)


def run_loop(
    it: Interpreter,
    instr: p.For | p.While,
    state: State,
    enter: Callable[[State], None],
    once: bool,
    after: list[State],
    exits: list[Any],
) -> None:
    """A loop's body twice: the second time from what the first left."""
    states = [state]
    done: list[State] = []
    broken: list[State] = []
    for turn in (False,) if once else (False, True):
        for one in states:
            if not once:
                it.emit(one, Iteration(it.where(one, instr.at), (), (instr.at, one.frame), turn))
            enter(one)
        before = [one.fork() for one in states] if not turn and not once else []
        if not once:
            it.loops.append(instr.at)
        it.turns.append(False)
        states, left = run_body(it, instr.body, states, exits)
        it.turns.pop()
        if not once:
            it.loops.pop()
        broken.extend(left)
        done.extend(one.fork() for one in states)
        # What a second turn would only repeat is not run again.
        states = [one for one in states if not any(seen.same_but_facts(one) for seen in before)]
    leave_loop(it, instr.other, it.merged(done), broken, after, exits)


def run_body(it: Interpreter, block: p.Block, states: list[State], exits: list[Any]) -> tuple[list[State], list[State]]:
    """The paths that go on with the loop, and those that break out of it."""
    paths = it.run_block(block, states)
    going = list(paths.states)
    broken: list[State] = []
    for kind, one, value in paths.exits:
        if kind == "continue":
            going.append(one)
        elif kind == "break":
            broken.append(one)
        else:
            exits.append((kind, one, value))
    return it.merged(going), broken


def leave_loop(
    it: Interpreter, other: p.Block, states: list[State], broken: list[State], after: list[State], exits: list[Any]
) -> None:
    if other.code and states:
        paths = it.run_block(other, states)
        states = paths.states
        exits.extend(paths.exits)
    after.extend(states)
    after.extend(broken)


def do_while(it: Interpreter, instr: p.While, state: State, after: list[State], exits: list[Any]) -> None:
    it.coverage.loops.setdefault(instr.at, it.where(state, instr.at))
    endless = isinstance(instr.test, p.Const) and bool(instr.test.value)
    states = [state]
    done: list[State] = []
    for turn in (False, True):
        going: list[State] = []
        for one in states:
            it.emit(one, Iteration(it.where(one, instr.at), (), (instr.at, one.frame), turn))
        head = it.run_block(instr.head, states)
        exits.extend(head.exits)
        for one in head.states:
            test = evaluate(it, one, instr.test)
            known = truth(one, test)
            if known is False:
                done.append(one)
                continue
            going.append(one)
        it.loops.append(instr.at)
        it.turns.append(False)
        states, broken = run_body(it, instr.body, going, exits)
        it.turns.pop()
        it.loops.pop()
        after.extend(broken)
        if not endless:
            done.extend(one.fork() for one in states)
    leave_loop(it, instr.other, it.merged(done), [], after, exits)


def do_with(it: Interpreter, instr: p.With, state: State, after: list[State], exits: list[Any]) -> None:
    context = evaluate(it, state, instr.context)
    if isinstance(context, Manager):
        with_manager(it, instr, context, state, after, exits)
        return
    for branch, target, leave in effects.enter(it, state, context, instr):
        if instr.target is not None:
            assign(it, branch, instr.target, target, instr.at)
        paths = it.run_block(instr.body, [branch])
        for one in paths.states:
            leave(one)
            after.append(one)
        for kind, one, value in paths.exits:
            leave(one)
            exits.append((kind, one, value))


def with_manager(
    it: Interpreter, instr: p.With, manager: Manager, state: State, after: list[State], exits: list[Any]
) -> None:
    """A generator function under @contextmanager: its body runs around the with block, which stands where it yields."""
    outer = state.frame
    control, stack = state.control, state.stack

    def block(inner: State, value: Value) -> Paths:
        frame, saved_stack = inner.frame, inner.stack
        inner.frame, inner.stack = outer, stack
        it.yields.append(None)
        if instr.target is not None:
            assign(it, inner, instr.target, value, instr.at)
        paths = it.run_block(instr.body, [inner])
        it.yields.pop()
        for one in paths.states:
            one.frame, one.stack = frame, saved_stack
        # What leaves the with block leaves the generator too, after its finally and with blocks.
        marked = []
        for kind, one, value in paths.exits:
            one.frame, one.stack = frame, saved_stack
            marked.append((f"outer-{kind}", one, value))
        return Paths(paths.states, marked)

    left: list[Any] = []
    for one, _ in it.enter_function(manager.func, manager.args, manager.site, state, on_yield=block, left=left):
        one.frame, one.control, one.stack = outer, control, stack
        after.append(one)
    for kind, one, value in left:
        one.frame, one.control, one.stack = outer, control, stack
        exits.append((kind.removeprefix("outer-"), one, value))


def do_try(it: Interpreter, instr: p.Try, state: State, after: list[State], exits: list[Any]) -> None:
    only_imports = all(isinstance(i, (p.Import, p.Assign)) for i in instr.body.code)
    before = state.fork() if instr.handlers and not only_imports else None
    paths = it.run_block(instr.body, [state])
    states, leaving, raised = list(paths.states), [], [] if before is None else [before]
    for kind, one, value in paths.exits:
        if kind == "raise" and instr.handlers:
            raised.append(one)
        else:
            leaving.append((kind, one, value))
    if instr.other.code and states:
        rest = it.run_block(instr.other, states)
        states = rest.states
        leaving.extend(rest.exits)
    raised = it.merged(raised)
    for handler in instr.handlers:
        if not raised:
            break
        rest = it.run_block(handler, [one.fork() for one in raised])
        states.extend(rest.states)
        leaving.extend(rest.exits)
    if instr.final.code:
        rest = it.run_block(instr.final, it.merged(states))
        states = rest.states
        exits.extend(rest.exits)
        for kind, one, value in leaving:
            last = it.run_block(instr.final, [one])
            exits.extend((kind, final, value) for final in last.states)
            exits.extend(last.exits)
    else:
        exits.extend(leaving)
    after.extend(states)


def do_return(it: Interpreter, instr: p.Return, state: State, after: list[State], exits: list[Any]) -> None:
    exits.append(("return", state, evaluate(it, state, instr.value)))


def do_raise(it: Interpreter, instr: p.Raise, state: State, after: list[State], exits: list[Any]) -> None:
    exits.append(("raise", state, NONE))


def do_break(it: Interpreter, instr: p.Break, state: State, after: list[State], exits: list[Any]) -> None:
    exits.append(("break", state, NONE))


def do_continue(it: Interpreter, instr: p.Continue, state: State, after: list[State], exits: list[Any]) -> None:
    exits.append(("continue", state, NONE))


def do_define(it: Interpreter, instr: p.Define, state: State, after: list[State], exits: list[Any]) -> None:
    function = instr.function
    func = Func(function, it.module_of(state), state.frame)
    it.decorator_values[function] = tuple(evaluate(it, state, d) for d in function.decorators)
    it.default_values[function] = {
        param.name: evaluate(it, state, param.default) for param in function.params if param.default is not None
    }
    if not any(isinstance(each, p.Attr) and each.name in ("setter", "deleter") for each in function.decorators):
        value = own_contract(it, state, function.name) or effects.decorated(it, state, func)
        it.bind_name(state, function.name, value)  # else the name stays that of the property
    after.append(state)


def do_class(it: Interpreter, instr: p.DefineClass, state: State, after: list[State], exits: list[Any]) -> None:
    cls = Class(instr.cls, it.module_of(state), state.frame)
    bases = tuple(evaluate(it, state, base) for base in instr.cls.bases)
    frame = it.new_frame(("class", instr.cls, state.frame), FrameInfo(cls.module, state.frame))
    outer = state.frame
    state.frame = frame
    state.frames[frame] = {}
    state.owned.discard(frame)
    it.silent += 1  # a class body declares; what it calls is no step of a program
    try:
        paths = it.run_block(instr.cls.body, [state])
    finally:
        it.silent -= 1
    for one in paths.states[:1]:
        attributes: dict[Any, Value] = {}
        for name, value in one.frames.get(frame, {}).items():
            if isinstance(value, Func) and value.frame == frame:
                value = Func(value.function, value.module, outer, None, cls)
            attributes[name] = value
        attributes["__bases__"] = Tup(bases)
        one.allocate(cls, attributes)
        if it.is_enum(one, cls):
            for name, value in attributes.items():  # a member whose value does not matter is still not another one
                if isinstance(value, Sym) and isinstance(name, str) and not name.startswith("_"):
                    attributes[name] = const(f"{instr.cls.name}.{name}")
        one.drop_frame(frame)
        one.frame = outer
        it.bind_name(one, instr.cls.name, own_contract(it, one, instr.cls.name) or cls)
        after.append(one)


def own_contract(it: Interpreter, state: State, name: str) -> Value | None:
    """What the settings say that a function or class of a file's top level acts as: an outside API, which is taken at its word."""
    module = it.module_of(state)
    if not it.apis.own or state.frame != it.globals_frame(module):
        return None
    acts = it.apis.own.get(f"{module.name}.{name}")
    return External(acts) if acts is not None else None


def do_outer(it: Interpreter, instr: p.Outer, state: State, after: list[State], exits: list[Any]) -> None:
    info = it.frames[state.frame]
    for name in instr.names:
        if instr.kind == "global":
            home = it.globals_frame(info.module)
            if home != state.frame:  # at a file's top level the names are global as it is
                info.outer[name] = home
        elif info.parent is not None:
            info.outer[name] = it.frames[info.parent].outer.get(name, info.parent)
    after.append(state)


def do_yield(it: Interpreter, instr: p.Yield, state: State, after: list[State], exits: list[Any]) -> None:
    handler = it.yields[-1] if it.yields else None
    if handler is None:
        state.scope(state.frame)[instr.target] = it.site(state, instr.at, "…", PLAIN, ())
        after.append(state)
        return
    paths = handler(state, evaluate(it, state, instr.value))
    after.extend(paths.states)
    exits.extend(paths.exits)


def do_begin(it: Interpreter, instr: p.Begin, state: State, after: list[State], exits: list[Any]) -> None:
    obj = Obj(it.here(state, instr.at), External(f"builtins.{instr.kind}"))
    state.allocate(obj, {})
    state.scope(state.frame)[instr.target] = obj
    after.append(state)


def do_collect(it: Interpreter, instr: p.Collect, state: State, after: list[State], exits: list[Any]) -> None:
    obj = it.lookup(state, instr.target)
    value = evaluate(it, state, instr.value)
    if isinstance(obj, Obj):
        items = state.attributes(obj)
        key: Any = "*"
        if instr.key is not None:
            name = evaluate(it, state, instr.key)
            key = name.value if isinstance(name, Const) else "*"
        elif not it.one_of_many() and "*" not in items:
            key = len(items)
        items[key] = value
    after.append(state)


RUN: dict[type, Callable[..., None]] = {
    p.Assign: do_assign, p.Delete: do_delete, p.Call: do_call, p.If: do_if,
    p.For: do_for, p.While: do_while, p.With: do_with, p.Try: do_try,
    p.Return: do_return, p.Raise: do_raise, p.Break: do_break,
    p.Continue: do_continue, p.Define: do_define, p.DefineClass: do_class,
    p.Import: imports.do_import, p.Outer: do_outer, p.Yield: do_yield,
    p.Begin: do_begin, p.Collect: do_collect,
}  # fmt: skip
