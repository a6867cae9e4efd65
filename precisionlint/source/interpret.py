"""The abstract interpreter: it follows a program along each of its paths and tells the checks what happens on the way.

It knows Python's control flow, scopes and calls, and nothing of torch: what an outside call does is ``effects.py``, what
an expression is worth is ``evaluate.py``. It never imports or runs the code that it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precisionlint.checks import Evidence, Hit, Judge
from precisionlint.events import Event, Iteration, Named, Renewed
from precisionlint.source import effects
from precisionlint.source import program as p
from precisionlint.source.apis import Apis, table
from precisionlint.source.blur import blur
from precisionlint.source.evaluate import (
    HAND_SCALE,
    as_cond,
    attribute,
    class_attribute,
    element_of,
    elements,
    evaluate,
    flip,
    is_container,
    name_of,
    opened_up,
    truth,
)
from precisionlint.source.garbage import Collector
from precisionlint.source.project import Project, ProjectModule
from precisionlint.source.state import State, merge
from precisionlint.source.values import (
    NONE,
    PLAIN,
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
    Pending,
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

PATHS = 32
"""How many paths are followed side by side; more are thinned out, and that is counted and said."""
UNROLLED = 8
"""Up to how many known items a loop is followed item by item."""
DEPTH = 14
"""How deep calls are followed."""
BUDGET = 20_000
"""How many instructions one program may take before reading of it is given up."""
FILE_BUDGET = 60_000
"""How many instructions all programs of a file may take together."""
HELPER_BUDGET = 1_500
"""How many instructions a call may take that cannot train: what it builds is then unknown."""

Args = tuple[tuple[str | None, Value], ...]


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the source: a node of a module's tree, and the calls that led there, outermost first."""

    module: ProjectModule
    node: Any
    stack: tuple[tuple[ProjectModule, Any], ...]


@dataclass(slots=True)
class FrameInfo:
    """A scope: its module, the scope around it, and the names that it takes from elsewhere."""

    module: ProjectModule
    parent: int | None
    function: p.Function | None = None
    depth: int = 0
    outer: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Paths:
    """How the paths through a block end: they fall through, or leave it."""

    states: list[State]
    exits: list[tuple[str, State, Value]]


@dataclass
class Coverage:
    """What reading came across."""

    programs: int = 0
    loops: set[Any] = field(default_factory=set)
    optimizers: set[Any] = field(default_factory=set)
    scalers: set[Any] = field(default_factory=set)
    recipe: set[str] = field(default_factory=set)
    gave_up: dict[tuple[Any, Any], str] = field(default_factory=dict)


class OutOfBudget(Exception):
    """More paths than reading can follow: of a program (``call`` is None), or of one call in it."""

    def __init__(self, call: Any = None) -> None:
        super().__init__()
        self.call = call


