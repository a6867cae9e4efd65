"""The values of the abstract interpretation: few, immutable, compared by identity or by content.

What is not one of these is a ``Sym``: a value about which only its identity, its name in the program and what flowed into it
are known. Symbols are interned, so that the same access path on the same unknown value is the same symbol.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import force_setattr

from precisionlint.events import Named, Region, Weights
from precisionlint.records import Record

if TYPE_CHECKING:
    from precisionlint.source import program as p
    from precisionlint.source.module import ProjectModule


class Flow(Record, frozen=True, eq=False):
    """What went into a value that matters for precision.

    ``scaled``: the scaler whose scale the value carries, ``UNSURE`` where it may carry one, or None.
    ``region``: the autocast region in which it was computed, ``UNSURE`` where that is unknown, or None.
    ``factor``: ``"scale"`` or ``"1/scale"`` for a number that is the scale of ``scaler`` itself, not a loss that carries it.
    """

    aside: ClassVar[tuple[str, ...]] = ("scaled_at",)

    scaled: Named | str | None = None
    region: Region | str | None = None
    factor: str = ""
    scaled_at: Any = None


UNSURE = "?"
PLAIN = Flow()


def join(left: Flow, right: Flow) -> Flow:
    """The flow of a value made of two."""
    if left is right or right == PLAIN:
        return left
    if left == PLAIN:
        return right
    scaled, at = left.scaled or right.scaled, left.scaled_at or right.scaled_at
    return Flow(scaled, left.region or right.region, left.factor or right.factor, at)


class Sym:
    """An unknown value. ``sources`` are the symbols (itself among them) whose renewal ends what is known of it. ``loose``: made from
    a model by something unread, so that it may share that model's weights. ``options``: the values it can have, each with its condition.
    ``default``: what it is unless it is set. ``declared``: the class, or classes, of settings whose fields it has (``settings.py``)."""

    __slots__ = ("declared", "default", "flow", "key", "loose", "of", "options", "parts", "sources", "text")

    def __init__(self, key: tuple[Any, ...], text: str, flow: Flow, sources: frozenset[Sym], of: tuple[Value, ...]):
        self.key = key
        self.text = text
        self.flow = flow
        self.sources = sources | {self} if key[0] == "site" else sources
        self.of = of
        self.declared: Value | None = None
        self.default: Value | None = None
        self.loose = False
        self.options: tuple[tuple[Any, Value], ...] = ()
        self.parts: tuple[Any, ...] | None = None  # what it refers to (see ``garbage.py``)

    def __repr__(self) -> str:
        return f"<{self.text}>"


class Const(Struct, frozen=True):
    """A Python constant; ``kind`` keeps ``1``, ``1.0`` and ``True`` apart."""

    value: Any
    kind: str

    def __repr__(self) -> str:
        return repr(self.value)


def const(value: Any) -> Const:
    return Const(value, type(value).__name__)


NONE, TRUE, FALSE = const(None), const(True), const(False)


class Cond(Struct, frozen=True):
    """The truth of a statement about a symbol: ``truth``, ``none`` or ``eq`` (to a constant)."""

    sym: Sym
    kind: str
    const: Const | External | None
    positive: bool

    @property
    def text(self) -> str:
        match self.kind, self.positive:
            case "truth", True:
                return self.sym.text
            case "truth", False:
                return f"not {self.sym.text}"
            case "none", positive:
                return f"{self.sym.text} is {'' if positive else 'not '}None"
        constant = self.const.name if isinstance(self.const, External) else repr(self.const)
        return f"{self.sym.text} {'==' if self.positive else '!='} {constant}"


class External(Struct, frozen=True):
    """A name of an outside API, canonical (``torch.amp.GradScaler``, ``torch.float16``). ``benign``: a name of the project's own
    whose file holds nothing that touches precision."""

    name: str
    benign: bool = False

    def __hash__(self) -> int:
        return hash(self.name)


class Obj(Struct, frozen=True):
    """An object made at ``site`` in a run: an instance of a class (outside or the project's), a list or a dict."""

    site: Any
    cls: Value
    digest: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "digest", hash((self.site, self.cls)))

    def __hash__(self) -> int:
        return self.digest

    def __repr__(self) -> str:
        return f"Obj({self.cls})"


