"""What the model's state is stored in: weights, gradients, buffers, optimizer state and master weights, by dtype.

Master weights are recognised by what they hold: a wider tensor, in an optimizer's state or among parameters that no
model holds, whose cast to the dtype of a half weight equals it. Gradients are counted when the optimizer takes them,
before the program drops them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from precisionlint.audit_report import StorageRecord
from precisionlint.trace.registry import Registry, local, parameters_of

HALF = (torch.float16, torch.bfloat16)
Key = tuple[str, str]


class Storage:
    """The state of one window: gradients as they were at each optimizer's first step, the rest as it is at the end."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._gradients: dict[int, tuple[str, int]] = {}

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes the gradients that an optimizer is about to use."""
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is not None and id(parameter) not in self._gradients:
                self._gradients[id(parameter)] = (_name(gradient.dtype), size(gradient))

    def records(self) -> list[StorageRecord]:
        """One record for each kind and dtype."""
        found: dict[Key, list[int]] = {}
        for kind, dtype, bytes_, elements in self._all():
            cell = found.setdefault((kind, dtype), [0, 0, 0])
            cell[0] += 1
            cell[1] += elements
            cell[2] += bytes_
        return [StorageRecord(kind, dtype, *cell) for (kind, dtype), cell in found.items()]

    def _all(self) -> Iterator[tuple[str, str, int, int]]:
        models = list(self.registry.roots.values())
        parameters = (each for model in models for each in model.parameters())
        inside = {id(each): each for each in parameters if not is_functorch_wrapped_tensor(each)}  # of functional_call
        outside = [p for p in self.registry.trained() if id(p) not in inside]
        halves = [each for each in inside.values() if each.dtype in HALF]
        masters = {id(each) for each in outside if is_master(each, halves)}
        for parameter in (*inside.values(), *outside):
            kind = "master weights" if id(parameter) in masters else _weights(parameter)
            yield kind, _name(parameter.dtype), size(parameter), local(parameter).numel()
        for dtype, bytes_ in self._gradients.values():
            yield "gradients", dtype, bytes_, 0
        for buffer in _unique(each for model in models for each in model.buffers()):
            yield "buffers", _name(buffer.dtype), size(buffer), local(buffer).numel()
        for optimizer, _ in self.registry.optimizers.values():
            for parameter, state in optimizer.state.items():
                for name, value in _tensors(state):
                    owner = parameter if isinstance(parameter, Tensor) else None
                    kind = (
                        "master weights"
                        if owner is not None and is_master(value, [owner])
                        else f"optimizer state {name}"
                    )
                    yield kind, _name(value.dtype), size(value), local(value).numel()


def is_master(candidate: Tensor, halves: Iterable[Tensor]) -> bool:
    """Whether a tensor is the wider copy of one of these half weights."""
    return any(
        half.dtype in HALF
        and candidate.dtype.itemsize > half.dtype.itemsize
        and candidate.shape == half.shape
        and torch.equal(candidate.detach().to(half.dtype), half.detach())
        for half in halves
    )


def _weights(parameter: Tensor) -> str:
    return "weights" if parameter.requires_grad else "frozen weights"


def _tensors(state: Any) -> Iterator[tuple[str, Tensor]]:
    """An optimizer's tensors for one parameter, without counters."""
    if isinstance(state, dict):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() > 1:
                yield str(name), value


def _unique(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    return iter({id(each): each for each in tensors}.values())


def size(tensor: Tensor) -> int:
    """Bytes that a tensor's elements take on this rank."""
    return local(tensor).numel() * tensor.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
