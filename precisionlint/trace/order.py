"""The order of a step as events: autocast, loss scaling, backward, clipping, optimizer steps. Patches see them,
gradients' storages the rest.

A clip function that was imported by name before any patch is known by its code object on the stack, a clip or unscale
that the user wrote by a norm that reads and a multiplication that writes the storages of gradients. What a library
does without torch's optimizers, GradScaler or autograd is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precisionlint.events import (
    Autocast,
    Backward,
    Event,
    Grads,
    Known,
    LossScaled,
    Named,
    Opened,
    Owns,
    Region,
    ScalerMade,
    Step,
    Update,
    WeightsTake,
    ZeroGrad,
)
from precisionlint.trace.patches import Patches
from precisionlint.trace.places import frames, here, users_frame
from precisionlint.trace.position import Phase, Position, Section
from precisionlint.trace.registry import Registry, local, parameters_of
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
SCALINGS = frozenset({"mul_", "div_", "_foreach_mul_", "_foreach_div_"})
CLAMPS = frozenset({"clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_"})
ZEROS = frozenset({"zero_", "_foreach_zero_"})


class Order:
    """What turns calls into events, for one window."""

    def __init__(self, position: Position, registry: Registry, timeline: Timeline) -> None:
        self.position = position
        self.registry = registry
        self.timeline = timeline
        self.steps = 0
        """Outermost optimizer steps that ran, those that a scaler skipped included."""
        self._standing = 0
        """How many of the regions were entered before the window: their ``__exit__`` was bound before it was patched.
        """
        self._stepping: list[Any] = []
        self._by_closure = False
        self._outermost: set[int] = set()
        self._scaling: set[tuple[int, str]] = set()
        self._scaled: list[tuple[Any, Named, Any]] = []
        self._clip: FrameType | None = None
        self._normed: list[Event] = []
        """The readings of gradient norms since the last step."""
        self._clipped = False
        self._tested = False
        """Whether the program has brought a number to the host since the gradients stood, as a test for finite ones
        does.
        """
        self._scale_was_read = False
        """Whether the program has asked for the scale since the last step: then what it does to gradients by hand may
        carry it.
        """
        self._storages: dict[int, torch.Tensor] = {}
        self.before_step: Callable[[torch.optim.Optimizer, bool], None] = lambda optimizer, takes_closure: None
        """Called with each optimizer that is about to step, nested ones included, and whether its step was given a
        closure.
        """
        self.outside_regions: Callable[[], None] = lambda: None
        """Called when the outermost autocast context is left, where autocast drops its cache."""
        self.after_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None

    @property
    def optimizers(self) -> int:
        """How many optimizers have made an outermost step."""
        return len(self._outermost)

    @property
    def scale(self) -> float | None:
        """The scale of the step's scaler as it is now; None without one that is enabled."""
        scales = [scale for scaler, _ in self.registry.scalers.values() if (scale := scale_of(scaler)) is not None]
        return scales[0] if scales else None

    # -- opening

    def snapshot(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        scalers: Iterable[Any],
        frame: FrameType | None,
        regions: Sequence[tuple[Region | None, bool]] | None = None,
    ) -> None:
        """Says what stood before the window. ``regions``: the autocast contexts entered, and of each whether an earlier
        iteration entered it; None where nobody watched, then those in force are asked of torch.
        """
        if regions is None:
            regions = [(region, True) for region in regions_in_force()]
        self.position.regions = [region for region, _ in regions]
        self._standing = len(self.position.regions)
        wide = any(each.dtype is torch.float32 for optimizer in optimizers for each in parameters_of(optimizer))
        spanning = (
            each for each, earlier in regions if earlier and each is not None and each.cache and each.at is not None
        )
        self.position.spanning = next(spanning, None) if wide else None
        standing = tuple(region for region, earlier in regions if earlier and region is not None)
        self.timeline.emit(Opened(None, (), complete=False, regions=standing))
        for region, earlier in regions:
            if not earlier:
                at = None if region is None else region.at
                self.timeline.emit(Autocast(at, (), region, region is not None, True))
        for optimizer in optimizers:
            self._optimizer(optimizer, frame)
        for scaler in scalers:
            self._scaler(scaler, frame)
        if any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self.registry.trained()):
            self.position.gradients = True
            self.timeline.emit(Backward(None, (), None, None, None))
            for optimizer, named in self.registry.optimizers.values():
                for scaler, name in self.registry.scalers.values():
                    states = getattr(scaler, "_per_optimizer_states", {})
                    if getattr(states.get(id(optimizer), {}).get("stage"), "name", "") == "UNSCALED":
                        weights = self.registry.weights(parameters_of(optimizer))
                        self.timeline.emit(Grads(None, (), weights, "unscale", "unscale_", "", name, named))

    def install(self, patches: Patches) -> list[Any]:
        """Puts the patches in place; returns the handles of hooks to remove."""
        self.registry.births.install(patches)
        patches.replace(nn.Module, "__call__", self._module_call)
        patches.replace(autocast, "__enter__", self._enter)
        patches.replace(autocast, "__exit__", self._exit)
        patches.replace(torch.autograd, "_engine_run_backward", self._backward)
        for cls in (GradScaler, *subclasses(GradScaler)):
            for name, make in (
                ("scale", self._scale),
                ("unscale_", self._unscale),
                ("step", self._scaler_step),
                ("update", self._update),
                ("get_scale", self._get_scale),
            ):
                if cls is GradScaler or name in vars(cls):
                    patches.replace(cls, name, make)
        for cls in (torch.optim.Optimizer, *subclasses(torch.optim.Optimizer), nn.Module):
            if "zero_grad" in vars(cls):
                patches.replace(cls, "zero_grad", self._zero_grad)
        return [register_optimizer_step_pre_hook(self._pre_step), register_optimizer_step_post_hook(self._post_step)]

    # -- modules and regions

    def _module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        stack, registry = self.position.modules, self.registry

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            number = registry.numbers.get(id(module))
            if number is None:
                number = registry.module(module, users_frame(sys._getframe(1)))
            stack.append(number)
            try:
                return original(module, *args, **kwargs)
            finally:
                stack.pop()

        return __call__

    def _enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __enter__(context: Any) -> Any:  # noqa: N807
            self._leave_standing()
            result = original(context)
            enabled = bool(context._enabled)
            dtype = str(context.fast_dtype).removeprefix("torch.")
            place = here()
            region = Region(context.device, dtype, bool(context._cache_enabled), at=place) if enabled else None
            self.position.regions.append(region)
            self.timeline.emit(Autocast(place, (), region, enabled, True))
            return result

        return __enter__

    def _exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(context: Any, *error: Any) -> Any:  # noqa: N807
            self._leave()
            return original(context, *error)

        return __exit__

    def _leave(self) -> None:
        regions = self.position.regions
        region = regions.pop() if regions else None
        if region is not None and torch.is_grad_enabled():
            self.position.last_region = region
        if region is self.position.spanning:
            self.position.spanning = None
        self.timeline.emit(Autocast(here(), (), region, region is not None, False))
        self._standing = min(self._standing, len(regions))
        if not regions:
            self.outside_regions()

    def _leave_standing(self) -> None:
        """Leaves the regions from before the window that torch says are over (of one that is disabled, nobody can
        say).
        """
        regions = self.position.regions
        while regions and len(regions) == self._standing:
            region = regions[-1]
            if region is not None and torch.is_autocast_enabled(region.device):
                return
            self._leave()

    # -- loss scaling

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            with self._once(scaler, "scale") as first:
                result = original(scaler, outputs)
                if first and scaler.is_enabled():
                    named = self._scaler(scaler)
                    place = here()
                    self.timeline.emit(LossScaled(place, (), named, self._loss_region()))
                    for loss in [result] if isinstance(result, torch.Tensor) else list(result):
                        if isinstance(loss, torch.Tensor) and loss.grad_fn is not None:
                            self._scaled.append((loss.grad_fn, named, (place, ())))
            return result

        return scale

    def _unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def unscale_(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            with self._once(scaler, "unscale_") as first, self._in("unscale"):
                if first and scaler.is_enabled() and (id(scaler), "step") not in self._scaling:
                    named, whose = self._scaler(scaler), self._optimizer(optimizer)
                    weights = self.registry.weights(parameters_of(optimizer))
                    self.timeline.emit(Grads(here(), (), weights, "unscale", "unscale_", "", named, whose))
                return original(scaler, optimizer, *args, **kwargs)

        return unscale_

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            with self._once(scaler, "step") as first:
                if first:
                    named, whose = self._scaler(scaler), self._optimizer(optimizer)
                    self.timeline.emit(Step(here(), (), whose, named))
                    self._stepped(optimizer)
                return original(scaler, optimizer, *args, **kwargs)

        return step

    def _update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._once(scaler, "update") as first, self._in("update"):
                result = original(scaler, *args, **kwargs)
                if first and scaler.is_enabled():
                    self.timeline.emit(Update(here(), (), self._scaler(scaler)))
                return result

        return update

    def _get_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_scale(scaler: Any) -> Any:
            self._scale_was_read = True
            return original(scaler)

        return get_scale

    @contextmanager
    def _once(self, scaler: Any, name: str) -> Iterator[bool]:
        """Whether this is the outermost call of a method that a subclass may hand on to its parent."""
        key = (id(scaler), name)
        first = key not in self._scaling
        self._scaling.add(key)
        try:
            yield first
        finally:
            if first:
                self._scaling.discard(key)

    @contextmanager
    def _in(self, section: Section) -> Iterator[None]:
        outer, self.position.section = self.position.section, section
        try:
            yield
        finally:
            self.position.section = outer

    # -- backward

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _engine_run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            position = self.position
            if torch._C._current_autograd_node() is None and kwargs.get("accumulate_grad"):
                self._before_backward(outputs)
            position.bases.append(len(position.modules))
            section, position.section = position.section, ""
            try:
                return original(outputs, *args, **kwargs)
            finally:
                position.bases.pop()
                position.section = section
                if kwargs.get("accumulate_grad"):
                    position.gradients = True
                    self._storages.clear()

        return _engine_run_backward

    def _before_backward(self, outputs: Iterable[Any]) -> None:
        if self.position.gradients and not self._gradients_stand():
            self.timeline.emit(ZeroGrad(None, (), None, None))  # set to None without any call
        scale, scaled_at = self._scale_of(outputs)
        self.timeline.emit(Backward(here(), (), scale, self._loss_region(), self.position.region, scaled_at))

    def _scale_of(self, outputs: Iterable[Any]) -> tuple[Known[Named | None], Any]:
        """Whose scale a loss carries: the scaled tensor itself, or one computed from it (later nodes of its graph
        only).
        """
        if not self._scaled:
            return Known(None), None
        earliest = min(node._sequence_nr() for node, _, _ in self._scaled)
        seen: set[Any] = set()
        todo = [
            node
            for each in outputs
            if (node := getattr(each, "grad_fn", None) or getattr(each, "node", None)) is not None
        ]
        while todo:
            node = todo.pop()
            if node in seen or node._sequence_nr() < earliest:
                continue
            seen.add(node)
            for scaled, named, at in self._scaled:
                if scaled is node:
                    return Known(named), at
            todo.extend(after for after, _ in node.next_functions if after is not None)
        return Known(None), None

    def _loss_region(self) -> Region | None:
        self._leave_standing()
        return self.position.region or self.position.last_region

    def forget(self) -> None:
        """Lets go of what the step made: frames, graphs, gradients."""
        self._stepped_over()
        self._storages.clear()

    # -- gradients

    def _gradients_stand(self) -> bool:
        return any(parameter.grad is not None for parameter in self.registry.trained())

    def touched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Phase | None:
        """The phase of an op outside modules, backward and optimizer that reads or writes gradients; emits what it
        does to them.
        """
        name = func._overloadpacket.__name__
        if name == "_local_scalar_dense":
            self._tested = True
        if name not in NORMS and name not in SCALINGS and name not in CLAMPS and name not in ZEROS:
            return "clip" if self._clip is not None and self._clip_frame() is self._clip else None
        if not self._storages:
            for parameter in self.registry.trained():
                if parameter.grad is not None:
                    self._storages[storage(local(parameter.grad))] = parameter
        touched = [self._storages.get(storage(each)) for each in tensors(args[:1])]
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
        threshold = float(variables.get(argument, "inf")) if argument else float("inf")
        if threshold == float("inf"):
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
        if name in NORMS and self._scale_was_read:
            return "clip"
        if name in NORMS:
            self._grads(Grads(here(), (), weights, "read", f"'{name}'"))
            self._normed.append(self.timeline.events[-1])
            return "clip"
        carries = "scale" if self._scale_was_read else ""
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

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            live, self.position.gradients = self.position.gradients, False
            result = original(owner, *args, **kwargs)
            self._storages.clear()
            if isinstance(owner, nn.Module):
                self.timeline.emit(ZeroGrad(here(), (), self.registry.weights(owner.parameters()), None))
            else:
                named = self._optimizer(owner)
                self.timeline.emit(ZeroGrad(here(), (), self.registry.weights(parameters_of(owner)), named))
            self.position.gradients = live and self._gradients_stand()
            return result

        return zero_grad

    # -- optimizers and scalers

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if optimizer in self._stepping:  # its last step raised
            del self._stepping[self._stepping.index(optimizer) :]
        takes_closure = any(callable(each) and not isinstance(each, type) for each in (*args[1:], *kwargs.values()))
        if not self._stepping:
            self._optimizer(optimizer)
            self._by_closure = takes_closure
            if not takes_closure:
                self._step_itself(optimizer)
        self._stepping.append(optimizer)
        self.before_step(optimizer, takes_closure)
        self.position.section = "optimizer"
        outside = self._outside
        changed = tuple(outside(each) if callable(each) and not isinstance(each, type) else each for each in args[1:])
        return (args[0], *changed), {
            name: outside(v) if name == "closure" and callable(v) else v for name, v in kwargs.items()
        }

    def _outside(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure of a step, which runs a forward and a backward of its own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._in(""):
                return closure(*args, **kwargs)

        return run

    def _post_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]
        if not self._stepping:
            self.position.section = ""
            if self._by_closure:
                self._step_itself(optimizer)  # the closure's backward came before what it moved the weights by
        self.after_step(optimizer)

    def _step_itself(self, optimizer: Any) -> None:
        """An outermost step that no scaler takes."""
        if not any(name == "step" for _, name in self._scaling):
            self.timeline.emit(Step(here(), (), self._optimizer(optimizer), None, guarded=self._tested))
            self._stepped(optimizer)

    def _stepped(self, optimizer: Any) -> None:
        self.steps += 1
        self._outermost.add(id(optimizer))
        self._stepped_over()

    def _stepped_over(self) -> None:
        self.position.last_region = None
        self._scaled.clear()
        self._clip = None
        self._normed = []
        self._clipped = False
        self._tested = False
        self._scale_was_read = False

    def _optimizer(self, optimizer: torch.optim.Optimizer, frame: FrameType | None = None) -> Named:
        named, new = self.registry.optimizer(optimizer, frame or users_frame(sys._getframe(1)))
        if new:
            parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
            for dtype in {each.dtype for each in parameters if each.dtype in (torch.float16, torch.bfloat16)}:
                halves = [each for each in parameters if each.dtype is dtype]
                weights = self.registry.weights(halves)
                name = str(dtype).removeprefix("torch.")
                took = self.registry.births.place(halves[0])
                self.timeline.emit(WeightsTake(took, (), weights, name, f"they stand in {name}"))
            cls = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            plain = cls.startswith("torch.optim.")
            if plain:
                cls = f"torch.optim.{type(optimizer).__name__}"
            rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            rate = number(rate)
            weights = self.registry.weights(parameters)
            made = self.registry.births.place(optimizer)
            fused = optimizer.param_groups[0].get("fused") if optimizer.param_groups else None
            settings = (("fused", True),) if fused else ()
            self.timeline.emit(Owns(made, (), named, weights, cls, rate, False if plain else None, settings))
        return named

    def _scaler(self, scaler: Any, frame: FrameType | None = None) -> Named:
        named, new = self.registry.scaler(scaler, frame or users_frame(sys._getframe(1)))
        if new:
            cls = f"{type(scaler).__module__}.{type(scaler).__qualname__}".replace(
                "torch.amp.grad_scaler.", "torch.amp."
            )
            names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")
            found = ((each, getattr(scaler, f"_{each}", None)) for each in names)
            settings = tuple((each, value) for each, value in found if value is not None)
            made = self.registry.births.place(scaler)
            self.timeline.emit(ScalerMade(made, (), named, cls, Known(bool(scaler.is_enabled())), settings))
        return named


def regions_in_force() -> list[Region]:
    """The autocast regions that torch says are in force; where they were entered is not known."""
    return [
        Region(device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
        for device in ("cuda", "cpu")
        if torch.is_autocast_enabled(device)
    ]


def subclasses(cls: type) -> Iterator[type]:
    """All classes below this one, each once."""
    seen: set[type] = set()
    todo = [cls]
    while todo:
        each: type
        for each in todo.pop().__subclasses__():
            if each not in seen:
                seen.add(each)
                todo.append(each)
                yield each


def storage(tensor: torch.Tensor) -> int:
    """What a tensor and its views share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor without storage
        return 0


def tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values and the lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, torch.Tensor))


def scale_of(scaler: Any) -> float | None:
    """A scaler's present scale; None before its first use, and for one that is disabled."""
    scale = getattr(scaler, "_scale", None)
    return None if scale is None else float(scale)


def number(value: Any) -> float | None:
    """A number, or the one that a tensor of one element holds."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return None
