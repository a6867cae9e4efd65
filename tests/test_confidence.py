"""How sure a finding is: what a library's callers decide is possible, and is shown to who asks for it; a program decides itself."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.findings import Finding
from tests.test_cli import run

SOFTMAX = """
import torch


def weighted(scores, values):
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ values
"""

OWN = """
import torch


class Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


grouped = Grouped.apply


@torch.library.custom_op("mine::scatter", mutates_args=())
def scatter(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight
"""

TRAIN = """
import torch
from torch import nn

from {module} import {name}


def train(model: nn.Module, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        with {region}:
            loss = ({name}(model(x), y)).sum()
        loss.backward()
        optimizer.step()
"""

ATTENTION = """
import torch


def weighted(q, k):
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.softmax(-1)
"""

LOGITS = """
import torch


def weighted(logits, chosen):
    return torch.log_softmax(logits, -1).gather(-1, chosen[..., None])
"""

LOSS = """
import torch
import torch.nn.functional as F


def weighted(model, y):
    return F.cross_entropy(model(y).flatten(0, 1), y.flatten())
"""

SQUARES = """
import torch.nn.functional as F


def weighted(model, y):
    return F.mse_loss(model(y), y, reduction="none")
"""

CRITERION = """
import torch


def weighted(model, y, criterion=None, mask=None):
    logits = model(y)
    return criterion(logits.softmax(-1) if mask else logits.flatten(0, 1), y.flatten())
"""

GRID = """
import torch


def weighted(size, step, dtype=torch.float32):
    positions = torch.arange(size, dtype=dtype)
    return (positions * step).sin()


class PositionGrid(torch.nn.Module):
    def forward(self, x, length, dtype: torch.dtype = torch.float32):
        return torch.arange(length, dtype=dtype).sin()
"""

PARTS = """
import torch


class Parts(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, weighted, y):
        powers = torch.exp(weighted)
        return torch.log(powers.sum(-1)) - y

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        return grad, None
"""

FP32 = "torch.enable_grad()"
AUTOCAST = "torch.autocast('cuda', dtype=torch.bfloat16)"


def project(folder: Path, *, region: str = "", **modules: str) -> None:
    (folder / "pyproject.toml").write_text("[project]\nname = 'mine'\n")
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text).lstrip("\n"))
    if region:
        name = "weighted" if "library" in modules and "weighted" in modules["library"] else "scatter"
        (folder / "train.py").write_text(TRAIN.format(module="library", name=name, region=region).lstrip())


def found(folder: Path, name: str = "library.py", **settings: object) -> list[Finding]:
    report = check([(folder / name).as_posix()], **settings)  # type: ignore[arg-type]
    assert not report.errors
    return list(report.findings)


def grades(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(each.rule, each.confidence, each.severity) for each in findings}


OWN_RULES = ("function-without-custom-fwd", "unregistered-custom-op")


def test_what_a_librarys_callers_decide_is_possible_and_shown_to_who_asks(tmp_path: Path) -> None:
    project(tmp_path, library=OWN)
    asked = {(rule, "possible", "info") for rule in OWN_RULES}
    assert found(tmp_path) == []
    assert grades(found(tmp_path, select=["all"])) == asked
    assert grades(found(tmp_path, extend_select=["all"])) == asked
    assert grades(found(tmp_path, min_confidence="possible")) == asked
    assert found(tmp_path, select=["custom-ops"]) == []
    assert found(tmp_path, select=["all"], min_confidence="likely") == []


def test_arithmetic_of_a_library_that_handles_no_dtypes_is_possible(tmp_path: Path) -> None:
    project(tmp_path, library=SOFTMAX)
    assert found(tmp_path) == []
    assert grades(found(tmp_path, select=["all"])) == {("softmax-in-half", "possible", "info")}


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (ATTENTION, "scale-after-matmul"),
        (LOGITS, "softmax-in-half"),
        (LOSS, "loss-on-half-logits"),
        (SQUARES, "loss-on-half-logits"),
        (CRITERION, "loss-on-half-logits"),
        (GRID, "half-arange"),
        (PARTS, "softmax-in-half"),
    ],
)
def test_what_callers_or_values_decide_is_possible_even_under_autocast(tmp_path: Path, module: str, rule: str) -> None:
    project(tmp_path, region=FP32 if module is PARTS else AUTOCAST, library=module)  # autocast lifts exp and log
    assert found(tmp_path) == []
    weights = "\n\ndef half(model):\n    return model.to(dtype=torch.bfloat16)\n"
    if module is not ATTENTION:  # which needs fp16, not bf16
        (tmp_path / "train.py").write_text((tmp_path / "train.py").read_text() + weights)
        assert grades(found(tmp_path, select=["all"])) == {(rule, "possible", "info")}
    (tmp_path / "train.py").unlink()
    assert grades(found(tmp_path, select=["all"])) == {(rule, "possible", "info")}


@pytest.mark.parametrize("module", [SOFTMAX, OWN, ATTENTION, LOGITS, LOSS, SQUARES, CRITERION, GRID])
def test_a_program_that_trains_in_fp32_decides_itself(tmp_path: Path, module: str) -> None:
    project(tmp_path, region=FP32, library=module)
    assert found(tmp_path, select=["all"]) == []


def test_a_program_that_trains_under_autocast_makes_it_likely(tmp_path: Path) -> None:
    project(tmp_path, region=AUTOCAST, library=OWN)
    likely = found(tmp_path)
    assert grades(likely) == {(rule, "likely", "warning") for rule in OWN_RULES}
    shown = {(Path(each.trace[0].place.path).name, each.trace[0].place.line) for each in likely}
    assert shown == {("train.py", 10)}
    assert found(tmp_path, min_confidence="certain") == []


@pytest.mark.parametrize(
    "change",
    [
        (
            "@staticmethod\n    def forward",
            "@staticmethod\n    @torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.float32)\n    def forward",
        ),
        ("ctx.save_for_backward(x, weight)\n        return x @ weight", "return x + weight"),
        ("ctx.save_for_backward(x, weight)", "ctx.save_for_backward(x, weight)\n        weight = weight.to(x.dtype)"),
        ("return grad @ weight.t()", "dtype = grad.dtype\n        return grad @ weight.to(dtype).t()"),
    ],
)
def test_a_function_that_autocast_does_not_concern_is_not_told(tmp_path: Path, change: tuple[str, str]) -> None:
    assert change[0] in OWN
    project(tmp_path, region=AUTOCAST, library=OWN.replace(*change))
    assert {each.rule for each in found(tmp_path, select=["all"])} == {"unregistered-custom-op"}


KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def forward_kernel(q_ptr, k_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.dot(tl.load(q_ptr + at), tl.load(k_ptr + at)))


def launched(q, k):
    out = torch.empty(q.shape[0], device=q.device, dtype=torch.float32)
    forward_kernel[(1,)](q, k, out, BLOCK=64)
    return out


class Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k):
        ctx.save_for_backward(q, k)
        return launched(q, k)

    @staticmethod
    def backward(ctx, grad):
        q, k = ctx.saved_tensors
        return launched(grad, k), launched(grad, q)


@torch.library.custom_op("mine::scores", mutates_args=())
def scores(q: torch.Tensor, k: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    lengths = lengths.to(torch.int32)
    return launched(q, k)
"""


KERNELS_BY_OTHER_NAMES = """
from triton import jit

from mine.compat import custom_op
""" + KERNELS.replace("@triton.jit", "@jit").replace("@torch.library.custom_op", "@custom_op").replace(
    "tl.store(", "scale = (at * 0.5).to(tl.float32)\n    tl.store("
)


@pytest.mark.parametrize("library", [KERNELS, KERNELS_BY_OTHER_NAMES])
def test_kernels_that_take_several_inputs_as_they_come_are_possible_even_under_autocast(
    tmp_path: Path, library: str
) -> None:
    project(tmp_path, library=library)
    possible = {(rule, "possible", "info") for rule in OWN_RULES}
    assert grades(found(tmp_path, select=["all"])) == possible
    project(tmp_path, region=AUTOCAST, library=library)
    assert found(tmp_path) == []


TRIED = """
def {name}(width):
    x = torch.randn(8, width, requires_grad=True)
    weight = torch.randn(width, width, requires_grad=True)
    loss = Grouped.apply(x, weight).square().mean()
    loss.backward()
    return x.grad, weight.grad


print({name}(64))
"""


@pytest.mark.parametrize(("name", "told"), [("test_gradients", True), ("bench_backward", True), ("fit", False)])
def test_a_function_that_tries_a_file_makes_no_program_of_it(tmp_path: Path, name: str, told: bool) -> None:
    project(tmp_path, library=OWN + TRIED.format(name=name))
    shown = found(tmp_path, select=["function-without-custom-fwd"], min_confidence="possible")
    assert grades(shown) == ({("function-without-custom-fwd", "possible", "info")} if told else set())


COMPILED = """
import torch
from deform import _C


class Sampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {inputs}):
        ctx.save_for_backward({inputs})
        return _C.sample_forward({inputs})

    @staticmethod
    def backward(ctx, grad):
        return _C.sample_backward(*ctx.saved_tensors, grad)
"""


@pytest.mark.parametrize(("inputs", "told"), [("value, locations", True), ("value, level_index", False)])
def test_compiled_code_that_takes_several_inputs_as_they_come_is_possible(tmp_path: Path, inputs: str, told: bool):
    project(tmp_path, region=AUTOCAST, library=COMPILED.format(inputs=inputs))
    assert found(tmp_path) == []
    shown = found(tmp_path, select=["custom-ops"], min_confidence="possible")
    assert grades(shown) == ({("function-without-custom-fwd", "possible", "info")} if told else set())


@pytest.mark.parametrize(
    "change",
    [
        ("ctx.save_for_backward(q, k)", "ctx.save_for_backward(q)"),
        ("out = torch.empty(", "q, k = q.float(), k.float()\n    out = torch.empty("),
        ("out = torch.empty(", "k = k.to(q.dtype)\n    out = torch.empty("),
        ("tl.load(q_ptr + at), tl.load(k_ptr + at)", "tl.load(q_ptr + at).to(tl.float32), tl.load(k_ptr + at).to(tl.float32)"),
    ],
    ids=["one input", "casts in a helper", "aligned in a helper", "the kernel casts what it loads"],
)  # fmt: skip
def test_kernels_whose_inputs_are_one_or_brought_to_one_dtype_are_not_told(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    assert change[0] in KERNELS
    one = change[1].endswith("(q)")
    project(
        tmp_path, library=KERNELS.replace(*change).replace("k: torch.Tensor", "k: int" if one else "k: torch.Tensor")
    )
    assert found(tmp_path, select=["custom-ops"], min_confidence="possible") == []


WRAPPED = """
import torch
from torch.autograd import Function

import warp_cuda


class Warped(Function):
    @staticmethod
    def forward(ctx, image, flow):
        {before}
        out = torch.empty_like(image)
        warp_cuda.forward(image.contiguous(), flow.contiguous(), out)
        ctx.save_for_backward(image)
        return out

    @staticmethod
    def backward(ctx, grad):
        (image,) = ctx.saved_tensors
        return warp_cuda.backward(grad.contiguous(), image), None


warp = Warped.apply


class Warp(torch.nn.Module):
    def forward(self, image, flow):
        return warp(image, flow)
"""
CAST_BY_MODULE = WRAPPED.replace(
    "    def forward(self,",
    "    @torch.amp.custom_fwd(device_type='cuda', cast_inputs=torch.float32)\n    def forward(self,",
)
LAUNCHED = """
import torch
from torch.utils.cpp_extension import load

scan_cuda_lib = load(name="scan", sources=["scan.cu"])


@torch.library.custom_op("mine::scan", mutates_args=(), device_types="cuda")
def scan(x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
    {before}
    return scan_cuda_lib.forward(x, decay)


@torch.library.custom_op("mine::scan_back", mutates_args=(), device_types="cuda")
def scan_back(grad: torch.Tensor, decay_index: torch.Tensor) -> torch.Tensor:
    return scan_cuda_lib.backward(grad, decay_index)


if __name__ == "__main__":
    x = torch.randn(8, requires_grad=True)
    scan(x, x.detach()).sum().backward()
"""


@pytest.mark.parametrize(
    ("library", "before", "rules"),
    [
        (WRAPPED, "ctx.asked = image.shape", {"function-without-custom-fwd"}),
        (WRAPPED, "flow = flow.int()", set()),
        (
            WRAPPED.replace("image.contiguous(), flow.contiguous()", "image, boxes").replace("flow", "boxes"),
            "ctx.sizes = boxes.size()",
            {"function-without-custom-fwd"},
        ),
        (
            WRAPPED.replace("image.contiguous(), flow.contiguous()", "image, coords").replace("flow", "coords"),
            "ctx.sizes = coords.size()",
            set(),
        ),
        (WRAPPED.replace("warp(image, flow)", "warp(image.float(), flow.float())"), "", set()),
        (WRAPPED.replace("warp(image, flow)", "Warped.apply(image, flow.to(image.dtype))"), "", set()),
        (CAST_BY_MODULE, "", set()),
        (LAUNCHED, "assert x.is_cuda", {"unregistered-custom-op"}),
        (LAUNCHED, "decay = decay.to(x.dtype)", set()),
    ],
)
def test_compiled_ops_of_a_file_that_trains_nothing_are_possible(
    tmp_path: Path, library: str, before: str, rules: set[str]
):
    """A ``backward`` of compiled code, and one of a sum for a check of gradients, make no program that trains."""
    (tmp_path / "library.py").write_text(library.format(before=before))
    assert found(tmp_path) == []
    shown = found(tmp_path, select=["custom-ops"], min_confidence="possible")
    assert grades(shown) == {(rule, "possible", "info") for rule in rules}


OPERAND = ("return x @ weight\n", "return torch.tanh(x).to(weight.dtype) @ weight\n")


def test_a_cast_of_a_product_s_operand_settles_no_backward(tmp_path: Path) -> None:
    function = OWN.partition("@torch.library")[0].replace(*OPERAND)
    assert OPERAND[1] in function
    project(tmp_path, region=AUTOCAST, library=function)
    assert grades(found(tmp_path)) == {("function-without-custom-fwd", "likely", "warning")}
    brought = function.replace("grad @ weight.t()", "grad.to(weight.dtype) @ weight.t()")
    project(tmp_path, region=AUTOCAST, library=brought)
    assert found(tmp_path, select=["all"]) == []


LIFTS = """
import torch


@torch.library.custom_op("mine::average", mutates_args=())
def average(x: torch.Tensor, span: int) -> torch.Tensor:
    given = x.dtype
    return torch.ops.native.average(x.to(torch.float32), span).to(given)


torch.library.register_autograd("mine::average", lambda ctx, grad: (grad, None))
"""


def test_an_op_that_gives_its_result_the_dtype_of_its_input_is_possible_where_it_has_a_gradient(tmp_path: Path) -> None:
    project(tmp_path, library=LIFTS)
    assert grades(found(tmp_path, select=["all"])) == {("unregistered-custom-op", "possible", "info")}
    project(tmp_path, library=LIFTS.partition("\n\ntorch.library.register_autograd")[0])
    assert found(tmp_path, select=["all"]) == []


def test_an_op_with_a_rule_for_autocast_is_not_told(tmp_path: Path) -> None:
    registered = OWN + "\n\ntorch.library.register_autocast(scatter, 'cuda', torch.bfloat16)\n"
    project(tmp_path, region=AUTOCAST, library=registered)
    assert {each.rule for each in found(tmp_path, select=["all"])} == {"function-without-custom-fwd"}


COMPARED = """
import torch
from torch import nn


def {name}():
    layer, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
    optimizer = torch.optim.AdamW(other.parameters())
    with torch.autocast("cuda", dtype=torch.float16):
        first, second = layer(torch.ones(2, 8)).sum(), other(torch.ones(2, 8)).sum()
        first.backward()
    second.backward()
    optimizer.step()
"""
TRAINED = {("backward-under-autocast", "certain", "warning"), ("fp16-without-scaler", "certain", "error")}


@pytest.mark.parametrize("name", ["test_layer.py", "layer_test.py", "tests/common.py"])
def test_how_well_a_test_trains_is_possible_at_most(tmp_path: Path, name: str) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "train.py").write_text(COMPARED.format(name="train"))
    assert grades(found(tmp_path, "train.py")) >= TRAINED
    (tmp_path / "train.py").rename(tmp_path / name)
    assert found(tmp_path, name) == []
    asked = grades(found(tmp_path, name, min_confidence="possible"))
    assert asked >= {(rule, "possible", "info") for rule, _, _ in TRAINED}


def test_a_test_beside_what_it_tests_is_one(tmp_path: Path) -> None:
    (tmp_path / "layer.py").write_text(COMPARED.format(name="test_layer"))
    assert found(tmp_path, "layer.py") == []


def test_what_is_possible_stays_info_and_is_never_fixed(tmp_path: Path) -> None:
    norm = "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight\n"
    project(tmp_path, library=f"import torch\n\n\ndef rms_norm(x, weight):\n{norm}")
    raised = found(tmp_path, min_confidence="possible", severity={"all": "error"})
    assert {each.rule for each in raised} == {"norm-without-upcast"}
    assert {(each.severity, each.fix) for each in raised} == {("info", None)}


def test_the_command_shows_it_on_request_and_passes(tmp_path: Path) -> None:
    project(tmp_path, library=OWN)
    shown = run("check", "--no-cache", "--select", "all", "library.py", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.count("info ") == shown.stdout.count("[possible]") == 2
    hidden = run("check", "--no-cache", "library.py", cwd=tmp_path)
    assert hidden.returncode == 0
    assert "possible" not in hidden.stdout


TRAINER = """
import torch
from models import build


def train(loader, config):
    model, optimizer = build(config)
    for x in loader:
        loss = model(x.to("cuda"))
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("", ""), True),
        (("import build\n", "import build\n\ntorch.set_float32_matmul_precision('highest')\n"), False),
        (("loss = model", "with torch.autocast('cuda', torch.bfloat16):\n            loss = model"), False),
        (("build(config)", "build(config, dtype=torch.bfloat16)"), False),
        (('"cuda"', '"cpu"'), False),
        (("from models", "from .nets.unet"), True),
        (("from models", "from helpers"), True),  # no layer stands in the file: it may be any
        (("from models", "from torchvision.models"), False),  # convolutions run in TF32 as it is
    ],
)
def test_fp32_products_of_a_model_that_another_file_makes_are_possible(
    tmp_path: Path, change: tuple[str, str], told: bool
) -> None:
    (tmp_path / "train.py").write_text(TRAINER.replace(*change) if change[0] else TRAINER)
    assert check([str(tmp_path / "train.py")], select=["tf32-off"]).findings == ()
    shown = check([str(tmp_path / "train.py")], select=["all"]).findings
    assert [each.confidence for each in shown if each.rule == "tf32-off"] == ["possible"] * told


def test_a_comment_that_silences_what_is_only_possible_is_of_use(tmp_path: Path) -> None:
    text = OWN.replace(
        "Function):", "Function):  # precisionlint: ignore[function-without-custom-fwd] never under autocast"
    )
    project(tmp_path, library=text)
    assert found(tmp_path, extend_select=["unused-ignore"]) == []
    assert grades(found(tmp_path, select=["all"])) == {("unregistered-custom-op", "possible", "info")}


def test_a_wrong_grade_in_the_settings_is_told_with_the_right_ones(tmp_path: Path) -> None:
    (tmp_path / "precisionlint.toml").write_text('min-confidence = "probable"\n')
    (tmp_path / "a.py").write_text("x = 1\n")
    failed = run("check", "a.py", cwd=tmp_path)
    assert failed.returncode == 2
    assert "precisionlint.toml:1: min-confidence must be one of certain, likely, possible" in failed.stderr


LOADED = """
import torch
from transformers import AutoModelForCausalLM


def base(path):
    return AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.bfloat16)


def prepare(model, rate):
    {body}
"""

KEPT = """
import torch
from elsewhere import Checkpointer, save_checkpoint


def train(model, optimizer, loader, folder):
    scaler = torch.amp.GradScaler("cuda")
    {keeper}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    {saved}
"""

MOMENT = """
import torch


def average(exp_avg, exp_avg_sq, grad, beta1, beta2):
    {cast}
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
"""

POLICY = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy


def policy(settings):
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16{more})
"""


def possible(folder: Path, text: str) -> list[tuple[int, str]]:
    """Lines and rules of what is possible in a file, and that nothing else is told of it by default."""
    project(folder, library=text)
    assert found(folder) == []
    everything = found(folder, select={"all"}, min_confidence="possible")
    assert {each.severity for each in everything} <= {"info"}
    return [(each.place.line, each.rule) for each in everything if each.confidence == "possible"]


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("return torch.optim.AdamW(model.parameters(), lr=rate)", [6]),
        ("return torch.optim.AdamW(model.parameters(), lr=0)", []),
        ("return torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=rate), model.parameters()", []),
    ],
)
def test_a_half_model_and_a_function_that_trains_what_it_is_handed(tmp_path: Path, body: str, lines: list[int]):
    hits = possible(tmp_path, LOADED.format(body=body))
    assert [line for line, rule in hits if rule == "bf16-only-weights"] == lines


