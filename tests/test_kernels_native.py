"""What of the mode `native` can be held without a GPU: where tensors land, what probes tell apart, and what is said."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from precisionlint.formats import E4M3FN
from precisionlint.kernels import contracts, native
from precisionlint.kernels.operands import products
from precisionlint.kernels.reference import matmul_with_narrow_accumulator
from precisionlint.verify import verify

CONTRACT = contracts.find("gemm_tensor")


def product(multiply: Callable[[Tensor, Tensor], Tensor], out: torch.dtype) -> Callable[..., Tensor]:
    """A launcher of the form of gemm_tensor whose accumulator is that of `multiply`."""

    def launch(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        return (multiply(a.double(), b.double().t()) * a_scale * b_scale).to(out)

    return launch


def never(a: Tensor, b: Tensor) -> Tensor:
    return matmul_with_narrow_accumulator(a, b, promote=None)


def in_halves(a: Tensor, b: Tensor) -> Tensor:
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for k in range(a.shape[1]):
        total += (a[:, k : k + 1] @ b[k : k + 1]).bfloat16()
    return total.double()


@pytest.mark.parametrize(
    ("multiply", "said"),
    [
        (torch.matmul, "fp32 (the probe"),
        (matmul_with_narrow_accumulator, "about 14 bits, promoted to fp32 every 128 of K (the probe"),
        (never, "14 bits or fewer, never promoted (the probe gave 0"),
        (in_halves, "14 bits or fewer, never promoted (the probe gave 0"),
        (lambda a, b: a @ b + 7, "unknown (the probe gave"),
    ],
)
@pytest.mark.parametrize("out", ["fp32", "bf16"])
def test_a_probe_tells_accumulators_apart(multiply: Callable[[Tensor, Tensor], Tensor], said: str, out: str) -> None:
    options = CONTRACT.resolve({"out": out})
    launch = product(multiply, {"fp32": torch.float32, "bf16": torch.bfloat16}[out])
    (measured,) = native.probe("k", launch, CONTRACT, options, "cpu")
    assert measured.got.startswith(said)
    assert measured.against == "declared: fp32"


def test_a_promoted_tensor_core_breaks_a_declared_fp32_sum_and_keeps_its_own() -> None:
    launch = product(matmul_with_narrow_accumulator, torch.float32)
    case = next(each for each in products(E4M3FN, per_block=False) if each.name.startswith("a large product"))
    given = case.make()
    outputs = (launch(*given),)
    assert CONTRACT.judge(given, outputs, CONTRACT.resolve({"out": "fp32"}))
    declared = CONTRACT.resolve({"out": "fp32", "accumulator": "tensor-core"})
    assert CONTRACT.judge(given, outputs, declared) == []
    assert CONTRACT.judge(given, (outputs[0] * 1.05,), declared)


def test_a_tensor_lands_with_its_strides_and_what_lies_around_it() -> None:
    whole = torch.arange(60.0).reshape(6, 10)
    part = whole[1:5, 2:9:3]
    there = native.placed(part, "cpu")
    assert there.data_ptr() != part.data_ptr()
    assert (there.stride(), there.storage_offset()) == (part.stride(), part.storage_offset())
    assert torch.equal(there, part)
    assert torch.equal(there.as_strided((6, 10), (10, 1), 0), whole)


def test_of_a_huge_storage_only_the_tensor_is_copied() -> None:
    far = torch.empty(2**27, dtype=torch.uint8).as_strided((2, 3), (2**26, 1))
    far.copy_(torch.arange(6).reshape(2, 3))
    there = native.placed(far, "cpu")
    assert there.stride() == (2**26, 1)
    assert torch.equal(there, far)


def test_what_does_not_run_is_told_beside_what_was_timed() -> None:
    def fails() -> None:
        raise RuntimeError("no such product\nat all")

    times = native.clocked({"sound": lambda: torch.zeros(1), "broken": fails})
    assert isinstance(times["sound"], float)
    assert times["broken"] == "RuntimeError: no such product"
    options = CONTRACT.resolve({})
    (measured,) = native.speeds("k", lambda *_: fails(), CONTRACT, options, device="cpu", sizes=[(16, 16, 32)])
    assert (measured.got, measured.against) == ("not measured", "RuntimeError: no such product")


def test_an_error_that_loses_the_device_is_told_from_others() -> None:
    assert native.lost("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert not native.lost("OutOfResources: out of resource: shared memory")


SCRIPT = Path(__file__).parent / "benchmarks" / "native.py"


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), "--dry-run", *arguments], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("arithmetic", "tl.div_rn(x, y): at most 0.500 ulp"),
        ("products", "gemm_blockscaled e4m3fn to bf16: speed at 128x256x256: "),
        ("quantisers", "quantize_nvfp4 nearest: bandwidth at 128x128 bf16: "),
        ("tiles", "BLOCK_M 128, BLOCK_N 64, GROUP 8, 4 warps, 4 stages: "),
    ],
)
def test_a_part_of_the_script_for_gpus_walks_through_on_a_cpu(part: str, said: str) -> None:
    ran = dry_run("--part", part)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert said in ran.stdout
    assert "FAILED" not in ran.stdout


def test_a_part_of_the_script_that_takes_too_long_costs_no_other_and_what_was_said_is_kept(tmp_path: Path) -> None:
    ran = dry_run("--minutes", "0", "--out", str(tmp_path))
    parts = ["arithmetic", "products", "quantisers", "contracts", "tiles", "compile"]
    assert ran.returncode == 1
    assert re.findall("^== (\\w+)", ran.stdout, re.MULTILINE) == parts
    assert ran.stdout.endswith(f"failed: {', '.join(parts)}\n")
    assert (tmp_path / "native.txt").read_text(encoding="utf-8") == ran.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said without a GPU")
def test_without_a_gpu_the_named_mode_is_an_error_and_the_default_says_that_it_did_not_run() -> None:
    verification = verify(kernels=[], modes=("native",))
    assert verification.exit_code == 2
    (error,) = verification.errors
    assert error.startswith("the mode native needs a GPU, and torch finds none")
    assert "\n" not in error
    verification = verify(kernels=[])
    assert verification.exit_code == 0
    assert verification.unchecked[-1] == "nothing ran on a GPU: neither its arithmetic nor its speed was looked at"
