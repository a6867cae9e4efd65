"""MXFP8: quantisation with a shared power of two for each 32 of a row, and the product of two such matrices.

Scales are E8M0 codes in uint8: 2^(code - 127), 255 for NaN (OCP Microscaling Formats 1.0). A block of zeros has code 0;
a block with NaN or an infinity has code 255, so that all of it is NaN on the way back. Elements saturate.
"""

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.formats import E4M3FN, E5M2
from precisionlint.kernels.reference import MxRounding

FORMATS = {torch.float8_e4m3fn: E4M3FN, torch.float8_e5m2: E5M2}
NAMES: dict[torch.dtype, Literal["e4m3", "e5m2"]] = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@triton.jit
def _quantize_mx_kernel(
    x, codes, scales, M, N, x_row, x_column, scales_row,
    ROUNDING: tl.constexpr, TOP: tl.constexpr, MANTISSA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * 32 + tl.arange(0, 32)
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    # The bits of magnitudes are ordered as integers, with infinity above the numbers and NaN above infinity.
    bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 1)
    exponent = bits >> 23
    if ROUNDING == "ceil":
        exponent += tl.where((bits & 0x7FFFFF) > 0, 1, 0)
    elif ROUNDING == "rceil":
        exponent += tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # both maxima are 1.75 times a power of two
    elif ROUNDING == "even":
        exponent = (bits + (1 << (22 - MANTISSA))) >> 23
    code = tl.where(bits >= 0x7F800000, 255, tl.maximum(exponent - TOP, 0))
    # 2^-127 is a subnormal number; every other code is an fp32 exponent as it is, and 255 with a fraction is NaN.
    scale_bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
    scale = scale_bits.to(tl.float32, bitcast=True)
    tl.store(scales + row * scales_row + tl.program_id(1), code.to(tl.uint8), row < M)
    quotient = tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape))
    tl.store(codes + row[:, None] * N + column[None, :], quotient.to(codes.dtype.element_ty), inside)


@triton.jit
def _gemm_mx_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_row, a_column, as_row, as_column, b_row, b_column, bs_row, bs_column, c_row,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128).to(tl.int64)
    group = tl.arange(0, 4).to(tl.int64)
    in_row, in_column = row < M, column < N
    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(tl.cdiv(K, 128)):
        in_k = block * 128 + k < K
        in_group = block * 4 + group < tl.cdiv(K, 32)
        left = tl.load(
            a + row[:, None] * a_row + (block * 128 + k)[None, :] * a_column, in_row[:, None] & in_k[None, :], other=0.0
        )
        right = tl.load(
            b + (block * 128 + k)[:, None] * b_column + column[None, :] * b_row, in_k[:, None] & in_column[None, :],
            other=0.0,
        )  # fmt: skip
        left_scale = tl.load(
            a_scales + row[:, None] * as_row + (block * 4 + group)[None, :] * as_column,
            in_row[:, None] & in_group[None, :], other=0,
        )  # fmt: skip
        right_scale = tl.load(
            b_scales + column[:, None] * bs_row + (block * 4 + group)[None, :] * bs_column,
            in_column[:, None] & in_group[None, :], other=0,
        )  # fmt: skip
        accumulator = tl.dot_scaled(left, left_scale, A_FORMAT, right, right_scale, B_FORMAT, accumulator)
    address = c + row[:, None] * c_row + column[None, :]
    tl.store(address, accumulator.to(c.dtype.element_ty), in_row[:, None] & in_column[None, :])


def quantize_mx(
    x: Tensor, *, dtype: torch.dtype = torch.float8_e4m3fn, rounding: MxRounding = "floor"
) -> tuple[Tensor, Tensor]:
    """(M, N) numbers into MXFP8: codes (M, N) and E8M0 scales (M, ceil(N / 32)), uint8.

    x is fp32, fp16 or bf16, of any strides; dtype is float8_e4m3fn or float8_e5m2; `rounding` is that of
    `reference.mx_scale`. Raises TypeError for other dtypes and ValueError for another number of dimensions.
    """
    if dtype not in FORMATS or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"x is fp32, fp16 or bf16 and becomes float8_e4m3fn or float8_e5m2, not {x.dtype} and {dtype}")
    if x.ndim != 2:
        raise ValueError(f"x is a matrix, (M, N), not of shape {tuple(x.shape)}")
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((m, triton.cdiv(n, 32)), dtype=torch.uint8, device=x.device)
    if x.numel():
        target = FORMATS[dtype]
        _quantize_mx_kernel[(triton.cdiv(m, 64), triton.cdiv(n, 32))](
            x, codes, scales, m, n, x.stride(0), x.stride(1), scales.stride(0),
            ROUNDING=rounding, TOP=target.max_exponent, MANTISSA=target.mantissa_bits, ROWS=64,
        )  # fmt: skip
    return codes, scales


def gemm_mx(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a @ b.T of MXFP8 matrices, (M, N) in out_dtype.

    a (M, K) and b (N, K) are float8_e4m3fn or float8_e5m2, of any strides; a_scales (M, ceil(K / 32)) and b_scales
    (N, ceil(K / 32)) are E8M0 codes in uint8; out_dtype is bf16, fp16 or fp32. Raises TypeError for other dtypes and
    ValueError for shapes that do not fit together.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a is (M, K) and b (N, K), not {tuple(a.shape)} and {tuple(b.shape)}")
    (m, k), n = a.shape, b.shape[0]
    for name, scales, rows in (("a_scales", a_scales, m), ("b_scales", b_scales, n)):
        if tuple(scales.shape) != (rows, triton.cdiv(k, 32)):
            raise ValueError(f"{name} is {(rows, triton.cdiv(k, 32))}, not {tuple(scales.shape)}")
        if scales.dtype != torch.uint8:
            raise TypeError(f"{name} is uint8, not {scales.dtype}")
    if a.dtype not in NAMES or b.dtype not in NAMES or out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"a and b are FP8 and the result bf16, fp16 or fp32, not {a.dtype}, {b.dtype} and {out_dtype}")
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    if c.numel():
        _gemm_mx_kernel[(triton.cdiv(m, 128), triton.cdiv(n, 128))](
            a, a_scales, b, b_scales, c, m, n, k, a.stride(0), a.stride(1), a_scales.stride(0), a_scales.stride(1),
            b.stride(0), b.stride(1), b_scales.stride(0), b_scales.stride(1), c.stride(0),
            A_FORMAT=NAMES[a.dtype], B_FORMAT=NAMES[b.dtype], BLOCK_M=128, BLOCK_N=128, num_warps=8,
        )  # fmt: skip
    return c