@pytest.mark.parametrize(
    ("keeper", "saved", "lines"),
    [
        ("keeper = Checkpointer(model, folder, optimizer=optimizer)", "keeper.save()", [7]),
        ("keeper = Checkpointer(model, folder, optimizer=optimizer, scaler=scaler)", "keeper.save()", []),
        ("pass", "save_checkpoint(folder, model, optimizer)", [15]),
        ("pass", "save_checkpoint(folder, model, optimizer, {'scaler': scaler})", []),
        ("pass", "save_checkpoint(folder, model)", []),
    ],
)
def test_a_checkpoint_by_something_unread_may_lack_the_scaler(
    tmp_path: Path, keeper: str, saved: str, lines: list[int]
):
    hits = possible(tmp_path, KEPT.format(keeper=keeper, saved=saved))
    assert [line for line, rule in hits if rule == "scaler-not-checkpointed"] == lines


@pytest.mark.parametrize(("cast", "lines"), [("pass", [7]), ("grad = grad.float()", [])])
def test_a_second_moment_in_the_dtype_of_the_parameters(tmp_path: Path, cast: str, lines: list[int]):
    hits = possible(tmp_path, MOMENT.format(cast=cast))
    assert [line for line, rule in hits if rule == "half-optimizer-state"] == lines


