"""The abstract interpreter: it follows a program along each of its paths and tells the checks what happens on the way.

It knows Python's control flow, scopes and calls, and nothing of torch: what an outside call does is ``effects.py``, what
an expression is worth is ``evaluate.py``. It never imports or runs the code that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precisionlint.checks import Evidence, Hit, Judge
from precisionlint.events import (
    Adopted,
    Autocast,
    Backward,
    CustomOp,
    Event,
    Grads,
    Iteration,
    LossScaled,
    Named,
    Owns,
    Renewed,
    ScalerMade,
    Step,
    Trains,
    Written,
    ZeroGrad,
)
from precisionlint.source import calls, classes, effects, imports, repeats, settings, statements
from precisionlint.source import program as p
from precisionlint.source.apis import Apis
from precisionlint.source.blur import blur
from precisionlint.source.effects.kept import HAND_SCALE
from precisionlint.source.garbage import Collector
from precisionlint.source.inert import Inert, Passable
from precisionlint.source.module import ProjectModule
from precisionlint.source.objects import PARAMETER, weight_path
from precisionlint.source.operators import as_cond, flip, opened_up, truth
from precisionlint.source.project import Project
from precisionlint.source.records import (
    BUDGET,
    FILE_BUDGET,
    WIDEST,
    BudgetError,
    Coverage,
    FrameInfo,
    Paths,
    Where,
)
from precisionlint.source.state import Fact, State, merge
from precisionlint.source.thinning import thin
from precisionlint.source.values import (
    NONE,
    PLAIN,
    UNSURE,
    Class,
    Cond,
    External,
    Flow,
    Func,
    Obj,
    Pending,
    Sym,
    Value,
    const,
    flow_of,
    join,
    text_of,
)

TRAINING = (Autocast, Backward, CustomOp, Grads, LossScaled, Owns, ScalerMade, Step, Trains, ZeroGrad)
"""What a program is read for: one that shows none of these on a few paths shows none on many."""

WAYS = 8
"""How many ways to a hit are told apart by what they decided; more are any way."""


TOO_WIDE = "more paths at once than are followed: some were left out"


class Interpreter:
    """Reads the programs of one file; what it imports is read with it."""

    def __init__(self, project: Project, entry: ProjectModule, judge: Judge, assume: dict[str, Value]) -> None:
        self.project = project
        self.entry = entry
        self.judge = judge
        self.assume = assume
        self.apis: Apis = project.apis
        self.frames: list[FrameInfo] = []
        self.frame_ids: dict[Any, int] = {}
        self.global_frames: dict[ProjectModule, int] = {}
        self.snapshots: dict[ProjectModule, State | None] = {}
        self.layers: list[State] = []
        self.repeats: dict[Any, tuple[list[repeats.Outcome], Any]] = {}
        self.events = 0
        self.verdicts: dict[tuple[Any, ...], int] = {}
        self._roots: dict[Sym, frozenset[Any]] = {}
        self.inert: dict[Passable, tuple[int, Inert | None]] = {}
        self.syms: dict[tuple[Any, ...], Sym] = {}
        self.event_ids: set[Any] = set()
        self.entered: set[p.Function] = set()
        self.costly: dict[p.Function, int] = {}  # helpers -> on how many widths they have been too much to be followed
        self.handed: dict[tuple[ProjectModule, p.Function], bool] = {}  # of others: whether all calls decide precision
        self.instantiated: set[p.ClassDef] = set()
        self.found: dict[Any, Hit | Evidence] = {}
        self.decided: dict[Any, list[dict[Sym, Fact]]] = {}  # what the paths had decided that led to each of them
        self.deciding: dict[Sym, Fact] = {}
        self.coverage = Coverage()
        self.silent = 0
        self.steps = self.total = 0
        self.calling_back = 0
        """How many functions are being run that were handed on, one in the other."""
        self.called_back: dict[p.Function, Any] = {}  # functions -> the call that they were handed to
        self.limit = self.whole = BUDGET
        self.width = WIDEST
        self.thinned = self.trains = False
        self.limited: Any = None
        self.collector = Collector()
        self.loops: list[Any] = []
        self.unrolled: list[int] = []
        self.turns: list[bool] = []  # of each loop being run: whether it is followed item by item
        self.kept: set[str] = set(assume)
        self.labelled: dict[str, set[Cond]] = {}  # branches in words -> what holds there
        self.multiplied: dict[Sym, Named] = {}  # what was multiplied in place by a number -> that
        self.varied: set[Any] = set()  # calls that return one half dtype on some paths, and others on others
        self.chosen: dict[tuple[Any, str], str] = {}  # what holds a half dtype on some paths only -> its name
        self.mros: dict[Class, list[Value]] = {}
        self.decorator_values: dict[p.Function, tuple[Value, ...]] = {}
        self.registered: set[Any] = set()
        self.adapted: set[Value] = set()  # models with trainable adapters in them
        self.cast_at: dict[
            Value, tuple[Where, str]
        ] = {}  # what was cast and is not known to be a model -> where, and how
        self.implementations: dict[str, Func] = {}
        self.yields: list[Callable[[State, Value], Paths] | None] = []
        self.names: dict[Any, str] = {}
        self.resolving: set[Pending] = set()
        self.weight_roots: set[Value] = set()
        self.default_values: dict[p.Function, dict[str, Value]] = {}
        self.parents: dict[Value, tuple[Value, Any]] = {}
        self.parts: dict[Class, dict[Any, Value]] = {}

    def begin(self, budget: int) -> None:
        """Before each root: its own budget."""
        self.total += self.steps
        self.steps = 0
        self.limit = self.whole = min(budget, FILE_BUDGET - self.total)
        self.limited = None

    def open(self) -> tuple[int, ...]:
        """How much is open where a run may be given up: see ``close``."""
        return self.silent, len(self.loops), len(self.unrolled), len(self.turns), len(self.yields)

    def close(self, depths: tuple[int, ...]) -> None:
        """Closes what a run that was given up has left open."""
        self.silent, loops, unrolled, turns, yields = depths
        del self.loops[loops:], self.unrolled[unrolled:], self.turns[turns:], self.yields[yields:]

    # -- symbols

    def intern(
        self, key: tuple[Any, ...], text: str, flow: Flow, sources: frozenset[Sym], of: tuple[Value, ...]
    ) -> Sym:
        sym = self.syms.get(key)
        if sym is None or (flow != sym.flow and key[0] != "site"):
            last = text.rpartition(".")[2]
            if HAND_SCALE.search(last) and flow.scaled is None:
                flow = Flow(Named(key, text), flow.region, "scale")
            if len(text) > 60:
                text = text[:57] + "…"
            sym = Sym(key, text, flow, sources, of)
            self.syms[key] = sym
        return sym

    def derived(self, key: tuple[Any, ...], text: str, parts: tuple[Value, ...], flow: Flow | None = None) -> Value:
        """A value that is a function of others: the same parts give the same symbol."""
        if self.assume and (key[0] in ("attr", "index") or key[:2] == ("pure", "get")):
            for name, value in self.assume.items():
                if (name == key[2] and key[0] == "attr") or (
                    not name.isidentifier() and f".{text}".endswith(f".{name}")
                ):
                    self.coverage.assumed.add(name)
                    return value
        sources: frozenset[Sym] = frozenset()
        for part in parts:
            if isinstance(part, Sym):
                sources |= part.sources
            elif isinstance(part, Cond):
                sources |= part.sym.sources
        if flow is None:
            flow = PLAIN
            for part in parts:
                flow = join(flow, flow_of(part))
            if flow.factor and key[0] in ("op", "index", "attr"):
                flow = Flow(UNSURE, flow.region)
        if flow is not PLAIN:
            key = (*key, flow)
        return self.intern(key, text, flow, sources, ())

    def assumed(self, name: str) -> Value | None:
        """What an undecided value of a name is assumed to be."""
        if name in self.assume:
            self.coverage.assumed.add(name)
        return self.assume.get(name)

    def site(self, state: State, node: Any, text: str, flow: Flow, of: tuple[Value, ...]) -> Sym:
        """The unknown value that comes from a place of the program; it is another one each time the place is passed."""
        key = ("site", *self.here(state, node), flow, of)
        sym = self.syms.get(key)
        if sym is None:
            sources: frozenset[Sym] = frozenset()
            sym = self.intern(key, text, flow, sources, of)
        else:
            self.renew(state, node, sym)
        return sym

    def renew(self, state: State, node: Any, sym: Sym) -> None:
        """A symbol stands for another value from here on."""
        state.renew(sym)
        for known in [i for i in self.event_ids if isinstance(i, Sym) and (i is sym or sym in i.sources)]:
            self.emit(state, Renewed(self.where(state, node), (), known))

    def roots(self, sym: Sym) -> frozenset[Any]:
        """What a symbol is made from, itself among it."""
        if sym not in self._roots:
            self._roots[sym] = repeats.roots_of(sym)
        return self._roots[sym]

    def free(self, name: str) -> Value:
        """A name that nothing in the program binds."""
        if (assumed := self.assumed(name)) is not None:
            return assumed
        return self.intern(("free", name), name, PLAIN, frozenset(), ())

    def unknown(self, key: Any, text: str, flow: Flow, values: list[Value | None]) -> Value:
        """An unknown value that stands for several paths' values at once.

        Where weights of one of them have been spoken of before, nobody can say which weights it has.
        """
        spoken_of = any(value in self.weight_roots for value in values)
        joined = self.intern(("site", "several" if spoken_of else "joined", key, flow), text, flow, frozenset(), ())
        joined.loose = True
        dtypes = {
            value.key[2] if isinstance(value, Sym) and value.key[0] == "cast" else "" for value in values if value
        }
        if len(dtypes) == 1 and "" not in dtypes:  # whichever it is, it was cast to that
            cast = self.derived(("cast", joined, dtypes.pop()), text, (joined,), flow)
            where = next((self.cast_at[value] for value in values if value in self.cast_at), None)
            if where is not None:
                self.cast_at.setdefault(cast, where)
            return cast
        return joined

    # -- events

    def where(self, state: State, node: Any) -> Where:
        return Where(self.module_of(state), node, state.stack)

    def where_in(self, state: State, module: ProjectModule, node: Any, call: Any) -> Where:
        """A definition that this call leads to."""
        return Where(module, node, (*state.stack, (self.module_of(state), call)))

    def emit(self, state: State, event: Event) -> None:
        """Tells the checks of an event."""
        if self.silent:
            return
        self.events += not isinstance(event, (Iteration, Renewed))
        self.trains = self.trains or isinstance(event, TRAINING)
        for attribute_name in ("optimizer", "scaler", "via", "scheduler"):
            named = getattr(event, attribute_name, None)
            if isinstance(named, Named):
                self.event_ids.add(named.id)
        weights = getattr(event, "weights", None)
        if weights is not None and not isinstance(event, Written):
            self.weight_roots.update(path[0] for path in weights)
        self.coverage.recipe.note(event)
        self.deciding = state.facts
        self.stand(state, self.judge.advance(state.checks, event, self.report))

    def stand(self, state: State, checks: tuple[Any, ...]) -> None:
        """The checks of a path stand like this from here on."""
        if checks is not state.checks:
            state.checks = checks
            state.verdict = self.verdicts.setdefault(checks, len(self.verdicts))

    def scalers_of(self, owner: Sym) -> list[Any]:
        """The objects of events that are attributes of an unknown one."""
        return [i for i in self.event_ids if isinstance(i, Sym) and i.key[0] == "attr" and i.key[1] is owner]

    def report(self, found: Hit | Evidence) -> None:
        """Keeps a hit or a piece of evidence, once for each way that leads to it."""
        key: Any = found
        if isinstance(found, Hit):
            places = (found.at, *(seen.at for seen in found.trace))
            key = (
                found.rule,
                found.unless,
                *((at.module, at.node) for at in places if isinstance(at, Where)),
                *(s.when for s in found.trace),
            )
        self.found.setdefault(key, found)
        ways = self.decided.setdefault(key, [])
        if len(ways) < WAYS:
            ways.append(dict(self.deciding) if len(ways) < WAYS - 1 else {})

    def come_across(self, found: dict[Any, Where], state: State, value: Value, at: Any) -> None:
        """Keeps an object that is used, if it was made here; what is handed in was made by somebody else."""
        if isinstance(value, Obj):
            found.setdefault(value.site[0], self.where(state, at))
        elif not (isinstance(value, Sym) and value.key[0] in ("param", "attr", "index", "item")):
            found.setdefault(value, self.where(state, at))

    def gave_up(self, state: State, node: Any, what: str, func: Func) -> None:
        """Keeps where reading of a call was given up: a root is no call, but the definition in its own file."""
        module = func.module if node is func.function.node else self.module_of(state)
        self.coverage.gave_up.setdefault((module, node), what)

    def here(self, state: State, node: Any) -> tuple[Any, ...]:
        """A place in a run: a node, the scope, and which item of the loops that are followed item by item."""
        return (node, state.frame, tuple(self.unrolled))

    def one_of_many(self) -> bool:
        """Whether what is made here is made so many times that nobody knows how many."""
        return bool(self.turns) and not self.turns[-1]

    def innermost_loop(self, state: State) -> Any:
        """The innermost loop around what is being run."""
        return self.loops[-1] if self.loops else None

    # -- scopes

    def new_frame(self, key: Any, info: FrameInfo) -> int:
        if key not in self.frame_ids:
            self.frame_ids[key] = len(self.frames)
            self.frames.append(info)
        return self.frame_ids[key]

    def module_of(self, state: State) -> ProjectModule:
        return self.frames[state.frame].module

    def globals_frame(self, module: ProjectModule) -> int:
        if module not in self.global_frames:
            self.kept |= module.kept
            self.global_frames[module] = self.new_frame(("globals", module), FrameInfo(module, None))
        return self.global_frames[module]

    def lookup(self, state: State, slot: p.Slot) -> Value:
        frame: int | None = state.frame
        while frame is not None:
            scope = state.frames.get(frame)
            if scope is not None and slot in scope:
                value = scope[slot]
                return self.resolve(state, value) if isinstance(value, Pending) else value
            info = self.frames[frame]
            if isinstance(slot, int):
                return NONE
            if slot in info.outer:
                frame = info.outer[slot]
                continue
            frame = info.parent
        assert isinstance(slot, str)
        if slot == "__name__":
            return const("__main__" if self.module_of(state) is self.entry else self.module_of(state).name)
        if slot in effects.BUILTINS:
            return External(f"builtins.{slot}")
        return self.free(slot)

    def bind_name(self, state: State, slot: p.Slot, value: Value) -> None:
        info = self.frames[state.frame]
        frame = state.frame
        if isinstance(slot, str):
            frame = info.outer.get(slot, frame)
            if isinstance(value, Sym) and value.key[0] in ("site", "pure") and value.text.endswith((")", "…")):
                value.text = slot
                if HAND_SCALE.search(slot) and value.flow is PLAIN:
                    value = self.intern((*value.key, "scale"), slot, PLAIN, value.sources, value.of)
            elif isinstance(value, Obj) and value.site not in self.names:
                self.names[value.site] = slot
        state.scope(frame)[slot] = value

    def adopt(self, state: State, parent: Value, name: Any, child: Value) -> None:
        """A module, or a parameter, becomes part of a module."""
        child = (weight := state.heap.get(child, {}).get(PARAMETER)) or child
        if isinstance(child, Obj) and child != parent and (weight or self.kind(state, child) == "module"):
            self.parents.setdefault(child, (parent, name))
            if child in self.weight_roots:
                path = weight_path(self, child)
                if path[0] != child:
                    self.emit(state, Adopted(None, (), child, path))
                    self.weight_roots.add(parent)  # which may become part of another in turn

    def object_name(self, obj: Obj) -> str:
        return "self" if isinstance(obj.cls, Class) else self.names.get(obj.site, text_of(obj))

    # -- blocks

    def run_block(self, block: p.Block, states: list[State]) -> Paths:
        """Runs a block on every path that reaches it."""
        exits: list[tuple[str, State, Value]] = []
        kills = block.kills
        for position, instr in enumerate(block.code):
            if not states:
                break
            run = statements.RUN[type(instr)]
            after: list[State] = []
            for state in states:
                self.steps += 1
                run(self, instr, state, after, exits)
            if self.steps > self.limit:
                raise BudgetError(self.limited)
            if kills is not None and kills[position]:
                for state in after:
                    scope = None
                    for slot in kills[position]:
                        if slot in state.frames.get(state.frame, ()):
                            scope = scope or state.scope(state.frame)
                            del scope[slot]
            if len(after) > 1 and position + 1 < len(block.code):
                after = self.passing(block.code[position + 1], after)
            states = self.merged(after, before=len(states)) if len(after) > 1 else after
        return Paths(states, exits)

    def passing(self, check: p.Instr, states: list[State]) -> list[State]:
        """The paths that get past a check that raises, if any does: those that fail it do not take their place among the few that go on."""
        if not isinstance(check, p.If) or check.quiet or not isinstance(check.test, p.Name) or check.other.code:
            return states
        if not check.then.code or not isinstance(check.then.code[-1], p.Raise):
            return states
        return [one for one in states if truth(one, self.lookup(one, check.test.slot)) is not True] or states

    def merged(self, states: list[State], limit: int = 0, before: int = 1) -> list[State]:
        """The same paths in fewer states; ``before``: how many they were, above which differences that do not matter are forgotten."""
        if len(states) < 2:
            return states
        for state in states:
            if state.laid < len(self.layers):
                imports.lay(self, state)
        result = merge(states)
        if len(result) > before:
            result = merge(blur(result, self.unknown, self.collector, self.kept))
        limit = limit or self.width
        if len(result) > limit:
            result = thin(result, limit, self.kept, self.judge.stakes)
            self.thinned = True
            function = self.frames[result[0].frame].function
            if (
                function is not None or TOO_WIDE not in self.coverage.gave_up.values()
            ):  # the top level gets what they leave
                self.coverage.gave_up.setdefault((self.module_of(result[0]), function), TOO_WIDE)
        return result

    def fork(self, state: State, value: Value) -> list[tuple[bool, State]]:
        """The sides of a condition that this path can take."""
        known = truth(state, opened_up(self, value))
        if known is not None:
            return [(known, state)]
        cond = as_cond(opened_up(self, value))
        if cond is None:
            return [(True, state), (False, state.fork())]
        other = state.fork()
        result = []
        if self.assume_cond(state, cond):
            result.append((True, state))
        flipped = flip(cond)
        assert isinstance(flipped, Cond)
        if self.assume_cond(other, flipped):
            result.append((False, other))
        return result

    def assume_cond(self, state: State, cond: Cond) -> bool:
        """Takes a condition for granted, with what follows from it: both sides of an 'and' that holds, of an 'or' that does not."""
        if not state.assume(cond):
            return False
        sym = cond.sym
        if (
            cond.kind == "truth"
            and sym.key[0] == "op"
            and sym.key[1] in ("and", "or")
            and cond.positive == (sym.key[1] == "and")
        ):
            for side in sym.key[2:4]:
                inner = as_cond(side)
                if inner is not None:
                    wanted = inner if cond.positive else flip(inner)
                    if not self.assume_cond(state, wanted):  # type: ignore[arg-type]
                        return False
        return True

    # -- the rest of the interpreter stands in modules of its own

    mro = classes.mro
    is_enum = classes.is_enum
    external_base = classes.external_base
    external_name = classes.external_name
    kind = classes.kind
    super_attribute = classes.super_attribute
    decorators = classes.decorators
    property_value = classes.property_value
    field = settings.field
    call = calls.call
    call_function = calls.call_function
    run_function = calls.run_function
    enter_function = calls.enter_function
    instantiate = calls.instantiate
    call_back = calls.call_back
    global_of = imports.global_of
    run_module = imports.run_module
    resolve = imports.resolve
