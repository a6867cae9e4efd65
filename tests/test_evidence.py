"""What a likely finding rests on: half precision of the object that holds the code, in a program that reaches it."""

from __future__ import annotations

from pathlib import Path

import pytest

from precisionlint import catalogue, check
from precisionlint.findings import Confidence
from precisionlint.source.flow.evidence import Evidence
from precisionlint.source.project import Project

HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n"
NORM = f"""{HEADER}
class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((%s).mean(-1, keepdim=True) + 1e-6)
"""
POW, SQUARE = "x.pow(2)", "x * x"
NET = f"""{HEADER}from layers.norm import Norm

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = Norm()

    def forward(self, x):
        return self.norm(x)
"""
TRAIN = """
def train(model, optimizer, x):
    model(x).float().mean().backward()
    optimizer.step()
"""
PLAIN = f"{HEADER}from net import Net\n{TRAIN}"


def grades(folder: Path, least: Confidence = "likely", **files: str) -> list[str]:
    """How the norm of layers/norm.py is judged in a project of these files."""
    (folder / "pyproject.toml").write_text("", encoding="utf-8")
    for name, text in files.items():
        path = folder / ("layers/__init__.py" if name == "package" else f"{name.replace('__', '/')}.py")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text, encoding="utf-8")
    rules = frozenset(catalogue.load())
    report = check([str(folder / "layers" / "norm.py")], select=rules, assume={}, min_confidence=least)
    return [each.confidence for each in report.findings if each.rule == "norm-without-upcast"]


def test_what_autocast_lifts_is_not_half_in_a_program_that_runs_under_it(tmp_path: Path):
    cast = f"{PLAIN}\nmodel = Net().to(torch.bfloat16)\n"
    around = cast.replace("    model(x)", "    with torch.autocast('cuda', dtype=torch.bfloat16):\n        model(x)")
    assert grades(tmp_path, layers__norm=NORM % POW, net=NET, train=cast) == ["likely"]
    assert grades(tmp_path, train=around) == []
    assert grades(tmp_path, layers__norm=NORM % SQUARE) == ["likely"]  # which autocast does not lift


@pytest.mark.parametrize(
    ("cast", "counts"),
    [
        ("model = Net()\nmodel.half()", True),
        ("model = torch.compile(Net())\nmodel.half()", True),
        ("def prepare(model):\n    model.half()\n\nprepare(Net())", True),
        ("def prepare(model):\n    model.half()\n\nprepare(nn.Linear(8, 8))", False),
        ("def prepare(model):\n    model.half()", True),  # anybody may call it
        ("class Run:\n    def __init__(self):\n        self.model = Net()\n        self.model.half()", True),
        ("class Run:\n    def __init__(self):\n        self.model = nn.Linear(8, 8)\n        self.model.half()", False),
        ("from transformers import AutoModel\n\nteacher_model = AutoModel.from_pretrained('x').half()", False),
        (
            "from transformers import AutoModel\n\nmodel = AutoModel.from_pretrained('x', torch_dtype=torch.bfloat16)",
            False,
        ),
        ("model = Net.from_pretrained('x', torch_dtype=torch.bfloat16)", True),
        ("model = Net.from_pretrained('x', torch_dtype=torch.float32)", False),
        ("from other import Other\n\nmodel = Other()\nmodel.half()", False),
        ("from build import build_model\n\nmodel = build_model('net')\nmodel.half()", True),
        ("model = nn.Linear(8, 8)\nmodel = Net()\nmodel.half()", True),
        ("model = Net()\nmodel = torch.compile(model)\nmodel.half()", True),
        ("model = Net()\nprint(model)\nmodel = nn.Linear(8, 8)\nmodel.half()", False),
        ("for model in [Net(), None]:\n    model.half()", True),
        ("def write(model, folder):\n    model.half()\n    model.save_pretrained(folder)\n\nwrite(Net(), 'x')", False),
        ("def write(model, folder):\n    model.half()\n    train(model)\n    model.save_pretrained(folder)", True),
        ("def write(model, folder):\n    model.save_pretrained(folder)\n    model.half()", True),
    ],
)
def test_only_a_cast_of_what_may_hold_the_code_counts(tmp_path: Path, cast: str, counts: bool):
    other = f"{HEADER}class Other(nn.Module):\n    def forward(self, x):\n        return x\n"
    build = "import importlib\n\ndef build_model(name):\n    return importlib.import_module(name).Net()\n"
    found = grades(tmp_path, layers__norm=NORM % POW, net=NET, other=other, build=build, train=f"{PLAIN}\n{cast}\n")
    assert found == (["likely"] if counts else [])


PART = """
class Part(nn.Module):
    def __init__(self, fixed):
        self.kept = nn.Parameter(torch.rand(8)) if fixed else Net()

    def METHOD(self, x, dtype=None):
        return self.kept.to(dtype=dtype)
"""
BUILD = f"""{HEADER}from net import Net

def build(*args):
    net = Net()
    return net

def read_image():
    return torch.rand(8, 8)
"""


