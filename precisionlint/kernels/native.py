"""Runs kernels where a GPU is: the same inputs in the same layout there, probes of the accumulator, and speed as ratios.

It knows devices and clocks; what a kernel should return is the contract's. The probes and the placing of tensors work on
a CPU too, which is how they are tested; the clock needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from precisionlint.formats import E4M3FN, FORMATS, round_to
from precisionlint.kernels.contracts import Contract, Options
from precisionlint.kernels.outcome import Measured
from precisionlint.kernels.reference import matmul_with_narrow_accumulator

WHOLE_STORAGE = 2**26
"""Bytes up to which a tensor's storage goes to the device with it, the numbers around it included."""

HOPPER = (9, 0)
"""The compute capability whose tensor cores keep about 14 bits of a sum of FP8 products."""

SIZES = ((8192, 8192, 8192), (4096, 7168, 2048))
"""(M, N, K) of the products that are timed."""

PROBE_K = 1024


def absent() -> str:
    """Why nothing can run natively here, in one line; empty where a GPU is there."""
    if torch.cuda.is_available():
        return ""
    built = "torch was built without CUDA" if torch.version.cuda is None and torch.version.hip is None else ""
    return f"the mode native needs a GPU, and torch finds none{f': {built}' if built else ''}"


def placed(x: Tensor, device: str) -> Tensor:
    """x on a device, with its strides and offset, and with what lies around it unless its storage is very large."""
    storage = x.untyped_storage()
    whole = torch.empty(0, dtype=x.dtype).set_(storage)
    if storage.nbytes() <= WHOLE_STORAGE:
        there = whole.to(device, copy=True)
    else:
        there = torch.empty(whole.shape, dtype=x.dtype, device=device)
    view = there.as_strided(x.shape, x.stride(), x.storage_offset())
    if storage.nbytes() > WHOLE_STORAGE:
        view.copy_(x)
    return view


def options_here(contract: Contract, given: Mapping[str, str]) -> Options:
    """The options, with the accumulator that this GPU's tensor cores have unless one is declared."""
    known = {option.name for option in contract.options}
    if "accumulator" in known and "accumulator" not in given and torch.cuda.get_device_capability() == HOPPER:
        return contract.resolve({**given, "accumulator": "tensor-core"})
    return contract.resolve(given)


def probe(
    name: str, launch: Callable[..., Any], contract: Contract, options: Options, device: str
) -> Iterator[Measured]:
    """What a product's accumulator shows itself to be, beside what is declared.

    448 * 448 at the first of K, minus that at the last, and ones between: 1022 in fp32. A sum that keeps fewer bits
    loses ones beside the large product, and the number of those that are left tells where it was promoted.
    """
    if contract.name not in ("gemm_blockscaled", "gemm_tensor") or options["format"] != "e4m3fn":
        return
    a, b = torch.ones(128, PROBE_K), torch.ones(128, PROBE_K)
    a[:, 0] = b[:, 0] = b[:, -1] = E4M3FN.maximum
    a[:, -1] = -E4M3FN.maximum
    groups = PROBE_K // 128
    shapes: tuple[tuple[int, ...], ...] = ((128, groups), (1, groups))
    if contract.name == "gemm_tensor":
        shapes = ((), ())
    scales = [torch.ones(shape, device=device) for shape in shapes]
    codes = [each.to(torch.float8_e4m3fn).to(device) for each in (a, b)]
    found = launch(codes[0], scales[0], codes[1], scales[1]).double().cpu()
    got = found[0, 0].item()
    said = "unknown"
    if bool((found == got).all()):
        said = next((words for words, value in _models(a, b, options) if value == got), "unknown")
    declared = options["accumulator"] if options["accumulator"] == "fp32" else "about 14 bits, promoted"
    yield Measured(
        name, "accumulator", f"{said} (the probe gave {got:g}, where fp32 gives 1022)", f"declared: {declared}"
    )


