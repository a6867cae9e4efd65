"""The kernels that come with precisionlint, each beside the contract that it declares.

It needs triton, and in the interpret mode it must be imported after TRITON_INTERPRET was set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from precisionlint.kernels import gemm, mx, quantize
from precisionlint.kernels.cast import cast
from precisionlint.kernels.reference import AMAX_FLOOR
from precisionlint.kernels.stochastic import stochastic_cast


@dataclass(frozen=True)
class Subject:
    """A launcher and what it promises."""

    name: str
    launch: Callable[..., Any]
    contract: str
    options: Mapping[str, str]


FP8 = {"e4m3fn": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def subjects() -> tuple[Subject, ...]:
    """Every bundled kernel in every configuration that is verified."""
    found = []
    for to, dtype in {**FP8, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        options = {"to": to, "overflow": "saturate" if to in FP8 else "special"}
        found.append(Subject(f"cast to {to}", partial(cast, dtype=dtype), "cast", MappingProxyType(options)))
        launch = partial(stochastic_cast, dtype=dtype)
        found.append(Subject(f"stochastic_cast to {to}", launch, "stochastic_cast", MappingProxyType({"to": to})))
    for name in ("quantize_tensor", "quantize_row", "quantize_1x128", "quantize_128x128"):
        for target, dtype in FP8.items():
            for kind in ("fp32", "power-of-two"):
                launch = partial(getattr(quantize, name), dtype=dtype, power_of_two=kind == "power-of-two")
                options = {"format": target, "scale": kind, "quotient": "ieee", "floor": repr(AMAX_FLOOR)}
                found.append(Subject(f"{name} {target} {kind}", launch, name, MappingProxyType(options)))
    for shape, block in (("1x128", (1, 128)), ("128x128", (128, 128))):
        for out in ("fp32", "bf16"):
            launch = partial(quantize.dequantize, block=block, out_dtype=OUT[out])
            options = {"block": shape, "out": out}
            found.append(Subject(f"dequantize {shape} to {out}", launch, "dequantize", MappingProxyType(options)))
    for name in ("gemm_blockscaled", "gemm_tensor"):
        for target, out in (("e4m3fn", "bf16"), ("e4m3fn", "fp32"), ("e4m3fn", "fp16"), ("e5m2", "bf16")):
            launch = partial(getattr(gemm, name), out_dtype=OUT[out])
            options = {"format": target, "out": out}
            found.append(Subject(f"{name} {target} to {out}", launch, name, MappingProxyType(options)))
    for target, dtype in FP8.items():
        for rounding in ("floor", "ceil", "rceil", "even"):
            launch = partial(mx.quantize_mx, dtype=dtype, rounding=rounding)
            options = {"format": target, "rounding": rounding}
            found.append(Subject(f"quantize_mx {target} {rounding}", launch, "quantize_mx", MappingProxyType(options)))
    for target in FP8:
        options = {"format": target, "out": "bf16"}
        found.append(Subject(f"gemm_mx {target} to bf16", mx.gemm_mx, "gemm_mx", MappingProxyType(options)))
    return tuple(found)
