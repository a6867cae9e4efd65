"""Sums on rows, angles out of products and losses by name, half wherever a caller comes with half: possible, and nothing of sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_possible_half import MARK, hits

BROKEN = {
    "terms on the rows of a tensor like another": (
        "half-scatter",
        """
class Experts(nn.Module):
    def combine(self, hidden, rows, parts):
        total = torch.zeros_like(hidden)
        for chosen, part in zip(rows, parts):
            total.index_add_(0, chosen, part.to(hidden.dtype))  # <-
        return total


def received(messages, target, count):
    total = messages.new_zeros(count, messages.shape[-1])
    return total.scatter_add(0, target[:, None].expand_as(messages), messages)  # <-
""",
    ),
    "terms on rows of a chosen dtype": (
        "half-scatter",
        """
def received(messages, target, count):
    total = torch.zeros(count, messages.shape[-1], dtype=messages.dtype)
    return total.scatter_reduce_(0, target, messages, reduce="sum")  # <-


def counted(weights, words, size):
    seen = torch.zeros(size, dtype=torch.bfloat16)
    seen.index_add_(0, words, weights.bfloat16())  # <-
    return seen
""",
    ),
    "rows that are handed in and emptied": (
        "half-scatter",
        """
def combine(tokens, weights, mapping, out):
    out.zero_()
    out.scatter_add_(0, mapping, (tokens * weights).to(out.dtype))  # <-
    return out
""",
    ),
    "angles out of a product with a table": (
        "half-rope",
        """
import math


