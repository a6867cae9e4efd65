"""Runs a launcher on one input and has the result judged.

It knows how a launch can fail, and what holds for every contract: inputs stay as they were, and what a kernel leaves
unwritten is NaN, so that it is found.
"""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionlint.kernels.contracts import Contract, Options
from precisionlint.kernels.inputs import Case
from precisionlint.kernels.interpreter import OutOfBoundsError, RefusedError
from precisionlint.kernels.native import placed
from precisionlint.kernels.outcome import Tried, Violation

RAISES = "raises"
"""The clause that a launcher breaks which raises: nothing was judged."""


def try_case(
    launch: Callable[..., Any], contract: Contract, case: Case, options: Options, device: str = "cpu"
) -> Tried:
    """What came of one input; raises RefusedError where the interpreter cannot stand for a GPU with this kernel."""
    start = time.perf_counter()
    inputs = case.make()
    given = inputs if device == "cpu" else tuple(placed(each, device) for each in inputs)
    before = [_bits(each) for each in given]
    try:
        with _unwritten_is_nan():
            returned = launch(*given)
    except BaseException as error:  # sys.exit and pytest.skip among them: what a launcher raises is its result
        violations = [_failure(error, inputs)]
    else:
        outputs = returned if isinstance(returned, tuple | list) else (returned,)
        outputs = [each.cpu() if isinstance(each, Tensor) else each for each in outputs]
        violations = contract.judge(inputs, outputs, options)
        violations += [
            Violation("inputs stay as they were", f"input {position} was written to", "no change")
            for position, (old, tensor) in enumerate(zip(before, given, strict=True))
            if not torch.equal(old, _bits(tensor))
        ]
    leave_out = [*([] if case.contiguous else ["strides=contiguous"]), *([] if case.aligned else ["shapes=aligned"])]
    return Tried(case.name, tuple(violations), time.perf_counter() - start, tuple(leave_out))


def only_raises(tried: Sequence[Tried]) -> str:
    """What a launcher raised first, where it raised on every input; else empty."""
    clauses = {broken.clause for each in tried for broken in each.violations}
    if clauses != {RAISES} or not all(each.violations for each in tried):
        return ""
    return tried[0].violations[0].got


def place_of(launch: Callable[..., Any]) -> tuple[str, int]:
    """The file and line of a launcher's definition; ("", 0) where it has none."""
    function: Any = launch
    while isinstance(function, partial):
        function = function.func
    try:
        function = inspect.unwrap(function)
        return shown(inspect.getsourcefile(function) or ""), inspect.getsourcelines(function)[1]
    except (TypeError, OSError):
        return "", 0


def _bits(tensor: Tensor) -> Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().clone().view(integers[tensor.element_size()])


@contextmanager
def _unwritten_is_nan() -> Iterator[None]:
    """torch.empty gives NaN (or the largest integer): torch's own switch, torch.utils.deterministic, says so.

    The mode that warns is set by its other name: use_deterministic_algorithms imports all of torch's compiler.
    """
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _failure(error: BaseException, inputs: tuple[Tensor, ...]) -> Violation:
    """What a launch that raised amounts to; the interpreter wraps the cause once for each kernel on the way."""
    root: BaseException = error
    while root.__cause__ is not None:
        root = root.__cause__
    if isinstance(root, RefusedError):
        raise root
    if isinstance(root, NotImplementedError) and "interpreter" in str(root):
        raise RefusedError(f"{root}; use the compile mode") from error
    where = _where(root)
    text = str(root).partition("\n")[0]
    if isinstance(root, OutOfBoundsError):
        return Violation("memory", f"it {text}{where}", "its own tensors only")
    shapes = ", ".join(f"{tuple(each.shape)} {str(each.dtype).removeprefix('torch.')}" for each in inputs)
    return Violation(RAISES, f"{named(root)}{where}", f"a result for {shapes}")


def named(error: BaseException) -> str:
    """What an error is and says, in one line."""
    text = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _where(error: BaseException) -> str:
    """The innermost line of code that is neither triton's, torch's, numpy's nor the verifier's."""
    own = Path(__file__).parent / "interpreter.py"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and path not in (own, Path(__file__)) and not {"triton", "torch", "numpy"} & set(path.parts):
            return f" (at {shown(frame.filename)}:{frame.lineno})"
    return ""


def shown(path: str) -> str:
    """The path from the working directory, where it lies below it."""
    try:
        return Path(path).resolve().relative_to(Path.cwd()).as_posix()
    except ValueError:
        return path
