"""Scores and norms that are half wherever a library's callers come with half: possible, and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check
from tests.test_possible_half import HEAD, MARK

BROKEN = {
    "scores that are set where they are hidden": (
        "mask-constant-overflow",
        """
def attend(query, key, value, hidden):
    scores = query @ key.transpose(-1, -2)
    scores[hidden] = -1e9  # <-
    return scores.softmax(-1) @ value
""",
    ),
    "log probabilities of words that may not come": (
        "mask-constant-overflow",
        """
def next_words(decoder, states, banned, last):
    lprobs = F.log_softmax(decoder(states)[0][:, -1], dim=-1)
    lprobs[:, banned] = -1e8  # <-
    for row in range(4):
        lprobs[row, last[row]] = -100000  # <-
    return lprobs.topk(2, dim=-1)
""",
    ),
    "masks that were cast, times a large number": (
        "mask-constant-overflow",
        """
def bias(attention_mask, dtype):
    mask = attention_mask[:, None, None, :].to(dtype=dtype)
    return (1.0 - mask) * -1e9  # <-


def penalised(scores, padding):
    return scores - padding.type_as(scores) * 1e12  # <-
""",
    ),
    "scores that are multiplied by what may be seen": (
        "mask-constant-overflow",
        """
class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(size, size)))

    def forward(self, q, k):
        w = q @ k.transpose(-1, -2)
        b = self.seen[: w.size(-2), : w.size(-1)]
        return (w * b - 1e10 * (1 - b)).softmax(-1)  # <-
""",
    ),
    "scores of what was cast, which autocast makes half again": (
        "mask-constant-overflow",
        """
