"""What is known of a value in a Triton kernel, and how it follows through promotion, bounds and branches.

It knows values, not syntax: dtypes with where they come from, addresses, largest magnitudes, and the scales that follow from them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from precisionlint.findings import Place
from precisionlint.kernel_facts import FOLLOWS, Typed
from precisionlint.patterns import regex
from precisionlint.subjects.triton_launches import NOTHING, Reaching

DTYPES = {
    "float32": "fp32",
    "float64": "fp64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4nv": "e4m3fn",
    "float8e5": "e5m2",
    "float8e4b8": "e4m3fnuz",
    "float8e5b16": "e5m2fnuz",
    "float8e4b15": "e4b15",
}
"""Triton's names of floating-point types, and the words that are used here."""

SAME = frozenset(
    {
        "trans",
        "reshape",
        "view",
        "broadcast_to",
        "expand_dims",
        "permute",
        "ravel",
        "abs",
        "max",
        "min",
        "flip",
        "sum",
        "cumsum",
    }
)
"""Functions whose result has the dtype of their first argument."""
WIDE_ONLY = frozenset(
    {"exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "softmax", "cos", "sin", "erf", "ceil", "floor"}
)
"""Those that Triton has for fp32 and fp64 alone."""
KEEP_ZERO = frozenset(
    {"exp2", "ceil", "log2", "reshape", "broadcast_to", "expand_dims", "trans", "view", "max", "sqrt"}
)
"""Functions through which an amax of zero stays one: exp2 of the ceiling of log2 of it is 0 again."""
ADDRESSES = frozenset({"consume_token", "symm_at"})
"""Functions of a library over Triton's whose result is an address in what they are handed first."""
FP8_MAXIMA = frozenset({448.0, 57344.0, 240.0})
FP8_MAXIMUM = regex(r"(fp8|float8|\bf8|e4m3|e5m2)\w*max|max\w*(fp8|float8|f8\b|e4m3|e5m2)", re.IGNORECASE)


class Value(Struct, frozen=True):
    """What is known of a value. ``pointers``: the parameters that it is an address in, several where a flag swaps them. ``amax``: it is the
    largest magnitude of some numbers, or follows from it and is zero with it; ``scale``: where it was brought over or under a constant;
    ``fp8``: with a maximum of FP8 in it; ``inverse``: infinite where that is zero."""

    dtypes: Reaching = NOTHING
    pointers: frozenset[str] = frozenset()
    magnitude: bool = False
    amax: Place | None = None
    scale: Place | None = None
    floored: bool = False
    fp8: bool = False
    inverse: bool = False
    number: float | None = None

    def one_of(self, words: frozenset[str]) -> Typed | None:
        """The dtype of these that it has, the surest first. That of a tensor which the kernel widens on one of its paths counts only where
        another narrows to it: what is meant to be wide is."""
        wide = any(each.dtype in ("fp32", "fp64") for each in self.dtypes)
        found = [
            each
            for each in self.dtypes
            if each.dtype in words and not (wide and each.dtype == FOLLOWS and not each.narrowed)
        ]
        return min(found, key=rank, default=None)


UNKNOWN = Value()


def rank(dtype: Typed) -> tuple[object, ...]:
    """The order in which dtypes that a value can have are told: the surest first, of callers' tensors those that a launch here hands on."""
    at = (dtype.at.path, dtype.at.line, dtype.at.column) if dtype.at is not None else ()
    return (not dtype.sure, dtype.dtype, not dtype.handed, at, sorted(dtype.of), dtype.narrowed)


def applied(api: str, values: Sequence[Value], named: Mapping[str, Value], at: Place) -> Value:
    """What is known of the result of a function of Triton's, from its arguments."""
    first = values[0] if values else UNKNOWN
    if api in ADDRESSES and len(values) > 1:
        return values[1]
    if api == "abs":
        return Value(first.dtypes, magnitude=True)
    if api == "max" and first.magnitude:
        return Value(first.dtypes, amax=at)
    if api == "max" and first.amax is not None:
        return first
    if api in ("maximum", "max", "clamp", "minimum"):
        return _bounded(api, values, named)
    if api == "where" and len(values) == 3:
        return replace(promoted(values[1], values[2]), amax=None)
    if api in KEEP_ZERO and first.amax is not None:
        return first
    if api in ("div_rn", "fdiv") and len(values) > 1:
        return promoted(values[0], values[1])
    if api in WIDE_ONLY:  # a kernel that calls it is not compiled for half
        return Value(frozenset(Typed("fp32") if each.dtype == FOLLOWS else each for each in first.dtypes))
    if api in SAME:
        return Value(first.dtypes)
    if api == "fma" and len(values) == 3:
        return promoted(values[0], values[2])
    return UNKNOWN


def _bounded(api: str, values: Sequence[Value], named: Mapping[str, Value]) -> Value:
    """A maximum, a minimum or a clamp: one with a constant above zero is a floor, one of two magnitudes is a magnitude."""
    scales = [each for each in values if each.amax is not None]
    if not scales:
        return promoted(values[0], values[1]) if len(values) > 1 else Value(values[0].dtypes if values else NOTHING)
    if api == "minimum":
        return scales[0]
    others = [each for each in values if each.amax is None]
    zero = api == "maximum" and all(_zero(each) for each in others)
    return replace(scales[0], floored=scales[0].floored or not (zero or (api == "max" and not others)))


def promoted(left: Value, right: Value) -> Value:
    """Triton's promotion of two operands: a plain number takes the tensor's dtype, the wider float wins."""
    if plain(left) or (left.fp8 and not left.dtypes and left.amax is None):
        return Value(right.dtypes)
    if plain(right) or (right.fp8 and not right.dtypes and right.amax is None):
        return Value(left.dtypes)
    if not left.dtypes or not right.dtypes:
        wide = [each for each in (*left.dtypes, *right.dtypes) if each.dtype in ("fp32", "fp64")]
        return Value(frozenset(wide)) if wide and len(wide) == len(left.dtypes | right.dtypes) else UNKNOWN
    pairs = [_wider(a, b) for a in left.dtypes for b in right.dtypes]
    return Value(frozenset(pairs))


def _wider(a: Typed, b: Typed) -> Typed:
    if a.dtype == b.dtype == FOLLOWS:
        return replace(a, of=a.of | b.of, narrowed=a.narrowed or b.narrowed, handed=a.handed and b.handed)
    order = ("fp64", "fp32", FOLLOWS, "bf16", "fp16")
    for word in order:
        for each, other in ((a, b), (b, a)):
            if each.dtype == word:
                return replace(each, sure=each.sure and (other.sure or word in ("fp64", "fp32")))
    return a


def joined(one: Value, other: Value) -> Value:
    """What is known where two branches meet."""
    if one == other:
        return one
    scale = one if one.amax is not None else other
    return Value(
        dtypes=one.dtypes | other.dtypes if one.dtypes and other.dtypes else NOTHING,
        pointers=one.pointers | other.pointers if one.pointers and other.pointers else frozenset(),
        scale=scale.scale,
        amax=scale.amax if all(each.amax is not None or _zero(each) for each in (one, other)) else None,
        floored=one.floored or other.floored,
        fp8=one.fp8 and other.fp8,
        inverse=one.inverse,
    )


def plain(value: Value) -> bool:
    """A number of Python's, which takes the dtype of the tensor that it meets."""
    return value.number is not None and not value.dtypes


def _zero(value: Value) -> bool:
    """Zero or below, or tensors full of it: no floor."""
    return value.number is not None and value.number <= 0


def constant(value: Value) -> bool:
    """A number, or a maximum of FP8 by its name."""
    return value.number is not None or (value.fp8 and value.amax is None)


def fixed(value: Value) -> bool:
    """A number that no tensor has part in: one of Python's, a maximum of FP8, what was made of them."""
    return constant(value) and not value.dtypes


def folded(operator: ast.operator, left: float | None, right: float | None) -> float | None:
    """The number that two are made into, where both are known."""
    if left is None or right is None:
        return None
    if isinstance(operator, ast.Mult):
        return left * right
    if isinstance(operator, ast.Div) and right:
        return left / right
    return None
