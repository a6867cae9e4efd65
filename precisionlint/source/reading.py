"""Reads the programs of one file: its top level, and whatever in it nothing else calls.

Knows where programs begin (roots), not what happens in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import libcst as cst

from precisionlint.checks import Evidence, Hit, Judge
from precisionlint.events import Closed, Opened
from precisionlint.source import program as p
from precisionlint.source.interpret import Coverage, Interpreter, OutOfBudget, Where
from precisionlint.source.project import Project, ProjectModule
from precisionlint.source.state import State, merge
from precisionlint.source.values import NONE, Class, External, Func, Obj, Value

CUDA = re.compile(r"\.cuda\b|[\"']cuda|torch\.cuda\.|gpu", re.I)
PRECISION = re.compile(rb"allow_tf32|set_float32_matmul_precision|fp32_precision|float32_matmul_precision")
ROOT_STATES = 4
"""From how many of the states that a file's top level (or a class's __init__) leaves its other roots start."""


@dataclass(frozen=True)
class Reading:
    """What reading one file gave."""

    hits: tuple[Hit, ...]
    coverage: Coverage


@dataclass
class Reader:
    """The roots of one file, run one after the other."""

    it: Interpreter
    module: ProjectModule

    def fresh(self, state: State, complete: bool) -> State:
        """A state to start a program from: what stands, with nothing having happened yet."""
        start = state.fork()
        start.checks, start.control, start.regions, start.stack = self.it.judge.start, (), (), ()
        start.frame = self.it.globals_frame(self.module)
        self.it.emit(start, opened(self.it, self.module, start, complete))
        return start

    def close(self, states: Iterable[State], complete: bool) -> None:
        for state in states:
            self.it.emit(state, Closed(None, (), complete))

    def attempt(self, node: Any, run: Any) -> list[State]:
        """Runs one root within its budget."""
        self.it.steps = 0
        self.it.loops.clear()
        self.it.yields.clear()
        try:
            return run()
        except OutOfBudget:
            self.it.coverage.gave_up.setdefault((self.module, node), "too many paths to follow to the end")
            return []
        except RecursionError:
            self.it.coverage.gave_up.setdefault((self.module, node), "nested too deeply to be followed")
            return []

    def read(self) -> None:
        blank = State()
        blank.checks = self.it.judge.start
        start = self.fresh(blank, True)
        states = self.attempt(None, lambda: self.it.run_module(self.module, start))
        self.close(states, True)
        states = merge(states, ROOT_STATES) or [self.fresh(blank, False)]
        self.functions(states)
        self.classes(states)
        self.functions(states, rest=True)

    def functions(self, states: list[State], rest: bool = False) -> None:
        """Functions that nothing here calls; in the end, those that only each other do."""
        candidates = [
            instr.function
            for instr in self.module.block.code
            if isinstance(instr, p.Define) and self.module.is_relevant(instr.function)
        ]
        nested = [f for f in self.module.functions if f not in candidates and self.is_top_level(f)]
        candidates += [f for f in nested if self.module.is_relevant(f)]
        named: set[str] = set()
        for function in candidates:
            named |= self.module.words(function) - {function.name}
        for method in self.methods():
            named |= self.module.words(method)
        for function in candidates:
            if function in self.it.entered or (function.name in named and not rest):
                continue
            self.it.coverage.programs += 1
            self.attempt(function.node, lambda function=function: self.run_function(function, states))

    def is_top_level(self, function: p.Function) -> bool:
        return False

    def methods(self) -> Iterable[p.Function]:
        for instr in self.module.block.code:
            if isinstance(instr, p.DefineClass):
                yield from (m for m in instr.cls.methods if self.module.is_relevant(m))

    def run_function(self, function: p.Function, states: list[State]) -> list[State]:
        after: list[State] = []
        for state in states[:1]:
            start = self.fresh(state, False)
            value = self.it.lookup(start, function.name)
            func = value if isinstance(value, Func) and value.function is function else None
            func = func or Func(function, self.module, start.frame)
            after.extend(self.call(start, func))
        self.close(after, False)
        return after

    def call(self, state: State, func: Func) -> list[State]:
        """Calls a root with arguments of which nothing is known."""
        call = p.Call(0, p.Name(func.function.name), (), func.function.node)  # type: ignore[arg-type]
        outer = state.frame
        if func.function.name in ("forward", "__call__") or True:
            args = (("*", self.it.free("…")),)
            results = self.it.call_function(func, args, call, state) if func.module.is_relevant(func.function) else []
        states = [one for one, _ in results]
        for one in states:
            one.frame, one.stack, one.control, one.regions = outer, (), (), ()
        return states

    def classes(self, states: list[State]) -> None:
        for instr in self.module.block.code:
            if not isinstance(instr, p.DefineClass):
                continue
            own = [m for m in instr.cls.methods if self.module.is_relevant(m)]
            if not own or all(method in self.it.entered for method in own):
                continue
            self.it.coverage.programs += 1
            self.attempt(instr.cls.node, lambda instr=instr: self.run_class(instr.cls, states))

    def run_class(self, definition: p.ClassDef, states: list[State]) -> list[State]:
        """``__init__``, then each method from the state that it leaves, and again after itself."""
        start = self.fresh(states[0], False)
        cls = self.it.lookup(start, definition.name)
        if not isinstance(cls, Class):
            return []
        done = set(self.it.entered)
        call = p.Call(0, p.Name(definition.name), (), definition.node)  # type: ignore[arg-type]
        made = [(one, value) for one, value in self.it.instantiate(cls, (("*", NONE),), call, start) if isinstance(value, Obj)]
        made = [(one, value) for one, value in made][:ROOT_STATES]
        if not made:
            made = [(self.fresh(states[0], False), Obj((definition.node, 0), cls))]
            made[0][0].heap[made[0][1]] = {}
        obj = made[0][1]
        bases = [one for one, _ in made]
        for one in bases:
            one.frame, one.stack, one.control, one.regions = start.frame, (), (), ()
        methods = list(self.class_methods(bases[0], cls))
        setup, steps = [], []
        for method in methods:
            (steps if {"backward", "step", "optimizer_step"} & method.module.words(method.function) else setup).append(method)
        for method in setup:
            if method.function in done and method.function.name != "setup":
                continue
            if method.function in self.it.entered and method.function.name.startswith("_"):
                continue
            after = self.run_method(bases, method, obj)
            if method.function.name in ("setup", "build", "initialize", "init", "configure_optimizers", "_setup", "_build") and after:
                bases = merge([self.rebase(one) for one in after], ROOT_STATES)
        for method in sorted(steps, key=lambda m: m.function.name.startswith("_")):
            if method.function in done or (method.function in self.it.entered and method.function.name.startswith("_")):
                continue
            after = self.run_method(bases, method, obj)
            again = merge(after, ROOT_STATES)
            if "backward" in method.module.words(method.function):
                after = self.run_method(again, method, obj, carry=True)
        return []

    def rebase(self, state: State) -> State:
        return self.fresh(state, False)

    def class_methods(self, state: State, cls: Class) -> Iterable[Func]:
        seen: set[str] = {"__init__"}
        for current in self.it.mro(state, cls):
            if not isinstance(current, Class):
                continue
            for name, value in state.heap.get(current, {}).items():
                if isinstance(value, Func) and name not in seen:
                    seen.add(name)
                    if value.module.is_relevant(value.function):
                        yield value

    def run_method(self, bases: list[State], method: Func, obj: Value, carry: bool = False) -> list[State]:
        after: list[State] = []
        for base in bases:
            start = base.fork() if carry else self.fresh(base, False)
            decorators = self.it.decorators(start, method)
            receiver: Value | None = obj
            if "staticmethod" in decorators:
                receiver = None
            elif "classmethod" in decorators and isinstance(obj, Obj):
                receiver = obj.cls
            after.extend(self.call(start, Func(method.function, method.module, method.frame, receiver, method.owner)))
        return merge(after, 2 * ROOT_STATES)


def opened(it: Interpreter, module: ProjectModule, state: State, complete: bool) -> Opened:
    """What is known of a program before it runs."""
    device = "cuda" if complete and CUDA.search(module.text) else ""
    is_program = complete and ("__main__" in module.text or "backward(" in module.text)
    node = torch_import(module) if is_program else None
    return Opened(
        Where(module, node, ()) if node is not None else None, (), complete, device if node is not None else "",
        sets_precision(it.project, module),
    )  # fmt: skip


def torch_import(module: ProjectModule) -> Any:
    """The node of the first ``import torch``."""
    for statement in module.tree.body:
        if isinstance(statement, cst.SimpleStatementLine):
            for small in statement.body:
                if isinstance(small, (cst.Import, cst.ImportFrom)) and "torch" in module.tree.code_for_node(small).split():
                    return small
                if isinstance(small, cst.ImportFrom) and module.tree.code_for_node(small).startswith("from torch"):
                    return small
    return None


def sets_precision(project: Project, module: ProjectModule) -> bool:
    """Whether a file of the program, or one that it imports, says how fp32 products are to run."""
    seen, todo = set(), [module.path]
    while todo and len(seen) < 200:
        path = todo.pop()
        if path in seen:
            continue
        seen.add(path)
        data = project.read(path)
        if data is None:
            continue
        if PRECISION.search(data):
            return True
        todo.extend(target for target in project.imports_of(path, data) if target is not None)
    return False


def read(project: Project, module: ProjectModule, judge: Judge, assume: dict[str, Value]) -> Reading:
    """Reads one file as a program of its own."""
    it = Interpreter(project, module, judge, assume)
    Reader(it, module).read()
    evidence = {found.fact for found in it.found.values() if isinstance(found, Evidence)}
    hits = [
        hit
        for hit in it.found.values()
        if isinstance(hit, Hit)
        and not any(fact in evidence for fact in hit.unless)
        and all(fact in evidence for fact in hit.needs)
    ]
    return Reading(tuple(hits), it.coverage)
