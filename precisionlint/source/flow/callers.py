"""What the callers of a file rule out of its arithmetic: a function that is read alone may be handed any dtype, and the project may hand it
one. As ``source.callers`` does for training programs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec import Struct

from precisionlint.checks import Evidence as Fact
from precisionlint.checks import Hit, Judge
from precisionlint.findings import Place
from precisionlint.source.callers import MOST
from precisionlint.source.flow.reading import Flow
from precisionlint.source.parsing import FunctionDef, UnreadableError, walk
from precisionlint.source.project import Project
from precisionlint.subjects import File


class Shown(Struct, frozen=True):
    """What a caller shows of a file that it calls: faults by rule and line; ``handed``: the functions that it calls, by their first line, and
    whether each call decides their dtypes."""

    faults: frozenset[tuple[str, int]]
    handed: dict[int, bool]


class Callers:
    """The callers in one project. ``importers``: the files that import another."""

    def __init__(self, project: Project, importers: Callable[[Path], list[Path]], judge: Judge) -> None:
        self.project = project
        self.importers = importers
        self.judge = judge
        self._shown: dict[tuple[Path, Path], Shown | None] = {}

    def rule_out(self, rule: str, place: Place, file: File) -> bool:
        """Whether the project hands a file's function nothing for which the fault stands."""
        function, owner = enclosing(file.syntax, place.line)
        if function is None:
            return False
        names = leading_to(file.syntax, function.name) if owner is None else {owner.name}
        if names is None or (owner is not None and function.name in file.called):
            return False  # the file runs it itself
        importers = self.importers(file.path)
        self.project.called.setdefault(file.path, set()).update(importers)
        word = re.compile(rb"\b(?:" + b"|".join(re.escape(name.encode()) for name in sorted(names)) + rb")\b")
        callers = [path for path in importers if path != file.path and word.search(self.project.read(path) or b"")]
        if not 0 < len(callers) <= MOST:
            return False
        deciding = [function.lineno, *(method.lineno for method in methods(owner))]
        return all(
            shown is not None
            and function.lineno in shown.handed
            and any(shown.handed.get(line) for line in deciding)
            and (rule, place.line) not in shown.faults
            for shown in (self.shows(path, file.path) for path in callers)
        )

    def shows(self, path: Path, about: Path) -> Shown | None:
        """What a caller shows of a file; None where it cannot be read."""
        key = (path, about)
        if key not in self._shown:
            self._shown[key] = None
            file = self.project.file(path)
            if file is not None:
                flow, found = Flow(file, about), list[Hit | Fact]()
                states = self.judge.start
                try:
                    for event in flow.run():
                        states = self.judge.advance(states, event, found.append)
                except (UnreadableError, RecursionError):
                    return None
                places = [
                    (hit.rule, place) for hit in found if isinstance(hit, Hit) and (place := place_of(hit)) is not None
                ]
                faults = frozenset((rule, place.line) for rule, place in places if place.path == about.as_posix())
                self._shown[key] = Shown(faults, flow.handed)
        return self._shown[key]


def place_of(hit: Hit) -> Place | None:
    place = getattr(hit.at, "place", None)
    return place if isinstance(place, Place) else None


def methods(owner: ast.ClassDef | None) -> Iterator[FunctionDef]:
    yield from (each for each in (owner.body if owner is not None else ()) if isinstance(each, FunctionDef))


def enclosing(tree: ast.Module, line: int) -> tuple[FunctionDef | None, ast.ClassDef | None]:
    """The function or method of a file's top level in which a line stands, with its class."""
    for node in tree.body:
        if isinstance(node, FunctionDef) and node.lineno <= line <= (node.end_lineno or line):
            return node, None
        if isinstance(node, ast.ClassDef):
            for method in methods(node):
                if method.lineno <= line <= (method.end_lineno or line):
                    return method, node
    return None, None


def leading_to(tree: ast.Module, name: str) -> set[str] | None:
    """A function's name, and those of the functions and classes of its file through which it is reached; None where the file itself calls
    one of them as it is run."""
    names, mentions = {name}, [(each, words(each)) for each in tree.body]
    grown = True
    while grown:
        leading = [each for each, said in mentions if names & said]
        if not all(isinstance(each, (FunctionDef, ast.ClassDef)) for each in leading):
            return None
        found = {each.name for each in leading if isinstance(each, (FunctionDef, ast.ClassDef))}
        grown = not found <= names
        names |= found
    return names


def words(node: ast.AST) -> set[str]:
    """The names that stand in a statement."""
    return {each.id for each in walk(node) if isinstance(each, ast.Name)}
