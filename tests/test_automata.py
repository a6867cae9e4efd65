"""The automata of the checks: what each says that it hears is all that may change it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from precisionlint.checks import all_rules
from precisionlint.checks.base import Judge
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
