"""Block-scaled products, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted


@triton.jit
def _operands(
    a, b, row, column, in_row, in_column, step, K, a_row, a_column, b_row, b_column, WAY: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """STEP of K of a tile's rows and columns."""
    k = step * STEP + tl.arange(0, STEP)
    in_k = k < K
    if WAY == "no mask on K":
        in_k = k < k + 1
    if WAY == "mask on K one short":
        in_k = k < K - 1
    a_address = a + row[:, None] * a_row + k[None, :] * a_column
    b_address = b + k[:, None] * b_column + column[None, :] * b_row
    if WAY == "a taken for contiguous":
        a_address = a + row[:, None] * a_row + k[None, :]
    if WAY == "b taken for packed":
        b_address = b + k[:, None] + column[None, :] * K
    left = tl.load(a_address, in_row[:, None] & in_k[None, :], other=0.0)
    right = tl.load(b_address, in_k[:, None] & in_column[None, :], other=0.0)
    if WAY == "b not masked on N":
        right = tl.load(b_address, in_k[:, None] & (column < column + 1)[None, :], other=0.0)
    return left, right


@triton.jit
def _scales(
    a_scales, b_scales, row, column, in_row, in_column, step, N, K, as_row, as_column, bs_row, bs_column,
    WAY: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The scales of the tile's rows and columns for these of K."""
    group = step * STEP // 128
    a_group, b_group = group, group
    if WAY == "scale of the first 128 of K":
        a_group = 0
    if WAY == "scale of the next 128 of K":
        a_group = tl.minimum(group + 1, tl.cdiv(K, 128) - 1)
    if WAY == "trailing scale dropped":
        b_group = tl.minimum(group, tl.maximum(K // 128 - 1, 0))
    a_scale_row, b_scale_row = row, column // 128
    if WAY == "b's scale of the first 128 of N":
        b_scale_row = column * 0
    if WAY == "b's scale by 64":
        b_scale_row = tl.minimum(column // 64, tl.cdiv(N, 128) - 1)
    if WAY == "a's scale of the tile's first row":
        a_scale_row = row // SIZE * SIZE
    left_scale = tl.load(a_scales + a_scale_row * as_row + a_group * as_column, in_row, other=0.0)
    right_scale = tl.load(b_scales + b_scale_row * bs_row + b_group * bs_column, in_column, other=0.0)
    if WAY == "scales taken for packed":
        left_scale = tl.load(a_scales + a_scale_row * tl.cdiv(K, 128) + a_group, in_row, other=0.0)
    if WAY == "scale rounded to bf16":
        left_scale = left_scale.to(tl.bfloat16).to(tl.float32)
    if WAY == "scale rounded to a power of two":
        bits = right_scale.to(tl.int32, bitcast=True)
        right_scale = (bits & 0x7F800000).to(tl.float32, bitcast=True)
    if WAY == "a's scale forgotten":
        left_scale = left_scale * 0.0 + 1.0
    return left_scale, right_scale


@triton.jit
def _scaled_product(left, right, left_scale, right_scale, WAY: tl.constexpr):
    """The product of these of K, with its scales."""
    if WAY == "operands scaled to bf16":
        left_wide = (left.to(tl.float32) * left_scale[:, None]).to(tl.bfloat16).to(tl.float32)
        right_wide = (right.to(tl.float32) * right_scale[None, :]).to(tl.bfloat16).to(tl.float32)
        scaled = tl.dot(left_wide, right_wide, input_precision="ieee")
    elif WAY == "operands scaled to fp32":
        left_wide = left.to(tl.float32) * left_scale[:, None]
        right_wide = right.to(tl.float32) * right_scale[None, :]
        scaled = tl.dot(left_wide, right_wide, input_precision="ieee")
    elif WAY == "dot in fp16":
        partial = tl.dot(left, right, out_dtype=tl.float16).to(tl.float32)
        scaled = partial * (left_scale[:, None] * right_scale[None, :])
    elif WAY == "one scale after another":
        scaled = tl.dot(left, right) * left_scale[:, None] * right_scale[None, :]
    else:
        partial = tl.dot(left, right)
        if WAY == "partial sum in bf16":
            partial = partial.to(tl.bfloat16).to(tl.float32)
        if WAY == "partial sum in fp16":
            partial = partial.to(tl.float16).to(tl.float32)
        if WAY == "partial sum in tf32":
            partial = (partial.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        if WAY == "NaN dropped":
            partial = tl.where(partial == partial, partial, 0.0)
        scaled = partial * (left_scale[:, None] * right_scale[None, :])
    return scaled


@triton.jit
def _added(accumulator, compensation, scaled, WAY: tl.constexpr):
    """The accumulator with a product added, and what a compensated sum carries on."""
    if WAY == "compensated":
        corrected = scaled - compensation
        total = accumulator + corrected
        compensation = (total - accumulator) - corrected
        accumulator = tl.where(compensation == compensation, total, accumulator + scaled)
    else:
        accumulator += scaled
    if WAY == "accumulator in bf16":
        accumulator = accumulator.to(tl.bfloat16).to(tl.float32)
    if WAY == "accumulator in fp16":
        accumulator = accumulator.to(tl.float16).to(tl.float32)
    if WAY == "accumulator of 14 bits":
        accumulator = (accumulator.to(tl.int32, bitcast=True) & -0x400).to(tl.float32, bitcast=True)
    if WAY == "last step only":
        accumulator = scaled
    return accumulator, compensation


@triton.jit
def _product_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_row, a_column, as_row, as_column, b_row, b_column, bs_row, bs_column,
    WAY: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A SIZE x SIZE tile a program, STEP of K at a time; WAY names the one thing that is done in another way."""
    row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    if WAY != "int32 offsets":
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    in_row, in_column = row < M, column < N
    accumulator = tl.zeros([SIZE, SIZE], tl.float32)
    compensation = tl.zeros([SIZE, SIZE], tl.float32)
    steps = tl.cdiv(K, STEP)
    if WAY == "K rounded down":
        steps = K // STEP
    if WAY == "last step skipped":
        steps = tl.maximum(steps - 1, 1)
    first = 0
    if WAY == "first step skipped":
        first = tl.minimum(1, steps - 1)
    for turn in range(first, steps):
        step = turn
        if WAY == "K from the end":
            step = steps - 1 - turn
        left, right = _operands(
            a, b, row, column, in_row, in_column, step, K, a_row, a_column, b_row, b_column, WAY, STEP
        )
        left_scale, right_scale = _scales(
            a_scales, b_scales, row, column, in_row, in_column, step, N, K, as_row, as_column, bs_row, bs_column,
            WAY, SIZE, STEP,
        )  # fmt: skip
        scaled = _scaled_product(left, right, left_scale, right_scale, WAY)
        accumulator, compensation = _added(accumulator, compensation, scaled, WAY)
    if WAY == "result through fp16":
        accumulator = accumulator.to(tl.float16).to(tl.float32)
    if WAY == "result clamped":
        accumulator = tl.minimum(tl.maximum(accumulator, -448.0), 448.0)
    if WAY == "result truncated":
        result = accumulator.to(c.dtype.element_ty, fp_downcast_rounding="rtz")
    else:
        result = accumulator.to(c.dtype.element_ty)
    address = c + row[:, None] * N + column[None, :]
    if WAY == "result transposed":
        address = c + column[None, :] * M + row[:, None]
    kept = in_row[:, None] & in_column[None, :]
    if WAY == "not masked on N when stored":
        kept = in_row[:, None] & (column < column + 1)[None, :]
    if WAY == "last column not stored":
        kept = in_row[:, None] & (column < N - 1)[None, :]
    tl.store(address, result, kept)


def _product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, *, way: str, size: int = 128, step: int = 128,
    out: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=out, device=a.device)
    _product_kernel[(triton.cdiv(m, size), triton.cdiv(n, size))](
        a, a_scales, b, b_scales, c, m, n, k, *a.stride(), *a_scales.stride(), *b.stride(), *b_scales.stride(),
        WAY=way, SIZE=size, STEP=step,
    )  # fmt: skip
    return c


def _split_k(a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, *, lossy: bool) -> Tensor:
    """Two halves of K, each a product of its own, added in fp32; or, lossily, in bf16."""
    middle = a.shape[1] // 256 * 128
    groups = middle // 128
    if not middle:
        return _product(a, a_scales, b, b_scales, way="")
    out = torch.bfloat16 if lossy else torch.float32
    left = _product(a[:, :middle], a_scales[:, :groups], b[:, :middle], b_scales[:, :groups], way="", out=out)
    right = _product(a[:, middle:], a_scales[:, groups:], b[:, middle:], b_scales[:, groups:], way="", out=out)
    return (left + right).bfloat16()


PRODUCT_FAULTS = {
    "int32 offsets": "row * stride wraps beyond 2^31 (vllm#53390)",
    "K rounded down": "the ragged end of K is left out",
    "last step skipped": "the last 128 of K are left out",
    "first step skipped": "the first 128 of K are left out",
    "last step only": "each step overwrites the one before",
    "no mask on K": "reads beyond the last of K (ao#4634)",
    "mask on K one short": "the last of K is taken for padding",
    "a taken for contiguous": "ignores the stride of a's columns (vllm#49092)",
    "b taken for packed": "ignores b's strides",
    "b not masked on N": "reads beyond b's last row",
    "scale of the first 128 of K": "one scale of a row for all of K",
    "scale of the next 128 of K": "off by one",
    "trailing scale dropped": "the ragged end of K gets the scale before it (FBGEMM#6159)",
    "b's scale of the first 128 of N": "one scale of b for all of N",
    "b's scale by 64": "the group is computed wrongly (vllm#49596)",
    "a's scale of the tile's first row": "one row's scale for a tile",
    "scales taken for packed": "ignores the strides of the scales",
    "scale rounded to bf16": "the scale has 8 bits",
    "scale rounded to a power of two": "the scale loses its significand",
    "a's scale forgotten": "never multiplied in",
    "operands scaled to bf16": "dequantised to bf16 before the dot",
    "dot in fp16": "the dot's result is fp16",
    "partial sum in bf16": "rounded to 8 bits every 128 of K",
    "partial sum in fp16": "rounded to 11 bits, and infinite beyond 65504",
    "partial sum in tf32": "cut to 11 bits every 128 of K",
    "NaN dropped": "NaN becomes 0",
    "accumulator in bf16": "rounded to 8 bits after each addition",
    "accumulator in fp16": "rounded to 11 bits after each addition",
    "accumulator of 14 bits": "cut after each addition, as on sm_90 without promotion (DeepGEMM#37)",
    "result through fp16": "rounded twice, and infinite beyond 65504",
    "result clamped": "large results are cut off",
    "result truncated": "rounds toward zero",
    "result transposed": "c is written column by column",
    "not masked on N when stored": "overwrites the next row",
    "last column not stored": "a column stays unwritten",
}

PRODUCT_STYLES = {
    "K from the end": (128, 128),
    "operands scaled to fp32": (128, 128),
    "one scale after another": (128, 128),
    "compensated": (128, 128),
    "tiles of 64": (64, 128),
    "64 of K at a time": (128, 64),
}
"""Correct ways, each with the sides of its tile and the length of its steps along K."""


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
    contract, precise = "gemm_blockscaled", ("out", "fp32")
    found = [
        Planted(f"gemm: {way}", partial(_product, way=way), contract, (), fault)
        for way, fault in PRODUCT_FAULTS.items()
    ]
    found.append(
        Planted("gemm: halves of K added in bf16", partial(_split_k, lossy=True), contract, (), "rounded twice")
    )
    found.append(Planted("gemm: split K", partial(_split_k, lossy=False), contract))
    for way, (size, step) in PRODUCT_STYLES.items():
        launch = partial(_product, way=way, out=torch.float32, size=size, step=step)
        found.append(Planted(f"gemm: {way}", launch, contract, (precise,)))
    return found
