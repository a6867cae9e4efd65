"""What the program does to gradients between its backward and its step: clips, unscales, measures, zeroes them.

Gradients are known by their storage. A clip function of torch that was imported by name before any patch is known by
its code object on the stack; a clip or unscale that the user wrote, by a norm that reads and a multiplication that
writes the storages. What a fused kernel of the user's own does to them is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.nn.utils import clip_grad

from precisionlint.events import Event, Grads, Named, ZeroGrad
from precisionlint.trace.host import number
from precisionlint.trace.places import frames, here
from precisionlint.trace.position import Phase
from precisionlint.trace.registry import Registry, local, storage_number
from precisionlint.trace.timeline import Timeline

CLIPS = {
    getattr(getattr(clip_grad, name), "__wrapped__", getattr(clip_grad, name)).__code__: (name, threshold)
    for name, threshold in (
        ("clip_grad_norm_", "max_norm"),
        ("clip_grad_value_", "clip_value"),
        ("_clip_grads_with_norm_", "max_norm"),
        ("_get_total_norm", ""),
    )
}
"""Code of torch's clip functions -> (name, the argument that is the threshold; none: it only measures)."""
NORMS = frozenset({"linalg_vector_norm", "norm", "_foreach_norm", "linalg_norm", "std", "var", "histc"})
"""Ops whose result tells how large gradients are."""
POWERS = frozenset({"pow", "square"})
"""With those, what a penalty takes of gradients that it was given."""
SCALINGS = frozenset({"mul_", "div_", "_foreach_mul_", "_foreach_div_"})
CLAMPS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"})
ZEROS = frozenset({"zero_", "_foreach_zero_"})