class Func(Struct, frozen=True):
    """A function of the project, over the frame that it was defined in, bound to ``receiver`` if it is a method."""

    function: p.Function
    module: ProjectModule
    frame: int
    receiver: Value | None = None
    owner: Class | None = None
    digest: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "digest", hash((id(self.function), self.frame, self.receiver)))

    def __hash__(self) -> int:
        return self.digest


class Class(Struct, frozen=True):
    """A class of the project; its attributes and bases live in the heap."""

    cls: p.ClassDef
    module: ProjectModule
    frame: int
    digest: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "digest", hash((id(self.cls), self.frame)))

    def __hash__(self) -> int:
        return self.digest

    def __repr__(self) -> str:
        return f"Class({self.cls.name})"


class Method(Struct, frozen=True):
    """A method of something outside the project, not called yet."""

    receiver: Value
    name: str


class Super(Struct, frozen=True):
    """``super()`` inside a method of ``owner``."""

    receiver: Value
    owner: Class


class Tup(Struct, frozen=True):
    """A tuple (or another sequence that nothing changes)."""

    items: tuple[Value, ...]


class Many(Struct, frozen=True):
    """A sequence of unknown length whose elements are all alike."""

    element: Value


class Tensors(Struct, frozen=True):
    """Parameters (``"params"``, ``"param"``), or their gradients (``"grad"``). ``part``: not all of the weights named; ``divided``: the
    number by which these are."""

    kind: str
    weights: Weights | None
    part: bool = False
    flow: Flow = PLAIN
    divided: Named | None = None


class Partial(Struct, frozen=True):
    func: Value
    args: tuple[tuple[str | None, Value], ...]


class Manager(Struct, frozen=True):
    """A context manager made by a generator function of the project, not entered yet."""

    func: Func
    args: tuple[tuple[str | None, Value], ...]
    site: Any


class Stream(Struct, frozen=True):
    """What a loop runs over, seen through ``enumerate``, ``zip``, ``items``, ``values`` or a plain wrapper (``same``)."""

    kind: str
    parts: tuple[Value, ...]


class Pending(Struct, frozen=True):
    """A name imported from another file of the project, which is read when the name is first used."""

    path: Path
    name: str
    text: str


class ModuleRef(Struct, frozen=True):
    """A module of the project."""

    module: ProjectModule


Value = (
    Sym
    | Const
    | Cond
    | External
    | Obj
    | Func
    | Class
    | Method
    | Super
    | Tup
    | Many
    | Tensors
    | Partial
    | Manager
    | Stream
    | ModuleRef
    | Pending
)


def flow_of(value: Value) -> Flow:
    match value:
        case Sym() | Tensors():
            return value.flow
        case Cond():
            return value.sym.flow
        case Tup():
            flow = PLAIN
            for item in value.items:
                flow = join(flow, flow_of(item))
            return flow
        case Many():
            return flow_of(value.element)
        case Method():
            return flow_of(value.receiver)
    return PLAIN


def text_of(value: Value) -> str:
    """What to call a value in a message when the program's own words are not at hand."""
    match value:
        case Sym():
            return value.text
        case Const():
            return repr(value)
        case Cond():
            return value.text
        case External():
            return value.name.rpartition(".")[2]
        case Obj(cls=External(name)):
            return name.rpartition(".")[2]
        case Obj(cls=Class(cls=cls)):
            return cls.name
        case Method():
            return f"{text_of(value.receiver)}.{value.name}"
    return type(value).__name__.lower()
