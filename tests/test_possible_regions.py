"""Autocast regions that are written for one device: whether another is met, the callers decide, so that it is possible and no more."""

import textwrap
from pathlib import Path

import pytest

from precisionlint import check

HEAD = """
from contextlib import nullcontext

import torch
from torch import nn
"""

MODULE = """
class Projector(nn.Module):
    def __init__(self, width, mixed=True):
        super().__init__()
        self.mixed = mixed
        self.up = nn.Linear(width, 4 * width)

    def forward(self, tokens):
        with {region}:
            return self.up(tokens)
"""

CLASS = """
class Captioner:
    def __init__(self, encoder, device):
        self.device = device
        self.encoder = encoder.to(self.device).eval()

    def features(self, pictures):
        with torch.no_grad(), {region}:
            return self.encoder(pictures.to(self.device))
"""

FUNCTION = """
@torch.no_grad()
def distances(model, left, right, device):
    a, b = left.to(device), right.to(device)
    with {region}:
        return torch.cdist(model(a.float()), model(b.float()))
"""

OLD = """
from torch.cuda.amp import autocast


class Captioner:
    def __init__(self, encoder, device):
        self.encoder, self._device = encoder.to(device), device

    def features(self, pictures):
        with autocast():
            return self.encoder(pictures.to(device=self._device))
"""


def told(folder: Path, text: str, rule: str = "autocast-device-mismatch") -> list[tuple[str, str]]:
    """What is told of a rule at all, and that a run by default tells nothing."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(text))
    assert not check([str(path)], select={rule}, isolated=True).findings
    shown = check([str(path)], select={rule}, min_confidence="possible", isolated=True).findings
    return [(each.severity, each.confidence) for each in shown]


@pytest.mark.parametrize(
    ("program", "region"),
    [
        (MODULE, 'torch.autocast("cuda", dtype=torch.float16, enabled=self.mixed)'),
        (MODULE, 'torch.amp.autocast(device_type="cuda", enabled=False)'),
        (CLASS, 'torch.autocast("cuda")'),
        (FUNCTION, 'torch.autocast(device_type="cuda", enabled=False)'),
        (OLD, ""),
    ],
)
def test_cuda_written_out_where_tensors_go_elsewhere_is_possible(tmp_path: Path, program: str, region: str) -> None:
    assert told(tmp_path, HEAD + program.format(region=region)) == [("info", "possible")]


@pytest.mark.parametrize(
    ("program", "region", "more"),
    [
        (MODULE, "torch.autocast(tokens.device.type, dtype=torch.bfloat16)", ""),
        (MODULE, 'torch.autocast("cuda") if tokens.is_cuda else nullcontext()', ""),
        (MODULE, 'torch.autocast("cuda")', 'DEVICE = torch.device("cuda")'),
        (MODULE, 'torch.autocast("cuda")', "import triton"),
        (MODULE, 'torch.autocast("cpu", dtype=torch.bfloat16)', ""),
        (CLASS, 'torch.autocast("cuda")', "def train(loss):\n    loss.backward()"),
        (FUNCTION, 'torch.autocast("cuda", enabled=device.type == "cuda")', ""),
        (FUNCTION.replace("left.to(device)", "left.cuda()"), 'torch.autocast("cuda")', ""),
        (FUNCTION.replace(".to(device)", ""), 'torch.autocast("cuda")', ""),
    ],
)
def test_cuda_written_out_in_code_for_cuda_is_silent(tmp_path: Path, program: str, region: str, more: str) -> None:
    assert told(tmp_path, f"{HEAD}\n{more}\n{program.format(region=region)}") == []


WHOLE = """
class Tagger:
    def __init__(self, net, device):
        self.device = device
        self.net = net.to(self.device).eval()

    def tags(self, pictures):
        with torch.no_grad(), {region}:
            return self.net(pictures)
"""

FOUND = """
from gadgets import choose_device

WHERE = choose_device()


def vectors(net, words):
    words = words.to(WHERE)
    with {region}:
        return net(words)
