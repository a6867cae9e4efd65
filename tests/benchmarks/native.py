"""What only a GPU can show of the bundled kernels, in under 8 minutes on an H200 or H100:

    python tests/benchmarks/native.py [--all]

each contract natively, the accumulator probes, speed as ratios to torch._scaled_mm, the bf16 matmul and a copy; and what
Triton's `/` and clamp do there: the error of a quotient in ulp, and NaN through minimum, maximum and clamp. Without
--all the kernels are those of E4M3 and bf16, one of each contract. A script, not a test. It has not run yet: no GPU was
at hand when it was written.
"""

import argparse
import sys
import time

import torch
import triton
import triton.language as tl

from precisionlint.report import verified
from precisionlint.verify import verify

KERNELS = (
    "gemm_blockscaled e4m3fn to bf16",
    "gemm_tensor e4m3fn to bf16",
    "gemm_mx e4m3fn to bf16",
    "quantize_1x128 e4m3fn fp32",
    "quantize_128x128 e4m3fn fp32",
    "quantize_tensor e4m3fn fp32",
    "quantize_row e4m3fn fp32",
    "quantize_mx e4m3fn floor",
    "quantize_nvfp4 nearest",
    "quantize_nvfp4 stochastic after a Hadamard transform",
    "dequantize 1x128 to bf16",
    "cast to e4m3fn",
    "stochastic_cast to bf16",
)


@triton.jit
def _divide(x, y, full, ieee, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(x + i, i < N), tl.load(y + i, i < N, other=1.0)
    tl.store(full + i, a / b, i < N)
    tl.store(ieee + i, tl.div_rn(a, b), i < N)


@triton.jit
def _bound(x, y):
    value = tl.load(x)
    tl.store(y, tl.minimum(value, 448.0))
    tl.store(y + 1, tl.maximum(value, -448.0))
    tl.store(y + 2, tl.clamp(value, -448.0, 448.0))
    tl.store(y + 3, tl.clamp(value, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))


def quotients() -> None:
    """The worst error of Triton's two divisions over 2^24 pairs, in ulp of the exact quotient."""
    size = 2**24
    generator = torch.Generator("cuda").manual_seed(0)
    x, y = (torch.randn(size, device="cuda", generator=generator) for _ in range(2))
    found = [torch.empty_like(x) for _ in range(2)]
    _divide[(triton.cdiv(size, 1024),)](x, y, *found, size, BLOCK=1024)
    exact = x.double() / y.double()
    ulp = torch.exp2(torch.frexp(exact).exponent.double() - 24)
    for name, each in zip(("x / y", "tl.div_rn(x, y)"), found, strict=True):
        print(f"{name}: at most {((each.double() - exact).abs() / ulp).max().item():.2f} ulp")


def bounds() -> None:
    """What becomes of NaN on the way through Triton's bounds."""
    x, y = torch.full((1,), float("nan"), device="cuda"), torch.empty(4, device="cuda")
    _bound[(1,)](x, y)
    for name, value in zip(("minimum", "maximum", "clamp", "clamp, NaN propagated"), y.tolist(), strict=True):
        print(f"NaN through {name}: {value}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="every bundled kernel, which takes longer")
    options = parser.parse_args()
    start = time.perf_counter()
    seen: set[str] = set()

    def progress(kernel: str, case: str) -> None:
        if kernel not in seen:
            seen.add(kernel)
            print(f"{time.perf_counter() - start:4.0f} s  {kernel}", file=sys.stderr, flush=True)

    verification = verify(modes=("native",), kernels=None if options.all else KERNELS, progress=progress)
    for error in verification.errors:
        print(error, file=sys.stderr)
    if verification.errors and not verification.outcomes:
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print("\n".join(verified.render(verification)))
    quotients()
    bounds()
    print(f"{time.perf_counter() - start:.0f} s")
    return verification.exit_code


if __name__ == "__main__":
    sys.exit(main())