class Interpreter:
    """Reads the programs of one file; what it imports is read with it."""

    def __init__(self, project: Project, entry: ProjectModule, judge: Judge, assume: dict[str, Value]) -> None:
        self.project = project
        self.entry = entry
        self.judge = judge
        self.assume = assume
        self.apis: Apis = table()
        self.frames: list[FrameInfo] = []
        self.frame_ids: dict[Any, int] = {}
        self.global_frames: dict[ProjectModule, int] = {}
        self.snapshots: dict[ProjectModule, State | None] = {}
        self.syms: dict[tuple[Any, ...], Sym] = {}
        self.event_ids: set[Any] = set()
        self.entered: set[p.Function] = set()
        self.instantiated: set[p.ClassDef] = set()
        self.found: dict[Any, Hit | Evidence] = {}
        self.coverage = Coverage()
        self.silent = 0
        self.steps = self.total = 0
        self.limit, self.limited = BUDGET, None
        self.collector = Collector()
        self.loops: list[Any] = []
        self.kept: set[str] = set(assume)
        self.mros: dict[Class, list[Value]] = {}
        self.decorator_values: dict[p.Function, tuple[Value, ...]] = {}
        self.registered: set[Any] = set()
        self.implementations: dict[str, Func] = {}
        self.yields: list[Callable[[State, Value], Paths] | None] = []
        self.names: dict[Any, str] = {}
        self.resolving: set[Pending] = set()
        self.weight_roots: set[Value] = set()
        self.default_values: dict[p.Function, dict[str, Value]] = {}
        self.parents: dict[Value, tuple[Value, Any]] = {}

    def begin(self) -> None:
        """Before each root: its own budget, and nothing open."""
        self.total += self.steps
        self.steps = 0
        self.limit, self.limited = min(BUDGET, FILE_BUDGET - self.total), None
        self.silent = 0
        self.loops.clear()
        self.yields.clear()

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
        if key[0] == "attr" and self.assume and key[2] in self.assume:
            return self.assume[key[2]]
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

    def site(self, state: State, node: Any, text: str, flow: Flow, of: tuple[Value, ...]) -> Sym:
        """The unknown value that comes from a place of the program; it is another one each time the place is passed."""
        key = ("site", node, state.frame, flow, of)
        sym = self.syms.get(key)
        if sym is None:
            sources: frozenset[Sym] = frozenset()
            sym = self.intern(key, text, flow, sources, of)
        else:
            state.renew(sym)
            if sym in self.event_ids:
                self.emit(state, Renewed(self.where(state, node), (), sym))
        return sym

    def free(self, name: str) -> Value:
        """A name that nothing in the program binds."""
        if name in self.assume:
            return self.assume[name]
        return self.intern(("free", name), name, PLAIN, frozenset(), ())

    def unknown(self, key: Any, text: str, flow: Flow, values: list[Value | None]) -> Value:
        """An unknown value that stands for several paths' values at once.

        Where weights of one of them have been spoken of before, nobody can say which weights it has.
        """
        spoken_of = any(value in self.weight_roots for value in values)
        return self.intern(("site", "several" if spoken_of else "joined", key, flow), text, flow, frozenset(), ())

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
        for attribute_name in ("optimizer", "scaler", "via", "scheduler"):
            named = getattr(event, attribute_name, None)
            if isinstance(named, Named):
                self.event_ids.add(named.id)
        weights = getattr(event, "weights", None)
        if weights is not None:
            self.weight_roots.update(path[0] for path in weights)
        state.checks = self.judge.advance(state.checks, event, self.report)

    def report(self, found: Hit | Evidence) -> None:
        """Keeps a hit or a piece of evidence, once for each way that leads to it."""
        key: Any = found
        if isinstance(found, Hit):
            places = (found.at, *(seen.at for seen in found.trace))
            key = (
                found.rule,
                *((at.module, at.node) for at in places if isinstance(at, Where)),
                *(s.when for s in found.trace),
            )
        self.found.setdefault(key, found)

    def gave_up(self, state: State, node: Any, what: str) -> None:
        self.coverage.gave_up.setdefault((self.module_of(state), node), what)

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
                if isinstance(value, Pending):
                    value = self.resolve(state, value)
                    state.scope(frame)[slot] = value
                return value
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
            if isinstance(value, Sym) and value.key[0] == "site" and value.text.endswith((")", "…")):
                value.text = slot
                if HAND_SCALE.search(slot) and value.flow is PLAIN:
                    value = self.intern((*value.key, "scale"), slot, PLAIN, value.sources, value.of)
            elif isinstance(value, Obj) and value.site not in self.names:
                self.names[value.site] = slot
        state.scope(frame)[slot] = value

    def adopt(self, state: State, parent: Value, name: Any, child: Value) -> None:
        """A module becomes part of another."""
        if isinstance(child, Obj) and child != parent and self.kind(state, child) == "module":
            self.parents.setdefault(child, (parent, name))

    def object_name(self, obj: Obj) -> str:
        return "self" if isinstance(obj.cls, Class) else self.names.get(obj.site, text_of(obj))

    # -- classes

    def mro(self, state: State, cls: Class) -> list[Value]:
        """A class and its bases, depth first; a class that inherits from itself ends there."""
        if cls not in self.mros:
            order: list[Value] = []

            def visit(current: Value) -> None:
                if current in order or len(order) > 30:
                    return
                order.append(current)
                if isinstance(current, Class):
                    bases = state.heap.get(current, {}).get("__bases__")
                    for base in bases.items if isinstance(bases, Tup) else ():
                        visit(base)

            visit(cls)
            self.mros[cls] = order
        return self.mros[cls]

    def external_base(self, state: State, cls: Class) -> str:
        """The kind of the first outside base that has one ("optimizer", "module" …)."""
        for base in self.mro(state, cls):
            if isinstance(base, External):
                kind = self.apis.kind(base.name)
                if kind:
                    return kind
        return ""

    def kind(self, state: State, obj: Value) -> str:
        """What an object is, as far as precision goes."""
        if isinstance(obj, Obj):
            if isinstance(obj.cls, External):
                return self.apis.kind(obj.cls.name) or ("param_group" if obj.cls.name == "param_group" else "")
            if isinstance(obj.cls, Class):
                return self.external_base(state, obj.cls)
        return ""

    def super_attribute(self, state: State, sup: Super, name: str) -> Value | None:
        order = self.mro(state, sup.owner)
        receiver_cls = sup.receiver.cls if isinstance(sup.receiver, Obj) else sup.owner
        if isinstance(receiver_cls, Class):
            full = self.mro(state, receiver_cls)
            if sup.owner in full:
                order = full[full.index(sup.owner) :]
        for current in order[1:]:
            if isinstance(current, Class):
                found = state.heap.get(current, {}).get(name)
                if isinstance(found, Func):
                    return Func(found.function, found.module, found.frame, sup.receiver, found.owner)
                if found is not None:
                    return found
        return None

    def decorators(self, state: State, func: Func) -> frozenset[str]:
        """The names of a function's decorators, as far as they are outside names."""
        values = self.decorator_values.get(func.function, ())
        return frozenset(value.name.removeprefix("builtins.") for value in values if isinstance(value, External))

    def property_value(self, state: State, func: Func, receiver: Value, name: str) -> Value:
        """A property: what its single return says, else an unknown value that stays the same."""
        body = func.module.body(func.function).code
        if len(body) == 1 and isinstance(body[0], p.Return) and func.function.params:
            key = ("property", func.function, receiver, state.frame)
            frame = self.new_frame(key, FrameInfo(func.module, func.frame, func.function))
            outer = state.frame
            state.frame = frame
            state.frames[frame] = {func.function.params[0].name: receiver}
            state.owned.discard(frame)
            value = evaluate(self, state, body[0].value)
            state.frame = outer
            state.drop_frame(frame)
            return value
        return self.derived(("attr", receiver, name), f"{text_of(receiver)}.{name}", (receiver,))

    # -- modules

    def global_of(self, state: State, module: ProjectModule, name: str) -> Value:
        """A name of another module of the project; the module is read when it is first needed."""
        frame = self.globals_frame(module)
        if frame not in state.frames:
            self.load_module(state, module)
        scope = state.frames.get(frame, {})
        if name in scope:
            value = scope[name]
            if isinstance(value, Pending):
                value = self.resolve(state, value)
                state.scope(frame)[name] = value
            return value
        folder = module.path.parent if module.path.name == "__init__.py" else None
        if folder is not None:
            path = self.project.file_of(folder, [name])
            if path is not None:
                return self.module_value(path, f"{module.name}.{name}")
        return self.free(name)

    def module_value(self, path: Any, name: str) -> Value:
        if not self.project.worth_reading(path):
            return External(name, benign=True)
        module = self.project.load(path)
        return ModuleRef(module) if module is not None else External(name)

    def load_module(self, state: State, module: ProjectModule) -> None:
        """Runs the top level of an imported module, once, and lays what it leaves into this path's state."""
        if module not in self.snapshots:
            self.snapshots[module] = None  # what an import cycle sees meanwhile
            fresh = State()
            fresh.checks = self.judge.start
            self.silent += 1
            try:
                after = self.run_module(module, fresh)
            finally:
                self.silent -= 1
            self.snapshots[module] = after[0] if after else None
        snapshot = self.snapshots[module]
        if snapshot is None:
            state.frames.setdefault(self.globals_frame(module), {})
            return
        for frame, scope in snapshot.frames.items():
            state.frames.setdefault(frame, scope)
        for obj, attributes in snapshot.heap.items():
            state.heap.setdefault(obj, attributes)

    def run_module(self, module: ProjectModule, state: State) -> list[State]:
        state.frame = self.globals_frame(module)
        state.scope(state.frame)
        paths = self.run_block(module.block, [state])
        return paths.states or [s for _, s, _ in paths.exits]

    # -- blocks

    def run_block(self, block: p.Block, states: list[State]) -> Paths:
        """Runs a block on every path that reaches it."""
        exits: list[tuple[str, State, Value]] = []
        kills = block.kills
        for position, instr in enumerate(block.code):
            if not states:
                break
            run = RUN[type(instr)]
            after: list[State] = []
            for state in states:
                self.steps += 1
                run(self, instr, state, after, exits)
            if self.steps > self.limit:
                raise OutOfBudget(self.limited)
            if kills is not None and kills[position]:
                for state in after:
                    scope = None
                    for slot in kills[position]:
                        if slot in state.frames.get(state.frame, ()):
                            scope = scope or state.scope(state.frame)
                            del scope[slot]
            states = self.merged(after, before=len(states)) if len(after) > 1 else after
        return Paths(states, exits)

    def merged(self, states: list[State], limit: int = PATHS, before: int = 1) -> list[State]:
        """The same paths in fewer states; ``before``: how many they were, above which differences that do not matter are forgotten."""
        if len(states) < 2:
            return states
        result = merge(states, PATHS * 4)
        if len(result) > before:
            result = merge(blur(result, self.unknown, self.collector, self.kept), limit)
        if len(result) == limit:
            self.coverage.gave_up.setdefault(
                (self.module_of(result[0]), self.frames[result[0].frame].function),
                f"more than {limit} paths at once: some were not followed",
            )
        return result

    # -- instructions

    def do_assign(self, instr: p.Assign, state: State, after: list[State], exits: list[Any]) -> None:
        value = evaluate(self, state, instr.value)
        if instr.annotation is not None and isinstance(value, Sym):
            value = effects.annotated(self, state, instr.annotation, value)
        elif counts(instr) and (
            isinstance(value, Sym) or (isinstance(value, Const) and value.kind in ("int", "float"))
        ):
            # A counter or running sum is another value each time round; what it is made of no longer matters.
            value = self.site(state, instr.at, name_of(instr.target) or "…", flow_of(value), ())
        self.assign(state, instr.target, value, instr.at)
        after.append(state)

    def assign(self, state: State, target: p.Expr, value: Value, at: Any) -> None:
        match target:
            case p.Name():
                if isinstance(target.slot, str) and target.slot in self.assume and isinstance(value, (Sym, Cond)):
                    value = self.assume[target.slot]
                if isinstance(target.slot, str):
                    value = self.hand_scale((state.frame, target.slot), target.slot, value)
                self.bind_name(state, target.slot, value)
            case p.Attr():
                obj = evaluate(self, state, target.obj)
                if effects.attribute_set(self, state, obj, target, value, at):
                    return
                if isinstance(obj, (Obj, Sym, Class)):
                    if isinstance(value, Obj) and value.site not in self.names:
                        self.names[value.site] = name_of(target)
                    if isinstance(value, Sym) and value.text.endswith((")", "…")):
                        value.text = name_of(target) or value.text
                    if isinstance(obj, Obj) and self.kind(state, obj) == "module":
                        self.adopt(state, obj, target.name, value)
                    state.attributes(obj)[target.name] = self.hand_scale((obj, target.name), target.name, value)
                elif isinstance(obj, ModuleRef):
                    state.scope(self.globals_frame(obj.module))[target.name] = value
            case p.Index():
                obj = evaluate(self, state, target.obj)
                if is_container(obj):
                    key = evaluate(self, state, target.key)
                    slot = key.value if isinstance(key, Const) else "*"
                    if slot.__hash__ is not None:
                        state.attributes(obj)[slot] = value
            case p.Sequence():
                self.unpack(state, target, value, at)
            case p.Star():
                self.assign(state, target.value, Many(element_of(self, state, value, at)), at)

    def hand_scale(self, key: Any, name: str, value: Value) -> Value:
        """A number that is kept as the loss scale, by its name."""
        if not HAND_SCALE.search(name) or name.endswith("er"):
            return value
        number = isinstance(value, Const) and value.kind in ("int", "float") and value.value != 1
        if number or (isinstance(value, Sym) and value.key[0] == "param" and value.flow == PLAIN):
            return self.intern(("hand", key), name, PLAIN, frozenset(), ())
        return value

    def unpack(self, state: State, target: p.Sequence, value: Value, at: Any) -> None:
        items = elements(self, state, value)
        if items is not None and len(items) == len(target.items):
            for one, item in zip(target.items, items, strict=True):
                self.assign(state, one, item, at)
            return
        for position, one in enumerate(target.items):
            item = self.derived(("item", value, position), f"{text_of(value)}[{position}]", (value,))
            if isinstance(item, Sym) and isinstance(one, p.Name) and value_is_site(value):
                item.text = str(one.slot)
            self.assign(state, one, item, at)

    def do_delete(self, instr: p.Delete, state: State, after: list[State], exits: list[Any]) -> None:
        if isinstance(instr.target, p.Name):
            state.scope(state.frame).pop(instr.target.slot, None)
        after.append(state)

    def do_call(self, instr: p.Call, state: State, after: list[State], exits: list[Any]) -> None:
        for result, value in self.call(instr, state):
            result.scope(result.frame)[instr.target] = value
            after.append(result)

    def do_if(self, instr: p.If, state: State, after: list[State], exits: list[Any]) -> None:
        saved = state.control
        sides: list[tuple[str, list[State]]] = []
        for side, branch in self.fork(state, evaluate(self, state, instr.test)):
            block = instr.then if side else instr.other
            label = "" if instr.quiet else self.label(branch, instr.test, side)
            if not block.code:
                sides.append((label, [branch]))
                continue
            branch.control = (*saved, label) if label else saved
            paths = self.run_block(block, [branch])
            sides.append((label, paths.states))
            exits.extend(paths.exits)
        going = [label for label, states in sides if states]
        for label, states in sides:
            for one in states:
                # Where the other side left, what follows stands under the condition of this one.
                one.control = (*saved, label) if label and len(sides) == 2 and len(going) == 1 else saved
            after.extend(states)

    def label(self, state: State, test: p.Expr, side: bool) -> str:
        """A branch in words, as the reader of the program would say it."""
        if isinstance(test, p.Name) and isinstance(test.slot, int):
            value = evaluate(self, state, test)
            cond = as_cond(value)
            text = cond.text if cond is not None else ""
        elif isinstance(test, p.Unary) and test.op == "not":
            return self.label(state, test.value, not side)
        elif isinstance(test, p.Compare):
            op = test.op if side else COMPLEMENT[test.op]
            left, right = self.words(state, test.left), self.words(state, test.right)
            return f"{left} {op} {right}" if left and right else ""
        else:
            text = name_of(test) or text_of(evaluate(self, state, test))
        if not text:
            return ""
        if side:
            return text
        return text[4:] if text.startswith("not ") else f"not {text}"

    def words(self, state: State, expr: p.Expr) -> str:
        if isinstance(expr, p.Const):
            return repr(expr.value)
        return name_of(expr) or text_of(evaluate(self, state, expr))

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

    def do_for(self, instr: p.For, state: State, after: list[State], exits: list[Any]) -> None:
        iterable = evaluate(self, state, instr.iter)
        items = elements(self, state, iterable)
        if not instr.comprehension:
            self.coverage.loops.add(instr.at)
        if items and len(items) <= UNROLLED:
            states: list[State] = [state]
            broken: list[State] = []
            outer = state.pins
            self.loops.append(instr.at)
            for item in items:
                for one in states:
                    one.pins = (*outer, *items)
                    self.assign(one, instr.target, item, instr.at)
                states, left = self.body(instr.body, states, exits)
                broken.extend(left)
            self.loops.pop()
            for one in (*states, *broken):
                one.pins = outer
            self.leave_loop(instr.other, states, broken, after, exits)
            return

        def enter(one: State) -> None:
            value = element_of(self, one, iterable, instr.at)
            self.assign(one, instr.target, value, instr.at)

        once = instr.comprehension or isinstance(iterable, Tensors)
        self.loop(instr, state, enter, once, after, exits)

    def loop(
        self,
        instr: p.For | p.While,
        state: State,
        enter: Callable[[State], None],
        once: bool,
        after: list[State],
        exits: list[Any],
    ) -> None:
        """A loop's body twice: the second time from what the first left."""
        states, done, broken = [state], [], []
        for turn in (False,) if once else (False, True):
            for one in states:
                if not once:
                    self.emit(one, Iteration(self.where(one, instr.at), (), (instr.at, one.frame), turn))
                enter(one)
            before = [one.fork() for one in states] if not turn and not once else []
            if not once:
                self.loops.append(instr.at)
            states, left = self.body(instr.body, states, exits)
            if not once:
                self.loops.pop()
            broken.extend(left)
            done.extend(one.fork() for one in states)
            # What a second turn would only repeat is not run again.
            states = [one for one in states if not any(seen.same_but_facts(one) for seen in before)]
        self.leave_loop(instr.other, self.merged(done), broken, after, exits)

    def body(self, block: p.Block, states: list[State], exits: list[Any]) -> tuple[list[State], list[State]]:
        """The paths that go on with the loop, and those that break out of it."""
        paths = self.run_block(block, states)
        going, broken = list(paths.states), []
        for kind, one, value in paths.exits:
            if kind == "continue":
                going.append(one)
            elif kind == "break":
                broken.append(one)
            else:
                exits.append((kind, one, value))
        return self.merged(going), broken

    def leave_loop(
        self, other: p.Block, states: list[State], broken: list[State], after: list[State], exits: list[Any]
    ) -> None:
        if other.code and states:
            paths = self.run_block(other, states)
            states = paths.states
            exits.extend(paths.exits)
        after.extend(states)
        after.extend(broken)

    def do_while(self, instr: p.While, state: State, after: list[State], exits: list[Any]) -> None:
        self.coverage.loops.add(instr.at)
        endless = isinstance(instr.test, p.Const) and bool(instr.test.value)
        states = [state]
        done: list[State] = []
        for turn in (False, True):
            going: list[State] = []
            for one in states:
                self.emit(one, Iteration(self.where(one, instr.at), (), (instr.at, one.frame), turn))
            head = self.run_block(instr.head, states)
            exits.extend(head.exits)
            for one in head.states:
                test = evaluate(self, one, instr.test)
                known = truth(one, test)
                if known is False:
                    done.append(one)
                    continue
                going.append(one)
            self.loops.append(instr.at)
            states, broken = self.body(instr.body, going, exits)
            self.loops.pop()
            after.extend(broken)
            if not endless:
                done.extend(one.fork() for one in states)
        self.leave_loop(instr.other, self.merged(done), [], after, exits)

    def do_with(self, instr: p.With, state: State, after: list[State], exits: list[Any]) -> None:
        context = evaluate(self, state, instr.context)
        if isinstance(context, Manager):
            self.with_manager(instr, context, state, after, exits)
            return
        for branch, target, leave in effects.enter(self, state, context, instr):
            if instr.target is not None:
                self.assign(branch, instr.target, target, instr.at)
            paths = self.run_block(instr.body, [branch])
            for one in paths.states:
                leave(one)
                after.append(one)
            for kind, one, value in paths.exits:
                leave(one)
                exits.append((kind, one, value))

    def with_manager(self, instr: p.With, manager: Manager, state: State, after: list[State], exits: list[Any]) -> None:
        """A generator function under @contextmanager: its body runs around the with block, which stands where it yields."""
        outer = state.frame
        control, stack = state.control, state.stack

        def block(inner: State, value: Value) -> Paths:
            frame, saved_stack = inner.frame, inner.stack
            inner.frame, inner.stack = outer, stack
            self.yields.append(None)
            if instr.target is not None:
                self.assign(inner, instr.target, value, instr.at)
            paths = self.run_block(instr.body, [inner])
            self.yields.pop()
            for one in paths.states:
                one.frame, one.stack = frame, saved_stack
            # What leaves the with block leaves the generator too, after its finally and with blocks.
            marked = []
            for kind, one, value in paths.exits:
                one.frame, one.stack = frame, saved_stack
                marked.append((f"outer-{kind}", one, value))
            return Paths(paths.states, marked)

        left: list[Any] = []
        for one, _ in self.enter_function(manager.func, manager.args, manager.site, state, on_yield=block, left=left):
            one.frame, one.control, one.stack = outer, control, stack
            after.append(one)
        for kind, one, value in left:
            one.frame, one.control, one.stack = outer, control, stack
            exits.append((kind.removeprefix("outer-"), one, value))

    def do_try(self, instr: p.Try, state: State, after: list[State], exits: list[Any]) -> None:
        only_imports = all(isinstance(i, (p.Import, p.Assign)) for i in instr.body.code)
        before = state.fork() if instr.handlers and not only_imports else None
        paths = self.run_block(instr.body, [state])
        states, leaving, raised = list(paths.states), [], [] if before is None else [before]
        for kind, one, value in paths.exits:
            if kind == "raise" and instr.handlers:
                raised.append(one)
            else:
                leaving.append((kind, one, value))
        if instr.other.code and states:
            rest = self.run_block(instr.other, states)
            states = rest.states
            leaving.extend(rest.exits)
        raised = self.merged(raised)
        for handler in instr.handlers:
            if not raised:
                break
            rest = self.run_block(handler, [one.fork() for one in raised])
            states.extend(rest.states)
            leaving.extend(rest.exits)
        if instr.final.code:
            rest = self.run_block(instr.final, self.merged(states))
            states = rest.states
            exits.extend(rest.exits)
            for kind, one, value in leaving:
                last = self.run_block(instr.final, [one])
                exits.extend((kind, final, value) for final in last.states)
                exits.extend(last.exits)
        else:
            exits.extend(leaving)
        after.extend(states)

    def do_return(self, instr: p.Return, state: State, after: list[State], exits: list[Any]) -> None:
        exits.append(("return", state, evaluate(self, state, instr.value)))

    def do_raise(self, instr: p.Raise, state: State, after: list[State], exits: list[Any]) -> None:
        exits.append(("raise", state, NONE))

    def do_break(self, instr: p.Break, state: State, after: list[State], exits: list[Any]) -> None:
        exits.append(("break", state, NONE))

    def do_continue(self, instr: p.Continue, state: State, after: list[State], exits: list[Any]) -> None:
        exits.append(("continue", state, NONE))

    def do_define(self, instr: p.Define, state: State, after: list[State], exits: list[Any]) -> None:
        function = instr.function
        func = Func(function, self.module_of(state), state.frame)
        self.decorator_values[function] = tuple(evaluate(self, state, d) for d in function.decorators)
        self.default_values[function] = {
            param.name: evaluate(self, state, param.default) for param in function.params if param.default is not None
        }
        value = effects.decorated(self, state, func)
        self.bind_name(state, function.name, value)
        after.append(state)

    def do_class(self, instr: p.DefineClass, state: State, after: list[State], exits: list[Any]) -> None:
        cls = Class(instr.cls, self.module_of(state), state.frame)
        bases = tuple(evaluate(self, state, base) for base in instr.cls.bases)
        frame = self.new_frame(("class", instr.cls, state.frame), FrameInfo(cls.module, state.frame))
        outer = state.frame
        state.frame = frame
        state.frames[frame] = {}
        state.owned.discard(frame)
        self.silent += 1  # a class body declares; what it calls is no step of a program
        try:
            paths = self.run_block(instr.cls.body, [state])
        finally:
            self.silent -= 1
        for one in paths.states[:1]:
            attributes: dict[Any, Value] = {}
            for name, value in one.frames.get(frame, {}).items():
                if isinstance(value, Func) and value.frame == frame:
                    value = Func(value.function, value.module, outer, None, cls)
                attributes[name] = value
            attributes["__bases__"] = Tup(bases)
            one.allocate(cls, attributes)
            one.drop_frame(frame)
            one.frame = outer
            self.bind_name(one, instr.cls.name, cls)
            after.append(one)

    def do_import(self, instr: p.Import, state: State, after: list[State], exits: list[Any]) -> None:
        after.append(state)
        module = self.module_of(state)
        path = self.project.find(instr.module, instr.level, module)
        if instr.name is None:
            top = instr.module.partition(".")[0]
            if instr.alias and instr.alias != top:
                value = self.module_value(path, instr.module) if path else External(self.apis.canonical(instr.module))
                self.bind_name(state, instr.alias, value)
                return
            first = self.project.find(top, 0, module) if path else None
            self.bind_name(state, top, self.module_value(first, top) if first else External(top))
            return
        if path is None:
            if instr.name == "*":
                return
            prefix = "." * instr.level + instr.module
            sep = "" if prefix.endswith(".") else "."
            self.bind_name(
                state, instr.alias or instr.name, External(self.apis.canonical(f"{prefix}{sep}{instr.name}"))
            )
            return
        if path == module.path:  # from . import part, in the package's own __init__
            part = self.project.file_of(path.parent, [instr.name])
            if part is not None:
                self.bind_name(state, instr.alias or instr.name, self.module_value(part, f"{module.name}.{instr.name}"))
            return
        if not self.project.worth_reading(path):
            submodule = self.project.file_of(path.parent, [instr.name]) if path.name == "__init__.py" else None
            if submodule is not None and self.project.worth_reading(submodule):
                self.bind_name(state, instr.alias or instr.name, self.module_value(submodule, instr.name))
            elif instr.name != "*":
                self.bind_name(state, instr.alias or instr.name, External(f"{instr.module}.{instr.name}", benign=True))
            return
        if instr.name != "*":
            self.bind_name(state, instr.alias or instr.name, Pending(path, instr.name, f"{instr.module}.{instr.name}"))
            return
        target = self.project.load(path)
        if target is not None:
            listed = elements(self, state, self.global_of(state, target, "__all__"))
            public = None if listed is None else {item.value for item in listed if isinstance(item, Const)}
            for name, value in state.frames.get(self.globals_frame(target), {}).items():
                if isinstance(value, Pending) and value.path == module.path:
                    continue  # it comes from here
                if isinstance(name, str) and (name in public if public is not None else not name.startswith("_")):
                    self.bind_name(state, name, value)

    def resolve(self, state: State, pending: Pending) -> Value:
        """What an imported name stands for."""
        if pending in self.resolving:  # names that import each other
            return self.free(pending.name)
        module = self.project.load(pending.path)
        if module is None:
            return External(pending.text)
        self.resolving.add(pending)
        try:
            return self.global_of(state, module, pending.name)
        finally:
            self.resolving.discard(pending)

    def do_outer(self, instr: p.Outer, state: State, after: list[State], exits: list[Any]) -> None:
        info = self.frames[state.frame]
        for name in instr.names:
            if instr.kind == "global":
                info.outer[name] = self.globals_frame(info.module)
            elif info.parent is not None:
                info.outer[name] = self.frames[info.parent].outer.get(name, info.parent)
        after.append(state)

    def do_yield(self, instr: p.Yield, state: State, after: list[State], exits: list[Any]) -> None:
        handler = self.yields[-1] if self.yields else None
        if handler is None:
            state.scope(state.frame)[instr.target] = self.site(state, instr.at, "…", PLAIN, ())
            after.append(state)
            return
        paths = handler(state, evaluate(self, state, instr.value))
        after.extend(paths.states)
        exits.extend(paths.exits)

    def do_begin(self, instr: p.Begin, state: State, after: list[State], exits: list[Any]) -> None:
        obj = Obj((instr.at, state.frame), External(f"builtins.{instr.kind}"))
        state.allocate(obj, {})
        state.scope(state.frame)[instr.target] = obj
        after.append(state)

    def do_collect(self, instr: p.Collect, state: State, after: list[State], exits: list[Any]) -> None:
        obj = self.lookup(state, instr.target)
        value = evaluate(self, state, instr.value)
        if isinstance(obj, Obj):
            items = state.attributes(obj)
            key: Any = "*"
            if instr.key is not None:
                name = evaluate(self, state, instr.key)
                key = name.value if isinstance(name, Const) else "*"
            elif isinstance(value, (Obj, Const, Tup)) and len(items) < 4 and "*" not in items:
                key = len(items)
            items[key] = value
        after.append(state)

    # -- calls

    def call(self, instr: p.Call, state: State) -> list[tuple[State, Value]]:
        args = self.arguments(instr, state)
        func = instr.func
        if isinstance(func, p.Attr):
            receiver = evaluate(self, state, func.obj)
            callee = attribute(self, state, receiver, func.name)
            if isinstance(callee, Method) or (isinstance(callee, Sym) and callee.key[0] == "attr"):
                return effects.call_method(self, state, instr, receiver, func.name, args)
        elif isinstance(func, p.Index):
            kernel = evaluate(self, state, func.obj)
            if isinstance(kernel, Func):
                return effects.launch(self, state, instr, kernel, args)
            callee = evaluate(self, state, func)
        else:
            callee = evaluate(self, state, func)
        return self.call_value(instr, state, callee, args)

    def arguments(self, instr: p.Call, state: State) -> Args:
        args: list[tuple[str | None, Value]] = []
        for keyword, expr in instr.args:
            value = evaluate(self, state, expr)
            if keyword == "*":
                items = elements(self, state, value)
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

    def call_value(self, instr: p.Call, state: State, callee: Value, args: Args) -> list[tuple[State, Value]]:
        effects.module_called(self, state, instr, callee)
        match callee:
            case Obj(cls=External(name="torch.nn.Sequential")):
                return self.call_sequential(instr, state, callee, args)
            case Func():
                return self.call_function(callee, args, instr, state)
            case Class():
                return self.instantiate(callee, args, instr, state)
            case Partial():
                return self.call_value(instr, state, callee.func, (*callee.args, *args))
            case Method():
                return effects.call_method(self, state, instr, callee.receiver, callee.name, args)
            case External():
                return effects.call_external(self, state, instr, callee, args)
            case Obj(cls=External(name="custom op")):
                return effects.call_custom_op(self, state, instr, callee, args)
            case Obj(cls=Class()):
                method = class_attribute(self, state, callee.cls, "__call__")
                if method is None and self.external_base(state, callee.cls) == "module":
                    method = class_attribute(self, state, callee.cls, "forward")
                if isinstance(method, Func):
                    bound = Func(method.function, method.module, method.frame, callee, method.owner)
                    return self.call_function(bound, args, instr, state)
            case Sym() if callee.key[0] == "attr":
                return effects.call_method(self, state, instr, callee.key[1], callee.key[2], args)
        return effects.call_unknown(self, state, instr, callee, args)

    def call_sequential(self, instr: p.Call, state: State, callee: Obj, args: Args) -> list[tuple[State, Value]]:
        """``nn.Sequential``: its modules one after the other, each on what the one before gave."""
        outcome = [(state, args)]
        for part in elements(self, state, callee) or []:
            outcome = [
                (after, ((None, value),))
                for before, given in outcome
                for after, value in self.call_value(instr, before, part, given)
            ]
        return [(after, effects.result(self, after, instr, callee, given)) for after, given in outcome]

    def call_function(self, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
        """A function of the project: entered where it can matter, else its result is unknown and nothing else happens."""
        function, module = func.function, func.module
        module.body(function)
        decorators = self.decorators(state, func)
        if any(name.rpartition(".")[2] == "contextmanager" for name in decorators) and function.generator:
            self.entered.add(function)
            return [(state, Manager(func, args, instr.at))]
        if function.generator and not any(value is not None for value in self.yields[-1:]):
            # What a generator does, it does while somebody iterates: it is read beside the path, which may never see it end.
            if module.is_strong(function) and function not in self.entered:
                self.run_function(func, args, instr, state.fork())
            return [(state, effects.result(self, state, instr, func, args))]
        if not module.is_relevant(function):
            states = [state]
            for _, value in args:
                if isinstance(value, (Func, Partial)):
                    states = [after for before in states for after in self.call_back(instr, before, value)]
            return [(one, effects.result(self, one, instr, func, args)) for one in states]
        depth = self.frames[state.frame].depth
        recursive = sum(1 for _, node in state.stack if node is instr.at) >= 1
        if depth >= DEPTH or recursive:
            if depth >= DEPTH:
                self.gave_up(state, instr.at, f"calls more than {DEPTH} deep")
            return effects.call_unknown(self, state, instr, func, args)
        if self.limited is not None or module.is_strong(function):
            return self.run_function(func, args, instr, state)
        # What cannot train only builds things: not worth more than so much.
        before, yields, loops = state.fork(), len(self.yields), len(self.loops)
        limit = self.limit
        self.limit, self.limited = min(limit, self.steps + HELPER_BUDGET), instr
        try:
            return self.run_function(func, args, instr, state)
        except OutOfBudget as error:
            if error.call is not instr:
                raise
            del self.yields[yields:], self.loops[loops:]
            self.gave_up(before, instr.at, f"'{function.name}' has too many paths: what it returns is taken as unknown")
            self.limit, self.limited = limit, None
            return effects.call_unknown(self, before, instr, func, args)
        finally:
            self.limit, self.limited = limit, None

    def run_function(self, func: Func, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
        """Enters a function, in the regions that its decorators put around it."""
        outer, control, stack = state.frame, state.control, state.stack
        results: list[tuple[State, Value]] = []
        self.yields.append(None)
        for entered, leave in effects.enter_decorators(self, state, func):
            for one, value in self.enter_function(func, args, instr.at, entered):
                leave(one)
                one.frame, one.control, one.stack = outer, control, stack
                results.append((one, value))
        self.yields.pop()
        return self.merge_results(results, instr)

    def merge_results(self, results: list[tuple[State, Value]], instr: p.Call) -> list[tuple[State, Value]]:
        """Outcomes with the same value are merged; too many different ones become one unknown value."""
        if len(results) < 2:
            return results
        for state, value in results:
            state.scope(state.frame)[instr.target] = value  # what is returned is in use
        groups: dict[Value, list[State]] = {}
        for state, value in results:
            groups.setdefault(value, []).append(state)
        merged = [(state, value) for value, states in groups.items() for state in self.merged(states)]
        if len(merged) > PATHS // 2:
            unknown = self.site(merged[0][0], instr.at, f"{name_of(instr.func)}(…)", PLAIN, ())
            states = []
            for state, value in merged:
                if isinstance(value, (Sym, Const, Cond)):
                    value = unknown
                states.append((state, value))
            groups = {}
            for state, value in states:
                groups.setdefault(value, []).append(state)
            merged = [(s, value) for value, group in groups.items() for s in self.merged(group, PATHS // 2)]
        return merged

    def enter_function(
        self,
        func: Func,
        args: Args,
        site: Any,
        state: State,
        on_yield: Callable[[State, Value], Paths] | None = None,
        left: list[Any] | None = None,
    ) -> list[tuple[State, Value]]:
        """Runs a function's body in a scope of its own; what it returns, path by path."""
        function, module = func.function, func.module
        self.entered.add(function)
        caller = self.frames[state.frame]
        caller_module = caller.module
        key = (state.frame, site, function, func.receiver if isinstance(func.receiver, Obj) else None)
        info = FrameInfo(module, func.frame, function, caller.depth + 1)
        frame = self.new_frame(key, info)
        scope: dict[p.Slot, Value] = {}
        self.bind_params(func, args, state, scope)
        state.stack = (*state.stack, (caller_module, site))
        state.frame = frame
        state.frames[frame] = scope
        state.owned.discard(frame)
        if on_yield is not None:
            self.yields.append(on_yield)
        body = module.body(function)
        paths = self.run_block(body, [state])
        if on_yield is not None:
            self.yields.pop()
        results = [(one, NONE) for one in paths.states]
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
                kept = {k: v for k, v in scope_after.items() if k in function.captured}
                one.frames[frame] = kept
                one.owned.discard(frame)
        return results

    def bind_params(self, func: Func, args: Args, state: State, scope: dict[p.Slot, Value]) -> None:
        """Arguments to parameters, as Python binds them; what the call leaves open is unknown."""
        function = func.function
        positional = [value for keyword, value in args if keyword is None]
        keywords = {keyword: value for keyword, value in args if keyword not in (None, "*", "**")}
        open_ended = any(keyword in ("*", "**") for keyword, _ in args)
        if func.receiver is not None:
            positional.insert(0, func.receiver)
        for param in function.params:
            if param.kind == "*":
                scope[param.name] = Tup(tuple(positional))
                positional = []
            elif param.kind == "**":
                obj = Obj((function.node, "kwargs", state.frame), External("builtins.dict"))
                state.allocate(obj, dict(keywords))
                scope[param.name] = obj
            elif param.kind == "plain" and positional:
                scope[param.name] = positional.pop(0)
            elif param.name in keywords:
                scope[param.name] = keywords.pop(param.name)
            elif param.default is not None and not open_ended:
                scope[param.name] = self.default(func, param, state)
            else:
                scope[param.name] = self.parameter(func, param, state)

    def default(self, func: Func, param: p.Param, state: State) -> Value:
        assert param.default is not None
        if param.name in self.assume:
            return self.assume[param.name]
        known = self.default_values.get(func.function)
        if known is not None:
            return known[param.name]
        outer = state.frame
        state.frame = func.frame
        value = evaluate(self, state, param.default)
        state.frame = outer
        return value

    def parameter(self, func: Func, param: p.Param, state: State) -> Value:
        """A parameter of which nothing is known but its name, its annotation and its default."""
        if param.name in self.assume:
            return self.assume[param.name]
        key = ("param", func.function, param.name)
        value: Value = self.intern(key, param.name, PLAIN, frozenset(), ())
        assert isinstance(value, Sym)
        if param.default is not None:
            value.default = self.default(func, param, state)
        if param.annotation is not None:
            outer = state.frame
            state.frame = func.frame
            value = effects.annotated(self, state, param.annotation, value)
            state.frame = outer
        return value

    def instantiate(self, cls: Class, args: Args, instr: p.Call, state: State) -> list[tuple[State, Value]]:
        """An object of a class of the project."""
        obj = Obj((instr.at, state.frame), cls)
        self.instantiated.add(cls.cls)
        state.allocate(obj, {})
        made = effects.made(self, state, instr, obj, args)
        if made is not None:
            return made
        init = class_attribute(self, state, cls, "__init__")
        if (
            isinstance(init, Func)
            and self.external_base(state, cls) == "module"
            and not init.module.builds_precision(init.function)
        ):
            return [(state, obj)]  # layers and their sizes: parts of the model, whatever they are
        if isinstance(init, Func):
            bound = Func(init.function, init.module, init.frame, obj, init.owner)
            outer = state.pins
            state.pins = (*outer, obj)
            results = self.call_function(bound, args, instr, state)
            for one, _ in results:
                one.pins = outer
            return [(one, obj) for one, _ in results]
        self.bind_fields(cls, obj, args, state)
        return [(state, obj)]

    def bind_fields(self, cls: Class, obj: Obj, args: Args, state: State) -> None:
        """A dataclass: arguments to fields, in the order of the fields."""
        fields = [
            instr.target.slot
            for instr in cls.cls.body.code
            if isinstance(instr, p.Assign) and isinstance(instr.target, p.Name) and instr.annotation is not None
        ]
        attributes = state.attributes(obj)
        positional = [value for keyword, value in args if keyword is None]
        for name, value in zip(fields, positional, strict=False):
            attributes[name] = value
        for keyword, value in args:
            if keyword not in (None, "*", "**"):
                attributes[keyword] = value
        if any(keyword in ("*", "**") for keyword, _ in args):
            for name in fields:
                if name not in attributes:
                    attributes[name] = self.derived(("attr", obj, name), f"{cls.cls.name}.{name}", ())

    def call_back(self, instr: p.Call, state: State, func: Value) -> list[State]:
        """A function of the project handed to something unread: it may be called, more than once, with anything."""
        if isinstance(func, Partial):
            func = func.func
        if not isinstance(func, Func) or not func.module.is_relevant(func.function) or func.function in self.entered:
            return [state]
        states = [state]
        for _ in range(2):
            after: list[State] = []
            for one in states:
                after.extend(s for s, _ in self.call_function(func, (("*", self.free("…")),), instr, one))
            states = self.merged(after)
        return states


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

RUN: dict[type, Callable[..., None]] = {
    p.Assign: Interpreter.do_assign, p.Delete: Interpreter.do_delete, p.Call: Interpreter.do_call, p.If: Interpreter.do_if,
    p.For: Interpreter.do_for, p.While: Interpreter.do_while, p.With: Interpreter.do_with, p.Try: Interpreter.do_try,
    p.Return: Interpreter.do_return, p.Raise: Interpreter.do_raise, p.Break: Interpreter.do_break,
    p.Continue: Interpreter.do_continue, p.Define: Interpreter.do_define, p.DefineClass: Interpreter.do_class,
    p.Import: Interpreter.do_import, p.Outer: Interpreter.do_outer, p.Yield: Interpreter.do_yield,
    p.Begin: Interpreter.do_begin, p.Collect: Interpreter.do_collect,
}  # fmt: skip
