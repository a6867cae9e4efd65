"""What only a GPU can show of the bundled kernels, in under 8 minutes on an H200 or H100:

    python tests/benchmarks/native.py [--out FOLDER] [--minutes N] [--part NAME]
    python tests/benchmarks/native.py --dry-run    # without a GPU: every part in the interpreter, on small sizes

Needs torch, triton and this repository, no installation. The parts: the error of Triton's divisions in ulp, and NaN
through minimum, maximum and clamp; the accumulators of products and their speed as ratios to torch._scaled_mm and the
bf16 matmul; the speed of quantisers beside a copy's; each contract, held by one kernel or more; other tiles of the
product. Each part is a process with a share of the time, so that one that fails or hangs costs no other. What they say
is printed as it comes, and written to FOLDER (default: $OUT, where that is set). The dry run also compiles for sm_90
what will run. A script, not a test, except for its dry run. It has not run on a GPU yet: none was at hand when it was
written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
DRY = "--dry-run" in sys.argv
if DRY and "compile" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # triton decides when it is imported

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from precisionlint.kernels import contracts, gemm, native  # noqa: E402
from precisionlint.kernels.bundled import Subject, subjects  # noqa: E402
from precisionlint.kernels.compiled import compile_for, launches, specialised  # noqa: E402
from precisionlint.kernels.interpreter import load_interpreter, repaired  # noqa: E402
from precisionlint.report import verified  # noqa: E402
from precisionlint.verify import verify  # noqa: E402

PRODUCTS = ("gemm_blockscaled e4m3fn to bf16", "gemm_tensor e4m3fn to bf16")
QUANTISERS = (
    "quantize_1x128 e4m3fn fp32",
    "quantize_128x128 e4m3fn fp32",
    "quantize_tensor e4m3fn fp32",
    "quantize_row e4m3fn fp32",
    "quantize_mx e4m3fn floor",
    "quantize_nvfp4 nearest",
)
OTHERS = (
    "gemm_mx e4m3fn to bf16",
    "quantize_nvfp4 stochastic after a Hadamard transform",
    "dequantize 1x128 to bf16",
    "cast to e4m3fn",
    "stochastic_cast to bf16",
)

TILES = (
    # BLOCK_M, BLOCK_N, GROUP, warps, stages; the first is the one that is shipped. Larger tiles spill: two accumulators
    # of 128x256 fill the registers of 8 warps.
    (128, 128, 8, 8, 3),
    (128, 128, 8, 8, 2),
    (128, 128, 8, 8, 4),
    (128, 128, 4, 8, 3),
    (128, 128, 16, 8, 4),
    (64, 128, 8, 4, 4),
    (64, 256, 8, 8, 4),
    (128, 64, 8, 4, 4),
)

DEVICE = "cpu" if DRY else "cuda"
SIZES = ((128, 256, 256),) if DRY else native.SIZES
SIDE = 128 if DRY else native.SIDE


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


def arithmetic(_: Path | None) -> Iterator[str]:
    """The worst error of Triton's two divisions, in ulp of the exact quotient, and NaN through Triton's bounds."""
    size = 2**12 if DRY else 2**24
    generator = torch.Generator(DEVICE).manual_seed(0)
    x, y = (torch.randn(size, device=DEVICE, generator=generator) for _ in range(2))
    found = [torch.empty_like(x) for _ in range(2)]
    _divide[(triton.cdiv(size, 1024),)](x, y, *found, size, BLOCK=1024)
    exact = x.double() / y.double()
    ulp = torch.exp2((torch.frexp(exact).exponent - 24).double())
    for name, each in zip(("x / y", "tl.div_rn(x, y)"), found, strict=True):
        yield f"{name}: at most {((each.double() - exact).abs() / ulp).max().item():.3f} ulp"
    nan, bounded = torch.full((1,), float("nan"), device=DEVICE), torch.empty(4, device=DEVICE)
    _bound[(1,)](nan, bounded)
    for name, value in zip(("minimum", "maximum", "clamp", "clamp, NaN propagated"), bounded.tolist(), strict=True):
        yield f"NaN through {name}: {value}"


def speeds(names: tuple[str, ...]) -> Callable[[Path | None], Iterator[str]]:
    def measure(_: Path | None) -> Iterator[str]:
        """The probes and the speed of some kernels; one that fails is told and costs no other."""
        for subject in _named(names):
            contract = contracts.find(subject.contract)
            options = contract.resolve(subject.options) if DRY else native.options_here(contract, subject.options)
            try:
                for each in native.probe(subject.name, subject.launch, contract, options, DEVICE):
                    yield verified.measured(each)
                for each in native.speeds(
                    subject.name, subject.launch, contract, options, device=DEVICE, sizes=SIZES, side=SIDE
                ):
                    yield verified.measured(each)
            except Exception as error:
                yield f"FAILED {subject.name}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                if native.lost(str(error)):
                    raise

    return measure


def tiles(_: Path | None) -> Iterator[str]:
    """The block-scaled product with other tiles: is the one that is shipped the best?"""
    for m, n, k in SIZES:
        a, b = (torch.randn(rows, k, device=DEVICE).to(torch.float8_e4m3fn) for rows in (m, n))
        a_scales = torch.rand(m, k // 128, device=DEVICE) + 0.5
        b_scales = torch.rand(n // 128, k // 128, device=DEVICE) + 0.5
        expected = gemm.gemm_blockscaled(a, a_scales, b, b_scales)
        for tile in TILES:
            c = torch.empty_like(expected)
            launch = _tiled(tile, a, a_scales, b, b_scales, c)
            (seconds,) = native.clocked({"": launch}).values()
            rate = seconds if isinstance(seconds, str) else f"{2 * m * n * k / seconds / 1e12:.0f} TFLOP/s"
            same = isinstance(seconds, str) or torch.equal(c, expected)
            what = "BLOCK_M {}, BLOCK_N {}, GROUP {}, {} warps, {} stages".format(*tile)
            yield f"{m}x{n}x{k}, {what}: {rate}{'' if same else ', and not the same result'}"


def _tiled(
    tile: tuple[int, int, int, int, int],
    a: torch.Tensor,
    a_scales: torch.Tensor,
    b: torch.Tensor,
    b_scales: torch.Tensor,
    c: torch.Tensor,
) -> Callable[[], Any]:
    (m, k), n = a.shape, b.shape[0]
    height, width, group, warps, stages = tile
    grid = (triton.cdiv(m, height) * triton.cdiv(n, width),)
    return lambda: gemm._gemm_kernel[grid](
        a, a_scales, b, b_scales, c, m, n, k, *a.stride(), *a_scales.stride(), *b.stride(), *b_scales.stride(),
        c.stride(0), PER_BLOCK=True, BLOCK_M=height, BLOCK_N=width, GROUP=group, num_warps=warps, num_stages=stages,
    )  # fmt: skip


def held(out: Path | None) -> Iterator[str]:
    """Each contract natively, a group of kernels after the other; a group's whole result goes to a file."""
    start, seen, worst = time.perf_counter(), set(), 0

    def progress(kernel: str, case: str) -> None:
        if kernel not in seen:
            seen.add(kernel)
            print(f"{time.perf_counter() - start:4.0f} s  {kernel}", flush=True)

    for number, names in enumerate((PRODUCTS, QUANTISERS, OTHERS), 1):
        modes: tuple[Any, ...] = ("interpret",) if DRY else ("native",)
        verification = verify(modes=modes, kernels=names, limit=60, progress=progress)
        if out is not None:
            (out / f"contracts-{number}.json").write_text(verified.dumps(verification), encoding="utf-8")
        yield from (f"FAILED {error}" for error in verification.errors)
        yield from verified.render(verification)
        worst = max(worst, verification.exit_code)
    if worst:
        raise SystemExit(worst)


