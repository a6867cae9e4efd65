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
from typing import Any, ClassVar, Generic, Literal, TypeVar

from msgspec import Struct

from precisionlint.records import Record

T = TypeVar("T")

Id = Hashable
"""An object: an allocation site for ``source/``, a storage or ``id()`` for ``trace/``."""

WeightPath = tuple[Hashable, ...]
"""One part of a model: its root, then attribute names. A path covers every path that it is a prefix of.

A root may say of itself that it is ``loose`` (an attribute): made from another model by something unread, it may share its weights.
"""

Weights = frozenset[WeightPath]
"""Which weights (or their gradients) something is about; ``None`` in an event means that nobody knows."""


class Known(Struct, Generic[T], frozen=True):
    """A value that is known."""

    value: T


class Follows(Struct, frozen=True):
    """A value that follows an input's dtype (its symbol), or the ambient autocast (``"autocast"``)."""

    symbol: Hashable


class Region(Record, frozen=True, eq=False):
    """An autocast region that is in force: device and dtype are ``""`` where they are unknown. ``setting``: what the program calls a dtype
    that it is given and asks nothing about; ``opener``: the framework that enters it around what the program does, with a scaler of its
    own where one is due."""

    aside: ClassVar[tuple[str, ...]] = ("at", "when", "setting", "opener")

    device: str
    dtype: str
    cache: bool = True
    default_dtype: bool = False
    at: Any = None
    when: tuple[str, ...] = ()
    setting: str = ""
    opener: str = ""


class Event(Struct, frozen=True, eq=False):
    """What every event has: its place, and the branches that were open there (as text, ``source/`` only)."""

    at: Any
    when: tuple[str, ...]

    @property
    def op(self) -> str:
        """What computes, of an event that tells of an op."""
        return ""


class Named(Record, frozen=True, eq=False):
    """An object with the name that the program gives it, for messages; the name is no part of its identity."""

    aside: ClassVar[tuple[str, ...]] = ("name",)

    id: Id
    name: str


class Engine(Record, frozen=True, eq=False):
    """A framework's object while a scaler of its own is on: its backward scales, its clip unscales, it steps what it was given.

    ``sure``: the program itself can choose fp16; otherwise what launches it may."""

    aside: ClassVar[tuple[str, ...]] = ("name", "sure")

    id: Id
    framework: str
    name: str
    sure: bool = True


class WeightsTake(Event, frozen=True, eq=False):
    """Weights (or a module's weights and buffers) take a dtype; ``trainable`` is False once they are frozen; ``by``: the framework that
    casts them, where it is not the program itself; ``norms``: BatchNorm layers, with their running statistics, are among them."""

    weights: Weights
    dtype: str | None
    how: str
    trainable: bool | None = None
    by: str = ""
    norms: bool = False


class Sharded(Event, frozen=True, eq=False):
    """Weights are wrapped for data parallelism: ``"fsdp1"``, ``"fsdp2"`` or ``"ddp"``. ``policy``: with a mixed-precision policy, which
    casts fp32 shards for the computation."""

    weights: Weights | None
    how: str
    policy: bool = False


class Owns(Event, frozen=True, eq=False):
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


class Adopted(Event, frozen=True, eq=False):
    """A model becomes part of another: its weights go by this path from here on."""

    root: Id
    path: WeightPath


class Copied(Event, frozen=True, eq=False):
    """A model is copied: the copy's weights have the dtype that these have."""

    weights: Weights
    copy: Weights


class Wrapped(Event, frozen=True, eq=False):
    """What something unread made of a model is asked for parameters: a wrapper around it, as a rule, with the weights that it has."""

    weights: Weights
    wrapper: Weights


class Written(Event, frozen=True, eq=False):
    """Weights (None: tensors that belong to no model) are written by something other than an optimizer: ``"average"`` blends other ones
    into them, ``"copy"`` replaces them, ``"maybe"``: by something unread that was given them. ``dtype`` and ``decay`` where they are
    known."""

    weights: Weights | None
    how: Literal["average", "copy", "maybe"]
    api: str
    dtype: str | None = None
    decay: float | None = None


class AdapterAdded(Event, frozen=True, eq=False):
    """Trainable adapters are put into a model, in the dtype that its own weights have then."""

    weights: Weights
    how: str


class Trains(Event, frozen=True, eq=False):
    """A framework trains weights with an optimizer that it makes itself, one without fp32 copies. ``precision``: what it computes in,
    ``"fp16"`` (then with a scaler), ``"bf16"``, ``""``, or ``"?"`` where that, and whether an engine keeps masters, is decided elsewhere;
    ``told``: where it was told so; ``elsewhere``: what it is that decides."""

    trainer: Named
    weights: Weights
    precision: str
    optimizer: str
    lr: float | None
    told: Any
    elsewhere: str = ""


class ScalerMade(Event, frozen=True, eq=False):
    """A gradient scaler is made. ``enabled`` is Known, or None when it depends on something undecided; ``loop``: the innermost loop that
    this stands in, if any; ``idle``: the program keeps it by a name under which it never uses it, but for its state."""

    scaler: Named
    cls: str
    enabled: Known[bool] | None
    settings: tuple[tuple[str, Any], ...] = ()
    loop: Hashable = None
    idle: bool = False


class Autocast(Event, frozen=True, eq=False):
    """An autocast region is entered or left."""

    region: Region | None
    enabled: bool | None
    enter: bool