@pytest.mark.parametrize(
    ("more", "lines"),
    [("", [6]), (", reduce_dtype=settings.sums", [6]), (", reduce_dtype=torch.float32", [])],
)
def test_sums_that_a_setting_or_fsdp_itself_decides(tmp_path: Path, more: str, lines: list[int]):
    hits = possible(tmp_path, POLICY.format(more=more))
    assert [line for line, rule in hits if rule == "half-gradient-reduction"] == lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            "class Shards:\n    param_dtype: torch.dtype = torch.bfloat16\n    reduce_dtype: torch.dtype = torch.bfloat16",
            [6],
        ),
        ("def shard(model, param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16):\n    return model", [4]),
        (
            "class Shards:\n    param_dtype: torch.dtype = torch.bfloat16\n    reduce_dtype: torch.dtype = torch.float32",
            [],
        ),
        ("def mean(value, reduce_dtype=torch.bfloat16):\n    return value", []),
    ],
    ids=["a field", "a parameter", "in fp32", "of something else"],
)
def test_sums_that_a_default_decides_are_possible(tmp_path: Path, text: str, lines: list[int]):
    hits = possible(tmp_path, f"import torch\n\n\n{text}\n")
    assert [line for line, rule in hits if rule == "half-gradient-reduction"] == lines