def _models(a: Tensor, b: Tensor, options: Options) -> Iterator[tuple[str, float]]:
    """What the probe gives, rounded to the output's format, for each accumulator that is told apart."""
    out = FORMATS[options["out"]]
    first, second = a[:1].double(), b[:1].double().t()
    yield "fp32", round_to(first @ second, out).item()
    for promote in (32, 64, 128, 256, 512, None):
        value = matmul_with_narrow_accumulator(first, second, promote=promote)
        words = (
            f"about 14 bits, promoted to fp32 every {promote} of K" if promote else "14 bits or fewer, never promoted"
        )
        yield words, round_to(value, out).item()


def speeds(name: str, launch: Callable[..., Any], contract: Contract, options: Options) -> Iterator[Measured]:
    """How fast a kernel is, as a ratio to what torch brings; nothing for a contract that has no such measure."""
    if contract.name in ("gemm_blockscaled", "gemm_tensor"):
        for size in SIZES:
            yield from _product_speed(name, launch, contract.name == "gemm_blockscaled", options, size)
    elif contract.name.startswith("quantize_") and not {"signs", "seed"} & _more(contract, options):
        yield _bandwidth(name, launch)


def _more(contract: Contract, options: Options) -> set[str]:
    """What else than x a quantiser is given."""
    found = {"seed"} if options.get("rounding") == "stochastic" else set()
    return found | ({"signs"} if options.get("hadamard") == "16" else set())


def _product_speed(
    name: str, launch: Callable[..., Any], per_block: bool, options: Options, size: tuple[int, int, int]
) -> Iterator[Measured]:
    m, n, k = size
    dtype = FORMATS[options["format"]].torch_dtype
    wide = [torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n)]
    a, b = (each.to(dtype) for each in wide)
    one = torch.ones((), device="cuda")
    scales = (one, one)
    if per_block:
        scales = (torch.ones(m, -(-k // 128), device="cuda"), torch.ones(-(-n // 128), -(-k // 128), device="cuda"))
    ours = _milliseconds(lambda: launch(a, scales[0], b, scales[1]))
    rate = 2 * m * n * k / ours / 1e9
    baselines: dict[str, Callable[[], Any]] = {"the bf16 matmul": lambda: wide[0] @ wide[1].t()}
    if options["format"] == "e4m3fn":
        baselines["torch._scaled_mm per tensor"] = lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16
        )
        if per_block:
            by_column = scales[0].t().contiguous().t()
            baselines["torch._scaled_mm by block"] = lambda: torch._scaled_mm(
                a, b.t(), scale_a=by_column, scale_b=scales[1].t(), out_dtype=torch.bfloat16
            )
    ratios = []
    for words, baseline in baselines.items():
        try:
            ratios.append(f"{_milliseconds(baseline) / ours:.2f} of {words}")
        except RuntimeError as error:  # this torch or this GPU has no such product
            ratios.append(f"{words} does not run here ({str(error).partition(chr(10))[0][:80]})")
    yield Measured(name, f"speed at {m}x{n}x{k}", f"{rate:.0f} TFLOP/s", ", ".join(ratios))


def _bandwidth(name: str, launch: Callable[..., Any]) -> Measured:
    """Bytes of input and output a second, over those of a copy: each byte counts once, however often it is read."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(x)
    outputs = launch(x)
    moved = sum(each.numel() * each.element_size() for each in (x, *outputs))
    rate = moved / _milliseconds(lambda: launch(x)) / 1e6
    copy = 2 * x.numel() * x.element_size() / _milliseconds(lambda: target.copy_(x)) / 1e6
    return Measured(name, "bandwidth at 8192x8192 bf16", f"{rate:.0f} GB/s", f"{rate / copy:.2f} of a copy")


def _milliseconds(run: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    median: float = do_bench(run, warmup=25, rep=100, return_mode="median")
    return median
