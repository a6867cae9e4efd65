"""Which gradients a scaler has unscaled, of several optimizers, and scalers that are made and scale nothing."""

from pathlib import Path

import pytest

from precisionlint import check

TWO = """
import itertools

import torch
import torch.nn.functional as F
from torch import nn

torch.set_float32_matmul_precision("high")


def train(loader):
    g, d = nn.Linear(64, 64).to("cuda"), nn.Linear(64, 64).to("cuda")
    {frozen}
    opt_g = torch.optim.SGD(g.parameters(), lr=0.1)
    opt_d = torch.optim.SGD(d.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt_g.zero_grad()
        opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.mse_loss(d(g(x)), y)
        scaler.scale(loss).backward()
        {unscaled}
        nn.utils.clip_grad_norm_({clipped}, 1.0)
        scaler.step(opt_g)
        scaler.step(opt_d)
        scaler.update()
"""
BOTH = "scaler.unscale_(opt_g)\n        scaler.unscale_(opt_d)"
ALL = [
    "list(g.parameters()) + list(d.parameters())",
    "[*g.parameters(), *d.parameters()]",
    "itertools.chain(g.parameters(), d.parameters())",
]


def found(path: Path, text: str) -> list[tuple[str, str, str]]:
    path.write_text(text)
    report = check([str(path)])
    assert not report.errors
    return [(each.rule, each.confidence, each.message) for each in report.findings]


@pytest.mark.parametrize("clipped", [*ALL, "d.parameters()"])
def test_a_clip_over_weights_of_which_some_are_scaled_still(tmp_path: Path, clipped: str) -> None:
    one = found(tmp_path / "a.py", TWO.format(frozen="", unscaled="scaler.unscale_(opt_g)", clipped=clipped))
    assert [rule for rule, _, _ in one] == ["clip-before-unscale"]
    assert "gradients of 'opt_d' still scaled" in one[0][2]
    assert found(tmp_path / "a.py", TWO.format(frozen="", unscaled=BOTH, clipped=clipped)) == []


def test_a_clip_over_what_is_unscaled_or_has_no_gradients(tmp_path: Path) -> None:
    unscaled = "scaler.unscale_(opt_g)"
    assert found(tmp_path / "a.py", TWO.format(frozen="", unscaled=unscaled, clipped="g.parameters()")) == []
    frozen = "d.requires_grad_(False)"
    assert found(tmp_path / "a.py", TWO.format(frozen=frozen, unscaled=unscaled, clipped=ALL[0])) == []


PROBE = """
import torch
import torch.nn.functional as F
from torch import nn

torch.set_float32_matmul_precision("high")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 10)


def train(loader):
    model = Net().to("cuda")
    opt_body = torch.optim.SGD(model.body.parameters(), lr=0.1)
    opt_head = torch.optim.SGD(model.head.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        opt_head.zero_grad()
        opt_body.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            with torch.{body}():
                h = model.body(x)
            loss = F.mse_loss(model.head(h), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt_head)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt_head)
        {then}
        scaler.update()
"""
ANEW = """{between}
        with torch.autocast("cuda", dtype=torch.float16):
            other = F.mse_loss(model.body(x), y)
        scaler.scale(other).backward()
        scaler.step(opt_body)"""


@pytest.mark.parametrize(
    ("body", "then", "told"),
    [
        ("enable_grad", "scaler.step(opt_body)", "certain"),
        ("no_grad", "pass", "possible"),  # a probe: the body has no gradients
        ("no_grad", ANEW.format(between="opt_body.zero_grad()"), "possible"),
        ("no_grad", ANEW.format(between="pass"), "possible"),
    ],
)
def test_a_clip_over_weights_that_the_backward_may_not_have_reached(
    tmp_path: Path, body: str, then: str, told: str
) -> None:
    file = tmp_path / "a.py"
    hits = found(file, PROBE.format(body=body, then=then))
    assert [(rule, how) for rule, how, _ in hits] == ([("clip-before-unscale", told)] if told == "certain" else [])
    shown = check([str(file)], select=["clip-before-unscale"], min_confidence="possible").findings
    assert [(each.confidence, "gradients of 'opt_body'" in each.message) for each in shown] == [(told, True)]


def test_the_fix_unscales_those_of_the_other(tmp_path: Path) -> None:
    from precisionlint.cli import main

    file = tmp_path / "a.py"
    file.write_text(TWO.format(frozen="", unscaled="scaler.unscale_(opt_g)", clipped=ALL[0]))
    main(["check", str(file), "--fix", "--no-cache", "--isolated"])
    assert "        scaler.unscale_(opt_d)\n        nn.utils.clip" in file.read_text()
    assert found(file, file.read_text()) == []


