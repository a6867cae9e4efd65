"""Arithmetic that is half wherever a library's callers come with half: possible, told only if asked for, and nothing of its sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check

HEAD = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
MARK = "  # <-"

BROKEN = {
    "constant chosen for scores": (
        "mask-constant-overflow",
        """
def attend(query, key, value, hidden):
    scores = query @ key.transpose(-1, -2)
    scores = torch.where(hidden, -1e9, scores)  # <-
    return scores.softmax(-1) @ value
""",
    ),
    "constant behind the scores": (
        "mask-constant-overflow",
        """
LEAST = -1e8


def hide(attention_scores, seen):
    return torch.where(seen, attention_scores, LEAST)  # <-
""",
    ),
    "a boolean mask made numbers": (
        "mask-constant-overflow",
        """
def bias(attention_mask, query):
    return (attention_mask * 1.0).masked_fill(attention_mask, -1e9).to(query.dtype)  # <-
""",
    ),
    "log probabilities where the logits are not fp32": (
        "softmax-in-half",
        """
def log_probability(logits, chosen):
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, chosen) - logits.logsumexp(-1, keepdim=True)
    rows = [F.log_softmax(row, dim=-1) for row in logits]  # <-
    return torch.stack(rows).gather(-1, chosen)
""",
    ),
    "log probabilities under a negated test": (
        "softmax-in-half",
        """
def log_probability(logits, chosen):
    if logits.dtype != torch.float32:
        every = F.log_softmax(logits, dim=-1)  # <-
    else:
        every = logits - logits.logsumexp(-1, keepdim=True)
    return every.gather(-1, chosen)
""",
    ),
    "log-softmax of what a model that may be handed in gives": (
        "softmax-in-half",
        """
from transformers import AutoModelForCausalLM


class Actor(nn.Module):
    def __init__(self, model):
        super().__init__()
        if isinstance(model, str):
            self.model = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.bfloat16)
        else:
            self.model = model

    def forward(self, tokens, chosen):
        output = self.model(tokens)
        return F.log_softmax(output["logits"][:, :-1], dim=-1).gather(-1, chosen)  # <-
""",
    ),
    "mean and deviation behind a weight": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)  # <-
        return self.a * (x - mean) / (std + 1e-6) + self.b
""",
    ),
    "gates added up along a sequence": (
        "half-running-sum",
        """
class Halting(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 1)

    def forward(self, x):
        return torch.cumsum(torch.sigmoid(self.gate(x)).squeeze(-1), dim=1)  # <-
""",
    ),
    "entropy of what is half by name": (
        "softmax-in-half",
        """
def entropy(logits):
    p = F.softmax(logits.to(torch.bfloat16), dim=-1)  # <-
    return -(p * torch.log(p + 1e-4)).sum(-1)
""",
    ),
    "entropy of what is chosen from": (
        "softmax-in-half",
        """
class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        p = self.head(x).softmax(-1)  # <-
        return -(p * torch.log(p + 1e-4)).sum(-1)
""",
    ),
    "variance and mean at once": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, keepdim=True)  # <-
        var.add_(1e-5)
        var.sqrt_()
        return (x - mean) / var
""",
    ),
    "mean and deviation at once": (
        "norm-without-upcast",
        """
class Norm(nn.Module):
    def forward(self, x):
        std, mean = torch.std_mean(x, dim=-1, keepdim=True)  # <-
        return (x - mean) / (std + 1e-5)
""",
    ),
    "norm of all weights": (
        "half-gradient-norm",
        """
@torch.no_grad()
def size(model):
    total = 0.0
    for weight in model.parameters():
        total += weight.detach().norm(2) ** 2  # <-
    return total**0.5
""",
    ),
    "norms of weights by name": (
        "half-gradient-norm",
        """
def sizes(model):
    return {name: weight.data.norm().item() for name, weight in model.named_parameters()}  # <-
""",
    ),
    "the norm of a gradient that is handed in": (
        "half-gradient-norm",
        """
def limited(rate, grad, most):
    size = grad.norm(2).item()  # <-
    return rate * min(1.0, most / (size + 1e-6))
""",
    ),
    "a threshold by its logarithm": (
        "exp-in-half",
        """
class Gate(nn.Module):
    def __init__(self, width, dtype):
        super().__init__()
        self.log_threshold = nn.Parameter(torch.zeros(width, dtype=dtype))

    def forward(self, x):
        return x * (x > self.log_threshold.exp())  # <-
