"""Losses and guards that are half wherever a library's callers come with half: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK
from test_possible_half import hits as found_in

HALVES = "HALVES = (torch.float16, torch.bfloat16)\n\n\n"
"""What says that the library handles dtypes."""

BROKEN = {
    "experts that are chosen by what was rounded": (
        "softmax-in-half",
        """
class Experts(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.router = nn.Linear(width, experts)

    def forward(self, x):
        scores = torch.softmax(self.router(x).float(), dim=-1).to(x.dtype)  # <-
        weights, chosen = torch.topk(scores, 2, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), chosen


def best(logits):
    return logits.float().softmax(-1).type_as(logits).argmax(-1)  # <-
""",
    ),
    "a loss of another library": (
        "loss-on-half-logits",
        """
import transducer


class Recogniser(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.joiner = nn.Linear(width, words)

    def forward(self, heard, spoken, lengths):
        lattice = self.joiner(heard.tanh())
        return transducer.pruned_loss(lattice=lattice, spoken=spoken, lengths=lengths)  # <-
""",
    ),
    "a squared error by hand": (
        "loss-on-half-logits",
        """
class Denoiser(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, noisy, noise):
        predicted = self.out(noisy)
        return ((predicted - noise) ** 2).mean()  # <-
""",
    ),
    "an absolute error by hand": (
        "loss-on-half-logits",
        """
def error(pred, target):
    difference = pred - target
    return difference.abs().mean(dim=-1)  # <-
""",
    ),
    "a preference by hand": (
        "loss-on-half-logits",
        """
def preference(chosen_rewards, rejected_rewards, margin):
    gap = chosen_rewards - rejected_rewards
    return -F.logsigmoid(gap / margin).mean()  # <-
""",
    ),
    "a preference of the halves of a batch": (
        "loss-on-half-logits",
        """
def preference(model, batch):
    scores = model(batch).squeeze(-1)
    better, worse = scores.chunk(2)
    return -F.logsigmoid(better - worse).mean()  # <-
""",
    ),
    "guards of means and of logs": (
        "epsilon-underflow",
        """
def masked_mean(losses, weights):
    return (losses * weights).sum() / (weights.sum() + 1e-8)  # <-


def entropy(p, eps=1e-12):
    return -(p * p.clamp(min=eps).log()).sum(-1)  # <-


def length(edges):
    return torch.sqrt(edges.square().sum(-1) + 1e-10)  # <-
""",
    ),
    "a guard of what one path alone tells": (
        "epsilon-underflow",
        """
def scan(gates, carried, join=None):
    if carried is not None:
        gates = join(carried, gates)[0]
    return gates.clamp(min=1e-20).log().cumsum(1)  # <-
""",
    ),
}

SOUND = {
    "experts that are chosen before the cast": """
class Experts(nn.Module):
    def forward(self, x, routed):
        scores = torch.softmax(routed.float(), dim=-1)
        weights, chosen = torch.topk(scores, 2, dim=-1)
        return weights.to(x.dtype), chosen
""",
    "losses in fp32": """
import transducer


class Recogniser(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.joiner = nn.Linear(width, words)

    def forward(self, heard, spoken, lengths):
        lattice = self.joiner(heard.tanh())
        return transducer.pruned_loss(lattice=lattice.float(), spoken=spoken, lengths=lengths)


def error(pred, target):
    return (pred.float() - target.float()).square().mean()


def preference(chosen_rewards, rejected_rewards):
    return -F.logsigmoid(chosen_rewards.float() - rejected_rewards.float()).mean()


def noted(pred, target):
    with torch.autocast("cuda", enabled=False):
        return (pred - target).abs().mean()
""",
    "deviations and differences that are no errors": """
def spread(logits):
    return (logits - logits.mean(-1, keepdim=True)).abs().mean(-1)


def smoothness(image):
    return (image[..., 1:] - image[..., :-1]).abs().mean()


@torch.no_grad()
def evaluate(pred, target):
    return (pred - target).abs().mean()
""",
    "guards that fp16 holds, and guards of fp32": """
def masked_mean(losses, weights):
    return (losses * weights).sum() / (weights.sum() + 1e-4)


def entropy(p, eps=1e-12):
    p = p.float()
    return -(p * p.clamp(min=eps).log()).sum(-1)


def rate(seen, asked):
    return len(seen) / (len(asked) + 1e-12)


def scan(gates, carried, join=None):
    gates = gates.float()
    if carried is not None:
        gates = join(carried, gates)[0].float()
    return gates.clamp(min=1e-20).log().cumsum(1)
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = found_in(tmp_path, HALVES + body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in found if each == rule] == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert found_in(tmp_path, HALVES + SOUND[name])[1] == []
