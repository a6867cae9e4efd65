"""Half values on ways that are not straight: regions that a setting switches on, what the end of a file tries, buffers that a setting makes
parameters, products that are added by one call; and nothing of their sound relatives."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import check
from tests.test_possible_half import HEAD, MARK

BROKEN = {
    "log probabilities of chunks over a temperature": (
        "softmax-in-half",
        """
def distilled(student, teacher, student_head, teacher_head, temperature):
    mine = student @ student_head.t()
    other = teacher @ teacher_head.t()
    mine = torch.log_softmax(mine / temperature, dim=-1)  # <-
    other = torch.log_softmax(other / temperature, dim=-1)  # <-
    return (other.exp() * (other - mine)).mean()
""",
    ),
    "log probabilities behind the region": (
        "softmax-in-half",
        """
def step(model, x, chosen, ctx):
    with ctx:
        logits = model(x.to(torch.bfloat16)).logits
    picked = F.log_softmax(logits[:, :-1], dim=-1).gather(2, chosen)  # <-
    (-picked.mean()).backward()
""",
    ),
    "positions of a function that the end of the file tries": (
        "half-arange",
        """
def decay_mask(length, device, dtype):
    row = torch.arange(length, device=device, dtype=dtype).unsqueeze_(-1)  # <-
    column = torch.arange(length, device=device, dtype=dtype).unsqueeze_(0)  # <-
    return torch.abs(row - column)


def retained(query, key):
    return (query @ key.mT) * 0.9 ** decay_mask(query.shape[1], query.device, query.dtype)


if __name__ == "__main__":
    x = torch.randn(1, 8, 4)
    print(retained(x, x))
""",
    ),
    "wavelengths that a setting makes parameters": (
        "half-rope",
        """
class Waves(nn.Module):
    def __init__(self, width, learned):
        super().__init__()
        waves = 0.5 * 1e4 ** (torch.arange(0, width).float() / width)
        if not learned:
            self.register_buffer("waves", waves)  # <-
        else:
            self.waves = nn.Parameter(waves)


class Positions(Waves):
    def __init__(self, width):
        super().__init__(width, learned=False)

    def forward(self, x):
        places = torch.arange(x.shape[1]).type_as(self.waves)
        return torch.sin(places[:, None] / self.waves) + x  # <-
""",
    ),
    "the gradient of a head, by products that are added": (
        "half-gradient-accumulation",
        """
def losses(hidden, head, chosen, chunks):
    total = torch.zeros_like(head.weight) if head.weight.requires_grad else None  # <-
    for rows, labels in zip(hidden.chunk(chunks), chosen.chunk(chunks)):
        errors = F.one_hot(labels) - (rows @ head.weight.t()).sigmoid()
        if total is not None:
            torch.addmm(input=total, mat1=errors.t().to(rows.dtype), mat2=rows, out=total, alpha=1.0, beta=1.0)
    return total
""",
    ),
    "the gradient of a weight in the dtype of the region": (
        "half-gradient-accumulation",
        """
class Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, proj_weight, chunks):
        dtype = torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else hidden.dtype
        total = torch.zeros_like(proj_weight, dtype=dtype)  # <-
        for rows in hidden.split(chunks):
            rows = rows.to(dtype)
            total.addmm_(rows.t(), rows)
        ctx.save_for_backward(total)
        return total
""",
    ),
    "a total that the first loss makes": (
        "half-running-sum",
        """
def added(total, one):
    if total is None:
        total = torch.zeros_like(one)
    total += one.detach()  # <-
    return total
""",
    ),
    "log of what is left of a sigmoid": (
        "loss-on-half-logits",
        """
def focal(scores, labels):
    p = torch.sigmoid(scores)
    right = labels * torch.log(p.float())
    return -(right + (1 - labels) * torch.log(1 - p)).mean()  # <-


def rest(scores):
    return torch.log1p(-scores.sigmoid()).sum()  # <-
""",
    ),
    "cross entropy of products over a temperature": (
        "loss-on-half-logits",
        """