"""


@pytest.mark.parametrize(
    ("program", "region"),
    [
        (FUNCTION, "torch.autocast(device, dtype=torch.bfloat16)"),
        (FUNCTION, "torch.autocast(enabled=True, device_type=device)"),
        (WHOLE, "torch.autocast(device_type=self.device)"),
        (WHOLE, "torch.autocast(self.device, torch.bfloat16, cache_enabled=False)"),
        (FOUND, "torch.autocast(str(WHERE))"),
    ],
)
def test_a_device_that_tensors_are_put_on_as_well_may_have_an_index(tmp_path: Path, program: str, region: str) -> None:
    assert told(tmp_path, HEAD + program.format(region=region)) == [("info", "possible")]


@pytest.mark.parametrize(
    ("program", "region"),
    [
        (FUNCTION, "torch.autocast(device.type, dtype=torch.bfloat16)"),
        (FUNCTION, "torch.autocast(device.type if isinstance(device, torch.device) else device)"),
        (FUNCTION, "torch.autocast(device_type=model.device_type)"),
        (FUNCTION.replace(".to(device)", ""), "torch.autocast(device)"),
        (WHOLE, "torch.autocast(self.device.type)"),
        (WHOLE, 'torch.autocast(str(self.device).split(":")[0])'),
        (WHOLE.replace("net.to(self.device).eval()", "net.eval()"), "torch.autocast(self.device)"),
        (FOUND.replace("choose_device()", '"cuda"'), "torch.autocast(WHERE)"),
    ],
)
def test_the_type_of_a_device_has_no_index(tmp_path: Path, program: str, region: str) -> None:
    assert told(tmp_path, HEAD + program.format(region=region)) == []


FP32 = """
class Rotary(nn.Module):
    def forward(self, q, k):
        with {region}:
            return q.float() @ k.float().mT
"""

DECORATED = """
from torch.cuda.amp import autocast


@autocast({arguments})
def rays(directions, poses):
    return directions @ poses.mT
"""


@pytest.mark.parametrize(
    ("text", "many"),
    [
        (FP32.format(region="torch.autocast(q.device.type, dtype=torch.float32)"), 1),
        (FP32.format(region="torch.autocast(device_type=q.device.type, dtype=torch.float, enabled=True)"), 1),
        (DECORATED.format(arguments="dtype=torch.float32"), 1),
        (FP32.format(region="torch.autocast(q.device.type, torch.half if self.training else torch.float32)"), 1),
        (FP32.format(region="torch.autocast(q.device.type, torch.half if self.half else torch.float32, self.half)"), 0),
        (FP32.format(region="torch.autocast('cpu', torch.bfloat16 if self.half else torch.float32)"), 0),
        (
            FP32.format(region="torch.autocast(self.kind, {'fp32': torch.float32, 'bf16': torch.bfloat16}[self.name])"),
            0,
        ),
        (CLASS.format(region="torch.autocast('cuda', dtype=torch.float32)"), 1),
        (OLD.replace("autocast():", "autocast(dtype=torch.float32):"), 1),
        (CLASS.format(region="torch.autocast('cuda', dtype=torch.bfloat16)"), 0),
        (FP32.format(region="torch.autocast(q.device.type, dtype=torch.float32, enabled=False)"), 0),
        (FP32.format(region="torch.autocast(q.device.type, dtype=torch.bfloat16)"), 0),
        (FP32.format(region="torch.autocast('cuda', dtype=torch.float32)"), 0),
        (DECORATED.format(arguments="enabled=False"), 0),
    ],
)
def test_fp32_of_a_device_that_is_known_at_run_time_is_possible(tmp_path: Path, text: str, many: int) -> None:
    assert told(tmp_path, HEAD + text, "autocast-float32-dtype") == [("info", "possible")] * many


LOSS = """
import lightning as L
import torch.nn.functional as F
from torchmetrics import Metric


class {name}({base}):
    def {method}(self, batch, *_):
        probabilities, targets = self.given(batch)
        return F.binary_cross_entropy{with_logits}(probabilities, targets.float())
