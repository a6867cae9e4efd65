"""What is lost for being small: updates of averages, gradients in fp16, norms in half; and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from audit_cases import batch, faults, marked, net
from torch import nn
from torch.nn import functional

import precisionlint
from precisionlint.audit_report import AuditReport

BF16 = torch.bfloat16
Update = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


def after_a_step(update: Update, dtype: torch.dtype = BF16) -> AuditReport:
    """A step of a sound trainer, and an update of averages of its weights after it."""
    model = net()
    average = [each.detach().to(dtype) for each in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = batch()
    with precisionlint.audit(model, optimizer) as audit:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            update(average, [each.detach().to(dtype) for each in model.parameters()])
    return audit.report


def by_lerp(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for mean, weight in zip(average, weights, strict=True):
        mean.lerp_(weight, 1e-4)  # <-


def by_decay(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for mean, weight in zip(average, weights, strict=True):
        mean.mul_(0.9999).add_(weight, alpha=1e-4)  # <-


def by_lists(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    torch._foreach_mul_(average, 0.9999)
    torch._foreach_add_(average, weights, alpha=1e-4)  # <-


def by_part_of_the_difference(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for mean, weight in zip(average, weights, strict=True):
        mean.sub_((mean - weight) * 1e-4)  # <-


def anew(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for number, weight in enumerate(weights):
        average[number] = 0.9999 * average[number] + 1e-4 * weight  # <-


def copied(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for mean, weight in zip(average, weights, strict=True):
        mean.copy_(0.9999 * mean + 1e-4 * weight)  # <-


WAYS = (by_lerp, by_decay, by_lists, by_part_of_the_difference, anew, copied)


@pytest.mark.parametrize("update", WAYS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_a_slow_average_in_half_is_told_however_it_is_written(update: Update, dtype: torch.dtype):
    report = after_a_step(update, dtype)
    assert faults(report) == ([] if dtype is torch.float32 else [("half-ema", marked(update))])


def test_an_average_of_what_is_far_away_moves_and_is_no_fault():
    def far(average: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
        for mean, weight in zip(average, weights, strict=True):
            mean.lerp_(weight + 100.0, 0.01)

    assert faults(after_a_step(far)) == []


def test_an_average_that_equals_its_weights_has_nothing_to_lose():
    model = net()
    average = [each.detach().to(BF16) for each in model.parameters()]
    with precisionlint.audit(model) as audit, torch.no_grad():
        by_lerp(average, [each.detach().to(BF16) for each in model.parameters()])
    assert faults(audit.report) == []


def test_the_share_that_is_told_is_the_share_that_does_not_move():
    mean = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0], dtype=BF16)
    weight = torch.tensor([1.0, 1.5, 1.25, 3.0, 1.0], dtype=BF16)  # 4 differ; 1.5 and 1.25 are too near
    with precisionlint.audit() as audit, torch.no_grad():
        mean.lerp_(weight, 0.005)
    assert mean.tolist() == [1.0, 1.0, 1.0, 1.0078125, pytest.approx(0.005, rel=1e-2)]
    assert "50% of its elements" in audit.report.findings[0].message


# -- gradients in fp16


def divided(by: float, scale: float | None = None) -> AuditReport:
    model = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = batch()
    with precisionlint.audit(model, optimizer, scaler) as audit:
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x)
        scaler.scale(functional.cross_entropy(logits.float(), y) / by).backward()
        scaler.step(optimizer)
        scaler.update()
    return audit.report


def test_gradients_that_a_cast_to_fp16_makes_zero_are_told_with_a_scale_that_keeps_them():
    rules = [finding.rule for finding in divided(1e7).findings]
    assert rules and set(rules) == {"gradient-underflow"}
    first = divided(1e7).findings[0].message
    assert first.startswith("100% of the gradient's elements that are not 0 (100% of its sum) become 0")
    scale = float(first.rpartition("a loss scale of ")[2].partition(" ")[0])
    assert "gradient-underflow" not in dict(faults(divided(1e7, scale)))
    assert "gradient-underflow" in dict(faults(divided(1e7, 1.0)))


def test_gradients_within_range_are_no_underflow_and_neither_are_tiny_ones_beside_large_ones():
    assert faults(divided(1.0)) == []
    logits = torch.randn(4, 1000, requires_grad=True)
    half = logits.half()
    with precisionlint.audit() as audit:
        functional.cross_entropy(half.float() * 20.0, torch.zeros(4, dtype=torch.long)).backward()
    assert "gradient-underflow" not in dict(faults(audit.report))


def test_a_backward_with_inf_says_nothing_of_what_is_small():
    x = torch.randn(8, requires_grad=True)
    with precisionlint.audit() as audit:
        half = x.half()
        (half.float() * torch.tensor(float("inf"))).sum().backward()
    assert faults(audit.report) == []


# -- Adam's eps


@pytest.mark.parametrize(
    ("options", "told"),
    [({}, True), ({"foreach": False}, True), ({"fused": True}, False), ({"eps": 1e-4}, False)],
    ids=["default", "loop", "fused", "large eps"],
)
def test_an_eps_that_is_zero_in_fp16_is_told_with_the_weights_that_it_broke(options: dict[str, object], told: bool):
    weight = nn.Parameter(torch.ones(8, dtype=torch.float16))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, **options)  # type: ignore[arg-type]
    with precisionlint.audit(None, optimizer) as audit:
        weight.grad = torch.tensor([1e-2] * 4 + [1e-3] * 3 + [0.0], dtype=torch.float16)
        optimizer.step()
    messages = [each.message for each in audit.report.findings if each.rule == "adam-epsilon-underflow"]
    assert bool(messages) == told
    if told:
        assert "50% of its second moments are 0 too" in messages[0] and "4 weights are inf or NaN" in messages[0]
        assert int((~torch.isfinite(weight)).sum()) == 4


# -- norms


def normed(gradient: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor]) -> list[str]:
    weight = nn.Parameter(torch.zeros_like(gradient))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    with precisionlint.audit(None, optimizer) as audit:
        (weight * gradient).sum().backward()
        assert weight.grad is not None
        norm(weight.grad)
    return [each.message for each in audit.report.findings if each.rule == "half-gradient-norm"]


@pytest.mark.parametrize(
    "norm",
    [
        lambda g: (g**2).sum().sqrt(),
        lambda g: g.square().sum() ** 0.5,
        lambda g: torch.stack([(g[:2] * g[:2]).sum(), g[2:].square().sum()]).sum().sqrt(),
    ],
)
def test_a_norm_by_hand_is_held_against_the_one_that_is_due(norm: Callable[[torch.Tensor], torch.Tensor]):
    large = torch.full((4,), 300.0, dtype=torch.float16)
    (message,) = normed(large, norm)
    assert "it says inf where 600 is due" in message
    assert normed(large.bfloat16(), norm) == normed(large.float(), norm) == []


def test_norms_that_are_right_or_of_no_gradients_are_not_told():
    fine = torch.full((4,), 0.5, dtype=torch.float16)
    assert normed(fine, lambda g: (g**2).sum().sqrt()) == []
    large = torch.full((4,), 300.0, dtype=torch.float16)
    assert normed(large, lambda g: torch.linalg.vector_norm(g)) == []
    assert normed(large, lambda g: (g.float() ** 2).sum().sqrt()) == []
    assert normed(large, lambda g: (torch.full_like(g, 300.0) ** 2).sum().sqrt()) == []


# -- running sums


def summed(total: torch.Tensor, reset: bool, steps: int) -> list[str]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = batch()
    with precisionlint.audit(model, optimizer) as audit:
        for _ in range(steps):
            optimizer.zero_grad()
            if reset:
                total.zero_()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            total += loss.detach()
            optimizer.step()
    return [each.rule for each in audit.report.findings]


def test_a_sum_in_half_that_runs_on_is_told_also_in_the_window_of_one_step():
    fresh = torch.zeros((), dtype=BF16)
    assert summed(fresh, reset=False, steps=1) == []  # nothing tells that another step will come
    assert summed(fresh, reset=False, steps=1) == ["half-running-sum"]  # the step before has written it
    assert summed(torch.zeros((), dtype=torch.float16), reset=False, steps=2) == ["half-running-sum"]


def test_a_sum_in_fp32_or_that_each_step_resets_is_sound():
    assert summed(torch.zeros(()), reset=False, steps=3) == []
    old = torch.zeros((), dtype=BF16)
    old += 1.0
    assert summed(old, reset=True, steps=1) == summed(old, reset=True, steps=3) == []


def test_a_sum_that_is_reset_after_it_was_used_is_sound():
    total = torch.ones((), dtype=BF16)
    total += 1.0
    with precisionlint.audit() as audit:
        total += 1.0
        total.zero_()
    assert faults(audit.report) == []


def test_parts_of_one_loss_are_no_running_sum():
    with precisionlint.audit() as audit:
        total = torch.zeros((), dtype=BF16)
        for _ in range(5):
            total += 1.0
        loss = torch.ones(3, dtype=BF16, requires_grad=True).sum()
        loss = loss + total
        loss += total
        loss.backward()
    assert faults(audit.report) == []


# -- scales


def scaled(init_scale: float, factor: float) -> AuditReport:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    x, y = batch()
    with precisionlint.audit(model, optimizer, scaler) as audit:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(x).float() * factor, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return audit.report


def test_a_scale_that_falls_below_one_has_collapsed_and_one_that_settles_or_stays_has_not():
    (found,) = scaled(1.5, float("inf")).findings
    assert found.rule == "scale-collapse" and "has fallen to 0.75, and this step was skipped too" in found.message
    assert faults(scaled(65536.0, float("inf"))) == []
    assert "scale-collapse" not in dict(faults(scaled(0.5, 1.0)))
