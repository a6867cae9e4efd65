"""Settings as classes of fields: what a field holds is open where nothing that is read makes the object, and its default is known."""

from pathlib import Path

import pytest

from precisionlint import check

SETTINGS = """
from dataclasses import dataclass, field


@dataclass
class OptimSettings:
    lr: float = 1e-5


@dataclass
class Settings:
    optim: OptimSettings = field(default_factory=OptimSettings)
    width: str = field(default="{dtype}", metadata={{"help": "what the weights are kept in"}})
"""
TRAIN = """
import torch
{imports}


class Trainer:
    def __init__(self, model, settings: {annotation}, loader):
        self.settings = settings
        self.model = model.to(getattr(torch, self.settings.{field}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.loader = loader

    def train(self):
        for x in self.loader:
            self.optimizer.zero_grad()
            self.model(x).mean().backward()
            self.optimizer.step()
"""
OWN = "from dataclasses import dataclass\nfrom settings import Settings\n\n\n@dataclass\nclass All:\n    weights: Settings"


def rules(folder: Path, dtype: str, program: str) -> list[tuple[str, str]]:
    (folder / "pyproject.toml").touch()
    (folder / "settings.py").write_text(SETTINGS.format(dtype=dtype))
    (folder / "train.py").write_text(program)
    return [
        (each.rule, each.confidence) for each in check([str(folder / "train.py")], select=["master-weights"]).findings
    ]


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
@pytest.mark.parametrize("annotation", ["Settings", '"Settings"', "Settings | None", "Optional[Settings]"])
def test_a_parameter_has_the_defaults_of_the_class_that_annotates_it(
    tmp_path: Path, annotation: str, dtype: str, told: bool
) -> None:
    program = TRAIN.format(
        imports="from typing import Optional\nfrom settings import Settings", annotation=annotation, field="width"
    )
    assert rules(tmp_path, dtype, program) == [("bf16-only-weights", "certain")] * told


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
def test_a_field_that_is_an_object_of_settings_has_its_defaults(tmp_path: Path, dtype: str, told: bool) -> None:
    program = TRAIN.format(imports=OWN, annotation="All", field="weights.width")
    assert rules(tmp_path, dtype, program) == [("bf16-only-weights", "certain")] * told


MAIN = """
import torch
{imports}
from settings import OptimSettings, Settings


def main(model, loader):
    {make}
    model = model.to(getattr(torch, settings.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
"""
BOTH = "transformers.HfArgumentParser((OptimSettings, Settings)).parse_args_into_dataclasses()"
ALONE = "transformers.HfArgumentParser(Settings).parse_args_into_dataclasses()[0]"


@pytest.mark.parametrize(("dtype", "told"), [("bfloat16", True), ("float32", False)])
@pytest.mark.parametrize(
    ("imports", "make"),
    [
        ("import tyro", "settings = tyro.cli(Settings)"),
        ("import transformers", f"optim, settings = {BOTH}"),
        ("import transformers", f"settings = {ALONE}"),
    ],
)
def test_a_parser_that_is_handed_classes_gives_objects_of_them(
    tmp_path: Path, imports: str, make: str, dtype: str, told: bool
) -> None:
    program = MAIN.format(imports=imports, make=make)
    assert rules(tmp_path, dtype, program) == [("bf16-only-weights", "certain")] * told


def test_what_a_program_gives_a_field_is_not_its_default(tmp_path: Path) -> None:
    program = MAIN.format(imports="", make='settings = Settings(width="float32")')
    assert rules(tmp_path, "bfloat16", program) == []


def test_a_class_with_a_constructor_says_nothing_by_its_fields(tmp_path: Path) -> None:
    own = "class Settings:\n    width: str = 'bfloat16'\n\n    def __init__(self, width):\n        self.width = width"
    program = TRAIN.format(imports=own, annotation="Settings", field="width")
    assert rules(tmp_path, "float32", program) == []
