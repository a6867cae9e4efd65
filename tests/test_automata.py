"""The automata of the checks: what each says that it hears is all that may change it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from precisionlint.checks import all_rules
from precisionlint.checks.base import Check, Judge
from precisionlint.events import Event
from precisionlint.source.project import Project
from precisionlint.source.reading import read
from precisionlint.subjects import SUBJECTS, File

FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted(path for kind in ("broken", "projects") for path in (FIXTURES / kind).rglob("*.py"))


class Watching(Judge):
    """Sends every event to every automaton, and notes the automata that one changed although it does not hear such."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unheard: set[tuple[str, str]] = set()

    def advance(self, states: tuple[Any, ...], event: Event, report: Any) -> tuple[Any, ...]:
        for index, each in enumerate(self._automata):
            if not isinstance(event, each.hears) and each.advance(states[index], event) != states[index]:
                self.unheard.add((each.name, type(event).__name__))
        return super().advance(states, event, report)


@pytest.fixture(scope="module")
def watching() -> Watching:
    return Watching(all_rules().values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_an_automaton_does_not_hear_changes_nothing(path: Path, watching: Watching) -> None:
    project = Project(path.parent)
    module = project.load(path)
    assert module is not None
    read(project, module, watching, {})
    file = File(path.name, path, path.read_bytes(), project)
    for subject in SUBJECTS:
        if subject.wants(path.name, file.data):
            states = watching.start
            for event in subject.read(file):
                states = watching.advance(states, event, lambda found: None)
    assert watching.unheard == set()


def of_ops(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a check, without what it does with events of other kinds."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test).startswith("isinstance(event, ")):
            yield from of_ops(child)


def asked(run: Callable[..., Any], seen: set[Callable[..., Any]]) -> Iterator[str]:
    """The ops that a check compares its value's with, itself or in the functions that it hands the event or its value."""
    seen.add(run)
    for node in of_ops(ast.parse(textwrap.dedent(inspect.getsource(run))).body[0]):
        if isinstance(node, ast.Compare) and ast.unparse(node.left) == "value.op":
            known = eval(compile(ast.Expression(node.comparators[0]), "", "eval"), run.__globals__)
            yield from [known] if isinstance(known, str) else known
        elif isinstance(node, ast.Call) and node.args and ast.unparse(node.args[0]) in ("event", "value"):
            inner = run.__globals__.get(ast.unparse(node.func))
            if inspect.isgeneratorfunction(inner) and inner not in seen:
                yield from asked(inner, seen)


@pytest.mark.parametrize("check", [each for each in all_rules().values() if each.ops], ids=lambda each: each.rule)
def test_a_check_is_told_of_every_op_that_it_asks_for(check: Check) -> None:
    assert check.ops is not None
    assert set(asked(check.run, set())) <= check.ops
