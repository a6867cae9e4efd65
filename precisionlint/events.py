"""The vocabulary of the timeline: what happens to precision while a program trains.

Both front ends speak it: ``source/`` for every timeline that the code can have, ``trace/`` for the one that a step did
have. An event says which objects it is about (by opaque, hashable ids), where it stands (``at``), and what is known of it.
It knows neither syntax trees nor tensors.

How sure an event is of a value is part of the value:

``Known(v)``      the value is ``v``
``Follows(s)``    it follows the dtype of input ``s``, or the ambient autocast
``None``          nothing is known
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

T = TypeVar("T")

Id = Hashable
"""An object: an allocation site for ``source/``, a storage or ``id()`` for ``trace/``."""

WeightPath = tuple[Hashable, ...]
"""One part of a model: its root, then attribute names. A path covers every path that it is a prefix of.

A root may say of itself that it is ``loose`` (an attribute): made from another model by something unread, it may share its weights.
"""

Weights = frozenset[WeightPath]
"""Which weights (or their gradients) something is about; ``None`` in an event means that nobody knows."""


@dataclass(frozen=True, slots=True)
class Known(Generic[T]):
    """A value that is known."""

    value: T


@dataclass(frozen=True, slots=True)
class Follows:
    """A value that follows an input's dtype (its symbol), or the ambient autocast (``"autocast"``)."""

    symbol: Hashable


@dataclass(frozen=True, slots=True)
class Region:
    """An autocast region that is in force: device and dtype are ``""`` where they are unknown."""

    device: str
    dtype: str
    cache: bool = True
    default_dtype: bool = False
    at: Any = field(default=None, compare=False)
    when: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Event:
    """What every event has: its place, and the branches that were open there (as text, ``source/`` only)."""

    at: Any = field(compare=False)
    when: tuple[str, ...] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Named:
    """An object with the name that the program gives it, for messages; the name is no part of its identity."""

    id: Id
    name: str = field(compare=False)


@dataclass(frozen=True, slots=True)
class Engine:
    """A framework's object while a scaler of its own is on: its backward scales, its clip unscales, it steps what it was given.

    ``sure``: the program itself can choose fp16; otherwise what launches it may."""

    id: Id
    framework: str
    name: str = field(compare=False)
    sure: bool = field(compare=False, default=True)


@dataclass(frozen=True, slots=True)
class WeightsTake(Event):
    """Weights (or a module's weights and buffers) take a dtype; ``trainable`` is False once they are frozen; ``by``: the framework that
    casts them, where it is not the program itself; ``norms``: BatchNorm layers, with their running statistics, are among them."""

    weights: Weights
    dtype: str | None
    how: str
    trainable: bool | None = None
    by: str = ""
    norms: bool = False


@dataclass(frozen=True, slots=True)
class Sharded(Event):
    """Weights are wrapped for data parallelism: ``"fsdp1"``, ``"fsdp2"`` or ``"ddp"``. ``policy``: with a mixed-precision policy, which
    casts fp32 shards for the computation."""

    weights: Weights | None
    how: str
    policy: bool = False


@dataclass(frozen=True, slots=True)
class Owns(Event):
    """An optimizer is made over weights. ``cls`` is its full name, ``lr`` its learning rate, ``masters`` whether it
    keeps fp32 copies (``None``: unknown); ``copies_of``: the weights of which its own are fp32 copies, kept by hand; ``handed``: the
    weights of a model that a function gets from whoever calls it."""

    optimizer: Named
    weights: Weights | None
    cls: str
    lr: float | None
    masters: bool | None
    settings: tuple[tuple[str, Any], ...] = ()
    copies_of: Weights | None = None
    handed: bool = False


@dataclass(frozen=True, slots=True)
class Adopted(Event):
    """A model becomes part of another: its weights go by this path from here on."""

    root: Id
    path: WeightPath


@dataclass(frozen=True, slots=True)
class Copied(Event):
    """A model is copied: the copy's weights have the dtype that these have."""

    weights: Weights
    copy: Weights


@dataclass(frozen=True, slots=True)
class Written(Event):
    """Weights (None: tensors that belong to no model) are written by something other than an optimizer: ``"average"`` blends other ones
    into them, ``"copy"`` replaces them, ``"maybe"``: by something unread that was given them. ``dtype`` and ``decay`` where they are
    known."""

    weights: Weights | None
    how: Literal["average", "copy", "maybe"]
    api: str
    dtype: str | None = None
    decay: float | None = None


@dataclass(frozen=True, slots=True)
class AdapterAdded(Event):
    """Trainable adapters are put into a model, in the dtype that its own weights have then."""

    weights: Weights
    how: str


@dataclass(frozen=True, slots=True)
class Trains(Event):
    """A framework trains weights with an optimizer that it makes itself, one without fp32 copies. ``precision``: what it computes in,
    ``"fp16"`` (then with a scaler), ``"bf16"`` or ``""``; ``told``: where it was told so."""

    trainer: Named
    weights: Weights
    precision: str
    optimizer: str
    lr: float | None
    told: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class ScalerMade(Event):
    """A gradient scaler is made. ``enabled`` is Known, or None when it depends on something undecided."""

    scaler: Named
    cls: str
    enabled: Known[bool] | None
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Autocast(Event):
    """An autocast region is entered or left."""

    region: Region | None
    enabled: bool | None
    enter: bool


@dataclass(frozen=True, slots=True)
class LossScaled(Event):
    """A loss is multiplied by a scaler's scale; ``region`` is the autocast region in which the loss was computed."""

    scaler: Named
    region: Region | None


