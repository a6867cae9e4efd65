"""Kernels with one known fault each, and correct ones in other styles: what verifies the verifier.

It knows faults, not how they are caught. Each launcher has the form that its contract asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.reference import AMAX_FLOOR


@dataclass(frozen=True)
class Planted:
    """A launcher, what is wrong with it (empty where nothing is), and the contract that it should keep."""

    name: str
    launch: Callable[..., Any]
    contract: str
    options: tuple[tuple[str, str], ...] = ()
    fault: str = ""


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


@triton.jit
def _cast_kernel(x, y, size, stride, WAY: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    if WAY == "mask one short":
        inside = i < size - 1
    if WAY == "stride ignored":
        stride = 1
    value = tl.load(x + i * stride, inside).to(tl.float32)
    if WAY == "through bf16":
        value = value.to(tl.bfloat16).to(tl.float32)
    if WAY == "through fp16":
        value = value.to(tl.float16).to(tl.float32)
    if WAY == "NaN clamped":
        value = tl.minimum(tl.maximum(value, -448.0), 448.0)
    if WAY == "clamped":
        value = tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    if WAY == "NaN beyond the maximum":
        value = tl.where(tl.abs(value) > 464.0, float("nan"), value)
    if WAY == "subnormal numbers flushed":
        value = tl.where(tl.abs(value) < 0.015625, value * 0.0, value)
    if WAY == "truncated":
        result = value.to(y.dtype.element_ty, fp_downcast_rounding="rtz")
    else:
        result = value.to(y.dtype.element_ty)
    tl.store(y + i, result, inside)


def _cast(x: Tensor, way: str) -> Tensor:
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    _cast_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), x.stride(0), WAY=way, BLOCK=4096)
    return y


CAST_FAULTS = {
    "mask one short": "the last number stays unwritten",
    "stride ignored": "takes the input for contiguous (vllm#49092)",
    "through bf16": "rounded twice, first to 8 bits",
    "through fp16": "rounded twice, first to 11 bits",
    "NaN clamped": "a clamp that drops NaN",
    "NaN beyond the maximum": "does not saturate",
    "subnormal numbers flushed": "numbers below 2^-6 become 0",
    "truncated": "rounds toward zero",
}


@triton.jit
def _dequantize_kernel(
    codes, scales, y, M, N, c_row, c_column, s_row, s_column, WAY: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * 128 + tl.arange(0, 128)
    if WAY == "codes taken for contiguous":
        c_row, c_column = N, 1
    value = tl.load(codes + row * c_row + column * c_column, column < N, other=0.0).to(tl.float32)
    group = column // WIDTH
    if WAY == "groups of 64":
        group = tl.minimum(column // 64, tl.cdiv(N, WIDTH) - 1)
    if WAY == "first group only":
        group = column * 0
    if WAY == "scales taken for packed":
        s_row, s_column = tl.cdiv(N, WIDTH), 1
    scale = tl.load(scales + row // HEIGHT * s_row + group * s_column, column < N, other=0.0)
    if WAY == "scale rounded to bf16":
        scale = scale.to(tl.bfloat16).to(tl.float32)
    result = value * scale
    if WAY == "divided":
        result = value / scale
    if WAY == "times a rounded inverse of the inverse":
        result = value * (1.0 / (1.0 / scale))
    if WAY == "subnormal results flushed":
        result = tl.where(tl.abs(result) < 1.1754943508222875e-38, result * 0.0, result)
    if WAY == "NaN dropped":
        result = tl.where(result == result, result, 0.0)
    tl.store(y + row * N + column, result.to(y.dtype.element_ty), column < N)


def _dequantize(codes: Tensor, scales: Tensor, way: str) -> Tensor:
    y = torch.empty(codes.shape, device=codes.device)
    _dequantize_kernel[(codes.shape[0], triton.cdiv(codes.shape[1], 128))](
        codes, scales, y, *codes.shape, *codes.stride(), *scales.stride(), WAY=way, HEIGHT=128, WIDTH=128,
    )  # fmt: skip
    return y


DEQUANTIZE_FAULTS = {
    "codes taken for contiguous": "ignores the strides of the codes",
    "groups of 64": "the group is computed wrongly (vllm#49596)",
    "first group only": "one scale for all columns",
    "scales taken for packed": "ignores the strides of the scales",
    "scale rounded to bf16": "the scale has 8 bits",
    "divided": "the scale is for the way there",
    "times a rounded inverse of the inverse": "three roundings for one",
    "subnormal results flushed": "numbers below 2^-126 become 0",
    "NaN dropped": "NaN becomes 0",
}


@triton.jit
def _whole_tensor_kernel(x, codes, scale, size, WAY: tl.constexpr, BLOCK: tl.constexpr):
    """One program quantises all of a contiguous tensor with a single scale."""
    bits = tl.zeros([], tl.int32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, i < size, other=0.0).to(tl.float32)
        if WAY == "the last part's maximum":
            bits = tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0)
        elif WAY == "bits compared with their sign":
            bits = tl.maximum(bits, tl.max(value.to(tl.int32, bitcast=True), 0))
        else:
            bits = tl.maximum(bits, tl.max(tl.abs(value).to(tl.int32, bitcast=True), 0))
    amax = bits.to(tl.float32, bitcast=True)
    if WAY == "NaN for zero":
        amax = tl.where(amax == amax, amax, 0.0)
    whole = tl.where(amax < float("inf"), tl.maximum(amax, 7.703719777548943e-34) / 448.0, float("nan"))
    if WAY == "a margin nobody asked for":
        whole = whole * 2.0
    tl.store(scale, whole)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        value = tl.load(x + i, i < size, other=0.0).to(tl.float32)
        tl.store(codes + i, (value / whole).to(codes.dtype.element_ty), i < size)


def _whole_tensor(x: Tensor, way: str) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(1, device=x.device)
    _whole_tensor_kernel[(1,)](x.contiguous(), codes, scale, x.numel(), WAY=way, BLOCK=256)
    return codes, scale


TENSOR_FAULTS = {
    "the last part's maximum": "each part overwrites the maximum of the one before",
    "bits compared with their sign": "negative numbers do not count",
    "a margin nobody asked for": "half of the range is left empty",
    "NaN for zero": "one NaN hides the largest magnitude, and the numbers saturate",
}


def planted() -> tuple[Planted, ...]:
    """Every fault and every correct style."""
    return (*_casts(), *_quantizers(), *_products())


def _casts() -> list[Planted]:
    floor = (("floor", repr(AMAX_FLOOR)),)
    block = (("block", "128x128"),)
    return [
        *(Planted(f"cast: {way}", partial(_cast, way=way), "cast", (), fault) for way, fault in CAST_FAULTS.items()),
        *(
            Planted(f"dequantize: {way}", partial(_dequantize, way=way), "dequantize", block, fault)
            for way, fault in DEQUANTIZE_FAULTS.items()
        ),
        *(
            Planted(f"tensor: {way}", partial(_whole_tensor, way=way), "quantize_tensor", floor, fault)
            for way, fault in TENSOR_FAULTS.items()
        ),
        Planted("cast: clamped", partial(_cast, way="clamped"), "cast"),
        Planted("dequantize: a row a program", partial(_dequantize, way=""), "dequantize", block),
        Planted("tensor: one program", partial(_whole_tensor, way=""), "quantize_tensor", floor),
    ]


def _products() -> list[Planted]:
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


def _quantizers() -> list[Planted]:
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
