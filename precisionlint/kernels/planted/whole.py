"""Quantisers with one scale a row, and products with one scale an operand, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted
from precisionlint.kernels.reference import AMAX_FLOOR


@triton.jit
def _rows_kernel(x, codes, scales, N, x_row, x_column, WAY: tl.constexpr, FLOOR: tl.constexpr, WIDTH: tl.constexpr):
    """One row a program, WIDTH columns at a time: once for the largest magnitude, once to quantise."""
    row = tl.program_id(0).to(tl.int64)
    amax = tl.zeros([], tl.float32)
    bad = tl.zeros([], tl.int32)
    for start in range(0, N, WIDTH):
        column = start + tl.arange(0, WIDTH)
        value = tl.load(x + row * x_row + column * x_column, column < N, other=0.0).to(tl.float32)
        here = tl.max(tl.abs(value), 0)
        if WAY == "the last part's maximum":
            amax = here
        elif WAY == "the first part's maximum":
            amax = tl.where(start == 0, here, amax)
        else:
            amax = tl.maximum(amax, here)
        bad = bad | tl.max((tl.abs(value) < float("inf")).to(tl.int32) ^ 1, 0)
    scale = tl.maximum(amax, FLOOR) / 448.0
    if WAY == "a maximum of 240":
        scale = tl.maximum(amax, FLOOR) / 240.0
    scale = tl.where(bad != 0, float("nan"), scale)
    tl.store(scales + row, scale)
    for start in range(0, N, WIDTH):
        column = start + tl.arange(0, WIDTH)
        value = tl.load(x + row * x_row + column * x_column, column < N, other=0.0).to(tl.float32)
        tl.store(codes + row * N + column, (value / scale).to(codes.dtype.element_ty), column < N)


def _rows(x: Tensor, *, way: str) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, 1), device=x.device)
    _rows_kernel[(m,)](x, codes, scales, n, x.stride(0), x.stride(1), WAY=way, FLOOR=AMAX_FLOOR, WIDTH=64)
    return codes, scales


ROW_FAULTS = {
    "the last part's maximum": "each part of the row overwrites the maximum of the one before",
    "the first part's maximum": "what follows the first part does not count",
    "a maximum of 240": "240 for 448",
}


@triton.jit
def _product_kernel(
    a, a_scale, b, b_scale, c, M, N, K, a_row, a_column, b_row, b_column, WAY: tl.constexpr, SIDE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1).to(tl.int64) * SIDE + tl.arange(0, SIDE)
    in_row, in_column = row < M, column < N
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, K, 64):
        k = start + tl.arange(0, 64)
        left = tl.load(a + row[:, None] * a_row + k[None, :] * a_column, in_row[:, None] & (k < K)[None, :], other=0.0)
        right = tl.load(
            b + k[:, None] * b_column + column[None, :] * b_row, (k < K)[:, None] & in_column[None, :], other=0.0
        )
        total += tl.dot(left, right)
        if WAY == "sum in bf16":
            total = total.to(tl.bfloat16).to(tl.float32)
    scale = tl.load(a_scale) * tl.load(b_scale)
    if WAY == "a's scale twice":
        scale = tl.load(a_scale) * tl.load(a_scale)
    if WAY == "divided by the scales":
        total = total / scale
    elif WAY == "scaled after rounding":
        total = total.to(c.dtype.element_ty).to(tl.float32) * scale
    else:
        total = total * scale
    if WAY == "NaN as zero":
        total = tl.where(total == total, total, 0.0)
    tl.store(c + row[:, None] * N + column[None, :], total.to(c.dtype.element_ty), in_row[:, None] & in_column[None, :])


def _product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, way: str) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    _product_kernel[(triton.cdiv(m, 64), triton.cdiv(n, 64))](
        a, a_scale, b, b_scale, c, m, n, k, *a.stride(), *b.stride(), WAY=way, SIDE=64,
    )  # fmt: skip
    return c


PRODUCT_FAULTS = {
    "sum in bf16": "rounded to 8 bits every 64 of K",
    "a's scale twice": "b's scale is never multiplied in",
    "divided by the scales": "the scales are for the way there",
    "scaled after rounding": "rounded twice",
    "NaN as zero": "NaN becomes 0",
}


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
    floor = (("floor", repr(AMAX_FLOOR)),)
    return [
        *(
            Planted(f"row: {way}", partial(_rows, way=way), "quantize_row", floor, fault)
            for way, fault in {**ROW_FAULTS, "64 columns at a time": ""}.items()
        ),
        *(
            Planted(f"tensor product: {way}", partial(_product, way=way), "gemm_tensor", (), fault)
            for way, fault in {**PRODUCT_FAULTS, "64 of K at a time": ""}.items()
        ),
    ]
