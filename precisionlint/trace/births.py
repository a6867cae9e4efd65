"""Where optimizers and scalers were made, where weights took a half dtype, and which regions and scalers are off since
the machine lacks their device, for as long as someone watches.

What was made before the watch began has no place; a finding then stands where the step met it.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler

from precisionlint.findings import Place
from precisionlint.trace.patches import Patches
from precisionlint.trace.places import here, of_program

HALF = (torch.float16, torch.bfloat16)
SIGNATURES = {cls: inspect.signature(cls.__init__) for cls in (GradScaler, autocast)}
"""Of the constructors as torch has them, before anyone patched them."""


class Births:
    """Objects and their places; it keeps none of them alive."""

    def __init__(self) -> None:
        self._places: dict[int, tuple[weakref.ref[Any], Place]] = {}
        self.absent: dict[str, Place | None] = {}
        """Device that this machine lacks -> where a region or a scaler was made for it, and is off for that alone."""
        self._applying = False
        self._optimizers: list[weakref.ref[Any]] = []

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those that were made and are alive."""
        return [made for each in self._optimizers if (made := each()) is not None]

    def install(self, patches: Patches) -> None:
        """Begins to watch."""
        patches.replace(torch.optim.Optimizer, "__init__", self._made)
        patches.replace(GradScaler, "__init__", self._for_device)
        patches.replace(autocast, "__init__", self._for_device)
        patches.replace(nn.Module, "_apply", self._apply)

    def place(self, thing: Any) -> Place | None:
        """Where it was made, or took its dtype."""
        known = self._places.get(id(thing))
        return known[1] if known is not None and known[0]() is thing else None

    def note(self, thing: Any, place: Place | None) -> None:
        if place is not None:
            self._places[id(thing)] = (weakref.ref(thing), place)

    def learn(self, other: Births) -> None:
        """Takes over what another watch has seen."""
        self._places.update(other._places)
        self.absent.update(other.absent)

    def _made(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            place = here()
            original(made, *args, **kwargs)
            self.note(made, place)
            self._optimizers.append(weakref.ref(made))

        return __init__

    def _for_device(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A scaler, whose place is kept, or a region; either warns and is off where its device is missing."""

        def __init__(made: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            place = here() if isinstance(made, GradScaler) else None
            original(made, *args, **kwargs)
            self.note(made, place)
            signature = SIGNATURES[GradScaler if isinstance(made, GradScaler) else autocast]
            if not made._enabled and signature.bind(made, *args, **kwargs).arguments.get("enabled", True):
                device = str(getattr(made, "device", None) or getattr(made, "_device", ""))
                if not available(device):
                    self.absent.setdefault(device, place or here())

        return __init__

    def _apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``half()``, ``bfloat16()`` and ``to(dtype)`` of a module all come through here, children by recursion."""

        def _apply(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._applying:
                return original(module, *args, **kwargs)
            before = {id(each): each.dtype for each in module.parameters()}
            self._applying = True
            try:
                result = original(module, *args, **kwargs)
            finally:
                self._applying = False
            changed = [each for each in module.parameters() if before.get(id(each)) is not each.dtype]
            place = of_program() if changed else None  # transformers and Lightning have a ``to`` of their own
            for each in changed:
                if each.dtype in HALF:
                    self.note(each, place)
            return result

        return _apply


def available(device: str) -> bool:
    """Whether this machine has a device of a type."""
    module = getattr(torch, device, None)
    return device == "cpu" or bool(getattr(module, "is_available", lambda: True)())
