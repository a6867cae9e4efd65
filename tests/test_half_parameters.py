"""Parameters that are made in half by themselves, under an optimizer that keeps no fp32 copy."""

from pathlib import Path

import pytest

from precisionlint import check

STEPS = """    for x, y in loader:
        loss = (net(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
TENSORS = """
import torch
from torch import nn


def train(loader, found):
    {made}
    optimizer = torch.optim.AdamW([w], lr=1e-5)
    for x, y in loader:
        loss = (x @ w - y).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
BARE = TENSORS.format(made="w = nn.Parameter({tensor})\n    {more}")
IN_A_MODULE = (
    """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64, 64))
        self.w = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16){frozen})
        {then}

    def forward(self, x):
        return x @ self.w


def train(loader):
    net = Net(){cast}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
"""
    + STEPS
)


def found(path: Path, text: str) -> list[tuple[str, str]]:
    path.write_text(text)
    report = check([str(path)])
    assert not report.errors
    return [(each.rule, each.confidence) for each in report.findings if each.severity != "info"]


@pytest.mark.parametrize(
    ("tensor", "more", "told"),
    [
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "pass", True),
        ("torch.randn(64, 64).to(torch.bfloat16)", "pass", True),
        ("data=torch.zeros(64, 64, dtype=torch.bfloat16)", "pass", True),
        ("torch.zeros(64, 64)", "pass", False),
        ("torch.zeros(64, 64, dtype=torch.float32)", "pass", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.requires_grad_(False)", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.requires_grad = False", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.float()", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.to(loader.dtype)", False),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w.data = w.data.bfloat16()", True),
        ("torch.zeros(64, 64, dtype=torch.bfloat16)", "w = nn.Parameter(w.detach().float())", False),
    ],
)
def test_a_parameter_by_itself(tmp_path: Path, tensor: str, more: str, told: bool) -> None:
    assert found(tmp_path / "a.py", BARE.format(tensor=tensor, more=more)) == [("bf16-only-weights", "certain")] * told


