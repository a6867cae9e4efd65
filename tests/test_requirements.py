"""Which torch a project runs with, by each way in which projects say so."""

import math
from pathlib import Path

import pytest

from precisionlint.source.requirements import Range, Version, parse, shown, versions


@pytest.mark.parametrize(
    ("bounds", "oldest", "newest"),
    [
        ("2.6", (2, 6), (2, 6, math.inf)),
        ("==2.6.0", (2, 6), (2, 6)),
        ("==2.6.0+cu124", (2, 6), (2, 6)),
        ("==2.5.*", (2, 5), (2, 5, math.inf)),
        (">=2.3,<2.9", (2, 3), (2, 8, math.inf)),
        (">= 2.0, != 2.1", (2,), None),
        ("<2.0", None, (1, math.inf)),
        ("<=2.8.1", None, (2, 8, 1)),
        ("~=2.3", (2, 3), (2, math.inf)),
        ("~=2.3.1", (2, 3, 1), (2, 3, math.inf)),
        ("^2.1", (2, 1), (2, math.inf)),
        ("~2.1", (2, 1), (2, 1, math.inf)),
        ("=2.0.1=py3.11_cuda11.7_cudnn8.5.0_0", (2, 0, 1), (2, 0, 1, math.inf)),
        ("*", None, None),
        ("", None, None),
    ],
)
def test_bounds_as_pip_poetry_and_conda_write_them(bounds: str, oldest: Version | None, newest: Version | None):
    assert parse(bounds) == Range(oldest, newest)


def test_a_range_meets_a_bound_where_one_of_its_versions_does():
    assert not parse("<2.9").meets(">=2.9")
    assert parse("<2.9").meets(">=2.8")
    assert parse("2.8").meets(">=2.8.1")
    assert not parse("==2.8.0").meets(">=2.8.1")
    assert not parse(">=2.12").meets("<2.12")
    assert parse("2.11").meets("<2.12")
    assert Range().meets(">=2.9")
    assert Range().meets("<2.12")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "None .. None"),
        ({"requirements.txt": "numpy\ntorch >= 2.1, <2.5  # see the notes\ntorchvision==0.20\n"}, "2.1 .. 2.4.*"),
        ({"requirements.txt": "torch==2.1.2\n", "requirements-new.txt": "torch\n"}, "2.1.2 .. None"),
        ({"requirements/train.txt": "torch[opt-einsum]==2.6.0 ; python_version>'3.9'\n"}, "2.6 .. 2.6"),
        ({"setup.py": "import torch\nsetup(install_requires=['torch>=1.10,<2.9', 'x'])\n"}, "1.10 .. 2.8.*"),
        ({"setup.cfg": "[options]\ninstall_requires =\n    torch>=2.2\n    x\n"}, "2.2 .. None"),
        (
            {"environment.yml": "dependencies:\n  - pytorch=2.0.1=py3.11_cuda11.7_0\n  - pytorch-cuda=11.7\n"},
            "2.0.1 .. 2.0.1.*",
        ),
        (
            {"environment.yaml": "dependencies:\n  - pytorch::pytorch>=2.2\n  - pip:\n      - torchmetrics==1.0\n"},
            "2.2 .. None",
        ),
        ({"pyproject.toml": '[project]\ndependencies = ["torch>=2.1,<3", "torchvision>=0.1"]\n'}, "2.1 .. 2.*"),
        (
            {"pyproject.toml": '[project.optional-dependencies]\na = ["torch==2.3.*"]\nb = ["torch (>=2.5)"]\n'},
            "2.3 .. None",
        ),
        ({"pyproject.toml": "[dependency-groups]\ndev = [\"torch>=2.7; sys_platform == 'linux'\"]\n"}, "2.7 .. None"),
        ({"pyproject.toml": '[tool.poetry.dependencies]\ntorch = "^2.1"\n'}, "2.1 .. 2.*"),
        (
            {"pyproject.toml": '[tool.poetry.dependencies]\ntorch = {version = "2.6.0", source = "x"}\n'},
            "2.6 .. 2.6.0.*",
        ),
        (
            {
                "pyproject.toml": '[project]\ndependencies = ["torch>=2.1"]\n',
                "uv.lock": '[[package]]\nname = "torch"\nversion = "2.7.1+cu128"\nsource = { registry = "x" }\n',
            },
            "2.1 .. 2.7.1",
        ),
        (
            {
                "pyproject.toml": '[project]\ndependencies = ["torch>=2.8"]\n',
                "poetry.lock": '[[package]]\nname = "torch"\nversion = "2.4.0"\n',
            },
            "2.8 .. None",
        ),
        ({"Pipfile.lock": '{"default": {"torch": {"hashes": [], "version": "==2.5.1"}}}'}, "2.5.1 .. 2.5.1"),
        ({"pyproject.toml": '[project]\nrequires-python = ">=3.8,<3.10"\n'}, "None .. 2.8"),
        ({"setup.py": "setup(python_requires='>=3.7,<3.9', install_requires=['torch>=1.7'])\n"}, "1.7 .. 2.4.1"),
        (
            {"pyproject.toml": '[project]\nrequires-python = ">=3.13"\ndependencies = ["torch>=2.0"]\n'},
            "2.5 .. None",
        ),
        ({"pyproject.toml": "[project\n"}, "None .. None"),
    ],
)
def test_what_a_project_declares(files: dict[str, str], expected: str, tmp_path: Path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    found = versions(tmp_path)
    assert " .. ".join("None" if each is None else shown(each) for each in (found.oldest, found.newest)) == expected
