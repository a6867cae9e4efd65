"""Shapes of real programs that are right, each beside what makes it wrong: no false alarm, and no silence bought with it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from precisionlint import check


def rules(folder: Path, text: str, name: str = "case.py", **others: str) -> list[str]:
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    for other, content in {**others, name.removesuffix(".py"): text}.items():
        (folder / f"{other}.py").write_text(textwrap.dedent(content), encoding="utf-8")
    report = check([str(folder / name)], assume={})
    assert not report.errors
    return [each.rule for each in report.findings if each.severity != "info"]


SCALED_BY_HAND = """
import torch
from torch.nn.utils import clip_grad_norm_


class HalfOptimizer:
    def __init__(self, model, loss_scale=8192, downscale=2):
        self.loss_scale = loss_scale
        self.downscale = downscale
        self.masters = [p.to(torch.float32).detach() for p in model.parameters()]

    def step(self, loss, optimizer):
        loss *= self.loss_scale
        loss.backward()
        {divide}
        norm = clip_grad_norm_(self.masters, 5.0)
        if norm < 1e4:
            optimizer.step()
        else:
            self.loss_scale /= self.downscale
"""
DIVIDED = """if self.loss_scale != 1.0:
            for p in self.masters:
                p.grad.data /= self.loss_scale"""


LATE = DIVIDED.replace("if self", "clip_grad_norm_(self.masters, 9.0)\n        if self")


@pytest.mark.parametrize(("divide", "found"), [(DIVIDED, []), (LATE, ["clip-before-unscale"])])
def test_a_scale_of_one_is_none_and_one_that_falls_is_the_scale_still(tmp_path: Path, divide: str, found: list[str]):
    assert rules(tmp_path, SCALED_BY_HAND.format(divide=divide)) == found


CHOSEN_TOGETHER = """
from contextlib import suppress

import torch
import utils


def train(model, optimizer, loader, amp_autocast=suppress, loss_scaler=None):
    for x in loader:
        with amp_autocast():
            loss = model(x).mean()
        optimizer.zero_grad()
        if loss_scaler is not None:
            loss_scaler(loss, optimizer)
        else:
            loss.backward()
            optimizer.step()


def main(args, model, optimizer, loader):
    amp_autocast, loss_scaler = suppress, None
    if args.amp:
        amp_autocast = torch.cuda.amp.autocast
        loss_scaler = {made}
    train(model, optimizer, loader, amp_autocast=amp_autocast, loss_scaler=loss_scaler)


main(None, build(), make(), data())
"""


@pytest.mark.parametrize(("made", "found"), [("utils.NativeScaler()", []), ("None", ["fp16-without-scaler"])])
def test_what_a_class_makes_is_never_none(tmp_path: Path, made: str, found: list[str]):
    assert rules(tmp_path, CHOSEN_TOGETHER.format(made=made)) == found


EPOCHS = """
import torch
from torch.nn.utils import clip_grad_norm_


