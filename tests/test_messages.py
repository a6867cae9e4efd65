"""What messages say of the program at hand: its optimizer, its dtype, its learning rate, and what it did instead."""

from pathlib import Path

import pytest
from programs import CLIP, CLIP_CALL, SOUND

import precisionlint
from precisionlint import catalogue
from precisionlint.findings import Finding


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only(text: str, rule: str, **options: object) -> Finding:
    Path("train.py").write_text(text, encoding="utf-8")
    report = precisionlint.check("train.py", isolated=True, select=[rule], **options)  # type: ignore[arg-type]
    (finding,) = report.findings
    return finding


TWO = CLIP.replace(
    '    scaler = torch.amp.GradScaler("cuda")\n',
    '    critic = nn.Linear(64, 1).to("cuda")\n    other = torch.optim.SGD(critic.parameters(), lr=0.1)\n    scaler = torch.amp.GradScaler("cuda")\n',
)


@pytest.mark.parametrize(
    ("optimizers", "said"),
    [
        (("SGD", "SGD"), "so it always bites and the update shrinks by as much"),
        (("AdamW", "Adam"), "so it always bites; Adam divides the constant out again"),
        (("SGD", "Adam"), "so it always bites: SGD's update shrinks by as much, Adam's by its eps alone"),
    ],
)
def test_a_clip_of_some_gradients_is_told_by_the_kind_of_optimizer(optimizers: tuple[str, str], said: str):
    text = TWO.replace("optim.SGD(model", f"optim.{optimizers[0]}(model").replace(
        "optim.SGD(critic", f"optim.{optimizers[1]}(critic"
    )
    text = text.replace(
        "clip_grad_norm_(model.parameters()", "clip_grad_norm_([p for p in weights if p.grad is not None]"
    )
    assert said in only(text.replace("def train(loader)", "def train(loader, weights)"), "clip-before-unscale").message


def test_the_optimizer_is_named_that_was_unscaled_instead():
    finding = only(TWO.replace(CLIP_CALL, f"scaler.unscale_(other)\n        {CLIP_CALL}"), "clip-before-unscale")
    assert finding.message.endswith("; 'scaler' has unscaled those of 'other'")
    assert "'scaler' unscales the gradients of 'other'" in [step.message for step in finding.trace]
    assert "has unscaled" not in only(TWO, "clip-before-unscale").message


HALVED = """import torch
from torch import nn


def train(loader, path):
    model = nn.Linear(64, 10).to("cuda", torch.{dtype})
    optimizer = torch.optim.AdamW(model.parameters(){rate})
    for x, y in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("dtype", "rate", "said"),
    [
        ("bfloat16", "0.1", "more do as the rate falls"),
        ("bfloat16", "1e-4", "some do at this rate, more as it falls"),
        ("bfloat16", "1e-5", "most do at this rate"),
        ("bfloat16", "rate", "most do at fine-tuning rates"),
        ("float16", "2e-5", "some do at this rate, more as it falls"),
        ("float16", "1e-6", "most do at this rate"),
        ("float16", "1e-4", "more do as the rate falls"),
    ],
)
def test_how_many_updates_are_lost_is_said_of_the_rate_at_hand(dtype: str, rate: str, said: str):
    text = HALVED.format(dtype=dtype, rate=f", lr={rate}").replace("loader, path", "loader, path, rate")
    assert f"rounds to nothing, and {said}; keep" in only(text, "bf16-only-weights").message


@pytest.mark.parametrize("lr", [1e-3, 3e-4, 2e-4, 1e-4, 2e-5, 1e-5, 1e-6])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_so_many_updates_are_lost(dtype: str, lr: float):
    torch = pytest.importorskip("torch")
    from precisionlint.checks.master_weights import share_lost

    torch.manual_seed(0)
    weight = (torch.randn(100_000) * 0.02).to(getattr(torch, dtype))
    lost = (weight - lr * torch.randn(100_000).sign().to(weight.dtype) == weight).float().mean().item()
    said = {"most do": lost > 0.5, "some do": 0.001 < lost < 0.8, "more do": lost < 0.01}
    assert said[share_lost(lr, dtype)[:7]], lost


SUMMED = """import torch
from torch import nn


class Metric:
    def __init__(self):
        self.total = torch.zeros((), dtype=torch.{dtype})

    def update(self, x):
        self.total += x.sum()
"""


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 256), ("float16", 2048)])
def test_a_sum_is_told_by_its_own_dtype(dtype: str, times: int):
    message = only(SUMMED.format(dtype=dtype), "half-running-sum").message
    assert (
        f" is kept in {'bf16' if dtype == 'bfloat16' else 'fp16'}: it stands still once it is {times} times its terms;"
        in message
    )


def test_a_checkpoint_without_masters_shows_who_steps_what_is_saved():
    pages = catalogue.examples(catalogue.find("masters-lost-in-checkpoint"))
    (text,) = (each.code for each in pages if each.kind == "wrong" and "def save(" in each.code)
    finding = only(text, "masters-lost-in-checkpoint")
    assert [step.message for step in finding.trace] == ["AdamW takes them", "saved here in bf16"]


@pytest.mark.parametrize(
    ("angles", "said"),
    [
        ("positions[:, None] * (1.0 / 10000 ** (torch.arange(0, n, 2) / n)).{dtype}", "{bits} bits for position times frequency"),
        ("positions[:, None] / (10000 ** (torch.arange(0, n, 2) / n)).{dtype}", "{bits} bits for a position divided by a wavelength"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat16()", "bf16 has 8"), ("half()", "fp16 has 11")])
def test_angles_are_told_as_they_are_made(angles: str, said: str, dtype: str, bits: str):
    text = (
        "import torch\n\n\ndef rotary(n):\n    positions = torch.arange(n).{dtype}\n    return (" + angles + ").cos()\n"
    )
    assert said.format(bits=bits) in only(text.format(dtype=dtype), "half-rope").message


COMPARED = SOUND.replace("        scaler.step(", "        before = scaler.get_scale()\n        scaler.step(") + (
    "        if {0}:\n            print(y)\n"
)


@pytest.mark.parametrize(
    ("test", "compared"),
    [
        ("scaler.get_scale() < before", True),
        ("before > scaler.get_scale()", True),
        ("scaler.get_scale() < 1.0", False),
    ],
)
def test_a_scale_that_is_compared_with_itself_is_read_for_a_reason(test: str, compared: bool):
    Path("train.py").write_text(COMPARED.format(test))
    report = precisionlint.check("train.py", isolated=True, select=["scale-read-on-host"])
    assert len(report.findings) == (0 if compared else 2)


SCHEDULED = """
import torch
import torch.nn.functional as F
from torch import nn


class Trainer:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")
        self.model = nn.Linear(64, 10).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)

    def step(self, loss):
        self.scaler.scale(loss).backward()
        old = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        new = self.scaler.get_scale()
        return {0}

    def train(self, loader):
        for x, y in loader:
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.mse_loss(self.model(x), y)
            if self.step(loss):
                self.scheduler.step()
"""


@pytest.mark.parametrize(("given", "told"), [("old <= new", False), ("loss is not None", True)])
def test_a_schedule_that_another_function_holds_back_by_the_scale(given: str, told: bool):
    Path("train.py").write_text(SCHEDULED.format(given))
    report = precisionlint.check("train.py", isolated=True, select=["scheduler-steps-when-skipped"])
    assert [each.rule for each in report.findings] == ["scheduler-steps-when-skipped"] * told
