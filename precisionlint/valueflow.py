"""The vocabulary of value flow: what a function computes, as a graph of values with the dtypes that each can have.

A graph says what is made of what, along every path at once: a variable that two branches set is ``either`` of two values. Rules
about arithmetic are patterns over it. It knows neither syntax trees nor tensors.

A dtype is an atom, a string: ``"float32"``, ``"bfloat16"``, ``"int64"`` … where it is known; ``"~x"`` where it follows what ``x`` is
(an input, the weights, a layer's output); ``"^x"`` where it follows ``x`` too but comes from an op that CUDA's autocast runs in fp32, so
that it is half only without autocast; ``"number"`` for a Python number, which takes the dtype of what it meets; ``"?"`` where nothing is
known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, Literal

from msgspec import Struct

from precisionlint.events import Event, Region
from precisionlint.patterns import regex

Dtypes = frozenset[str]
"""The dtypes that a value can have."""

UNKNOWN: Dtypes = frozenset({"?"})
NUMBER: Dtypes = frozenset({"number"})
BOOL: Dtypes = frozenset({"bool"})
INT32: Dtypes = frozenset({"int32"})
INT64: Dtypes = frozenset({"int64"})

WEIGHTS: Dtypes = frozenset({"~weights"})
"""What follows the weights alone. What a layer makes of its input is ``"~activations"``: half under the caller's autocast too."""

