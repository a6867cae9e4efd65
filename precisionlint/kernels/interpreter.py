"""Makes Triton's interpreter trustworthy: exact casts, guarded memory, and a refusal where it would compute nonsense.

It knows the private parts of `triton.runtime.interpreter` that it replaces, and nothing of kernels or contracts. The
interpreter of triton 3.9 converts wrongly (ties go up and lose the carry, no saturation, NaN becomes finite, subnormals
are cut, fp32 to bf16 truncates) and does arithmetic on the raw bits of bf16 and fp8 numbers. Those of 3.6 and 3.7 have
no scaled dot besides, and keep NaN where minimum, maximum and clamp drop it. What is not modelled at all: the width of a
tensor core's accumulator, TF32's rounding of fp32 products, and `max_num_imprecise_acc`.

The process must have been started with TRITON_INTERPRET=1: triton decides when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from precisionlint.formats import BF16, E2M1, E4M3FN, E5M2, E8M0FNU, FP16, FP32, decode, encode, round_to

Array = npt.NDArray[Any]

FORMAT_OF = {"fp16": FP16, "bf16": BF16, "fp32": FP32, "fp8e4nv": E4M3FN, "fp8e5": E5M2}
"""Triton's names of the floating-point types that are converted here. fp64 is float64 itself. The others (fp8e4b15, and
the fnuz formats fp8e4b8 and fp8e5b16, whose overflow on AMD GPUs has not been established) are refused."""

SATURATING = ("fp8e4nv", "fp8e5")
"""Triton's conversions to these saturate on NVIDIA GPUs, infinities included (`cvt.rn.satfinite` in its PTX)."""

_PARTS = (
    "_convert_float",
    "_get_np_dtype",
    "_patch_lang",
    "interpreter_builder",
    "InterpreterBuilder.cast_impl",
    "InterpreterBuilder.create_masked_load",
    "InterpreterBuilder.create_masked_store",
    "InterpreterBuilder.create_atomic_rmw",
    "InterpreterBuilder.create_atomic_cas",
    "InterpreterBuilder.create_dot",
    "InterpreterBuilder.binary_op",
    "InterpreterBuilder.unary_op",
    "InterpreterBuilder.create_fma",
    "InterpreterBuilder.create_clampf",
    "InterpreterBuilder.create_minnumf",
    "InterpreterBuilder.create_maxnumf",
    "_ir.PROPAGATE_NAN.NONE",
    "GridExecutor._init_args_hst",
    "ReduceScanOpInterface.check_tensor",
    "TensorHandle",
    "interpreter_semantic.dot_scaled",
    "_ir.ScaleDotElemTypeTY.E2M1",
)


class UnsupportedTritonError(Exception):
    """This triton lacks a private part that is needed here, or its interpreter stays inexact; the text says which."""


class RefusedError(Exception):
    """The interpreter would compute something else than a GPU for this kernel; the text says what and what to do."""


class OutOfBoundsError(Exception):
    """A kernel read or wrote memory outside of every tensor that it was given."""


class _Region(Struct, frozen=True):
    start: int
    stop: int


def load_interpreter() -> ModuleType:
    """triton's interpreter module, with every private part that is used here; raises UnsupportedTritonError."""
    import triton
    from triton.runtime import interpreter

    if not triton.knobs.runtime.interpret:
        raise UnsupportedTritonError("triton was imported without TRITON_INTERPRET=1: start a new process with it")
    for part in _PARTS:
        found: Any = interpreter
        for name in part.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise UnsupportedTritonError(
                f"triton {triton.__version__}: triton.runtime.interpreter has no {part}; known to work with 3.6 to 3.9"
            )
    if _version(triton.__version__) < (3, 7) and _version(np.__version__) >= (2, 4):
        raise UnsupportedTritonError(
            f"triton {triton.__version__}'s interpreter cannot run loops with numpy {np.__version__}: "
            "install numpy below 2.4 or triton 3.7"
        )
    module: ModuleType = interpreter
    return module


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def convert(data: Array, source: str, target: str, toward_zero: bool = False) -> Array:
    """Converts an array of `source` numbers, stored as numpy stores Triton's types, into `target`, rounding once.

    `source` and `target` are Triton's names of types. The types of numpy arrays: float16, float32 and float64 for
    themselves, uint16 codes for bf16, uint8 codes for fp8. Raises RefusedError for types that are not modelled.
    """
    for name in (source, target):
        if name not in FORMAT_OF and name != "fp64":
            raise RefusedError(f"conversions of {name} are not modelled; use the compile mode")
    exact = _numbers(np.ascontiguousarray(data), source)
    if target == "fp64":
        return exact.numpy()
    rounded = round_to(
        exact,
        FORMAT_OF[target],
        mode="toward-zero" if toward_zero else "nearest-even",
        overflow="saturate" if target in SATURATING else "special",
    )
    codes = encode(rounded, FORMAT_OF[target]).numpy()
    stored = {"fp16": np.float16, "fp32": np.float32}.get(target)
    bits = codes.astype(f"uint{FORMAT_OF[target].bits}")
    return bits if stored is None else bits.view(stored)