def compiled(_: Path | None) -> Iterator[str]:
    """In the dry run alone: whether each specialisation of what will run compiles for sm_90, and how long that takes."""
    start, count, failed = time.perf_counter(), 0, 0
    done: set[str] = set()
    own = [
        lambda: _divide[(1,)](*[torch.zeros(16)] * 4, 16, BLOCK=1024),
        lambda: _bound[(1,)](torch.zeros(1), torch.zeros(4)),
        *(_tiled(tile, *_operands()) for tile in TILES),
    ]
    runs = [(run, ()) for run in own]
    for subject in _named((*PRODUCTS, *QUANTISERS, *OTHERS)):
        contract = contracts.find(subject.contract)
        runs += [(subject.launch, case.make()) for case in contract.cases(contract.resolve(subject.options))]
    for run, given in runs:
        for launch in launches(run, given):
            key = repr((launch.function.__name__, specialised(launch.function, launch.arguments), launch.options))
            if key not in done:
                done.add(key)
                count += 1
                built = compile_for(launch, "sm_90")
                failed += bool(built.failed)
                if built.failed or built.spills:
                    yield f"{built.failed or f'{built.spills} bytes spilled'}: {key}"
    yield f"{count} specialisations, {failed} did not compile, {time.perf_counter() - start:.0f} s on one core"
    if failed:
        raise SystemExit(1)


