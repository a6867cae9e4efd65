"""Where the step stands right now: in which module, section and autocast region. Patches write it, the recorder reads
it.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from precisionlint.events import Region

Section = Literal["", "optimizer", "unscale", "update"]
"""A part of the step that is no forward: empty outside all of them."""

Phase = Literal["forward", "backward", "recompute", "optimizer", "clip", "unscale", "update", "collective", "other"]
"""What an op was run for. ``update``: of a scaler; ``other``: under no_grad and outside every module (EMA, logging)."""


class Position(Struct):
    """The state of one window."""

    modules: list[int] = field(default_factory=list)
    """The numbers of the modules that are being called, outermost first."""
    bases: list[int] = field(default_factory=lambda: [0])
    """How many modules were being called when each running backward began."""
    section: Section = ""
    regions: list[Region | None] = field(default_factory=list)
    """The autocast contexts entered; None for one that is disabled."""
    spanning: Region | None = None
    """A region with a weight cache that an earlier iteration entered, over fp32 weights, while it is in force."""
    last_region: Region | None = None
    """The enabled region that was left last while gradients were recorded, since the last step."""
    functions: list[bool] = field(default_factory=list)
    """The autograd.Functions whose forward runs, outermost first: whether autocast has acted in them."""
    gradients: bool = False
    """Whether gradients may stand that no step has used yet."""

    taken: bool = False
    """Whether ``torch.autograd.grad`` gave out scaled gradients since the last step."""

    @property
    def region(self) -> Region | None:
        """The autocast region in force."""
        return self.regions[-1] if self.regions else None
