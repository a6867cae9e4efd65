"""Correct kernels written as others write them: persistent programs, tensor descriptors, scales made of bits.

And one that is not: the power of two by a logarithm, which is the usual way and wrong next to a power of two.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted
from precisionlint.kernels.reference import AMAX_FLOOR

PROGRAMS = 3
"""Programs of the persistent kernel: fewer than tiles, and no divisor of their number."""


@triton.jit
def _persistent_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_row, a_column, as_row, as_column, b_row, b_column, bs_row, bs_column,
    SIDE: tl.constexpr,
):  # fmt: skip
    """Each program takes every PROGRAMS-th tile, walked column by column."""
    tiles_m, tiles_n = tl.cdiv(M, SIDE), tl.cdiv(N, SIDE)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row = (tile % tiles_m).to(tl.int64) * SIDE + tl.arange(0, SIDE)
        column = (tile // tiles_m).to(tl.int64) * SIDE + tl.arange(0, SIDE)
        in_row, in_column = row < M, column < N
        total = tl.zeros([SIDE, SIDE], tl.float32)
        for group in range(tl.cdiv(K, 128)):
            k = group * 128 + tl.arange(0, 128)
            left = tl.load(
                a + row[:, None] * a_row + k[None, :] * a_column, in_row[:, None] & (k < K)[None, :], other=0.0
            )
            right = tl.load(
                b + k[:, None] * b_column + column[None, :] * b_row, (k < K)[:, None] & in_column[None, :], other=0.0
            )
            left_scale = tl.load(a_scales + row * as_row + group * as_column, in_row, other=0.0)
            right_scale = tl.load(b_scales + column // 128 * bs_row + group * bs_column, in_column, other=0.0)
            total += tl.dot(left, right) * left_scale[:, None] * right_scale[None, :]
        kept = in_row[:, None] & in_column[None, :]
        tl.store(c + row[:, None] * N + column[None, :], total.to(c.dtype.element_ty), kept)


def _persistent(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    _persistent_kernel[(PROGRAMS,)](
        a, a_scales, b, b_scales, c, m, n, k, *a.stride(), *a_scales.stride(), *b.stride(), *b_scales.stride(), SIDE=64,
    )  # fmt: skip
    return c


@triton.jit
def _descriptor_kernel(a, a_scales, b, b_scales, c, M, N, K, groups, SIDE: tl.constexpr):
    """Operands and result through tensor descriptors, which need rows without gaps; scales are packed."""
    row, column = tl.program_id(0) * SIDE, tl.program_id(1) * SIDE
    left_tiles = tl.make_tensor_descriptor(a, [M, K], [K, 1], [SIDE, 128])
    right_tiles = tl.make_tensor_descriptor(b, [N, K], [K, 1], [SIDE, 128])
    result_tiles = tl.make_tensor_descriptor(c, [M, N], [N, 1], [SIDE, SIDE])
    rows, columns = row + tl.arange(0, SIDE), column + tl.arange(0, SIDE)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for group in range(tl.cdiv(K, 128)):
        left = left_tiles.load([row, group * 128])
        right = right_tiles.load([column, group * 128])
        left_scale = tl.load(a_scales + rows * groups + group, rows < M, other=0.0)
        right_scale = tl.load(b_scales + columns // 128 * groups + group, columns < N, other=0.0)
        total += tl.dot(left, right.T) * (left_scale[:, None] * right_scale[None, :])
    result_tiles.store([row, column], total.to(tl.bfloat16))


def _by_descriptor(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    _descriptor_kernel[(triton.cdiv(m, 64), triton.cdiv(n, 64))](
        a, a_scales, b, b_scales, c, m, n, k, triton.cdiv(k, 128), SIDE=64,
    )  # fmt: skip
    return c


@triton.jit
def _powers_kernel(x, codes, scales, N, x_row, x_column, groups, FLOOR: tl.constexpr, BITS: tl.constexpr):
    """1x128 with the smallest power of two that saturates nothing: by its bits, or by a logarithm and a ceiling."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = group * 128 + tl.arange(0, 128)
    value = tl.load(x + row * x_row + column * x_column, column < N, other=0.0).to(tl.float32)
    bad = tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 0) > 0
    raised = tl.maximum(tl.max(tl.abs(value), 0), FLOOR)
    if BITS:
        # 448 is 1.75 * 2^8: the exponent goes up where the significand is above 1.75.
        bits = raised.to(tl.int32, bitcast=True) + 0x1FFFFF
        scale = ((bits >> 23) - 8 << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.exp2(tl.ceil(tl.log2(raised / 448.0)))
    scale = tl.where(bad, float("nan"), scale)
    tl.store(scales + row * groups + group, scale)
    tl.store(codes + row * N + column, (value / scale).to(codes.dtype.element_ty), column < N)


def _powers(x: Tensor, *, bits: bool) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, triton.cdiv(n, 128)), device=x.device)
    _powers_kernel[(m, scales.shape[1])](
        x, codes, scales, n, x.stride(0), x.stride(1), scales.shape[1], FLOOR=AMAX_FLOOR, BITS=bits,
    )  # fmt: skip
    return codes, scales


def planted() -> list[Planted]:
    """Every style, and the fault."""
    powers = (("floor", repr(AMAX_FLOOR)), ("scale", "power-of-two"))
    return [
        Planted("gemm: persistent", _persistent, "gemm_blockscaled"),
        Planted(
            "gemm: tensor descriptors", _by_descriptor, "gemm_blockscaled",
            (("strides", "contiguous"), ("shapes", "aligned")),
        ),
        Planted("1x128: powers of two by bits", partial(_powers, bits=True), "quantize_1x128", powers),
        Planted(
            "1x128: powers of two by a logarithm", partial(_powers, bits=False), "quantize_1x128", powers,
            "log2 of a number near a power of two is rounded (sglang#29956)",
        ),
    ]  # fmt: skip
