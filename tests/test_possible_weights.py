"""Weights that are half and trained unless whoever starts the program says otherwise: possible, and nothing of its sound relatives."""

from pathlib import Path

import pytest

from precisionlint import check

SCRIPT = """
import torch
import transformers
from peft import LoraConfig, get_peft_model

from house.training import PatientTrainer


def main():
    parser = transformers.HfArgumentParser((transformers.TrainingArguments,))
    options, arguments = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.base, {dtype})
    {between}
    trainer = {trainer}(model=model, args=arguments, train_dataset=load(options.data))
    trainer.train()


main()
"""
HALF = "torch_dtype=torch.bfloat16"


def said(folder: Path, text: str) -> list[tuple[str, str, int]]:
    (folder / "finetune.py").write_text(text)
    report = check(
        [(folder / "finetune.py").as_posix()], select=["trainers", "master-weights"], min_confidence="possible"
    )
    assert not report.errors
    return [(each.rule, each.confidence, each.place.line) for each in report.findings]


@pytest.mark.parametrize(
    ("trainer", "between"),
    [
        ("transformers.Trainer", ""),
        ("PatientTrainer", "model.config.use_cache = False"),
        ("transformers.Trainer", "if options.adapters:\n        model = get_peft_model(model, LoraConfig())"),
    ],
)
def test_a_half_load_whose_arguments_come_from_outside_is_possible(tmp_path: Path, trainer: str, between: str) -> None:
    text = SCRIPT.format(trainer=trainer, between=between, dtype=HALF)
    assert said(tmp_path, text) == [("hf-half-load", "possible", 12)]
    assert check([(tmp_path / "finetune.py").as_posix()], select=["trainers", "master-weights"]).findings == ()


@pytest.mark.parametrize(
    ("between", "dtype"),
    [
        ("", "torch_dtype=torch.float32"),
        ("", "attn_implementation='sdpa'"),
        ("", f"{HALF}, load_in_8bit=True"),
        ("model = get_peft_model(model, LoraConfig())", HALF),
        ("model.requires_grad_(False)", HALF),
        ("model = model.float()", HALF),
    ],
)
def test_what_is_fp32_frozen_or_adapted_is_not_told(tmp_path: Path, between: str, dtype: str) -> None:
    assert said(tmp_path, SCRIPT.format(trainer="transformers.Trainer", between=between, dtype=dtype)) == []


PARTLY = """
import torch
from transformers import AutoModel, Trainer, TrainingArguments


class Encoder:
    def __init__(self, name, dtype=None):
        self.backbone = AutoModel.from_pretrained(name, torch_dtype={dtype})

    def fit(self, data, more):
        arguments = TrainingArguments("out", {settings})
        trainer = Trainer(model=self.backbone, args=arguments, train_dataset=data)
        trainer.train()
"""


@pytest.mark.parametrize(
    ("dtype", "settings", "confidence"),
    [
        ("dtype or torch.float16", "fp16=True", "certain"),
        ("dtype or torch.float16", "fp16=True, **more", "possible"),
        ("torch.bfloat16", "bf16=True, **more", "possible"),
        ("torch.bfloat16", "bf16=True, optim='adafactor', **more", ""),
        ("torch.bfloat16", "bf16=True, deepspeed='zero2.json', **more", ""),
        ("dtype or torch.float32", "fp16=True, **more", ""),
        ("dtype", "fp16=True", ""),
    ],
)
def test_what_is_half_unless_a_dtype_is_given_and_settings_of_which_some_are_known(
    tmp_path: Path, dtype: str, settings: str, confidence: str
) -> None:
    text = PARTLY.format(dtype=dtype, settings=settings)
    assert said(tmp_path, text) == ([("hf-half-load", confidence, 8)] if confidence else [])


