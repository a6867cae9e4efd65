"""Which regions of a step torch.compile runs, and which CUDA graphs are replayed. Inside the former a dispatch mode sees
only what is left to libraries, of the latter nothing, so they are to be named.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from precisionlint.findings import Place
from precisionlint.trace.patches import Patches
from precisionlint.trace.places import here, is_users

EVAL_FRAME = "torch._dynamo.eval_frame"
"""The module whose ``_callback_from_stance`` every call of something compiled asks what to do."""


class Compiled:
    """The compiled regions that one window met. Older torch (2.8) may run one uncompiled, and seen, without a word."""

    def __init__(self) -> None:
        self.regions: dict[tuple[str, Place | None], int] = {}
        """What was called and where, and how often it ran compiled."""
        self.eager: dict[tuple[str, Place | None], int] = {}
        """The same of those that a stance let run uncompiled."""
        self.replays: dict[Place | None, int] = {}
        """Where CUDA graphs were replayed, and how often."""
        self._patched = False

    def install(self, patches: Patches) -> None:
        """Begins to watch, also what is compiled for the first time within the window."""
        self._patches = patches
        self._watch()
        patches.replace(torch.cuda.CUDAGraph, "replay", self._replay)
        if not self._patched:
            patches.replace(torch, "compile", self._compile)

    def _watch(self) -> None:
        module = sys.modules.get(EVAL_FRAME)
        if module is not None and not self._patched:
            self._patched = True
            self._patches.replace(module, "_callback_from_stance", self._called)

    def _compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def compile(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            self._watch()
            return made

        return compile

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def replay(graph: Any) -> Any:
            at = here()
            self.replays[at] = self.replays.get(at, 0) + 1
            return original(graph)

        return replay

    def _called(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _callback_from_stance(callback: Any) -> Any:
            decided = original(callback)
            if callback is not None:
                met = self.eager if decided is None else self.regions
                key = (name_of(sys._getframe(1).f_locals.get("fn")), here())
                met[key] = met.get(key, 0) + 1
            return decided

        return _callback_from_stance


def name_of(compiled: Any) -> str:
    """``GPT`` for a module's call, ``AdamW.step`` for another method, ``step`` for a function."""
    code = getattr(compiled, "__code__", None)
    while code is not None and not is_users(code) and "fn" in code.co_freevars:  # dynamo's own wrapper
        compiled = compiled.__closure__[code.co_freevars.index("fn")].cell_contents
        code = getattr(compiled, "__code__", None)
    if isinstance(compiled, torch.nn.Module):
        return type(compiled).__name__
    owner = getattr(compiled, "__self__", None)
    name = str(getattr(compiled, "__name__", None) or "a region")
    if owner is None:
        return name
    cls = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    of_module = isinstance(owner, torch.nn.Module) and (name == "forward" or name.endswith(("__call__", "_call_impl")))
    return cls if of_module else f"{cls}.{name}"
