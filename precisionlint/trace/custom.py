"""Work that autocast does not know: ops of torch.library without an autocast rule, and Triton launches, which no
dispatcher sees.

Launches are counted wherever they are; as a fault both are told only inside a region, and only when floating inputs of
different dtypes, or half ones, met them.
Extension calls through pybind are not seen.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from precisionlint.events import CustomOp, Event
from precisionlint.findings import Place
from precisionlint.trace.patches import Patches
from precisionlint.trace.places import definition, here, is_users, registration, shown_path
from precisionlint.trace.position import Position
from precisionlint.trace.recorder import Call, Watcher

BUILTIN = frozenset(
    {
        "aten",
        "prim",
        "prims",
        "rngprims",
        "profiler",
        "c10d",
        "_c10d_functional",
        "_c10d_functional_autograd",
        "inductor",
    }
    | {
        "higher_order",
        "quantized",
        "quantized_decomposed",
        "mkldnn",
        "mkl",
        "onednn",
        "fsdp",
        "_dtensor",
        "debug_mode_ops",
    }
)
"""Namespaces of torch itself."""
OPS_OF_USERS = inspect.getfile(torch.library.custom_op)
"""The file of torch from which the implementations of custom ops are called."""
TORCHS = torch.nn.Module.__init__.__code__
CASTS = (".float(", "float32", ".to(", ".type(")
"""Words by which an op's Python source casts for itself."""


class Custom:
    """The custom work of one window; each op or kernel is told once for each place."""

    def __init__(
        self,
        position: Position,
        emit: Callable[[Event], None],
        launching: Callable[[str, list[Tensor]], AbstractContextManager[None]],
    ) -> None:
        self.position = position
        self.emit = emit
        self.launching = launching
        """Entered for the time of a launch, with the kernel's name and the tensors that it takes."""
        self._told: set[tuple[Any, Any]] = set()

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that torch does not bring."""
        if func.namespace in BUILTIN:
            return None
        return self._op

    def install(self, patches: Patches) -> None:
        """Watches autograd.Functions, and Triton's launches, compiled or interpreted, where triton was imported.

        A forward under ``custom_fwd`` is torch's own code on the outside, and so is none of the user's.
        """
        patches.replace(torch.autograd.Function, "apply", self._apply)
        interpreter = sys.modules.get("triton.runtime.interpreter")
        owners = [getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", None)]
        owners.append(getattr(interpreter, "InterpretedFunction", None))
        for owner in owners:
            if owner is not None and "run" in vars(owner):
                patches.replace(owner, "run", self._launch)
        if owners[1] is not None and "run" not in vars(owners[1]):  # triton 3.4 makes one for each kernel
            patches.replace(interpreter.GridExecutor, "__call__", self._launch)  # type: ignore[union-attr]

    def _apply(self, original: Callable[..., Any]) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            region, forward = self.position.region, cls.forward
            if region is None or not is_users(getattr(forward, "__code__", TORCHS)):
                return original.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
            wide = any(isinstance(each, Tensor) and each.dtype is torch.float32 for each in args)
            self.position.functions.append(False)
            try:
                return original.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
            finally:
                was_cast = self.position.functions.pop() and wide
                if (cls, was_cast) not in self._told:
                    self._told.add((cls, was_cast))
                    made = class_definition(cls) or definition(forward.__code__)
                    self.emit(CustomOp(here(), (), cls.__name__, "function", not was_cast, region, made))

        return classmethod(apply)

    def _op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
        region = self.position.region
        if region is None or call.phase not in ("forward", "recompute") or not mixed([*args, *kwargs.values()]):
            return
        name = func.name().partition(".")[0]
        device = next((each.device.type for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), "")
        if device != region.device or (name, call.origin) in self._told:
            return
        self._told.add((name, call.origin))
        code = implementation(name)
        known = has_autocast(name, device) or (code is not None and casts_itself(code))
        place = here()
        self.emit(CustomOp(place, (), name, "op", known, region, place if code is None else registration(code)))

    def _launch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("warmup"):
                return original(kernel, *args, **kwargs)
            region, taken = self.position.region, [*args, *kwargs.values()]
            name = str(getattr(kernel, "__name__", None) or getattr(kernel.fn, "__name__", "kernel"))
            if region is not None and mixed(taken) and not inside_op():
                place = here()
                if (name, place) not in self._told:
                    self._told.add((name, place))
                    self.emit(CustomOp(place, (), name, "launch", False, region, place))
            with self.launching(name, [each for each in taken if isinstance(each, Tensor)]):
                return original(kernel, *args, **kwargs)

        return run


def mixed(values: list[Any]) -> bool:
    """Whether half tensors are among the floating ones."""
    dtypes = {each.dtype for each in values if isinstance(each, Tensor) and each.dtype.is_floating_point}
    return bool(dtypes & {torch.float16, torch.bfloat16})


def inside_op() -> bool:
    """Whether a torch.library.custom_op is at work: what it launches was judged with it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == OPS_OF_USERS:
            return True
        frame = frame.f_back
    return False


def has_autocast(name: str, device: str) -> bool:
    """Whether an op has an autocast rule for a device."""
    key = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}.get(device, "AutocastPrivateUse1")
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def implementation(name: str) -> CodeType | None:
    """The Python function behind a torch.library.custom_op; None for one that is written otherwise."""
    from torch._library.custom_ops import OPDEFS

    made = OPDEFS.get(name)
    return getattr(getattr(made, "_init_fn", None), "__code__", None)


def class_definition(cls: type) -> Place | None:
    """Where a class is defined; None where its source is not at hand."""
    try:
        lines, first = inspect.getsourcelines(cls)
    except (OSError, TypeError):
        return None
    path = shown_path(inspect.getsourcefile(cls) or "")
    for number, text in enumerate(lines, first):
        found = re.match(rf"\s*class {re.escape(cls.__name__)}\b", text)
        if found:
            return Place(path, number, found.end() + 1 - len(cls.__name__), number, found.end() + 1)
    return None


def casts_itself(code: CodeType) -> bool:
    """Whether the source of an op mentions a cast."""
    try:
        return any(word in inspect.getsource(code) for word in CASTS)
    except (OSError, TypeError):
        return False
