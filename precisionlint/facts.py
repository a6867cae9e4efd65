"""What is said about precision beside training programs of torch: by JAX programs, tests, and optimizers that are written out. Each fact
stands by itself."""

from __future__ import annotations

from typing import Literal

from precisionlint.events import Event
from precisionlint.findings import Place

SLOW = 0.99
"""How much of itself an average keeps in each update, at least, for half precision to stop it: a faster one catches up all the same."""


class EnclosedBackward(Event, frozen=True, eq=False):
    """A backward that is written into the block of an autocast; ``region`` is that, in the program's words, ``entered`` where."""

    region: str
    entered: Place


class UnenteredRegion(Event, frozen=True, eq=False):
    """A region that is made and never entered: ``region``, in the program's words, one that turns autocast ``off`` or on. ``joined``: the
    ``and`` or ``or`` by which a ``with`` enters ``kept`` in its place, which stands at ``entered``; "" for a statement by itself."""

    region: str
    off: bool
    joined: Literal["and", "or", ""] = ""
    kept: str = ""
    entered: Place | None = None


class UnsavedScaler(Event, frozen=True, eq=False):
    """In a file that makes a scaler and saves the state of none: a checkpoint with an optimizer's ``"state"``, one that is written by what is
    ``"handed"`` an optimizer and no scaler, or where an optimizer, a hook or the like makes the scaler that it steps through (its
    ``"owner"``)."""

    how: Literal["state", "handed", "owner"] = "state"


class HalfSum(Event, frozen=True, eq=False):
    """A sum that is kept in half while it grows, in a JAX program.

    ``how``: ``"loop"`` (a Python loop, ``scan`` or ``fori_loop``), ``"fold"`` (``reduce`` and the like), ``"scatter"`` (``.at[].add``,
    ``segment_sum``) or ``"kernel"`` (a block of a Pallas kernel). ``made``: where it took the dtype.
    """

    how: Literal["loop", "fold", "scatter", "kernel"]
    name: str
    dtype: str
    made: Place | None


class RoundedProduct(Event, frozen=True, eq=False):
    """A product of half operands whose half result goes where fp32 is wanted; ``into`` is that. ``made``: the product."""

    op: str
    dtype: str
    into: str
    made: Place


class HalfParams(Event, frozen=True, eq=False):
    """Parameters of a JAX program that are half when an optimizer takes them. ``how``: what made them so, at ``at``; ``taken``: where."""

    dtype: str
    how: str
    optimizer: str
    rate: float | None
    by: str
    taken: Place
    sure: bool


class HeldTo(Event, frozen=True, eq=False):
    """A result that was computed in half is held to a tolerance. ``against``: ``"fp32"`` for a reference that was computed in fp32,
    ``"half"`` for one that another op computed in half, ``"reference"`` where only its name says that it was computed in another way.
    ``kind``: ``"close"`` (``atol + rtol * |expected|``), ``"mean"`` (a mean relative error, ``rtol``) or ``"most"`` (the largest absolute
    error, ``atol``). ``made``: where the result was computed, by ``op``; ``parameter``: the test's parameter that makes it half.
    """

    kind: Literal["close", "mean", "most"]
    dtype: str
    rtol: float
    atol: float
    op: str
    against: Literal["fp32", "half", "reference"]
    made: Place
    parameter: str


class ToNumpy(Event, frozen=True, eq=False):
    """A bf16 tensor of torch's is handed to numpy, by ``call``. ``made``: where it took the dtype."""

    call: str
    made: Place
    parameter: str


class Average(Event, frozen=True, eq=False):
    """Weights are blended into a running average of weights, in a dtype that nothing tells; ``cast``: or the model that holds the average
    is given a dtype, by this name, which the program sets to half; ``half``: how the blend casts what it adds to half."""

    cast: str = ""
    half: str = ""


class GradientSum(Event, frozen=True, eq=False):
    """Gradients are summed in ``name``, which a program keeps itself, in their own dtype or in that of what is ``like`` it."""

    name: str
    like: str = ""


class Moment(Event, frozen=True, eq=False):
    """The second moment of an optimizer that is written out, or the ``first`` of one that has no other. ``dtype``: the half that it is made
    in, ``""`` where it has that of the parameters, and the arithmetic with it; ``made``: this is where it is made like them."""

    name: str
    dtype: str
    made: bool = False
    first: bool = False


class HalfModel(Event, frozen=True, eq=False):
    """A model is half where it is cast or loaded, and an optimizer takes its parameters in the same file. ``dtype``: ``"half"`` where it may be
    either; ``taken``: where the optimizer takes them; ``scaled``: what scales in the file, where the weights may be fp16."""

    name: str
    dtype: str
    optimizer: str
    taken: Place
    scaled: str


class HalfLogits(Event, frozen=True, eq=False):
    """Cross entropy is taken of what a half model gives, which an optimizer of the same file trains. ``cast``: where the model becomes half."""

    dtype: str
    cast: Place


class AsHanded(Event, frozen=True, eq=False):
    """An op of a JAX program in the dtype in which it is handed its array.

    ``what``: ``"norm"`` (a mean of squares under a root), ``"exp"`` of a learnt decay, or a function that takes logarithms of
    probabilities; ``name``: what the program calls the array.
    """

    what: str
    name: str
