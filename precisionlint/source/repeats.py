"""Calls that were followed and did nothing to precision: the same call again is not followed again.

A helper is called on every path and in every turn of a loop. Where following it told the checks nothing, changed nothing that outlives
it and gave back plain values, the same call with equal arguments, from a state that agrees in all that it can ask for, gives the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from precisionlint.source import program as p
from precisionlint.source.blur import plain
from precisionlint.source.differing import differing
from precisionlint.source.module import SMALL
from precisionlint.source.parsing import words_in
from precisionlint.source.state import NOTHING, Fact, State
from precisionlint.source.values import Cond, Const, External, Func, Obj, Sym, Tup, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


class Outcome(Struct, frozen=True):
    """One way out of a call: its value, and what the path has decided on the way, with what it knew of that before."""

    value: Value
    decided: dict[Sym, tuple[Fact, Fact]]


class Before(Struct, frozen=True):
    """A call about to be followed: what it is known by, and what stood."""

    key: Any
    state: State
    events: int


def replay(it: Interpreter, key: Any, instr: p.Call, state: State) -> list[tuple[State, Value]] | None:
    """What a call gives that was followed before, or None where it has to be followed."""
    known, verdict = it.repeats.get(key, (None, None))
    if known is None or verdict not in (None, state.verdict):
        return None
    if any(state.facts.get(sym, NOTHING) != before for one in known for sym, (before, _) in one.decided.items()):
        return None
    results: list[tuple[State, Value]] = []
    for position, one in enumerate(known):
        path = state if position == len(known) - 1 else state.fork()
        path.facts.update((sym, after) for sym, (_, after) in one.decided.items())
        for sym in symbols(one.value):
            if sym.key[0] == "site" and sym not in one.decided:
                it.renew(path, instr.at, sym)
        results.append((path, one.value))
    return results


def key_of(it: Interpreter, func: Func, args: Args, instr: p.Call, state: State) -> Any:
    """What makes two calls the same, or None for a call that is always followed: one that trains, and one that is shorter than this."""
    function = func.function
    if it.silent or function.last_line - function.first_line < SMALL or func.module.trains(function):
        return None
    words = func.module.words(function)
    given = {value for _, value in args} | {func.receiver}
    facts = frozenset(
        (sym, fact)
        for sym, fact in state.facts.items()
        if not given.isdisjoint(it.roots(sym)) or not words.isdisjoint(words_in(sym.text))
    )
    own = (
        frozenset(
            (name, value)
            for name, value in state.heap.get(func.receiver, {}).items()
            if not isinstance(value, Func) and not plain(str(name), value, it.kept)
        )
        if func.receiver is not None
        else None
    )
    return instr, func, args, state.frame, state.regions, tuple(it.unrolled), it.one_of_many(), facts, own


def remember(it: Interpreter, before: Before, instr: p.Call, results: list[tuple[State, Value]]) -> None:
    """Notes what a call gave, if it did nothing else. What told the checks something may be said again where they stand the same."""
    if all(harmless(it, before.state, instr, *result) for result in results):
        verdict = None if it.events == before.events else before.state.verdict
        outcomes = [Outcome(value, decided(before.state, after)) for after, value in results]
        it.repeats[before.key] = outcomes, verdict


def decided(before: State, after: State) -> dict[Sym, tuple[Fact, Fact]]:
    facts = before.facts
    return {
        sym: (facts.get(sym, NOTHING), fact) for sym, fact in after.facts.items() if facts.get(sym, NOTHING) != fact
    }


def harmless(it: Interpreter, before: State, instr: p.Call, after: State, value: Value) -> bool:
    """Whether a path came out of a call as it went in, as far as precision is concerned."""
    if not is_plain(value) or after.regions != before.regions or after.verdict != before.verdict:
        return False
    for frame in differing([before.frames, after.frames]):
        if frame in before.frames and not same(it, before.frames[frame], after.frames.get(frame, {}), instr.target):
            return False
    for obj in differing([before.heap, after.heap]):
        if obj in before.heap and obj in after.heap and not same(it, before.heap[obj], after.heap[obj], None):
            return False
    return True


def same(it: Interpreter, before: dict[Any, Value], after: dict[Any, Value], target: int | None) -> bool:
    """Whether variables or attributes differ only in what precision has nothing to do with."""
    return all(
        (name in before and before[name] == value) or (name == target or plain(str(name), value, it.kept))
        for name, value in after.items()
    ) and all(name in after for name in before)


def is_plain(value: Value) -> bool:
    """Whether a value is the same wherever it comes from: no object, whose state is another on each path."""
    match value:
        case Const() | Sym() | Cond() | External():
            return True
        case Tup():
            return all(is_plain(item) for item in value.items)
    return False


def symbols(value: Value) -> list[Sym]:
    match value:
        case Sym():
            return [value]
        case Cond():
            return [value.sym]
        case Tup():
            return [sym for item in value.items for sym in symbols(item)]
    return []


def roots_of(sym: Sym, depth: int = 0) -> frozenset[Any]:
    """The symbols and objects that a symbol is made from, and that are made from nothing."""
    parts = [part.sym if isinstance(part, Cond) else part for part in sym.key[1:]]
    made_of = [part for part in parts if isinstance(part, (Sym, Obj))]
    if not made_of or sym.key[0] == "site" or depth > 12:
        return frozenset((sym,))
    found: frozenset[Any] = frozenset((sym,))
    for part in made_of:
        found |= roots_of(part, depth + 1) if isinstance(part, Sym) else frozenset((part,))
    return found
