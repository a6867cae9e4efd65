"""Quantisers by 1x128 and 128x128, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted
from precisionlint.kernels.reference import AMAX_FLOOR


@triton.jit
def _loaded(x, row, column, M, N, x_row, x_column, WAY: tl.constexpr):
    """The addresses of a block, which of them lie inside of the matrix, and the numbers there."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    if WAY == "no mask on columns":
        inside = (row < M)[:, None] & (column < column + 1)[None, :]
    if WAY == "mask one short":
        inside = (row < M)[:, None] & (column < N - 1)[None, :]
    other = 0.0
    if WAY == "padding of one":
        other = 1.0
    address = x + row[:, None] * x_row + column[None, :] * x_column
    if WAY == "assumes contiguous rows":
        address = x + row[:, None] * x_row + column[None, :]
    if WAY == "assumes packed matrix":
        address = x + row[:, None] * N + column[None, :]
    value = tl.load(address, inside, other=other).to(tl.float32)
    return address, inside, value


@triton.jit
def _largest(value, r, c, WAY: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """The block's largest magnitude."""
    size = tl.abs(value)
    if WAY == "amax without abs":
        size = value
    if WAY == "amax of half a block":
        size = tl.where((c < 64)[None, :], size, 0.0)
    if WAY == "amax leaves the last out":
        size = tl.where((c < 127)[None, :], size, 0.0)
    if WAY == "amax in fp16":
        size = size.to(tl.float16).to(tl.float32)
    if WAY == "amax in bf16":
        size = size.to(tl.bfloat16).to(tl.float32)
    amax = tl.max(tl.max(size, 1), 0)
    if WAY == "amax of the first row":
        amax = tl.max(tl.max(tl.where((r == 0)[:, None], size, 0.0), 1), 0)
    if WAY == "mean for amax":
        amax = tl.sum(tl.sum(size, 1), 0) / (GROUP_ROWS * 32)
    return amax


@triton.jit
def _scale(value, amax, WAY: tl.constexpr, FLOOR: tl.constexpr, MAXIMUM: tl.constexpr):
    """The scale, with what it was made of, and the numbers: some ways make others of those that are not finite."""
    bad = tl.max(tl.max((value != value).to(tl.int32), 1), 0) > 0
    raised = tl.maximum(amax, FLOOR)
    if WAY == "no floor":
        raised = amax
    if WAY == "a floor of 1e-4":
        raised = tl.maximum(amax, 1e-4)
    if WAY == "adds an epsilon":
        raised = amax + 1e-10
    maximum = MAXIMUM
    if WAY == "maximum of the fnuz format":
        maximum = 240.0
    if WAY == "maximum of 512":
        maximum = 512.0
    scale = raised / maximum
    if WAY == "multiplies by a rounded 1 / 448":
        scale = raised * (1.0 / maximum)
    if WAY == "multiplies by 0.00223":
        scale = raised * 0.00223
    if WAY == "scale in bf16":
        scale = scale.to(tl.bfloat16).to(tl.float32)
    if WAY == "scale in fp16":
        scale = scale.to(tl.float16).to(tl.float32)
    scale = tl.where((amax < float("inf")) & (bad == 0), scale, float("nan"))
    if WAY == "NaN dropped":
        scale = raised / maximum
        value = tl.where(value == value, value, 0.0)
    if WAY == "infinity clamped":
        value = tl.where(tl.abs(value) == float("inf"), tl.where(value > 0, 1.0, -1.0), value)
        scale = tl.where(amax < float("inf"), raised / maximum, 1.0)
    if WAY == "nan_to_num":
        scale = tl.where(scale == scale, scale, 1.0)
        value = tl.where(value == value, value, 0.0)
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    return scale, raised, maximum, value


@triton.jit
def _quotient(value, scale, raised, maximum, WAY: tl.constexpr):
    """What is rounded to a code."""
    quotient = value / scale
    if WAY == "reciprocal":
        quotient = value * (1.0 / scale)
    if WAY == "inverse of its own":
        quotient = value * (maximum / raised)
        quotient = tl.where(scale == scale, quotient, float("nan"))
    if WAY == "approximate inverse":
        quotient = value * (1.0 / scale).to(tl.bfloat16).to(tl.float32)
    if WAY == "quotient in bf16":
        quotient = quotient.to(tl.bfloat16).to(tl.float32)
    if WAY == "quotient in fp16":
        quotient = quotient.to(tl.float16).to(tl.float32)
    if WAY == "clamped to 416":
        quotient = tl.minimum(tl.maximum(quotient, -416.0), 416.0)
    if WAY == "clamped":
        quotient = tl.clamp(quotient, -maximum, maximum, propagate_nan=tl.PropagateNan.ALL)
    if WAY == "subnormal codes flushed":
        quotient = tl.where(tl.abs(quotient) < 0.015625, 0.0, quotient)
    if WAY == "sign lost":
        quotient = tl.abs(quotient)
    if WAY == "half rounded up":
        bits = quotient.to(tl.int32, bitcast=True)
        normal = ((bits + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
        quotient = tl.where(tl.abs(quotient) >= 0.015625, normal, quotient)
    return quotient


@triton.jit
def _quantize_kernel(
    x, codes, scales, M, N, x_row, x_column, scales_row, WAY: tl.constexpr, GROUP_ROWS: tl.constexpr,
    FLOOR: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """Quantises a 1x128 or 128x128 block a program; WAY names the one thing that is done in another way."""
    r = tl.arange(0, GROUP_ROWS)
    c = tl.arange(0, 128)
    row = tl.program_id(0) * GROUP_ROWS + r
    column = tl.program_id(1) * 128 + c
    if WAY != "int32 offsets":
        row = row.to(tl.int64)
    address, inside, value = _loaded(x, row, column, M, N, x_row, x_column, WAY)
    amax = _largest(value, r, c, WAY, GROUP_ROWS)
    scale, raised, maximum, value = _scale(value, amax, WAY, FLOOR, MAXIMUM)
    quotient = _quotient(value, scale, raised, maximum, WAY)
    if WAY == "truncated":
        code = quotient.to(codes.dtype.element_ty, fp_downcast_rounding="rtz")
    else:
        code = quotient.to(codes.dtype.element_ty)

    if WAY == "stores the inverse scale":
        scale = 1.0 / scale
    if WAY == "scales of the first group only":
        tl.store(scales + tl.program_id(0) * scales_row, scale)
    elif WAY == "scales transposed":
        flat = tl.program_id(0) * scales_row + tl.program_id(1)
        tl.store(scales + (flat % tl.num_programs(0)) * scales_row + flat // tl.num_programs(0), scale)
    else:
        tl.store(scales + tl.program_id(0) * scales_row + tl.program_id(1), scale)
    kept = inside
    if WAY == "last row not stored":
        kept = inside & (row < M - 1)[:, None]
    tl.store(codes + row[:, None] * N + column[None, :], code, kept)
    if WAY == "writes to its input":
        tl.store(address, tl.zeros_like(value).to(x.dtype.element_ty), inside)


def _quantize(x: Tensor, way: str, rows: int, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    if way == "drops the ragged end":
        n = n // 128 * 128 or n
    groups = (triton.cdiv(m, rows), triton.cdiv(n, 128))
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((triton.cdiv(m, rows), triton.cdiv(x.shape[1], 128)), device=x.device)
    grid = (groups[0] - 1 if way == "one program short" and groups[0] > 1 else groups[0], groups[1])
    _quantize_kernel[grid](
        x, codes, scales, m, n, x.stride(0), x.stride(1), scales.stride(0),
        WAY=way, GROUP_ROWS=rows, FLOOR=AMAX_FLOOR, MAXIMUM=448.0,
    )  # fmt: skip
    return codes, scales


QUANTIZER_FAULTS = {
    "int32 offsets": "row * stride wraps beyond 2^31 (vllm#53390)",
    "no mask on columns": "reads beyond the last column (ao#4634)",
    "mask one short": "the last column is taken for padding",
    "padding of one": "padding takes part in the maximum",
    "assumes contiguous rows": "ignores the stride of columns (vllm#49092)",
    "assumes packed matrix": "ignores the stride of rows",
    "amax without abs": "negative numbers do not count",
    "amax of half a block": "only 64 of 128 count (vllm#49596)",
    "amax leaves the last out": "127 of 128 count",
    "amax in fp16": "the maximum overflows or loses bits in fp16",
    "amax in bf16": "the maximum is rounded to bf16",
    "mean for amax": "a multiple of the mean stands for the maximum",
    "no floor": "a block of zeros becomes NaN (ao#4713)",
    "a floor of 1e-4": "small blocks become zeros, and nothing says so",
    "adds an epsilon": "small blocks are scaled for the epsilon",
    "maximum of the fnuz format": "240 for 448",
    "maximum of 512": "quotients beyond the maximum saturate",
    "multiplies by 0.00223": "a rounded constant for 1 / 448",
    "scale in bf16": "the scale is rounded to 8 bits after the division",
    "scale in fp16": "small scales underflow",
    "NaN dropped": "NaN becomes 0",
    "infinity clamped": "an infinity becomes an ordinary number",
    "nan_to_num": "NaN becomes 0 and infinities 448",
    "approximate inverse": "the inverse has 8 bits",
    "quotient in bf16": "rounded twice, first to 8 bits",
    "quotient in fp16": "rounded twice, first to 11 bits",
    "clamped to 416": "the largest code is never used",
    "subnormal codes flushed": "quotients below 2^-6 become 0",
    "sign lost": "negative numbers come back positive",
    "half rounded up": "midpoints go away from zero",
    "truncated": "rounds toward zero",
    "stores the inverse scale": "the scale is for the way there",
    "scales of the first group only": "the other groups' scales stay unwritten",
    "scales transposed": "scales land in another group's place",
    "last row not stored": "a row stays unwritten",
    "writes to its input": "the input is overwritten with zeros",
    "drops the ragged end": "columns after the last whole group stay unwritten (FBGEMM#6159)",
    "one program short": "the grid is rounded down",
}

QUANTIZER_STYLES = {
    "as it should be": "full",
    "multiplies by a rounded 1 / 448": "full",
    "reciprocal": "reciprocal",
    "inverse of its own": "reciprocal",
    "clamped": "full",
}
"""Correct ways, each with the quotient that it declares."""


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
    floor = ("floor", repr(AMAX_FLOOR))
    found = [
        Planted(f"1x128: {way}", partial(_quantize, way=way, rows=1), "quantize_1x128", (floor,), fault)
        for way, fault in QUANTIZER_FAULTS.items()
    ]
    for way in ("amax of the first row", "amax of half a block", "int32 offsets", "scales transposed", "no floor"):
        launch = partial(_quantize, way=way, rows=128)
        fault = QUANTIZER_FAULTS.get(way, "one row of 128 counts")
        found.append(Planted(f"128x128: {way}", launch, "quantize_128x128", (floor,), fault))
    for way, quotient in QUANTIZER_STYLES.items():
        for rows, contract in ((1, "quantize_1x128"), (128, "quantize_128x128")):
            launch = partial(_quantize, way=way, rows=rows)
            found.append(Planted(f"{rows}x128: {way}", launch, contract, (floor, ("quotient", quotient))))
    return found
