"""`verify` holds bundled and users' launchers against their contracts, and says what it found and did not look at."""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from precisionlint import catalogue, cli
from precisionlint.kernels import contracts
from precisionlint.kernels.contracts import ContractError
from precisionlint.kernels.launchers import LauncherError, load
from precisionlint.kernels.outcome import Compiled, Evidence, Multiplication, Outcome, Tried, Verification, Violation
from precisionlint.kernels.planted import planted
from precisionlint.kernels.run import try_case
from precisionlint.report import verified
from precisionlint.verify import prove, verify

pytest.importorskip("triton")

LAUNCHER = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, codes, scales, M, N, row_stride, column_stride, GROUPS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * 16 + tl.arange(0, 16)
    for group in range(GROUPS):
        column = group * 128 + tl.arange(0, 128)
        inside = (row < M)[:, None] & (column < N)[None, :]
        at = row[:, None] * row_stride + column[None, :] * column_stride
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        nan = tl.max((value != value).to(tl.int32), 1) > 0
        amax = tl.where(nan, float("nan"), tl.maximum(tl.max(tl.abs(value), 1), 1e-10))
        scale = tl.where(amax < float("inf"), amax / 448.0, float("nan"))
        tl.store(scales + row * GROUPS + group, scale, row < M)
        tl.store(codes + row[:, None] * N + column[None, :], (value / scale[:, None]).to(tl.float8e4nv), inside)

def launch(x):
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(x.shape[0], triton.cdiv(x.shape[1], 128))
    kernel[(triton.cdiv(x.shape[0], 16),)](x, codes, scales, *x.shape, *x.stride(), GROUPS=scales.shape[1])
    return codes, scales

def careless(x):
    codes, scales = launch(x.contiguous())
    return codes, scales * 1.01

def particular(x):
    assert x.shape[1] % 128 == 0, "whole blocks alone"
    return launch(x)

def shapeless(x):
    return launch(x)[0]

def dies(x):
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)

not_a_function = 3
"""

HALF = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    value = tl.load(x + i)
    tl.store(y + i, value + value)

def launch(x):
    x = x.bfloat16().contiguous()
    y = torch.empty_like(x)
    kernel[(1,)](x, y, N=64)
    return y, y
"""

interpreted = partial(verify, modes=("interpret",))


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    path = tmp_path / "my_kernels.py"
    path.write_text(LAUNCHER, encoding="utf-8")
    return path


def test_a_users_launcher_that_keeps_its_contract_passes(kernels: Path) -> None:
    verification = interpreted(f"{kernels}:launch", contract="quantize_1x128", options={"floor": "1e-10"})
    (outcome,) = verification.outcomes
    assert outcome.sound, [tried for tried in outcome.tried if tried.violations]
    assert len(outcome.tried) > 20
    assert verification.exit_code == 0
    assert outcome.line == LAUNCHER.splitlines().index("def launch(x):") + 1


def test_a_wrong_scale_is_told_with_its_place_and_size(kernels: Path) -> None:
    verification = interpreted(f"{kernels}:careless", contract="quantize_1x128", options={"floor": "1e-10"})
    (outcome,) = verification.outcomes
    assert verification.exit_code == 1
    broken = {violation.clause for tried in outcome.tried for violation in tried.violations}
    assert "scale" in broken
    text = "\n".join(verified.render(verification))
    assert "kernel-breaks-contract" in text
    assert "off by 0.01 of the scale" in text
    assert "not checked: nothing ran on a GPU" in text


def test_an_undeclared_floor_is_told(kernels: Path) -> None:
    (outcome,) = interpreted(f"{kernels}:launch", contract="quantize_1x128").outcomes
    broken = {tried.case for tried in outcome.tried if tried.violations}
    assert broken == {"a different size in each row and block", "blocks down to subnormal numbers"}