class Fourier(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.register_buffer("directions", torch.randn(inputs, width))

    def forward(self, points):
        turned = 2 * math.pi * (points @ self.directions)  # <-
        return torch.cat([turned.sin(), turned.cos()], dim=-1)


def waves(points, table):
    return torch.einsum("nd,dk->nk", points, table).mul(6.2831).cos()  # <-
""",
    ),
    "losses that are known by their names": (
        "loss-on-half-logits",
        """
import shards


class Head(nn.Module):
    def __init__(self, width, classes, loss):
        super().__init__()
        self.scores = nn.Linear(width, classes)
        self.loss_cls = loss
        self.focal_loss = loss

    def loss(self, x, labels):
        logits = self.scores(x)
        first = self.loss_cls(logits, labels)  # <-
        return first + self.focal_loss(logits, labels)  # <-


def parallel(output, labels):
    return shards.vocab_parallel_cross_entropy(output.contiguous(), labels)  # <-
""",
    ),
    "a metric of predictions": (
        "half-running-sum",
        """
class RelativeError(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.tensor(0.0))

    def update(self, preds, target):
        error = (preds - target).abs() / target.abs().clamp(min=1e-3)
        self.total += error.sum()  # <-


class Moments(nn.Module):
    def update(self, predictions, labels):
        self.squares += -torch.sum((predictions - labels) ** 2)  # <-
""",
    ),
    "a Hessian that is averaged": (
        "half-running-sum",
        """
def observe(inputs, hessian, seen):
    rows = inputs.flatten(0, -2).t()
    hessian *= seen / (seen + rows.shape[1])
    scaled = rows * (2 / (seen + rows.shape[1])) ** 0.5
    hessian.add_((scaled @ scaled.t()).to(hessian.device))  # <-
    return hessian


def covariance(state, x, decay):
    state.mul_(decay)
    state += x.mT @ x  # <-
    return state
""",
    ),
    "losses of an evaluation": (
        "half-running-sum",
        """
@torch.no_grad()
def evaluate(model, batches):
    total = 0
    for batch in batches:
        loss = model(batch).mean()
        total += loss  # <-
    return total / len(batches)
""",
    ),
    "positions in the dtype of the frequencies": (
        "half-rope",
        """
class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        steps = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
        self.register_buffer("inv_freq", steps, persistent=False)  # <-

    def tables(self, length, device):
        places = torch.arange(length, device=device, dtype=self.inv_freq.dtype)
        angles = torch.outer(places, self.inv_freq.to(device))  # <-
        return angles.cos(), angles.sin()
""",
    ),
    "log-probabilities of scores and outputs": (
        "softmax-in-half",
        """
def distilled(cls_score, outputs_kd, temperature):
    mine = F.log_softmax(cls_score / temperature, dim=-1)  # <-
    theirs = outputs_kd.log_softmax(dim=-1)  # <-
    return (theirs.exp() * (theirs - mine)).sum(-1)
""",
    ),
    "log-probabilities by others": (
        "softmax-in-half",
        """
from ratios import batch_logps, log_probs_from_logits


def policy(model, tokens):
    logits = model(tokens).logits[:, :-1]
    return log_probs_from_logits(logits, tokens[:, 1:])  # <-


class Reference(nn.Module):
    def __init__(self, width, words):
        super().__init__()
        self.head = nn.Linear(width, words)

    def forward(self, hidden, tokens):
        return batch_logps(self.head(hidden), tokens)  # <-
""",
    ),
}

SOUND = {
    "metrics in fp32, and of counts": """
class RelativeError(nn.Module):
    def update(self, preds, target):
        error = (preds.float() - target).abs()
        self.total += error.sum()
        self.correct += (preds.argmax(-1) == target).sum()
        self.wide += (preds - target).sum(dtype=torch.float32)


class Counter(nn.Module):
    def update(self, lengths):
        self.total += lengths.sum()
""",
    "a Hessian of fp32, and products that are no squares": """
def observe(inputs, hessian, seen):
    rows = inputs.flatten(0, -2).t().float()
    hessian *= seen / (seen + rows.shape[1])
    hessian.add_(rows @ rows.t())
    return hessian


def mixed(state, x, y, decay):
    state.mul_(decay)
    state += x.mT @ y
    return state
""",
    "an average of what a codebook is given": """
class Codebook(nn.Module):
    def follow(self, found, decay):
        self.mean = self.mean_of(found)
        self.mean.data.mul_(decay).add_(found.mean(0).detach(), alpha=1 - decay)
""",
    "losses in fp32, and what is added once": """
@torch.no_grad()
def evaluate(model, batches):
    total = 0
    for batch in batches:
        loss = model(batch).mean()
        total += loss.float()
    return total / len(batches)


@torch.no_grad()
def seconds(spans, rate, model):
    begun = 0
    for span in spans:
        model(span).mean()
        begun += len(span) * 0.01 * rate
    return begun


@torch.no_grad()
def residual(hidden, layer):
    hidden += layer(hidden)
    return hidden
""",
    "positions and frequencies in fp32": """
class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def tables(self, length, device):
        steps = 1.0 / 10000 ** (torch.arange(0, self.width, 2, device=device).float() / self.width)
        places = torch.arange(length, device=device, dtype=steps.dtype)
        angles = torch.outer(places, steps)
        return angles.cos(), angles.sin()
""",
    "log-probabilities of fp32 scores, and of what is none": """
def distilled(cls_score, outputs_kd, weights, temperature):
    mine = F.log_softmax(cls_score.float() / temperature, dim=-1)
    theirs = outputs_kd.log_softmax(dim=-1, dtype=torch.float32)
    return theirs - mine - weights.log_softmax(-1)
""",
    "log-probabilities of fp32 by others": """
from ratios import log_probs_from_logits


def policy(model, tokens):
    logits = model(tokens).logits[:, :-1].float()
    return log_probs_from_logits(logits, tokens[:, 1:])


def kept(cache, tokens):
    return log_probs_from_logits(cache, tokens)
""",
    "terms in fp32, of integers, and the largest of them": """
class Experts(nn.Module):
    def combine(self, hidden, rows, parts):
        total = torch.zeros_like(hidden, dtype=torch.float32)
        for chosen, part in zip(rows, parts):
            total.index_add_(0, chosen, part.float())
        return total.to(hidden.dtype)


def counted(words, size):
    return torch.zeros(size, dtype=torch.long).scatter_add_(0, words, torch.ones_like(words))


def largest(messages, target, count):
    total = messages.new_zeros(count)
    return total.scatter_reduce_(0, target, messages, reduce="amax")


def marked(labels, logits):
    return torch.zeros_like(logits).scatter_(1, labels[:, None], 1.0)
""",
    "angles in fp32": """
class Fourier(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.register_buffer("directions", torch.randn(inputs, width))

    @torch.autocast("cuda", enabled=False)
    def forward(self, points):
        turned = points.float() @ self.directions.float()
        return torch.cat([turned.sin(), turned.cos()], dim=-1)


def waves(points, steps):
    return (points[:, None] * steps[None, :]).cos()


class Siren(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.sin(30 * self.inner(x))
""",
    "losses of fp32, and what is no loss": """
import shards


class Head(nn.Module):
    def __init__(self, width, classes, loss):
        super().__init__()
        self.scores = nn.Linear(width, classes)
        self.loss_cls = loss

    def loss(self, x, labels):
        logits = self.scores(x).float()
        return self.loss_cls(logits, labels)


def parallel(output, labels):
    return shards.vocab_parallel_cross_entropy(output.float(), labels)


def noted(writer, logits, step):
    writer.log_loss(logits, step)
    writer.add_loss(logits, step)
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = hits(tmp_path, body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert sorted({line for line, each in found if each == rule}) == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert hits(tmp_path, SOUND[name])[1] == []
