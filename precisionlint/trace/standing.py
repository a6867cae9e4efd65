"""The gradients that stood when a window was opened. Whether they carry a loss scale is not written anywhere.

A scaler says so later: it divides an optimizer's gradients by its scale, when it unscales or steps it for the first
time, or it has done so before the window, which its own record of that optimizer shows. Nothing is said of gradients
that were replaced or set to zero before, nor of those that no scaler ever divides.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from precisionlint.events import Backward, Grads, Known, Named, ZeroGrad, overlap
from precisionlint.trace.host import number
from precisionlint.trace.registry import Registry, local
from precisionlint.trace.storages import Storages
from precisionlint.trace.timeline import Timeline

UNKNOWN = Backward(None, (), None, None, None)
"""The backward of whatever stood: of which scale, nobody has said."""


class Standing:
    """The backward passes from before one window."""

    def __init__(self, registry: Registry, timeline: Timeline) -> None:
        self.registry = registry
        self.timeline = timeline
        self._gradients: Storages[int] = Storages()
        """Storage of a gradient that stood -> the ``id`` of its parameter."""
        self._unexplained: set[int] = set()
        """The parameters of those of which nobody has said more."""
        self._met: set[object] = set()
        """The optimizers whose gradients a scaler has divided since, or was seen to have used before."""

    def found(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Looks for gradients that stand (those that are all 0 do not); whether there are any."""
        for each in parameters:
            if each.grad is not None and number(each.grad.any()) != 0.0:
                self._gradients.put(local(each.grad), id(each))
                self._unexplained.add(id(each))
        if self._unexplained:
            self.timeline.emit(UNKNOWN)
        return bool(self._unexplained)

    def divides(self, scaler: Named, optimizer: Named, parameters: Iterable[torch.Tensor], stage: str) -> None:
        """A scaler is about to unscale or step an optimizer, in whose record it stands at a ``stage``: ``READY``, or
        ``UNSCALED`` where it had divided the gradients before, ``STEPPED`` where it had used them.
        """
        if optimizer.id in self._met:
            return
        self._met.add(optimizer.id)
        events = self.timeline.events
        at = next((number for number, each in enumerate(events) if each is UNKNOWN), None)
        still = [each for each in parameters if self._still(each)]
        if at is None or not still or stage == "STEPPED":
            return
        weights = self.registry.weights(still)
        if any(isinstance(each, ZeroGrad) and overlap(each.weights, weights) is not False for each in events[at:]):
            return
        known = [Backward(None, (), Known(scaler), None, None, weights=weights)]
        divided = Grads(None, (), weights, "unscale", "unscale_", "", scaler, optimizer)
        self._unexplained -= {id(each) for each in still}
        events[at : at + 1] = [
            *([UNKNOWN] if self._unexplained else []),
            *known,
            *([divided] if stage == "UNSCALED" else []),
        ]

    def _still(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has the gradient that it had."""
        return parameter.grad is not None and self._gradients.get(local(parameter.grad)) == id(parameter)