def test_a_floor_that_shows_and_inputs_that_can_be_declared_away_are_told(tmp_path: Path) -> None:
    path = tmp_path / "packed.py"
    path.write_text(LAUNCHER.replace("*x.stride()", "x.shape[1], 1"), encoding="utf-8")
    text = "\n".join(verified.render(interpreted(f"{path}:launch", contract="quantize_1x128")))
    assert "takes magnitudes below 1e-10 for 1e-10 declares it: --option floor=1e-10" in text
    assert "not broken on other inputs" not in text
    kept = interpreted(f"{path}:launch", contract="quantize_1x128", options={"floor": "1e-10"})
    assert kept.exit_code == 1
    last = "  not broken on other inputs: a launcher that is not made for these declares strides=contiguous"
    assert last in list(verified.render(kept))
    declared = {"floor": "1e-10", "strides": "contiguous"}
    assert interpreted(f"{path}:launch", contract="quantize_1x128", options=declared).exit_code == 0


def test_a_launcher_that_raises_on_some_inputs_breaks_its_contract_there(kernels: Path) -> None:
    (outcome,) = interpreted(f"{kernels}:particular", contract="quantize_1x128", options={"floor": "1e-10"}).outcomes
    broken = [tried for tried in outcome.tried if tried.violations]
    assert {tried.case.partition(",")[0] for tried in broken} == {"ragged"}
    assert {violation.clause for tried in broken for violation in tried.violations} == {"raises"}


def test_a_launcher_of_another_form_is_told_what_is_expected(kernels: Path) -> None:
    (outcome,) = interpreted(f"{kernels}:shapeless", contract="quantize_1x128").outcomes
    assert {violation.allowed for tried in outcome.tried for violation in tried.violations} == {
        "2 tensors (codes, scales)"
    }


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("{}:absent", "has no 'absent'"),
        ("no_such_module:launch", "No module named 'no_such_module'"),
        ("{}:kernel", "is a Triton kernel; a launcher is a Python function of tensors"),
        ("{}:not_a_function", "is no function"),
    ],
)
def test_what_is_no_launcher_is_told_in_one_line(
    kernels: Path, launcher: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    with pytest.raises(LauncherError, match=re.escape(said)) as raised:
        load(launcher.format(kernels))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("contract", "options", "said"),
    [
        ("quantise_1x128", {}, "did you mean 'quantize_1x128'?"),
        ("quantize_1x128", {"quotiant": "ieee"}, "did you mean 'quotient'?"),
        ("quantize_1x128", {"quotient": "exact"}, "one of full, ieee, reciprocal"),
        ("quantize_1x128", {"floor": "low"}, "one of undeclared, a number"),
    ],
)
def test_an_unknown_contract_or_option_is_told_with_what_there_is(
    contract: str, options: dict[str, str], said: str
) -> None:
    with pytest.raises(ContractError, match=re.escape(said)):
        contracts.find(contract).resolve(options)


@pytest.mark.parametrize(
    ("contract", "said"),
    [("quantise_1x128", "did you mean 'quantize_1x128'?"), ("quantize_1x128", "was killed by signal 9, at ")],
)
def test_what_cannot_run_is_one_line_and_exit_code_2(kernels: Path, contract: str, said: str) -> None:
    verification = interpreted(f"{kernels}:dies", contract=contract)
    assert verification.exit_code == 2
    (error,) = verification.errors
    assert said in error
    assert "\n" not in error
    assert "no launcher ran in the mode interpret" in verification.unchecked
    assert not [told for told in verification.unchecked if "did not show" in told]


