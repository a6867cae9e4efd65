"""Imports: names of other files of the project, each read when a name from it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from precisionlint.source import program as p
from precisionlint.source.apis import USUAL
from precisionlint.source.evaluate import elements
from precisionlint.source.module import ProjectModule
from precisionlint.source.state import State
from precisionlint.source.values import Const, External, ModuleRef, Pending, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter


def global_of(it: Interpreter, state: State, module: ProjectModule, name: str) -> Value:
    """A name of another module of the project; the module is read when it is first needed."""
    frame = it.globals_frame(module)
    if frame not in state.frames:
        load_module(it, state, module)
    scope = state.frames.get(frame, {})
    if name in scope:
        value = scope[name]
        return resolve(it, state, value) if isinstance(value, Pending) else value
    if module.path.name == "__init__.py":
        path = it.project.part(module.path, name)
        if path is not None:
            return module_value(it, path, f"{module.name}.{name}")
    return it.free(name)


def module_value(it: Interpreter, path: Any, name: str) -> Value:
    if not it.project.worth_reading(path):
        return External(name, benign=True)
    module = it.project.load(path)
    return ModuleRef(module) if module is not None else External(name)


def load_module(it: Interpreter, state: State, module: ProjectModule) -> None:
    """Runs the top level of an imported module, once, and lays what it leaves into this path's state."""
    if module not in it.snapshots:
        it.snapshots[module] = None  # what an import cycle sees meanwhile
        fresh = State()
        it.stand(fresh, it.judge.start)
        it.silent += 1
        try:
            after = run_module(it, module, fresh)
        finally:
            it.silent -= 1
        it.snapshots[module] = after[0] if after else None
        if after:
            forget_rebound(it, module, after[0])
            it.layers.append(after[0])
            it.collector.settle(after[0])
    lay(it, state)
    state.frames.setdefault(it.globals_frame(module), {})


def forget_rebound(it: Interpreter, module: ProjectModule, state: State) -> None:
    """``_ARGS = None`` at the top of a file one of whose functions sets it: whoever reads it later finds what that has set, most of the time."""
    scope = state.frames.get(it.globals_frame(module), {})
    for name in module.rebound:
        if isinstance(scope.get(name), Const):
            state.scope(it.globals_frame(module))[name] = it.free(name)


def lay(it: Interpreter, state: State) -> None:
    """Lays into a path what the imported modules left whose names other paths have asked for: no path differs in what was read when."""
    for layer in it.layers[state.laid :]:
        for frame, scope in layer.frames.items():
            state.frames.setdefault(frame, scope)
        for obj, attributes in layer.heap.items():
            state.heap.setdefault(obj, attributes)
        state.symbolic |= layer.symbolic
    state.laid = len(it.layers)


def run_module(it: Interpreter, module: ProjectModule, state: State) -> list[State]:
    state.frame = it.globals_frame(module)
    state.scope(state.frame)
    paths = it.run_block(module.block, [state])
    return paths.states or [s for _, s, _ in paths.exits]


def do_import(it: Interpreter, instr: p.Import, state: State, after: list[State], exits: list[Any]) -> None:
    after.append(state)
    module = it.module_of(state)
    path = it.project.find(instr.module, instr.level, module)
    if instr.name is None:
        top = instr.module.partition(".")[0]
        if instr.alias and instr.alias != top:
            value = module_value(it, path, instr.module) if path else External(it.apis.canonical(instr.module))
            it.bind_name(state, instr.alias, value)
            return
        first = it.project.find(top, 0, module) if path else None
        it.bind_name(state, top, module_value(it, first, top) if first else External(top))
        return
    if path is None:
        if instr.name == "*":
            known = it.apis.star(instr.module) if not instr.level else {}
            for exported, full in known.items():
                it.bind_name(state, exported, External(full))
            bind_usual(it, state)
            return
        prefix = "." * instr.level + instr.module
        sep = "" if prefix.endswith(".") else "."
        it.bind_name(state, instr.alias or instr.name, External(it.apis.canonical(f"{prefix}{sep}{instr.name}")))
        return
    if path == module.path:  # from . import part, in the package's own __init__
        part = it.project.part(path, instr.name)
        if part is not None:
            it.bind_name(state, instr.alias or instr.name, module_value(it, part, f"{module.name}.{instr.name}"))
        return
    if not it.project.worth_reading(path):
        submodule = it.project.part(path, instr.name) if path.name == "__init__.py" else None
        if submodule is not None and it.project.worth_reading(submodule):
            it.bind_name(state, instr.alias or instr.name, module_value(it, submodule, instr.name))
        elif instr.name != "*":
            it.bind_name(state, instr.alias or instr.name, External(f"{instr.module}.{instr.name}", benign=True))
        else:
            bind_usual(it, state)
        return
    if instr.name != "*":
        it.bind_name(state, instr.alias or instr.name, Pending(path, instr.name, f"{instr.module}.{instr.name}"))
        return
    target = it.project.load(path)
    if target is not None:
        listed = elements(it, state, global_of(it, state, target, "__all__"))
        public = None if listed is None else {item.value for item in listed if isinstance(item, Const)}
        for name, value in state.frames.get(it.globals_frame(target), {}).items():
            if isinstance(value, Pending) and value.path == module.path:
                continue  # it comes from here
            if isinstance(name, str) and (name in public if public is not None else not name.startswith("_")):
                it.bind_name(state, name, value)


def bind_usual(it: Interpreter, state: State) -> None:
    """``from x import *`` of a file that is not read: what everybody calls torch comes from there where nothing else binds it."""
    scope = state.scope(state.frame)
    for name, full in USUAL.items():
        if name not in scope:
            scope[name] = External(full)


def resolve(it: Interpreter, state: State, pending: Pending) -> Value:
    """What an imported name stands for."""
    if pending in it.resolving:  # names that import each other
        return it.free(pending.name)
    module = it.project.load(pending.path)
    if module is None:
        return External(pending.text)
    it.resolving.add(pending)
    try:
        return global_of(it, state, module, pending.name)
    finally:
        it.resolving.discard(pending)
