"""One path's state: scopes, objects, what its conditions have decided, and the states of all checks.

States fork cheaply (dictionaries are shared until written) and are merged without loss: two states that differ only in what a
condition decided, and decided it oppositely, stand for all paths once that decision is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from precisionlint.events import Region
from precisionlint.source.program import Slot
from precisionlint.source.values import NONE, Cond, Const, External, Obj, Sym, Value


class Fact(Struct, frozen=True):
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
    variable holds (one under construction), ``laid`` how many of the imported modules stand in it, ``verdict`` a number that
    paths share whose checks stand the same, ``symbolic`` the unknown values that have attributes of their own."""

    __slots__ = (
        "checks", "control", "facts", "frame", "frames", "heap", "laid", "owned", "pins", "regions", "stack",
        "symbolic", "verdict",
    )  # fmt: skip

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
        self.laid = 0
        self.verdict = 0
        self.symbolic: frozenset[Sym] = frozenset()
        self.owned: set[Any] = set()

    def fork(self) -> State:
        other = State.__new__(State)
        other.frames, other.heap, other.facts = self.frames.copy(), self.heap.copy(), self.facts.copy()
        other.regions, other.control, other.stack = self.regions, self.control, self.stack
        other.checks, other.frame, other.pins, other.laid = self.checks, self.frame, self.pins, self.laid
        other.verdict, other.symbolic = self.verdict, self.symbolic
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
            if isinstance(obj, Sym):
                self.symbolic |= {obj}
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
            and self.verdict == other.verdict
            and self.regions == other.regions
            and self.frames == other.frames
            and self.heap == other.heap
        )

    def assume(self, cond: Cond) -> bool:
        """Takes a condition for granted; False where this path cannot be."""
        fact = learn(self.facts.get(cond.sym, NOTHING), cond)
        if fact is None or (fact.truth and "16" in cond.sym.text and self.other_half(cond.sym.text)):
            return False
        self.facts[cond.sym] = fact
        return True

    def other_half(self, text: str) -> bool:
        """Whether this path has switched on the other half dtype, by the setting of the same name: nobody sets ``fp16`` and ``bf16``."""
        other = text.replace("fp16", "bf16") if "fp16" in text else text.replace("bf16", "fp16")
        return other != text and any(fact.truth and sym.text == other for sym, fact in self.facts.items())

    def renew(self, sym: Sym) -> None:
        """The symbol stands for another value from here on: what was decided of it is over."""
        stale = [s for s in self.facts if sym in s.sources]
        for other in stale:
            del self.facts[other]
        for obj in [o for o in self.symbolic if sym in o.sources]:
            self.heap.pop(obj, None)
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
    if not left.keys() <= right.keys():
        return None
    changed = [sym for sym, fact in left.items() if right[sym] is not fact and right[sym] != fact]
    if not changed:
        return left  # the right side only knows more
    if len(changed) > 1 or len(left) < len(right):
        return None
    sym = changed[0]
    both = either(left[sym], right[sym])
    if both is None:
        return None
    facts = dict(left)
    if both == NOTHING:
        del facts[sym]
    else:
        facts[sym] = both
    return facts


def agree(left: dict[Sym, Fact], right: dict[Sym, Fact]) -> bool:
    """Whether one run may have decided both: no setting of the program differs. What is asked of a layer or an item says nothing of a
    run."""
    return all(meet(fact, right[sym]) for sym, fact in left.items() if sym in right and is_setting(sym))


def is_setting(value: Value) -> bool:
    """Whether a value is the same in a whole run: a parameter of a program, something unread that holds settings, or what follows."""
    if not isinstance(value, Sym):
        return True
    match value.key:
        case ("param" | "free", *_):
            return True
        case ("attr" | "index", holder, *_):
            return is_setting(holder) or (holder.key[0] == "site" and not isinstance(holder.key[1], tuple))
        case ("op", _, *sides):
            return all(is_setting(side) for side in sides)
    return False


def meet(left: Fact, right: Fact) -> bool:
    """Whether both facts can hold of one value."""
    pairs = ((left.truth, right.truth), (left.none, right.none), (left.eq, right.eq))
    if any(a is not None and b is not None and a != b for a, b in pairs):
        return False
    return left.eq not in right.ne and right.eq not in left.ne


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
