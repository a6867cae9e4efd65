"""Runs a script unchanged as ``__main__`` and puts a window around one iteration of its training.

An iteration begins at the first forward or backward after an outermost optimizer's step (one that a scaler skipped
counts), be it within the closure of the next one, and ends at the first forward or backward after the same optimizer's
next step; so scaler updates, EMA and schedulers after the step are inside. An optimizer that steps for the first time
within the window moves the iteration's end: the window starts anew after its step. So it does where one that was made
steps for the first time later (several steps of a critic to one of the generator), for which the script goes on a while.

What it does not see: steps in other processes, and training without torch.optim.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, TypeVar

import torch
from msgspec import Struct
from msgspec.structs import fields, replace
from torch import nn
from torch.amp.autocast_mode import autocast
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from precisionlint import policy
from precisionlint.audit_report import AuditReport
from precisionlint.events import Region
from precisionlint.findings import Place
from precisionlint.trace import configuration
from precisionlint.trace.births import Births
from precisionlint.trace.order import with_closure
from precisionlint.trace.patches import Patches, subclasses
from precisionlint.trace.places import INSTALLED, heading, shown_path, users_frame
from precisionlint.trace.recorder import probe
from precisionlint.trace.window import Audit

T = TypeVar("T")
Names = Callable[[str], Iterable[str]]
"""The names in a file whose values tell one configuration of the program from another."""


PATIENCE = 20
"""For how many iterations the script goes on after the audited one where an optimizer was made that has not stepped."""


class Stopped(BaseException):
    """Ends the script once its step was audited."""


class Outcome(Struct, frozen=True):
    """What became of the script. ``report`` is None where its step never came; ``ended`` says how it ended, ``failed``
    whether badly.
    """

    report: AuditReport | None
    steps: int
    backwards: int
    """How many backward passes ran (those of double backward included)."""
    ended: str
    failed: bool
    configuration: Mapping[str, Any]
    """Of the names that were asked about, those with a plain value where the window was opened or the optimizer stepped."""
    cuda: bool
    """Whether the machine has CUDA."""
    files: tuple[str, ...]
    """The project's own Python files that the script had loaded in the end: those below its folder or the current one."""