IDLE = """
import torch
import torch.nn.functional as F
from steps import step
from torch import nn

torch.set_float32_matmul_precision("high")


def train(loader, resumed):
    model = nn.Linear(64, 64).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    {more}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.{dtype}):
            loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
"""


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("pass", True),
        ("scaler.load_state_dict(resumed['scaler'])", True),
        ("step(optimizer, scaler)", False),
        ("optimizer.scaler = scaler", False),
        ("hold = {'scaler': scaler}", False),
    ],
)
def test_a_scaler_that_scales_nothing_is_none(tmp_path: Path, more: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", IDLE.format(more=more, dtype="float16"))
    assert [(rule, how) for rule, how, _ in hits] == ([("fp16-without-scaler", "likely")] if told else [])
    assert all("which nothing uses" in message for _, _, message in hits)
    assert found(tmp_path / "a.py", IDLE.format(more=more, dtype="bfloat16")) == []


def test_a_scaler_of_a_class_that_steps_past_it(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

torch.set_float32_matmul_precision("high")


class Trainer:
    def __init__(self):
        self.model = nn.Linear(64, 64).to("cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, x):
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.model(x).square().mean()
        {step}
"""
    plain = "loss.backward()\n        self.optimizer.step()"
    used = "self.scaler.scale(loss).backward()\n        self.scaler.step(self.optimizer)\n        self.scaler.update()"
    assert [rule for rule, _, _ in found(tmp_path / "a.py", text.format(step=plain))] == ["fp16-without-scaler"]
    assert found(tmp_path / "a.py", text.format(step=used)) == []


SWITCHED = """
import torch
from torch import nn

torch.set_float32_matmul_precision("high")
dtype = "{dtype}"
model = nn.Linear(64, 64).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda", enabled={enabled})
for x in torch.rand(8, 4, 64, device="cuda"):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=getattr(torch, dtype)):
        loss = model(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    ("dtype", "enabled", "told"),
    [
        ("float16", 'dtype == "bfloat16"', True),
        ("float16", "False", True),
        ("float16", 'dtype == "float16"', False),
        ("float16", "torch.cuda.is_available()", False),
        ("bfloat16", 'dtype == "float16"', False),
    ],
)
def test_a_scaler_that_is_never_on_is_none(tmp_path: Path, dtype: str, enabled: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", SWITCHED.format(dtype=dtype, enabled=enabled))
    assert [(rule, how) for rule, how, _ in hits] == ([("fp16-without-scaler", "certain")] if told else [])


FORGOTTEN = """
import torch
from torch import nn

torch.set_float32_matmul_precision("high")


def train(loader):
    critic, maker = nn.Linear(64, 1).to("cuda"), nn.Linear(64, 64).to("cuda")
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-4)
    for_maker = torch.optim.Adam(maker.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        for_critic.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = critic(maker(x).detach()).mean()
        scaler.scale(loss).backward()
        scaler.step(for_critic)
        scaler.update()
        for_maker.zero_grad()
        with torch.autocast("cuda", dtype={dtype}):
            loss = -critic(maker(x)).mean()
        {backward}
"""
PLAIN = "loss.backward(); for_maker.step()"
SCALED = "scaler.scale(loss).backward(); scaler.step(for_maker); scaler.update()"


@pytest.mark.parametrize(
    ("dtype", "backward", "told"),
    [
        ("torch.float16", PLAIN, [("fp16-without-scaler", "certain")]),
        ("torch.bfloat16", PLAIN, []),
        ("torch.float16", SCALED, []),
        ("torch.float16", "loss.backward(); for_maker.zero_grad()", []),
    ],
)
def test_an_optimizer_beside_one_that_a_scaler_steps(
    tmp_path: Path, dtype: str, backward: str, told: list[tuple[str, str]]
) -> None:
    hits = found(tmp_path / "a.py", FORGOTTEN.format(dtype=dtype, backward=backward))
    assert [(rule, how) for rule, how, _ in hits] == told
    assert all("for 'for_maker', while 'for_critic' steps through it" in message for _, _, message in hits)


OVER_FEATURES = """
import torch
from torch import nn

torch.set_float32_matmul_precision("high")


{decorator}
def features_of(backbone, x):
    with torch.autocast("cuda", dtype=torch.float16):
        return backbone(x)


def train(loader, backbone):
    head = nn.Linear(64, 1).to("cuda")
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-4)
    for x in loader:
        {features}
        loss = head(features.float()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
CALLED = "features = features_of(backbone, x)"
IN_REGION = """with torch.autocast("cuda", dtype=torch.float16):
            features = backbone(x)"""


@pytest.mark.parametrize(
    ("decorator", "features", "told"),
    [
        ("", CALLED, True),
        ("@torch.no_grad()", CALLED, False),
        ("@torch.inference_mode", CALLED, False),
        ("", f"with torch.no_grad(): {CALLED}", False),
        ("", f"{CALLED}.detach()", False),
        ("", IN_REGION, True),
        ("", IN_REGION.replace("float16):", "float16), torch.no_grad():"), False),
        ("", f"with torch.no_grad(): y = x + 1\n        {IN_REGION}", True),
    ],
)
def test_a_head_over_features_through_which_no_gradient_flows(
    tmp_path: Path, decorator: str, features: str, told: bool
) -> None:
    hits = found(tmp_path / "a.py", OVER_FEATURES.format(decorator=decorator, features=features))
    assert [rule for rule, _, _ in hits] == ["fp16-without-scaler"] * told