def contrasted(queries, keys, temperature):
    return F.cross_entropy(queries @ keys.t() / temperature, torch.arange(len(queries)))  # <-
""",
    ),
    "products of a tensor with itself, bound anew": (
        "half-running-sum",
        """
def covariance(activations):
    total = None
    for x in activations:
        gram = x.t() @ x  # <-
        total = gram if total is None else total + gram
    return total
""",
    ),
    "losses of a list, by Python's sum": (
        "half-running-sum",
        """
def evaluated(model, batches):
    losses = [model(x).loss.detach() for x in batches]
    return sum(losses) / len(losses)  # <-


@torch.no_grad()
def mean(model, batches):
    return sum(F.cross_entropy(model(x), y) for x, y in batches) / len(batches)  # <-
""",
    ),
    "the least number of fp32": (
        "mask-constant-overflow",
        """
def attend(q, k, v, hidden):
    scores = (q * 0.125) @ k.mT
    scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)  # <-
    return scores.softmax(-1) @ v


def bias(mask, dtype):
    return (1.0 - mask.to(dtype)) * -torch.finfo(torch.float32).max  # <-
""",
    ),
}

SOUND = {
    "log probabilities in a region that a setting switches on": """
def step(model, x, chosen, amp):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
        logits = model(x.to(torch.bfloat16)).logits
        picked = F.log_softmax(logits[:, :-1], dim=-1).gather(2, chosen)
    (-picked.mean()).backward()


def handed(model, x, chosen, autocast_ctx):
    with autocast_ctx:
        picked = F.log_softmax(model(x).logits[:, :-1], dim=-1).gather(2, chosen)
    (-picked.mean()).backward()
""",
    "in one that the end of the file makes": """
from contextlib import nullcontext


def step(model, x, chosen):
    with region:
        picked = F.log_softmax(model(x).logits[:, :-1], dim=-1).gather(2, chosen)
    (-picked.mean()).backward()


if __name__ == "__main__":
    region = nullcontext() if device == "cpu" else torch.autocast("cuda", dtype=torch.bfloat16)
    step(model, batch["x"], batch["chosen"])
""",
    "gradients added up in fp32, or only once": """
def losses(hidden, head, chunks):
    total = torch.zeros_like(head.weight, dtype=torch.float32)
    for rows in hidden.chunk(chunks):
        total += torch.mm(rows.t(), rows).float()
    return total.to(head.weight.dtype)


def once(hidden, head):
    total = torch.zeros_like(head.weight)
    return torch.addmm(total, hidden.t(), hidden, out=total)


def scaled(q, k, scale):
    room = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    return torch.baddbmm(room, q, k.mT, beta=0, alpha=scale).softmax(-1)
""",
    "logs of what is clamped, wide or a logarithm itself": """
def focal(scores, labels):
    p = torch.sigmoid(scores.float())
    return -(labels * torch.log(p) + (1 - labels) * torch.log(1 - p)).mean()


def rest(scores):
    return F.logsigmoid(-scores.float()).sum() + torch.log1p(-scores.sigmoid().clamp(max=0.99)).sum()


def contrasted(queries, keys, temperature):
    return F.cross_entropy((queries @ keys.t()).float() / temperature, torch.arange(len(queries)))
""",
    "lists of numbers, of terms of a loss, and of fp32": """
def evaluated(model, batches):
    losses = [model(x).loss.item() for x in batches]
    return sum(losses) / len(losses) + sum(model(x).loss.float().detach() for x in batches)


def total(model, batch):
    return sum(F.cross_entropy(each.float(), batch["y"]) for each in model(batch["x"]))
""",
    "the least number of the dtype at hand, and in fp32": """
def attend(q, k, v, hidden):
    scores = (q * 0.125) @ k.mT
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    wide = scores.float().masked_fill(hidden, torch.finfo(torch.float32).min)
    return wide.softmax(-1).to(v.dtype) @ v
""",
    "a total that a call makes and fills, and one in fp32": """
def summed(losses):
    total = torch.zeros_like(losses)
    total += losses.detach()
    return total


