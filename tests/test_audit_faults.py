"""Faults planted one at a time in a sound trainer are measured at their line, and the sound trainer gives nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_cases import Net, batch, faults, marked, net
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import precisionlint
from precisionlint.audit_report import AuditReport

BF16 = torch.bfloat16


class Trainer:
    """A sound trainer: bf16 autocast or fp16 with a scaler, fp32 weights, a clip; each part may be replaced by a
    faulty one.
    """

    def __init__(self, model: nn.Module | None = None, dtype: torch.dtype = BF16, **options: Any) -> None:
        self.model = model or net()
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
        made = options.pop("optimizer", torch.optim.AdamW)
        self.optimizer = made(self.model.parameters(), lr=1e-3, **options)
        self.loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda logits, y: functional.cross_entropy(
            logits.float(), y
        )

    def forward(self) -> torch.Tensor:
        x, y = batch()
        enabled = self.dtype is not torch.float32
        with torch.autocast("cpu", dtype=self.dtype if enabled else BF16, enabled=enabled):
            return self.loss(self.model(x), y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.forward()).backward()
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def audited(trainer: Trainer, step: Callable[[], None] | None = None) -> AuditReport:
    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler) as audit:
        (step or trainer.step)()
    return audit.report


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_the_sound_trainer_gives_nothing(dtype: torch.dtype):
    report = audited(Trainer(dtype=dtype))
    assert faults(report) == []


# -- the order of loss scaling


def test_a_scaled_backward_after_unscale():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        trainer.scaler.unscale_(trainer.optimizer)
        trainer.scaler.scale(trainer.forward()).backward()  # <-
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    assert faults(audited(trainer, step)) == [("backward-after-unscale", marked(step))]


def test_a_step_past_the_scaler():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        trainer.optimizer.step()  # <-
        trainer.scaler.update()

    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler) as audit, pytest.raises(AssertionError):
        step()
    assert faults(audit.report) == [("step-bypasses-scaler", marked(step))]


def test_a_clip_by_hand_before_unscale_is_known_by_the_storages_that_it_reads_and_writes():
    trainer = Trainer(dtype=torch.float16)

    def clip(parameters: Iterable[torch.Tensor], limit: float) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        total = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((limit / total).clamp(max=1.0))  # <-

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        clip(trainer.model.parameters(), 1.0)
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    assert faults(audited(trainer, step)) == [("clip-before-unscale", marked(clip))]


@pytest.mark.parametrize("threshold", [float("inf"), 65536.0])
def test_a_clip_that_only_measures_or_carries_the_scale_is_no_clip_of_scaled_gradients(threshold: float):
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        clip_grad_norm_(trainer.model.parameters(), threshold)
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    assert "clip-before-unscale" not in dict(faults(audited(trainer, step)))


def test_unscaling_by_hand_is_seen_and_makes_the_clip_sound():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        inverse = 1.0 / trainer.scaler.get_scale()
        for parameter in trainer.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(inverse)
        clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()

    assert faults(audited(trainer, step)) == []


def test_a_loss_derived_from_the_scaled_one_still_carries_the_scale():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.optimizer.zero_grad()
        for _ in range(2):
            (trainer.scaler.scale(trainer.forward()) / 2).backward()
        clip_grad_norm_(trainer.model.parameters(), 1.0)  # <-
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    assert faults(audited(trainer, step)) == [("clip-before-unscale", marked(step))]


def test_unscaling_each_micro_batch_raises_and_is_told_before_it_does():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        for _ in range(2):
            trainer.scaler.scale(trainer.forward()).backward()
            trainer.scaler.unscale_(trainer.optimizer)  # <-

    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler) as audit, pytest.raises(RuntimeError):
        step()
    assert faults(audit.report) == [("double-unscale", marked(step))]


def penalty(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return sum((each.pow(2).sum() for each in gradients), torch.zeros(())).sqrt()  # <-


@pytest.mark.parametrize("unscaled", ["never", "before", "after", "in place"])
def test_a_penalty_of_gradients_that_autograd_grad_gave_out_with_the_scale_still_in_them(unscaled: str):
    trainer = Trainer(dtype=torch.float16)
    weights = list(trainer.model.parameters())

    def step() -> None:
        trainer.optimizer.zero_grad()
        loss = trainer.forward()
        scaled, graph = trainer.scaler.scale(loss), unscaled != "in place"
        gradients = torch.autograd.grad(scaled, weights, retain_graph=True, create_graph=graph)
        if unscaled == "before":
            gradients = tuple(each / trainer.scaler.get_scale() for each in gradients)
        if unscaled == "in place":
            torch._foreach_mul_(gradients, 1.0 / 65536.0)
        norm = penalty(gradients)
        if unscaled == "after":
            norm = norm / trainer.scaler.get_scale()
        trainer.scaler.scale(loss + 0.1 * norm).backward()
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    expected = [("scaled-gradients-read", marked(penalty))] if unscaled == "never" else []
    assert faults(audited(trainer, step)) == expected


def test_a_clip_in_a_hook_of_the_optimizer_is_seen_before_the_unscale():
    trainer = Trainer(dtype=torch.float16)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        clip_grad_norm_(trainer.model.parameters(), 1.0)  # <-

    def step(unscale: bool) -> None:
        trainer.optimizer.zero_grad()
        trainer.scaler.scale(trainer.forward()).backward()
        if unscale:
            trainer.scaler.unscale_(trainer.optimizer)
        else:
            hook(trainer.optimizer, (), {})
        trainer.scaler.step(trainer.optimizer)
        trainer.scaler.update()

    assert faults(audited(trainer, lambda: step(False))) == [("clip-before-unscale", marked(hook))]
    trainer.optimizer.register_step_pre_hook(hook)  # a scaler unscales before it steps: the hook comes after
    report = audited(trainer, lambda: step(True))
    assert faults(report) == []


def test_an_optimizer_that_steps_within_the_backward_belongs_to_the_optimizer_and_to_no_clip():
    model = net()
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}

    def step_of(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [each.register_post_accumulate_grad_hook(step_of) for each in model.parameters()]
    x, y = batch()
    with precisionlint.audit(model, optimizers.values()) as audit:
        functional.cross_entropy(model(x), y).backward()
    for handle in handles:
        handle.remove()
    assert audit.report.steps == len(optimizers)
    assert {op.phase for op in audit.report.ops} == {"forward", "backward", "optimizer"}
    assert faults(audit.report) == []


# -- regions


def test_one_region_around_two_steps_uses_weights_that_have_changed():
    trainer = Trainer()

    def two_steps() -> None:
        x, y = batch()
        with torch.autocast("cpu", dtype=BF16):
            for _ in range(2):
                trainer.optimizer.zero_grad()
                loss = functional.cross_entropy(trainer.model(x).float(), y)
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                trainer.optimizer.step()

    report = audited(trainer, two_steps)
    found = [finding for finding in report.findings if finding.rule == "autocast-around-training-loop"]
    assert found and {finding.severity for finding in found} == {"error"}
    assert {finding.place.line for finding in found} == {
        marked(Net.forward, "<- a layer"),
        marked(Net.forward, "<- the head"),
    }
    assert "half copy of a weight that an optimizer has changed since" in found[0].message


@pytest.mark.parametrize("cache", [True, False])
def test_a_region_for_each_step_or_one_without_a_cache_is_sound(cache: bool):
    trainer = Trainer()

    def two_steps() -> None:
        x, y = batch()
        for _ in range(2):
            with torch.autocast("cpu", dtype=BF16, cache_enabled=cache):
                loss = functional.cross_entropy(trainer.model(x).float(), y)
            trainer.optimizer.zero_grad()
            loss.backward()
            trainer.optimizer.step()

    assert faults(audited(trainer, two_steps)) == []


# -- arithmetic in half


def in_half(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> AuditReport:
    """A step whose loss gets bf16 logits, outside the region that made them."""
    trainer = Trainer()

    def step() -> None:
        x, y = batch()
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            logits = trainer.model(x)
        loss(logits, y).backward()
        trainer.optimizer.step()

    return audited(trainer, step)


def test_log_softmax_kept_in_bf16():
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log_probabilities = torch.log_softmax(logits, -1)  # <-
        return functional.nll_loss(log_probabilities.float(), y)

    assert faults(in_half(loss)) == [("softmax-in-half", marked(loss))]


def test_a_loss_on_half_logits_has_one_name():
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits, y)  # <-

    assert faults(in_half(loss)) == [("loss-on-half-logits", marked(loss))]


def test_softmax_by_hand_without_upcast():
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        exps = torch.exp(logits - logits.max(-1, keepdim=True).values)
        probabilities = exps / exps.sum(-1, keepdim=True)  # <-
        return -probabilities.float()[torch.arange(len(y)), y].log().mean()

    assert faults(in_half(loss)) == [("softmax-in-half", marked(loss))]


def test_softmax_by_hand_with_upcast_and_the_fused_one_are_sound():
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        exps = torch.exp(logits.float() - logits.max(-1, keepdim=True).values)
        probabilities = exps / exps.sum(-1, keepdim=True)
        fused = torch.softmax(logits, -1)
        return -(probabilities + fused.float())[torch.arange(len(y)), y].log().mean()

    assert faults(in_half(loss)) == []


class RMSNorm(nn.Module):
    def __init__(self, width: int, upcast: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.upcast = upcast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self.upcast else x
        mean = wide.pow(2).mean(-1, keepdim=True)  # <-
        return (wide * torch.rsqrt(mean + 1e-6)).to(x.dtype) * self.weight


@pytest.mark.parametrize("upcast", [False, True])
def test_rmsnorm_without_upcast(upcast: bool):
    model = nn.Sequential(nn.Linear(8, 8), RMSNorm(8, upcast), nn.Linear(8, 4))
    found = faults(audited(Trainer(model)))
    assert found == ([] if upcast else [("norm-without-upcast", marked(RMSNorm.forward))])


def test_a_euclidean_norm_is_told_as_a_sum_and_not_as_a_mean():
    class Unit(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return self.head(x / torch.sum(x * x, dim=-1, keepdim=True).sqrt())

    (found,) = audited(Trainer(Unit())).findings
    assert found.rule == "norm-without-upcast"
    assert found.message.startswith("a norm takes its sum of squares in bf16: squares, their sum and its root")
    assert found.message.endswith("torch's linalg.vector_norm")


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_torchs_rms_norm_is_one_norm_with_an_upcast():
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 4))
    assert faults(audited(Trainer(model))) == []


def test_index_add_in_bf16_where_many_terms_fall_on_one_row():
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(64, dtype=torch.long)
        pooled = torch.zeros(2, 4, dtype=BF16).index_add(0, rows, logits.repeat(4, 1))  # <-
        return pooled.float().square().mean()

    def few(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pooled = torch.zeros(16, 4, dtype=BF16).index_add(0, torch.arange(16), logits)
        return pooled.float().square().mean()

    assert faults(in_half(loss)) == [("half-scatter", marked(loss))]
    assert faults(in_half(few)) == []


class Leaks(nn.Module):
    """Three products in half, and one for which autocast was switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        with torch.autocast("cpu", enabled=False):
            x = x.float() @ self.mix  # <-
        return self.head(x)