@pytest.mark.parametrize(
    ("frozen", "cast", "told"), [("", "", True), ("", ".float()", False), (", requires_grad=False", "", False)]
)
def test_a_parameter_of_a_module(tmp_path: Path, frozen: str, cast: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", IN_A_MODULE.format(frozen=frozen, cast=cast, then="pass"))
    assert hits == [("bf16-only-weights", "likely")] * told


@pytest.mark.parametrize(
    ("then", "told"),
    [
        ("self.w.data = self.w.data.float()", False),
        ("self.w = nn.Parameter(self.w.float())", False),
        ("self.w = nn.Parameter(torch.zeros(64, 64))", False),
        ("self.w.data = self.w.data.bfloat16()", True),
        ("self.w = nn.Parameter(self.w.to(torch.bfloat16))", True),
        ("self.scale = nn.Parameter(self.scale.float())", True),
    ],
)
def test_a_parameter_that_is_widened_or_replaced(tmp_path: Path, then: str, told: bool) -> None:
    hits = found(tmp_path / "a.py", IN_A_MODULE.format(frozen="", cast="", then=then))
    assert hits == [("bf16-only-weights", "likely")] * told


IN_LAYERS = (
    """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, dtype=None):
        super().__init__()
        self.fc = nn.Linear(64, 64, dtype={dtype})
        self.out = nn.Linear(64, 64, dtype={dtype})

    def forward(self, x):
        return self.out(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 8)
        {layers}

    def forward(self, x):
        return self.head(run(self.layers, x).float())


def run(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def train(loader):
    net = Net(){cast}
    optimizer = torch.optim.AdamW({taken}.parameters(), lr=1e-5)
"""
    + STEPS
)


@pytest.mark.parametrize(
    "layers",
    [
        "self.layers = Block()",
        "self.layers = nn.ModuleList([Block() for _ in range(4)])",
        "self.layers = nn.ModuleList(Block() for _ in range(4))",
        "self.layers = nn.Sequential(*[Block() for _ in range(4)])",
        "self.layers = nn.ModuleList([nn.ModuleDict({'mlp': Block()}) for _ in range(4)])",
        "self.layers = nn.ModuleList()\n        for _ in range(4):\n            self.layers.append(Block())",
        "self.layers = nn.ModuleDict()\n        self.layers['mlp'] = Block()",
        "self.layers = nn.ModuleDict()\n        self.layers.update({'mlp': Block()})",
        "self.layers = nn.Module()\n        self.layers.add_module('mlp', Block())",
        "made = []\n        for _ in range(4):\n            made.append(Block())\n        self.layers = nn.ModuleList(made)",
    ],
)
def test_layers_of_a_module_in_a_module_are_one_fault(tmp_path: Path, layers: str) -> None:
    text = IN_LAYERS.format(dtype="torch.bfloat16", layers=layers, cast="", taken="net")
    assert found(tmp_path / "a.py", text) == [("bf16-only-weights", "likely")]


LIST = "self.layers = nn.ModuleList([Block({given}) for _ in range(4)])"


@pytest.mark.parametrize(
    ("dtype", "given", "then", "cast", "taken", "told"),
    [
        ("dtype", "torch.bfloat16", "pass", "", "net", True),
        ("dtype", "dtype=torch.bfloat16", "pass", "", "net", True),
        ("dtype", "", "pass", "", "net", False),
        ("dtype", "torch.float32", "pass", "", "net", False),
        ("torch.float32", "", "pass", "", "net", False),
        ("torch.bfloat16", "", "pass", ".float()", "net", False),
        ("torch.bfloat16", "", "pass", "", "net.head", False),
        ("torch.bfloat16", "", "self.layers.requires_grad_(False)", "", "net", False),
        ("torch.bfloat16", "", "self.layers.float()", "", "net", False),
    ],
)
def test_layers_are_half_only_as_they_are_made_and_trained(
    tmp_path: Path, dtype: str, given: str, then: str, cast: str, taken: str, told: bool
) -> None:
    layers = f"{LIST.format(given=given)}\n        {then}"
    text = IN_LAYERS.format(dtype=dtype, layers=layers, cast=cast, taken=taken)
    assert found(tmp_path / "a.py", text) == [("bf16-only-weights", "likely")] * told


CONVERTED = (
    """
import torch
from torch import nn
from models import Net


def convert(layer):
    if isinstance(layer, (nn.Conv2d, nn.Linear)):
        layer.weight.data = layer.weight.data.half()
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.half()


def train(loader):
    net = Net()
    {cast}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
"""
    + STEPS
)


@pytest.mark.parametrize(
    ("cast", "told"),
    [
        ("net.apply(convert)", True),
        ("net.apply(lambda layer: layer.half())", True),
        ("net.apply(convert)\n    for p in net.parameters():\n        p.data = p.data.float()", False),
        ("net.apply(lambda layer: layer.float())", False),
        ("net.apply(convert)\n    net.float()", False),
        ("net.apply(print)", False),
    ],
)
def test_what_is_applied_to_each_layer(tmp_path: Path, cast: str, told: bool) -> None:
    hits = [each for each in found(tmp_path / "a.py", CONVERTED.format(cast=cast)) if each[0] == "bf16-only-weights"]
    assert hits == [("bf16-only-weights", "likely")] * told


def test_a_module_that_casts_itself_to_what_it_is_handed(tmp_path: Path) -> None:
    text = IN_LAYERS.format(dtype="None", layers="self.layers = Block({given})", cast="", taken="net")
    text = text.replace(
        "    def forward(self, x):\n        return self.out",
        "        self.to(dtype)\n\n    def forward(self, x):\n        return self.out",
    )
    for given, told in (("torch.bfloat16", True), ("torch.float32", False), ("", False)):
        assert found(tmp_path / "a.py", text.replace("{given}", given)) == [("bf16-only-weights", "likely")] * told


CHOSEN = """
import torch
from models import First, Second


def build(kind, dtype=torch.bfloat16):
    if kind == "first":
        net = First().to(dtype)
    else:
        net = Second(kind).to(dtype)
    return net


def optimizer_of(kind, parameters):
    if kind == "adam":
        {first}
    else:
        {second}
    return make(parameters, lr=1e-5)


def train(kind, loader):
    net = build(kind)
    stepper = optimizer_of(kind, net.parameters())
    for x, y in loader:
        loss = (net(x) - y).float().square().mean()
        loss.backward()
        stepper.step()
        stepper.zero_grad()
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("make = torch.optim.Adam", "make = torch.optim.SGD"),
        ("from bitsandbytes.optim import AdamW8bit as make", "make = torch.optim.AdamW"),
    ],
)
def test_models_and_optimizers_of_which_a_setting_chooses_one(tmp_path: Path, first: str, second: str) -> None:
    text = CHOSEN.format(first=first, second=second)
    assert ("bf16-only-weights", "certain") in found(tmp_path / "a.py", text)
    wide = text.replace("torch.bfloat16", "torch.float32")
    assert not found(tmp_path / "a.py", wide)


@pytest.mark.parametrize(
    ("made", "told"),
    [
        ("w = torch.zeros(64, 64, dtype=torch.bfloat16, requires_grad=True)", True),
        ("w = torch.zeros(64, 64, dtype=torch.bfloat16).requires_grad_()", True),
        ("w = torch.randn_like(found, dtype=torch.bfloat16)\n    w.requires_grad = True", True),
        ("w = found.detach().clone().to(torch.bfloat16).requires_grad_(True)", True),
        ("w = (0.02 * torch.randn(64, 64, dtype=torch.bfloat16)).requires_grad_()", True),
        ("dtype = torch.bfloat16\n    w = found.detach().to(dtype).requires_grad_()", True),
        ("settings.dtype = torch.bfloat16\n    w = found.detach().to(settings.dtype).requires_grad_()", False),
        ("w = torch.zeros(64, 64, dtype=torch.bfloat16)", False),
        ("w = torch.zeros(64, 64, dtype=torch.bfloat16).requires_grad_(False)", False),
        ("w = torch.zeros(64, 64, dtype=torch.bfloat16).float().requires_grad_()", False),
        ("w = torch.zeros(64, 64, dtype=torch.float32, requires_grad=True)", False),
    ],
)
def test_a_tensor_that_is_trained_in_half_is_a_weight(tmp_path: Path, made: str, told: bool) -> None:
    assert found(tmp_path / "train.py", TENSORS.format(made=made)) == [("bf16-only-weights", "certain")] * told


PARTS = """
import torch


def train(net, loader):
    {cast}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
"""


@pytest.mark.parametrize(
    ("cast", "told"),
    [
        ("net.fc = net.fc.to(torch.bfloat16)", True),
        ("net.fc = net.fc.bfloat16()\n    net.fc = net.fc.float()", False),
        ("net.fc = net.fc.to('cuda')", False),
    ],
)
def test_a_part_of_a_model_is_cast_from_outside(tmp_path: Path, cast: str, told: bool) -> None:
    program = PARTS.format(cast=cast) + STEPS
    assert found(tmp_path / "train.py", program) == [("bf16-only-weights", "likely")] * told
