"""The policy table says what is true of torch on this CPU, judges what ran, and gives way to a project's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import precisionlint
from precisionlint import policy
from precisionlint.cli import main
from precisionlint.policy import PolicyError, Requirement

TABLE = policy.load()


def error_over_floor(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """The error of a bf16 op over the error that rounding the exact result to bf16 has."""
    x = x.to(torch.bfloat16)
    exact = run(x.double())
    floor = (exact.to(torch.bfloat16).double() - exact).abs().mean()
    return float((run(x).double() - exact).abs().mean() / floor)


def sums(op: str) -> Callable[[torch.Tensor], torch.Tensor]:
    rows = torch.zeros(4096, dtype=torch.long)
    return {
        "sum": lambda x: x.sum(-1),
        "mean": lambda x: x.mean(-1),
        "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
        "cumsum": lambda x: x.cumsum(-1),
        "_softmax": lambda x: torch.softmax(x, -1),
        "_log_softmax": lambda x: torch.log_softmax(x, -1),
        "logsumexp": lambda x: torch.logsumexp(x, -1),
        "native_layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
        "mm": lambda x: x @ x.flip(0).T,
        "scatter_add": lambda x: torch.zeros(x.shape[0], 2, dtype=x.dtype).scatter_add(1, rows.expand_as(x), x),
        "embedding_dense_backward": lambda x: torch.ops.aten.embedding_dense_backward(
            x.T.contiguous(), rows, 2, -1, False
        )[:1],
    }[op]


@pytest.mark.parametrize(
    ("op", "bound"),
    [
        ("sum", 1.2),
        ("mean", 1.2),
        ("linalg_vector_norm", 1.2),
        ("cumsum", 1.2),
        ("_softmax", 1.2),
        ("_log_softmax", 1.6),
        ("logsumexp", 1.6),
        ("native_layer_norm", 1.2),
        ("mm", 1.2),
        ("scatter_add", 1.2),
    ],
)
def test_what_is_said_to_add_up_in_fp32_on_the_cpu_is_at_the_floor_of_rounding_its_output(op: str, bound: float):
    family = TABLE.family(op, "forward")
    assert family is not None
    assert policy.accumulation(family, "cpu", ["bfloat16"], ["bfloat16"], {}) == "float32"
    x = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0))
    assert error_over_floor(sums(op), x) < bound


def test_what_is_said_to_add_up_in_its_storage_on_the_cpu_loses_far_more():
    family = TABLE.family("embedding_dense_backward", "backward")
    assert policy.accumulation(family, "cpu", ["bfloat16"], ["bfloat16"], {}) == "bfloat16"
    x = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0))
    assert error_over_floor(sums("embedding_dense_backward"), x) > 20


def test_no_one_dtype_is_claimed_for_index_add_on_the_cpu_since_it_depends_on_the_shape():
    family = TABLE.family("index_add", "forward")
    assert policy.accumulation(family, "cpu", ["bfloat16"], ["bfloat16"], {}) == "unknown"
    rows = torch.zeros(4096, dtype=torch.long)
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    errors = [
        error_over_floor(lambda x: torch.zeros(2, *x.shape[1:], dtype=x.dtype).index_add(0, rows, x)[:1], each)
        for each in (values, values[:, None].expand(-1, 8).contiguous())
    ]
    assert errors[0] > 20 and errors[1] < 1.2


def test_softmax_of_bf16_input_is_recorded_as_three_dtypes():
    with precisionlint.audit() as audit:
        torch.softmax(torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), -1)
    op = next(op for op in audit.report.ops if op.op == "_softmax")
    assert (op.inputs, op.accumulation, op.outputs, op.verdict) == (("bfloat16",), "float32", ("bfloat16",), "")


def test_a_log_softmax_stored_in_bf16_falls_short_by_its_output():
    with precisionlint.audit() as audit:
        torch.log_softmax(torch.randn(4, 8, dtype=torch.bfloat16, requires_grad=True), -1)
    op = next(op for op in audit.report.ops if op.op == "_log_softmax")
    assert op.verdict == "output bfloat16 where float32 is due"


def test_a_custom_op_that_nobody_has_looked_at_claims_no_accumulation():
    assert TABLE.family("mylib::fused", "forward") is None
    assert policy.accumulation(None, "cpu", ["bfloat16"], ["bfloat16"], {}) == ""
    matmul = TABLE.family("mm", "forward")
    assert policy.accumulation(matmul, "xpu", ["bfloat16"], ["bfloat16"], {}) == "unknown"


def test_the_reduced_precision_setting_shows_in_a_cuda_matmul():
    matmul = TABLE.family("mm", "forward")
    name = "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    assert policy.accumulation(matmul, "cuda", ["bfloat16"], ["bfloat16"], {name: "True"}) == "float32, partly bfloat16"
    assert policy.accumulation(matmul, "cuda", ["bfloat16"], ["bfloat16"], {name: "False"}) == "float32"
    assert policy.accumulation(matmul, "cpu", ["bfloat16"], ["bfloat16"], {name: "True"}) == "float32"
    assert policy.accumulation(matmul, "cuda", ["float64"], ["float64"], {name: "True"}) == "float64"


def test_every_family_says_why_and_every_accumulation_where_it_was_read():
    for family in TABLE.families:
        assert family.why
        assert bool(family.source) == bool(family.accumulates)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
def test_an_update_in_bf16_falls_short_however_the_optimizer_computes_it(options: dict[str, bool]):
    weight = torch.nn.Parameter(torch.randn(8, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([weight], **options)
    with precisionlint.audit(None, optimizer) as audit:
        weight.square().sum().backward()
        optimizer.step()
    verdicts = {op.verdict for op in audit.report.ops if op.phase == "optimizer" and op.family == "optimizer-update"}
    assert "output bfloat16 where float32 is due" in verdicts


def test_the_optimizers_ops_are_judged_as_updates_and_others_by_what_they_are():
    update = TABLE.family("_foreach_addcdiv_", "optimizer")
    assert update is not None and update.name == "optimizer-update"
    assert TABLE.family("_foreach_addcdiv_", "forward") is None


def project(folder: Path, text: str) -> policy.Policy:
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n\n" + text)
    return policy.of_project(folder)


def test_a_project_overrides_a_family_an_op_and_a_module(tmp_path: Path):
    table = project(
        tmp_path,
        "[tool.precisionlint.policy]\n"
        'softmax = { input = "float32" }\n'
        '_safe_softmax = { accumulation = "any" }\n'
        '"layers.*.router" = { softmax = { output = "float32" } }\n',
    )
    softmax = table.family("_softmax", "forward")
    assert softmax is not None
    assert table.requirement(softmax, "_softmax", "head") == Requirement("float32", "float32", "")
    assert table.requirement(softmax, "_safe_softmax", "head") == Requirement("float32", "", "")
    assert table.requirement(softmax, "_softmax", "layers.3.router.gate") == Requirement(
        "float32", "float32", "float32"
    )


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("[tool.precisionlint.policy]\nsoftmax = 3\n", 5, "is no table"),
        (
            '[tool.precisionlint.policy]\nloss = {}\nsoftmax = { input = "fp32" }\n',
            6,
            "must be a dtype such as float32",
        ),
        ('[tool.precisionlint.policy]\nsoftmax = { inputs = "float32" }\n', 5, "may hold input, accumulation, output"),
        ('[tool.precisionlint.policy."layers.*"]\nsoftmax = { input = "half" }\n', 5, "must be a dtype"),
        ('[tool.precisionlint.policy]\n"layers.*" = { input = "float32" }\n', 5, "is a module's path"),
        ('[tool.precisionlint.policy]\n# softmax\nsoftmax = "float32"\n', 6, "is no table"),
        ('[tool.precisionlint.policy]\nsoftmx = { input = "float32" }\n', 5, "did you mean 'softmax'?"),
        ('[tool.precisionlint.policy]\n"a.*" = { relu = { input = "float32" } }\n', 5, "neither a family nor an op"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(tmp_path: Path, text: str, line: int, what: str):
    with pytest.raises(PolicyError) as error:
        project(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'pyproject.toml'}:{line}: policy: ")
    assert what in str(error.value)


def test_check_refuses_a_wrong_table_too_before_it_reads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.precisionlint.policy]\nsoftmax = { input = "half" }\n')
    (tmp_path / "train.py").write_text("import torch\n")
    assert main(["check", "train.py"]) == 2
    said = "pyproject.toml:2: policy: 'softmax' input must be a dtype such as float32, or any, not 'half'"
    assert said in capsys.readouterr().err


def test_a_project_without_a_table_has_the_programs_own(tmp_path: Path):
    assert project(tmp_path, "") == TABLE
