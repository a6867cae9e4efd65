"""What floating numbers a step sends to other ranks, as events of its order: each collective with its dtype and line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from precisionlint.events import Collective, Event
from precisionlint.trace.gradients import tensors
from precisionlint.trace.places import here
from precisionlint.trace.recorder import COLLECTIVES, Call, Watcher

SILENT = frozenset({"wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_"})
"""Ops among them that carry nothing."""


class Collectives:
    """The collectives of one window."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self.emit = emit

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that speaks to other ranks."""
        return self._ran if func.namespace in COLLECTIVES and func._overloadpacket.__name__ not in SILENT else None

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        floats = [each for each in tensors((*args, *kwargs.values())) if each.is_floating_point()]
        if floats:  # what else is sent has no precision
            name = func._overloadpacket.__name__.strip("_")
            dtypes = {str(each.dtype).removeprefix("torch.") for each in floats}
            self.emit(Collective(here(), (), name, " and ".join(sorted(dtypes))))
