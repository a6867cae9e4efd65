"""Programs of every shape that training takes: each op keeps its phase, module and line, and nothing raises."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from audit_cases import batch, faults, marked, net
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import precisionlint
from precisionlint.audit_report import AuditReport, OpRecord

PRODUCTS = ("mm", "addmm", "bmm")


def audited(step: Callable[[], object], *models: nn.Module) -> AuditReport:
    with precisionlint.audit(list(models)) as audit:
        step()
    return audit.report


def products(report: AuditReport, phase: str) -> dict[str, int]:
    """How many matrix products each module ran in a phase."""
    found: dict[str, int] = {}
    for op in report.ops:
        if op.op in PRODUCTS and op.phase == phase:
            found[op.module] = found.get(op.module, 0) + op.count
    return found


def unmapped(report: AuditReport) -> list[OpRecord]:
    return [op for op in report.ops if op.phase in ("backward", "recompute") and not op.parameter and op.place is None]


class Block(nn.Module):
    """A block that is recomputed in its backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.last(x)

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.inner(x))  # <-


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_a_phase_of_its_own(reentrant: bool):
    model = Block(reentrant)

    def step() -> None:
        x, y = batch()
        functional.cross_entropy(model(x), y).backward()

    report = audited(step, model)
    assert products(report, "forward") == {"first": 1, "inner": 1, "last": 1}
    assert products(report, "recompute") == {"inner": 1}
    backward = products(report, "backward")
    assert backward == {"first": 1, "inner": 2, "last": 2}
    inner = {op.place.line for op in report.ops if op.module == "inner" and op.op in PRODUCTS and op.place}
    assert inner == {marked(Block.part)}
    assert [op.op for op in unmapped(report)] == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_regions_that_a_recomputation_enters_are_none_of_the_steps_own(reentrant: bool):
    model = Block(reentrant)

    def step() -> None:
        x, y = batch()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y)
        loss.backward()

    report = audited(step, model)
    assert [each.what for each in report.order] == ["autocast entered: cpu bfloat16", "autocast left", "backward"]
    assert len(report.regions) == 1 and "times" not in report.regions[0]
    recomputed = {op.outputs for op in report.ops if op.op in PRODUCTS and op.phase == "recompute"}
    assert recomputed == {("bfloat16",)}


def test_weights_that_functional_call_puts_in_their_place_are_not_counted_as_more_weights():
    model = nn.Linear(4, 8)
    optimizer = torch.optim.Adam(model.parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    audit = precisionlint.audit(None, optimizer)

    class Closing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            audit.__exit__(None, None, None)
            return x

    model.register_forward_hook(lambda module, args, out: Closing()(out))
    audit.__enter__()
    torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), torch.randn(3, 4))
    weights = [each for each in audit.report.storage if each.kind == "weights"]
    assert [each.elements for each in weights] == [sum(each.numel() for each in model.parameters())]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.weight)  # type: ignore[no-any-return]


def test_the_inside_of_an_autograd_function_is_seen_in_both_directions():
    model = WithFunction()
    x = batch()[0].requires_grad_()
    report = audited(lambda: model(x).sum().backward(), model)
    assert products(report, "forward") == {"WithFunction": 1}
    assert products(report, "backward") == {"WithFunction": 2}
    assert "weight" in {op.parameter for op in report.ops}
    assert unmapped(report) == []


def test_double_backward_maps_the_nodes_that_the_first_backward_made():
    model = net()

    def step() -> None:
        x, y = batch()
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(functional.cross_entropy(model(x), y), x, create_graph=True)
        gradient.square().sum().backward()

    report = audited(step, model)
    assert unmapped(report) == []
    assert set(products(report, "backward")) == {"layers.0", "layers.1", "head"}
    assert [station.what for station in report.order] == ["backward"]  # grad() adds nothing to weights


def test_a_module_called_several_times_and_shared_weights_are_counted_together():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight

    def step() -> None:
        x = batch()[0]
        model(model(x)).sum().backward()

    report = audited(step, model)
    assert products(report, "forward") == {"0": 2, "1": 2}
    assert {op.parameter for op in report.ops if op.parameter} == {"0.weight", "0.bias", "1.bias"}


