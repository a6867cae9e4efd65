"""Casts, the way back, and quantisers with one scale for a tensor, each with one thing done in another way."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.planted.base import Planted
from precisionlint.kernels.reference import AMAX_FLOOR


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


@triton.jit
def _stochastic_kernel(x, y, seed, size, WAY: tl.constexpr, BLOCK: tl.constexpr):
    """Into bf16, by adding 16 random bits below the upper half of fp32."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, i < size, other=0.0)
    place = i
    if WAY == "noise anew for each program":
        place = tl.arange(0, BLOCK)
    if WAY == "one draw for four":
        place = i // 4
    noise = (tl.randint(tl.load(seed), place) >> 16).to(tl.int32)
    if WAY == "four random bits":
        noise = noise & 0xF000
    if WAY == "noise of half a step":
        noise = noise >> 1
    if WAY == "nearest":
        noise = noise * 0 + 0x7FFF
    if WAY == "toward zero":
        noise = noise * 0
    if WAY == "noise of a whole step":
        noise = noise + 1
    bits = value.to(tl.int32, bitcast=True)
    if WAY == "noise added to negative numbers upwards":
        noise = tl.where(value < 0, 0xFFFF - noise, noise)
        bits = tl.where(value < 0, bits - 0xFFFF, bits)
    rounded = ((bits + noise) & -0x10000).to(tl.float32, bitcast=True)
    largest = 3.3895313892515355e38
    rounded = tl.minimum(tl.maximum(rounded, -largest), largest)
    if WAY == "overflows":
        rounded = ((bits + noise) & -0x10000).to(tl.float32, bitcast=True)
    infinite = tl.abs(value) == float("inf")
    rounded = tl.where(infinite & (WAY != "overflows"), tl.where(value > 0, largest, -largest), rounded)
    rounded = tl.where(value == value, rounded, value)
    tl.store(y + i, rounded.to(tl.bfloat16), i < size)


def _stochastic(x: Tensor, seed: Tensor, way: str) -> Tensor:
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    _stochastic_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, seed, x.numel(), WAY=way, BLOCK=4096)
    return y


STOCHASTIC_FAULTS = {
    "noise anew for each program": "the same noise every 4096 elements",
    "one draw for four": "neighbours share their noise",
    "four random bits": "probabilities are multiples of 1 / 16",
    "noise of half a step": "goes up too rarely",
    "nearest": "no noise at all",
    "toward zero": "no noise at all",
    "noise of a whole step": "a number that the format holds may go up",
    "noise added to negative numbers upwards": "negative numbers leave for a third neighbour",
    "overflows": "numbers beyond the maximum become infinite",
}


def planted() -> list[Planted]:
    """Every fault and every correct style of this module."""
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
        *(
            Planted(f"stochastic: {way}", partial(_stochastic, way=way), "stochastic_cast", (), fault)
            for way, fault in STOCHASTIC_FAULTS.items()
        ),
        Planted("stochastic: by adding bits", partial(_stochastic, way=""), "stochastic_cast"),
        Planted("cast: clamped", partial(_cast, way="clamped"), "cast"),
        Planted("dequantize: a row a program", partial(_dequantize, way=""), "dequantize", block),
        Planted("tensor: one program", partial(_whole_tensor, way=""), "quantize_tensor", floor),
    ]