@pytest.mark.parametrize(
    ("cast", "counts"),
    [
        ("dit = nn.Sequential(Net()).half()", True),
        ("dit = nn.Sequential(\n    nn.Linear(8, 8),\n    Net(),\n).to(torch.float16)", True),
        ("dit = nn.Sequential(nn.Linear(8, 8)).half()", False),
        ("dit = nn.DataParallel(Net(int(8))).half()", True),
        ("dit = Net()\ndit = nn.DataParallel(dit.half())", True),
        ("dit = nn.DataParallel(nn.Linear(8, 8)).half()", False),
        ("dit = build().half()", True),
        ("dit = build(int(8), int(8)).to(device='cuda', dtype=torch.bfloat16)", True),
        ("dit = read_image().half()", False),
        ("parts = nn.ModuleList([Net()])\nfor part in parts:\n    part.half()", True),
        ("parts = [torch.rand(8), torch.rand(8)]\nfor part in parts:\n    part.half()", False),
        ("kind = torch.bfloat16\ndit = Net()\ndit.to('cuda', kind)", True),
        ("kind = torch.float32\ndit = Net()\ndit.to('cuda', kind)", False),
        ("dit = Net()\ndit.to(dtype=torch.float32)", False),
        ("dit, x = Net(), torch.rand(8)\nx.half()", False),
        ("dit, x = Net(), torch.rand(8)\ndit.half()", True),
        ("def run(model, x):\n    return model(x).half()", False),
        ("def run(dit, x):\n    dit = Net()\n    return dit(x).to(torch.bfloat16)", False),
        ("def run(encoder_hidden_states):\n    return encoder_hidden_states.half()", False),
        ("def run(model, x):\n    model = model(x)\n    return model.half()", False),
        ("dit = copy.deepcopy(Net()).half()\ntorch.save(dit, 'dit.pt')", False),
        ("dit = copy.deepcopy(Net()).half()\noptimizer = torch.optim.SGD(dit.parameters())", True),
        ("saved = {\n    'model': copy.deepcopy(Net()).half(),\n}", False),
        (PART.replace("METHOD", "forward"), False),
        (PART.replace("METHOD", "move"), True),
    ],
)
def test_what_makes_an_object_tells_a_model_from_a_tensor(tmp_path: Path, cast: str, counts: bool):
    train = f"import copy\nfrom build import build, read_image\n{PLAIN}\n{cast}\n"
    found = grades(tmp_path, layers__norm=NORM % POW, net=NET, build=BUILD, train=train)
    assert found == (["likely"] if counts else [])


def test_a_package_leads_only_to_what_is_taken_from_it(tmp_path: Path):
    package = "from .norm import Norm\nfrom .head import Head\n"
    head = f"{HEADER}class Head(nn.Module):\n    def forward(self, x):\n        return x\n"
    train = f"{HEADER}from layers import %s\n{TRAIN}\nmodel = %s()\nmodel.half()\n"
    files = {"package": package, "layers__norm": NORM % POW, "layers__head": head}
    assert grades(tmp_path, **files, train=train % ("Norm", "Norm")) == ["likely"]
    assert grades(tmp_path, train=train % ("Head", "Head")) == []


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({}, False),
        ({"net": NET + "\n# or Norm.Old\n"}, True),
        (
            {
                "train": f"import layers.norm as norm\n{HEADER}from net import Net\n{TRAIN}Old = getattr(norm, 'O' + 'ld')\nNet().half()\n"
            },
            True,
        ),
        ({"other": "from layers.norm import Old\n\nclass Other:\n    block = Old\n"}, True),
        ({"layers__norm": "\nclass Older:\n    block = Old\n"}, False),  # which nobody uses either
        ({"layers__norm": "\nclass Older:\n    block = Old\n\nBLOCKS = [Older]\n"}, True),
        (
            {"layers__norm": "\nclass Pair:\n    block = Old\n\n    def dtype(self, x):\n        return x.half()\n"},
            True,  # what the file at hand shows itself is about all that is in it
        ),
    ],
)
def test_a_class_that_nobody_speaks_of_is_reached_by_nothing(tmp_path: Path, more: dict[str, str], counts: bool):
    """What the programs show of half precision is about the classes that they use."""
    sound = f"{HEADER}class Norm(nn.Module):\n    def forward(self, x):\n        return x\n"
    old = (NORM % SQUARE).partition("\n\n")[2].replace("class Norm", "class Old")
    files = {
        "net": NET,
        "train": f"{PLAIN}\nNet().half()\n",
        **more,
        "layers__norm": sound + old + more.get("layers__norm", ""),
    }
    assert grades(tmp_path, **files) == (["likely"] if counts else [])


def test_what_stands_beside_has_dtypes_of_its_own(tmp_path: Path):
    """A script that only shows results, and a file of a training program that the layer never meets."""
    files = {"layers__norm": NORM % SQUARE, "net": NET, "train": PLAIN}
    app = "import torch\nfrom net import Net\n\nimage = torch.rand(8, 8).type(torch.float16)\n"
    assert grades(tmp_path, **files) == []
    assert grades(tmp_path, app=app, kernels="import torch\n\nTABLE = torch.zeros(8, dtype=torch.float16)\n") == []
    assert grades(tmp_path, train=f"import kernels\n{PLAIN}") == []
    assert grades(tmp_path, train=f"import config\n{PLAIN}", config="precision = 'bf16'\n") == ["likely"]