@pytest.mark.parametrize(("sums", "lines"), [("settings.dtype", [6]), ("torch.float32", []), ("settings.sums", [])])
def test_sums_in_the_dtype_of_the_computation_where_nothing_names_a_half(tmp_path: Path, sums: str, lines: list[int]):
    policy = POLICY.format(more=f", reduce_dtype={sums}").replace("torch.bfloat16", "settings.dtype")
    hits = possible(tmp_path, policy)
    assert [line for line, rule in hits if rule == "half-gradient-reduction"] == lines


ROPE = """
import torch


def angles(length, width):
    inverse = 1.0 / (10000 ** (torch.arange(0, width, 2).float() / width))
    return torch.einsum("i,j->ij", torch.arange(length).float(), inverse)


def rms_norm(x, weight):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
"""


def test_integers_made_floats_are_no_sign_of_half(tmp_path: Path) -> None:
    project(tmp_path, library=ROPE)
    assert found(tmp_path) == []
    assert {each.severity for each in found(tmp_path, select=["all"])} == {"info"}


def test_a_file_that_handles_dtypes_is_told_as_that(tmp_path: Path) -> None:
    project(tmp_path, library=ROPE + "\n\ndef cast(x, y):\n    return x.to(y.dtype)\n")
    likely = found(tmp_path)
    assert {each.confidence for each in likely} == {"likely"}
    assert {each.trace[0].message for each in likely} == {
        "a file of a library that handles dtypes: its callers may come with half"
    }


