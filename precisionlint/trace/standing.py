"""The gradients that stood when a window was opened. Whether they carry a loss scale is not written anywhere; the program
says so later, when it steps through its scaler, which then divides them by its scale.

That is said of one optimizer and one scaler alone, where it is not open which gradients are meant.
"""

from __future__ import annotations

from dataclasses import replace

from precisionlint.events import Backward, Known, Named, ZeroGrad
from precisionlint.trace.timeline import Timeline


class Standing:
    """The backward from before one window."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._backward = Backward(None, (), None, None, None)
        self._pairs: list[tuple[Named, Named]] = []

    def found(self, scaled: list[tuple[Named, Named]]) -> None:
        """Gradients stand; ``scaled``: each enabled scaler with each optimizer that it has not unscaled."""
        self._pairs = scaled
        self.timeline.emit(self._backward)

    def stepped(self, scaler: Named, optimizer: Named) -> None:
        """The program steps an optimizer through a scaler."""
        events = self.timeline.events
        at = next((number for number, each in enumerate(events) if each is self._backward), None)
        if at is None or self._pairs != [(scaler, optimizer)]:
            return
        if not any(isinstance(each, ZeroGrad) for each in events[at:]):
            events[at] = replace(self._backward, scale=Known(scaler))
        self._pairs = []
