"""Reads the programs of one file: its top level, and whatever in it nothing else calls.

Knows where programs begin (roots), not what happens in them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.checks import Evidence, Hit, Judge
from precisionlint.checks.base import FROZEN, meets
from precisionlint.events import Closed
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.differing import differing
from precisionlint.source.effects.checkpoints import returned
from precisionlint.source.effects.trainers import enter_hook
from precisionlint.source.hanging import hangs_on
from precisionlint.source.imports import forget_rebound
from precisionlint.source.interpret import Interpreter
from precisionlint.source.module import ProjectModule
from precisionlint.source.objects import is_container
from precisionlint.source.parsing import walk
from precisionlint.source.project import Project
from precisionlint.source.records import BUDGET, NARROW, SHARE, WIDEST, BudgetError, Coverage
from precisionlint.source.settings import SETTINGS
from precisionlint.source.state import Fact, State, agree, merge
from precisionlint.source.tf32 import opened, without_tf32
from precisionlint.source.thinning import thin
from precisionlint.source.values import FALSE, PLAIN, TRUE, Class, Const, Func, Obj, Partial, Sym, Tup, Value

Ways = list[dict[Sym, Fact]]
"""What each of some paths had decided."""

ROOT_STATES = 4
"""From how many of the states that a file's top level (or a class's __init__) leaves its other roots start."""
STAGES = "_per_optimizer_states"
SET_BY_HAND = regex(r"scaler\w*\.update\(\s*\w")
"""A scale that is given to a scaler: on a path, maybe, that was left out."""
STAGED = frozenset({"double-unscale", "missing-scaler-update", "clip-before-unscale", "scaled-gradients-read"})
STEPPING = frozenset({"backward", "step", "optimizer_step", "manual_backward"})
"""A method whose text holds one of these words trains; the others prepare."""
STATE = regex(r"^(?:state_dict|(?:get|save)_(?:\w+_)?state(?:_dict)?|(?:checkpoint|training|trainer)_state(?:_dict)?)$")
"""What a method is called that gives its object's state."""
STEPS = regex(rf"\.(?:{'|'.join(sorted(STEPPING))})\(")
"""What a method calls that steps by itself, and does not only speak of it."""


BEGINS = regex(r"backward\(")
FINISHES = regex(r"step|update", re.I)
"""What a method holds that may end an iteration: a step of its own, or one behind a name that says so."""
CLIPS = regex(r"clip_grad_(?:norm|value)_?\(")
UNSCALES = regex(r"unscale\w*\(|get_scale\(")
UPDATES = regex(r"scal\w*\.update\(|update\w*scal", re.I)
"""How a scaler is told that an iteration is over."""


class Reading(Struct, frozen=True):
    """What reading one file gave. ``handed``: the functions of other files that it calls, and whether each call decides their precision."""

    hits: tuple[Hit, ...]
    coverage: Coverage
    handed: dict[tuple[ProjectModule, p.Function], bool]


