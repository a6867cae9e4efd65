"""Shapes of real runs that are right because of what runs when: hooks, few rounds, settings, kernels; each beside what makes it wrong."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.findings import Finding


def found(folder: Path, text: str) -> list[Finding]:
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    (folder / "case.py").write_text(textwrap.dedent(text), encoding="utf-8")
    report = check([str(folder / "case.py")], assume={})
    assert not report.errors
    return [each for each in report.findings if each.severity != "info"]


STEPPED_IN_HOOKS = """
import torch


def train(model, loader, config):
    optimizers = config.build(model)
    scaler = torch.amp.GradScaler("cuda")

    def step(parameter):
        scaler.step(optimizers[{which}])
        optimizers[{which}].zero_grad()

    {hook}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.update()
"""


@pytest.mark.parametrize(
    ("which", "hook", "rules"),
    [
        ("parameter", "config.each_gradient(step)", []),
        ("config.first", "config.each_gradient(step)", ["missing-scaler-update"]),
        ("parameter", "config.prepare()", ["scaler-updated-per-optimizer"]),
    ],
)
def test_a_hook_steps_another_optimizer_whenever_it_is_called(tmp_path: Path, which: str, hook: str, rules: list[str]):
    assert [each.rule for each in found(tmp_path, STEPPED_IN_HOOKS.format(which=which, hook=hook))] == rules


SETTINGS = "abcdef"
MANY_WAYS = """
import torch
from parts import build, data, config

model = build(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
{settings}
for x in data:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
{update}
    optimizer.zero_grad()
    break
"""


def many_ways(then: str) -> str:
    """A program of 64 paths, more than are followed, one of which does something; which are left out nobody should rely on."""
    settings = [f"amp_{name} = 0\nif config.{name}:\n    amp_{name} = 1" for name in SETTINGS]
    tests = " and ".join(f"{'' if name == 'd' else 'not '}amp_{name}" for name in SETTINGS)
    return MANY_WAYS.format(settings="\n".join(settings), update=f"    if {tests}:\n        {then}")


@pytest.mark.parametrize(("then", "rules"), [("scaler.update()", []), ("print(loss)", ["missing-scaler-update"])])
def test_what_a_path_does_that_was_left_out_is_not_missing(tmp_path: Path, then: str, rules: list[str]):
    assert [each.rule for each in found(tmp_path, many_ways(then))] == rules


DTYPES = """
import torch


def angles(embedding, args):
    dtype = {dtype}
    rows = embedding.to(dtype)
    return rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-12)
"""
TABLE = '{"fp32": torch.float32, "fp16": torch.float16}[args.dtype]'


@pytest.mark.parametrize(("dtype", "confidence"), [(TABLE, "likely"), ("torch.float16", "certain")])
def test_one_dtype_of_those_that_a_setting_chooses_is_likely(tmp_path: Path, dtype: str, confidence: str):
    (each,) = found(tmp_path, DTYPES.format(dtype=dtype))
    assert (each.rule, each.confidence) == ("epsilon-underflow", confidence)


ITERATED = """
import torch


def orthogonal(gradient, coefficients):
    x = gradient.to(torch.bfloat16).contiguous()
    left, right, out = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    for a, b, c in coefficients:
        torch.addmm(x, x, x.mT, beta=0.0, alpha=1.0, out=left)
        torch.addmm(left, left, left, beta=b, alpha=c, out=right)
        torch.addmm(x, right, x, beta=a, alpha=1.0, out=out)
        x, out = out, x
    return x
"""


def test_an_iteration_that_scales_what_it_has_is_no_sum(tmp_path: Path):
    assert found(tmp_path, ITERATED) == []


IN_TURN = """
import torch


class Sharded:
    def __init__(self, groups, optimizer):
        self.groups, self.optimizer, self.loss_scale = groups, optimizer, 65536.0

    def backward(self, loss):
        (loss * self.loss_scale).backward()

    def unscale(self, index):
        self.groups[{which}].grad.mul_(1.0 / self.loss_scale)

    def step(self):
        for index in range(len(self.groups)):
            self.unscale(index)
            self.optimizer.step()
"""


@pytest.mark.parametrize(("which", "rules"), [("index", []), ("0", ["step-bypasses-scaler"])])
def test_gradients_that_are_divided_one_by_one_are_no_part(tmp_path: Path, which: str, rules: list[str]):
    assert [each.rule for each in found(tmp_path, IN_TURN.format(which=which))] == rules


ROUNDS = """
import torch


