"""What the source of a Triton kernel says about precision: facts that no timeline has, since a kernel's arithmetic is none of torch's.

``subjects/triton.py`` makes them; the checks judge them. Dtypes have the words of the formats: fp32, fp16, bf16, e4m3fn, e5m2.
"""

from __future__ import annotations

from msgspec import Struct

from precisionlint.events import Event
from precisionlint.findings import Place

HALVES = frozenset({"fp16", "bf16"})
FOLLOWS = "~"
FP8 = frozenset({"e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e4b15"})


class Typed(Struct, frozen=True):
    """A dtype that a value has: ``sure`` where the kernel itself says so, else a launch that the file shows does (``at``).

    ``FOLLOWS``: the dtype of a tensor that the file's callers hand in, half where that is; ``of``: the pointers that it reaches the kernel by;
    ``narrowed``: what was fp32 was converted to it; ``handed``: the file shows the launch, else it stands elsewhere.
    """

    dtype: str
    sure: bool = True
    at: Place | None = None
    of: frozenset[str] = frozenset()
    narrowed: bool = False
    handed: bool = True


class Accumulated(Event, frozen=True, eq=False):
    """A loop adds to ``name``, which was made with this dtype at ``made`` and is handed on from turn to turn; or, where it is ``shared``,
    the programs of a launch add to what it points to, each for itself (``tl.atomic_add``)."""

    name: str
    dtype: Typed
    made: Place
    by_dot: bool
    shared: bool = False


class Reduced(Event, frozen=True, eq=False):
    """``api`` (``tl.sum``, ``tl.cumsum``) adds numbers of this dtype, and keeps the sum in it."""

    api: str
    dtype: Typed


class Dotted(Event, frozen=True, eq=False):
    """``tl.dot`` of operands of these dtypes. ``carried``: its sum starts from an accumulator that a loop hands on. ``bounded``: it is
    told after how many of K to promote. ``precise``: it is told how to treat fp32 operands. ``summed_in``: the dtype that it is told to sum
    in; ``lifted``: its result goes on in fp32, or in what nobody says."""

    a: Typed | None
    b: Typed | None
    carried: str
    bounded: bool
    precise: bool
    summed_in: Typed | None = None
    lifted: bool = False


class ScaledByAmax(Event, frozen=True, eq=False):
    """A scale that numbers are brought into the range of FP8 by, at ``used``, was made from their largest magnitude, at ``amax``.

    ``floored``: nothing lets it be zero. ``inverse``: the scale is a multiplier, the maximum over the magnitude.
    """

    amax: Place
    used: Place
    floored: bool
    inverse: bool