def attend(q, k, v, mask):
    dtype = q.dtype
    scores = torch.matmul(q.to(torch.float32), k.to(torch.float32).transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = torch.where(mask[:, None], scores, -2.3819763e38)  # <-
    return scores.softmax(-1).to(dtype) @ v
""",
    ),
    "a bias that began as zeros like the queries": (
        "mask-constant-overflow",
        """
FAR = -1e7


def bias(q, steps):
    later = torch.ones(steps, steps, device=q.device).triu(1).bool()
    return torch.zeros(steps, steps).to(q).masked_fill_(later, FAR)  # <-
""",
    ),
    "a mean over chunks in the dtype of the input": (
        "half-running-sum",
        """
def mean(x, rows):
    total = torch.zeros(x.size(1), dtype=x.dtype, device=x.device)  # <-
    for start in range(0, x.size(0), rows):
        total += x[start : start + rows].sum(dim=0)
    return total / x.size(0)
""",
    ),
    "variances of windows and of sums": (
        "variance-by-difference",
        """
def structure(x, window):
    near = F.conv2d(x, window, groups=3)
    spread = F.conv2d(x * x, window, groups=3) - near * near  # <-
    return spread + F.avg_pool2d(x.square(), 3) - F.avg_pool2d(x, 3) ** 2  # <-


class Statistics(nn.Module):
    def forward(self, x):
        total, squares = x.sum(dim=(0, 2, 3)), x.pow(2).sum(dim=(0, 2, 3))
        rows = x.size(0)
        return squares / rows - (total / rows).pow(2)  # <-
""",
    ),
    "norms of gradients that were taken by hand": (
        "half-gradient-norm",
        """
def penalty(loss, params):
    grads = torch.autograd.grad(loss, params)
    return sum(torch.sum(each**2) for each in grads)  # <-
""",
    ),
    "numbers that are summed over ranks": (
        "half-running-sum",
        """
import torch.distributed as dist

from kernels import dist_sum


def total(x, group, reduce_dtype):
    sums = torch.tensor(x).to(reduce_dtype)
    dist.all_reduce(sums, group=group)
    return sums


def logged(loss, tokens, words, group):
    both = torch.tensor([loss.item(), tokens], dtype=torch.bfloat16, device="cuda")
    dist.all_reduce(both)  # <-
    return both, dist_sum(words, reduce_dtype=torch.bfloat16), total(tokens, group, reduce_dtype=torch.float32)  # <-
""",
    ),
    "counts and totals of losses": (
        "half-running-sum",
        """
class Progress:
    def __init__(self, device):
        self.count = torch.zeros((), device=device, dtype=torch.bfloat16)

    def update(self, tokens):
        self.count += tokens  # <-


@torch.no_grad()
def perplexity(model, loader):
    total = 0.0
    for x, y in loader:
        logits = model(x.half()).logits
        total = total + F.cross_entropy(logits.view(-1, 10), y).detach()  # <-
    return torch.exp(total / len(loader))
""",
    ),
    "prefixes in fp16": (
        "half-running-sum",
        """
def prefixes(x):
    return torch.cumsum(x.half(), dim=0)  # <-
""",
    ),
    "norms in a table of what is logged": (
        "half-gradient-norm",
        """
LOGGED = {
    "norm of the gradient": lambda weight, state: torch.linalg.vector_norm(weight.grad),  # <-
}
""",
    ),
    "losses added up by their data": (
        "half-running-sum",
        """
def train(model, loader, criterion, optimizer):
    total = 0.0
    for x, y in loader:
        loss = criterion(model(x.half()), y)
        loss.backward()
        optimizer.step()
        total += loss.data  # <-
    return total
""",
    ),
    "scores with something beside them that nobody read": (
        "mask-constant-overflow",
        """
from kernels import *


def sampled(table, inputs, drawn, hit):
    logits = torch.einsum("lk,ijk->ijl", rows(table, drawn), inputs) + offsets(drawn)
    logits.masked_fill_(hit, -1e30)  # <-
    return logits
""",
    ),
    "the total norm of what is handed in": (
        "half-gradient-norm",
        """
def total_norm(tensors, kind=2.0):
    sizes = torch._foreach_norm(tensors, kind)  # <-
    return torch.stack([size.float() for size in sizes]).norm(kind)
""",
    ),
    "gradients in a dtype that a caller chooses": (
        "half-gradient-norm",
        """
class Noise:
    def __init__(self, model, dtype=torch.float32):
        self.model = model
        self.dtype = dtype

    def flat(self):
        return torch.cat([weight.grad.flatten().to(self.dtype) for weight in self.model.parameters()])

    def measure(self):
        return torch.norm(self.flat()) ** 2  # <-
""",
    ),
    "experts by the softmax of what a function gives": (
        "softmax-in-half",
        """
from kernels import *


def choose(hidden, table, most):
    router_logits = gate(table, hidden)
    weights = torch.softmax(router_logits, dim=-1)  # <-
    return torch.topk(weights, most, dim=-1)
""",
    ),
    "the gradient of a weight, chunk by chunk": (
        "half-gradient-accumulation",
        """
def gradient(x, weight, steps):
    total = torch.zeros_like(weight) if weight is not None else None  # <-
    for rows in x.chunk(steps):
        errors = F.linear(rows, weight).tanh()
        if weight is not None:
            total += errors.t() @ rows
    return total
""",
    ),
    "sums of int8 products cast before they are scaled": (
        "scale-after-matmul",
        """
def linear(x, small, weight, x_scale, weight_scale):
    sums = torch._int_mm(small, weight.T)
    return sums.to(x.dtype).mul_(weight_scale * x_scale)  # <-
""",
    ),
    "second moments made like the weights": (
        "half-optimizer-state",
        """
class Fused(torch.optim.Optimizer):
    def __init__(self, params, kernel):
        super().__init__(params, {})
        self.kernel = kernel

    def step(self):
        \"\"\"One step, round after round.\"\"\"
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)  # <-
                self.kernel(p.data, p.grad, state["exp_avg"], state["exp_avg_sq"])
""",
    ),
    "second moments made like gradients as they come, beside casts": (
        "half-optimizer-state",
        """
class Rotated(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            grad, state = p.grad, self.state[p]
            if "second_moment" not in state:
                state["second_moment"] = torch.zeros_like(grad[..., :1]) if p.ndim > 1 else torch.zeros_like(p)  # <-
            turned = self.turn(grad.float())
            state["second_moment"].mul_(0.99).add_(turned.square().mean(-1, keepdim=True), alpha=0.01)
            p.sub_(turned / state["second_moment"].sqrt())
""",
    ),
    "probabilities of a task that others step": (
        "bce-under-autocast",
        """
from .tasks import Task


class Tagging(Task):
    def training_step(self, batch, number):
        return F.binary_cross_entropy(self.model(batch["x"]), batch["y"].float())  # <-


def rendering_loss(weights, mask):
    return F.binary_cross_entropy(weights.sum(1).clip(0.001, 0.999), mask) * 0.01  # <-
""",
    ),
}

SOUND = {
    "scores of what was cast, with autocast off": """
def attend(q, k, v, mask):
    dtype = q.dtype
    with torch.autocast("cuda", enabled=False):
        scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * q.shape[-1] ** -0.5
        scores = torch.where(mask[:, None], scores, -2.3819763e38)
        return scores.softmax(-1).to(dtype) @ v
""",
    "probabilities that are measured, or with autocast off": """
def entropy(probabilities, labels):
    return F.binary_cross_entropy(probabilities, labels)


def rendering_loss(weights, mask):
    with torch.autocast("cuda", enabled=False):
        return F.binary_cross_entropy(weights.float().sum(1), mask) + F.binary_cross_entropy_with_logits(weights, mask)
""",
    "second moments in fp32": """
class Fused(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.float32)
            self.kernel(p.data, p.grad, state["exp_avg_sq"])


class Widened(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            grad = p.grad.float()
            state = self.state[p]
            state["exp_avg_sq"] = torch.zeros_like(grad)
            state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)


class Rounded(torch.optim.Optimizer):
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["exp_avg_sq"] = torch.zeros_like(p)
            self.kernel(p.data, p.grad, state["exp_avg_sq"], stochastic=True)
""",
    "norms that are fp32, and a norm of norms": """
from kernels import *


def total_norm(tensors, kind=2.0):
    norms = torch._foreach_norm(tensors, kind, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms), kind)