def sample(model, x, {steps}):
    for t in torch.arange({steps}, dtype=torch.{dtype}, device=x.device):
        x = model(x, t)
    return x
"""


@pytest.mark.parametrize(
    ("steps", "dtype", "rules"),
    [
        ("num_steps", "float16", []),
        ("num_steps", "bfloat16", ["half-arange"]),
        ("length", "float16", ["half-arange"]),
    ],
)
def test_fp16_counts_the_rounds_of_a_sampler(tmp_path: Path, steps: str, dtype: str, rules: list[str]):
    assert [each.rule for each in found(tmp_path, ROUNDS.format(steps=steps, dtype=dtype))] == rules


KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n) * 2.0, mask=at < n)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, {second}):
        out = torch.empty_like(x)
        double_kernel[(1,)]({given}, out, x.numel(), BLOCK=1024)
        ctx.save_for_backward(x, {second})
        return out.sum()

    @staticmethod
    def backward(ctx, grad):
        x, {second} = ctx.saved_tensors
        return grad * 2.0 * torch.ones_like(x), None


def train(model, loader, {second}):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = Doubled.apply(model(x), {second})
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("second", "given", "rules"), [("targets", "x", []), ("gate", "x, gate", ["function-without-custom-fwd"])]
)
def test_kernels_that_take_one_tensor_of_numbers_meet_no_two_dtypes(
    tmp_path: Path, second: str, given: str, rules: list[str]
):
    assert [each.rule for each in found(tmp_path, KERNEL.format(second=second, given=given))] == rules


HANDED_ON = """
import torch


def scores(mask, others):
    options = {made}
    {then}
    x = torch.zeros(3, 4, **options)
    return x.masked_fill(mask, -1e9)
"""


@pytest.mark.parametrize(
    ("made", "then", "told"),
    [
        ("dict(dtype=torch.float16)", "rows = 3", True),
        ('{"dtype": torch.float16}', "rows = 3", True),
        ('{"dtype": torch.float16}', 'options["dtype"] = torch.float32', False),
        ("dict(dtype=torch.float16)", "options.update(dtype=torch.float32)", False),
        ("dict(dtype=torch.float16)", "others.change(options)", False),
        ('{"dtype": torch.float16, **others}', "rows = 3", False),
        ('{**others, "dtype": torch.float16}', "rows = 3", True),
    ],
)
def test_options_are_handed_on_as_they_were_made_where_nothing_changes_them(
    tmp_path: Path, made: str, then: str, told: bool
):
    rules = [each.rule for each in found(tmp_path, HANDED_ON.format(made=made, then=then))]
    assert rules == (["mask-constant-overflow"] if told else [])


SPAWNED = """
import torch
import torch.multiprocessing as mp


def worker(rank, loader, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.update()
        scaler.step(optimizer)
        optimizer.zero_grad()


if __name__ == "__main__":
    mp.spawn(worker, args=([], None), nprocs=2)
"""


def test_a_worker_that_is_spawned_steps_where_it_stands(tmp_path: Path):
    assert "scaler-updated-per-optimizer" in {each.rule for each in found(tmp_path, SPAWNED)}


TWO_MODELS = """
import torch


def train(first, second, loader):
    a = torch.optim.AdamW(first.parameters(), lr=1e-3)
    b = torch.optim.AdamW(second.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    groups = {groups}
    for x in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = (first(x) + second(x)).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(a)
        torch.nn.utils.clip_grad_norm_({clipped}, 1.0)
        scaler.step(a)
        scaler.step(b)
        scaler.update()
        a.zero_grad()
        b.zero_grad()
"""


@pytest.mark.parametrize(
    ("groups", "clipped", "rules"),
    [
        ("[first.parameters(), second.parameters()]", "groups[0]", []),
        ("[*first.parameters(), *second.parameters()]", "groups", ["clip-before-unscale"]),
    ],
)
def test_lists_of_parameters_are_of_one_model_each(tmp_path: Path, groups: str, clipped: str, rules: list[str]):
    assert [each.rule for each in found(tmp_path, TWO_MODELS.format(groups=groups, clipped=clipped))] == rules