@dataclass(frozen=True, slots=True)
class Backward(Event):
    """Gradients are added up. ``scale`` is Known(scaler), Known(None) for a loss that nothing scaled, or None. ``engine``: whose backward
    this is, where that scales; ``weights``: those whose gradients it reaches, where that is known."""

    scale: Known[Named | None] | None
    loss_region: Region | None
    open_region: Region | None
    scaled_at: Any = field(compare=False, default=None)
    engine: Engine | None = None
    weights: Weights | None = None


@dataclass(frozen=True, slots=True)
class Grads(Event):
    """Gradients are touched.

    ``how``: ``"clip"``, ``"mul"``, ``"read"``, ``"unscale"``, ``"reduce"``. ``factor`` says what they are multiplied by
    (``"1/scale"``, ``"other"``) or, for a clip, what its threshold carries (``"scale"``). ``part`` is True when only some of the
    weights' gradients are touched.
    """

    weights: Weights | None
    how: Literal["clip", "mul", "read", "unscale", "reduce"]
    api: str
    factor: str = ""
    scaler: Named | None = None
    optimizer: Named | None = None
    part: bool = False
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class Step(Event):
    """An optimizer steps, through a scaler or past it. ``guarded``: only where a test for finite gradients passed; ``loop``: the innermost
    loop that it stands in; ``engine``: what it was handed to, where that steps through a scaler of its own."""

    optimizer: Named
    via: Named | None
    guarded: bool = False
    loop: Hashable = None
    engine: Engine | None = None


@dataclass(frozen=True, slots=True)
class Update(Event):
    """A scaler's scale is updated (which also makes every optimizer ready for the next step). ``by_hand``: to a scale that is given."""

    scaler: Named
    by_hand: bool = False


@dataclass(frozen=True, slots=True)
class ZeroGrad(Event):
    """Gradients are set to zero or None; ``weights`` None and ``optimizer`` None: all of them, as far as is known."""

    weights: Weights | None
    optimizer: Named | None


@dataclass(frozen=True, slots=True)
class SchedulerStep(Event):
    """A learning-rate schedule advances; ``guarded``: only where the step was not skipped."""

    scheduler: Named
    guarded: bool
    loop: Hashable = None


@dataclass(frozen=True, slots=True)
class ScaleRead(Event):
    """The scale is brought to the host (``get_scale()``); ``loop``: the innermost loop that this stands in."""

    scaler: Named
    loop: Hashable = None


@dataclass(frozen=True, slots=True)
class Collective(Event):
    """A collective runs over tensors of a dtype."""

    op: str
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Setting(Event):
    """A global setting changes: ``"float32_matmul_precision"``, ``"default_dtype"``, ``"allow_tf32"`` …"""

    name: str
    value: Known[Any] | None


@dataclass(frozen=True, slots=True)
class Checkpoint(Event):
    """A checkpoint is written (or read). ``weights``: of the models in it; ``half``: the dtype of tensors in it that were cast to half on
    the way; ``handed``: by something unread that was given these."""

    write: bool
    complete: bool
    optimizers: tuple[Named, ...]
    scalers: tuple[Named, ...]
    modules: bool
    weights: Weights = frozenset()
    half: str = ""
    handed: bool = False


@dataclass(frozen=True, slots=True)
class Op(Event):
    """An operation with its input, accumulation and output dtype, over value ids."""

    family: str
    inputs: tuple[Id, ...]
    output: Id | None
    dtypes: tuple[Any, Any, Any]
    constants: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Cast(Event):
    """A tensor is cast."""

    value: Id | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class CustomOp(Event):
    """An op of the user's own runs. ``kind``: ``"op"`` (torch.library), ``"function"`` (autograd.Function) or
    ``"launch"`` (a raw kernel). ``autocast``: it has an autocast rule or casts its inputs; ``defined`` is where it stands."""

    name: str
    kind: Literal["op", "function", "launch"]
    autocast: bool
    region: Region | None
    defined: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Iteration(Event):
    """A loop begins its body: ``again`` from the second time on."""

    loop: Hashable
    again: bool


@dataclass(frozen=True, slots=True)
class Opened(Event):
    """The timeline begins. ``complete``: nothing stood before (a whole program), else what a window found. ``device``: the one that
    the program computes on, where it says so."""

    complete: bool
    device: str = ""
    regions: tuple[Region, ...] = ()
    scaled: tuple[Named, ...] = ()


@dataclass(frozen=True, slots=True)
class Closed(Event):
    """The timeline ends; only from a complete one does 'never happened' follow."""

    complete: bool


@dataclass(frozen=True, slots=True)
class Lost(Event):
    """Something unreadable took this object and may have done with it what it can do."""

    object: Id


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A name stands for another object from here on (the variable of a loop): what was known of this id is over."""

    object: Id


def overlap(left: Weights | None, right: Weights | None) -> bool | None:
    """Whether two sets of weights share any: True, False, or None where nobody can say."""
    if left is None or right is None:
        return None
    if any(a[: len(b)] == b or b[: len(a)] == a for a in left for b in right):
        return True
    return None if any(getattr(path[0], "loose", False) for path in left | right) else False


def covers(outer: Weights | None, inner: Weights | None) -> bool:
    """Whether ``outer`` is known to hold all of ``inner``."""
    if outer is None or inner is None:
        return False
    return all(any(path[: len(root)] == root for root in outer) for path in inner)


def moved(weights: Weights, event: Adopted) -> Weights:
    """Weights under their new names, once the model that they are part of has been adopted."""
    return frozenset((*event.path, *path[1:]) if path[0] == event.root else path for path in weights)