HALF = frozenset({"float16", "bfloat16"})
FP8 = frozenset({"float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"})
WIDE = frozenset({"float32", "float64"})
INTEGERS = frozenset({"int8", "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})
RANK = {"bool": 0, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 3, "int32": 3, "uint64": 4, "int64": 4,
        "float16": 6, "bfloat16": 6, "float32": 7, "float64": 8, "complex64": 9, "complex128": 10}  # fmt: skip

AMAX_NAME = regex(r"(?:^|_)(?:amax|abs_?max|max_?abs)$")
"""What the largest magnitude of a tensor is called."""

HALF_LAYERS = frozenset(
    {"Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d"}
)
"""torch.nn's modules whose result is half under autocast; what others give follows what they hold."""

NO_OPTIONS: Mapping[str, Value] = MappingProxyType({})


class Value:
    """One value: the op that made it and what from. Values are never changed, and are equal only to themselves.

    ``op``: a family of ops (``"mean"``, ``"softmax"``; see ``source/flow/ops.py``), or what else it is: ``"input"``, ``"constant"``,
    ``"parameter"``, ``"buffer"``, ``"either"``, ``"external"`` (a name of an outside API), ``"unknown"`` …
    ``name``: what the program calls it, or for an outside API its canonical name. ``ref``: what the front end keeps with it.
    """

    __slots__ = ("at", "constant", "dtypes", "inputs", "name", "op", "options", "ref")

    def __init__(
        self,
        op: str,
        inputs: tuple[Value, ...] = (),
        dtypes: Dtypes = UNKNOWN,
        at: Any = None,
        name: str = "",
        constant: Any = None,
        options: Mapping[str, Value] = NO_OPTIONS,
        ref: Any = None,
    ) -> None:
        self.op = op
        self.inputs = inputs
        self.dtypes = dtypes
        self.at = at
        self.name = name
        self.constant = constant
        self.options = options
        self.ref = ref

    def __repr__(self) -> str:
        return f"<{self.op} {self.name or self.constant or ''} {'|'.join(sorted(self.dtypes))}>"

    def option(self, name: str, position: int | None = None) -> Value | None:
        """An argument by its keyword, or by its position among the inputs."""
        if name in self.options:
            return self.options[name]
        if position is not None and position < len(self.inputs):
            return self.inputs[position]
        return None


class Scope(Struct, frozen=True):
    """Where an op stands. ``region``: the autocast region that the function itself enters, None where that is the caller's affair;
    ``enabled``: False inside ``autocast(enabled=False)``, None where nothing is known; ``switched``: the region that a setting switches on.
    ``grad``: False under no_grad or inference_mode.
    ``kind``: ``"forward"`` or ``"backward"`` of an autograd.Function, ``"module"`` for a method of a module, ``"test"``, or ``""``.
    ``setup``: it runs while an object is made, before anything is cast or autocast entered.
    ``guarded``: ``"version"`` where a test of a version or of what a module has stands before it, ``"try"`` where an error of it is caught."""

    function: str = ""
    owner: str = ""
    kind: str = ""
    region: Region | None = None
    enabled: bool | None = None
    grad: bool = True
    setup: bool = False
    guarded: str = ""
    switched: Region | None = None


class Ended(Event, frozen=True, eq=False):
    """The end of the file's top level, or of a function that was read from its beginning with what the top level left: what stood
    before it runs in this order, what follows at another time."""


class Computed(Event, frozen=True, eq=False):
    """An op runs: ``value`` is what it makes."""

    value: Value
    scope: Scope

    @property
    def op(self) -> str:
        return self.value.op


class Called(Event, frozen=True, eq=False):
    """An outside API is called that computes nothing by itself: a constructor, a setting, a registration. ``placed``, of an autocast region
    for CUDA: where the code around it puts its tensors (see ``source/flow/devices.py``). ``place``, of one whose device nobody knows: the
    code around it puts tensors on just that."""

    value: Value
    scope: Scope
    placed: str = ""
    place: bool = False


class Returned(Event, frozen=True, eq=False):
    """A function returns a value."""

    value: Value
    scope: Scope


class Touched(Event, frozen=True, eq=False):
    """A setting of an outside API (a canonical name) is read, or set to ``value``."""

    name: str
    value: Value | None
    scope: Scope


class Defined(Event, frozen=True, eq=False):
    """The project's own op is defined, whose inputs' dtypes matter and which brings them to none by itself: an autograd.Function without
    custom_fwd (or with that alone: ``forward_only``), or an op of torch.library without an autocast rule. ``mixes``: it takes weights beside
    activations, by their names. ``launches``: a kernel of its own computes, not PyTorch's ops. ``follows``: it casts by itself, and its
    result to the dtype of an input."""

    name: str
    kind: Literal["function", "op"]
    mixes: bool
    launches: bool = False
    follows: bool = False
    forward_only: bool = False


class Shows(Struct, frozen=True):
    """A fact about the programs of a file that a finding needs (``Hit.needs``): ``"training"``, ``"fp16"``, ``"bf16"``, ``"half"`` (either),
    ``"half parameters"``, ``"half buffers"`` (by a cast of the whole model: ``from_pretrained`` casts none), ``"half weights"`` (parameters,
    or FSDP's half copies, in a file that trains), ``"half gradients"``, ``"half autocast"``, ``"loss under autocast"``. ``elsewhere``: another
    file of theirs must say it, since what this one shows is followed on its paths. ``bare``: by a program that runs under no autocast, which
    would lift the op to fp32. See ``source/flow/evidence.py``."""

    what: str
    elsewhere: bool = False
    bare: bool = False


def constant(value: Any, at: Any = None) -> Value:
    dtypes = NUMBER if isinstance(value, (bool, int, float)) else UNKNOWN
    return Value("constant", (), dtypes, at, constant=value)


LARGEST = {"float32": 3.4028234663852886e38, "float": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38}
"""The largest number of a dtype that is wider than fp16."""


def limit(value: Value) -> float | None:
    """The number that ``torch.finfo(torch.float32).min`` is; None where it follows a dtype that is not written out."""
    held = value.inputs[0] if value.op == "limit" and value.name in ("min", "max") else None
    if held is None or held.op != "finfo" or not held.inputs or held.inputs[0].op != "external":
        return None
    largest = LARGEST.get(held.inputs[0].name.removeprefix("torch."))
    return -largest if largest is not None and value.name == "min" else largest


def number(value: Value | None) -> float | None:
    """The Python number that a value is, or None."""
    if value is not None and value.op in ("limit", "neg") and value.inputs:
        inner = limit(value if value.op == "limit" else value.inputs[0])
        return inner if value.op == "limit" or inner is None else -inner
    if value is not None and value.op == "constant" and isinstance(value.constant, (int, float)):
        return float(value.constant) if not isinstance(value.constant, bool) else None
    return None


def promote(left: Dtypes, right: Dtypes) -> Dtypes:
    """The dtypes of an elementwise op over two values (torch's promotion; a Python number takes the other's)."""
    if left == right or right == NUMBER:
        return left
    if left == NUMBER:
        return right
    return frozenset(_promoted(a, b) for a in left for b in right)


def promote_all(values: Sequence[Value]) -> Dtypes:
    """The dtypes of what is put together of several values; a Python number takes the others'."""
    return reduce(promote, [value.dtypes for value in values], NUMBER) if values else UNKNOWN


def promote_values(values: Sequence[Value]) -> Dtypes:
    """The dtypes of an elementwise op over values: as ``promote``, and a Python float makes integers fp32. A tensor without dimensions gives
    way to those that have some, like a number."""
    scalars = [value for value in values if without_dimensions(value)]
    kept = [value for value in values if not any(value is each for each in scalars)]
    if not kept or all(value.dtypes == NUMBER for value in kept):
        kept, scalars = list(values), []
    dtypes = promote_all(kept)
    floats = any(value.op == "constant" and isinstance(value.constant, float) for value in values)
    if floats or any(value.dtypes.isdisjoint(INTEGERS) for value in scalars):
        return frozenset("float32" if atom in INTEGERS or atom == "bool" else atom for atom in dtypes)
    return dtypes


SCALAR_TENSORS = frozenset({"tensor", "as_tensor", "scalar_tensor"})
"""What makes a tensor without dimensions of a number."""
OF_SCALARS = frozenset({"cast", "view", "sqrt", "rsqrt", "reciprocal", "neg", "exp", "log", "square_pow"})
"""What leaves a tensor without dimensions as it is in that."""
RESHAPED = frozenset({"view", "reshape", "expand", "expand_as", "unsqueeze", "repeat", "tile", "broadcast_to"})
HELD = frozenset({"attribute", "index", "many", "items"})
"""What may be several numbers although it is called one: an entry of a configuration."""


def is_size(value: Value) -> bool:
    """Whether a value is ``x.shape[0]``."""
    return value.op == "index" and bool(value.inputs) and value.inputs[0].op == "size"


def without_dimensions(value: Value) -> bool:
    """Whether a value is a tensor made of one number, or a root, a cast … of that."""
    for _ in range(6):
        if value.op in SCALAR_TENSORS:
            held = value.inputs[0] if value.inputs else None
            return held is not None and held.dtypes == NUMBER and (held.op not in HELD or is_size(held))
        if value.op not in OF_SCALARS or not value.inputs or (value.op == "view" and value.name in RESHAPED):
            return False
        value = value.inputs[0]
    return False


def agreed(values: Sequence[Value]) -> Dtypes:
    """The dtypes of a product of matrices: torch refuses operands of different dtypes, so that one that is known tells the others'."""
    known = [value for value in values if "?" not in value.dtypes]
    partly = [value for value in values if value.dtypes != UNKNOWN]
    return promote_values(known or partly or values)


def _promoted(a: str, b: str) -> str:
    if a == b or b == "number":
        return a
    if a == "number":
        return b
    if a in RANK and b in RANK:
        if {a, b} == HALF:
            return "float32"
        if {a, b} == {"int8", "uint8"}:
            return "int16"
        if {a, b} == {"float64", "complex64"}:
            return "complex128"
        return max(a, b, key=lambda atom: (RANK[atom], atom))
    for known, other in ((a, b), (b, a)):
        if known in WIDE:
            return known  # at least this wide, whatever the other is
        if known in RANK and RANK[known] < 6:
            return other  # an integer gives way to what may be a float
    if a[0] in "~^" and b[0] in "~^":
        lifted = a[0] == "^" or b[0] == "^"
        return ("^" if lifted else "~") + min(a[1:], b[1:])
    return "?"


def known_half(dtypes: Dtypes) -> bool:
    """Whether a value is half on some path for sure."""
    return not HALF.isdisjoint(dtypes)


def may_be_half(dtypes: Dtypes) -> bool:
    """Whether every dtype that a value can have is half or follows something that may be."""
    return bool(dtypes) and all(atom in HALF or atom[0] in "~^" for atom in dtypes)


def shown_by(dtypes: Dtypes) -> Shows:
    """What the project must show for a value that may be half to be so: half weights where autocast would make it fp32, half parameters
    where it is one of them; else half precision of any kind."""
    if "~weights" in dtypes or "^weights" in dtypes:
        return Shows("half parameters", bare="~weights" not in dtypes)
    return Shows("half weights", bare=True) if any(atom[0] == "^" for atom in dtypes) else Shows("half")


def lifted(dtypes: Dtypes) -> Dtypes:
    """The dtypes of a result that CUDA's autocast would make fp32, where nobody knows whether autocast is on."""
    raised = ("float32" if atom == "~region" else atom for atom in dtypes)
    return frozenset(f"^{atom[1:]}" if atom[0] == "~" else atom for atom in raised)


def lowered(dtypes: Dtypes) -> Dtypes:
    """Those of a result that autocast would make half, whatever the weights are."""
    raised = (f"~{atom[1:]}" if atom[0] == "^" else atom for atom in dtypes)
    return frozenset("~activations" if atom == "~weights" else atom for atom in raised)


VIEWS = frozenset({"view", "either", "index", "stack", "attribute", "many"})
"""Ops that show the same values again: a pattern looks through them."""


def sources(value: Value, through: frozenset[str] = VIEWS, limit: int = 32) -> Iterator[Value]:
    """What a value is, seen through views (and whatever else is named): one value at least, be it a view of nothing known."""
    if value.op not in through or not value.inputs:  # as most are
        return iter((value,))
    return behind(value, through, limit)


def behind(value: Value, through: frozenset[str], limit: int) -> Iterator[Value]:
    """The values that a view shows."""
    todo, seen = [value], set[int]()
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if current.op in through and current.inputs and len(seen) < limit:
            todo.extend(current.inputs if current.op in ("either", "stack") else current.inputs[:1])
        else:
            yield current


def named(value: Value, pattern: re.Pattern[str], limit: int = 16) -> bool:
    """Whether the program calls a value so: it, or what it is a view of."""
    todo = [value]
    for current in todo:
        if current.name and current.op not in ("external", "constructed") and pattern.search(current.name):
            return True
        if current.op in VIEWS and len(todo) < limit:
            todo.extend(current.inputs if current.op == "either" else current.inputs[:1])
    return False


def find(
    value: Value, wanted: Callable[[Value], bool], stop: Callable[[Value], bool] = lambda _: False, limit: int = 200
) -> Value | None:
    """The nearest value upstream that is wanted; nothing is looked for above a value at which to stop."""
    todo, seen = [value], {id(value)}
    for current in todo:
        if wanted(current):
            return current
        if stop(current) or len(seen) > limit:
            continue
        for other in current.inputs:
            if id(other) not in seen:
                seen.add(id(other))
                todo.append(other)
    return None


def same(left: Value, right: Value) -> bool:
    """Whether two values are one, seen through views."""
    if left is right:
        return True
    mine, other = list(sources(left)), list(sources(right))
    if len(mine) == len(other) == 1:
        a, b = mine[0], other[0]
        if a.op == b.op == "gradient":  # read twice
            return same(a.inputs[0], b.inputs[0])
        return a is b or (a.op == b.op == "constant" and a.constant == b.constant)
    return {id(v) for v in mine} == {id(v) for v in other}
