"""Casts between floating dtypes: how many, how many bytes, and which did what was already done.

``again``: the same tensor, unchanged since, cast to the same dtype once more. ``back``: a tensor cast up and,
unchanged, back down. A tensor is known by its storage (kept from reuse by a weak reference), its view and its version;
writes past the dispatcher are unseen.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.registry import storage_number
from precisionlint.trace.storages import Storages

aten = torch.ops.aten
WATCHED = frozenset({aten._to_copy.default, aten.copy_.default})

View = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, shape and strides."""


class Tally(Struct):
    """The casts of one line from one dtype to another."""

    count: int = 0
    bytes: int = 0
    again: int = 0
    back: int = 0


class Seen(Struct):
    """A view of a storage, unchanged since it was met."""

    version: int
    made_from: torch.dtype | None = None
    cast_to: dict[torch.dtype, int] = field(default_factory=dict)
    """dtype -> the region in which it was cast to it."""


class Casts:
    """The casts of one window, by (origin, phase, dtype before, dtype after)."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[int, str, torch.dtype, torch.dtype], Tally] = {}
        self._storages: Storages[dict[View, Seen]] = Storages()
        self._regions = 0
        """How many outermost regions were left: what was cast before, autocast has forgotten."""

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that may cast."""
        return self._cast if func in WATCHED else None

    def new_region(self) -> None:
        """Autocast dropped its cache: that weights are cast once more in the next region is no redundancy."""
        self._regions += 1

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
        before, after = source.dtype, target.dtype
        if before is after or not (before.is_floating_point and after.is_floating_point):
            return
        tally = self.tallies.setdefault((call.origin, call.phase, before, after), Tally())
        tally.count += 1
        tally.bytes += target.numel() * target.element_size()
        seen, made = self._seen(source), self._seen(target)
        if seen is None or made is None:
            return
        if func is not aten.copy_.default:
            tally.again += seen.cast_to.get(after) == self._regions
            seen.cast_to[after] = self._regions
        tally.back += after.itemsize < before.itemsize and seen.made_from is after
        made.made_from = before

    def _seen(self, tensor: Tensor) -> Seen | None:
        """What is known of a tensor as it stands; None where it has no storage."""
        views = self._storages.get(tensor)
        if views is None:
            if not storage_number(tensor):
                return None
            views = {}
            self._storages.put(tensor, views)
        view = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        known = views.get(view)
        if known is None or known.version != tensor._version:
            known = views[view] = Seen(tensor._version)
        return known
