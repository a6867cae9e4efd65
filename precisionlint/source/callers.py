"""What the callers of a file rule out: a function that is read alone may be handed anything, and the project may hand it one thing.

A function's callers are the files that import its own and name it. Where each of them hands it what its precision hangs on (a switch,
a dtype, a scaler that is off) and shows no fault there, the fault is none of this project.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct

from precisionlint.checks import Hit
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.module import ProjectModule
from precisionlint.source.project import Project
from precisionlint.source.reading import Reading
from precisionlint.source.records import Where

MOST = 8
"""A function with more callers than this is read alone."""
UNFINISHED = regex(r"too many paths|more paths at once|nested too deeply|has too many paths")
"""What is said of a program that was not read to its end."""


OF_SCALED = frozenset({"clip-before-unscale", "scaled-gradients-read"})
UNSCALES_OTHERS = regex(rb"\b(?!self\.)\w+(?:\.\w+|\[[^\]\n]*\])*\.\w*scal\w*\.unscale_\(")
"""What unscales with the scaler of another object."""

Spot = tuple[str, Path, int]
"""A rule, a file and a line of it."""


class Shown(Struct, frozen=True):
    """What a file shows as a program of its own: faults, in every file on the way to them; ``handed``: the functions of other files that it
    calls, by file and first line, and whether each call decides their precision. ``whole``: it was read to its end."""

    faults: frozenset[Spot]
    handed: dict[tuple[Path, int], bool]
    whole: bool


NOTHING = Shown(frozenset(), {}, False)


def shown(reading: Reading) -> Shown:
    """A reading without the trees that it is about."""
    faults = {
        (hit.rule, module.path, line)
        for hit in reading.hits
        if isinstance(hit.at, Where)
        for module in {hit.at.module, *(module for module, _ in hit.at.stack)}
        if (line := line_in(hit.at, module)) is not None
    }
    handed = {(module.path, function.first_line): decided for (module, function), decided in reading.handed.items()}
    whole = not any(UNFINISHED.search(what) for what in reading.coverage.gave_up.values())
    return Shown(frozenset(faults), handed, whole)


class Callers:
    """The callers in one project. ``importers``: the files that import another; ``shows``: what a file shows by itself."""

    def __init__(
        self,
        project: Project,
        importers: Callable[[Path], list[Path]],
        shows: Callable[[Path], Shown | None],
    ) -> None:
        self.project = project
        self.importers = importers
        self.shows = shows

    def rule_out(self, hit: Hit, module: ProjectModule) -> bool:
        """Whether the project hands a file's function nothing for which the hit stands."""
        line = line_in(hit.at, module)
        around = [each for node in nodes_in(hit.at, module) if (each := enclosing(module, node)) is not None]
        if line is None or not around:
            return False
        functions, owner = [function for function, _ in around], around[0][1]
        name = owner.name if owner is not None else functions[0].name
        importers = self.importers(module.path)
        self.project.called.setdefault(module.path, set()).update(importers)
        word = re.compile(rb"\b" + re.escape(name.encode()) + rb"\b")
        callers = [path for path in importers if word.search(self.project.read(path) or b"")]
        keys = [(module.path, function.first_line) for function in functions]
        deciding = [
            *keys,
            *((module.path, method.first_line) for method in (owner.methods if owner is not None else ())),
        ]
        seen = [self.shows(path) for path in callers if path != module.path]
        return 0 < len(seen) <= MOST and all(
            each is not None
            and each.whole
            and all(key in each.handed for key in keys)
            and any(each.handed.get(key) for key in deciding)
            and (hit.rule, module.path, line) not in each.faults
            for each in seen
        )

    def unscale(self, hit: Hit, module: ProjectModule) -> bool:
        """Whether who calls the methods of an object may unscale between them, or before: a file that imports theirs does so through it, with
        ``step.scaler.unscale_(optimizer)``."""
        if hit.rule not in OF_SCALED:
            return False
        entered = any(isinstance(fact, tuple) and fact[0] == "unscaled" for fact in hit.unless)
        functions = {found[0] for at in (hit.at, *(seen.at for seen in hit.trace)) if (found := method_of(module, at))}
        if not entered and len(functions) < 2:
            return False
        importers = [path for path in self.importers(module.path) if path != module.path]
        self.project.called.setdefault(module.path, set()).update(importers)
        return any(UNSCALES_OTHERS.search(self.project.read(path) or b"") for path in importers)


def method_of(module: ProjectModule, at: Any) -> tuple[p.Function, p.ClassDef | None] | None:
    """The function of a file in which something was seen."""
    nodes = nodes_in(at, module)
    return enclosing(module, nodes[0]) if nodes else None


def nodes_in(where: Any, module: ProjectModule) -> list[Any]:
    """The nodes of a file on the way to a place, the outermost first."""
    if not isinstance(where, Where):
        return []
    return [node for other, node in (*where.stack, (where.module, where.node)) if other is module]


def line_in(where: Any, module: ProjectModule) -> int | None:
    """The line of a file in which a finding stands: its own, or that of the innermost call that leads there."""
    nodes = nodes_in(where, module)
    span = module.span(nodes[-1]) if nodes else None
    return span[0] if span is not None else None


def enclosing(module: ProjectModule, node: Any) -> tuple[p.Function, p.ClassDef | None] | None:
    """The function or method of a file's top level in which a node stands, with its class."""
    line = getattr(node, "lineno", 0)
    for instr in p.defined(module.block):
        if isinstance(instr, p.Define) and instr.function.first_line <= line <= instr.function.last_line:
            return instr.function, None
        if isinstance(instr, p.DefineClass):
            for method in instr.cls.methods:
                if method.first_line <= line <= method.last_line:
                    return method, instr.cls
    return None
