"""What a check is: a rule, the events that it listens to, and the automaton whose state it reads.

A check never changes a state. Automata (one a family, small and hashable) are advanced by every event after the checks have seen it;
two paths with equal states are one path. Places and names are carried beside the states and are no part of their equality.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from msgspec import Struct, field

from precisionlint.events import Event, Weights, WeightsTake, overlap
from precisionlint.findings import Confidence, EditKind, Severity


class Seen(Struct, frozen=True):
    """A station of the path that led to a finding."""

    at: Any
    text: str
    when: tuple[str, ...] = ()


class Change(Struct, frozen=True):
    """What is to change at a place, told without knowing the text there.

    ``"argument"``: the call at ``at`` (or the argument itself, given by its keyword) gets ``text`` as its argument ``name``. After
    ``@`` may follow the position at which it may stand unnamed (the tensor not counted), ``?`` where that is wherever a dtype stands,
    or ``!`` where only an argument that is given by its keyword is to change; after ``>`` the keyword that it becomes.
    ``"rename"``: a name of an outside API becomes ``name``, and a call of it by the old one is made a call by the new one.
    ``"receiver"``: ``x`` of a call ``x.method(…)`` becomes ``text``. ``"operands"``: each side of the operation (``x`` of ``x.method(…)``,
    ``x ** 2``, both of ``x * x``) becomes ``text``. ``"before"``: ``text`` becomes a statement before the one that holds ``at``.
    For the latter three ``name`` is a call that must follow: in the same function, before one of the same block.

    In ``text`` names of outside APIs stand in full (``torch.float32``); ``{}`` is the old source, ``{dtype}`` that of the dtype that a
    cast names, ``{tensor}`` that of the tensor that an op works on.
    """

    kind: EditKind
    at: Any
    name: str = ""
    text: str = ""


class Remedy(Struct, frozen=True):
    """How a fault can be taken away. ``unsafe``: what else this changes, in words; empty where it is safe."""

    changes: tuple[Change, ...]
    unsafe: str = ""
    torch: str = ""
    """The version of torch that first knows what it writes, where that is a recent one."""


class Hit(Struct, frozen=True):
    """A fault on one path. ``at`` is where the finding stands, ``trace`` what led there, in order.

    ``unless``: facts of the whole program (see ``Evidence``) of which any one makes this no fault; ``needs``: facts without
    which it is none.
    """

    rule: str
    at: Any
    message: str
    trace: tuple[Seen, ...]
    severity: Severity | None = None
    confidence: Confidence = "certain"
    unless: tuple[Hashable, ...] = ()
    needs: tuple[Hashable, ...] = ()
    fix: Remedy | None = None
    torch: str = ""
    """The versions of torch in which this is a fault, ``>=2.9`` or ``<2.12``; empty where it is one in all."""
    decided: tuple[tuple[str, ...], ...] = ()
    """What each way there has decided at branches that no station stands in, in words (``source/`` only); none where a way
    decided nothing."""
    never: str = ""
    """What no path does, as a program writes it, where that is the fault: where paths were left out, it must stand nowhere in the file."""
    once: Hashable = None
    """The object whose fault this is, where it is one fault however many places show it: the first in a file stands for all."""


class Evidence(Struct, frozen=True):
    """Something that some path of the program does: what ``Hit.unless`` and ``Hit.needs`` are held against."""

    fact: Hashable


FROZEN = "frozen"


def frozen(weights: Weights) -> tuple[Hashable, ...]:
    """The facts by which some of these weights are never trained."""
    return tuple((FROZEN, path) for path in sorted(weights, key=str))


def meets(fact: Hashable, wanted: Hashable) -> bool:
    """Whether a fact is the one that is asked for: of frozen weights, whether it is about any of the same."""
    if isinstance(fact, tuple) and isinstance(wanted, tuple) and fact[0] == wanted[0] == FROZEN:
        return bool(overlap(frozenset({fact[1]}), frozenset({wanted[1]})))
    return fact == wanted


Report = Callable[[Any], None]


def unmoved(state: Any, event: Event) -> Any:
    """The state of a family whose checks read single events."""
    return state


class Automaton(Struct, frozen=True):
    """The state that the checks of a family read. ``settle``: what is left of it where another program begins;
    ``stakes``: how much is under way in it, for the choice of the paths to follow where there are too many; ``hears``: the events that may
    change it."""

    name: str
    start: Any
    advance: Callable[[Any, Event], Any] = unmoved
    settle: Callable[[Any], Any] = lambda state: state
    stakes: Callable[[Any], int] = lambda _: 0
    hears: tuple[type[Event], ...] = (Event,)


class Check(Struct, frozen=True):
    """One rule's function: (state before the event, event) -> hits and evidence. ``ops``: of events that tell of an op, those of these
    are what it asks for; None for all."""

    rule: str
    automaton: Automaton
    events: tuple[type[Event], ...]
    run: Callable[[Any, Any], Iterable[Any]]
    ops: frozenset[str] | None = None

    def hears(self, event: Event) -> bool:
        """Whether an event can say anything to it."""
        return type(event) in self.events and (self.ops is None or event.op in self.ops or not event.op)


class Family(Struct, frozen=True):
    """The checks of one module, registered by decorator."""

    automaton: Automaton
    checks: list[Check] = field(default_factory=list)

    def rule(
        self, name: str, *events: type[Event], ops: Iterable[str] | None = None
    ) -> Callable[[Callable[[Any, Any], Iterator[Any]]], Any]:
        """Registers a generator of hits under the name of its rule; of ops it is told of ``ops`` alone."""

        def register(run: Callable[[Any, Any], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
            heard = None if ops is None else frozenset(ops)
            self.checks.append(Check(name, self.automaton, events, run, heard))
            return run

        return register


class Judge:
    """The selected checks, run side by side over a timeline."""

    def __init__(self, checks: Iterable[Check]) -> None:
        checks = list(checks)
        self.automata = list(dict.fromkeys(check.automaton.name for check in checks))
        by_name = {check.automaton.name: check.automaton for check in checks}
        self._automata = [by_name[name] for name in self.automata]
        self._advances: dict[type[Event], list[tuple[int, Callable[[Any, Event], Any]]]] = {}
        self._settle = [by_name[name].settle for name in self.automata]
        self._stakes = [by_name[name].stakes for name in self.automata]
        self.start = tuple(by_name[name].start for name in self.automata)
        self._checks = [(self.automata.index(check.automaton.name), check) for check in checks]
        self._listeners: dict[tuple[type[Event], str], list[tuple[int, Check]]] = {}

    def advances(self, kind: type[Event]) -> list[tuple[int, Callable[[Any, Event], Any]]]:
        """The automata that events of a kind may change: the index of each, and its function."""
        if kind not in self._advances:
            self._advances[kind] = [
                (index, each.advance)
                for index, each in enumerate(self._automata)
                if each.advance is not unmoved and issubclass(kind, each.hears)
            ]
        return self._advances[kind]

    def listeners(self, event: Event) -> list[tuple[int, Check]]:
        """The checks that hear an event, each with the index of its automaton."""
        kind = type(event), event.op
        if kind not in self._listeners:
            self._listeners[kind] = [(index, check) for index, check in self._checks if check.hears(event)]
        return self._listeners[kind]

    def stakes(self, states: tuple[Any, ...]) -> int:
        """How much is under way on a path."""
        return sum(stakes(state) for stakes, state in zip(self._stakes, states, strict=True))

    def settle(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """The states from which another program of the same file begins: objects stand, nothing is under way."""
        return tuple(settle(state) for settle, state in zip(self._settle, states, strict=True))

    def advance(self, states: tuple[Any, ...], event: Event, report: Report) -> tuple[Any, ...]:
        """The states after an event, the very same where none has changed; hits and evidence go to ``report``."""
        if isinstance(event, WeightsTake) and event.trainable is False:
            for path in event.weights:  # what many rules ask for, whichever of them are selected
                report(Evidence((FROZEN, path)))
        for index, check in self.listeners(event):
            for found in check.run(states[index], event):
                report(found)
        after: list[Any] | None = None
        for index, advance in self.advances(type(event)):
            state = advance(states[index], event)
            if state is not states[index]:
                after = list(states) if after is None else after
                after[index] = state
        return states if after is None else tuple(after)
