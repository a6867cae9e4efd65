"""What the audit measures beside the ops: casts, what the state is stored in, updates that round away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audit_cases import Net, batch, marked, net
from torch import nn
from torch.nn import functional

import precisionlint
from precisionlint.audit_report import AuditReport, GradientRange


def test_a_cast_there_and_back_and_a_second_cast_of_one_tensor_are_told_by_their_lines():
    x = torch.randn(64)

    def step() -> None:
        half = x.to(torch.bfloat16)
        x.to(torch.bfloat16)  # <- again
        half.float().to(torch.bfloat16)  # <- back
        wide = half.float()
        wide.add_(1.0)
        wide.to(torch.bfloat16)

    with precisionlint.audit() as audit:
        step()
    redundant = {(each.place.line if each.place else 0): (each.again, each.back) for each in audit.report.casts}
    assert redundant[marked(step, "<- again")] == (1, 0)
    assert redundant.pop(marked(step, "<- back")) == (0, 1)
    assert [each for each in redundant.values() if each == (0, 1)] == []
    assert sum(each.count for each in audit.report.casts) == 6
    assert sum(each.bytes for each in audit.report.casts) == 64 * (2 + 2 + 4 + 2 + 4 + 2)


def test_a_changed_tensor_that_is_cast_anew_is_not_redundant():
    x = torch.randn(8)
    with precisionlint.audit() as audit:
        for _ in range(3):
            x.to(torch.float16)
            x.add_(1.0)
    assert [(each.count, each.again) for each in audit.report.casts] == [(3, 0)]


def test_autocast_casts_each_weight_once_and_the_input_of_each_linear():
    model = net()
    with precisionlint.audit(model) as audit, torch.autocast("cpu", dtype=torch.bfloat16):
        model(batch()[0])
        model(batch()[0])
    of_head = [each for each in audit.report.casts if each.module == "head"]
    assert sum(each.count for each in of_head) == 4  # weight and bias once, the input twice


def test_weights_cast_anew_in_each_region_are_not_redundant():
    model = net()
    with precisionlint.audit(model) as audit:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model.head(batch()[0])
    assert sum(each.count for each in audit.report.casts) == 6
    assert sum(each.again for each in audit.report.casts) == 0


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, dtype: torch.dtype = torch.float32) -> AuditReport:
    x, y = batch(dtype)
    with precisionlint.audit(model, optimizer) as audit:
        functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return audit.report


def test_mixed_precision_with_adam_holds_sixteen_bytes_for_each_parameter():
    model = net()
    report = step_with(model, torch.optim.AdamW(model.parameters()))
    assert report.bytes_per_parameter == 16.0
    elements = sum(each.numel() for each in model.parameters())
    assert {(each.kind, each.dtype, each.bytes) for each in report.storage} == {
        ("weights", "float32", 4 * elements),
        ("gradients", "float32", 4 * elements),
        ("optimizer state exp_avg", "float32", 4 * elements),
        ("optimizer state exp_avg_sq", "float32", 4 * elements),
    }


def test_pure_bf16_with_adam_holds_eight():
    model = net(torch.bfloat16)
    report = step_with(model, torch.optim.AdamW(model.parameters()), torch.bfloat16)
    assert report.bytes_per_parameter == 8.0


def test_master_weights_are_found_outside_the_model_by_what_they_hold():
    model = net(torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    x, y = batch(torch.bfloat16)
    with precisionlint.audit(model, optimizer) as audit:
        functional.cross_entropy(model(x).float(), y).backward()
        for master, weight in zip(masters, model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        optimizer.step()
        for master, weight in zip(masters, model.parameters(), strict=True):
            weight.data.copy_(master.data)
    kinds = {(each.kind, each.dtype): each.tensors for each in audit.report.storage}
    assert kinds[("master weights", "float32")] == len(masters)
    assert audit.report.ok and audit.report.updates == ()


def trained(lr: float, dtype: torch.dtype, **options: bool) -> tuple[Net, AuditReport]:
    model = net(dtype)
    return model, step_with(model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, **options), dtype)


def test_lost_updates_of_bf16_weights_are_counted_for_each_parameter():
    model, report = trained(1e-5, torch.bfloat16)
    lost = {each.parameter: each.lost / each.meant for each in report.updates if each.meant}
    assert set(lost) <= {name for name, _ in model.named_parameters()}
    assert lost["norm.weight"] == 1.0  # at 1.0 a bf16 step is 7.8e-3
    meant = sum(each.meant for each in report.updates)
    assert sum(each.lost for each in report.updates) / meant > 0.5


def test_a_large_learning_rate_loses_few_of_them():
    _, report = trained(1e-1, torch.bfloat16)
    meant = sum(each.meant for each in report.updates)
    assert sum(each.lost for each in report.updates) / meant < 0.05


def test_the_twin_counts_what_a_second_run_counts():
    before = net(torch.bfloat16)
    model, report = trained(3e-4, torch.bfloat16, foreach=False)
    wide = net(torch.bfloat16).float()
    x, y = batch(torch.bfloat16)
    functional.cross_entropy(before(x).float(), y).backward()
    for clone, original in zip(wide.parameters(), before.parameters(), strict=True):
        assert original.grad is not None
        clone.grad = original.grad.float()
    torch.optim.AdamW(wide.parameters(), lr=3e-4, weight_decay=0.0).step()
    by_hand = {
        name: int(((moved != start.float()) & (now == start)).sum())
        for (name, moved), start, now in zip(
            wide.named_parameters(), before.parameters(), model.parameters(), strict=True
        )
    }
    assert {each.parameter: each.lost for each in report.updates} == by_hand


def test_fp32_weights_have_no_updates_to_lose():
    _, report = trained(1e-5, torch.float32)
    assert report.updates == ()


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        return super().step(closure)


@pytest.mark.parametrize(("made", "told"), [(torch.optim.AdamW, None), (Twice, "it runs its closure several times")])
def test_updates_of_a_step_with_a_closure_are_those_after_it_has_run(made: Any, told: str | None):
    model = net(torch.bfloat16)
    optimizer = made(model.parameters(), lr=1e-5)
    x, y = batch(torch.bfloat16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).float(), y)
        loss.backward()
        return loss

    def stepped() -> AuditReport:
        with precisionlint.audit(model, optimizer) as audit:
            optimizer.step(closure)
        return audit.report

    closure()
    first, report = stepped(), stepped()
    if told is not None:
        assert not report.updates and any(told in note for note in report.notes)
        return
    assert sum(each.meant for each in first.updates) > 0 and first.gradients is not None
    assert "lost-updates" in {each.rule for each in report.findings} or "Measured" in report.findings[0].message
    assert {each.kind for each in report.storage} >= {"gradients", "optimizer state exp_avg"}


def test_an_optimizer_that_takes_a_closure_is_named_as_not_measured():
    model = net(torch.bfloat16)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x, y = batch(torch.bfloat16)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).float(), y)
        loss.backward()
        return loss

    with precisionlint.audit(model, optimizer) as audit:
        optimizer.step(closure)
    assert "lost updates of LBFGS were not measured: its step needs a closure" in audit.report.notes
    assert [station.what for station in audit.report.order] == [
        "gradients set to zero",
        "backward",
        "'optimizer' steps",
    ]
    phases = {op.phase for op in audit.report.ops if op.op == "addmm"}
    assert phases == {"forward"}  # the closure's forward is one, though a step runs it


def ranges_of(gradient: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> GradientRange:
    """What is told of one parameter whose gradient is given."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with precisionlint.audit(None, optimizer, scaler) as audit:
        weight.grad = gradient
        optimizer.step()
    assert audit.report.gradients is not None
    return audit.report.gradients


