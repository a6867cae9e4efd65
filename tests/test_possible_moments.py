"""Averages of weights and of gradients that a program writes itself, in the dtype of what they average: possible, and nothing of their
sound relatives."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

AVERAGE = """
import torch


class Smoothed:
    def __init__(self, net, slow):
        self.slow = slow
        self.ema = [weight.detach().clone() for weight in net.parameters()]

    def to(self, device=None, dtype=None):
        self.ema = [weight.to(device=device, dtype=dtype) for weight in self.ema]

    @torch.no_grad()
    def update(self, net):
        slow, rest = self.slow, 1 - self.slow
        for kept, param in zip(self.ema, net.parameters()):
            {blend}
"""


def told(folder: Path, rule: str, text: str) -> list[int]:
    (folder / "case.py").write_text(textwrap.dedent(text), encoding="utf-8")
    found = check([str(folder / "case.py")], select=[rule], min_confidence="possible").findings
    assert {each.confidence for each in found} <= {"possible"}
    return [each.place.line for each in found]


@pytest.mark.parametrize(
    "blend",
    [
        "kept.add_(rest * (param - kept))",
        "kept.add_(param - kept, alpha=rest)",
        "kept.mul_(slow); kept.add_(param, alpha=1 - slow)",
        "kept *= slow; kept += (1 - slow) * param.detach()",
        "torch._foreach_mul_([kept], slow); torch._foreach_lerp_([kept], [param], 1 - slow)",
        "torch._foreach_mul_(kept, slow); torch._foreach_add_(kept, param, alpha=1 - slow)",
        "kept.copy_(torch.lerp(kept, param, 1 - slow))",
    ],
)
def test_an_average_of_weights_however_it_is_spelled(tmp_path: Path, blend: str) -> None:
    assert told(tmp_path, "half-ema", AVERAGE.format(blend=blend)) == [17]


LISTED = """
import torch


class Trainer:
    def average(self, net, slow):
        for i, param in enumerate(net.parameters()):
            kept = self.average_of[i]
            self.average_of[i] = {blend}
"""


@pytest.mark.parametrize(
    ("blend", "lines"),
    [
        ("(1 - slow) * kept + param.detach().half() * slow if kept.dtype == torch.float16 else kept", [9]),
        ("slow * kept + (1 - slow) * param.to(torch.bfloat16) if param.dtype != kept.dtype else kept", [9]),
        ("(1 - slow) * kept + param.detach().float() * slow", []),
        ("kept + param.detach().half()", []),
    ],
)
def test_an_average_of_what_is_cast_to_half(tmp_path: Path, blend: str, lines: list[int]) -> None:
    assert told(tmp_path, "half-ema", LISTED.format(blend=blend)) == lines


STOCHASTIC = """
import torch
from rounding import addcdiv_stochastic_


@torch.no_grad()
def step(self, p, group):
    state, grad = self.state[p], p.grad
    if not state:
        state["exp_avg"] = torch.zeros_like(p)
        state["exp_avg_sq"] = torch.zeros_like(p)
    exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
    exp_avg.lerp_(grad, 1 - group["beta1"])
    {second}
    if p.dtype == torch.bfloat16 and self.stochastic_rounding:
        addcdiv_stochastic_(p, exp_avg, exp_avg_sq.sqrt(), value=-group["lr"])
    else:
        p.addcdiv_(exp_avg, exp_avg_sq.sqrt(), value=-group["lr"])
"""


@pytest.mark.parametrize(
    ("second", "lines"),
    [
        ('exp_avg_sq.mul_(group["beta2"]).addcmul_(grad, grad, value=1 - group["beta2"])', [11, 14]),
        ("copy_stochastic_(exp_avg_sq, exp_avg_sq.float().lerp(grad.float().square(), 0.001))", []),
    ],
)
def test_stochastic_rounding_of_the_weight_alone(tmp_path: Path, second: str, lines: list[int]) -> None:
    assert told(tmp_path, "half-optimizer-state", STOCHASTIC.format(second=second)) == lines


@pytest.mark.parametrize(
    "blend",
    [
        "kept.add_(rest * (param.float() - kept))",
        "kept.add_(param)",
        "kept.mul_(slow); kept.add_(param)",
        "kept *= 0.5; kept += 0.5 * param",
        "kept.loss *= 1 - slow; kept.loss += slow * param",
    ],
)
def test_what_is_wide_or_no_slow_average_is_not_told(tmp_path: Path, blend: str) -> None:
    assert told(tmp_path, "half-ema", AVERAGE.format(blend=blend)) == []


CHOSEN = """
import torch


