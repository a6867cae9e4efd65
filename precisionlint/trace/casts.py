"""Casts between floating dtypes: how many, how many bytes, and which did what was already done.

``again``: the same tensor, unchanged since, cast to the same dtype once more. ``back``: a tensor cast up and,
unchanged, back down. A tensor is known by its storage (kept from reuse by a weak reference), its view and its version;
writes past the dispatcher are unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precisionlint.trace.recorder import Call, Watcher

aten = torch.ops.aten
WATCHED = frozenset({aten._to_copy.default, aten.copy_.default})

Identity = tuple[int, int, tuple[int, ...], tuple[int, ...], int]


@dataclass(slots=True)
class Tally:
    """The casts of one line from one dtype to another."""

    count: int = 0
    bytes: int = 0
    again: int = 0
    back: int = 0


class Casts:
    """The casts of one window, by (origin, phase, dtype before, dtype after)."""

    def __init__(self) -> None:
        self.tallies: dict[tuple[int, str, torch.dtype, torch.dtype], Tally] = {}
        self._done: set[tuple[Identity, torch.dtype]] = set()
        self._made: dict[Identity, torch.dtype] = {}
        self._kept: dict[int, StorageWeakRef] = {}

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that may cast."""
        return self._cast if func in WATCHED else None

    def new_region(self) -> None:
        """Autocast dropped its cache: that weights are cast once more in the next region is no redundancy."""
        self._done.clear()

    def _cast(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        source, target = (args[1], args[0]) if func is aten.copy_.default else (args[0], out)
        before, after = source.dtype, target.dtype
        if before is after or not (before.is_floating_point and after.is_floating_point):
            return
        tally = self.tallies.setdefault((call.origin, call.phase, before, after), Tally())
        tally.count += 1
        tally.bytes += target.numel() * target.element_size()
        identity, result = self._identity(source), self._identity(target)
        if identity is None or result is None:
            return
        if func is not aten.copy_.default:
            tally.again += (identity, after) in self._done
            self._done.add((identity, after))
        tally.back += after.itemsize < before.itemsize and self._made.get(identity) is after
        self._made[result] = before

    def _identity(self, tensor: Tensor) -> Identity | None:
        try:
            storage = tensor.untyped_storage()
            number = int(storage._cdata)
        except (RuntimeError, NotImplementedError):
            return None  # a tensor without storage
        if number not in self._kept:
            self._kept[number] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return number, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()), tensor._version
