"""What a forward keeps for its backward is counted by module and dtype, and counting it changes nothing."""

from __future__ import annotations

import io

import pytest
import torch
from audit_cases import batch, net
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precisionlint
from precisionlint.audit_report import AuditReport

ROWS = 16

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch does not show what is saved"
)


class Two(nn.Module):
    """Two layers with a nonlinearity that keeps its result; the second may be recomputed."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recompute:
            return checkpoint(lambda x: self.second(self.act(x)), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self.second(self.act(x))  # type: ignore[no-any-return]


def kept(report: AuditReport) -> dict[tuple[str, str], int]:
    return {(each.module, each.dtype): each.bytes for each in report.activations}


def audited(model: nn.Module, region: torch.dtype | None = None, passes: int = 1) -> AuditReport:
    with precisionlint.audit(model) as audit:
        for _ in range(passes):
            with torch.autocast("cpu", dtype=region or torch.bfloat16, enabled=region is not None):
                loss = model(torch.randn(ROWS, 8)).sum()
            loss.backward()
    return audit.report


def test_each_saved_storage_counts_once_under_the_module_whose_op_saved_it():
    # addmm saves the layer's input, tanh its result, which the second layer saves again; weights are not counted.
    assert kept(audited(Two())) == {("first", "float32"): ROWS * 8 * 4, ("act", "float32"): ROWS * 32 * 4}


def test_under_autocast_halves_are_kept_and_casts_of_weights_with_them():
    found = kept(audited(Two(), torch.bfloat16))
    assert found == {
        ("first", "bfloat16"): ROWS * 8 * 2,
        ("act", "bfloat16"): ROWS * 32 * 2,
        ("second", "bfloat16"): 32 * 4 * 2,  # the half copy of its weight
    }


def test_what_will_be_recomputed_is_not_kept():
    plain, recomputing = (sum(kept(audited(Two(each))).values()) for each in (False, True))
    assert (plain, recomputing) == (ROWS * 8 * 4 + ROWS * 32 * 4, ROWS * 8 * 4)


def test_of_several_passes_the_largest_is_told_and_none_is_added_to_another():
    assert kept(audited(Two(), passes=3)) == kept(audited(Two()))


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x.double())
        return x * 2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        assert ctx.saved_tensors[0].dtype is torch.float64
        return gradient * 2


def test_what_a_function_of_the_users_own_saves_is_counted():
    x = torch.randn(5, requires_grad=True)
    with precisionlint.audit() as audit:
        Keeps.apply(x).sum().backward()
    assert kept(audit.report)[("", "float64")] == 5 * 8


def test_gradients_taken_by_autograd_grad_keep_what_they_need():
    model = Two()
    with precisionlint.audit(model) as audit:
        torch.autograd.grad(model(torch.randn(ROWS, 8)).sum(), list(model.parameters()))
    assert kept(audit.report) == kept(audited(model))


def test_a_change_in_place_of_what_was_saved_still_raises():
    x = torch.randn(4, requires_grad=True)
    with precisionlint.audit() as audit, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y = x.exp()
        y.mul_(2)
        y.sum().backward()
    assert kept(audit.report) == {("", "float32"): 16}  # the 2 is no tensor of its own


def test_a_program_with_hooks_of_its_own_meets_each_tensor_as_often_as_without_the_audit():
    model = net()
    x, y = batch()

    def step() -> list[int]:
        calls = [0, 0]

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return tensor

        def unpack(tensor: torch.Tensor) -> torch.Tensor:
            calls[1] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return calls

    plain = step()
    with precisionlint.audit(model) as audit:
        assert step() == plain
    assert audit.report.activations == ()  # a hook holds them, where nobody knows


def test_the_report_tells_the_total_by_dtype_and_groups_layers():
    stream = io.StringIO()
    audited(Two(), torch.bfloat16).print(file=stream)
    assert "saved for the backward (casts of weights included): 1.5 KiB bf16; by " in stream.getvalue()
