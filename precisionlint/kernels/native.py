"""Runs kernels where a GPU is: the same inputs in the same layout there, probes of the accumulator, and speed as ratios.

It knows devices and clocks; what a kernel should return is the contract's. The probes and the placing of tensors work on
a CPU too, which is how they are tested; the clock needs a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
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

SIDE = 16384
"""Rows and columns of the matrix that a quantiser is timed on: 512 MiB in bf16, several times a GPU's cache, and long
beside the launch of a kernel."""

ROUNDS = 3
"""How often each run is timed, in turn with the others."""

PROBE_K = 1024


def lost(text: str) -> bool:
    """Whether an error's text says that the device is lost to this process: every later call fails as well."""
    return "CUDA error" in text or "HIP error" in text


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

    448 * 448 at the first of K, minus that at the last, and ones between: 1022, which is 1024 in bf16. A sum that keeps
    fewer bits loses ones beside the large product, and the number of those that are left tells where it was promoted.
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
    models = dict(_models(a, b, options))
    said = "unknown"
    if bool((found == got).all()):
        said = next((words for words, value in models.items() if value == got), "unknown")
    declared = options["accumulator"] if options["accumulator"] == "fp32" else "about 14 bits, promoted"
    yield Measured(
        name,
        "accumulator",
        f"{said} (the probe gave {got:g}, where fp32 gives {models['fp32']:g})",
        f"declared: {declared}",
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


def speeds(
    name: str,
    launch: Callable[..., Any],
    contract: Contract,
    options: Options,
    *,
    device: str = "cuda",
    sizes: Sequence[tuple[int, int, int]] = SIZES,
    side: int = SIDE,
) -> Iterator[Measured]:
    """How fast a kernel is, as a ratio to what torch brings; nothing for a contract that has no such measure.

    `sizes` are those of products, `side` is that of the square matrix that a quantiser is given.
    """
    if contract.name in ("gemm_blockscaled", "gemm_tensor"):
        for size in sizes:
            yield _product_speed(name, launch, contract.name == "gemm_blockscaled", options, size, device)
    elif contract.name.startswith("quantize_") and not _more(contract, options):
        yield _bandwidth(name, launch, device, side)


def _more(contract: Contract, options: Options) -> set[str]:
    """What else than x a quantiser is given."""
    found = {"seed"} if options.get("rounding") == "stochastic" else set()
    return found | ({"signs"} if options.get("hadamard") == "16" else set())


def _product_speed(
    name: str,
    launch: Callable[..., Any],
    per_block: bool,
    options: Options,
    size: tuple[int, int, int],
    device: str,
) -> Measured:
    m, n, k = size
    dtype = FORMATS[options["format"]].torch_dtype
    wide = [torch.randn(rows, k, device=device, dtype=torch.bfloat16) for rows in (m, n)]
    a, b = (each.to(dtype) for each in wide)
    one = torch.ones((), device=device)
    scales = (one, one)
    if per_block:
        scales = (torch.ones(m, -(-k // 128), device=device), torch.ones(-(-n // 128), -(-k // 128), device=device))
    ours = "this kernel"
    runs: dict[str, Callable[[], Any]] = {
        ours: lambda: launch(a, scales[0], b, scales[1]),
        "the bf16 matmul": lambda: wide[0] @ wide[1].t(),
    }
    if options["format"] == "e4m3fn":
        runs |= _scaled_mm(a, b, one, scales if per_block else None)
    seconds = clocked(runs)
    if isinstance(seconds[ours], str):
        return Measured(name, f"speed at {m}x{n}x{k}", "not measured", str(seconds[ours]))
    mine = float(seconds.pop(ours))
    ratios = [
        f"{words} does not run here ({each})" if isinstance(each, str) else f"{each / mine:.2f} of {words}"
        for words, each in seconds.items()
    ]
    return Measured(name, f"speed at {m}x{n}x{k}", f"{2 * m * n * k / mine / 1e12:.0f} TFLOP/s", ", ".join(ratios))


def _scaled_mm(
    a: Tensor, b: Tensor, one: Tensor, by_block: tuple[Tensor, Tensor] | None
) -> dict[str, Callable[[], Any]]:
    """torch's own products of a (M, K) and b (N, K): per tensor, and by block where the scales are given.

    torch takes the scales of a stored column by column, and those of b transposed as b is
    (torch/test/test_scaled_matmul_cuda.py); CUDA 12.9 and sm_90 alone have the product by block.
    """
    out = torch.bfloat16

    def per_tensor(fast: bool) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=fast)

    found: dict[str, Callable[[], Any]] = {
        "torch._scaled_mm per tensor": lambda: per_tensor(False),
        "the same with fast accumulation": lambda: per_tensor(True),
    }
    if by_block is not None:
        columns, transposed = by_block[0].t().contiguous().t(), by_block[1].t()
        found["torch._scaled_mm by block"] = lambda: torch._scaled_mm(
            a, b.t(), scale_a=columns, scale_b=transposed, out_dtype=out
        )
    return found


def _bandwidth(name: str, launch: Callable[..., Any], device: str, side: int) -> Measured:
    """Bytes of input and output a second, over those of a copy: each byte counts once, however often it is read."""
    what = f"bandwidth at {side}x{side} bf16"
    x = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(x)
    outputs = launch(x)
    moved = sum(each.numel() * each.element_size() for each in (x, *outputs))
    seconds = clocked({"kernel": lambda: launch(x), "copy": lambda: target.copy_(x)})
    for each in seconds.values():
        if isinstance(each, str):
            return Measured(name, what, "not measured", each)
    rate, copy = moved / float(seconds["kernel"]), 2 * x.numel() * x.element_size() / float(seconds["copy"])
    return Measured(name, what, f"{rate / 1e9:.0f} GB/s", f"{rate / copy:.2f} of a copy")


def clocked(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float | str]:
    """The seconds that each run takes, the median of rounds in turn, or why it does not run, in a line.

    On a GPU: triton's do_bench, which warms up, clears the L2 cache before each run and takes the time by events. The
    rounds take turns, so that a clock that sinks with the heat sinks for all. Elsewhere each runs once.
    """
    found: dict[str, list[float] | str] = {name: [] for name in runs}
    for _ in range(ROUNDS if torch.cuda.is_available() else 1):
        for name, run in runs.items():
            times = found[name]
            if isinstance(times, str):
                continue
            try:
                times.append(_seconds(run))
            except Exception as error:  # this torch or this GPU has no such product, or no room for it
                found[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
    return {name: each if isinstance(each, str) else median(each) for name, each in found.items()}


def _seconds(run: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    from triton.testing import do_bench

    milliseconds: float = do_bench(run, warmup=25, rep=50, return_mode="median")
    return milliseconds / 1e3