def test_a_copy_of_the_same_name_is_another_ones(tmp_path: Path):
    """A program of another folder speaks of a class that it has from there."""
    files = {"layers__norm": NORM % SQUARE, "other__norm": NORM % SQUARE}
    train = f"{HEADER}from %s.norm import Norm\n{TRAIN}\nmodel = Norm().to(torch.bfloat16)\n"
    assert grades(tmp_path, **files, train=train % "other") == []
    assert grades(tmp_path, train=train % "layers") == ["likely"]


def test_a_program_may_leave_the_step_to_another_file(tmp_path: Path):
    step = "def step(loss, optimizer):\n    loss.backward()\n    optimizer.step()\n"
    run = f"{HEADER}from net import Net\nfrom steps import step\n\nmodel, optimizer = Net(), torch.optim.SGD([])\n"
    region = "with torch.autocast('cuda', dtype=torch.bfloat16):\n    step(model(torch.rand(8, 8)), optimizer)\n"
    files = {"layers__norm": NORM % SQUARE, "net": NET, "steps": step}
    assert grades(tmp_path, **files, run=run) == []
    assert grades(tmp_path, run=run + region) == ["likely"]


def test_a_layer_that_no_program_names_is_nobodys(tmp_path: Path):
    files = {"layers__norm": NORM % SQUARE, "net": NET}
    train = f"{HEADER}{TRAIN}\nprecision = 'bf16'\n"
    assert grades(tmp_path, **files, train=train) == []
    assert grades(tmp_path, train=f"{train}\nmodel = make('net.Net')\n") == ["likely"]
    assert grades(tmp_path, train=f"import importlib\n{train}") == ["likely"]  # any, by a name in its configuration


@pytest.mark.parametrize(
    ("speaks", "third", "called"),
    [
        ("loss = evaluate(model, x)", "", True),
        ("loss = evaluate(model, x)", "def evaluate(model):\n    return model\n", False),
        ("loss = models['Norm'](x)", "class Norm:\n    pass\n", True),
        ("loss = model(x)  # a Norm", "", False),
        ("loss = F.evaluate(x)", "", False),
        ("loss = models['evaluate'](x)", "", True),
    ],
)
def test_who_speaks_of_what_a_file_defines_may_call_it(tmp_path: Path, speaks: str, third: str, called: bool):
    (tmp_path / "pyproject.toml").touch()
    norm, other = tmp_path / "norm.py", tmp_path / "other.py"
    norm.write_text(f"{NORM}\n\ndef evaluate(model, x):\n    return model(x)\n")
    other.write_text(f"def run(model, models, x):\n    {speaks}\n    loss.backward()\n")
    (tmp_path / "third.py").write_text(third)
    assert (other in Evidence(Project(tmp_path)).callers(norm)) == called


@pytest.mark.parametrize(("region", "told"), [("torch", ["likely"]), ("te", []), ("transformer_engine", [])])
def test_regions_of_fp8_leave_what_runs_in_fp32_as_it_is(tmp_path: Path, region: str, told: list[str]):
    train = PLAIN.replace("    model(x)", f"    with {region}.autocast(enabled=True):\n        loss = model(x)")
    norm = NORM % SQUARE
    assert grades(tmp_path, layers__norm=norm, net=NET, train=train) == told


PACKED = "from setuptools import find_packages, setup\n\nsetup(name='layers', packages=find_packages())\n"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"setup": PACKED, "package": ""}, ["possible"]),
        ({"package": ""}, []),  # the project's own code, which trains in fp32
        ({"setup": PACKED}, []),  # no package
        ({"setup": PACKED, "package": "", "half": ""}, []),  # nothing of it knows of half precision
    ],
)
def test_what_a_project_packs_for_others_these_may_run_in_half(
    tmp_path: Path, files: dict[str, str], told: list[str]
) -> None:
    half = {"half": "import torch\n\nDTYPES = [torch.bfloat16]\n"} | files
    assert grades(tmp_path, "possible", **half, layers__norm=NORM % SQUARE, net=NET, train=PLAIN) == told


PLUGINS = "import importlib\nimport pkgutil\n\nfound = [{find} for _, name, _ in pkgutil.iter_modules(['layers'])]\n"


@pytest.mark.parametrize(("find", "told"), [("importlib.import_module(name)", ["possible"]), ("name", [])])
def test_what_a_program_finds_in_a_folder_is_led_to_by_no_import(tmp_path: Path, find: str, told: list[str]) -> None:
    files = {"plugins": PLUGINS.format(find=find), "half": "import torch\n\nDTYPES = [torch.bfloat16]\n"}
    other = "class Other(nn.Module):\n    def forward(self, x):\n        return x\n"
    train = f"{HEADER}{other}{TRAIN}"
    assert grades(tmp_path, "possible", **files, layers__norm=NORM % SQUARE, train=train) == told