class Executor:
    def train(self, model, optimizer, loader, args, scaler):
        use_amp = args.get("use_amp", False)
        every = args.get("accumulate", 1)
        for index, x in enumerate(loader):
            with torch.cuda.amp.autocast(scaler is not None):
                loss = model(x).mean() / every
            if use_amp:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            if index % every == 0:
                if use_amp:
                    {unscale}
                    clip_grad_norm_(model.parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                optimizer.zero_grad()
"""


@pytest.mark.parametrize(("unscale", "found"), [("scaler.unscale_(optimizer)", []), ("pass", ["clip-before-unscale"])])
def test_settings_are_the_same_from_epoch_to_epoch(tmp_path: Path, unscale: str, found: list[str]):
    assert rules(tmp_path, EPOCHS.format(unscale=unscale)) == found


NORMS = """
import torch


def total_norm(parameters):
    total = 0.0
    for parameter in parameters:
        {claim}
        total += parameter.grad.detach().norm(2) ** 2
    return total ** 0.5
"""
TRAIN = """
import torch
from case import total_norm


def train(model, optimizer, x{more}):
    {cast}
    model(x).mean().backward()
    total_norm(model.parameters())
    optimizer.step()
"""
HALF, FROZEN = "model.to(torch.bfloat16)", "teacher_model.eval()\n    teacher_model.to(torch.bfloat16)"


@pytest.mark.parametrize(
    ("claim", "cast", "found"),
    [
        ("pass", HALF, ["half-gradient-norm"]),
        ("assert parameter.grad.type() == 'torch.cuda.FloatTensor'", HALF, []),
        ("assert parameter.grad.dtype == torch.float32", HALF, []),
        ("assert parameter.grad.dtype == torch.bfloat16", HALF, ["half-gradient-norm"]),
        ("pass", FROZEN, []),
    ],
)
def test_gradients_of_half_are_those_of_what_trains_in_half(tmp_path: Path, claim: str, cast: str, found: list[str]):
    train = TRAIN.format(cast=cast, more=", teacher_model" if cast is FROZEN else "")
    assert rules(tmp_path, NORMS.format(claim=claim), train=train) == found


BATCH_NORM = """
import torch
from torch import nn


class SyncNorm(nn.Module):
    def forward(self, x):
        {claim}
        mean = x.mean(0)
        return (x - mean) / ((x * x).mean(0) - mean * mean).sqrt()


def train(model, optimizer, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x).mean()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("claim", "found"),
    [
        ("assert x.dtype == torch.float32, x.dtype", []),
        ("assert x.dim() == 2", ["variance-by-difference"]),
        ("assert x.dtype in (torch.float16, torch.bfloat16)", ["variance-by-difference"]),
    ],
)
def test_what_is_claimed_to_be_fp32_is_so(tmp_path: Path, claim: str, found: list[str]):
    assert rules(tmp_path, BATCH_NORM.format(claim=claim)) == found


STARRED = """
import torch
from torch import *
from torch.nn import *
from torch.nn.functional import *
from torch.optim import *
from torch.cuda.amp import *


def train(loader, path):
    model = Sequential(Linear(64, 10), ReLU()).to("cuda")
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for x, y in loader:
        optimizer.zero_grad()
        with autocast(dtype=float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def positions(n):
    return arange(n, dtype=bfloat16)
"""


def test_star_imports_of_torch_bring_in_what_they_are_known_for(tmp_path: Path):
    found = ["step-bypasses-scaler", "scaler-not-checkpointed", "half-arange"]
    assert rules(tmp_path, STARRED) == found
    own = STARRED.replace("from torch.cuda.amp import *", "from torch.cuda.amp import *\nfrom own import *")
    scaler = "class GradScaler:\n    def scale(self, loss):\n        return loss\n"
    assert rules(tmp_path, own, own=scaler) == ["fp16-without-scaler", "half-arange"]  # the last import counts
    torchs = STARRED.replace("from torch.cuda.amp import *\n", "").replace("autocast(", "autocast('cuda', ")
    assert rules(tmp_path, torchs) == found  # torch has both as well


OWN_COPIES = """
import torch


class Scaler:
    def __init__(self):
        self.loss_scale = 2.0**15


class HalfOptimizer(torch.optim.Optimizer):
    def __init__(self, optimizer):
        self.half = [p for group in optimizer.param_groups for p in group["params"]]
        self.masters = []
        for p in self.half:
            self.masters.append(torch.nn.Parameter(p.data.float()))
        optimizer.param_groups[0]["params"] = self.masters
        self.scaler = Scaler()
        self.stale = True

    def backward(self, loss):
        loss = loss * self.scaler.loss_scale
        loss.backward()
        self.stale = True

    def copy_gradients(self, factor=1.0):
        if self.stale:
            factor /= self.scaler.loss_scale
            for p, master in zip(self.half, self.masters):
                if not p.requires_grad:
                    continue
                master.grad.data.copy_(p.grad.data)
                master.grad.data.mul_(factor)
            self.stale = False

    def clip(self, max_norm):
        {first}
        norm = torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
        return norm
"""