"""


@pytest.mark.parametrize(
    ("base", "method"), [("L.LightningModule", "training_step"), ("Metric", "compute"), ("nn.Module", "forward")]
)
def test_a_loss_of_probabilities_whose_region_is_a_callers_affair_is_possible(
    tmp_path: Path, base: str, method: str
) -> None:
    text = HEAD + LOSS.format(name="Scored", base=base, method=method, with_logits="")
    assert told(tmp_path, text, "bce-under-autocast") == [("info", "possible")]
    text = HEAD + LOSS.format(name="Scored", base=base, method=method, with_logits="_with_logits")
    assert told(tmp_path, text, "bce-under-autocast") == []


PAIRED = """
import torch.nn.functional as F


class {name}:
    @torch.no_grad()
    def {method}(self, scores, targets):
        return F.binary_cross_entropy(scores.sigmoid(), targets, reduction="none").sum(-1).argmin(1)


class FocalLoss:
    def __call__(self, scores, targets):
        return F.binary_cross_entropy(scores.{sigmoid}(), targets)
"""


def test_a_loss_of_a_class_and_one_that_pairs_are_possible(tmp_path: Path) -> None:
    text = HEAD + PAIRED.format(name="Assigner", method="assign", sigmoid="sigmoid")
    assert told(tmp_path, text, "bce-under-autocast") == [("info", "possible")] * 2
    text = HEAD + PAIRED.format(name="MeanLoss", method="evaluate", sigmoid="sigmoid")
    assert told(tmp_path, text, "bce-under-autocast") == [("info", "possible")]


GIVEN = """
def train(model, batches, optimizer, settings):
    mixed = settings.dtype is not None
    scaler = torch.amp.GradScaler("cuda", {enabled})
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype={dtype}, enabled=mixed):
            loss = model(batch)
            {inside}
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("enabled", "dtype", "many"),
    [
        ("enabled=mixed", "settings.dtype", 1),
        ("init_scale=2.0**12", "settings.dtype", 1),
        ("enabled=mixed and settings.dtype == torch.float16", "settings.dtype", 0),
        ("enabled=settings.scale_loss", "settings.dtype", 0),
        ("enabled=settings.fp16", "settings.dtype", 0),
        ("enabled=mixed", "torch.float16", 0),
    ],
)
def test_a_scaler_of_whichever_dtype_is_given_is_possible(tmp_path: Path, enabled: str, dtype: str, many: int) -> None:
    text = HEAD + GIVEN.format(enabled=enabled, dtype=dtype, inside="")
    assert told(tmp_path, text, "scaler-with-bf16") == [("info", "possible")] * many


@pytest.mark.parametrize(("inside", "many"), [("scaler.scale(model(batch)).backward()", 1), ("", 0)])
def test_a_backward_in_a_region_of_whichever_dtype_is_given_is_possible(tmp_path: Path, inside: str, many: int) -> None:
    text = HEAD + GIVEN.format(enabled="enabled=mixed", dtype="settings.dtype", inside=inside)
    assert told(tmp_path, text, "backward-under-autocast") == [("info", "possible")] * many


SEVERAL = """
class Steps:
    def __init__(self, optimizers):
        self.optimizers = optimizers

    def apply(self, scaler, losses):
        for optimizer in self.optimizers:
            {before}
            scaler.step(optimizer)
            {inside}
            optimizer.zero_grad()
        {after}
"""


@pytest.mark.parametrize(
    ("before", "inside", "after", "many"),
    [
        ("pass", "scaler.update()", "pass", 1),
        ("pass", "pass", "scaler.update()", 0),
        (
            "pass",
            "pass",
            "scaler.update()\n\n    def twice(self, scaler, losses):\n        for _ in range(2):\n            self.apply(scaler, losses)",
            0,
        ),
        ("scaler.scale(losses.pop()).backward()", "scaler.update()", "pass", 0),
    ],
)
def test_an_update_between_optimizers_of_which_no_backward_is_seen_is_possible(
    tmp_path: Path, before: str, inside: str, after: str, many: int
) -> None:
    text = HEAD + SEVERAL.format(before=before, inside=inside, after=after)
    assert told(tmp_path, text, "scaler-updated-per-optimizer") == [("info", "possible")] * many