""",
    ),
    "a variance by its logarithm": (
        "exp-in-half",
        """
class Likelihood(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_var = nn.Parameter(torch.zeros(1))

    def forward(self, error):
        return error / torch.exp(self.log_var) + self.log_var  # <-
""",
    ),
    "a metric of exponentials": (
        "half-running-sum",
        """
class Perplexity:
    def __init__(self, device):
        self.total = torch.zeros(1, device=device)

    def update(self, logits, chosen):
        with torch.no_grad():
            top = logits.exp()
            picked = top.gather(-1, chosen)
            self.total += (picked / top.sum(-1, keepdim=True)).log().sum()  # <-
""",
    ),
    "a metric of log probabilities": (
        "half-running-sum",
        """
@torch.no_grad()
def perplexity(model, batches):
    total = 0.0
    for x, chosen in batches:
        logits = model(x).logits.to(x.dtype)
        total += F.log_softmax(logits, dim=-1).gather(-1, chosen).sum()  # <-
    return (-total).exp()
""",
    ),
    "second moments under other names": (
        "half-optimizer-state",
        """
class Small(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad  # .float()
                state["v"].mul_(0.999).addcmul_(grad, grad.conj(), value=0.001)  # <-
                p.addcdiv_(grad, state["v"].sqrt().add_(1e-8), value=-group["lr"])
""",
    ),
    "second moments of rows": (
        "half-optimizer-state",
        """
class Rows(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            rate = torch.tensor(p.numel()).to(torch.float32)
            rows, grad = self.state[p]["rows"], p.grad
            rows.mul_(0.95).add_((grad * grad).mean(1, keepdim=True), alpha=0.05)  # <-
            p.sub_(grad / rows.sqrt() / rate)
""",
    ),
    "log probabilities of logits from somewhere": (
        "softmax-in-half",
        """
def log_probability(logits, chosen):
    return logits[:, :-1].log_softmax(-1).gather(-1, chosen)  # <-


class Preferences(nn.Module):
    def forward(self, batch):
        outputs = {name: self.backbone(part).logits for name, part in batch.items()}
        return log_probability(outputs["chosen"], batch["labels"]) - log_probability(outputs["other"], batch["labels"])
""",
    ),
    "a ratio of probabilities": (
        "exp-in-half",
        """
def loss(new_logps, old_logps, advantages):
    ratio = torch.exp(new_logps - old_logps)  # <-
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
""",
    ),
    "a divergence from a reference": (
        "exp-in-half",
        """
def divergence(logprob, ref_logprob):
    difference = ref_logprob - logprob
    return difference.exp() - difference - 1  # <-
""",
    ),
    "sums over all positions so far": (
        "half-running-sum",
        """
class Context(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width)

    def forward(self, x):
        return self.value(x).cumsum(dim=-2)  # <-
""",
    ),
    "running sums of a product": (
        "half-running-sum",
        """
def linear_attention(keys, values):
    states = keys.transpose(-1, -2) @ values
    return torch.cumsum(states, dim=1)  # <-
""",
    ),
    "smoothed labels": (
        "half-running-sum",
        """
def smoothed(logits, labels, rate):
    every = -F.log_softmax(logits, dim=-1)
    rest = every.sum(dim=-1, keepdim=True)  # <-
    return (1 - rate) * every.gather(-1, labels) + rate * rest / logits.shape[-1]
""",
    ),
    "a total of losses": (
        "half-running-sum",
        """
def epoch(model, loader, optimizer):
    total = 0
    for x, y in loader:
        loss = F.cross_entropy(model(x)[0], y) + model(x)[1]
        total += loss.detach()  # <-
    return total / len(loader)
""",
    ),
    "totals by name": (
        "half-running-sum",
        """
from collections import defaultdict


def epoch(model, loader):
    totals = defaultdict(float)
    for batch in loader:
        parts = model(batch.softmax(-1))
        totals["entropy"] += parts.entropy.detach().clone()  # <-
    return totals
""",
    ),
    "directions by the default epsilon": (
        "epsilon-underflow",
        """
class Direction(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale  # <-
""",
    ),
    "a norm with an epsilon that fp16 does not know": (
        "epsilon-underflow",
        """
class ChannelNorm(nn.Module):
    def forward(self, x):
        length = x.abs().amax(1, keepdim=True)
        return x / (length + 1e-8)  # <-
""",
    ),
    "an average that a class keeps of weights": (
        "half-ema",
        """
class Shadow:
    def __init__(self, model, decay):
        self.held = [weight.detach().clone() for weight in model.parameters()]
        self.decay = decay

    def follow(self, model):
        for mine, weight in zip(self.held, model.parameters()):
            mine.mul_(self.decay).add_(weight.detach(), alpha=1 - self.decay)  # <-
""",
    ),
    "an average that a trainer keeps of weights": (
        "half-ema",
        """
class Runner:
    def average(self):
        decay = self.settings.ema_decay
        for index, weight in enumerate(self.model.parameters()):
            self.averages[index] = (1 - decay) * weight.data + decay * self.averages[index]  # <-
""",
    ),
    "an average in buffers, whose rate is an fp32 number": (
        "half-ema",
        """
class Averaged(nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.register_buffer("decay", torch.tensor(decay, dtype=torch.float32))
        for name, weight in model.named_parameters():
            self.register_buffer(name.replace(".", ""), weight.clone().detach().data)

    def forward(self, model):
        rest = 1.0 - self.decay
        mine = dict(self.named_buffers())
        for name, weight in model.named_parameters():
            held = mine[name.replace(".", "")].type_as(weight)
            held.sub_(rest * (held - weight))  # <-
""",
    ),
    "a teacher that follows": (
        "half-ema",
        """
@torch.no_grad()
def follow(teacher, student, tau=0.996):
    for slow, fast in zip(teacher.parameters(), student.parameters()):
        slow.lerp_(fast, 1.0 - tau)  # <-
""",
    ),
}

SOUND = {
    "variance and mean of fp32": """
class Norm(nn.Module):
    def forward(self, x):
        var, mean = torch.var_mean(x.float(), dim=-1, keepdim=True)
        return ((x - mean) / (var + 1e-5).sqrt()).to(x.dtype)
""",
    "advantages by their variance and mean": """
def standardise(advantages):
    var, mean = torch.var_mean(advantages)
    return (advantages - mean) / (var + 1e-4).sqrt()
""",
    "log-softmax of what a model gives, in fp32": """
class Actor(nn.Module):
    def __init__(self, model, made=None):
        super().__init__()
        self.model = model if made is None else made.bfloat16()

    def forward(self, tokens, chosen):
        output = self.model(tokens)
        return F.log_softmax(output["logits"].float(), dim=-1).gather(-1, chosen)
""",
    "a constant that fits": """
def attend(query, key, value, hidden):
    scores = query @ key.transpose(-1, -2)
    return torch.where(hidden, -1e4, scores).softmax(-1) @ value


def hide(attention_scores, seen):
    return torch.where(seen, attention_scores, torch.finfo(attention_scores.dtype).min)


def penalise(lengths, seen):
    return torch.where(seen, lengths, -1e9)
""",
    "scores that were widened": """
def attend(query, key, value, hidden):
    scores = (query @ key.transpose(-1, -2)).float()
    return torch.where(hidden, -1e9, scores).softmax(-1).to(value.dtype) @ value
""",
    "log probabilities in fp32 on either side of a test": """
def log_probability(logits, chosen):
    if logits.dtype in (torch.float32, torch.float64):
        return logits.gather(-1, chosen) - logits.logsumexp(-1, keepdim=True)
    return F.log_softmax(logits.float(), dim=-1).gather(-1, chosen)


def other(logits, chosen):
    if not logits.dtype == torch.float32:
        return F.log_softmax(logits, dim=-1, dtype=torch.float32).gather(-1, chosen)
    return F.log_softmax(logits, dim=-1).gather(-1, chosen)
""",
    "norms of weights in fp32": """
def size(model):
    return sum(weight.detach().float().norm() ** 2 for weight in model.parameters()) ** 0.5


def sizes(model):
    return {name: weight.norm(2, dtype=torch.float32) for name, weight in model.named_parameters()}


def limited(rate, grad, most):
    return rate * min(1.0, most / grad.float().norm())
""",
    "exponentials of what is no logarithm, and of one in fp32": """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.login = nn.Parameter(torch.zeros(1))
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.log_scale.float().exp() * self.login.exp()
""",
    "a metric of fp32 logits": """
class Perplexity:
    def __init__(self, device):
        self.total = torch.zeros(1, device=device)

    def update(self, logits, chosen):
        with torch.no_grad():
            top = logits.float().exp()
            self.total += (top.gather(-1, chosen) / top.sum(-1, keepdim=True)).log().sum()


def count(model, batches):
    right = 0
    with torch.no_grad():
        for x, y in batches:
            right += (model(x).argmax(-1) == y).sum()
    return right
""",
    "ratios and prefixes in fp32, and exponentials of other differences": """
def loss(new_logps, old_logps, advantages):
    ratio = torch.exp(new_logps.float() - old_logps.float())
    return -(ratio * advantages).mean()


def weights(times, now, decay):
    return torch.exp(times - now) * decay


class Context(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Linear(width, width)

    def forward(self, x, seen):
        counted = seen.long().cumsum(-1)
        return self.value(x).cumsum(dim=-2, dtype=torch.float32) / counted[..., None]
""",
    "log probabilities of fp32 logits from somewhere": """
def log_probability(logits, chosen):
    return logits.log_softmax(-1).gather(-1, chosen)


class Preferences(nn.Module):
    def forward(self, batch):
        return log_probability(self.backbone(batch).logits.float(), batch["labels"])
""",
    "smoothed labels, totals and directions in fp32": """
def smoothed(logits, labels, rate):
    every = -F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return (1 - rate) * every.gather(-1, labels) + rate * every.sum(dim=-1, keepdim=True) / logits.shape[-1]


def epoch(model, loader):
    total, steps, kept = 0, 0, []
    for x, y in loader:
        loss = model(x, y)
        total += loss.detach().float()
        total += loss.item()
        steps += 1
        kept.append(loss.detach())
    return total / steps, kept


class Direction(nn.Module):
    def forward(self, x):
        return F.normalize(x.float(), dim=1).to(x.dtype) + F.normalize(x, dim=1, eps=1e-4)
""",
    "averages in fp32, of statistics, and quick ones": """
class Shadow:
    def __init__(self, model, decay):
        self.held = [weight.detach().clone().float() for weight in model.parameters()]
        self.decay = decay

    def follow(self, model):
        for mine, weight in zip(self.held, model.parameters()):
            mine.mul_(self.decay).add_(weight.detach(), alpha=1 - self.decay)


class Codebook:
    def update_average(self, counts, decay):
        self.counts = decay * self.counts + (1 - decay) * counts


def momentum(teacher, student):
    for slow, fast in zip(teacher.parameters(), student.parameters()):
        slow.data = 0.9 * slow.data + 0.1 * fast.data
""",
    "second moments in fp32, and an average that is none": """
class Wide(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.float()
            state["v"].mul_(0.999).addcmul_(grad, grad, value=0.001)
            p.addcdiv_(grad, state["v"].sqrt().add_(1e-8), value=-0.1)


class Momentum(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            p.sub_(self.state[p]["m"])
""",
}


def test_a_program_whose_files_are_not_there_may_show_anything(tmp_path: Path) -> None:
    own = tmp_path / "recipe" / "training"
    own.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("")
    text = HEAD + (
        "from {package}.models import build\n\n\ndef train(settings, loader, optimizer):\n    model, total = build(settings), 0\n"
        "    for x, y in loader:\n        loss = model(x, y).softmax(-1)[..., 0]\n        loss.backward()\n        total += loss.detach()\n"
        "        optimizer.step()\n"
    )
    for package, lines in (("recipe", [14]), ("elsewhere", [])):
        (own / "run.py").write_text(text.format(package=package))
        report = check([(own / "run.py").as_posix()], min_confidence="possible", select=["half-running-sum"])
        assert [(each.place.line, each.severity) for each in report.findings] == [(line, "info") for line in lines]
        assert not check([(own / "run.py").as_posix()]).findings
    (tmp_path / "recipe" / "models.py").write_text("def build(settings):\n    return settings.model\n")
    (own / "run.py").write_text(text.format(package="recipe"))
    assert not check([tmp_path.as_posix()], min_confidence="possible", select=["half-running-sum"]).findings


def hits(folder: Path, body: str) -> tuple[str, list[tuple[int, str]]]:
    text = HEAD + body.lstrip("\n")
    (folder / "library.py").write_text(text)
    report = check(
        [(folder / "library.py").as_posix()], min_confidence="possible", select=["half-arithmetic", "master-weights"]
    )
    assert not report.errors
    return text, [(each.place.line, each.rule) for each in report.findings]


@pytest.mark.parametrize("name", BROKEN)
def test_a_possible_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = hits(tmp_path, body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in found if each == rule] == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert hits(tmp_path, SOUND[name])[1] == []