class Watch:
    """Counts the steps of a script and opens and closes the window."""

    def __init__(self, name: str, step: int, keep_running: bool, values: bool, names: Names) -> None:
        self.names = names
        self.roots: tuple[str, ...] = ()
        """The folders whose files are the project's own."""
        self._asked: dict[str, Iterable[str]] = {}
        self.configuration: dict[str, Any] = {}
        self.values = values
        self.policy = policy.of_project(Path.cwd())  # before the script, which may go elsewhere
        self.name = name
        self.step = step
        self.keep_running = keep_running
        self.steps: dict[int, int] = {}
        """Outermost optimizer (by ``id``) -> how often it has stepped."""
        self.folder = ""
        """The working directory when the window was closed, from which its paths count."""
        self.audit: Audit | None = None
        self.report: AuditReport | None = None
        self.regions: list[tuple[Region | None, int]] = []
        """The autocast contexts entered, each with the number of steps before it."""
        self.births = Births()
        self._scalers: dict[int, Any] = {}
        self._alive: dict[int, Any] = {}
        self._stepping: list[Any] = []
        self.backwards = 0
        self._settled = False
        """Whether the report stands for good."""
        self._reopens = False
        """Whether an optimizer stepped for the first time after the window that there is a report of."""
        self._nested: set[int] = set()
        """The optimizers (by ``id``) that stepped, if only within the step of another."""
        self._closures = 0
        """How many closures of outermost steps run."""
        self._inside: Audit | None = None
        """The window that was opened in a closure of the step that runs."""
        self._scaler_steps = 0
        self._due = step == 1
        self._anew = False
        self._last: Any = None

    @property
    def total(self) -> int:
        """The steps of the optimizer that has stepped most."""
        return max(self.steps.values(), default=0)

    @property
    def iterations(self) -> int:
        """How many have ended: the steps of the optimizer that steps last in one."""
        return self.steps.get(id(self._last), 0)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The patches, for as long as the script runs."""
        patches = Patches()
        patches.replace(nn.Module, "__call__", self._call)
        patches.replace(torch.autograd, "_engine_run_backward", self._backward)
        patches.replace(autocast, "__enter__", self._enter)
        patches.replace(autocast, "__exit__", self._exit)
        self.births.install(patches)
        for cls in (GradScaler, *subclasses(GradScaler)):
            for name, make in (("step", self._scaler_step), ("scale", self._scale)):
                if name in vars(cls):
                    patches.replace(cls, name, make)
        hooks = [register_optimizer_step_pre_hook(self._pre), register_optimizer_step_post_hook(self._post)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            patches.undo()

    # -- what the script does

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if self._due and self._outside and not torch.compiler.is_compiling():
                self._turn()
                return nn.Module.__call__(module, *args, **kwargs)  # through the window's own patch
            return original(module, *args, **kwargs)

        return __call__

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            self.backwards += 1
            if self._due and self._outside:
                self._turn()
                return torch.autograd._engine_run_backward(*args, **kwargs)  # type: ignore[attr-defined]
            return original(*args, **kwargs)

        return _engine_run_backward

    def _enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __enter__(context: Any) -> Any:  # noqa: N807
            result = original(context)
            region = None
            if context._enabled:
                dtype = str(context.fast_dtype).removeprefix("torch.")
                region = Region(context.device, dtype, bool(context._cache_enabled), at=heading())
            self.regions.append((region, self.total))
            return result

        return __enter__

    def _exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __exit__(context: Any, *error: Any) -> Any:  # noqa: N807
            if self.regions:
                self.regions.pop()
            return original(context, *error)

        return __exit__

    def _scale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: Any, outputs: Any) -> Any:
            order = None if self.audit is None else self.audit.order
            if order is not None and not order.within(
                scaler, "scale"
            ):  # fetched before its argument's forward opened it
                return type(scaler).scale(scaler, outputs)
            return original(scaler, outputs)

        return scale

    def _scaler_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._scaler_steps += 1
            self._scalers[id(scaler)] = scaler
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaler_steps -= 1
                if not self._scaler_steps and not self._stepping:
                    self._stepped(optimizer)

        return step

    def _pre(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        if optimizer in self._stepping:  # its last step raised
            del self._stepping[self._stepping.index(optimizer) :]
        self._stepping.append(optimizer)
        self._nested.add(id(optimizer))
        if len(self._stepping) == 1:
            self._inside = None
        return with_closure(args, kwargs, self._closure) if len(self._stepping) == 1 else None

    def _closure(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """The closure of an outermost step: its forward and backward are an iteration's own."""
        optimizer = self._stepping[0]

        def run(*args: Any, **kwargs: Any) -> Any:
            self._closures += 1
            known = self._inside  # else the window's own hook has wrapped the closure, if there is a window
            try:
                with known.order.in_closure(optimizer) if known is not None else nullcontext():
                    result = closure(*args, **kwargs)
            finally:
                self._closures -= 1
            if known is None and self._inside is not None:
                self._inside.order.closure_left(optimizer)
            return result

        return run

    @property
    def _outside(self) -> bool:
        """Whether a forward or backward now is none of an optimizer's own."""
        return not self._stepping or self._closures > 0

    def _post(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if optimizer in self._stepping:
            del self._stepping[self._stepping.index(optimizer) :]
        if not self._stepping and not self._scaler_steps:
            self._stepped(optimizer)

    # -- the window

    def _stepped(self, optimizer: Any) -> None:
        new = id(optimizer) not in self.steps
        self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        self._alive[id(optimizer)] = optimizer
        if self._settled:
            return
        if self.audit is not None:  # functions that were not yet called when the window was opened
            met = configuration.values(self._asked, users_frame(sys._getframe(1)))
            self.configuration = {**met, **self.configuration}
        if new:
            self._last = optimizer  # among several optimizers, the one that steps last ends an iteration
        mine = optimizer is self._last
        self._reopens = self._reopens or (new and self.report is not None)
        if self.audit is None and self.report is not None and not self._reopens:
            self._due = not self._waits()  # nobody else has come
        elif self.audit is None:
            self._due = mine and self.steps[id(optimizer)] >= self.step - 1
        elif new and self.step > 1:
            self._due = self._anew = True
        else:
            self._due = mine and not (self.step == 1 and self._waits())

    def _waits(self) -> bool:
        """Whether optimizers were made that have not stepped yet: they may be part of an iteration, a critic's of
        several steps to one of the generator.
        """
        moved = {*self.steps, *self._nested}
        return self.total < self.step + PATIENCE and any(id(each) not in moved for each in self.births.optimizers)

    def _turn(self) -> None:
        """A forward or backward that begins or ends the window."""
        self._due = False
        if self._anew:
            self._close(None)
            self.report, self._anew = None, False
        if self.audit is None and (self.report is None or self._reopens):
            self._reopens = False
            self._open()
            return
        if self.audit is not None:
            self._inside = None
            self.audit.complete = self.audit.order.optimizers == len(self.steps)
            self._close(None)
        self._settled = not self._waits()
        if self._settled and not self.keep_running:
            raise Stopped

    def _open(self) -> None:
        frame = users_frame(sys._getframe(1))
        self._asked = {path: self.names(path) for path in own_files(self.roots)}
        self.configuration = configuration.values(self._asked, frame)
        self.audit = Audit(
            None,
            self._alive.values(),
            list(self._scalers.values()),
            name=self.name,
            values=self.values,
            table=self.policy,
        )
        self.audit.registry.births.learn(self.births)
        self.audit.open(frame, [(region, before < self.total) for region, before in self.regions])
        if self._closures:
            self._inside = self.audit
            self.audit.order.opened_in_closure(self._stepping[0])

    def _close(self, error: BaseException | None) -> None:
        if self.audit is not None:
            self.audit.close(error)
            self.report, self.audit = self.audit.report, None
            self.folder = os.getcwd()

    def finish(self, error: BaseException | None) -> None:
        """The script has ended: what the window holds so far is the report, where it holds a step."""
        if self.audit is not None:
            reached, earlier = self.audit.order.steps > 0 or error is not None, self.report
            self._close(error)
            if not reached:
                self.report = earlier


def run(
    arguments: Sequence[str],
    *,
    module: bool = False,
    step: int = 2,
    keep_running: bool = False,
    values: bool = False,
    eager: bool = False,
    names: Names = lambda path: (),
) -> Outcome:
    """Runs ``arguments`` (a script's path, or a module's name, then its own arguments) and audits its ``step``-th
    iteration; of the ``names`` of each of the project's files it tells the values there; ``eager``: what it compiles runs uncompiled.

    What the script prints goes to standard error. Its exceptions are told there too and do not pass through;
    KeyboardInterrupt does.
    """
    probe()
    watch = Watch(f"{arguments[0]}, step {step}", step, keep_running, values, names)
    watch.roots = (os.getcwd(), os.getcwd() if module else os.path.dirname(os.path.abspath(arguments[0])))
    ended, failed = "", False
    start = os.getcwd()
    stance = torch.compiler.set_stance("force_eager") if eager else nullcontext()
    with _as_main(arguments, module), _output_to_stderr(), watch.installed(), stance:
        error: BaseException | None = None
        try:
            _execute(arguments[0], module)
        except Stopped:
            ended = "stopped after the audited step"
        except SystemExit as exit_:
            failed = exit_.code not in (None, 0)
            ended = f"ended with exit code {exit_.code if isinstance(exit_.code, int) else int(failed)}"
            if isinstance(exit_.code, str):
                print(exit_.code, file=sys.stderr)
        except Exception as raised:
            error, failed = raised, True
            ended = f"raised {type(raised).__name__}: {raised}"
            traceback.print_exception(type(raised), raised, _below(raised.__traceback__))
        finally:
            watch.finish(error)
            os.chdir(start)
            files = own_files(watch.roots)
    report = watch.report
    if report is not None and watch.folder != start:
        report = rebased(report, watch.folder)
    return Outcome(
        report,
        watch.iterations,
        watch.backwards,
        ended or "ended by itself",
        failed,
        watch.configuration,
        torch.cuda.is_available(),
        files,
    )


def own_files(roots: Iterable[str]) -> tuple[str, ...]:
    """The Python files of the modules loaded that lie below one of these folders and are not installed there."""
    below = tuple(os.path.join(os.path.realpath(root), "") for root in roots)
    named = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files = (name for name in named if isinstance(name, str) and name.endswith(".py") and os.path.isabs(name))
    own = {os.path.realpath(name) for name in files if not INSTALLED.search(name)}
    return tuple(sorted(each for each in own if each.startswith(below) and os.path.isfile(each)))


def rebased(value: T, folder: str) -> T:
    """A report whose paths count from another folder, as one whose paths count from here."""
    if isinstance(value, Place):
        return replace(value, path=shown_path(os.path.normpath(os.path.join(folder, value.path))))
    if isinstance(value, tuple):
        return tuple(rebased(each, folder) for each in value)  # type: ignore[return-value]
    if isinstance(value, Struct):
        return replace(value, **{each.name: rebased(getattr(value, each.name), folder) for each in fields(value)})
    return value


def _execute(target: str, module: bool) -> None:
    if module:
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    target = os.path.abspath(target)  # as Python itself does, so that a script may go elsewhere
    code = compile(Path(target).read_bytes(), target, "exec", dont_inherit=True)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=target, __builtins__=__builtins__, __spec__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


@contextmanager
def _as_main(arguments: Sequence[str], module: bool) -> Iterator[None]:
    """``sys.argv``, ``sys.path`` and ``__main__`` as the script expects them."""
    saved = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = list(arguments)
    sys.path[0:0] = [os.getcwd() if module else str(Path(arguments[0]).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Standard output's file descriptor and Python's stream, both led to standard error."""
    sys.stdout.flush()
    python, saved = sys.stdout, os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = python
        os.dup2(saved, 1)
        os.close(saved)


def _below(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without this module's own frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
