"""One path's state: scopes, objects, what its conditions have decided, and the states of all checks.

States fork cheaply (dictionaries are shared until written) and are merged without loss: two states that differ only in what a
condition decided, and decided it oppositely, stand for all paths once that decision is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from precisionlint.events import Region
from precisionlint.source.program import Slot
from precisionlint.source.values import NONE, Cond, Const, External, Obj, Sym, Value


@dataclass(frozen=True, slots=True)
class Fact:
    """What a path has decided about a symbol. ``ne`` are the constants that it is known to differ from."""

    truth: bool | None = None
    none: bool | None = None
    eq: Const | External | None = None
    ne: frozenset[Const | External] = frozenset()


NOTHING = Fact()


def learn(fact: Fact, cond: Cond) -> Fact | None:
    """The fact once ``cond`` holds as well; None where the two contradict each other."""
    decided = decide(fact, cond)
    if decided is not None:
        return fact if decided else None
    truth, none, eq, ne = fact.truth, fact.none, fact.eq, fact.ne
    if cond.kind == "truth":
        truth = cond.positive
        none = False if truth else none
    elif cond.kind == "none":
        none = cond.positive
        truth = False if none else truth
        eq = NONE if none else eq
    elif cond.positive:
        assert cond.const is not None
        eq = cond.const
        none = eq == NONE
        truth = bool(eq.value) if isinstance(eq, Const) else True
    else:
        assert cond.const is not None
        ne = ne | {cond.const}
    return Fact(truth, none, eq, ne)


def decide(fact: Fact, cond: Cond) -> bool | None:
    """Whether a condition holds by what is known, or None."""
    answer: bool | None = None
    if cond.kind == "truth":
        answer = fact.truth
    elif cond.kind == "none":
        answer = fact.none if fact.none is not None else (False if fact.truth else None)
    elif fact.eq is not None:
        answer = fact.eq == cond.const
    elif cond.const in fact.ne or (
        isinstance(cond.const, Const)
        and (
            (fact.none and cond.const != NONE)
            or (fact.truth is True and not cond.const.value)
            or (fact.truth is False and cond.const.value)
        )
    ):
        answer = False
    return None if answer is None else answer == cond.positive


class State:
    """The state of one path. ``frame`` is the scope in force, ``stack`` the calls that led here, ``pins`` the objects in use that no
    variable holds (one under construction)."""

    __slots__ = ("checks", "control", "facts", "frame", "frames", "heap", "owned", "pins", "regions", "stack")

    def __init__(self) -> None:
        self.frames: dict[int, dict[Slot, Value]] = {}
        self.heap: dict[Value, dict[Any, Value]] = {}
        self.facts: dict[Sym, Fact] = {}
        self.regions: tuple[Region | str | None, ...] = ()
        self.control: tuple[str, ...] = ()
        self.stack: tuple[Any, ...] = ()
        self.checks: tuple[Any, ...] = ()
        self.pins: tuple[Value, ...] = ()
        self.frame = 0
        self.owned: set[Any] = set()

    def fork(self) -> State:
        other = State.__new__(State)
        other.frames, other.heap, other.facts = self.frames.copy(), self.heap.copy(), self.facts.copy()
        other.regions, other.control, other.stack = self.regions, self.control, self.stack
        other.checks, other.frame, other.pins = self.checks, self.frame, self.pins
        self.owned = set()
        other.owned = set()
        return other

    def scope(self, frame: int) -> dict[Slot, Value]:
        """The variables of a frame, for writing."""
        if frame not in self.owned or frame not in self.frames:
            self.frames[frame] = dict(self.frames.get(frame, ()))
            self.owned.add(frame)
        return self.frames[frame]

    def attributes(self, obj: Value) -> dict[Any, Value]:
        """The attributes of an object, for writing."""
        key = ("heap", obj)
        if key not in self.owned or obj not in self.heap:
            self.heap[obj] = dict(self.heap.get(obj, ()))
            self.owned.add(key)
        return self.heap[obj]

    def allocate(self, obj: Value, attributes: dict[Any, Value]) -> None:
        """An object is made, with these attributes (and none that an earlier one from the same place had)."""
        self.heap[obj] = attributes
        self.owned.discard(("heap", obj))

    def drop_frame(self, frame: int) -> None:
        self.frames.pop(frame, None)
        self.owned.discard(frame)

    def same_but_facts(self, other: State) -> bool:
        return (
            self.frame == other.frame
            and self.checks == other.checks
            and self.regions == other.regions
            and self.frames == other.frames
            and self.heap == other.heap
        )

    def assume(self, cond: Cond) -> bool:
        """Takes a condition for granted; False where this path cannot be."""
        fact = learn(self.facts.get(cond.sym, NOTHING), cond)
        if fact is None:
            return False
        self.facts[cond.sym] = fact
        return True

    def renew(self, sym: Sym) -> None:
        """The symbol stands for another value from here on: what was decided of it is over."""
        stale = [s for s in self.facts if sym in s.sources]
        for other in stale:
            del self.facts[other]
        for obj in [o for o in self.heap if isinstance(o, Sym) and sym in o.sources]:
            del self.heap[obj]
            self.owned.discard(("heap", obj))


def merge(states: list[State]) -> list[State]:
    """Fewer states for the same paths: equal ones are one, opposite decisions are forgotten."""
    if len(states) < 2:
        return states
    result: list[State] = []
    for state in states:
        for index, other in enumerate(result):
            if other.same_but_facts(state):
                facts = weaken(other.facts, state.facts)
                if facts is not None:
                    merged = other.fork() if facts is not other.facts else other
                    merged.facts = facts
                    merged.control = common(other.control, state.control)
                    result[index] = merged
                    break
        else:
            result.append(state)
    return merge(result) if len(result) < len(states) else result


def thin(states: list[State], limit: int, stakes: Callable[[tuple[Any, ...]], int] = lambda _: 0) -> list[State]:
    """At most ``limit`` of the states: paths are left out, none is made up.

    Those that agree in their checks and regions share a representative first; where even these are too many, those go in which
    most is under way (``stakes``).
    """
    if len(states) <= limit:
        return states
    groups: dict[Any, list[State]] = {}
    for state in states:
        groups.setdefault((state.checks, state.regions), []).append(state)
    # Of each group another one: all the first would share their earliest decisions.
    picked = {id(group[index % len(group)]) for index, group in enumerate(groups.values())}
    first = [state for state in states if id(state) in picked]
    rest = [state for state in states if id(state) not in picked]
    if len(first) <= limit:
        return first + spread(rest, limit - len(first))
    by_stakes = sorted(first, key=lambda state: -stakes(state.checks))
    half = limit // 2
    return by_stakes[:half] + spread(by_stakes[half:], limit - half)


def spread(states: list[State], count: int) -> list[State]:
    """So many of the states, evenly: those that lie together share their earliest decisions."""
    if len(states) <= count:
        return states
    return [states[index * len(states) // count] for index in range(count)]


def common(left: tuple[str, ...], right: tuple[str, ...]) -> tuple[str, ...]:
    if left == right:
        return left
    return tuple(label for label in left if label in right)


def weaken(left: dict[Sym, Fact], right: dict[Sym, Fact]) -> dict[Sym, Fact] | None:
    """The facts that stand for both sets of paths and for no other, or None where there are none such."""
    if left == right:
        return left
    if len(left) > len(right):
        left, right = right, left
    differing = [s for s in right if left.get(s) != right[s]]
    missing = [s for s in left if s not in right]
    if not missing and all(s not in left for s in differing):
        return left  # the right side only knows more
    if missing or len(differing) != 1 or differing[0] not in left:
        return None
    sym = differing[0]
    both = either(left[sym], right[sym])
    if both is None:
        return None
    facts = dict(left)
    if both == NOTHING:
        del facts[sym]
    else:
        facts[sym] = both
    return facts


def either(left: Fact, right: Fact) -> Fact | None:
    """The fact that says 'left or right' exactly, or None where no fact does."""
    if left.eq is not None and right.eq is None:
        left, right = right, left
    if right.eq is not None and left.eq is None and right.eq in left.ne:
        # x == c here, x != c there: what remains is what both say besides.
        ne = left.ne - {right.eq}
        truth = left.truth if left.truth == right.truth else None
        none = left.none if left.none == right.none else None
        if truth is None and left.truth is not None:
            return None
        return Fact(truth, none, None, ne)
    if left.eq is None and right.eq is None and left.ne == right.ne:
        if left.truth is not None and right.truth is not None and left.truth != right.truth:
            # not x, and x (which is not None): together everything, unless None was ruled out or taken before
            if left.none == right.none:
                return Fact(None, left.none, None, left.ne)
            falsy = left if left.truth is False else right
            return Fact(None, None, None, left.ne) if falsy.none is None else None
        if left.truth is None and right.truth is None and left.none != right.none:
            return Fact(None, None, None, left.ne)
        if left.none is not None and right.none is not None and left.none != right.none:
            # x is None, and x is not None with nothing known of its truth
            other = left if left.none is False else right
            if other.truth is None:
                return Fact(None, None, None, left.ne)
    if left.eq == NONE or right.eq == NONE:
        other = right if left.eq == NONE else left
        if other.none is False and other.truth is None and other.eq is None:
            return Fact(None, None, None, other.ne)
    return None


def reachable(state: State, value: Value, depth: int = 3) -> Iterable[Value]:
    """The objects that can be got at through a value: itself, its items and attributes, to a depth."""
    seen: set[Value] = set()
    todo: list[tuple[Value, int]] = [(value, depth)]
    while todo:
        current, left = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        if left == 0:
            continue
        items: Iterable[Value] = getattr(current, "items", ()) if not isinstance(current, (Obj, Sym)) else ()
        todo.extend((item, left - 1) for item in items)
        element = getattr(current, "element", None)
        if element is not None:
            todo.append((element, left - 1))
        receiver = getattr(current, "receiver", None)
        if receiver is not None:
            todo.append((receiver, left - 1))
        if isinstance(current, (Obj, Sym)):
            todo.extend((item, left - 1) for item in state.heap.get(current, {}).values())
