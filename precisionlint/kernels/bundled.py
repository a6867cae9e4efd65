"""The kernels that come with precisionlint, each beside the contract that it declares.

It needs triton, and in the interpret mode it must be imported after TRITON_INTERPRET was set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, get_args

import torch
from msgspec import Struct

from precisionlint.kernels import gemm, mx, nvfp4, quantize
from precisionlint.kernels.cast import cast
from precisionlint.kernels.reference import AMAX_FLOOR, NVFP4_AMAX_FLOOR, MxRounding
from precisionlint.kernels.stochastic import stochastic_cast


class Subject(Struct, frozen=True):
    """A launcher and what it promises."""

    name: str
    launch: Callable[..., Any]
    contract: str
    options: Mapping[str, str]


FP8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def subjects() -> tuple[Subject, ...]:
    """Every bundled kernel in every configuration that is verified."""
    return (*_elementwise(), *_quantizers(), *_products())


def _elementwise() -> Iterator[Subject]:
    for to, dtype in {**FP8, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        overflow = "saturate" if to in FP8 else "special"
        yield _subject(f"cast to {to}", partial(cast, dtype=dtype), "cast", to=to, overflow=overflow)
        rounded = partial(stochastic_cast, dtype=dtype)
        yield _subject(f"stochastic_cast to {to}", rounded, "stochastic_cast", to=to)
    for shape, block in (("1x128", (1, 128)), ("128x128", (128, 128))):
        for out in ("fp32", "bf16"):
            back = partial(quantize.dequantize, block=block, out_dtype=OUT[out])
            yield _subject(f"dequantize {shape} to {out}", back, "dequantize", block=shape, out=out)


def _quantizers() -> Iterator[Subject]:
    floor = repr(AMAX_FLOOR)
    for name in ("quantize_tensor", "quantize_row", "quantize_1x128", "quantize_128x128"):
        for target, dtype in FP8.items():
            for kind in ("fp32", "power-of-two"):
                launch = partial(getattr(quantize, name), dtype=dtype, power_of_two=kind == "power-of-two")
                promised = {"format": target, "scale": kind, "quotient": "ieee", "floor": floor}
                yield _subject(f"{name} {target} {kind}", launch, name, **promised)
    for target, dtype in FP8.items():
        for rounding in get_args(MxRounding):
            launch = partial(mx.quantize_mx, dtype=dtype, rounding=rounding)
            yield _subject(f"quantize_mx {target} {rounding}", launch, "quantize_mx", format=target, rounding=rounding)
    for rounding in ("nearest", "stochastic"):
        for hadamard in ("none", "16"):
            given = [*(["signs"] if hadamard == "16" else []), *(["seed"] if rounding == "stochastic" else [])]
            promised = {"rounding": rounding, "hadamard": hadamard, "quotient": "ieee", "floor": repr(NVFP4_AMAX_FLOOR)}
            name = f"quantize_nvfp4 {rounding}{' after a Hadamard transform' if hadamard == '16' else ''}"
            yield _subject(name, _by_position(nvfp4.quantize_nvfp4, given), "quantize_nvfp4", **promised)


def _by_position(launch: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """The launcher with these keyword arguments taken by position, after the first."""

    @wraps(launch)
    def launched(x: torch.Tensor, *given: torch.Tensor) -> Any:
        return launch(x, **dict(zip(names, given, strict=True)))

    return launched


def _products() -> Iterator[Subject]:
    for name in ("gemm_blockscaled", "gemm_tensor"):
        for target, out in (("e4m3fn", "bf16"), ("e4m3fn", "fp32"), ("e4m3fn", "fp16"), ("e5m2", "bf16")):
            launch = partial(getattr(gemm, name), out_dtype=OUT[out])
            yield _subject(f"{name} {target} to {out}", launch, name, format=target, out=out)
    for target in FP8:
        yield _subject(f"gemm_mx {target} to bf16", mx.gemm_mx, "gemm_mx", format=target, out="bf16")


def _subject(name: str, launch: Callable[..., Any], contract: str, **options: str) -> Subject:
    return Subject(name, launch, contract, MappingProxyType(options))