def test_an_fp32_product_in_a_bf16_recipe_is_told_without_failing_the_step():
    report = audited(Trainer(Leaks()))
    assert faults(report) == [("fp32-matmul-under-policy", marked(Leaks.forward))]
    assert report.ok and "22% of the forward's products" in report.findings[0].message


class Attention(nn.Module):
    """Attention that the CPU decomposes (it drops), with two fp32 products and a softmax inside."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.head = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(1, 1, 16, 24).chunk(3, -1)
        return self.head(functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1).view(16, 8))


def test_a_decomposed_attention_is_judged_as_one():
    report = audited(Trainer(Attention()))
    assert any(op.op == "bmm" and op.inputs == ("float32", "float32") for op in report.ops)
    assert faults(report) == []


# -- what weights, moments and gradients are kept in


class HalfMoments(torch.optim.Optimizer):
    """Adam whose moments lie in bf16 beside fp32 weights."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=BF16)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=BF16)
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).add_(parameter.grad.square(), alpha=0.001)
                parameter.sub_(group["lr"] * state["exp_avg"].float() / (state["exp_avg_sq"].float().sqrt() + 1e-8))


def test_moments_in_bf16_beside_fp32_weights():
    trainer = Trainer(optimizer=HalfMoments)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.forward().backward()
        trainer.optimizer.step()  # <-

    report = audited(trainer, step)
    assert faults(report) == [("half-optimizer-state", marked(step))]
    assert "'exp_avg' in bf16 (8), 'exp_avg_sq' in bf16 (8)" in report.findings[0].message


