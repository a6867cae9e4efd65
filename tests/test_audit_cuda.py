"""CUDA: what can be said of it without one (fake tensors know their device, meta tensors know no values), and what needs
one, in one short run: ``pytest tests/test_audit_cuda.py`` on a machine that has it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from audit_cases import faults
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import precisionlint
from precisionlint.audit_report import AuditReport

BF16 = torch.bfloat16
missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")


def needs_cuda(test: Callable[..., None]) -> Callable[..., None]:
    """A test that needs one; what torch warns of there (capturable, determinism) is none of the audit's."""
    decorated: Callable[..., None] = missing(pytest.mark.filterwarnings("ignore::UserWarning")(test))
    return decorated


# -- without one


def test_what_adds_up_in_what_on_cuda_is_that_of_its_own_column_of_the_table():
    with FakeTensorMode():
        x, square = (torch.empty(*shape, device="cuda", dtype=BF16) for shape in ((4, 8), (8, 8)))
        index = torch.empty(4, device="cuda", dtype=torch.int64)
        with precisionlint.audit() as audit:
            torch.softmax(x @ square, -1)
            torch.log_softmax(x, -1)
            x.cumsum(-1)
            functional.layer_norm(x, (8,))
            x.sum()
            square.index_add(0, index, x)
    found = {op.op: (op.device, op.accumulation, op.outputs[0]) for op in audit.report.ops if op.family}
    assert found == {
        "mm": ("cuda", "float32, partly bfloat16", "bfloat16"),
        "_softmax": ("cuda", "float32", "bfloat16"),
        "_log_softmax": ("cuda", "float32", "bfloat16"),
        "cumsum": ("cuda", "bfloat16", "bfloat16"),
        "native_layer_norm": ("cuda", "float32", "bfloat16"),
        "sum": ("cuda", "float32", "bfloat16"),
        "index_add": ("cuda", "bfloat16", "bfloat16"),
    }
    assert any("on CUDA may add partial sums in bf16" in each for each in audit.report.meaning)


def test_cudas_autocast_lifts_a_log_softmax_and_not_that_of_a_cross_entropy():
    """``cross_entropy_loss`` has no kernel there, and asks for its log-softmax in the dtype of the logits, which is left standing."""
    before = torch.is_autocast_enabled("cuda")
    with FakeTensorMode():
        x, y = torch.empty(4, 10, device="cuda", dtype=BF16), torch.zeros(4, device="cuda", dtype=torch.int64)
        torch.set_autocast_enabled("cuda", True)  # torch.autocast switches itself off where there is no CUDA
        try:
            with precisionlint.audit() as audit:
                torch.log_softmax(x, -1)
            with precisionlint.audit() as loss:
                functional.cross_entropy(x, y)
        finally:
            torch.set_autocast_enabled("cuda", before)
    assert [op.outputs[0] for op in audit.report.ops if op.op == "_log_softmax"] == ["float32"]
    assert [op.outputs[0] for op in loss.report.ops if op.op == "_log_softmax"] == ["bfloat16"]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("device", ["meta", "fake"])
def test_a_step_over_tensors_without_values_runs_as_it_would_and_says_what_was_not_measured(
    device: str, dtype: torch.dtype
):
    with FakeTensorMode() if device == "fake" else nullcontext():
        where = torch.device("cpu" if device == "fake" else "meta")
        model = nn.Sequential(
            nn.Embedding(50, 32, device=where, dtype=dtype), nn.Linear(32, 50, device=where, dtype=dtype)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randint(0, 50, (4, 8), device=where)
        with precisionlint.audit(model, optimizer, values=True) as audit:
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()).backward()
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                for each in model.parameters():
                    assert each.grad is not None
                    each.grad.mul_(torch.ones((), device=where))
                optimizer.step()
    said = "what hangs on values was not measured: meta and fake tensors have none"
    assert [note for note in audit.report.notes if "values" in note or "internal error" in note] == [said]
    assert audit.report.steps == 2 and ("bf16-only-weights" in {rule for rule, _ in faults(audit.report)}) == (
        dtype is not torch.float32
    )


@pytest.mark.parametrize("device", ["meta"])
def test_a_default_device_of_the_program_is_none_of_the_audits_own(device: str):
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    with torch.device(device), precisionlint.audit(model, optimizer) as audit:
        model(x).square().mean().backward()
        optimizer.step()
    assert audit.report.gradients is not None
    assert not any("internal error" in note or "values" in note for note in audit.report.notes), audit.report.notes


def test_a_replay_of_a_cuda_graph_is_watched_and_the_watch_undone():
    before = torch.cuda.CUDAGraph.replay
    with precisionlint.audit():
        assert torch.cuda.CUDAGraph.replay is not before
    assert torch.cuda.CUDAGraph.replay is before


# -- with one


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, 32), nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 64)
    ).cuda()