def test_the_command_verifies_a_module_of_the_working_directory(kernels: Path) -> None:
    command = [sys.executable, "-m", "precisionlint", "verify", "my_kernels:launch", "--contract", "quantize_1x128"]
    ran = subprocess.run(
        [*command, "--option", "floor=1e-10", "--format", "json", "--target", "sm_90", "--target", "gfx942"],
        cwd=kernels.parent,
        capture_output=True,
        text=True,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    report = json.loads(ran.stdout)
    assert report["schema"] == 1
    assert report["outcomes"][0]["path"] == "my_kernels.py"
    assert report["outcomes"][0]["contract"] == "quantize_1x128"
    assert [(built["kernel"], built["target"]) for built in report["compiled"]] == [
        ("kernel", "sm_90"),
        ("kernel", "gfx942"),
    ]


ENDS = """
import os, signal, sys, time
import precisionlint

@precisionlint.contract("cast")
def killed(x):
    os.kill(os.getpid(), signal.SIGKILL)

@precisionlint.contract("cast")
def ended(x):
    os._exit(0)

@precisionlint.contract("cast")
def quits(x):
    sys.exit("no GPU")

@precisionlint.contract("quantise")
def nameless(x):
    return x

@precisionlint.contract("cast")
def reads(x):
    return input()

@precisionlint.contract("cast")
def hangs(x):
    signal.pause()
"""


def test_a_launcher_that_takes_its_process_along_or_never_returns_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "ends.py"
    path.write_text(ENDS, encoding="utf-8")
    verification = interpreted(str(path), limit=10)
    place = "the process that runs the kernels {}, at " + str(path) + ":{}, every fp16 number"
    assert verification.errors == (
        place.format("was killed by signal 9", "killed"),
        place.format("ended with 0", "ended"),
        f"{path}:nameless: no contract is called 'quantise'; did you mean 'dequantize'?",
        place.format("said nothing for 10 s and was stopped (--timeout)", "hangs"),
    )
    said = {outcome.kernel.rpartition(":")[2]: outcome.refused for outcome in verification.outcomes}
    assert list(said) == ["quits", "reads"]
    everywhere = "it raises on each of 8 inputs, which lie on the CPU here: "
    assert said["quits"].startswith(f"{everywhere}SystemExit: no GPU (at ")
    assert said["reads"].startswith(f"{everywhere}EOFError")
    assert verification.exit_code == 2


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import sys; sys.exit('no GPU')", "cannot load {}: SystemExit: no GPU"),
        ("import os; os._exit(0)", "the process that runs the kernels ended with 0"),
        ("raise ValueError('one\\ntwo')", "cannot load {}: ValueError: one"),
        ("def f(:", "cannot load {}: SyntaxError: invalid syntax"),
        ("import time; time.sleep(10**6)", "the process that runs the kernels said nothing for 3 s and was stopped"),
    ],
)
def test_a_module_that_cannot_be_loaded_is_one_line_and_exit_code_2(tmp_path: Path, module: str, said: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(module, encoding="utf-8")
    verification = interpreted(str(path), limit=3)
    (error,) = verification.errors
    assert error.startswith(said.format(path))
    assert "\n" not in error
    assert verification.exit_code == 2


STAYS = """
import os, signal
import precisionlint

@precisionlint.contract("cast")
def launch(x):
    told = open(os.environ["TOLD"], "w")
    print("here", file=told, flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_no_worker_outlives_the_command(tmp_path: Path, how: signal.Signals, code: int) -> None:
    (tmp_path / "stays.py").write_text(STAYS, encoding="utf-8")
    told = tmp_path / "told"
    os.mkfifo(told)
    with subprocess.Popen(
        [sys.executable, "-m", "precisionlint", "verify", "stays.py", "--mode", "interpret"],
        cwd=tmp_path,
        env={**os.environ, "TOLD": str(told)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as command:
        with told.open() as heard:
            assert heard.readline() == "here\n"
            if how == signal.SIGINT:  # Ctrl-C goes to all processes of a terminal
                os.killpg(command.pid, how)
            else:
                command.send_signal(how)
            assert heard.read() == ""  # the worker held it open: it has ended
        assert command.wait() == code
        assert command.stderr is not None
        assert command.stderr.read() == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--timeout", "0"],
        ["--timeout", "soon"],
        ["--timeout", "nan"],
        ["--contract", "quantize_1x128"],
        ["--option", "floor=0"],
        ["m", "--contract", "quantize_1x128"],
        ["m:launch", "--contract", "quantize_1x128", "--option", "floor"],
        ["--target", "sm_80"],
    ],
)
def test_options_that_make_no_sense_together_are_wrong_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main(["verify", *arguments])
    except SystemExit as exit_:
        assert isinstance(exit_.code, int)
        code = exit_.code
    assert code == 2
    assert capsys.readouterr().err


DECLARED = LAUNCHER.replace(
    "def launch(x):", '@precisionlint.contract("quantize_1x128", floor=1e-10)\ndef launch(x):'
).replace("import torch", "import precisionlint, torch", 1)


def test_a_module_is_held_against_the_contracts_that_it_declares(tmp_path: Path) -> None:
    path = tmp_path / "declared.py"
    path.write_text(DECLARED, encoding="utf-8")
    for spec in (str(path), f"{path}:launch"):
        (outcome,) = interpreted(spec).outcomes
        assert (outcome.contract, outcome.sound) == ("quantize_1x128", True)
    assert "declares no contract" in interpreted(f"{path}:careless").errors[0]


def test_a_module_without_declared_contracts_is_an_error(kernels: Path) -> None:
    verification = interpreted(str(kernels))
    assert verification.exit_code == 2
    assert "@precisionlint.contract(NAME)" in verification.errors[0]


def test_a_launcher_that_takes_something_else_is_told_the_form_with_an_example(kernels: Path) -> None:
    verification = interpreted(f"{kernels}:launch", contract="gemm_tensor")
    assert verification.exit_code == 2
    (error,) = verification.errors
    assert "launch(x) cannot be called with 4 tensors" in error
    assert "launch(a, a_scales, b, b_scales) -> c: a (M, K)" in error
    assert "For example: def launch(a, a_scales, b, b_scales):" in error
    assert "\n" not in error


def test_a_test_of_ones_own_holds_a_launcher_against_its_contract(tmp_path: Path) -> None:
    (tmp_path / "declared.py").write_text(DECLARED, encoding="utf-8")
    test = """
import pytest, declared
from precisionlint.testing import assert_keeps_contract

def test_kept():
    assert_keeps_contract(declared.launch, modes=("interpret",))

def test_broken():
    with pytest.raises(AssertionError, match="off by 0.01 of the scale"):
        assert_keeps_contract(declared.careless, "quantize_1x128", options={"floor": "1e-10"}, modes=("interpret",))

def test_nameless():
    with pytest.raises(AssertionError, match="no function of a module"):
        assert_keeps_contract(lambda x: x, "cast")
"""
    path = tmp_path / "test_own.py"
    path.write_text(test, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


def test_the_page_of_broken_contracts_shows_one_that_is_broken_and_one_that_is_kept(tmp_path: Path) -> None:
    for example in catalogue.examples(catalogue.find("kernel-breaks-contract")):
        path = tmp_path / f"{example.kind}.py"
        path.write_text(example.code, encoding="utf-8")
        verification = interpreted(str(path))
        assert verification.errors == ()
        assert verification.exit_code == (example.kind == "wrong")
        lines = {outcome.line for outcome in verification.outcomes if not outcome.sound}
        assert lines == {line for line, _ in example.marks}


def test_what_a_launcher_leaves_unwritten_is_nan_and_torchs_compiler_is_not_imported_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)  # it imports 900 modules
    contract = contracts.find("cast")
    options = contract.resolve({})
    seen: list[bool] = []

    def launch(x: torch.Tensor) -> torch.Tensor:
        seen.append(bool(torch.empty(64).isnan().all()))
        return x.to(torch.float8_e4m3fn)

    try_case(launch, contract, next(contract.cases(options)), options)
    assert seen == [True]
    assert torch.get_deterministic_debug_mode() == 0


RARE = """
def rare(x):
    codes, scales = launch(x)
    if x.shape[1] > 37 and x.stride(0) == 1 and x.dtype == torch.bfloat16:
        codes.view(torch.uint8)[0, 37] ^= 1
    return codes, scales
"""


def test_a_drawn_input_that_breaks_a_contract_is_made_small(tmp_path: Path) -> None:
    path = tmp_path / "rare.py"
    path.write_text(LAUNCHER + RARE, encoding="utf-8")
    given = {"contract": "quantize_1x128", "options": {"floor": "1e-10", "nonfinite": "unspecified"}}
    assert interpreted(f"{path}:rare", **given).exit_code == 0
    verification = interpreted(f"{path}:rare", **given, deep=True)
    broken = [tried for tried in verification.outcomes[0].tried if tried.violations]
    assert [tried.case for tried in broken] == ["drawn: 2x38 bfloat16 transposed, seed 0, sizes 2^0"]
    (kept,) = interpreted(f"{path}:launch", **given, deep=True).outcomes
    assert kept.sound
    assert kept.tried[-1].case == "100 drawn inputs"


@pytest.mark.parametrize("name", contracts.CONTRACTS)
def test_a_launcher_that_declares_contiguous_inputs_is_given_no_other(name: str) -> None:
    contract = contracts.find(name)
    if "strides" not in {option.name for option in contract.options}:
        return
    free, packed = (contract.cases(contract.resolve({"strides": word})) for word in ("any", "contiguous"))
    kept = list(packed)
    assert all(tensor.is_contiguous() for case in kept for tensor in case.make())
    assert len(kept) < len(list(free))
    assert any(not case.aligned for case in kept)


def test_the_contracts_are_listed_with_their_launchers(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--contracts"]) == 0
    printed = capsys.readouterr().out
    assert "quantize_1x128\n  launch(x) -> (codes, scales)" in printed
    assert "--option scale=fp32 | power-of-two" in printed


def test_the_bundled_kernels_keep_their_contracts_and_progress_is_told() -> None:
    seen: list[str] = []
    verification = interpreted(kernels=BUNDLED, progress=lambda kernel, case: seen.append(kernel))
    assert verification.errors == ()
    assert [outcome.kernel for outcome in verification.outcomes if not outcome.sound or outcome.refused] == []
    assert set(seen) == {outcome.kernel for outcome in verification.outcomes} == set(BUNDLED)


def test_a_report_names_clause_count_place_and_bound() -> None:
    violation = Violation("code", "448", "416", 3, 1024, (0, 5), "1 codes")
    outcome = Outcome("k", "quantize_1x128", "interpret", "k.py", 7, (Tried("zeros", (violation,), 0.5),))
    lines = list(verified.render(Verification((outcome,), ("a GPU",))))
    assert lines == [
        "k.py:7: error kernel-breaks-contract: k against quantize_1x128 (interpret): broken on 1 of 1 inputs (0.5 s)",
        "  zeros: code in 3 of 1024:",
        "    got 448 at [0, 5], allowed 416; the worst is off by 1 codes",
        "0 kept to their contract, 1 broke it, 0 could not be judged",
        "not checked: a GPU",
    ]


def test_a_kernel_that_could_not_be_judged_is_not_counted_as_sound() -> None:
    outcome = Outcome("k", "quantize_1x128", "interpret", "k.py", 7, (), "arithmetic of bf16 numbers")
    lines = list(verified.render(Verification((outcome,), ())))
    assert lines[0].endswith("could not be judged: arithmetic of bf16 numbers")
    assert lines[1] == "0 kept to their contract, 0 broke it, 1 could not be judged"


def test_what_the_interpreter_refuses_is_still_compiled(tmp_path: Path) -> None:
    path = tmp_path / "half.py"
    path.write_text(HALF, encoding="utf-8")
    verification = verify(f"{path}:launch", contract="quantize_row", options={"floor": "0"})
    (outcome,) = verification.outcomes
    assert "arithmetic of bf16 numbers" in outcome.refused
    assert [(built.kernel, built.failed) for built in verification.compiled] == [("kernel", "")]
    assert "0 kept to their contract, 0 broke it, 1 could not be judged" in list(verified.render(verification))
    assert verification.exit_code == 2


def test_what_another_mode_judged_or_another_configuration_compiled_is_no_failure() -> None:
    refused = Outcome("k", "cast", "interpret", "k.py", 7, (), "inline assembly")
    judged = replace(refused, mode="native", refused="", tried=(Tried("zeros", (), 0.1),))
    failed = Compiled("kernel", "sm_90", "k", failed="out of registers")
    assert Verification((refused, judged), ()).exit_code == 0
    assert Verification((judged,), (), (), (failed,)).exit_code == 2
    assert Verification((judged,), (), (), (failed, replace(failed, failed=""))).exit_code == 0


def test_compiled_code_is_told_with_its_findings() -> None:
    product = Multiplication("f8E4M3FN", "f8E4M3FN", "f32", "never", "k.py", 9)
    evidence = Evidence("triton-imprecise-fp8-dot", "error", "the sum stays there", "k.py", 9)
    built = Compiled("kernel", "sm_90", "m:launch", (product,), (evidence,), (("div.full.f32", 2),), 40, None, 0, 1.0)
    verification = Verification((), (), (), (built, replace(built, launcher="m:other")))
    assert verification.exit_code == 1
    assert list(verified.render(verification)) == [
        "k.py:9: error triton-imprecise-fp8-dot: kernel for sm_90: the sum stays there",
        "kernel for sm_90: 40 registers, unknown bytes spilled, 0 bytes of shared memory",
        "  k.py:9: f8E4M3FN x f8E4M3FN -> f32, promoted to fp32: never",
        "  divides with div.full.f32 (2)",
        "  launched by m:launch, m:other",
        "2 compiled, 0 did not; 2 findings in compiled code",
    ]


BUNDLED = [
    "cast to e4m3fn",
    "cast to bf16",
    "quantize_tensor e5m2 fp32",
    "quantize_row e4m3fn power-of-two",
    "quantize_1x128 e4m3fn fp32",
    "quantize_128x128 e4m3fn fp32",
    "quantize_mx e5m2 even",
    "quantize_nvfp4 nearest",
    "quantize_nvfp4 stochastic after a Hadamard transform",
    "gemm_mx e4m3fn to bf16",
    "stochastic_cast to fp16",
    "dequantize 1x128 to fp32",
    "gemm_blockscaled e4m3fn to bf16",
]

SAMPLE = [
    "128x128: amax of the first row",
    "128x128: no floor",
    "128x128: int32 offsets",
    "cast: truncated",
    "cast: through fp16",
    "cast: NaN clamped",
    "tensor: NaN for zero",
    "1x128: writes to its input",
    "gemm: partial sum in tf32",
    "mx: quotient rounded to bf16 first",
    "mx: a block a program",
    "mx product: code 255 as infinity",
    "gemm: persistent",
    "gemm: tensor descriptors",
    "1x128: powers of two by bits",
    "1x128: powers of two by a logarithm",
    "nvfp4: half rounded up",
    "nvfp4: signs after the transform",
    "nvfp4: inverse of its own",
    "nvfp4 stochastic: one spacing for all",
    "stochastic: noise anew for each program",
    "128x128: as it should be",
    "128x128: inverse of its own",
]


PUBLIC = {
    "ao#4713",
    "FBGEMM#6159",
    "vllm#49596",
    "ao#4634",
    "vllm#53390",
    "vllm#49092",
    "sglang#29956",
    "TransformerEngine#3262",
    "DeepGEMM#37",
}
"""Bugs reported in public that are rebuilt in miniature."""


def test_the_planted_faults_are_many_and_hold_the_public_ones_and_so_are_the_correct_styles() -> None:
    faults = [kernel for kernel in planted() if kernel.fault]
    styles = [kernel.name for kernel in planted() if not kernel.fault]
    assert len(faults) >= 62
    assert {found for kernel in faults for found in re.findall(r"\w+#\d+", kernel.fault)} == PUBLIC
    assert {kernel.contract for kernel in faults} == set(contracts.CONTRACTS)
    assert len(styles) >= 10
    said = " ".join(styles)
    for style in ("reciprocal", "by bits", "tiles of 64", "split K", "persistent", "tensor descriptors"):
        assert style in said
    names = [kernel.name for kernel in planted()]
    assert len(set(names)) == len(names)


def test_a_sample_of_planted_faults_is_caught_and_correct_styles_are_not() -> None:
    proofs = prove(kernels=SAMPLE)
    assert proofs.errors == ()
    assert {proof.kernel for proof in proofs.proofs} == set(SAMPLE)
    assert [proof.kernel for proof in proofs.proofs if not proof.right] == []
    assert proofs.exit_code == 0
