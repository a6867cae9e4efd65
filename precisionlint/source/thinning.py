"""Which paths go on where there are more than can be followed: paths are left out, none is made up."""

from __future__ import annotations

from collections.abc import Callable, Set
from itertools import combinations
from typing import Any

from precisionlint.source.blur import is_asked, is_kept
from precisionlint.source.state import State

TRAITS = 4
"""How many differences between the paths are looked at, two by two."""


def thin(
    states: list[State],
    limit: int,
    kept: Set[str],
    stakes: Callable[[tuple[Any, ...]], int] = lambda _: 0,
) -> list[State]:
    """At most ``limit`` of the states.

    Those are kept that show most of what is between them two by two: what the checks and regions say, what the variables are that tests
    around precision ask for, what was decided of them. A fault takes two conditions often and three seldom. Where two states show as
    much, the one goes on in which more is under way (``stakes``).
    """
    if len(states) <= limit:
        return states
    shown = [set(combinations(traits, 2)) or {traits} for traits in differences(states, kept)]
    weights = [stakes(state.checks) for state in states]
    left = list(range(len(states)))
    picked: list[int] = []
    seen: set[Any] = set()
    while len(picked) < limit:
        best = max(left, key=lambda index: (len(shown[index] - seen), weights[index], -index))
        left.remove(best)
        picked.append(best)
        seen |= shown[best]
    return [states[index] for index in sorted(picked)]


def differences(states: list[State], kept: Set[str]) -> list[tuple[Any, ...]]:
    """For each state what tells it from others: the states of its checks, its regions, variables in scope, and decisions. Values stand
    there as numbers: the same for equal ones."""
    traits: list[list[Any]] = [[] for _ in states]

    def tell(values: list[Any]) -> None:
        if len(traits[0]) < TRAITS and any(value != values[0] for value in values):
            numbers: dict[Any, int] = {}
            for mine, value in zip(traits, values, strict=True):
                mine.append((len(mine), numbers.setdefault(value, len(numbers))))

    tell([state.verdict for state in states])
    tell([state.regions for state in states])
    scopes = [state.frames.get(state.frame, {}) for state in states]
    for slot in dict.fromkeys(slot for scope in scopes for slot in scope):
        if isinstance(slot, str) and (slot in kept or is_kept(slot)):
            tell([scope.get(slot) for scope in scopes])
    for obj in states[0].pins[:1]:  # the object whose methods are followed
        owns = [state.heap.get(obj, {}) for state in states]
        for name in dict.fromkeys(name for own in owns for name in own):
            if isinstance(name, str) and (name in kept or is_kept(name)):
                tell([own.get(name) for own in owns])
    for sym in dict.fromkeys(sym for state in states for sym in state.facts):
        if is_asked(sym.text, kept):
            tell([state.facts.get(sym) for state in states])
    return [tuple(mine) for mine in traits]