def test_a_program_beside_it_that_has_nothing_to_do_with_a_file_shows_nothing_of_it(tmp_path: Path) -> None:
    project(tmp_path, library=ROPE)
    (tmp_path / "other.py").write_text(
        "import torch\n\n\ndef train(model, x, optimizer):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
        "        loss = model(x).mean()\n    loss.backward()\n    optimizer.step()\n"
    )
    assert found(tmp_path) == []
    (tmp_path / "other.py").write_text((tmp_path / "other.py").read_text() + "\n\nNORM = 'rms_norm'\n")
    assert found(tmp_path) != []  # loaded by its name
    lines = "angles = torch.einsum('i,j->ij', torch.arange(8).float(), 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))\n"
    main = tmp_path / "main.py"
    main.write_text(f"import torch\n\n{lines}")  # a script that defines nothing cannot be spoken of
    assert not check([main.as_posix()]).findings


def test_a_half_copy_for_a_file_says_nothing_of_the_weights_that_are_trained(tmp_path: Path) -> None:
    loop = (
        "import torch\n\n\ndef train(model, loader, optimizer):\n    for x, y in loader:\n        loss = model(x, y)\n"
        "        loss.backward()\n        print(sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5)\n"
        "        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    (tmp_path / "library.py").write_text(loop + "    torch.save(model.half().state_dict(), 'export.pt')\n")
    assert not any(each.rule == "half-gradient-norm" for each in found(tmp_path))
    (tmp_path / "library.py").write_text(loop.replace("    for x", "    model = model.cuda().half()\n    for x"))
    assert any(each.rule == "half-gradient-norm" for each in found(tmp_path))


POSITIONS = """
import torch
from torch import nn


class FixedPositionalEmbedding(nn.Module):
    def __init__(self, dim):
        super().__init__()
        inv_freq = 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim))
        self.register_buffer("inv_freq", inv_freq)

    def forward(self, x, seq_dim=1, offset=0):
        t = torch.arange(x.shape[seq_dim], device=x.device).type_as(self.inv_freq) + offset
        angles = torch.einsum("i , j -> i j", t, self.inv_freq)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)
"""


def test_a_parameter_whose_default_is_0_is_a_number_and_no_dtype_follows_it(tmp_path: Path) -> None:
    (tmp_path / "positions.py").write_text(POSITIONS)
    program = TRAIN.format(module="positions", name="FixedPositionalEmbedding", region='torch.autocast("cuda")')
    (tmp_path / "train.py").write_text(program)
    (rope,) = [each for each in check([tmp_path]).findings if each.rule == "half-rope"]
    assert "offset" not in rope.message


ROTARY_MODEL = """
import torch
from torch import nn
from transformers import PreTrainedModel


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)), persistent=False)

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.inv_freq)
        return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Model(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.rotary = Rotary(64)
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        return self.layer(x * self.rotary(x)).square().mean()
"""
TRAINS_MODEL = """
import torch

from model import Model

model = {made}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for x in torch.randn(10, 8, 16, 64):
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ('Model.from_pretrained("base", torch_dtype=torch.bfloat16)', []),  # seen with transformers 5.24
        ('Model.from_pretrained("base").to(torch.bfloat16)', ["likely"]),
        ('Model.from_pretrained("base", torch_dtype=torch.bfloat16).bfloat16()', ["likely"]),
    ],
    ids=["loaded", "cast", "loaded and cast"],
)
def test_loading_in_half_casts_no_buffer(tmp_path: Path, made: str, told: list[str]) -> None:
    (tmp_path / "model.py").write_text(ROTARY_MODEL)
    (tmp_path / "train.py").write_text(TRAINS_MODEL.format(made=made))
    ropes = [each for each in check([tmp_path]).findings if each.rule == "half-rope"]
    assert [each.confidence for each in ropes] == told


ROOT_MEAN_SQUARE = """
import torch
from torch import nn
from transformers import PreTrainedModel


class Model(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x):
        return (self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).square().mean()
"""


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ('Model.from_pretrained("base", torch_dtype=torch.bfloat16)', ["likely"]),
        ('Model.from_pretrained("base", dtype=torch.bfloat16)', ["likely"]),
        ('Model.from_pretrained("base", dtype=torch.float32)', []),
    ],
    ids=["torch_dtype", "dtype", "wide"],
)
def test_weights_are_loaded_in_half_by_either_name(tmp_path: Path, made: str, told: list[str]) -> None:
    (tmp_path / "model.py").write_text(ROOT_MEAN_SQUARE)
    (tmp_path / "train.py").write_text(TRAINS_MODEL.format(made=made))
    norms = [each for each in check([tmp_path]).findings if each.rule == "norm-without-upcast"]
    assert [each.confidence for each in norms] == told


def test_a_bound_close_to_one_is_told_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "density.py").write_text(
        "import torch\n\n\ndef density(y):\n    y = torch.clamp(y, -0.99999997, 0.99999997)\n    return 0.5 * (y.log1p() - (-y).log1p())\n"
    )
    (tmp_path / "train.py").write_text(
        TRAIN.format(module="density", name="density", region='torch.autocast("cuda", torch.bfloat16)')
    )
    (bound,) = [each for each in check([tmp_path]).findings if each.rule == "one-minus-epsilon"]
    assert bound.message.startswith("the bound 0.99999997 is 1.0 in bf16 and fp16")


def test_every_optimizer_of_a_checkpoint_of_rounded_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import torch

            actor, critic = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
            actor_optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-3)
            critic_optimizer = torch.optim.AdamW(critic.parameters(), lr=1e-3)
            for x in torch.randn(10, 8, 4):
                (critic(actor(x)) ** 2).mean().backward()
                actor_optimizer.step()
                critic_optimizer.step()
                actor_optimizer.zero_grad()
                critic_optimizer.zero_grad()
            weights = {name: value.half() for name, value in actor.state_dict().items()}
            kept = {"actor": weights, "actor_optimizer": actor_optimizer.state_dict()}
            torch.save({**kept, "critic": critic.state_dict(), "critic_optimizer": critic_optimizer.state_dict()}, "last.pt")
            """
        )
    )
    (lost,) = [each for each in check([tmp_path]).findings if each.rule == "masters-lost-in-checkpoint"]
    assert "'actor_optimizer' and 'critic_optimizer'" in lost.message