def test_shares_of_the_range_agree_with_real_casts_at_every_scale():
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(200_000, generator=generator) * 2.0 ** torch.randint(
        -30, -2, (200_000,), generator=generator
    )
    found = ranges_of(gradient)
    for each in found.formats:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(each.format)
        if dtype is None:
            continue
        cast = (gradient * each.scale).to(dtype)
        assert abs(each.zero - (cast == 0).float().mean().item()) < 1e-4, each
        small = (cast.abs() < torch.finfo(dtype).smallest_normal) & (cast != 0)
        assert abs(each.subnormal - small.float().mean().item()) < 2e-3, each
        assert each.over == cast.isinf().float().mean().item() == 0.0, each


def test_the_best_scale_is_the_largest_that_keeps_a_factor_of_two_below_the_maximum():
    found = ranges_of(torch.tensor([2.0**-30, 2.0**-20, 1.5 * 2.0**-10, 0.0]))
    assert (found.least, found.greatest, found.zeros, found.elements) == (-30, -10, 1, 4)
    best = {each.format: each for each in found.formats if each.chosen == "best"}
    assert best["fp16"].scale == 2.0**24
    assert 1.5 * 2.0**-10 * best["fp16"].scale < 65504 / 2
    plain = next(each for each in found.formats if each.format == "fp16" and each.scale == 1.0)
    assert plain.zero == 1 / 3 and best["fp16"].zero == 0.0


def test_infinite_gradients_are_counted_apart():
    found = ranges_of(torch.tensor([1.0, float("inf"), float("nan")]))
    assert (found.nonfinite, found.greatest) == (2, 0)


def test_an_element_that_was_not_to_move_is_not_lost():
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with precisionlint.audit(None, optimizer) as audit:
        weight.grad = torch.tensor([0.0, 0.0, 1.0, 100.0], dtype=torch.bfloat16)
        optimizer.step()
    assert [(each.meant, each.lost) for each in audit.report.updates] == [(2, 1)]