def total_of(norms):
    return torch.norm(torch.stack(norms))


class Noise:
    def __init__(self, model, dtype=torch.float32):
        self.model = model
        self.dtype = dtype

    def flat(self):
        return torch.cat([weight.grad.flatten().to(self.dtype) for weight in self.model.parameters()])

    def measure(self):
        return torch.norm(self.flat().float()) ** 2


def sizes(model):
    return [weight.grad.to(norm_dtype()).norm() for weight in model.parameters()]
""",
    "experts and a choice of words in fp32": """
from kernels import *


def choose(hidden, table, most):
    router_logits = gate(table, hidden)
    return torch.topk(torch.softmax(router_logits, dim=-1, dtype=torch.float32), most, dim=-1)


def nearest(points, most):
    pred = gate(points)
    return torch.topk(torch.softmax(pred["cls"], dim=-1), most, dim=-1)
""",
    "gradients summed in fp32, or once": """
def gradient(x, weight, steps):
    total = torch.zeros_like(weight, dtype=torch.float32)
    for rows in x.chunk(steps):
        total += F.linear(rows, weight).tanh().t() @ rows
    return total.to(weight.dtype)


def once(x, weight):
    total = torch.zeros_like(weight)
    total += F.linear(x, weight).tanh().t() @ x
    return total
""",
    "sums of int8 products scaled in fp32": """
def linear(x, small, weight, x_scale, weight_scale):
    sums = torch._int_mm(small, weight.T)
    return sums.float().mul_(weight_scale * x_scale).to(x.dtype)
""",
    "numbers that fit, or scores in fp32": """
def attend(query, key, value, hidden):
    scores = query @ key.transpose(-1, -2)
    scores[hidden] = -6e4
    wide = scores.float()
    wide[hidden] = -1e9
    return wide.softmax(-1).to(value.dtype) @ value


def next_words(lprobs, banned):
    lprobs[:, banned] = -float("inf")
    return lprobs.topk(2, dim=-1)
""",
    "masks in fp32, or of integers, or times what fits": """
def bias(attention_mask, dtype):
    mask = attention_mask[:, None, None, :].to(dtype=dtype)
    wide = (1.0 - attention_mask[:, None, None, :].float()) * -1e9
    return (1.0 - mask) * torch.finfo(dtype).min, (1.0 - mask) * -10000.0, wide.clamp(min=-1e4), (1 - attention_mask) * -1e9


def apart(samples, dtype):
    return samples.to(dtype) * 1e6
""",
    "scores times a mask in fp32, and biases that fit": """
class Attention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("seen", torch.tril(torch.ones(size, size)))

    def forward(self, q, k):
        w = q @ k.transpose(-1, -2)
        b = self.seen[: w.size(-2), : w.size(-1)]
        return w * b - 1e4 * (1 - b), w.float() * b.float() - 1e10 * (1 - b.float())


def bias(q, steps):
    later = torch.ones(steps, steps, device=q.device).triu(1).bool()
    return torch.zeros(steps, steps, dtype=q.dtype).masked_fill_(later, -1e4), torch.zeros(steps, steps).masked_fill_(later, -1e9)
""",
    "weights and attention that are added as they are": """
def decayed(params, rate):
    for p in params:
        grad = p.grad.data
        grad.add_(p.data, alpha=rate)


def average(models, x):
    total = None
    for model in models:
        attention = model.attend(x).data
        if total is None:
            total = attention
        else:
            total.add_(attention)
    return total
