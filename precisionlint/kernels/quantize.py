"""Scaled quantisation to FP8, and the way back: one scale for a tensor, a row, 128 of a row, or a 128x128 block.

Policies of all kernels here. A scale is a multiplier for the way back, fp32: the block's largest magnitude over the
format's maximum, or the smallest power of two that is not below it. Magnitudes below 2^-110 count as 2^-110, so that
each scale is a normal number and a block of zeros has a finite one. A block with NaN or an infinity gets the scale NaN,
so that all of it is NaN on the way back. Elements are divided by the scale as IEEE 754 divides, then rounded to nearest
even.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.formats import E4M3FN, E5M2, Format
from precisionlint.kernels.reference import AMAX_FLOOR

FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}


@triton.jit
def _scale(amax, MAXIMUM: tl.constexpr, FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """The scale for blocks of these largest magnitudes, which are NaN where a block holds NaN."""
    raised = tl.maximum(amax, FLOOR)
    if POWER_OF_TWO:
        # MAXIMUM is 1.75 * 2^TOP for both formats: compare the significand's bits with those of 1.75.
        TOP: tl.constexpr = 8 if MAXIMUM == 448.0 else 15
        bits = raised.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) - TOP + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(raised, MAXIMUM + tl.zeros_like(raised))
    # The maximum above drops NaN, and so does a comparison.
    return tl.where(amax < float("inf"), scale, float("nan"))


@triton.jit
def _amax(x, axis: tl.constexpr):
    """The largest magnitude along an axis, NaN where there is one: tl.max alone drops NaN."""
    return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), tl.max(tl.abs(x), axis))


@triton.jit
def _quantize_blocks_kernel(
    x, codes, scales, M, N, x_row, x_column, scales_row,
    MAXIMUM: tl.constexpr, FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, PER_ROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    amax = _amax(value, 1)
    if PER_ROW:
        scale = _scale(amax, MAXIMUM, FLOOR, POWER_OF_TWO)
        tl.store(scales + row * scales_row + tl.program_id(1), scale, row < M)
        divisor = scale[:, None]
    else:
        block = _scale(_amax(amax, 0), MAXIMUM, FLOOR, POWER_OF_TWO)
        tl.store(scales + tl.program_id(0) * scales_row + tl.program_id(1), block)
        divisor = tl.zeros([ROWS, 1], tl.float32) + block
    quotient = tl.div_rn(value, tl.broadcast_to(divisor, value.shape))
    tl.store(codes + row[:, None] * N + column[None, :], quotient.to(codes.dtype.element_ty), inside)


def quantize_1x128(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(M, N) numbers into FP8 with one scale for each 128 of a row: codes (M, N) and scales (M, ceil(N / 128)), fp32.

    x is fp32, fp16 or bf16, of any strides; dtype is float8_e4m3fn or float8_e5m2. Raises TypeError for other dtypes
    and ValueError for another number of dimensions.
    """
    return _quantize_blocks(x, dtype, power_of_two, per_row=True)


def quantize_128x128(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(M, N) numbers into FP8 with one scale for each 128x128: codes (M, N), scales (ceil(M / 128), ceil(N / 128)).

    x is fp32, fp16 or bf16, of any strides; dtype is float8_e4m3fn or float8_e5m2; scales are fp32. Raises TypeError
    for other dtypes and ValueError for another number of dimensions.
    """
    return _quantize_blocks(x, dtype, power_of_two, per_row=False)


def _quantize_blocks(x: Tensor, dtype: torch.dtype, power_of_two: bool, per_row: bool) -> tuple[Tensor, Tensor]:
    target = _checked(x, dtype)
    rows = 16 if per_row else 128
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((m if per_row else triton.cdiv(m, 128), triton.cdiv(n, 128)), device=x.device)
    if x.numel():
        _quantize_blocks_kernel[(triton.cdiv(m, rows), triton.cdiv(n, 128))](
            x, codes, scales, m, n, x.stride(0), x.stride(1), scales.stride(0),
            MAXIMUM=target.maximum, FLOOR=AMAX_FLOOR, POWER_OF_TWO=power_of_two, PER_ROW=per_row, ROWS=rows,
        )  # fmt: skip
    return codes, scales


def _checked(x: Tensor, dtype: torch.dtype) -> Format:
    if dtype not in FORMATS:
        raise TypeError(f"the codes are float8_e4m3fn or float8_e5m2, not {dtype}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x is float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x is a matrix, (M, N), not of shape {tuple(x.shape)}")
    return FORMATS[dtype]
