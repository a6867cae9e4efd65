"""NVFP4: E2M1 numbers with an E4M3 scale for each 16 of a row and one fp32 scale for the tensor.

Elements are rounded to nearest even or stochastically; a random Hadamard transform may come first. Policies: the tensor's
scale is its largest magnitude over 448 * 6, magnitudes below 2^-105 counting as 2^-105, so that the product of both
scales is a normal number for every block that does not round to zeros. A block's scale is rounded to nearest even, and
may be 0: then its elements are. NaN or an infinity anywhere makes the tensor's scale NaN, for E2M1 has neither. Elements
are divided by the product of both scales as IEEE 754 divides, and saturate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from precisionlint.kernels.reference import NVFP4_AMAX_FLOOR

HALVES = (torch.float32, torch.float16, torch.bfloat16)
ROWS, COLUMNS = 16, 128


@triton.jit
def _load_blocks(
    x, signs, row, column, M, N, x_row, x_column, HADAMARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The numbers of a tile as runs of 16, (ROWS, COLUMNS / 16, 16), fp32, transformed if asked for."""
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.load(x + row[:, None] * x_row + column[None, :] * x_column, inside, other=0.0).to(tl.float32)
    if HADAMARD:
        # Sylvester's matrix: the sign at (i, j) is the parity of the bits that i and j share; 0.25 is 1 / sqrt(16).
        i, j = tl.arange(0, 16)[:, None], tl.arange(0, 16)[None, :]
        shared = i & j
        parity = (shared ^ (shared >> 1) ^ (shared >> 2) ^ (shared >> 3)) & 1
        matrix = tl.where(parity == 1, -0.25, 0.25) * tl.load(signs + tl.arange(0, 16))[:, None]
        value = tl.dot(tl.reshape(value, [ROWS * COLUMNS // 16, 16]), matrix, input_precision="ieee")
    return tl.reshape(value, [ROWS, COLUMNS // 16, 16])


@triton.jit
def _amax_kernel(
    x, signs, amax_bits, M, N, x_row, x_column, HADAMARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    value = _load_blocks(x, signs, row, column, M, N, x_row, x_column, HADAMARD, ROWS, COLUMNS)
    # The bits of magnitudes are ordered as integers, with infinity above the numbers and NaN above infinity.
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    tl.atomic_max(amax_bits, tl.max(tl.max(tl.max(bits, 2), 1), 0))


@triton.jit
def _quantize_kernel(
    x, signs, seed, codes, scales, tensor_scale, amax_bits, M, N, x_row, x_column,
    STOCHASTIC: tl.constexpr, HADAMARD: tl.constexpr, FLOOR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.load(amax_bits).to(tl.float32, bitcast=True)
    whole = tl.div_rn(tl.maximum(largest, FLOOR), 2688.0)  # 448 * 6
    whole = tl.where(largest < float("inf"), whole, float("nan"))
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(tensor_scale, whole)

    value = _load_blocks(x, signs, row, column, M, N, x_row, x_column, HADAMARD, ROWS, COLUMNS)
    amax = tl.max(tl.abs(value), 2)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + 6.0 * whole).to(tl.float8e4nv)
    groups = tl.cdiv(N, 16)
    group = tl.program_id(1).to(tl.int64) * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)
    kept = (row < M)[:, None] & (group < groups)[None, :]
    tl.store(scales + row[:, None] * groups + group[None, :], scale, kept)

    both = scale.to(tl.float32) * whole
    divisor = tl.broadcast_to(tl.where(both == 0.0, 1.0, both)[:, :, None], value.shape)
    quotient = tl.where((both == 0.0)[:, :, None], 0.0, tl.div_rn(tl.abs(value), divisor))
    if STOCHASTIC:
        spacing = tl.where(quotient < 2.0, 0.5, tl.where(quotient < 4.0, 1.0, 2.0))
        steps = quotient / spacing
        floor = tl.floor(steps)
        place = row[:, None] * N + column[None, :]
        draw = tl.reshape(tl.rand(tl.load(seed), place), value.shape)
        quotient = (floor + tl.where(draw >= 1.0 - (steps - floor), 1.0, 0.0)) * spacing
    # Each midpoint belongs to the neighbour with an even code.
    code = (quotient > 0.25).to(tl.uint8) + (quotient >= 0.75).to(tl.uint8) + (quotient > 1.25).to(tl.uint8)
    code += (quotient >= 1.75).to(tl.uint8) + (quotient > 2.5).to(tl.uint8) + (quotient >= 3.5).to(tl.uint8)
    code += (quotient > 5.0).to(tl.uint8) + tl.where(value < 0, 8, 0).to(tl.uint8)
    even, odd = tl.split(tl.reshape(code, [ROWS, COLUMNS // 2, 2]))
    pair = tl.program_id(1).to(tl.int64) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    kept = (row < M)[:, None] & (pair < tl.cdiv(N, 2))[None, :]
    tl.store(codes + row[:, None] * tl.cdiv(N, 2) + pair[None, :], even | (odd << 4), kept)


def quantize_nvfp4(
    x: Tensor, *, signs: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(M, N) numbers into NVFP4: codes (M, ceil(N / 2)) in uint8, scales (M, ceil(N / 16)) in E4M3, an fp32 scalar.

    The low half of a byte holds the code of the even column; of an odd N, the last high half is 0. A number is
    value * scale of its 16 * the scalar. x is fp32, fp16 or bf16, of any strides. `signs`, (16,) fp32 of +1 and -1,
    multiplies each run of 16 by diag(signs) H / 4 first (`reference.random_hadamard`), and needs N divisible by 16.
    `seed`, one int64 in a tensor, rounds the elements stochastically: the same seed and position give the same random
    bits. Raises TypeError for other dtypes and ValueError for shapes that do not fit.
    """
    if x.dtype not in HALVES:
        raise TypeError(f"x is float32, float16 or bfloat16, not {x.dtype}")
    if x.ndim != 2:
        raise ValueError(f"x is a matrix, (M, N), not of shape {tuple(x.shape)}")
    m, n = x.shape
    if signs is not None and (tuple(signs.shape) != (16,) or n % 16):
        raise ValueError(f"signs are (16,) for rows of a multiple of 16, not {tuple(signs.shape)} for rows of {n}")
    if (signs is not None and signs.dtype != torch.float32) or (seed is not None and seed.dtype != torch.int64):
        raise TypeError("signs are float32 and the seed is int64")
    codes = torch.empty((m, triton.cdiv(n, 2)), dtype=torch.uint8, device=x.device)
    scales = torch.empty((m, triton.cdiv(n, 16)), dtype=torch.float8_e4m3fn, device=x.device)
    tensor_scale = torch.ones((), device=x.device)
    if x.numel():
        amax_bits = torch.zeros((), dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(m, ROWS), triton.cdiv(n, COLUMNS))
        tile = {"HADAMARD": signs is not None, "ROWS": ROWS, "COLUMNS": COLUMNS}
        _amax_kernel[grid](x, signs, amax_bits, m, n, x.stride(0), x.stride(1), **tile)
        _quantize_kernel[grid](
            x, signs, seed, codes, scales, tensor_scale, amax_bits, m, n, x.stride(0), x.stride(1),
            STOCHASTIC=seed is not None, FLOOR=NVFP4_AMAX_FLOOR, **tile,
        )  # fmt: skip
    return codes, scales, tensor_scale
