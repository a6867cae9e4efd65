"""One window around a training step: puts the recorder and the patches in place, takes them away, and makes the report.

It changes nothing that the step computes. The few ops whose backward takes another formula under any dispatch mode are
named in the report where they ran.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import _disable_current_modes

from precisionlint import catalogue, policy
from precisionlint.audit_report import AuditReport
from precisionlint.errors import InputError
from precisionlint.events import Closed, Region
from precisionlint.findings import Place
from precisionlint.measured import settled
from precisionlint.trace import flops, ranks, recorder, settings
from precisionlint.trace.activations import Activations
from precisionlint.trace.averages import Averages
from precisionlint.trace.casts import Casts
from precisionlint.trace.collectives import Collectives
from precisionlint.trace.compiled import Compiled
from precisionlint.trace.custom import Custom
from precisionlint.trace.dataflow import Dataflow
from precisionlint.trace.host import capturing
from precisionlint.trace.norms import Norms
from precisionlint.trace.order import Order
from precisionlint.trace.patches import Patches
from precisionlint.trace.places import place, users_frame
from precisionlint.trace.position import Position
from precisionlint.trace.ranges import Ranges
from precisionlint.trace.recorder import Call, Recorder, Watcher
from precisionlint.trace.registry import Registry
from precisionlint.trace.storage import Storage
from precisionlint.trace.summary import Measures, summarize
from precisionlint.trace.sums import Sums
from precisionlint.trace.timeline import Timeline
from precisionlint.trace.underflow import Epsilon, Underflow, of_adam
from precisionlint.trace.unseen import Unseen
from precisionlint.trace.updates import Updates
from precisionlint.trace.values import Values

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None

NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
OPTIMIZER = ("param_groups", "state", "step")
SCALER = ("scale", "unscale_", "step", "update", "is_enabled")
"""What an optimizer and a scaler have, wrapped ones included."""


class Audit:
    """A window; ``report`` stands once it is closed."""

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module] | Iterable[nn.Module] | None = None,
        optimizer: Optimizers = None,
        scaler: Any = None,
        *,
        name: str | None = None,
        values: bool = False,
        table: policy.Policy | None = None,
    ) -> None:
        recorder.probe()
        self._policy = table or policy.of_project(Path.cwd())
        self.name = name or ""
        self.complete = False
        """Set by whoever knows that the window holds a whole iteration."""
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer or ())
        self._scalers = [] if scaler is None else list(scaler) if isinstance(scaler, list | tuple) else [scaler]
        for given, wanted, word in ((self._optimizers, OPTIMIZER, "optimizer"), (self._scalers, SCALER, "scaler")):
            for each in given:
                if not all(hasattr(each, name) for name in wanted):
                    raise TypeError(f"{word}: {type(each).__name__} is none; leave it out, it is met when it is used")
        self.registry = Registry()
        self.registry.add_models(model)
        self._position = Position()
        self._timeline = Timeline()
        self.order = Order(self._position, self.registry, self._timeline)
        self._recorder = Recorder(self._position, self.registry, flops.formula)
        self._recorder.on_gradients = self.order.gradients.touched
        self._recorder.watch = self._watcher
        self._casts, self._storage, self._updates = Casts(), Storage(self.registry), Updates()
        self._ranges, self._values = Ranges(), Values() if values else None
        self._flow, self._custom = (
            Dataflow(self._position),
            Custom(self._position, self._timeline.emit, self._launching),
        )
        self._norms = Norms(self._flow, lambda tensor: self._position.gradients and self.order.gradients.holds(tensor))
        self._averages, self._underflow = Averages(self._position), Underflow()
        self._sums = Sums(self._position)
        self._epsilons: dict[int, Epsilon] = {}
        self._failures: dict[str, None] = {}
        self._unseen, self._compiled = Unseen(), Compiled()
        self._collectives = Collectives(self._timeline.emit)
        self._recorder.fresh, self._recorder.on_fresh = self._unseen.fresh, self._unseen.ran
        self._activations = Activations(self.registry, self._recorder.module_of)
        self.order.outside_regions = self._outside_regions
        self.order.before_backward = self._before_backward
        self.order.before_step, self.order.after_step = self._before_step, self._after_step
        self.order.after_closure = self._measure_gradients
        self._undo = ExitStack()
        self._place = Place("", 1, 1, 1, 1)
        self._settings: dict[str, str] = {}
        self._ranks: ranks.Ranks | None = None
        self._report: AuditReport | None = None

    def _watcher(self, func: Any) -> Watcher | None:
        """Who is told of an op's calls, in turn. What goes wrong in one of them is noted and is not the program's."""
        watching = (
            self._casts,
            self._flow,
            self._norms,
            self._averages,
            self._sums,
            self._underflow,
            self._custom,
            self._collectives,
            self._unseen,
        )
        found = [each.watch(func) for each in watching]
        if self._values is not None:
            found.append(self._values.watch(func))
        watchers = [each for each in found if each is not None]
        if not watchers:
            return None

        def all_of_them(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
            if capturing():
                return
            for each in watchers:
                try:
                    each(func, args, kwargs, out, call)
                except Exception as error:
                    self._failed(f"{func} was not measured in full", error)

        return all_of_them

    @contextmanager
    def _launching(self, kernel: str, tensors: list[torch.Tensor]) -> Iterator[None]:
        """What Triton's interpreter does with torch for a launch is none of the program's."""
        self._recorder.launch("triton", kernel, tensors)
        self._unseen.launched(tensors)
        with self._unrecorded():
            yield

    def _outside_regions(self) -> None:
        self._flow.forget_copies()
        self._casts.new_region()

    def _failed(self, what: str, error: Exception) -> None:
        """Notes that the audit itself went wrong; the training goes on."""
        if isinstance(error, NO_VALUES) or "meta tensors" in str(error).lower():
            self._failures.setdefault("what hangs on values was not measured: meta and fake tensors have none")
            return
        self._failures.setdefault(f"internal error, please report it: {what}: {type(error).__name__}: {error}")

    @contextmanager
    def _measuring(self, what: str) -> Iterator[None]:
        with self._unrecorded(), _disable_current_modes():  # those of the program are not to see what is ours
            try:
                yield
            except Exception as error:
                self._failed(f"{what} not measured in full", error)

    def _before_backward(self, outputs: Iterable[Any]) -> None:
        with self._measuring("what is saved for the backward was"):
            self._activations.before_backward(outputs)

    def _before_step(self, optimizer: torch.optim.Optimizer, takes_closure: bool) -> None:
        if not takes_closure:  # else its gradients are still to come
            self._measure_gradients(optimizer)
        self._norms.stepped()
        self._averages.stepped()
        self._sums.stepped()

    def _measure_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Before the weights move: of a closure's step after each of its runs."""
        if capturing():
            return
        with self._measuring("a step was"):
            self._storage.before_step(optimizer)
            self._ranges.before_step(optimizer)
            self._updates.before_step(optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if capturing():
            return
        with self._measuring("a step was"):
            self._updates.after_step(optimizer)
            epsilon = of_adam(optimizer)
            if epsilon is not None:
                self._epsilons[id(optimizer)] = epsilon

    @contextmanager
    def _unrecorded(self) -> Iterator[None]:
        outer, self._recorder.paused = self._recorder.paused, True
        try:
            yield
        finally:
            self._recorder.paused = outer

    @property
    def report(self) -> AuditReport:
        """The report; raises RuntimeError while the window is open."""
        if self._report is None:
            raise RuntimeError("the audit's report stands once its `with` block is left")
        return self._report

    def __enter__(self) -> Audit:
        return self.open(users_frame(sys._getframe(1)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def open(self, frame: FrameType | None, regions: Sequence[tuple[Region | None, bool]] | None = None) -> Audit:
        """Begins to record; ``frame`` is the user's, in which names are looked up, ``regions`` as ``Order.snapshot``
        takes them.
        """
        if frame is not None:
            self._place = place(frame.f_code, frame.f_lasti)
        self._settings, self._ranks = settings.read(), ranks.meet()
        self.order.snapshot(self._optimizers, self._scalers, frame, regions)
        patches = Patches()
        self._undo.callback(patches.undo)
        try:
            self._custom.install(patches)
            self._compiled.install(patches)
            for handle in self.order.install(patches):
                self._undo.callback(handle.remove)
            self._undo.enter_context(self._recorder)
        except BaseException:
            self._undo.close()
            raise
        return self

    def close(self, error: BaseException | None = None) -> None:
        """Ends the recording, undoes every patch and makes the report."""
        self._undo.close()
        self.order.forget()
        self._timeline.emit(Closed(None, (), self.complete))
        held = Measures(
            self._recorder,
            self.registry,
            self._timeline,
            self.order,
            self._casts,
            self._storage,
            self._activations,
            self._updates,
            self._flow,
            self._averages,
            self._sums,
            self._underflow,
            self._epsilons,
            self._unseen,
            self._compiled,
            self._ranges,
            None if self._values is None else self._values.first,
        )
        with _disable_current_modes():
            report = summarize(
                held,
                select=catalogue.select(),
                fallback=self._place,
                name=self.name,
                before=self._settings,
                settings=settings.read(),
                table=self._policy,
                complete=self.complete,
                error="" if error is None else f"{type(error).__name__}: {error}",
            )
        report = replace(report, notes=(*report.notes, *self._failures))
        if self._ranks is not None:
            report = self._ranks.exchange(report, self._place)
        try:
            findings, suppressed = settled(report.findings)
            self._report = replace(report, findings=findings, suppressed=suppressed)
        except InputError as error:
            note = f"the project's settings were not applied: {error}"
            self._report = replace(report, notes=(*report.notes, note))