def _numbers(data: Array, name: str) -> torch.Tensor:
    if name in ("fp64", "fp32", "fp16"):
        return torch.from_numpy(data).to(torch.float64)  # numpy would warn of signalling NaN
    return torch.from_numpy(_values_of_codes(name)[data])


@cache
def _values_of_codes(name: str) -> Array:
    """The float64 value of each code of a type of at most 16 bits."""
    values: Array = decode(torch.arange(2 ** FORMAT_OF[name].bits), FORMAT_OF[name]).numpy()
    return values


@contextmanager
def repaired(interpreter: ModuleType) -> Iterator[None]:
    """While it is open, the interpreter converts exactly, refuses arithmetic on raw bits, and guards memory.

    Raises UnsupportedTritonError where, with all that, casts in a kernel still differ from torch's on any fp16 number
    or any code of the 8-bit formats.
    """
    builder = interpreter.InterpreterBuilder
    regions: list[_Region] = []
    replaced = (
        (interpreter, "_convert_float", _exact_conversion(interpreter)),
        (interpreter, "_get_np_dtype", _found_once(interpreter._get_np_dtype)),
        (interpreter, "_patch_lang", _once_a_launch(interpreter._patch_lang)),
        (builder, "cast_impl", _exact_cast(interpreter, builder.cast_impl)),
        *((builder, name, _on_numbers(getattr(builder, name))) for name in ("binary_op", "unary_op")),
        (builder, "create_fma", _on_numbers(builder.create_fma)),
        (builder, "create_minnumf", lambda builder, a, b: builder.binary_op(a, b, np.fmin)),
        (builder, "create_maxnumf", lambda builder, a, b: builder.binary_op(a, b, np.fmax)),
        (builder, "create_clampf", _clamp(interpreter, builder.create_clampf)),
        (builder, "create_dot", _dot(interpreter, builder.create_dot)),
        (type(interpreter.interpreter_semantic), "dot_scaled", _with_formats(interpreter)),
        (builder, "create_dot_scaled", _dot_scaled(interpreter)),
        (interpreter.ReduceScanOpInterface, "check_tensor", _reduction(interpreter.ReduceScanOpInterface.check_tensor)),
        (builder, "create_masked_load", _guarded(builder.create_masked_load, "reads", regions, 1)),
        (builder, "create_masked_store", _guarded(builder.create_masked_store, "writes", regions, 2)),
        (builder, "create_atomic_rmw", _guarded(builder.create_atomic_rmw, "writes", regions, 3, pointers=1)),
        (builder, "create_atomic_cas", _guarded(builder.create_atomic_cas, "writes", regions, None)),
        (interpreter.GridExecutor, "_init_args_hst", _noting(interpreter.GridExecutor._init_args_hst, regions)),
    )
    before = [(owner, name, getattr(owner, name, None)) for owner, name, _ in replaced]
    try:
        for owner, name, replacement in replaced:
            setattr(owner, name, replacement)
        with np.errstate(all="ignore"):
            _check_casts()
            yield
    finally:
        for owner, name, original in before:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


class _Patches(Struct, frozen=True):
    """What one launch replaced in triton.language, as triton's own scope: `restore` takes it back."""

    scope: Any
    done: set[frozenset[int]]

    def restore(self) -> None:
        self.done.clear()
        self.scope.restore()


def _once_a_launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """triton's function that replaces its language by interpreted functions, once a launch for each module of it.

    triton does so again, in a millisecond, at each call from a kernel into another jitted function (tl.max is one), and
    takes back what the launch itself replaced. Here later calls find it done.
    """
    done: set[frozenset[int]] = set()

    def patch(function: Any) -> Any:
        language = frozenset(
            id(value)
            for value in function.__globals__.values()
            if isinstance(value, ModuleType) and value.__name__ in ("triton.language", "triton.language.core")
        )
        if language in done:
            return None  # of calls inside of a launch nobody takes anything back
        outermost = not done
        scope = original(function)
        done.add(language)
        return _Patches(scope, done) if outermost else scope

    return patch


def _found_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """numpy's dtype for one of triton's: triton makes its table of all of them at each operation, a tenth of its time."""
    found: dict[str, Any] = {}

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = original(scalar)
        return found[scalar.name]

    return numpy_dtype