def test_what_is_no_optimizer_of_a_package_of_optimizers_is_in_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        textwrap.dedent(
            """
            import torch
            from transformers.optimization import Adafactor, AdafactorSchedule, SchedulerType

            model = torch.nn.Linear(4, 4)
            optimizer = Adafactor(model.parameters())
            scheduler, kind = AdafactorSchedule(optimizer), SchedulerType("linear")
            for x in torch.randn(10, 8, 4):
                model(x).sum().backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            """
        )
    )
    assert check([tmp_path]).coverage.recipes == ("no autocast, Adafactor on fp32 weights",)


def test_one_name_may_stand_for_several(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n", encoding="utf-8")
    assert check(str(tmp_path), select="loss-scaling", exclude="data").findings == ()


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    (tmp_path / "density.py").write_text("import torch\n")
    by_text = check(str(tmp_path))
    assert by_text.coverage.files == 1
    assert check(tmp_path) == check([tmp_path]) == by_text


def test_a_configuration_among_tests_is_there_to_be_run(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    text = (
        '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true, "loss_scale": 0}, "fp16": {"enabled": true}}'
    )
    for folder in ("tests", "configs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ds.json").write_text(text, encoding="utf-8")
    report = check([str(tmp_path)])
    assert {Path(each.place.path).parent.name for each in report.findings} == {"configs"}
    asked = check([str(tmp_path / "tests" / "ds.json")], select=["all"])
    assert {(each.severity, each.confidence) for each in asked.findings} == {("info", "possible")}


NORMED = """
import torch
from torch.utils.cpp_extension import load

norm_cuda = load(name="norm", sources=["norm.cu"])


class Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        kept = x.dtype
        wanted = torch.get_default_dtype()
        out, mean, rstd = norm_cuda.forward_affine(x, {weight}, {bias}, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, mean, rstd = ctx.saved_tensors
        return (*norm_cuda.backward_affine(grad, mean, rstd, x, weight, bias), None)


scatter = Normed.apply
"""


@pytest.mark.parametrize(
    ("weight", "bias", "told"),
    [
        ("weight.to(kept)", "bias.to(dtype=kept)", False),
        ("weight", "bias", True),
        ("weight.to(wanted)", "bias", True),
    ],
)
def test_an_input_may_be_brought_to_a_dtype_that_was_kept_under_a_name(
    tmp_path: Path, weight: str, bias: str, told: bool
):
    project(tmp_path, region=AUTOCAST, library=NORMED.format(weight=weight, bias=bias))
    shown = {each.rule for each in found(tmp_path)}
    assert shown == ({"function-without-custom-fwd"} if told else set())


RELAXED = """
import torch
from torch import nn


class Relaxed(nn.Module):
    def forward(self, x):
        x = x.bfloat16()
        u = {drawn}.clamp(1e-7, 1.0 - 1e-7)
        return torch.log(u) - torch.log(1.0 - u)


def train(model, optimizer, batches):
    for x in batches:
        model(x).float().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("drawn", "told"), [("torch.rand_like(x)", False), ("x.sigmoid()", True)])
def test_uniform_noise_is_never_one_and_needs_no_bound_below_it(tmp_path: Path, drawn: str, told: bool) -> None:
    (tmp_path / "relaxed.py").write_text(RELAXED.format(drawn=drawn), encoding="utf-8")
    shown = check([str(tmp_path / "relaxed.py")], select=["one-minus-epsilon"]).findings
    assert [each.place.line for each in shown] == ([9] if told else [])
