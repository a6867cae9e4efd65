"""Products of scaled FP8 matrices: per tensor and block-scaled, accumulated in fp32 every 128 of K.

The tensor cores of sm_90 keep about 14 bits of an fp8 sum. Here each 128 of K is a dot of its own, whose result is
added to an fp32 accumulator outside of the tensor core, so that no longer sum is ever kept in fewer bits. NaN in an
operand or a scale makes the rows and columns NaN that it belongs to; products beyond the output's range become
infinite.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _gemm_kernel(
    a, a_scales, b, b_scales, c, M, N, K, a_row, a_column, as_row, as_column, b_row, b_column, bs_row, bs_column, c_row,
    PER_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # Programs that run together share rows of b: GROUP rows of tiles are walked column by column.
    program = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = program // (GROUP * tiles_n) * GROUP
    height = tl.minimum(tiles_m - first, GROUP)
    row = (first + program % (GROUP * tiles_n) % height).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = (program % (GROUP * tiles_n) // height).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, 128).to(tl.int64)
    in_row, in_column = row < M, column < N

    accumulator = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in range(tl.cdiv(K, 128)):
        in_k = block * 128 + k < K
        left = tl.load(
            a + row[:, None] * a_row + (block * 128 + k)[None, :] * a_column, in_row[:, None] & in_k[None, :], other=0.0
        )
        right = tl.load(
            b + (block * 128 + k)[:, None] * b_column + column[None, :] * b_row, in_k[:, None] & in_column[None, :],
            other=0.0,
        )  # fmt: skip
        partial = tl.dot(left, right)
        if PER_BLOCK:
            left_scale = tl.load(a_scales + row * as_row + block * as_column, in_row, other=0.0)
            right_scale = tl.load(b_scales + column // 128 * bs_row + block * bs_column, in_column, other=0.0)
            partial = partial * (left_scale[:, None] * right_scale[None, :])
        accumulator += partial
    if not PER_BLOCK:
        accumulator = accumulator * (tl.load(a_scales) * tl.load(b_scales))
    address = c + row[:, None] * c_row + column[None, :]
    tl.store(address, accumulator.to(c.dtype.element_ty), in_row[:, None] & in_column[None, :])


def gemm_blockscaled(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a @ b.T of dequantised matrices, (M, N) in out_dtype.

    a (M, K) and b (N, K) are FP8 (both E4M3 or E5M2), of any strides; a_scales (M, ceil(K / 128)) and
    b_scales (ceil(N / 128), ceil(K / 128)) are fp32 multipliers, of any strides; out_dtype is bf16, fp16 or fp32.
    Raises TypeError for other dtypes and ValueError for shapes that do not fit together.
    """
    m, n, k = _sizes(a, b, out_dtype)
    for name, scales, shape in (
        ("a_scales", a_scales, (m, triton.cdiv(k, 128))),
        ("b_scales", b_scales, (triton.cdiv(n, 128), triton.cdiv(k, 128))),
    ):
        if tuple(scales.shape) != shape:
            raise ValueError(f"{name} is of shape {tuple(scales.shape)}, and a and b ask for {shape}")
        if scales.dtype != torch.float32:
            raise TypeError(f"{name} is float32, not {scales.dtype}")
    strides = (a_scales.stride(0), a_scales.stride(1), b_scales.stride(0), b_scales.stride(1))
    return _gemm(a, a_scales, b, b_scales, strides, out_dtype, per_block=True)


def gemm_tensor(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """a @ b.T * a_scale * b_scale, (M, N) in out_dtype.

    a (M, K) and b (N, K) are FP8 (both E4M3 or E5M2), of any strides; each scale is one fp32 number in a tensor of any
    shape; out_dtype is bf16, fp16 or fp32. Raises TypeError for other dtypes and ValueError for shapes that do not fit
    together.
    """
    _sizes(a, b, out_dtype)
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale)):
        if scale.numel() != 1:
            raise ValueError(f"{name} is one number, not {scale.numel()}")
        if scale.dtype != torch.float32:
            raise TypeError(f"{name} is float32, not {scale.dtype}")
    return _gemm(a, a_scale, b, b_scale, (0, 0, 0, 0), out_dtype, per_block=False)


def _gemm(
    a: Tensor,
    a_scales: Tensor,
    b: Tensor,
    b_scales: Tensor,
    strides: tuple[int, int, int, int],
    out_dtype: torch.dtype,
    per_block: bool,
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    c = torch.empty((m, n), dtype=out_dtype, device=a.device)
    tile = 64 if m <= 64 else 128
    if c.numel():
        _gemm_kernel[(triton.cdiv(m, tile) * triton.cdiv(n, 128),)](
            a, a_scales, b, b_scales, c, m, n, k, a.stride(0), a.stride(1), strides[0], strides[1],
            b.stride(0), b.stride(1), strides[2], strides[3], c.stride(0),
            PER_BLOCK=per_block, BLOCK_M=tile, BLOCK_N=128, GROUP=8, num_warps=8 if tile == 128 else 4, num_stages=3,
        )  # fmt: skip
    return c


def _sizes(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> tuple[int, int, int]:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a is (M, K) and b (N, K), not {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in FP8 or a.dtype != b.dtype:
        raise TypeError(f"a and b are both float8_e4m3fn or both float8_e5m2, not {a.dtype} and {b.dtype}")
    if out_dtype not in OUTPUTS:
        raise TypeError(f"out_dtype is bfloat16, float16 or float32, not {out_dtype}")
    return a.shape[0], b.shape[0], a.shape[1]