class Step:
    """A training step on CUDA, and everything that it leaves."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        self.model, self.dtype = net(), dtype
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
        generator = torch.Generator("cuda").manual_seed(1)
        self.x = torch.randint(0, 64, (8, 16), device="cuda", generator=generator)
        self.factor = 1.0

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=self.dtype):
            logits = self.model(self.x)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.x.flatten()) * self.factor
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def audited(self) -> AuditReport:
        with precisionlint.audit(self.model, self.optimizer, self.scaler) as audit:
            self()
        return audit.report

    def left(self) -> list[Any]:
        gradients = [each.grad for each in self.model.parameters()]
        states = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict(), self.scaler.state_dict()))
        return [*states, gradients, torch.cuda.get_rng_state(), torch.get_rng_state()]


OPTIONS: list[dict[str, bool]] = [{}, {"foreach": False}, {"fused": True}, {"capturable": True}]


@needs_cuda
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_an_audited_step_on_cuda_equals_a_plain_one_bit_for_bit(dtype: torch.dtype, options: dict[str, bool]):
    plain, audited = Step(dtype, **options), Step(dtype, **options)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for number in range(3):
            state = torch.get_rng_state(), torch.cuda.get_rng_state()
            plain()
            torch.set_rng_state(state[0])
            torch.cuda.set_rng_state(state[1])
            report = audited.audited() if number == 1 else audited()
            if report is not None:
                assert faults(report) == []
                assert not any("internal error" in note for note in report.notes), report.notes
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(audited.left(), plain.left(), rtol=0, atol=0)


@needs_cuda
def test_a_step_that_cudas_scaler_skips_is_one_and_moves_nothing():
    step = Step(torch.float16)
    step()
    step.factor = float("inf")
    before = [each.detach().clone() for each in step.model.parameters()]
    report = step.audited()
    assert report.steps == 1 and any("steps through" in each.what for each in report.order)
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert report.gradients is None or report.gradients.nonfinite


@needs_cuda
def test_autocasts_own_list_for_cuda_shows_in_what_ran():
    report = Step(BF16).audited()
    kinds = {(op.op, op.inputs[0], op.accumulation, op.device) for op in report.ops if op.phase == "forward"}
    assert ("addmm", "bfloat16", "float32, partly bfloat16", "cuda") in kinds
    assert ("native_layer_norm", "float32", "float32", "cuda") in kinds
    assert ("_log_softmax", "float32", "float32", "cuda") in kinds
    assert any("on CUDA" in each for each in report.meaning)


@needs_cuda
def test_a_loss_on_half_logits_under_cudas_autocast_keeps_its_log_softmax_in_half():
    step = Step(BF16)
    with precisionlint.audit(step.model, step.optimizer) as audit:
        with torch.autocast("cuda", dtype=BF16):
            loss = functional.cross_entropy(step.model(step.x).flatten(0, 1), step.x.flatten())
        loss.backward()
    assert [rule for rule, _ in faults(audit.report)] == ["loss-on-half-logits"]


@needs_cuda
@pytest.mark.parametrize(("allow", "said"), [(True, "run in TF32"), (False, "run in full fp32")])
def test_fp32_products_on_cuda_run_as_the_switch_says(allow: bool, said: str):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        with precisionlint.audit() as audit:
            torch.randn(32, 32, device="cuda") @ torch.randn(32, 32, device="cuda")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert any(said in each for each in audit.report.meaning)


@needs_cuda
def test_a_graph_is_captured_within_a_window_and_its_replays_are_named():
    model, x = net(), torch.randint(0, 64, (8, 16), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> None:
        with torch.autocast("cuda", dtype=BF16, cache_enabled=False):
            loss = functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with precisionlint.audit(model, optimizer) as audit:
        with torch.cuda.graph(graph):
            step()
        before = [each.detach().clone() for each in model.parameters()]
        graph.replay()
        graph.replay()
    torch.cuda.synchronize()
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not any("internal error" in note for note in audit.report.notes), audit.report.notes
    assert any("a CUDA graph was replayed" in note and "2 times" in note for note in audit.report.notes)
    assert len(audit.report.compiled) == 1


@needs_cuda
def test_a_step_on_another_stream_with_cuda_as_the_default_device_is_measured_as_any_other():
    made: list[Callable[[], AuditReport]] = []
    with torch.device("cuda"):
        made.append(Step(torch.float16).audited)
        with torch.cuda.stream(torch.cuda.Stream()):
            report = made[0]()
    torch.cuda.synchronize()
    assert faults(report) == [] and report.gradients is not None
    assert not any("internal error" in note for note in report.notes), report.notes


@needs_cuda
@pytest.mark.parametrize("fused", [False, True])
def test_lost_updates_are_counted_beside_a_fused_optimizer_that_unscales_in_its_kernel_too(fused: bool):
    model = net().to(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    scaler = torch.amp.GradScaler("cuda")
    x = torch.randint(0, 64, (8, 16), device="cuda")
    before = [each.detach().clone() for each in model.parameters()]
    with precisionlint.audit(model, optimizer, scaler) as audit:
        scaler.scale(functional.cross_entropy(model(x).flatten(0, 1).float(), x.flatten())).backward()
        scaler.step(optimizer)
    still = sum(int((a == b).sum()) for a, b in zip(before, model.parameters(), strict=True))
    assert 0 < sum(each.lost for each in audit.report.updates) <= still
    assert not any("not measured" in note for note in audit.report.notes), audit.report.notes