def _operands() -> tuple[torch.Tensor, ...]:
    a, b = (torch.zeros(256, 256, dtype=torch.float8_e4m3fn) for _ in range(2))
    return a, torch.ones(256, 2), b, torch.ones(2, 2), torch.zeros(256, 256, dtype=torch.bfloat16)


def _named(names: tuple[str, ...]) -> list[Subject]:
    found = [subject for subject in subjects() if subject.name in names]
    assert len(found) == len(names)
    return found


PARTS: Mapping[str, tuple[Callable[[Path | None], Iterator[str]], float]] = {
    "arithmetic": (arithmetic, 1),
    "products": (speeds(PRODUCTS), 2),
    "quantisers": (speeds(QUANTISERS), 2),
    "contracts": (held, 5),
    "tiles": (tiles, 2),
    **({"compile": (compiled, 5)} if DRY else {}),
}
"""Each part, and its share of the time that is left when it begins."""


def run_part(name: str, out: Path | None) -> int:
    """Runs one part here and prints what it says."""
    with ExitStack() as stack:
        if DRY and name not in ("compile", "contracts"):
            stack.enter_context(repaired(load_interpreter()))
        for line in PARTS[name][0](out):
            print(line, flush=True)
    return 0


def run_all(minutes: float, out: Path | None) -> int:
    """Runs each part in a process of its own; 1 where one failed."""
    start, failed, names = time.monotonic(), [], list(PARTS)
    with ExitStack() as stack:
        log = stack.enter_context((out / "native.txt").open("w", encoding="utf-8")) if out is not None else None
        gpu = "no GPU" if DRY else torch.cuda.get_device_name()
        _tell(f"{gpu}, python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}", log)
        for position, name in enumerate(names):
            shares = [PARTS[each][1] for each in names[position:]]
            passed = time.monotonic() - start
            limit = max(1.0, (60 * minutes - passed) * shares[0] / sum(shares))
            _tell(f"\n== {name} (after {passed:.0f} s, at most {limit:.0f} s)", log)
            command = [sys.executable, __file__, "--part", name, *(["--dry-run"] if DRY else [])]
            if not _follow([*command, *(["--out", str(out)] if out is not None else [])], limit, log):
                failed.append(name)
        _tell(f"\n{time.monotonic() - start:.0f} s; failed: {', '.join(failed) or 'none'}", log)
    return int(bool(failed))


def _follow(command: list[str], limit: float, log: TextIO | None) -> bool:
    """Prints what a part says as it says it; whether it ended well and in time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    clock = threading.Timer(limit, process.kill)
    clock.start()
    assert process.stdout is not None
    for line in process.stdout:
        _tell(line.rstrip("\n"), log)
    code = process.wait()
    clock.cancel()
    if code:
        _tell(f"FAILED: {'out of time or ' if code < 0 else ''}ended with {code}", log)
    return not code


def _tell(line: str, log: TextIO | None) -> None:
    print(line, flush=True)
    if log is not None:
        log.write(line + "\n")
        log.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="a folder for what the parts say")
    parser.add_argument("--minutes", type=float, default=8.0, help="the time for all parts (default: 8)")
    parser.add_argument("--part", choices=tuple(PARTS), help="only this part, in this process")
    parser.add_argument("--dry-run", action="store_true", help="in the interpreter, on small sizes")
    options = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        print("no GPU here: --dry-run walks through all parts without one", file=sys.stderr)
        return 2
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    return run_part(options.part, options.out) if options.part else run_all(options.minutes, options.out)


if __name__ == "__main__":
    sys.exit(main())
