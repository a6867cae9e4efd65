"""Lost updates: which elements of half weights stand still although the optimizer meant to move them.

What it meant comes from a twin: a copy of the optimizer with fp32 clones of weights, gradients and state, whose
undecorated step runs beside the real one. fp32 weights are not measured (an update that fp32 loses is below 6e-8 of
its weight). Optimizers that need a closure, that run it several times a step or that cannot be copied are named as not
measured.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.trace.host import has_values
from precisionlint.trace.registry import parameters_of

HALF = (torch.float16, torch.bfloat16)


class Lost(Struct, frozen=True):
    """The updates of one weight in one step: how many elements were to move, how many did not, how many moved by
    rounding up alone.
    """

    parameter: Tensor
    meant: int
    lost: int
    beyond: int
    """Elements that moved although round-to-nearest would have left them: the mark of stochastic rounding."""


class Twin(Struct):
    """What stands between an optimizer's pre- and post-hook."""

    halves: list[Tensor]
    before: list[Tensor]
    wide: list[Tensor]


class Updates:
    """The updates of one window."""

    def __init__(self) -> None:
        self.lost: list[Lost] = []
        self.unmeasured: dict[str, str] = {}
        """Optimizer's class -> why its updates were not measured."""
        self._twins: dict[int, Twin] = {}
        self._begun: set[int] = set()
        """The optimizers whose step has come to where the gradients stand."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the twin's step, where the optimizer moves half weights; of one with a closure once that has run."""
        halves = [each for each in parameters_of(optimizer) if each.dtype in HALF and each.requires_grad]
        halves = [each for each in halves if each.grad is not None and has_values(each)]
        if not halves:
            return
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            self.unmeasured[type(optimizer).__name__] = "its step needs a closure"
            return
        if id(optimizer) in self._begun:
            self._twins.pop(id(optimizer), None)
            self.unmeasured[type(optimizer).__name__] = "it runs its closure several times a step"
            return
        self._begun.add(id(optimizer))
        devices = sorted({each.device.index or 0 for each in halves if each.is_cuda})
        try:
            with torch.random.fork_rng(devices):
                wide = _step_of_twin(optimizer)
        except Exception as error:  # whatever a foreign optimizer's copy may raise
            self.unmeasured[type(optimizer).__name__] = f"its copy in fp32 raised {type(error).__name__}: {error}"
            return
        before = [each.detach().clone() for each in halves]
        self._twins[id(optimizer)] = Twin(halves, before, [wide[id(each)] for each in halves])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares what the weights did with what the twin's did."""
        self._begun.discard(id(optimizer))
        twin = self._twins.pop(id(optimizer), None)
        if twin is None:
            return
        for half, before, wide in zip(twin.halves, twin.before, twin.wide, strict=True):
            now = half.detach()
            meant = wide != before.float()
            still = now == before
            rounds_away = wide.to(half.dtype) == before
            self.lost.append(
                Lost(
                    half,
                    int(torch.count_nonzero(meant)),
                    int(torch.count_nonzero(meant & still)),
                    int(torch.count_nonzero(meant & rounds_away & ~still)),
                )
            )


def _step_of_twin(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """The fp32 weights after a step of an fp32 copy, by the ``id`` of the weight."""
    clones: dict[int, Tensor] = {}
    for parameter in parameters_of(optimizer):
        clone = _widened(parameter).requires_grad_(parameter.requires_grad)
        clone.grad = None if parameter.grad is None else _widened(parameter.grad)
        clones[id(parameter)] = clone
    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**group, "params": [clones[id(each)] for each in group["params"]]} for group in optimizer.param_groups
    ]
    twin.state = type(optimizer.state)(dict)
    for parameter, state in optimizer.state.items():
        twin.state[clones[id(parameter)]] = {
            name: _widened(value) if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in state.items()
        }
    for name in ("grad_scale", "found_inf"):  # by which a fused optimizer unscales within its step
        if hasattr(optimizer, name):
            setattr(twin, name, getattr(optimizer, name))
    vars(twin)["_warned_capturable_if_run_uncaptured"] = True  # the real one says so
    step: Callable[..., Any] = type(optimizer).step
    step = getattr(step, "__wrapped__", step)  # without the hooks
    step(twin)
    return {number: clone.detach() for number, clone in clones.items()}


def _widened(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float() if tensor.dtype in HALF else tensor.detach()
    return wide.clone() if wide is tensor or wide.data_ptr() == tensor.data_ptr() else wide