def kept(total, one):
    if total is None:
        total = torch.zeros_like(one, dtype=torch.float32)
    total += one.detach()
    return total
""",
}


def hits(folder: Path, body: str) -> tuple[str, list[tuple[int, str]]]:
    text = HEAD + body.lstrip("\n")
    (folder / "library.py").write_text(text, encoding="utf-8")
    rules = ["half-arithmetic", "half-gradient-accumulation"]
    report = check([(folder / "library.py").as_posix()], min_confidence="possible", select=rules)
    assert not report.errors
    return text, [(each.place.line, each.rule) for each in report.findings]


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_stands_where_it_is_made(tmp_path: Path, name: str) -> None:
    rule, body = BROKEN[name]
    text, found = hits(tmp_path, body)
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(MARK)]
    assert [line for line, each in found if each == rule] == marked


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_said_of_the_sound_relatives(tmp_path: Path, name: str) -> None:
    assert hits(tmp_path, SOUND[name])[1] == []


LOADED = """import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification


def train(batches):
    model = {loaded}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in batches:
        model(**batch).loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("loaded", "lines"),
    [
        ('AutoModelForCausalLM.from_pretrained("m").to(torch.bfloat16)', [6]),
        ('AutoModelForCausalLM.from_pretrained("m").cuda().half()', [6]),
        ('AutoModelForCausalLM.from_pretrained("m", dtype=torch.bfloat16)', []),
        ('AutoModelForCausalLM.from_pretrained("m").to("cuda")', []),
        ('AutoModelForImageClassification.from_pretrained("m").half()', []),
    ],
)
def test_a_decoder_that_is_cast_after_it_is_loaded(loaded: str, lines: list[int], tmp_path: Path) -> None:
    (tmp_path / "case.py").write_text(LOADED.format(loaded=loaded), encoding="utf-8")
    found = check([str(tmp_path / "case.py")], select=["half-rope"], min_confidence="possible").findings
    assert [(each.place.line, each.confidence) for each in found] == [(line, "possible") for line in lines]


ROTARY = """import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, width, 2).float() / width), persistent=False)

    def forward(self, x):
        turns = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq.to(torch.float32))
        return turns.cos(), turns.sin()
"""
MODEL = """import torch
from torch import nn

from rotary import Rotary


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.rotary = Rotary(config.width)
        {cast}


def train(model, optimizer, batches):
    for x in batches:
        model(x).mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("cast", "lines"), [("self.to(dtype=config.torch_dtype)", [8]), ("self.to(config.device)", [])]
)
def test_a_buffer_that_is_widened_after_a_cast_of_the_model(cast: str, lines: list[int], tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "rotary.py").write_text(ROTARY, encoding="utf-8")
    (tmp_path / "model.py").write_text(MODEL.format(cast=cast), encoding="utf-8")
    found = check([str(tmp_path / "rotary.py")], select=["half-rope"], min_confidence="possible").findings
    assert [(each.place.line, each.confidence) for each in found] == [(line, "possible") for line in lines]


NORM = """import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()
"""
TRAIN = """import torch
from contextlib import nullcontext
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision

from norm import Norm


def train(model, optimizer, batches, sharded):
    model = FSDP(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16)) if sharded else model
    region = {region}
    for x in batches:
        with region:
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
"""
AUTOCAST = "torch.autocast('cuda', dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("region", "grades"),
    [(f"nullcontext() if sharded else {AUTOCAST}", ["possible"]), (AUTOCAST, []), ("nullcontext()", ["likely"])],
)
def test_half_copies_without_the_region_that_other_configurations_enter(
    region: str, grades: list[str], tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("", encoding="utf-8")
    (tmp_path / "norm.py").write_text(NORM, encoding="utf-8")
    (tmp_path / "train.py").write_text(TRAIN.format(region=region), encoding="utf-8")
    found = check([str(tmp_path / "norm.py")], select=["norm-without-upcast"], min_confidence="possible").findings
    assert [each.confidence for each in found] == grades