class LossScaled(Event, frozen=True, eq=False):
    """A loss is multiplied by a scaler's scale; ``region`` is the autocast region in which the loss was computed."""

    scaler: Named
    region: Region | None


class LossUnscaled(Event, frozen=True, eq=False):
    """A loss that a scaler scaled is divided by a scale of it, which was read at ``at``."""

    scaler: Named


class Backward(Event, frozen=True, eq=False):
    """Gradients are added up. ``scale`` is Known(scaler), Known(None) for a loss that nothing scaled, or None. ``engine``: whose backward
    this is, where that scales; ``weights``: those whose gradients it reaches, where that is known; ``times``: the number by which the loss
    was multiplied, where the program shows one, and ``only``: it uses that for nothing else."""

    scale: Known[Named | None] | None
    loss_region: Region | None
    open_region: Region | None
    scaled_at: Any = None
    engine: Engine | None = None
    weights: Weights | None = None
    times: Named | None = None
    only: bool = False


class Grads(Event, frozen=True, eq=False):
    """Gradients are touched.

    ``how``: ``"clip"``, ``"mul"``, ``"read"``, ``"unscale"``, ``"reduce"``. ``factor`` says what they are multiplied by
    (``"1/scale"``, ``"other"``) or, for a clip, what its threshold carries (``"scale"``). ``part`` is True when only some of the
    weights' gradients are touched; ``divided`` the number by which they are, whatever that is.
    """

    weights: Weights | None
    how: Literal["clip", "mul", "read", "unscale", "reduce"]
    api: str
    factor: str = ""
    scaler: Named | None = None
    optimizer: Named | None = None
    part: bool = False
    engine: Engine | None = None
    divided: Named | None = None


class Driven(Event, frozen=True, eq=False):
    """An optimizer is handed to a function that is not read and whose name says that it trains: it steps there, most likely."""

    optimizer: Named


class Step(Event, frozen=True, eq=False):
    """An optimizer steps, through a scaler or past it. ``guarded``: only where a test for finite gradients passed; ``loop``: the innermost
    loop that it stands in; ``engine``: what it was handed to, where that steps through a scaler of its own; ``later``: in a function that
    was handed on, a hook of a backward say, so that it steps whenever that is called."""

    optimizer: Named
    via: Named | None
    guarded: bool = False
    loop: Hashable = None
    engine: Engine | None = None
    later: bool = False


class Update(Event, frozen=True, eq=False):
    """A scaler's scale is updated (which also makes every optimizer ready for the next step). ``by_hand``: to a scale that is given;
    ``read``: the program reads scales somewhere."""

    scaler: Named
    by_hand: bool = False
    read: bool = False


class ZeroGrad(Event, frozen=True, eq=False):
    """Gradients are set to zero or None; ``weights`` None and ``optimizer`` None: all of them, as far as is known."""

    weights: Weights | None
    optimizer: Named | None


class SchedulerStep(Event, frozen=True, eq=False):
    """A learning-rate schedule advances; ``guarded``: only where the step was not skipped."""

    scheduler: Named
    guarded: bool
    loop: Hashable = None


class ScaleRead(Event, frozen=True, eq=False):
    """The scale is brought to the host (``get_scale()``); ``loop``: the innermost loop that this stands in; ``compared``: it is held against
    the scale at another time."""

    scaler: Named
    loop: Hashable = None
    compared: bool = False


class Collective(Event, frozen=True, eq=False):
    """A collective runs over tensors of a dtype."""

    op: str
    dtype: str | None


class Setting(Event, frozen=True, eq=False):
    """A global setting changes: ``"float32_matmul_precision"``, ``"default_dtype"``, ``"allow_tf32"`` …"""

    name: str
    value: Known[Any] | None


class Checkpoint(Event, frozen=True, eq=False):
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


class Op(Event, frozen=True, eq=False):
    """An operation with its input, accumulation and output dtype, over value ids."""

    family: str
    inputs: tuple[Id, ...]
    output: Id | None
    dtypes: tuple[Any, Any, Any]
    constants: tuple[Any, ...] = ()


class Cast(Event, frozen=True, eq=False):
    """A tensor is cast."""

    value: Id | None
    dtype: str | None


class CustomOp(Event, frozen=True, eq=False):
    """An op of the user's own runs. ``kind``: ``"op"`` (torch.library), ``"function"`` (autograd.Function) or
    ``"launch"`` (a raw kernel). ``autocast``: it has an autocast rule or casts its inputs; ``defined`` is where it stands."""

    name: str
    kind: Literal["op", "function", "launch"]
    autocast: bool
    region: Region | None
    defined: Any


class Iteration(Event, frozen=True, eq=False):
    """A loop begins its body: ``again`` from the second time on."""

    loop: Hashable
    again: bool


class Opened(Event, frozen=True, eq=False):
    """The timeline begins. ``complete``: nothing stood before (a whole program), else what a window found. ``device``: the one that
    the program computes on, where it says so. ``measured``: it is that of a run, not of a text."""

    complete: bool
    device: str = ""
    regions: tuple[Region, ...] = ()
    scaled: tuple[Named, ...] = ()
    measured: bool = False


class Closed(Event, frozen=True, eq=False):
    """The timeline ends; only from a complete one does 'never happened' follow."""

    complete: bool


class Lost(Event, frozen=True, eq=False):
    """Something unreadable took this object and may have done with it what it can do."""

    object: Id


class Renewed(Event, frozen=True, eq=False):
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