def _exact_conversion(interpreter: ModuleType) -> Callable[..., Array]:
    def convert_float(data: Array, source: Any, target: Any, rounding_mode: Any) -> Array:
        toward_zero = rounding_mode == interpreter._ir.ROUNDING_MODE.RTZ
        converted = convert(data, source.name, target.name, toward_zero)
        # Callers expect the bits and view them as what they are.
        return converted.view(f"uint{target.primitive_bitwidth}")

    return convert_float


def _exact_cast(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def cast(builder: Any, value: Any, target: Any) -> Any:
        source, target = value.dtype.scalar, target.scalar
        raw = [each for each in (source, target) if _stored_as_bits(each)]
        if not raw:
            return original(builder, value, target)
        if source.is_floating() and target.is_floating():
            return interpreter.TensorHandle(convert(value.data, source.name, target.name), target)
        if source.is_floating():
            wide = interpreter.TensorHandle(convert(value.data, source.name, "fp64"), interpreter.tl.float64)
            return original(builder, wide, target)
        return interpreter.TensorHandle(convert(value.data.astype(np.float64), "fp64", target.name), target)

    return cast


def _stored_as_bits(dtype: Any) -> bool:
    """Whether the interpreter keeps numbers of this type as integers that hold their codes."""
    return bool(dtype.is_floating()) and dtype.name not in ("fp16", "fp32", "fp64")


def _refuse_bits(handles: tuple[Any, ...], what: str) -> None:
    for handle in handles:
        dtype = getattr(handle, "dtype", None)
        if dtype is not None and hasattr(dtype, "scalar") and _stored_as_bits(dtype.scalar):
            raise RefusedError(
                f"{what} of {dtype.scalar.name} numbers: the interpreter would use their raw bits. "
                "Convert with .to(tl.float32) first, or use the compile mode"
            )


def _on_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    def operation(builder: Any, *handles: Any) -> Any:
        _refuse_bits(handles, "arithmetic")
        return original(builder, *handles)

    return operation


def _clamp(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    """triton's clamp, which drops NaN unless it is told to propagate it, as a GPU's does: that of 3.6 and 3.7 keeps it."""
    propagating = _on_numbers(original)

    def clamp(builder: Any, value: Any, low: Any, high: Any, nan: Any) -> Any:
        if nan == interpreter._ir.PROPAGATE_NAN.NONE:
            return builder.create_minnumf(builder.create_maxnumf(value, low), high)
        return propagating(builder, value, low, high, nan)

    return clamp


def _dot(interpreter: ModuleType, original: Callable[..., Any]) -> Callable[..., Any]:
    def wide(operand: Any) -> Any:
        """fp8 and fp16 operands in fp32, which holds them: the product is the same, and numpy has a fast one for it."""
        dtype = operand.dtype.scalar
        if dtype.name == "bf16":
            _refuse_bits((operand,), "a dot")
        if dtype.name not in ("fp8e4nv", "fp8e5", "fp16"):
            return operand
        return interpreter.TensorHandle(convert(operand.data, dtype.name, "fp32"), interpreter.tl.float32)

    def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(builder, wide(a), wide(b), *rest)

    return dot


def _with_formats(interpreter: ModuleType) -> Callable[..., Any]:
    """triton's dot_scaled; in versions that interpret none it asks for compile-time constants, and is given strings."""
    original: Callable[..., Any] = type(interpreter.interpreter_semantic).dot_scaled
    if hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"):
        return original
    constant = interpreter.tl.constexpr

    def dot_scaled(
        semantic: Any, a: Any, a_scales: Any, a_format: Any, b: Any, b_scales: Any, b_format: Any, *rest: Any
    ) -> Any:
        formats = [each if isinstance(each, constant) else constant(each) for each in (a_format, b_format)]
        return original(semantic, a, a_scales, formats[0], b, b_scales, formats[1], *rest)

    return dot_scaled


def _dot_scaled(interpreter: ModuleType) -> Callable[..., Any]:
    """A dot of operands with a scale for each 32 of K (E8M0) or 16 (E4M3), summed in fp32.

    triton 3.6 and 3.7 interpret none; later ones take the scale of code 0, 2^-127, for 0, and NaN for infinity.
    """
    packed = interpreter._ir.ScaleDotElemTypeTY.E2M1

    def numbers(handle: Any, kind: Any, axis: int) -> Array:
        """The operand in float64; numbers of E2M1 lie two in a byte along an axis, the first in the low half."""
        if kind != packed:
            return convert(handle.data, handle.dtype.scalar.name, "fp64")
        last = np.moveaxis(handle.data, axis, -1)
        codes = np.stack([last & 15, last >> 4], -1).reshape(*last.shape[:-1], -1)
        return np.moveaxis(decode(torch.from_numpy(codes), E2M1).numpy(), -1, axis)

    def scaled(values: Array, scales: Any) -> Array:
        """(…, rows, K) times (…, rows, groups of K), rounded to fp32."""
        if scales is not None:
            if scales.dtype.scalar.name == "uint8":
                factors: Array = decode(torch.from_numpy(np.ascontiguousarray(scales.data)), E8M0FNU).numpy()
            else:
                factors = convert(scales.data, scales.dtype.scalar.name, "fp64")
            values = values * np.repeat(factors, values.shape[-1] // factors.shape[-1], -1)
        return values.astype(np.float32)

    def dot_scaled(
        builder: Any, a: Any, a_scales: Any, a_kind: Any, b: Any, b_scales: Any, b_kind: Any, fast: bool,
        a_along_k: bool, b_along_k: bool, total: Any,
    ) -> Any:  # fmt: skip
        left = scaled(numbers(a, a_kind, -1 if a_along_k else -2), a_scales)
        right = scaled(np.swapaxes(numbers(b, b_kind, -2 if b_along_k else -1), -1, -2), b_scales)
        product = np.matmul(left, np.swapaxes(right, -1, -2))
        return interpreter.TensorHandle(product + total.data, interpreter.tl.float32)

    return dot_scaled


def _reduction(original: Callable[..., Any]) -> Callable[..., Any]:
    def check(operation: Any, values: tuple[Any, ...]) -> None:
        original(operation, values)
        _refuse_bits(tuple(value.handle for value in values), "a reduction")

    return check


def _noting(original: Callable[..., Any], regions: list[_Region]) -> Callable[..., Any]:
    def init_args(executor: Any, args: Any, kwargs: Any) -> Any:
        hosted = original(executor, args, kwargs)
        regions[:] = sorted(_regions((*hosted[0], *hosted[1].values())), key=lambda region: region.start)
        return hosted

    return init_args


def _regions(args: tuple[Any, ...]) -> Iterator[_Region]:
    """The storages of the tensors among a launch's arguments; a descriptor's base is one."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from _regions(arg)
            continue
        tensor = getattr(arg, "base", arg) if not hasattr(arg, "untyped_storage") else arg
        if hasattr(tensor, "untyped_storage"):
            storage = tensor.untyped_storage()
            yield _Region(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _guarded(
    original: Callable[..., Any], does: str, regions: list[_Region], mask: int | None, pointers: int = 0
) -> Callable[..., Any]:
    """`original`, which gets pointers and a mask at these positions, after a look at where the pointers lead."""

    def access(builder: Any, *handles: Any) -> Any:
        addresses = handles[pointers].data
        size = max(1, handles[pointers].get_element_ty().primitive_bitwidth // 8)
        used = addresses.ravel() if mask is None else addresses[np.broadcast_to(handles[mask].data, addresses.shape)]
        stray = _stray(used, size, regions)
        if stray:
            raise OutOfBoundsError(
                f"{does} {stray} of {used.size} elements outside of the tensors that it was given, or across their end"
            )
        return original(builder, *handles)

    return access


def _stray(addresses: Array, size: int, regions: list[_Region]) -> int:
    """How many elements of `size` bytes at these addresses do not lie in one of the regions, sorted by start."""
    if not addresses.size:
        return 0
    if not regions:
        return int(addresses.size)
    starts = np.array([region.start for region in regions], dtype=np.uint64)
    stops = np.array([region.stop for region in regions], dtype=np.uint64)
    index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
    inside = (index >= 0) & (addresses + np.uint64(size) <= stops[np.maximum(index, 0)])
    return int(addresses.size - np.count_nonzero(inside))


def _check_casts() -> None:
    """Casts in a kernel against torch's, on all fp16 numbers and all codes, where no version of torch differs."""
    from precisionlint.kernels.cast import cast

    halves = torch.arange(2**16).to(torch.uint16).view(torch.float16)
    wide = halves.float()
    for target, dtype in ((E4M3FN, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2), (BF16, torch.bfloat16)):
        limit = target.maximum if target.bits == 8 else float("inf")
        _agree(cast(wide, dtype), wide.clamp(-limit, limit).to(dtype), f"fp32 to {target.name}")
        codes = torch.arange(2**target.bits).to(torch.uint8 if target.bits == 8 else torch.uint16).view(dtype)
        _agree(cast(codes, torch.float32), codes.float(), f"{target.name} to fp32")
    _agree(cast(wide, torch.float16), halves, "fp32 to fp16")
    _agree(cast(halves, torch.float32), wide, "fp16 to fp32")


def _agree(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    import triton

    a, b = ours.double(), theirs.double()
    differ = int((~((a == b) & (a.signbit() == b.signbit())) & ~(a.isnan() & b.isnan())).sum())
    if differ:
        raise UnsupportedTritonError(
            f"triton {triton.__version__}: after its repair the interpreter still converts {differ} of {a.numel()} "
            f"numbers wrongly from {what}; nothing that it computes can be judged"
        )
