"""What a forward keeps for its backward: bytes by module and dtype, read from the graph when a backward begins.

No hook is set, since hooks on saved tensors switch off torch's check for changes in place and make torch.func raise.
Each storage counts once and whole, as it is what memory holds; weights and single numbers are left out, casts of them are not. What a
checkpoint will recompute is not kept and not counted. Of several backward passes the one that kept most is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from precisionlint.trace.registry import Registry, local, storage_number

Key = tuple[int, torch.dtype]
"""A module's number, and the dtype of what its ops saved."""


class Activations:
    """The activations of one window."""

    def __init__(self, registry: Registry, module_of: Callable[[int], int]) -> None:
        self.registry = registry
        self.kept: dict[Key, tuple[int, int]] = {}
        """(module, dtype) -> tensors and bytes, in the pass that kept most."""
        self.unreadable = False
        """Whether this torch does not show what a node has saved."""
        self._module_of = module_of
        self._names: dict[type, tuple[str, ...]] = {}

    def before_backward(self, outputs: Iterable[Any]) -> None:
        """Reads the graph behind the outputs of a backward that is about to run."""
        weights = {storage_number(local(each)) for each in self.registry.parameters}
        seen: set[int] = set(weights)
        kept: dict[Key, tuple[int, int]] = {}
        for node in sorted(_nodes(outputs), key=lambda node: node._sequence_nr()):  # as the forward made them
            for tensor in self._saved(node):
                number = storage_number(tensor)
                if not number or number in seen or _is_weight(tensor):
                    continue
                seen.add(number)
                size = tensor.untyped_storage().nbytes()
                if size:  # a sharded weight that was gathered and let go has none
                    key = (self._module_of(node._sequence_nr()), tensor.dtype)
                    count, total = kept.get(key, (0, 0))
                    kept[key] = (count + 1, total + size)
        if sum(size for _, size in kept.values()) > sum(size for _, size in self.kept.values()):
            self.kept = kept

    def _saved(self, node: Any) -> Iterator[Tensor]:
        """The tensors that a node holds as they are, those that a hook would have to bring back left out."""
        kind = type(node)
        names = self._names.get(kind)
        if names is None:
            names = self._names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
        for name in names:
            try:
                value = getattr(node, name)
            except RuntimeError:
                continue  # freed by an earlier backward
            for each in value if isinstance(value, list | tuple) else (value,):
                if not hasattr(each, "data"):
                    self.unreadable = self.unreadable or each is not None
                    continue
                tensor = each.data
                if isinstance(tensor, Tensor) and each.unpack_hook is None and tensor.dim():
                    yield local(tensor)


def _nodes(outputs: Iterable[Any]) -> Iterator[Any]:
    """The nodes of a graph, each once."""
    todo = [getattr(each, "grad_fn", None) or getattr(each, "node", None) for each in outputs]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            todo.extend(after for after, _ in node.next_functions)


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a leaf that is trained, or a view of one, though no model that is known holds it."""
    base = tensor if tensor._base is None else tensor._base
    return base.requires_grad and base.is_leaf