class Reader(Struct, frozen=True):
    """The roots of one file, run one after the other."""

    it: Interpreter
    module: ProjectModule

    def read(self) -> None:
        if not self.module.may_train():
            return
        blank = State()
        self.it.stand(blank, self.it.judge.start)
        start = self.fresh(blank, self.module.text, complete=True)
        states = self.attempt(None, lambda: self.it.run_module(self.module, start.fork())) or []
        for state in states:
            self.it.emit(state, Closed(None, (), True))
        seen = self.it.coverage
        seen.programs += bool(self.it.entered or seen.loops or seen.optimizers or seen.scalers)
        states = self.thin(states) or [start]
        forget_rebound(self.it, self.module, states[0])
        self.functions(states[0], rest=False)
        self.classes(states)
        self.functions(states[0], rest=True)

    # -- where a program starts

    def fresh(self, state: State, text: str | None, complete: bool = False) -> State:
        """A state to start a program from: what stands, with nothing under way. ``text``: the program's source, unless it goes on."""
        start = state.fork()
        self.it.stand(start, self.it.judge.settle(state.checks))
        start.control, start.regions, start.stack = (), (), ()
        start.frame = self.it.globals_frame(self.module)
        if text is not None:
            self.it.emit(start, opened(self.module, text, complete))
        return start

    def attempt(self, node: Any, run: Callable[[], list[State]]) -> list[State] | None:
        """Runs one root within its budget: on few paths first, so that its end is seen, then, if it trains, on as many as the budget
        surely reaches for, and on as many as what is left does. None where not even few could be followed to the end."""
        it, gave_up = self.it, self.it.coverage.gave_up
        it.begin(BUDGET)
        states: list[State] = []
        entered, told, depths = frozenset(it.entered), dict(gave_up), it.open()
        narrowly: dict[tuple[Any, Any], str] = {}
        width = NARROW
        for last in (False, False, True):
            first, it.width, it.thinned, it.trains = it.steps, width, False, False
            ever, it.entered = it.entered, set(entered)
            try:
                states = run()
            except BudgetError:
                it.close(depths)
                gave_up.update(narrowly)
                if width == NARROW:
                    gave_up.setdefault((self.module, node), "too many paths to follow to the end")
                    return None
                break
            except RecursionError:
                it.close(depths)
                gave_up.setdefault((self.module, node), "nested too deeply to be followed")
                break
            finally:
                it.entered |= ever
            # As many times the paths take about as many times the steps, at most.
            wider = min(WIDEST, width * (it.limit - it.steps) // (it.steps - first + 1))
            if last or wider <= width or not it.thinned or not self.may_train(node):
                break
            width, narrowly = wider, dict(gave_up)
            gave_up.clear()
            gave_up.update(told)
        return states

    def may_train(self, node: Any) -> bool:
        """Whether a root trains, maybe on a path that was left out, and there is anything about precision in what it leads to."""
        trains = self.it.trains or BEGINS.search(self.text_of(node)) is not None
        return trains and any(module.speaks_of_precision for module in self.it.global_frames)

    def text_of(self, node: Any) -> str:
        """The source of a root: a function, a class, or the whole file."""
        if node is None:
            return self.module.text
        return "\n".join(self.module.code[node.lineno - 1 : node.end_lineno])

    def thin(self, states: list[State], limit: int = ROOT_STATES) -> list[State]:
        """The states from which reading goes on."""
        return thin(merge(states), limit, self.it.kept)

    def call(self, state: State, func: Func) -> list[State]:
        """Calls a root with arguments of which nothing is known: where it is defined, or where the class that inherits it is."""
        node: Any = func.function.node
        heir = func.receiver.cls if isinstance(func.receiver, Obj) else func.receiver
        if func.module is not self.module and isinstance(heir, Class) and heir.module is self.module:
            node = heir.cls.node
        call = p.Call(0, p.Name(func.function.name), (), node)
        enter_hook(self.it, state, func, node)
        results = self.it.call_function(func, (("*", self.it.free("…")),), call, state)
        if func.receiver is not None and STATE.search(func.function.name) and func.module is self.module:
            self.state_of(func.function, results)
        return [end for one, value in results for end in self.call_returned(one, value, node)]

    def call_returned(self, state: State, value: Value, node: Any) -> list[State]:
        """What a root gives back that trains is what its caller calls, again and again: ``def make_step(…): def step(batch): … return step``.
        Of several, nobody knows which comes after which, nor what comes between two calls of one that does not begin with a backward."""
        call = p.Call(1, p.Name("returned"), (), node)  # slot 0 keeps what is returned
        after: list[State] = []
        for func in functions_in(state, value):
            begins = BEGINS.search(func.module.source_of(func.function)) is not None
            after += self.it.call_back(call, state.fork(), func, once=not begins)
        return after or [state]

    def state_of(self, method: p.Function, results: list[tuple[State, Value]]) -> None:
        """What an object gives to go on from later, where nothing in its file saves it."""
        node = max(
            (each for each in walk(method.node) if isinstance(each, ast.Return)),
            key=lambda e: e.lineno,
            default=None,
        )
        if node is not None and f"self.{method.name}(" not in self.module.text:
            for state, value in results:
                returned(self.it, state, node, value)

    # -- functions

    def functions(self, state: State, rest: bool) -> None:
        """Functions that nothing here calls; with ``rest``, those that only each other do."""
        candidates = [
            instr.function
            for instr in p.defined(self.module.block)
            if isinstance(instr, p.Define)
            and self.module.is_relevant(instr.function)
            and self.module.is_strong(instr.function)
        ]
        named: set[str] = set()
        for function in candidates:
            named |= self.module.words(function) - {function.name}
        for method in self.methods():
            named |= self.module.words(method)
        for function in candidates:
            if function not in self.it.entered and (rest or function.name not in named):
                self.it.coverage.programs += 1
                self.attempt(function.node, lambda function=function: self.run_function(function, state))  # type: ignore[misc]

    def run_function(self, function: p.Function, state: State) -> list[State]:
        start = self.fresh(state, self.module.source_of(function))
        value = self.it.lookup(start, function.name)
        func = (
            value
            if isinstance(value, Func) and value.function is function
            else Func(function, self.module, start.frame)
        )
        after = self.call(start, func)
        for one in after:
            self.it.emit(one, Closed(None, (), False))
        return after

    # -- classes

    def methods(self) -> Iterable[p.Function]:
        for instr in p.defined(self.module.block):
            if isinstance(instr, p.DefineClass):
                yield from (method for method in instr.cls.methods if self.module.is_relevant(method))

    def classes(self, states: list[State]) -> None:
        frame = self.it.globals_frame(self.module)
        for instr in p.defined(self.module.block):
            if isinstance(instr, p.DefineClass):
                cls = Class(instr.cls, self.module, frame)
                state = next((each for each in states if cls in each.heap), states[0])  # a branch may define it
                own = [m for m in instr.cls.methods if self.module.is_relevant(m) and self.module.is_strong(m)]
                if any(method not in self.it.entered for method in own):
                    self.it.coverage.programs += 1
                    done = frozenset(self.it.entered)
                    self.attempt(instr.cls.node, partial(self.run_class, instr.cls, state, done))

    def run_class(self, definition: p.ClassDef, state: State, done: frozenset[p.Function]) -> list[State]:
        """``__init__``, then what prepares, then each method that trains, and again after itself. ``done``: what was entered before."""
        start = self.fresh(state, self.module.source_of_class(definition))
        cls = self.it.lookup(start, definition.name)
        # The name means something else by now: a file that imports its class from itself, a wrapper.
        if not isinstance(cls, Class):
            cls = Class(definition, self.module, start.frame)
            if cls not in start.heap or f"{self.module.name}.{definition.name}" in self.it.apis.own:
                return []
        call = p.Call(0, p.Name(definition.name), (), definition.node)
        made = self.it.instantiate(cls, (("*", self.it.free("…")),), call, start)[:ROOT_STATES]
        if not made:
            return []
        obj = made[0][1]
        bases = [one for one, _ in made]
        for one in bases:
            one.pins = (obj,)
            self.forget(one, obj, definition)
        training = []
        methods = list(self.class_methods(bases[0], cls))
        most = self.it.whole
        self.it.whole -= (most - self.it.steps) // 2  # the other half is for what trains
        beginning, ending = reaching(methods, BEGINS), reaching(methods, FINISHES)
        for method in methods:
            source = method.module.source_of(method.function)
            trains = bool(STEPPING & method.module.words(method.function) or BEGINS.search(source))
            if self.is_inner(method) or (method.function in done and (trains or method.owner == cls)):
                continue
            if trains:
                training.append(method)
                continue
            if method.module.only_evaluates(method.function):
                continue  # what it leaves is found by those that call it: others need not come after it
            # What a method that prepares leaves in the object, the methods that train find there.
            after = self.run_method(bases, method, obj, SHARE)
            bases = self.thin([*after, *(base for base in bases if not any(opens(one, base, obj) for one in after))])
        self.it.limit = self.it.whole = most
        training.sort(key=lambda method: method.function.name.startswith("_"))
        for left, method in zip(range(len(training), 0, -1), training, strict=True):
            if self.is_inner(method):
                continue
            after = self.run_method(self.unflagged(bases, method, training, obj), method, obj, min(left, SHARE))
            whole = method.function in beginning or (beginning and self.never_updates(bases[0], obj))
            if whole and method.function in ending:
                self.run_method(self.thin(after), method, obj, min(left, SHARE), again=True)
            if BEGINS.search(method.module.source_of(method.function)) and not UNSCALES.search(self.module.text):
                for clip in self.clips(methods):
                    self.run_method(self.thin(after), clip, obj, SHARE, again=True)
        return []

    def clips(self, methods: list[Func]) -> Iterable[Func]:
        """The methods that clip what another one's backward leaves, and that none of their class calls."""
        called = {name for each in methods for name in each.module.words(each.function) if name != each.function.name}
        for each in methods:
            source = each.module.source_of(each.function)
            if each.function.name not in called and CLIPS.search(source) and not BEGINS.search(source):
                yield each

    def never_updates(self, state: State, obj: Value) -> bool:
        """Whether an object makes a scaler that nothing in its file updates: what comes between two of its steps is no update then."""
        own = state.heap.get(obj, {}).values()
        return any(
            self.it.kind(state, each) == "scaler" for each in own if isinstance(each, Obj)
        ) and not UPDATES.search(self.module.text)

    def forget(self, state: State, obj: Value, definition: p.ClassDef) -> None:
        """What a method that is never run sets: the constant that ``__init__`` gives it stands only until somebody calls that method."""
        own = state.heap.get(obj, {})
        for method in definition.methods:
            if method.name == "__init__" or self.module.is_relevant(method):
                continue
            for name in [name for name in self.module.sets(method) if isinstance(own.get(name), Const)]:
                state.attributes(obj)[name] = self.it.derived(("attr", obj, name), f"self.{name}", ())

    def unflagged(self, bases: list[State], method: Func, others: list[Func], obj: Value) -> list[State]:
        """The states in which a method that trains is entered: a flag that another one sets may have been set by then."""
        set_by_others = set[str]().union(*(each.module.sets(each.function) for each in others if each is not method))
        flags = set_by_others & method.module.words(method.function)
        found = []
        for base in bases:
            own = base.heap.get(obj, {})
            names = sorted(name for name in flags if isinstance(own.get(name), Const) and own[name] in (TRUE, FALSE))
            if names:
                base = base.fork()
                for name in names:
                    base.attributes(obj)[name] = self.it.derived(("attr", obj, name), f"self.{name}", ())
            found.append(base)
        return found

    def is_inner(self, method: Func) -> bool:
        """Whether a method is one that others of its class have called, and nobody else is meant to."""
        return method.function in self.it.entered and method.function.name.startswith("_")

    def class_methods(self, state: State, cls: Class) -> Iterable[Func]:
        seen: set[str] = {"__init__"}
        for current in self.it.mro(state, cls):
            if isinstance(current, Class):
                for name, value in state.heap.get(current, {}).items():
                    if isinstance(value, Func) and name not in seen:
                        seen.add(name)
                        if value.module.is_relevant(value.function):
                            yield value

    def settings(self, method: Func) -> tuple[Value, ...]:
        """The parameters of a method that hold a program's settings: what one run of it decided of them, the next one finds."""
        names = [param.name for param in method.function.params if SETTINGS.fullmatch(param.name)]
        keys = [("param", method.function, name) for name in names]
        return tuple(self.it.intern(key, key[2], PLAIN, frozenset(), ()) for key in keys)

    def run_method(self, bases: list[State], method: Func, obj: Value, share: int, again: bool = False) -> list[State]:
        """What a method leaves, called on each of these states, as far as one part in ``share`` of what is left goes."""
        it, whole, depths = self.it, self.it.whole, self.it.open()
        it.limit = it.whole = it.steps + (whole - it.steps) // share
        after: list[State] = []
        try:
            for base in bases:
                start = base.fork() if again else self.fresh(base, None)
                start.pins = (*start.pins, *self.settings(method))
                decorators = it.decorators(start, method)
                receiver: Value | None = obj
                if "staticmethod" in decorators:
                    receiver = None
                elif "classmethod" in decorators and isinstance(obj, Obj):
                    receiver = obj.cls
                func = Func(method.function, method.module, method.frame, receiver, method.owner)
                after.extend(self.call(start, func))
        except BudgetError:
            it.close(depths)
            it.coverage.gave_up.setdefault((method.module, method.function), "too many paths to follow to the end")
        finally:
            it.limit = it.whole = whole
        return self.thin(after, 2 * ROOT_STATES)


def functions_in(state: State, value: Value) -> Iterator[Func]:
    """The functions that train in what is returned: itself, or the items of a tuple or dict."""
    match value:
        case Func() if value.module.is_strong(value.function):
            yield value
        case Partial():
            yield from functions_in(state, value.func)
        case Tup():
            for item in value.items:
                yield from functions_in(state, item)
        case Obj() if is_container(value):
            for item in list(state.heap.get(value, {}).values()):
                yield from functions_in(state, item) if isinstance(item, (Func, Partial)) else ()


def reaching(methods: list[Func], what: re.Pattern[str]) -> frozenset[p.Function]:
    """The methods that do something, by themselves or by others of their class."""
    words = {method.function: method.module.words(method.function) for method in methods}
    found = {each.function for each in methods if what.search(each.module.source_of(each.function))}
    names = {function.name for function in found}
    while more := {function for function in words if function not in found and names & words[function]}:
        found |= more
        names |= {function.name for function in more}
    return frozenset(found)


def opens(wide: State, narrow: State, obj: Value) -> bool:
    """Whether one state stands for the other as well: an attribute that a setter was given may be whatever it was before."""
    if wide.verdict != narrow.verdict or wide.facts != narrow.facts:
        return False
    if any(other is not obj for other in differing([wide.heap, narrow.heap])):
        return False
    given, had = wide.heap.get(obj, {}), narrow.heap.get(obj, {})
    return given.keys() == had.keys() and all(
        isinstance(value, Sym) and value.key[0] == "param" and isinstance(had[name], (Const, Sym))
        for name, value in given.items()
        if value != had[name]
    )


def is_answered(mine: Ways, fact: Hashable, unless: tuple[Hashable, ...], ways: Ways) -> bool:
    """Whether a fact makes a hit no fault. What was frozen by a decision leaves the paths alone that decided the other way."""
    if not any(meets(fact, wanted) for wanted in unless):
        return False
    return not isinstance(fact, tuple) or fact[0] != FROZEN or all(any(agree(a, b) for b in ways) for a in mine)


def read(project: Project, module: ProjectModule, judge: Judge, assume: dict[str, Value]) -> Reading:
    """Reads one file as a program of its own."""
    it = Interpreter(project, module, judge, assume)
    Reader(it, module).read()
    evidence = {found.fact: it.decided[key] for key, found in it.found.items() if isinstance(found, Evidence)}
    hits = [
        replace(hit, decided=hangs_on(it, key, hit))
        for key, hit in it.found.items()
        if isinstance(hit, Hit)
        and not any(is_answered(it.decided[key], fact, hit.unless, ways) for fact, ways in evidence.items())
        and all(fact in evidence for fact in hit.needs)
    ]
    if any(hit.rule == "tf32-off" for hit in hits):
        hits = [
            *(hit for hit in hits if hit.rule != "tf32-off"),
            *without_tf32(it, [h for h in hits if h.rule == "tf32-off"]),
        ]
    if it.coverage.gave_up:
        hits = [hit for hit in hits if not (hit.never and hit.never in module.text)]
    if it.coverage.gave_up and SET_BY_HAND.search(module.text):
        hits = [hit for hit in hits if hit.rule != "scaler-settings"]
    if STAGES in module.text:  # the program asks the scaler how far it is: its branches are right where ours may not be
        hits = [hit for hit in hits if hit.rule not in STAGED]
    return Reading(tuple(hits), it.coverage, it.handed)