@pytest.mark.parametrize(("first", "found"), [("self.copy_gradients()", []), ("pass", ["clip-before-unscale"])])
def test_weights_of_a_loop_are_trained_unless_the_program_freezes_them(tmp_path: Path, first: str, found: list[str]):
    assert rules(tmp_path, OWN_COPIES.format(first=first)) == found


CHOOSES = """
import torch


class {name}:
    def select(self, scores, chosen):
        return torch.softmax(scores, dim=-1)[chosen].log()


def train(model, loader):
    model = model.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, chosen in loader:
        loss = -{name}().select(model(x), chosen).mean()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(("name", "found"), [("BeamSearch", False), ("TopKSampling", False), ("Reward", True)])
def test_a_search_trains_nothing(tmp_path: Path, name: str, found: bool):
    assert ("softmax-in-half" in rules(tmp_path, CHOOSES.format(name=name))) is found


AT_TOP_LEVEL = """
import torch

model = torch.nn.Linear(3, 3).cuda()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
for x in data():
    with torch.autocast("cuda", dtype=torch.float16):
        a, b = model(x).mean(), model(x).float().pow(2).mean()
    one = torch.autograd.grad(scaler.scale(a), model.weight, retain_graph=True)[0]
    two = torch.autograd.grad(scaler.scale(b), model.weight, retain_graph=True)[0]
    scaler.scale(a + b).backward()
    print({shown})
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("shown", "found"),
    [
        ("model.weight.grad.norm() / scaler.get_scale()", []),
        ("one.norm() / two.norm()", []),
        ("model.weight.grad.norm()", ["scaled-gradients-read"]),
        ("one.norm() / 2", ["scaled-gradients-read"]),
        ("model.weight.grad.norm() / two.norm()", []),
        ("model.weight.grad.norm() / model.weight.norm()", ["scaled-gradients-read"]),
        ("one.norm() / model.weight.norm()", ["scaled-gradients-read"]),
        ("{'mean': model.weight.grad.abs().mean().item()}", ["scaled-gradients-read"]),
        ("model.weight.grad.float().std()", ["scaled-gradients-read"]),
        ("model.weight.grad.abs().max() == 0", []),
        ("torch.isfinite(model.weight.grad.mean())", []),
        ("model.weight.grad.abs().mean() / scaler.get_scale()", []),
        ("model.weight.grad.abs().shape", []),
        ("torch.log(model.weight.grad.abs().max())", []),
    ],
)
def test_a_norm_that_a_script_divides_by_the_scale_is_right(tmp_path: Path, shown: str, found: list[str]):
    assert rules(tmp_path, AT_TOP_LEVEL.format(shown=shown)) == found


STATISTIC = """
import torch

model = torch.nn.Linear(3, 3).cuda()
optimizer = torch.optim.Adam(model.parameters())
scaler = torch.amp.GradScaler("cuda")
kept = []
for x in data():
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x).mean()
    scaler.scale(loss).backward()
    for p in model.parameters():
        g = p.grad
        {taken}
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("taken", "told"),
    [
        ("p.grad.sub_(p.grad.mean())", False),
        ("p.grad.sub_(p.grad.mean().item())", False),
        ("p.grad.add_(-p.grad.mean(dim=1, keepdim=True))", False),
        ("q = (g - g.min()) / (g.max() - g.min())", False),
        ("low, high = g.min(), g.max(); q = (g - low) / (high - low)", False),
        ("q = (g - g.mean()) / torch.std(g)", False),
        ("m = p.grad.abs().max(); p.grad = p.grad / m", False),
        ("m = g.mean(); p.grad.sub_(m); m = loss.item(); print(m)", False),
        ("m = g.mean(); print(m)", True),
        ("m = g.abs().max().item(); print('largest', m)", True),
        ("print(f'{g.mean():.3f}')", True),
        ("print('%.3f' % g.std().item())", True),
        ("logger.info(max(p.grad.abs().max().item() for p in model.parameters()))", True),
        ("writer.add_scalar('mean', g.mean(), 0)", True),
        ("kept.append(g.abs().mean().item())", True),
        ("kept.append(g.abs().mean())", False),
    ],
)
def test_a_statistic_of_scaled_gradients_is_told_where_it_is_shown(tmp_path: Path, taken: str, told: bool):
    assert rules(tmp_path, STATISTIC.format(taken=taken)) == ["scaled-gradients-read"] * told


MADE_IN = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 10, dtype={table})
        self.out = nn.Linear(10, 10)
        {then}

    def forward(self, x):
        return self.out(self.table(x).float())


model = Net()
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
for x in data():
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("table", "then", "found"),
    [
        ("torch.bfloat16", "pass", ["bf16-only-weights"]),
        ("torch.float32", "pass", []),
        ("None", "pass", []),
        ("torch.bfloat16", "self.table.requires_grad_(False)", []),
        ("torch.bfloat16", "self.table.float()", []),
    ],
)
def test_a_layer_that_is_made_in_half_has_half_weights(tmp_path: Path, table: str, then: str, found: list[str]):
    assert rules(tmp_path, MADE_IN.format(table=table, then=then)) == found


EVALUATED = """
import torch
from torch import nn