class Gradients:
    """The gradients of one window."""

    def __init__(self, registry: Registry, timeline: Timeline) -> None:
        self.registry = registry
        self.timeline = timeline
        self.tested = False
        """Whether the program has brought a number to the host since the last step, as a test for finite gradients
        does.
        """
        self.scale_was_read = False
        """Whether the program has asked for the scale since the last step: what it does by hand may carry it then."""
        self._clip: FrameType | None = None
        self._normed: list[Event] = []
        """The readings of gradient norms since the last step."""
        self._clipped = False
        self._storages: dict[int, torch.Tensor] = {}
        self._taken: dict[int, tuple[torch.Tensor, Named]] = {}
        """Storage of a gradient that ``torch.autograd.grad`` gave out -> it, and whose scale it carries."""
        self._read: list[Event] = []
        """The readings of those since the last step."""

    def changed(self) -> None:
        """Other tensors may be gradients from here on."""
        self._storages.clear()

    def take(self, gradients: Iterable[Any], scaler: Named) -> None:
        """``torch.autograd.grad`` gave out gradients of a scaled loss."""
        self._taken.update((storage_number(local(each)), (each, scaler)) for each in tensors(gradients))

    def scale_read(self) -> None:
        """The program asked for the scale: what it read of scaled gradients may be divided by it."""
        self.scale_was_read = True
        self.timeline.events = [each for each in self.timeline.events if not any(each is other for other in self._read)]
        self._read = []

    def stepped(self) -> None:
        """A step has used them."""
        self._taken.clear()
        self._read = []
        self._clip = None
        self._normed = []
        self._clipped = self.tested = self.scale_was_read = False

    def stand(self) -> bool:
        """Whether any trained weight has a gradient."""
        return any(parameter.grad is not None for parameter in self.registry.trained())

    def touched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Phase | None:
        """The phase of an op outside modules, backward and optimizer that reads or writes gradients; emits what it
        does to them.
        """
        name = func._overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.tested = True
        if self._taken and (name in NORMS or name in POWERS or name in SCALINGS):
            self._penalised(name, args)
        if name not in NORMS and name not in SCALINGS and name not in CLAMPS and name not in ZEROS:
            return "clip" if self._clip is not None and self._clip_frame() is self._clip else None
        self._find()
        touched = [self._storages.get(storage_number(each)) for each in tensors(args[:1])]
        weights = self.registry.weights(each for each in touched if each is not None)
        if not weights:
            return "clip" if self._clip is not None and self._clip_frame() is self._clip else None
        frame = self._clip_frame()
        if frame is not None:
            if frame is not self._clip:
                self._clip = frame
                self._emit_clip(frame, weights)
            return "clip"
        return self._by_hand(name, args, weights)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares its storage with a gradient that stands."""
        self._find()
        return storage_number(tensor) in self._storages

    def _find(self) -> None:
        if not self._storages:
            for parameter in self.registry.trained():
                if parameter.grad is not None:
                    self._storages[storage_number(local(parameter.grad))] = parameter

    def _penalised(self, name: str, args: tuple[Any, ...]) -> None:
        """A gradient that was given out is read, or scaled in place."""
        for each in tensors(args[:1]):
            found = self._taken.pop(storage_number(local(each)), None)
            if found is not None and name not in SCALINGS and not self.scale_was_read:
                self._grads(Grads(here(), (), None, "read", f"'{name}'", "scale", found[1]))
                self._read.append(self.timeline.events[-1])

    def _clip_frame(self) -> FrameType | None:
        """The outermost of torch's own clip functions that is running."""
        found = None
        for each in frames(sys._getframe(1)):
            if each.f_code in CLIPS:
                found = each
        return found

    def _emit_clip(self, frame: FrameType, touched: Any) -> None:
        name, argument = CLIPS[frame.f_code]
        variables = frame.f_locals
        parameters = variables.get("parameters")
        weights = (
            self.registry.weights(tensors([parameters])) if isinstance(parameters, list | torch.Tensor) else touched
        )
        threshold = number(variables.get(argument)) if argument else None
        if threshold is None or threshold == float("inf"):
            self.timeline.emit(Grads(here(), (), weights, "read", name.lstrip("_")))
            return
        factor = "scale" if self._carries_scale(threshold) else ""
        self.timeline.emit(Grads(here(), (), weights, "clip", name.lstrip("_"), factor))

    def _carries_scale(self, threshold: float) -> bool:
        """Whether a threshold was multiplied by a scale: no true gradient norm is clipped at hundreds."""
        scales = [scale for scaler, _ in self.registry.scalers.values() if (scale := scale_of(scaler)) is not None]
        return any(threshold >= max(100.0, 0.01 * scale) for scale in scales)

    def _by_hand(self, name: str, args: tuple[Any, ...], weights: Any) -> Phase | None:
        if name in ZEROS:
            self.timeline.emit(ZeroGrad(here(), (), weights, None))
            return None
        if name in NORMS and self.scale_was_read:
            return "clip"
        if name in NORMS:
            self._grads(Grads(here(), (), weights, "read", f"'{name}'"))
            self._normed.append(self.timeline.events[-1])
            return "clip"
        carries = "scale" if self.scale_was_read else ""
        if name in CLAMPS:
            self._grads(Grads(here(), (), weights, "clip", f"'{name}'", carries))
            return "clip"
        factor = number(args[1]) if len(args) > 1 else None
        if factor is not None and "div" in name:
            factor = 1.0 / factor if factor else None
        for scaler, named in self.registry.scalers.values():
            scale = scale_of(scaler)
            if factor is not None and scale is not None and factor * scale == 1.0 and factor != 1.0:
                self._grads(Grads(here(), (), weights, "mul", f"'{name}'", "1/scale", named))
                return "unscale"
        if self._normed:
            self.timeline.events = [each for each in self.timeline.events if each not in self._normed]
            self._normed = []  # the norm was read to clip by it: one fault, not two
            self._clipped = True
        if self._clipped:
            self._grads(Grads(here(), (), weights, "clip", f"'{name}'", carries))
            return "clip"
        self._grads(Grads(here(), (), weights, "mul", f"'{name}'", "other"))
        return None

    def _grads(self, event: Grads) -> None:
        """Emits it, one event for a loop over gradients."""
        last = self.timeline.events[-1]
        if isinstance(last, Grads) and (last.at, last.how, last.api, last.factor) == (
            event.at,
            event.how,
            event.api,
            event.factor,
        ):
            weights = None if last.weights is None or event.weights is None else last.weights | event.weights
            self.timeline.events[-1] = Grads(event.at, (), weights, event.how, event.api, event.factor, event.scaler)
            return
        self.timeline.emit(event)


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values and the lists among them, however deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


def scale_of(scaler: Any) -> float | None:
    """A scaler's present scale; None before its first use, for one that is disabled, and where it cannot be read."""
    return number(getattr(scaler, "_scale", None))
