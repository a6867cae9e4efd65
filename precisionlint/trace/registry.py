"""Who is who in a step: modules by path, parameters by name, optimizers and scalers by the name that the program gives
them.

Weights are named by their path in the model, so that a set of them can be told by its roots (``("model",)`` for a
whole one). A parameter that an optimizer was met with before its model is named below the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from precisionlint.events import Named, WeightPath, Weights
from precisionlint.trace.births import Births
from precisionlint.trace.places import name_of


class Registry:
    """The objects of one window; all are kept alive, so that an ``id`` means one object."""

    def __init__(self) -> None:
        self.roots: dict[str, nn.Module] = {}
        self.paths: list[tuple[str, str]] = [("", "")]
        """Module number -> (root, path inside it); number 0 is no module."""
        self.numbers: dict[int, int] = {}
        self.parameters: list[nn.Parameter | torch.Tensor] = []
        self.names: list[WeightPath] = []
        """A parameter's path in events. It stays, also where a model that is met later gives the parameter a label."""
        self._labels: list[tuple[str, str] | None] = []
        self.parameter_numbers: dict[int, int] = {}
        self.optimizers: dict[int, tuple[torch.optim.Optimizer, Named]] = {}
        self.scalers: dict[int, tuple[Any, Named]] = {}
        self.births = Births()
        self._kept: list[nn.Module] = []
        self._given: list[nn.Module] = []
        self._totals: dict[WeightPath, int] = {}

    # -- modules and parameters

    def add_models(self, model: nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module] | None) -> None:
        """Takes one module, several in a dict or a sequence; raises TypeError for anything else."""
        if model is None:
            return
        if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleDict):
            model = {"": model}
        elif not isinstance(model, Mapping | nn.ModuleDict):
            several = model if isinstance(model, Iterable) else [model]
            model = {str(number): each for number, each in enumerate(several)}
        for name, each in model.items():
            if not isinstance(each, nn.Module):
                raise TypeError(
                    f"model: expected a torch.nn.Module, or several in a dict or list, not {type(each).__name__}"
                )
            self.add_root(each, name)
            self._given.append(each)

    def add_root(self, module: nn.Module, name: str) -> int:
        """Names a module and all under it; what has a name keeps it. Returns the module's number."""
        base, count = name, 1
        while name in self.roots and self.roots[name] is not module:
            count += 1
            name = f"{base}#{count}"
        self.roots[name] = module
        for path, each in module.named_modules():
            if id(each) not in self.numbers:
                self.numbers[id(each)] = len(self.paths)
                self.paths.append((name, path))
                self._kept.append(each)
        for path, parameter in module.named_parameters():
            self._add_parameter(parameter, (name, *path.split(".")), (name, path))
        return self.numbers[id(module)]

    def module(self, module: nn.Module, frame: FrameType | None) -> int:
        """The number of a module that is called; an unknown one becomes a root of its own."""
        number = self.numbers.get(id(module))
        if number is None:
            number = self.add_root(module, name_of(module, frame) or type(module).__name__)
        return number

    def _add_parameter(self, parameter: torch.Tensor, path: WeightPath, label: tuple[str, str] | None) -> int:
        number = self.parameter_numbers.get(id(parameter))
        if number is None:
            number = self.parameter_numbers[id(parameter)] = len(self.parameters)
            self.parameters.append(parameter)
            self.names.append(path)
            self._labels.append(label)
            self._totals.clear()
        elif self._labels[number] is None:
            self._labels[number] = label
        return number

    def parameter(self, parameter: torch.Tensor) -> int:
        """The number of a parameter; an unknown one gets a path of its own."""
        number = self.parameter_numbers.get(id(parameter))
        return self._add_parameter(parameter, (len(self.parameters),), None) if number is None else number

    def label(self, number: int) -> str:
        """A parameter's name for people."""
        label = self._labels[number]
        return f"parameter {number}" if label is None else self.prefixed(*label)

    def module_label(self, number: int) -> str:
        """A module's path for people; empty for number 0."""
        root, path = self.paths[number]
        return self.prefixed(root, path) or (type(self._kept[number - 1]).__name__ if number else "")

    def prefixed(self, root: str, path: str) -> str:
        """A path with its root's name before it where there are several models."""
        models = [name for name, module in self.roots.items() if next(module.parameters(), None) is not None]
        if root in models and len(models) == 1:
            return path
        return ".".join(part for part in (root, path) if part)

    def weights(self, parameters: Iterable[torch.Tensor]) -> Weights:
        """Parameters as the fewest paths that cover exactly them among all that are trained."""
        numbers = {self.parameter(each) for each in parameters}
        if not self._totals:
            for number, parameter in enumerate(self.parameters):
                if parameter.requires_grad:
                    for prefix in _prefixes(self.names[number]):
                        self._totals[prefix] = self._totals.get(prefix, 0) + 1
        held: dict[WeightPath, int] = {}
        for number in numbers:
            for prefix in _prefixes(self.names[number]):
                held[prefix] = held.get(prefix, 0) + 1
        found = set()
        for number in numbers:
            prefixes = _prefixes(self.names[number])
            found.add(next((p for p in prefixes if held[p] >= self._totals.get(p, 1)), prefixes[-1]))
        return frozenset(found)

    # -- optimizers and scalers

    def optimizer(self, optimizer: torch.optim.Optimizer, frame: FrameType | None) -> tuple[Named, bool]:
        """An optimizer's name, and whether it is new."""
        known = self.optimizers.get(id(optimizer))
        if known is not None:
            return known[1], False
        named = Named(id(optimizer), name_of(optimizer, frame) or type(optimizer).__name__)
        self.optimizers[id(optimizer)] = (optimizer, named)
        for position, parameter in enumerate(parameters_of(optimizer)):
            self._add_parameter(parameter, (id(optimizer), position), None)
        return named, True

    def scaler(self, scaler: Any, frame: FrameType | None) -> tuple[Named, bool]:
        """A scaler's name, and whether it is new."""
        known = self.scalers.get(id(scaler))
        if known is not None:
            return known[1], False
        named = Named(id(scaler), name_of(scaler, frame) or type(scaler).__name__)
        self.scalers[id(scaler)] = (scaler, named)
        return named, True

    def trained(self) -> list[torch.Tensor]:
        """The parameters of all known optimizers, and those of the models that were given of which none is among them
        (their optimizer may not have been met yet); of all known models where no optimizer is known. Each once.
        """
        found = {id(p): p for optimizer, _ in self.optimizers.values() for p in parameters_of(optimizer)}
        if not found:
            return [each for each in self.parameters if each.requires_grad]
        for model in self._given:
            own = [each for each in model.parameters() if each.requires_grad]
            if not any(id(each) in found for each in own):
                found |= {id(each): each for each in own}
        return list(found.values())


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that an optimizer updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is sharded (a DTensor), else the tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return part if isinstance(part, torch.Tensor) else tensor


def storage_number(tensor: torch.Tensor) -> int:
    """What a tensor shares with its views, as a number that is its own while the storage lives; 0 without storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _prefixes(path: WeightPath) -> list[WeightPath]:
    """From the shortest down."""
    return [path[:length] for length in range(1, len(path) + 1)]
