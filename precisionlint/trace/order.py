"""The order of a step as events: autocast, loss scaling, backward, optimizer steps. Patches of torch's own classes see
it.

What a program does to gradients in between is found in gradients.py. What a library does without torch's optimizers,
GradScaler or autograd is not seen.
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
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precisionlint.events import (
    Autocast,
    Backward,
    Grads,
    Known,
    LossScaled,
    Named,
    Opened,
    Owns,
    Region,
    ScalerMade,
    SchedulerStep,
    Step,
    Update,
    WeightsTake,
    ZeroGrad,
)
from precisionlint.findings import Place
from precisionlint.trace.gradients import Gradients, scale_of
from precisionlint.trace.host import number
from precisionlint.trace.patches import Patches, subclasses
from precisionlint.trace.places import heading, here, name_of, users_frame
from precisionlint.trace.position import Position, Section
from precisionlint.trace.registry import Registry, parameters_of
from precisionlint.trace.standing import Standing
from precisionlint.trace.timeline import Timeline


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
        self._standing_gradients = Standing(registry, timeline)
        self._stepping: list[Any] = []
        self._by_closure = False
        self._outermost: set[int] = set()
        self._scaling: set[tuple[int, str]] = set()
        self.collapsed: dict[Place, tuple[Named, float]] = {}
        """Where a scaler's scale fell further below 1, and to what."""
        self._scaled: list[tuple[Any, Named, Any]] = []
        self.gradients = Gradients(registry, timeline)
        self.before_step: Callable[[torch.optim.Optimizer, bool], None] = lambda optimizer, takes_closure: None
        """Called with each optimizer that is about to step, nested ones included, and whether its step was given a
        closure.
        """
        self.outside_regions: Callable[[], None] = lambda: None
        """Called when the outermost autocast context is left, where autocast drops its cache."""
        self.after_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self.after_closure: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        """Called each time that the closure of an optimizer's step has returned."""
        self.before_backward: Callable[[Iterable[Any]], None] = lambda outputs: None
        """Called with the outputs of each outermost backward, those of ``torch.autograd.grad`` included."""

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
        self.timeline.stood(Opened(None, (), complete=False, regions=standing, measured=True))
        for region, earlier in regions:
            if not earlier:
                at = None if region is None else region.at
                self.timeline.emit(Autocast(at, (), region, region is not None, True))
        for optimizer in optimizers:
            self._optimizer(optimizer, frame)
        for scaler in scalers:
            self._scaler(scaler, frame)
        if self._standing_gradients.found(self.registry.trained()):
            self.position.gradients = True
            for optimizer, _ in list(self.registry.optimizers.values()):
                for scaler, _ in list(self.registry.scalers.values()):
                    if stage_of(scaler, optimizer) != "READY":
                        self._divides(scaler, optimizer)

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
        for cls in (LRScheduler, *subclasses(LRScheduler)):
            if "step" in vars(cls):
                patches.replace(cls, "step", self._schedule)
        return [register_optimizer_step_pre_hook(self._pre_step), register_optimizer_step_post_hook(self._post_step)]

    # -- modules and regions

    def _module_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        stack, registry = self.position.modules, self.registry

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if torch.compiler.is_compiling():  # nothing of ours goes into the graph
                return original(module, *args, **kwargs)
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
            place = heading()
            region = Region(context.device, dtype, bool(context._cache_enabled), at=place) if enabled else None
            self.position.regions.append(region)
            if not self._recomputes:
                self.timeline.emit(Autocast(place, (), region, enabled, True))
            return result

        return __enter__

    def _exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(context: Any, *error: Any) -> Any:  # noqa: N807
            self._leave()
            return original(context, *error)

        return __exit__

    def _leave(self, standing: bool = False) -> None:
        regions = self.position.regions
        region = regions.pop() if regions else None
        if region is not None and torch.is_grad_enabled():
            self.position.last_region = region
        if region is self.position.spanning:
            self.position.spanning = None
        place = region.at if standing and region is not None else here()  # a `with` is left on its first line
        if not self._recomputes:
            self.timeline.emit(Autocast(place, (), region, region is not None, False))
        self._standing = min(self._standing, len(regions))
        if not regions:
            self.outside_regions()

    @property
    def _recomputes(self) -> bool:
        """Whether a backward runs: the regions that it enters, a checkpoint's above all, are those of its forward."""
        return len(self.position.bases) > 1

    def _leave_standing(self) -> None:
        """Leaves the regions from before the window that torch says are over (of one that is disabled, nobody can
        say).
        """
        regions = self.position.regions
        while regions and len(regions) == self._standing:
            region = regions[-1]
            if region is not None and torch.is_autocast_enabled(region.device):
                return
            self._leave(standing=True)

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
                    named, whose = self._divides(scaler, optimizer)
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
                    named, whose = self._divides(scaler, optimizer)
                    self.timeline.emit(Step(here(), (), whose, named))
                    self._stepped(optimizer)
                return original(scaler, optimizer, *args, **kwargs)

        return step

    def _divides(self, scaler: Any, optimizer: Any) -> tuple[Named, Named]:
        """A scaler divides an optimizer's gradients, or did so before the window; the names of both."""
        named, whose = self._scaler(scaler), self._optimizer(optimizer)
        stage = stage_of(scaler, optimizer)
        self._standing_gradients.divides(named, whose, parameters_of(optimizer), stage)
        return named, whose

    def _update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def update(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._once(scaler, "update") as first, self._in("update"):
                before = scale_of(scaler)
                result = original(scaler, *args, **kwargs)
                if first and scaler.is_enabled():
                    named, place, after = self._scaler(scaler), here(), scale_of(scaler)
                    self.timeline.emit(Update(place, (), named))
                    if place is not None and before is not None and after is not None and after < min(before, 1.0):
                        self.collapsed[place] = (named, after)
                return result

        return update

    def _get_scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_scale(scaler: Any) -> Any:
            self.gradients.scale_read()
            return original(scaler)

        return get_scale

    def within(self, owner: Any, name: str) -> bool:
        """Whether a method of a scaler runs that came through the window's own patch."""
        return (id(owner), name) in self._scaling

    @contextmanager
    def _once(self, owner: Any, name: str) -> Iterator[bool]:
        """Whether this is the outermost call of a method that a subclass may hand on to its parent."""
        key = (id(owner), name)
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
            position, accumulates = self.position, bool(kwargs.get("accumulate_grad"))
            scale, scaled_at = None, None
            if torch._C._current_autograd_node() is None:
                self.before_backward(outputs)
                scale, scaled_at = self._scale_of(outputs)
                if accumulates:
                    self._before_backward(scale, scaled_at)
            position.bases.append(len(position.modules))
            section, position.section = position.section, ""
            try:
                taken = original(outputs, *args, **kwargs)
                if not accumulates and scale is not None and scale.value is not None:
                    self.gradients.take(taken, scale.value)
                    position.taken = True
                return taken
            finally:
                position.bases.pop()
                position.section = section
                if accumulates:
                    position.gradients = True
                    self.gradients.changed()

        return _engine_run_backward

    def _before_backward(self, scale: Known[Named | None], scaled_at: Any) -> None:
        if self.position.gradients and not self.gradients.stand():
            self.timeline.emit(ZeroGrad(None, (), None, None))  # set to None without any call
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
        self.gradients.changed()

    # -- gradients

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            live, self.position.gradients = self.position.gradients, False
            result = original(owner, *args, **kwargs)
            self.gradients.changed()
            if isinstance(owner, nn.Module):
                self.timeline.emit(ZeroGrad(here(), (), self.registry.weights(owner.parameters()), None))
            else:
                named = self._optimizer(owner)
                self.timeline.emit(ZeroGrad(here(), (), self.registry.weights(parameters_of(owner)), named))
            self.position.gradients = live and self.gradients.stand()
            return result

        return zero_grad

    # -- optimizers and scalers

    def _schedule(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            with self._once(self, "schedule") as first:  # one that holds others steps them
                if first:
                    name = name_of(scheduler, users_frame(sys._getframe(1))) or type(scheduler).__name__
                    self.timeline.emit(SchedulerStep(here(), (), Named(id(scheduler), name), guarded=False))
                return original(scheduler, *args, **kwargs)

        return step

    def _pre_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if optimizer in self._stepping:  # its last step raised
            del self._stepping[self._stepping.index(optimizer) :]
        wrapped = with_closure(args, kwargs, lambda closure: self._outside(closure, optimizer))
        takes_closure = wrapped is not None
        if not self._stepping:
            self._optimizer(optimizer)
            self._by_closure = takes_closure
            if not takes_closure:
                self._step_itself(optimizer)
        self._stepping.append(optimizer)
        self.before_step(optimizer, takes_closure)
        self.position.section = "optimizer"
        return wrapped

    def _outside(self, closure: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        """The closure of a step, which runs a forward and a backward of its own."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.in_closure(optimizer):
                return closure(*args, **kwargs)

        return run

    @contextmanager
    def in_closure(self, optimizer: Any) -> Iterator[None]:
        """A step's closure runs."""
        with self._in(""):
            yield
        self.after_closure(optimizer)

    def opened_in_closure(self, optimizer: Any) -> None:
        """The window was opened while a closure ran of an optimizer's step, which no hook of ours has seen begin."""
        self._optimizer(optimizer)
        self._by_closure = True
        self._stepping.append(optimizer)
        self.before_step(optimizer, True)

    def closure_left(self, optimizer: Any) -> None:
        """That closure has returned."""
        self.position.section = "optimizer"
        self.after_closure(optimizer)

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
            self.timeline.emit(Step(here(), (), self._optimizer(optimizer), None, guarded=self.gradients.tested))
            self._stepped(optimizer)

    def _stepped(self, optimizer: Any) -> None:
        self.steps += 1
        self._outermost.add(id(optimizer))
        self._stepped_over()

    def _stepped_over(self) -> None:
        self.position.last_region = None
        self._scaled.clear()
        self.gradients.stepped()
        self.position.taken = False

    def _optimizer(self, optimizer: torch.optim.Optimizer, frame: FrameType | None = None) -> Named:
        named, new = self.registry.optimizer(optimizer, frame or users_frame(sys._getframe(1)))
        if new:
            parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
            for dtype in {each.dtype for each in parameters if each.dtype in (torch.float16, torch.bfloat16)}:
                halves = [each for each in parameters if each.dtype is dtype]
                weights = self.registry.weights(halves)
                name = str(dtype).removeprefix("torch.")
                took = self.registry.births.place(halves[0])
                self.timeline.stood(WeightsTake(took, (), weights, name, f"they stand in {name}"))
            cls = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            plain = cls.startswith("torch.optim.")
            if plain:
                cls = f"torch.optim.{type(optimizer).__name__}"
            rate = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
            rate = number(rate)
            weights = self.registry.weights(parameters)
            made = self.registry.births.place(optimizer)
            first = optimizer.param_groups[0] if optimizer.param_groups else {}
            settings = tuple(
                (name, first[name]) for name in ("eps", "fused") if isinstance(first.get(name), float | bool)
            )
            self.timeline.stood(Owns(made, (), named, weights, cls, rate, False if plain else None, settings))
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
            self.timeline.stood(ScalerMade(made, (), named, cls, Known(bool(scaler.is_enabled())), settings))
        return named


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's step (itself first) with its closure wrapped; None where it is given none."""

    def wrapped(value: Any) -> Any:
        return wrap(value) if callable(value) and not isinstance(value, type) else value

    changed = (args[0], *map(wrapped, args[1:])), {name: wrapped(value) for name, value in kwargs.items()}
    same = all(a is b for a, b in zip(changed[0], args, strict=True)) and all(
        value is kwargs[name] for name, value in changed[1].items()
    )
    return None if same else changed


def stage_of(scaler: Any, optimizer: torch.optim.Optimizer) -> str:
    """How far a scaler has come with an optimizer since its last update: ``READY``, ``UNSCALED`` or ``STEPPED``."""
    states = getattr(scaler, "_per_optimizer_states", {}) if scaler.is_enabled() else {}
    return str(getattr(states.get(id(optimizer), {}).get("stage"), "name", "READY"))


def regions_in_force() -> list[Region]:
    """The autocast regions that torch says are in force; where they were entered is not known."""
    return [
        Region(device, str(torch.get_autocast_dtype(device)).removeprefix("torch."), torch.is_autocast_cache_enabled())
        for device in ("cuda", "cpu")
        if torch.is_autocast_enabled(device)
    ]