def test_gradient_accumulation_shows_each_pass():
    model = net()

    def step() -> None:
        x, y = batch()
        for _ in range(3):
            functional.cross_entropy(model(x), y).backward()

    report = audited(step, model)
    assert [station.what for station in report.order] == ["backward"] * 3
    assert products(report, "backward")["head"] == 6
    sums = [op for op in report.ops if op.parameter == "head.weight" and op.op in ("add", "add_")]
    assert sum(op.count for op in sums) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp uses it
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_runs_under_the_audit(transform: str):
    model = net()
    x = batch()[0]
    parameters = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (one,)).square().sum()

    def step() -> object:
        if transform == "grad":
            return torch.func.grad(loss)(parameters, x)
        if transform == "vmap":
            return torch.func.vmap(lambda one: loss(parameters, one[None]))(x)
        return torch.func.jvp(lambda one: loss(parameters, one), (x,), (torch.ones_like(x),))

    assert any(op.op in PRODUCTS for op in audited(step, model).ops)


def test_hooks_of_the_users_own_run_and_belong_to_their_module():
    model = net()
    seen: list[str] = []
    model.head.register_forward_hook(lambda module, args, out: seen.append("forward") or out * 2.0)
    model.head.register_full_backward_hook(lambda module, into, out: seen.append("backward"))

    def step() -> None:
        x, y = batch()
        functional.cross_entropy(model(x), y).backward()

    report = audited(step, model)
    assert seen == ["forward", "backward"]
    assert any(op.op == "mul" and op.module == "head" for op in report.ops)


def test_two_optimizers_and_one_scaler_in_the_order_of_a_gan():
    generator, critic = nn.Linear(4, 8), nn.Linear(8, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")

    def step() -> None:
        noise = torch.randn(16, 4)
        for_critic.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = critic(generator(noise).detach()).mean()
        scaler.scale(loss).backward()
        scaler.step(for_critic)
        for_generator.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = -critic(generator(noise)).mean()
        scaler.scale(loss).backward()
        scaler.step(for_generator)
        scaler.update()

    models = {"generator": generator, "critic": critic}
    with precisionlint.audit(models, [for_generator, for_critic], scaler) as audit:
        step()
    report = audit.report
    assert faults(report) == []
    assert report.steps == 2
    assert set(products(report, "backward")) == {"generator", "critic"}


@pytest.mark.filterwarnings("ignore::UserWarning")  # the schedule's own: nothing steps here
def test_a_schedule_that_holds_others_advances_once_and_one_with_a_step_of_its_own_is_seen():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    inner = [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    several = torch.optim.lr_scheduler.SequentialLR(optimizer, inner, milestones=[1])
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with precisionlint.audit(None, optimizer) as audit:
        several.step()
        plateau.step(1.0)
    assert [station.what for station in audit.report.order] == ["'several' advances", "'plateau' advances"]


def test_memory_grows_with_kinds_of_ops_and_not_with_their_number():
    model = net()
    x = batch()[0]

    def kinds(rounds: int) -> tuple[int, int]:
        def step() -> None:
            for _ in range(rounds):
                model(x).sum().backward()

        with precisionlint.audit(model) as audit:
            step()
        return len(audit.report.ops), sum(op.count for op in audit.report.ops)

    kinds(1)  # gradients stand from here on
    few, many = kinds(3), kinds(60)
    assert many[0] == few[0]
    assert many[1] > 15 * few[1]


def test_what_is_known_of_tensors_is_let_go_when_they_die():
    from precisionlint.trace.storages import BATCH, Storages

    known: Storages[int] = Storages()
    alive = [torch.ones(1) for _ in range(10)]
    for number in range(3 * BATCH):
        known.put(torch.ones(1), number)
    for number, each in enumerate(alive):
        known.put(each, number)
    assert len(known) <= BATCH + len(alive)
    assert [known.get(each) for each in alive] == list(range(10))
    assert known.get(torch.ones(1)) is None


def test_an_eval_step_under_inference_mode_is_recorded():
    model = net()

    def step() -> None:
        with torch.inference_mode():
            model(batch()[0])

    assert {op.phase for op in audited(step, model).ops if op.module} == {"forward"}


@pytest.mark.skipif(sys.platform == "win32", reason="torch.compile wants a compiler there")
def test_a_compiled_module_is_named_as_seen_in_part():
    model = net()
    compiled = torch.compile(model, backend="eager")
    report = audited(lambda: compiled(batch()[0]).sum().backward(), model)
    assert any("compiled" in note for note in report.notes)
    assert not any("compiled" in note for note in audited(lambda: model(batch()[0]), model).notes)