WRAPPED = """
import torch
from transformers import AutoModelForCausalLM

from house.parallel import inject_lora, prepare, split_weights


def main(options, loader):
    model = AutoModelForCausalLM.from_pretrained(options.base){half}
    {before}
    {wraps}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("half", "before", "wraps", "told"),
    [
        (".to(torch.bfloat16)", "", "model = prepare(model, options)", True),
        (".half().cuda()", "", "model, plan = split_weights(model, options)", True),
        (".cuda()", "", "model = prepare(model, options)", False),
        (".half()", "model = model.float()", "model = prepare(model, options)", False),
        (".half()", "model.requires_grad_(False)", "model = prepare(model, options)", False),
        (".half()", "", "model = inject_lora(model, rank=8)", False),
    ],
)
def test_half_weights_in_what_something_unread_made_of_a_model_are_possible(
    tmp_path: Path, half: str, before: str, wraps: str, told: bool
) -> None:
    found = said(tmp_path, WRAPPED.format(half=half, before=before, wraps=wraps))
    assert found == ([("bf16-only-weights", "possible", 9)] if told else [])


NAMED = """
import torch
from torch import nn, optim


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(100, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 100)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.norm(self.table(x))).float(), y)


def main(settings, loader):
    model = Net(64).cuda(){half}
    {between}
    optimizer = {optimizer}
    for x, y in loader:
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main(read(), load())
"""
BACK = "for part in model.modules():\n        if isinstance(part, nn.LayerNorm):\n            part.float()"


@pytest.mark.parametrize(
    ("half", "between", "optimizer", "told"),
    [
        (".bfloat16()", "", "getattr(torch.optim, settings.name)(model.parameters(), lr=1e-5)", "certain"),
        (".bfloat16()", "make = getattr(optim, settings['kind'])", "make(model.parameters(), lr=1e-5)", "certain"),
        (".bfloat16()", BACK, "getattr(optim, settings.name)(model.parameters(), lr=1e-5)", "certain"),
        (".bfloat16()", "", "optim.Adam([model.table.weight], lr=1e-5)", "certain"),
        (".bfloat16()", BACK, "optim.Adam([model.table.weight], lr=1e-5)", "possible"),
        (".bfloat16()", "model.head.float()", "optim.Adam([model.head.weight, model.head.bias], lr=1e-5)", ""),
        (".bfloat16()", "", "getattr(torch.optim.lr_scheduler, settings.name)(model.parameters())", ""),
        (".bfloat16()", "", "getattr(settings.house, settings.name)(model.parameters(), lr=1e-5)", ""),
        ("", "", "getattr(torch.optim, settings.name)(model.parameters(), lr=1e-5)", ""),
        ("", "", "optim.Adam([model.table.weight], lr=1e-5)", ""),
    ],
)
def test_optimizers_by_name_and_over_single_parameters(
    tmp_path: Path, half: str, between: str, optimizer: str, told: str
) -> None:
    found = said(tmp_path, NAMED.format(half=half, between=between, optimizer=optimizer))
    assert found == ([("bf16-only-weights", told, 18)] if told else [])


ELSEWHERE = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, {names}
from {house} import Trainer


def main(data):
    model = GPT2LMHeadModel(GPT2Config()){cast}
    {between}
    arguments = TrainingArguments("out", {settings})
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
"""


@pytest.mark.parametrize(
    ("house", "cast", "between", "settings", "confidence"),
    [
        ("transformers", ".to(torch.bfloat16).cuda()", "", "bf16=True", "certain"),
        ("house.training", ".to(torch.bfloat16).cuda()", "", "bf16=True", "possible"),
        ("house.training", ".half()", "", "fp16=True", "possible"),
        ("house.training", "", "", "bf16=True", ""),
        ("house.training", ".bfloat16()", "model = model.float()", "bf16=True", ""),
        ("house.training", ".bfloat16()", "", "bf16=True, deepspeed='zero2.json'", ""),
        ("house.training", ".bfloat16()", "", "bf16=True, optim='adamw_bnb_8bit'", ""),
        ("transformers", ".to('cuda')", "", "bf16=True", ""),
    ],
)
def test_a_model_that_is_cast_and_handed_to_a_trainer(
    tmp_path: Path, house: str, cast: str, between: str, settings: str, confidence: str
) -> None:
    text = ELSEWHERE.format(names="TrainingArguments", house=house, cast=cast, between=between, settings=settings)
    assert said(tmp_path, text) == ([("hf-half-load", confidence, 8)] if confidence else [])