def equip(options, net, net_ema):
    dtype = {dtype}
    net.cuda()
    if options.ema_start_iters:
        net_ema.load_state_dict(net.state_dict())
        net_ema.to(dtype).eval().requires_grad_(False)
"""


@pytest.mark.parametrize(
    ("dtype", "lines"),
    [
        ("getattr(torch, options.dtype) if options.dtype else torch.float32", [10]),
        ("torch.bfloat16", [10]),
        ("torch.float32", []),
        ("next(net.parameters()).dtype", []),
    ],
)
def test_an_average_in_the_dtype_that_a_setting_chooses(tmp_path: Path, dtype: str, lines: list[int]) -> None:
    assert told(tmp_path, "half-ema", CHOSEN.format(dtype=dtype)) == lines


SIGNED = """
import torch
from torch.optim.optimizer import Optimizer


class Signed(Optimizer):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"]:
                state = self.state[p]
                grad = p.grad{wide}
                if not state:
                    state["{name}"] = {made}
                    {more}
                mean = state["{name}"]
                p.add_(torch.sign(mean.lerp(grad, 0.1)), alpha=-group["lr"])
                {averaged}
"""
LIKE, NONE = "torch.zeros_like(p)", "pass"
AVERAGED = "mean.mul_(beta).add_(grad, alpha=1 - beta)"


@pytest.mark.parametrize(
    ("name", "made", "averaged", "lines"),
    [
        ("exp_avg", LIKE, AVERAGED, [15, 19]),
        ("exp_avg", "torch.zeros_like(p, dtype=torch.float32)", "mean.lerp_(grad, 1 - beta)", []),
        ("momentum_buffer", "grad.new_zeros(p.shape)", "mean.mul_(beta).add_(grad)", [15]),
    ],
)
def test_what_an_optimizer_without_a_second_moment_averages_gradients_in(
    tmp_path: Path, name: str, made: str, averaged: str, lines: list[int]
) -> None:
    text = SIGNED.format(name=name, made=made, averaged=averaged, wide="", more=NONE)
    assert told(tmp_path, "half-optimizer-state", text) == lines


@pytest.mark.parametrize(
    ("name", "made", "averaged", "wide", "more"),
    [
        ("exp_avg", "torch.zeros_like(p, dtype=torch.float32)", AVERAGED, ".float()", NONE),
        ("exp_avg", LIKE, AVERAGED, "", "state['master_copy'] = p.detach().clone().float()"),
        ("sign_mask", LIKE, "mean.copy_(grad)", "", NONE),
    ],
)
def test_what_is_kept_in_fp32_or_no_average_is_not_told(
    tmp_path: Path, name: str, made: str, averaged: str, wide: str, more: str
) -> None:
    text = SIGNED.format(name=name, made=made, averaged=averaged, wide=wide, more=more)
    assert told(tmp_path, "half-optimizer-state", text) == []


@pytest.mark.parametrize(("dtype", "lines"), [("", [16]), (", dtype=torch.float32", [])])
def test_of_an_optimizer_with_a_second_moment_only_that_is_told(tmp_path: Path, dtype: str, lines: list[int]) -> None:
    more = f'state["exp_avg_sq"] = torch.zeros_like(p{dtype})'
    text = SIGNED.format(name="exp_avg", made=LIKE, averaged=AVERAGED, wide="", more=more)
    assert told(tmp_path, "half-optimizer-state", text) == lines


def test_a_table_that_is_no_state_of_an_optimizer_holds_no_moment(tmp_path: Path) -> None:
    text = SIGNED.format(name="momentum", made=LIKE, averaged="mean.mul_(beta).add_(grad)", wide="", more=NONE)
    assert told(tmp_path, "half-optimizer-state", text) == [15]
    assert told(tmp_path, "half-optimizer-state", text.replace('state["momentum"] =', 'seen["momentum"] =')) == []


@pytest.mark.parametrize(
    ("added", "moment"),
    [
        ("p", False),
        ("p.half()", False),
        ("param.data.detach()", False),
        ("p.grad.square()", True),
        ("squared", True),
    ],
)
def test_an_average_of_weights_is_no_moment_whatever_it_is_called(added: str, moment: bool, tmp_path: Path):
    (tmp_path / "average.py").write_text(f"""import torch


def update_average(model, averaged, squared, beta=0.999):
    for p, param, v in zip(model.parameters(), model.parameters(), averaged.parameters()):
        v.mul_(beta).add_({added}, alpha=1 - beta)
""")
    rules = {each.rule for each in check([str(tmp_path)], min_confidence="possible", isolated=True).findings}
    assert ("half-optimizer-state" in rules) == moment
    assert moment or "half-ema" in rules