STATEFUL = """
class Task:
    def __init__(self, net):
        self.net = net
        self.optimizer = torch.optim.AdamW(net.parameters())
        self.scaler = torch.amp.GradScaler("cuda")
        self.turns = 0

    def learn(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.net(x)
        self.scaler.scale(nn.functional.cross_entropy(logits.float(), y)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.turns += 1

    def {name}(self):
        held = {{"net": self.net.state_dict(), "turns": self.turns}}
        {more}
        return held
"""
OPTIMIZER = 'held["optimizer"] = self.optimizer.state_dict()'


@pytest.mark.parametrize(
    ("name", "more", "after", "many"),
    [
        ("state_dict", OPTIMIZER, "", 1),
        ("get_checkpoint_state", OPTIMIZER, "", 1),
        ("state_dict", f'{OPTIMIZER}; held["scaler"] = self.scaler.state_dict()', "", 0),
        ("state_dict", "pass", "", 0),
        ("state_dict", f"{OPTIMIZER}; held.update(self.more())", "", 0),
        ("settings", OPTIMIZER, "", 0),
        (
            "state_dict",
            OPTIMIZER,
            """
class Whole(Task):
    def state_dict(self):
        return {"scaler": self.scaler.state_dict(), **super().state_dict()}
""",
            0,
        ),
    ],
)
def test_a_state_without_the_scalers_that_others_save_is_possible(
    tmp_path: Path, name: str, more: str, after: str, many: int
) -> None:
    text = HEAD + STATEFUL.format(name=name, more=more) + after
    assert told(tmp_path, text, "scaler-not-checkpointed") == [("info", "possible")] * many


APART = """
class Masters:
    def __init__(self, net, loss_scale, bound):
        self.net, self.bound, self.loss_scale = net, bound, loss_scale
        self.copies = [each.detach().clone().float() for each in net.parameters()]

    def step(self):
        {first}
        for copy in self.copies:
            copy.grad.mul_(1.0 / self.loss_scale)
        {then}
"""

CLIPPING = """
def finish(net, optimizer, scaler):
    {first}
    scaler.unscale_(optimizer)
    {then}
    scaler.step(optimizer)
    scaler.update()
"""
CLIP = "nn.utils.clip_grad_norm_({}, 1.0)"


@pytest.mark.parametrize(
    ("text", "many"),
    [
        (APART.format(first=CLIP.format("self.copies"), then="pass"), 1),
        (CLIPPING.format(first=CLIP.format("net.parameters()"), then="pass"), 1),
        (APART.format(first="pass", then=CLIP.format("self.copies")), 0),
        (CLIPPING.format(first="pass", then=CLIP.format("net.parameters()")), 0),
        (APART.format(first="nn.utils.clip_grad_norm_(self.copies, self.bound * self.loss_scale)", then="pass"), 0),
    ],
)
def test_a_clip_before_what_unscales_in_a_function_of_its_own_is_possible(tmp_path: Path, text: str, many: int) -> None:
    assert told(tmp_path, HEAD + text, "clip-before-unscale") == [("info", "possible")] * many


TIMED = """
import torch


def train(model, loader, optimizer):
    model = model.cuda()
    for x in loader:
        with torch.autocast("cuda"):
            loss = model(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def warm_up(model, x):
    model = model.cuda()
    for _ in range(10):
        with torch.autocast("cuda"):
            loss = model(x).mean()
        loss.backward()
    torch.cuda.synchronize()
"""


def test_fp16_gradients_that_nothing_is_seen_to_step_with_are_possible(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(TIMED, encoding="utf-8")
    found = check([str(file)], select=["fp16-without-scaler"], min_confidence="possible").findings
    assert [(each.place.line, each.confidence) for each in found] == [(10, "certain"), (20, "possible")]


def test_what_is_called_an_optimizer_is_one_whoever_made_it(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    made = TIMED.replace(
        "def train(model, loader, optimizer):", "def train(model, loader):\n    optimizer = make(model)"
    )
    file.write_text(made, encoding="utf-8")
    found = check([str(file)], select=["fp16-without-scaler"]).findings
    assert [(each.place.line, each.confidence) for each in found] == [(11, "certain")]
