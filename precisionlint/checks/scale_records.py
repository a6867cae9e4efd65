"""What the ledger of loss scaling keeps: the records of gradients, optimizers and scalers under way (see ``scale_ledger``)."""

from __future__ import annotations

from typing import Any, ClassVar

from precisionlint.checks.base import Seen
from precisionlint.checks.engine_scales import Scaled
from precisionlint.events import Backward, Grads, Named, WeightPath, Weights, overlap
from precisionlint.records import Record


class Pending(Record, frozen=True, eq=False):
    """Gradients that stand scaled by a scaler, since that backward; of which weights, where that is known. ``fixed``: by a number that the
    program gives, and for want of anything else that would scale a loss which fp16 autocast computed. ``joined``: another loss
    has run backward beside this one, perhaps of other weights."""

    aside: ClassVar[tuple[str, ...]] = ("backward", "scaled")

    scaler: Named
    backward: Seen
    scaled: Seen | None
    weights: Weights | None = None
    fixed: bool = False
    joined: bool = False


class Progress(Record, frozen=True, eq=False):
    """How far an optimizer has come with a scaler since its last update: ``"unscaled"`` or ``"stepped"``.

    ``dropped``: its gradients were set to zero since, so the next unscale_ meets new ones; ``older``: the scaler has scaled another loss since.
    """

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    scaler: Named
    optimizer: Named
    phase: str
    dropped: bool
    seen: Seen
    older: bool = False


class Clean(Record, frozen=True, eq=False):
    """An optimizer whose gradients stand unscaled. ``mixed``: a scaled backward has added to them since."""

    aside: ClassVar[tuple[str, ...]] = ("seen", "mixed_by")

    optimizer: Named | None
    weights: Weights | None
    consumed: bool
    mixed: bool
    seen: Seen
    mixed_by: Seen | None = None


class Touched(Record, frozen=True, eq=False):
    """Gradients that were clipped or read (``how``) where no backward is in sight: whether they stood scaled, the step tells that follows."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    weights: Weights | None
    how: str
    api: str
    seen: Seen


class Waiting(Record, frozen=True, eq=False):
    """A scaler that was updated while gradients that it scaled had not been stepped with. ``guess``: no backward is in sight; ``renewed``:
    the name of one that has stepped stands for another by now, in the loop in which the update ran; ``left``: that loop is left."""

    aside: ClassVar[tuple[str, ...]] = ("update",)

    scaler: Named
    stepped: frozenset[Named]
    update: Seen
    guess: bool = False
    renewed: bool = False
    left: bool = False


class Made(Record, frozen=True, eq=False):
    """A scaler and how it was made.

    ``stepped``: the optimizers that stepped through it; ``before``: those that stepped through one that was made at the same place
    earlier, and that go on.
    """

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    scaler: Named
    cls: str
    stepped: frozenset[Named]
    seen: Seen
    before: frozenset[Named] = frozenset()


class Own(Record, frozen=True, eq=False):
    aside: ClassVar[tuple[str, ...]] = ("seen",)

    optimizer: Named
    weights: Weights | None
    cls: str
    fused: bool
    seen: Seen


class Left(Record, frozen=True, eq=False):
    """Gradients of an optimizer that a clip met as a scaled backward left them, if it did; those of ``other`` had been unscaled."""

    aside: ClassVar[tuple[str, ...]] = ("clip", "other")

    own: Own
    pending: Pending
    clip: Grads
    other: Progress | None

    @property
    def reached(self) -> bool:
        """Whether that backward is known to have reached its weights: it may have gone through other parts of the model alone."""
        return overlap(self.pending.weights, self.own.weights) is True


class Half(Record, frozen=True, eq=False):
    """Weights in fp16, and where they became so."""

    aside: ClassVar[tuple[str, ...]] = ("seen",)

    path: WeightPath
    seen: Seen


class Adapter(Record, frozen=True, eq=False):
    """Trainable weights that were made in fp16, inside a model whose own weights became fp16 before."""

    aside: ClassVar[tuple[str, ...]] = ("cast", "seen")

    weights: Weights
    cast: Seen
    seen: Seen


class Ledger(Record, frozen=True, eq=False):
    """The state of loss scaling on one path. ``fp16``: a backward of fp16 gradients that nothing scaled, in this turn of the loop, with
    nothing done to them since; ``times``: gradients of such a loss, in fp16 or not, that was multiplied by a number. ``window``: of a step
    that is measured; what stood before it is not known, and nobody's to guess. ``used``: scalers that came from outside and have stepped;
    ``moved_on``: those that were updated since they scaled a loss, and ``stale``: where their scale was read since. ``hidden``: scalers of
    gradients that may have been set to zero, and may stand as they were. ``left``: what a clip may have met scaled, until a step tells.
    ``engines``: what a framework's own scaler has scaled."""

    aside: ClassVar[tuple[str, ...]] = ("plain", "fp16")

    pending: frozenset[Pending] = frozenset()
    plain: Seen | None = None
    unknown: bool = False
    progress: frozenset[Progress] = frozenset()
    clean: frozenset[Clean] = frozenset()
    partial: frozenset[tuple[Named, Seen]] = frozenset()
    waiting: frozenset[Waiting] = frozenset()
    made: frozenset[Made] = frozenset()
    owns: frozenset[Own] = frozenset()
    sharded: bool = False
    half: frozenset[Half] = frozenset()
    adapters: frozenset[Adapter] = frozenset()
    lost: bool = False
    is_plain: bool = False
    fp16: Backward | None = None
    touched: frozenset[Touched] = frozenset()
    window: bool = False
    used: frozenset[Named] = frozenset()
    moved_on: frozenset[Named] = frozenset()
    stale: frozenset[tuple[Named, Any]] = frozenset()
    hidden: frozenset[Named] = frozenset()
    times: Pending | None = None
    left: frozenset[Left] = frozenset()
    engines: frozenset[Scaled] = frozenset()