def test_half_weights_under_a_plain_optimizer_are_one_finding_with_what_was_measured():
    trainer = Trainer(net(BF16))
    trainer.optimizer.param_groups[0]["lr"] = 1e-5

    def step() -> None:
        x, y = batch(BF16)
        trainer.optimizer.zero_grad()
        functional.cross_entropy(trainer.model(x).float(), y).backward()
        trainer.optimizer.step()  # <-

    report = audited(trainer, step)
    assert faults(report) == [("bf16-only-weights", marked(step))]
    assert "Measured in this step:" in report.findings[0].message


class PlainSGD(torch.optim.Optimizer):
    """An optimizer of the user's own, about whose masters nothing is known."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, stochastic: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "stochastic": stochastic})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                moved = parameter.float() - group["lr"] * parameter.grad.float()
                if group["stochastic"] and parameter.dtype is BF16:
                    noise = torch.randint_like(moved, 2**16, dtype=torch.int32)
                    moved = ((moved.view(torch.int32) + noise) & -(2**16)).view(torch.float32)
                parameter.copy_(moved)


@pytest.mark.parametrize("stochastic", [False, True])
def test_lost_updates_of_an_unknown_optimizer_unless_it_rounds_stochastically(stochastic: bool):
    trainer = Trainer(net(BF16), optimizer=PlainSGD, stochastic=stochastic)

    def step() -> None:
        x, y = batch(BF16)
        trainer.optimizer.zero_grad()
        functional.cross_entropy(trainer.model(x).float(), y).backward()
        trainer.optimizer.step()  # <-

    expected = [] if stochastic else [("lost-updates", marked(step))]
    assert faults(audited(trainer, step)) == expected


@pytest.mark.parametrize(("passes", "told"), [(8, True), (1, False)])
def test_micro_batches_summed_in_bf16(passes: int, told: bool):
    trainer = Trainer(net(BF16))

    def step() -> None:
        x, y = batch(BF16)
        for _ in range(passes):
            functional.cross_entropy(trainer.model(x).float(), y).backward()  # <-
        trainer.optimizer.step()

    found = dict(faults(audited(trainer, step)))
    assert found.get("half-gradient-accumulation") == (marked(step) if told else None)


# -- work that autocast does not know


@torch.library.custom_op("precisionlint_tests::gated", mutates_args=())  # <-
def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return x * gate


@gated.register_fake
def _(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


gated.register_autograd(lambda context, gradient: (gradient, None))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("gate", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated(self.linear(x), self.gate)


def test_a_custom_op_without_an_autocast_rule_that_met_mixed_inputs():
    report = audited(Trainer(Gated()))
    lines = Path(__file__).read_text().splitlines()
    assert faults(report) == [
        ("unregistered-custom-op", lines.index(next(each for each in lines if "::gated" in each)) + 1)
    ]
    assert any(op.op == "precisionlint_tests::gated" and op.inputs == ("bfloat16", "float32") for op in report.ops)


# -- values


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x * 1e4)
        x = x * x  # <-
        mask = torch.zeros(8, dtype=torch.bool)
        return self.head(x.masked_fill(mask, float("-inf")))


def test_the_first_value_that_is_not_finite_is_named_by_its_op_and_line():
    trainer = Trainer(Squares(), dtype=torch.float16)
    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler, values=True) as audit:
        trainer.step()
    found = [finding for finding in audit.report.findings if finding.rule == "first-overflow"]
    assert [finding.place.line for finding in found] == [marked(Squares.forward)]
    assert "mul" in found[0].message and "inf in fp16, in the forward" in found[0].message
    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler) as audit:
        trainer.step()
    assert "first-overflow" not in dict(faults(audit.report))


def test_an_overflow_of_the_backward_under_a_scaler_fails_nothing():
    trainer = Trainer(dtype=torch.float16)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23)
    with precisionlint.audit(trainer.model, trainer.optimizer, trainer.scaler, values=True) as audit:
        trainer.step()
    found = [finding for finding in audit.report.findings if finding.rule == "first-overflow"]
    assert [finding.severity for finding in found] == ["info"]
    assert audit.report.ok and "the scaler skips this step" in found[0].message


def test_masks_of_minus_infinity_are_no_overflow():
    trainer = Trainer()

    def step() -> None:
        scores = torch.randn(4, 4, requires_grad=True)
        mask = torch.ones(4, 4).triu(1).bool()
        added = torch.full((4, 4), float("-inf")).triu(1)
        (
            torch.softmax(scores.masked_fill(mask, float("-inf")), -1) + torch.softmax(scores + added, -1)
        ).sum().backward()

    with precisionlint.audit(trainer.model, values=True) as audit:
        step()
    assert faults(audit.report) == []


# -- what stood before the window


@pytest.mark.parametrize(
    ("before", "within", "found"),
    [
        ((), ("clip", "step"), ["clip-before-unscale"]),
        ((), ("unscale", "clip", "step"), []),
        (("unscale",), ("clip", "step"), []),
        ((), ("step",), []),
        ((), ("clip",), []),  # whether they carry the scale, nobody has said
        ((), ("clip", "zero", "step"), []),
    ],
)
def test_gradients_of_before_the_window_carry_the_scale_of_the_scaler_that_the_step_goes_through(
    before: tuple[str, ...], within: tuple[str, ...], found: list[str]
):
    trainer = Trainer(dtype=torch.float16)
    x, y = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = functional.cross_entropy(trainer.model(x), y)
    trainer.scaler.scale(loss).backward()
    parts: dict[str, Callable[[], object]] = {
        "unscale": lambda: trainer.scaler.unscale_(trainer.optimizer),
        "clip": lambda: nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0),
        "zero": lambda: trainer.optimizer.zero_grad(set_to_none=False),
        "step": lambda: trainer.scaler.step(trainer.optimizer),
    }
    for each in before:
        parts[each]()

    def step() -> None:
        for each in within:
            parts[each]()

    assert [rule for rule, _ in faults(audited(trainer, step))] == found


CLIPPED = "clip-before-unscale"


@pytest.mark.parametrize(
    ("scalers", "before", "within", "found"),
    [
        (1, "", "clip 0, step 0, step 1", [CLIPPED]),
        (1, "", "clip 1, step 0, step 1", [CLIPPED]),
        (2, "", "clip 1, step 0, step 1", [CLIPPED]),
        (2, "", "clip 0, clip 1, step 0, step 1", [CLIPPED]),  # one line
        (2, "", "unscale 0, clip 0, unscale 1, clip 1, step 0, step 1", []),
        (1, "unscale 0", "clip 0, step 0, step 1", []),
        (1, "unscale 0", "clip 1, step 0, step 1", [CLIPPED]),
        (2, "unscale 0, unscale 1", "clip 0, clip 1, step 0, step 1", []),
        (1, "step 0", "clip 0, step 1", []),  # used before: what stands there was divided
        (1, "", "clip 0, clip 1, step 1", [CLIPPED]),  # of the other nobody has said whose they are
        (1, "", "clip 0, clip 1, plain 0, step 1", [CLIPPED]),
        (1, "", "zero 0, clip 1, step 1", [CLIPPED]),
        (1, "", "clip 0, drop 0, clip 1, zero 1, step 1", []),
        (1, "unscale 0, unscale 1", "plain 0, step 1", ["step-bypasses-scaler"]),
        (1, "", "step 1", []),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_among_several_optimizers_each_ones_gradients_carry_the_scale_of_whoever_divides_them(
    scalers: int, before: str, within: str, found: list[str], given: bool
):
    models = [nn.Linear(8, 8), nn.Linear(8, 4)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in models]
    made = [torch.amp.GradScaler("cpu") for _ in range(scalers)]
    x = torch.randn(4, 8)
    made[0].scale(models[0](x).square().mean()).backward()
    made[-1].scale(models[1](x).square().mean()).backward()

    def do(what: str, number: int) -> None:
        optimizer, scaler = optimizers[number], made[number % scalers]
        if what == "clip":
            clip_grad_norm_(models[number].parameters(), 1.0)
        elif what == "unscale":
            scaler.unscale_(optimizer)
        elif what == "step":
            scaler.step(optimizer)
        elif what == "plain":
            optimizer.step()
        elif what == "zero":
            optimizer.zero_grad(set_to_none=False)
        else:
            for each in models[number].parameters():
                each.grad = None

    def play(steps: str) -> None:
        for each in filter(None, steps.split(", ")):
            what, number = each.split()
            do(what, int(number))

    play(before)
    if not given and "plain" in within:
        return  # which scaler unscaled them, only the scaler can tell
    with precisionlint.audit(models, optimizers if given else None, made if given else None) as audit:
        play(within)
    assert [rule for rule, _ in faults(audit.report)] == found


def test_an_optimizer_that_is_met_at_its_step_is_judged_as_one_that_was_given():
    trainer = Trainer(dtype=torch.float16)

    def step() -> None:
        trainer.scaler.scale(trainer.forward()).backward()
        trainer.optimizer.step()

    with precisionlint.audit(trainer.model) as audit:
        step()
    assert [rule for rule, _ in faults(audit.report)] == ["step-bypasses-scaler"]


def test_a_region_of_before_the_window_is_in_force_in_it():
    trainer = Trainer()
    with torch.autocast("cpu", dtype=BF16):
        report = audited(trainer, lambda: functional.cross_entropy(trainer.model(batch()[0]), batch()[1]).backward())
    assert [rule for rule, _ in faults(report)] == ["backward-under-autocast"]
