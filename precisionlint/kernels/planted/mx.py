"""MXFP8 quantisers and products, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted

LEAST = tl.constexpr(2.0**-126)
"""Below it, triton takes a constant for fp64, and what is computed with it as well."""


@triton.jit
def _quantize_kernel(x, codes, scales, N, x_row, x_column, groups, WAY: tl.constexpr):
    """One block of 32 a program, with the rounding rceil: the smallest power of two that saturates nothing."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * 32 + tl.arange(0, 32)
    inside = column < N
    value = tl.load(x + row * x_row + column * x_column, inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(value), 0)
    bad = tl.max(((value != value) | (tl.abs(value) == float("inf"))).to(tl.int32), 0) > 0
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    if WAY == "floor":
        code = (bits >> 23) - 8
    if WAY == "logarithm and ceiling":
        code = tl.ceil(tl.log2(tl.maximum(amax, LEAST) / 448.0)).to(tl.int32) + 127
    if WAY == "quotient rounded to bf16 first":
        quotient_bits = (tl.maximum(amax, LEAST) / 448.0).to(tl.bfloat16).to(tl.float32).to(tl.int32, bitcast=True)
        code = (quotient_bits >> 23) + tl.where((quotient_bits & 0x7FFFFF) > 0, 1, 0)
    code = tl.maximum(code, 0)
    if WAY == "code 0 taken for 1":
        code = tl.maximum(code, 1)
    if WAY == "bias of 128":
        code = code + 1
    not_a_number = 255
    if WAY == "NaN as the largest scale":
        not_a_number = 254
    code = tl.where(bad, not_a_number, code)
    scale_bits = tl.where(code == 0, 0x400000, tl.where(code == 255, 0x7FC00000, code << 23))
    if WAY == "2^-127 flushed to zero":
        scale_bits = code << 23
    scale = scale_bits.to(tl.float32, bitcast=True)
    if WAY == "NaN as the largest scale":
        value = tl.where(value == value, tl.minimum(tl.maximum(value, -1e38), 1e38), 0.0)
    tl.store(scales + row * groups + tl.program_id(1), code.to(tl.uint8))
    tl.store(codes + row * N + column, (value / scale).to(codes.dtype.element_ty), inside)


def _quantize(x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    m, n = x.shape
    groups = triton.cdiv(n, 32)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((m, groups), dtype=torch.uint8, device=x.device)
    _quantize_kernel[(m, groups)](x, codes, scales, n, x.stride(0), x.stride(1), groups, WAY=way)
    return codes, scales


QUANTIZER_FAULTS = {
    "floor": "another rounding than the one declared",
    "logarithm and ceiling": "log2 of a number near a power of two is rounded (sglang#29956)",
    "quotient rounded to bf16 first": "a number just above a power of two is taken for it",
    "code 0 taken for 1": "the smallest scale is never used (TransformerEngine#3262)",
    "bias of 128": "scales are twice what they should be",
    "NaN as the largest scale": "NaN becomes 0 under code 254 for 255 (TransformerEngine#3262)",
    "2^-127 flushed to zero": "the smallest scale divides as zero",
}


@triton.jit
def _product_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_row, a_column, as_row, as_column, b_row, b_column, bs_row, bs_column,
    WAY: tl.constexpr,
):  # fmt: skip
    """Dequantises 32 of K at a time and multiplies in fp32; a 64x64 tile a program."""
    row = tl.program_id(0).to(tl.int64) * 64 + tl.arange(0, 64)
    column = tl.program_id(1).to(tl.int64) * 64 + tl.arange(0, 64)
    in_row, in_column = row < M, column < N
    total = tl.zeros([64, 64], tl.float32)
    for group in range(tl.cdiv(K, 32)):
        k = group * 32 + tl.arange(0, 32)
        x = tl.load(a + row[:, None] * a_row + k[None, :] * a_column, in_row[:, None] & (k < K)[None, :], other=0.0)
        y = tl.load(
            b + k[:, None] * b_column + column[None, :] * b_row, (k < K)[:, None] & in_column[None, :], other=0.0
        )
        a_group, b_group = group, group
        if WAY == "scales of the first 32 of K":
            a_group = 0
        if WAY == "scales by 64 of K":
            b_group = group // 2
        left_code = tl.load(a_scales + row * as_row + a_group * as_column, in_row, other=127).to(tl.int32)
        right_code = tl.load(b_scales + column * bs_row + b_group * bs_column, in_column, other=127).to(tl.int32)
        left = tl.where(left_code == 255, 0x7FC00000, left_code << 23).to(tl.float32, bitcast=True)
        right = tl.where(right_code == 255, 0x7FC00000, right_code << 23).to(tl.float32, bitcast=True)
        if WAY == "code 255 as infinity":
            right = (right_code << 23).to(tl.float32, bitcast=True)
            right = tl.where(right_code == 255, 3e38, right)
        if WAY == "code taken for the scale":
            left = left_code.to(tl.float32)
        if WAY == "bias of 128":
            left = left * 0.5
        partial = tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
        scaled = partial * left[:, None] * right[None, :]
        if WAY == "partial sum in bf16":
            scaled = scaled.to(tl.bfloat16).to(tl.float32)
        total += scaled
    kept = in_row[:, None] & in_column[None, :]
    tl.store(c + row[:, None] * N + column[None, :], total.to(c.dtype.element_ty), kept)


def _product(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, way: str) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=torch.bfloat16, device=a.device)
    _product_kernel[(triton.cdiv(m, 64), triton.cdiv(n, 64))](
        a, a_scales, b, b_scales, c, m, n, k, *a.stride(), *a_scales.stride(), *b.stride(), *b_scales.stride(),
        WAY=way,
    )  # fmt: skip
    return c


PRODUCT_FAULTS = {
    "scales of the first 32 of K": "one scale of a row for all of K",
    "scales by 64 of K": "the group is computed wrongly (vllm#49596)",
    "code 255 as infinity": "NaN for a scale becomes a huge number (TransformerEngine#3262)",
    "code taken for the scale": "the code is multiplied in as it is",
    "bias of 128": "one power of two less",
    "partial sum in bf16": "rounded to 8 bits every 32 of K",
}


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
    declared = (("rounding", "rceil"),)
    return [
        *(
            Planted(f"mx: {way}", partial(_quantize, way=way), "quantize_mx", declared, fault)
            for way, fault in QUANTIZER_FAULTS.items()
        ),
        *(
            Planted(f"mx product: {way}", partial(_product, way=way), "gemm_mx", (), fault)
            for way, fault in PRODUCT_FAULTS.items()
        ),
        Planted("mx: a block a program", partial(_quantize, way=""), "quantize_mx", declared),
        Planted("mx product: dequantised by 32", partial(_product, way=""), "gemm_mx"),
    ]
