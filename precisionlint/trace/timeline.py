"""The timeline that a step did have, and what the checks make of it: the same checks that judge what ``source/``
reads.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from precisionlint import catalogue
from precisionlint.checks import Evidence, Hit, Judge, all_rules
from precisionlint.checks.base import meets
from precisionlint.events import Event
from precisionlint.findings import Finding, Place, Step


class Timeline:
    """Events in their order, each with the user's place as ``at``."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._stood = 0

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def stood(self, event: Event) -> None:
        """Says something that held before the window, whenever it is met: an optimizer that is met at its step does not
        begin another training run.
        """
        self.events.insert(self._stood, event)
        self._stood += 1

    def hits(self, select: Collection[str]) -> list[Hit]:
        """What the selected checks find on it, each fault once."""
        judge = Judge(check for name, check in all_rules().items() if name in select)
        found: list[Any] = []
        states = judge.start
        for event in self.events:
            states = judge.advance(states, event, found.append)
        facts = {each.fact for each in found if isinstance(each, Evidence)}
        return [
            each
            for each in found
            if isinstance(each, Hit)
            and not any(meets(fact, wanted) for wanted in each.unless for fact in facts)
            and all(fact in facts for fact in each.needs)
        ]


def as_finding(hit: Hit, fallback: Place) -> Finding:
    """A hit as a finding. A fault of what stood before the window stands where the step met it, or at ``fallback``."""
    rule = catalogue.load()[hit.rule]
    steps = tuple(Step(seen.at, seen.text) for seen in hit.trace if isinstance(seen.at, Place))
    place = hit.at if isinstance(hit.at, Place) else steps[-1].place if steps else fallback
    return Finding(hit.rule, rule.family, hit.severity or rule.severity, "certain", hit.message, place, "", steps)
