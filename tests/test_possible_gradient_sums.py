"""Sums of gradients that a program keeps itself: possible in the dtype that their parameters have, and nothing of sums that say theirs."""

from pathlib import Path

import pytest

from precisionlint import check

PIECEWISE = """
import torch

from house.pieces import GradAccumulator, GradientAccumulator


class Pieces(torch.autograd.Function):
    @staticmethod
    def backward(ctx, above):
        (hidden,) = ctx.saved_tensors
        {made}
        for piece in hidden.chunk(ctx.pieces):
            sums.hook(piece)
        return (None, hidden.grad)
"""
KEPT = """
import torch


class Clipper:
    def __init__(self, weights):
        self.weights = list(weights)
        self.grad_sums = [{zeros} for weight in self.weights]
        self.steps = 0

    def after_backward(self):
        for at, weight in enumerate(self.weights):
            {added}
            weight.grad = None
"""


def told(folder: Path, text: str, name: str = "fit.py") -> list[tuple[int, str]]:
    (folder / name).write_text(text, encoding="utf-8")
    path = (folder / name).as_posix()
    report = check([path], select=["half-gradient-accumulation"], min_confidence="possible")
    assert not report.errors
    return [(each.place.line, each.confidence) for each in report.findings]


@pytest.mark.parametrize(
    "made",
    [
        "sums = GradientAccumulator(ctx.weights, ctx.pieces, dtype=hidden.dtype)",
        "sums = GradAccumulator(ctx.weights, dtype=ctx.weights[0].dtype)",
    ],
)
def test_an_accumulator_that_takes_the_dtype_of_what_it_is_near(made: str, tmp_path: Path) -> None:
    assert told(tmp_path, PIECEWISE.format(made=made)) == [(11, "possible")]


@pytest.mark.parametrize(
    "made",
    [
        "sums = GradientAccumulator(ctx.weights, ctx.pieces, dtype=torch.float32)",
        "sums = GradientAccumulator(ctx.weights, ctx.pieces)",
        "sums = LossAccumulator(ctx.weights, dtype=hidden.dtype)",
        "sums = GradientAccumulationPlugin(num_steps=4)",
    ],
)
def test_an_accumulator_of_its_own_dtype(made: str, tmp_path: Path) -> None:
    assert told(tmp_path, PIECEWISE.format(made=made)) == []


@pytest.mark.parametrize(
    "added",
    [
        "self.grad_sums[at] += weight.grad",
        "self.grad_sums[at].add_(weight.grad.detach())",
        "weight.summed_grad += weight.grad / 4",
        "weight.acc_grad.add_(weight.grad.data)",
        "self.grad_sums[at] = self.grad_sums[at] + weight.grad",
        "self.grad_sums[at] = self.grad_sums.get(at, 0) + weight.grad.detach()",
    ],
)
def test_a_sum_of_gradients_in_their_own_dtype(added: str, tmp_path: Path) -> None:
    assert told(tmp_path, KEPT.format(zeros="torch.zeros_like(weight)", added=added)) == [(13, "possible")]


def test_a_test_may_sum_gradients_in_any_dtype(tmp_path: Path) -> None:
    text = KEPT.format(zeros="torch.zeros_like(weight)", added="self.grad_sums[at] += weight.grad")
    assert told(tmp_path, text, "test_fit.py") == []


@pytest.mark.parametrize(
    ("zeros", "added"),
    [
        ("torch.zeros_like(weight, dtype=torch.float32)", "self.grad_sums[at] += weight.grad"),
        ("torch.zeros_like(weight)", "self.grad_sums[at].add_(weight.grad.float())"),
        ("torch.zeros_like(weight)", "self.grad_sums[at] = weight.grad"),
        ("torch.zeros_like(weight)", "self.grad_sums[at] = self.grad_sums[0] + weight.grad"),
        ("torch.zeros_like(weight)", "self.grad_norm_sum += weight.grad"),
        ("torch.zeros_like(weight)", "self.grad_sums[at] += weight.grad * weight.grad"),
        ("torch.zeros_like(weight)", "weight.add_(weight.grad)"),
    ],
)
def test_sums_that_say_their_dtype_and_what_is_no_sum(zeros: str, added: str, tmp_path: Path) -> None:
    assert told(tmp_path, KEPT.format(zeros=zeros, added=added)) == []


ZIPPED = """
import torch


def train(model, loader, optimizer, steps):
    kept = [torch.zeros_like(p{dtype}) for p in model.parameters()]
    for at, batch in enumerate(loader, 1):
        model(batch).mean().backward()
        for one, p in zip(kept, model.parameters()):
            {added}
            p.grad = None
        if at % steps == 0:
            for one, p in zip(kept, model.parameters()):
                p.grad = one / steps
            optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "added", "lines"),
    [
        ("", "one.add_(p.grad)", [10]),
        ("", "one += p.grad.detach()", [10]),
        (", dtype=torch.float32", "one.add_(p.grad)", []),
        ("", "one.add_(p.detach())", []),
        ("", "one.mul_(0.9); one.add_(p.grad)", []),
    ],
)
def test_sums_like_the_parameters_that_a_loop_adds_to(dtype: str, added: str, lines: list[int], tmp_path: Path) -> None:
    text = ZIPPED.format(dtype=dtype, added=added)
    assert told(tmp_path, text) == [(line, "possible") for line in lines]
