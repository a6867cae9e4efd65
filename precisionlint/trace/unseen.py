"""Work that passes the dispatcher by: launches of Triton kernels, and tensors that nobody was seen to write.

A tensor that an ``empty`` op made and that an op reads before any op wrote it was filled by a kernel that no dispatcher
sees (Triton, an extension, numpy), or by nothing. Both are named; what such a kernel computes is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct
from torch import Tensor

from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.storages import Storages

MAKERS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
SHAPES = frozenset({"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "expand_as"})
"""Ops that look at the shape of what they are given, and never at its values."""


class Written(Struct, frozen=True):
    """A tensor that was made at one origin and read at another, with nothing seen in between."""

    made: int
    read: int
    op: str


class Unseen:
    """The unseen writes of one window."""

    def __init__(self) -> None:
        self.written: dict[tuple[int, int], Written] = {}
        self.fresh: Storages[int] = Storages()
        """The origin that made a tensor, as long as nothing has written it."""
        self._touches: dict[int, tuple[tuple[str, str], ...]] = {}

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that makes a tensor without values."""
        if func.namespace != "aten":
            return None
        name = func._overloadpacket.__name__
        return self._made if name in MAKERS else None

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        if isinstance(out, Tensor) and out.numel() and out.is_floating_point():  # DDP fills counters by their pointer
            self.fresh.put(out, call.origin)

    def launched(self, tensors: Iterable[Tensor]) -> None:
        """A kernel that is known took these tensors, and may have written them."""
        for each in tensors:
            self.fresh.pop(each)

    def ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], origin: Callable[[], int]) -> None:
        """Looks at what an op is about to read and write; called only while there is something fresh."""
        name = func._overloadpacket.__name__
        if name in MAKERS or name in SHAPES:
            return
        for value, kind in self._arguments(func, args, kwargs):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor) and kind != "view":
                    made = self.fresh.pop(tensor)
                    if made is not None and kind == "read":
                        here = origin()
                        self.written.setdefault((made, here), Written(made, here, name))

    def _arguments(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[tuple[Any, str]]:
        """Each argument, and whether the op reads it, writes it, or returns a view of it. Ops that are not torch's own
        may write whatever they take.
        """
        kinds = self._touches.get(id(func))
        if kinds is None:
            kinds = self._touches[id(func)] = tuple((each.name, _kind(func, each)) for each in func._schema.arguments)
        names = dict(kinds)
        yield from ((value, kind) for value, (_, kind) in zip(args, kinds, strict=False))
        yield from ((value, names.get(name, "write")) for name, value in kwargs.items())


def _kind(func: Any, argument: Any) -> str:
    if func.namespace != "aten" or (argument.alias_info is not None and argument.alias_info.is_write):
        return "write"
    return "read" if argument.alias_info is None else "view"
