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


@triton.jit
def _quantize_rows_kernel(
    x, codes, scales, M, N, x_row, x_column,
    MAXIMUM: tl.constexpr, FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    amax = tl.zeros([ROWS], tl.float32)
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
        here = _amax(value, 1)
        amax = tl.where((amax != amax) | (here != here), float("nan"), tl.maximum(amax, here))
    scale = _scale(amax, MAXIMUM, FLOOR, POWER_OF_TWO)
    tl.store(scales + row, scale, row < M)
    for start in range(0, N, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = (row < M)[:, None] & (column < N)[None, :]
        value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
        quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
        tl.store(codes + row[:, None] * N + column[None, :], quotient.to(codes.dtype.element_ty), inside)


@triton.jit
def _amax_kernel(x, amax_bits, M, N, x_row, x_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    # The bits of magnitudes are ordered as integers, with infinity above the numbers and NaN above infinity.
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_bits, tl.max(tl.max(bits, 1), 0))


@triton.jit
def _quantize_tensor_kernel(
    x, codes, scale, amax_bits, M, N, x_row, x_column,
    MAXIMUM: tl.constexpr, FLOOR: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    whole = _scale(tl.load(amax_bits).to(tl.float32, bitcast=True), MAXIMUM, FLOOR, POWER_OF_TWO)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale, whole)
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    quotient = tl.div_rn(value, tl.zeros_like(value) + whole)
    tl.store(codes + row[:, None] * N + column[None, :], quotient.to(codes.dtype.element_ty), inside)


@triton.jit
def _dequantize_kernel(
    codes, scales, y, M, N, codes_row, codes_column, scales_row, scales_column, BLOCK_ROWS, BLOCK_COLUMNS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.load(codes + row[:, None] * codes_row + column[None, :] * codes_column, inside, other=0.0).to(tl.float32)
    block = (row // BLOCK_ROWS)[:, None] * scales_row + (column // BLOCK_COLUMNS)[None, :] * scales_column
    result = value * tl.load(scales + block, inside, other=0.0)
    tl.store(y + row[:, None] * N + column[None, :], result.to(y.dtype.element_ty), inside)


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


def quantize_row(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(M, N) numbers into FP8 with one scale a row: codes (M, N) and scales (M, 1), fp32.

    x is fp32, fp16 or bf16, of any strides; dtype is float8_e4m3fn or float8_e5m2. Raises TypeError for other dtypes
    and ValueError for another number of dimensions.
    """
    target = _checked(x, dtype)
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((m, 1), device=x.device)
    if m:
        _quantize_rows_kernel[(triton.cdiv(m, 4),)](
            x, codes, scales, m, n, x.stride(0), x.stride(1),
            MAXIMUM=target.maximum, FLOOR=AMAX_FLOOR, POWER_OF_TWO=power_of_two, ROWS=4, COLUMNS=1024,
        )  # fmt: skip
    return codes, scales


def quantize_tensor(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, power_of_two: bool = False
) -> tuple[Tensor, Tensor]:
    """(M, N) numbers into FP8 with one scale: codes (M, N) and the scale, fp32, of no dimension.

    x is fp32, fp16 or bf16, of any strides; dtype is float8_e4m3fn or float8_e5m2. The scale is x's own ('current'
    scaling): x is read twice. Raises TypeError for other dtypes and ValueError for another number of dimensions.
    """
    target = _checked(x, dtype)
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.zeros((), device=x.device)
    amax_bits = torch.zeros((), dtype=torch.int32, device=x.device)
    if x.numel():
        grid = (triton.cdiv(m, 16), triton.cdiv(n, 256))
        _amax_kernel[grid](x, amax_bits, m, n, x.stride(0), x.stride(1), ROWS=16, COLUMNS=256)
        _quantize_tensor_kernel[grid](
            x, codes, scale, amax_bits, m, n, x.stride(0), x.stride(1),
            MAXIMUM=target.maximum, FLOOR=AMAX_FLOOR, POWER_OF_TWO=power_of_two, ROWS=16, COLUMNS=256,
        )  # fmt: skip
    return codes, scale


def dequantize(
    codes: Tensor, scales: Tensor, *, block: tuple[int, int], out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes * scale, (M, N) in out_dtype; rounded once in fp32 and once more into bf16 or fp16.

    codes (M, N) is FP8, of any strides; scales (ceil(M / block rows), ceil(N / block columns)) is fp32, of any strides;
    out_dtype is fp32, bf16 or fp16. Raises TypeError for other dtypes and ValueError for shapes that do not fit.
    """
    if codes.dtype not in FORMATS or scales.dtype != torch.float32:
        raise TypeError(f"codes are FP8 and scales float32, not {codes.dtype} and {scales.dtype}")
    if out_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"out_dtype is float32, float16 or bfloat16, not {out_dtype}")
    expected = tuple(triton.cdiv(size, each) for size, each in zip(codes.shape, block, strict=True))
    if codes.ndim != 2 or tuple(scales.shape) != expected:
        raise ValueError(f"scales for codes {tuple(codes.shape)} are {expected}, not {tuple(scales.shape)}")
    m, n = codes.shape
    y = torch.empty(codes.shape, dtype=out_dtype, device=codes.device)
    if codes.numel():
        _dequantize_kernel[(triton.cdiv(m, 16), triton.cdiv(n, 128))](
            codes, scales, y, m, n, codes.stride(0), codes.stride(1), scales.stride(0), scales.stride(1), *block,
            ROWS=16, COLUMNS=128,
        )  # fmt: skip
    return y


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
