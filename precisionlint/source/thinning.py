"""Which paths go on where there are more than can be followed: paths are left out, none is made up."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from functools import lru_cache
from itertools import chain, combinations, islice
from typing import Any

from precisionlint.patterns import regex
from precisionlint.source.blur import is_asked, is_kept
from precisionlint.source.state import State
from precisionlint.source.values import External

TRAITS = 4
"""How many differences between the paths are looked at, two by two."""

HALF = regex(r"(?<!b)(?:fp|float)_?16|\bhalf\b|\b16\b|\b(?:native_?)?amp\b", re.I)
"""What a constant holds that asks for float16."""
FULL = regex(r"(?:fp|float)_?32|\b32\b|\bfull\b", re.I)
"""What a constant holds that asks for float32: where it is ruled out, half precision is left."""
BF16 = regex(r"\bb(?:f|fp|float)_?16", re.I)
SWITCH = regex(r"scaler|amp\b|amp_|fp16|float16|half\b|mixed|autocast", re.I)
"""What the words for a switch hold that turns it on."""


def thin(
    states: list[State],
    limit: int,
    kept: Set[str],
    stakes: Callable[[tuple[Any, ...]], int] = lambda _: 0,
) -> list[State]:
    """At most ``limit`` of the states.

    Those are kept that show most of what is between them two by two: what the checks and regions say, what the variables are that tests
    around precision ask for, what was decided of them. A fault takes two conditions often and three seldom. What a state shows counts
    twice where something is under way in it (``stakes``): of two paths one may not be the one without mixed precision for good. Where two
    states show as much, the one goes on in which more is under way, then the one whose decisions ask for float16, or for bfloat16, then the
    one that differs in more by itself from those that go on.
    """
    if len(states) <= limit:
        return states
    alone = differences(states, kept)
    shown = [set(combinations(traits, 2)) or {traits} for traits in alone]
    weights = [(stakes(state.checks), halves(state)) for state in states]
    left = list(range(len(states)))
    picked: list[int] = []
    seen: set[Any] = set()
    met: set[Any] = set()

    def worth(index: int) -> tuple[Any, ...]:
        new = len(shown[index] - seen)
        return 2 * new if weights[index][0] else new, weights[index], len(set(alone[index]) - met), -index

    while len(picked) < limit:
        best = max(left, key=worth)
        left.remove(best)
        picked.append(best)
        seen |= shown[best]
        met.update(alone[best])
    return [states[index] for index in sorted(picked)]


def halves(state: State) -> int:
    """How much the decisions of a path ask for float16, the dtype whose gradients are scaled; half as much for bfloat16, and for anything but
    float32."""
    count = 0
    for sym, fact in state.facts.items():
        if fact.eq is not None:
            count += names_half(fact.eq.name if isinstance(fact.eq, External) else str(fact.eq.value))
        elif fact.truth:
            count += 2 * is_switch(sym.text)
        elif any(names_full(str(getattr(each, "value", ""))) for each in fact.ne):
            count += 1
    return count


@lru_cache(maxsize=20_000)
def names_half(text: str) -> int:
    """2 for a constant that asks for float16, 1 for bfloat16."""
    return 2 if HALF.search(text) is not None else int(BF16.search(text) is not None)


@lru_cache(maxsize=20_000)
def names_full(text: str) -> bool:
    return FULL.search(text) is not None


@lru_cache(maxsize=20_000)
def is_switch(text: str) -> bool:
    """Whether words are those for a switch that turns it on."""
    return SWITCH.search(text) is not None


def differences(states: list[State], kept: Set[str]) -> list[tuple[Any, ...]]:
    """For each state what tells it from others: the states of its checks, its regions, variables in scope, and decisions. Values stand
    there as numbers: the same for equal ones."""
    traits: list[list[Any]] = [[] for _ in states]
    unlike = (values for values in sides(states, kept) if any(value != values[0] for value in values))
    for position, values in enumerate(islice(unlike, TRAITS)):
        numbers: dict[Any, int] = {}
        for mine, value in zip(traits, values, strict=True):
            mine.append((position, numbers.setdefault(value, len(numbers))))
    return [tuple(mine) for mine in traits]


def sides(states: list[State], kept: Set[str]) -> Iterator[list[Any]]:
    """What may tell states apart, the same of each of them, what tells most first."""
    yield [state.verdict for state in states]
    yield [state.regions for state in states]
    scopes = [state.frames.get(state.frame, {}) for state in states]
    for slot in dict.fromkeys(chain.from_iterable(scopes)):
        if isinstance(slot, str) and (slot in kept or is_kept(slot)):
            yield [scope.get(slot) for scope in scopes]
    for obj in states[0].pins[:1]:  # the object whose methods are followed
        owns = [state.heap.get(obj, {}) for state in states]
        for name in dict.fromkeys(chain.from_iterable(owns)):
            if isinstance(name, str) and (name in kept or is_kept(name)):
                yield [own.get(name) for own in owns]
    for sym in dict.fromkeys(chain.from_iterable(state.facts for state in states)):
        if is_asked(sym.text, kept):
            yield [state.facts.get(sym) for state in states]