def evaluate(model, loader, half=True):
    {cast}
    for x in loader:
        model(x.half())
    {back}


model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for x in data():
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate(model, data())
"""


@pytest.mark.parametrize("cast", ["model.half()", "if half: model.half()", "half = True; model.half()"])
@pytest.mark.parametrize(("back", "found"), [("pass", ["bf16-only-weights"]), ("model.float()", [])])
def test_a_cast_counts_wherever_in_its_line_it_stands(tmp_path: Path, cast: str, back: str, found: list[str]):
    assert rules(tmp_path, EVALUATED.format(cast=cast, back=back)) == found


HANDED_SCALER = """
import torch


class Trainer:
    def __init__(self, config, model):
        self.config, self.model = config, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler("cuda")

    def fit(self, loader):
        for batch in loader:
            self.optimize(batch, self.optimizer, self.scaler)

    def optimize(self, batch, optimizer, scaler):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(batch)
        scaler.scale(loss).backward()
        self.clip(optimizer, {scaler})
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    def clip(self, optimizer, scaler):
        if {test}:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
"""


@pytest.mark.parametrize("test", ["scaler", "scaler is not None"])
@pytest.mark.parametrize(("scaler", "found"), [("scaler", []), ("None", ["clip-before-unscale"])])
def test_a_scaler_that_has_scaled_is_there(tmp_path: Path, test: str, scaler: str, found: list[str]):
    assert rules(tmp_path, HANDED_SCALER.format(test=test, scaler=scaler)) == found


SLICES = """
import torch
import torch.distributed as dist


class Sharded(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-5):
        super().__init__(list(params), dict(lr=lr))

    @torch.no_grad()
    def step(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            params: list[torch.Tensor] = group["params"]
            for index in range(len(params)):
                grad = params[index].grad
                share = torch.empty_like(grad[: len(grad) // size])
                dist.reduce_scatter_tensor(share, grad)
                p = params[index]
                mine = p[rank * len(share) : (rank + 1) * len(share)]
                {update}
                dist.all_gather_into_tensor(p, mine)


def train(loader):
    model: torch.nn.Module = torch.nn.Linear(64, 64).cuda().bfloat16()
    optimizer = Sharded(model.parameters())
    for x in loader:
        model(x).float().square().mean().backward()
        optimizer.step()
        model.zero_grad()
"""


@pytest.mark.parametrize(
    ("update", "found"),
    [
        ("mine.add_(share, alpha=-group['lr'])", ["bf16-only-weights"]),
        ("self.state[p]['exp_avg'].add_(share)", []),
        ("mine.copy_(self.state[p]['fp32'].add_(share, alpha=-group['lr']))", []),
    ],
)
def test_what_is_added_to_a_slice_of_a_weight_is_added_to_the_weight(tmp_path: Path, update: str, found: list[str]):
    assert rules(tmp_path, SLICES.format(update=update)) == found