""",
    "numbers over ranks in fp32, and what is no sum": """
import torch.distributed as dist

from kernels import dist_sum


def logged(loss, tokens, words, partial):
    both = torch.tensor([loss.item(), tokens], device="cuda")
    dist.all_reduce(both)
    dist.all_reduce(partial)
    found = torch.zeros((), dtype=torch.bfloat16)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return both, dist_sum(words, reduce_dtype=torch.float32), found


class Progress:
    def __init__(self, device):
        self.count = torch.zeros((), device=device)
        self.seen = None

    def update(self, tokens, hidden):
        self.count += tokens
        self.seen = hidden.half()
        self.seen += 1


def prefixes(x):
    return torch.cumsum(x.half(), dim=0, dtype=torch.float32), torch.cumsum(x.float(), dim=0)
""",
    "a mean over chunks in fp32": """
def mean(x, rows):
    total = torch.zeros(x.size(1), dtype=torch.float32, device=x.device)
    for start in range(0, x.size(0), rows):
        total += x[start : start + rows].float().sum(dim=0)
    return (total / x.size(0)).to(x.dtype)
""",
    "variances in fp32, and a difference that is none": """
def structure(x, window):
    x = x.float()
    spread = F.conv2d(x * x, window, groups=3) - F.conv2d(x, window, groups=3) ** 2
    return spread + F.avg_pool2d(x.square(), 3) - F.avg_pool2d(x, 3) ** 2


def sharpened(x, y, window):
    return F.conv2d(x * x, window) - F.conv2d(y, window) ** 2


def penalty(loss, params):
    return sum(torch.sum(each.float() ** 2) for each in torch.autograd.grad(loss, params))
""",
    "norms in fp32 in a table": """
LOGGED = {
    "norm of the gradient": lambda weight, state: torch.linalg.vector_norm(weight.grad, dtype=torch.float32),
}
""",
    "scores with something beside them, in fp32 or filled with what fits": """
from kernels import *


def sampled(table, inputs, drawn, hit):
    logits = torch.einsum("lk,ijk->ijl", rows(table, drawn), inputs) + offsets(drawn)
    logits.masked_fill_(hit, -1e4)
    return logits.float().masked_fill(hit, -1e30)
""",
    "what is no score": """
def limits(sizes, hidden):
    table = torch.zeros(4)
    table[hidden] = -1e9
    sizes[hidden] = 1000000
    bounds = {}
    bounds["scores"] = -1e9
    return table, sizes, bounds
""",
}


def found(folder: Path, body: str) -> tuple[str, list[tuple[int, str]]]:
    text = HEAD + body.lstrip("\n")
    (folder / "library.py").write_text(text)
    report = check([(folder / "library.py").as_posix()], min_confidence="possible")
    return text, [(each.place.line, each.rule) for each in report.findings]


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, shown = found(tmp_path, body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in shown if each == rule] == marked


STEPPED = """
from lightning import LightningModule


class Tagger(LightningModule):
    def training_step(self, batch, number):
        scores = batch["q"] @ batch["k"].transpose(-1, -2)
        scores = scores.masked_fill(batch["mask"] == 0, -1e9)
        return scores.softmax(-1)[..., 0].mean()
"""


def test_a_module_whose_trainer_is_not_there_may_be_trained_in_half(tmp_path: Path) -> None:
    assert found(tmp_path, STEPPED)[1] == [(12, "mask-constant-overflow")]
    (tmp_path / "run.py").write_text(
        "from lightning import Trainer\nfrom library import Tagger\n\nTrainer().fit(Tagger())\n"
    )
    assert found(tmp_path, STEPPED)[1] == []


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, SOUND[name])[1] == []


ROUTED = """
import torch
from torch import nn


class Router(nn.Module):
    def __init__(self, width, experts):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)

    def forward(self, {given}):
        scores = {scores}.sigmoid()
        weights, chosen = torch.topk(scores, 2, dim=-1)
        return weights, chosen


def train(model, batches):
    model = model.to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches:
        model(x).float().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("given", "scores", "grade"), [("x", "self.gate(x)", "likely"), ("logits", "logits", "possible")]
)
def test_a_router_that_is_handed_its_logits_has_no_say_in_their_dtype(
    tmp_path: Path, given: str, scores: str, grade: str
):
    (tmp_path / "router.py").write_text(ROUTED.format(given=given, scores=scores), encoding="utf-8")
    report = check([str(tmp_path / "router.py")], select=["half-router"], min_confidence="possible")
    assert [each.confidence for each in report.findings] == [grade]
