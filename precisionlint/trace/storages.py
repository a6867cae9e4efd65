"""What is known of tensors, by their storage, for as long as the storage lives.

A weak reference keeps a storage's number from being another's while it is known here; what has died is let go in
batches, so that memory grows with what lives and not with how many tensors there were.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precisionlint.trace.registry import storage_number

T = TypeVar("T")
BATCH = 4096
"""How many storages may be known before the dead are looked for."""


class Storages(Generic[T]):
    """Storage -> something."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, T]] = {}
        self._limit = BATCH

    def __len__(self) -> int:
        return len(self._known)

    def __bool__(self) -> bool:
        return bool(self._known)

    def put(self, tensor: Tensor, value: T) -> None:
        """Says something of a tensor's storage; nothing where it has none."""
        number = storage_number(tensor)
        if not number:
            return
        known = self._known.get(number)
        reference = StorageWeakRef(tensor.untyped_storage()) if known is None else known[0]  # type: ignore[no-untyped-call]
        self._known[number] = (reference, value)
        if len(self._known) > self._limit:
            self._let_go()

    def get(self, tensor: Tensor) -> T | None:
        """What is known of a tensor's storage."""
        known = self._known.get(storage_number(tensor)) if self._known else None
        return None if known is None else known[1]

    def pop(self, tensor: Tensor) -> T | None:
        """What is known of it, from here on no more."""
        known = self._known.pop(storage_number(tensor), None) if self._known else None
        return None if known is None else known[1]

    def clear(self) -> None:
        self._known.clear()

    def _let_go(self) -> None:
        self._known = {number: each for number, each in self._known.items() if not each[0].expired()}  # type: ignore[no-untyped-call]
        self._limit = max(BATCH, 2 * len(self._known))
