"""Settings that others may change, or that hold for a part of the weights only: possible, and nothing of their sound relatives."""

from pathlib import Path

import pytest

from precisionlint import check

REDUCER = """
import torch


class Reducer:
    def __init__(self, parameters, communication_data_type={default}):
        self.parameters, self.dtype = parameters, communication_data_type
"""
WRAPPED = """
import torch
from wrappers import create_ddp_model


def wrap(model, cfg, fp16_compression=False):
    return create_ddp_model(model, fp16_compression={switch})
"""
TRAINER = """
model:
  freeze_params: {frozen}
  modality_adapter:
    width: 512
  {adapters}: {rank}
  optimizer:
    _target_: torch.optim.AdamW
    lr: 3e-4
trainer:
  precision: bf16-true
"""


def said(path: Path, text: str) -> list[tuple[str, str, int]]:
    path.write_text(text.lstrip("\n"))
    report = check([path.as_posix()], select=["all"], min_confidence="possible")
    return [(each.rule, each.confidence, each.place.line) for each in report.findings]


@pytest.mark.parametrize(("default", "told"), [("torch.float16", True), ("torch.float32", False), ("None", False)])
def test_sums_over_ranks_that_are_half_by_default(tmp_path: Path, default: str, told: bool) -> None:
    found = said(tmp_path / "reducer.py", REDUCER.format(default=default))
    assert found == ([("half-gradient-reduction", "possible", 5)] if told else [])


@pytest.mark.parametrize(
    ("switch", "told"),
    [("cfg.fp16_gradients", True), ('cfg["fp16"]', True), ("fp16_compression", False), ("False", False)],
)
def test_a_hook_that_a_setting_decides(tmp_path: Path, switch: str, told: bool) -> None:
    found = said(tmp_path / "wrap.py", WRAPPED.format(switch=switch))
    assert found == ([("half-gradient-reduction", "possible", 6)] if told else [])


TIED = """
from torch.distributed.fsdp import MixedPrecision
from wrapping import build_fsdp

def wrap(model, cfg):
    dtype = parse_precision(cfg.precision) if cfg.amp else None
    return build_fsdp(model, param_dtype=dtype, reduce_dtype={sums})
"""


@pytest.mark.parametrize(
    ("sums", "told"), [("dtype", True), ("cfg.sums", False), ("torch.float32", False), ("None", False)]
)
def test_sums_in_the_dtype_of_the_computation_that_another_wraps(tmp_path: Path, sums: str, told: bool) -> None:
    found = said(tmp_path / "hook.py", TIED.format(sums=sums))
    assert found == ([("half-gradient-reduction", "possible", 6)] if told else [])


TABLE = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

HOOKS = {{
    "wide": allreduce_hook,
    "narrow": {hook},
}}


def chosen(name):
    return HOOKS[name]
"""


@pytest.mark.parametrize(("hook", "told"), [("bf16_compress_hook", True), ("allreduce_hook", False)])
def test_a_table_of_hooks_that_another_file_chooses_from(tmp_path: Path, hook: str, told: bool) -> None:
    found = said(tmp_path / "hooks.py", TABLE.format(hook=hook))
    assert found == ([("half-gradient-reduction", "possible", 5)] if told else [])


@pytest.mark.parametrize(
    ("frozen", "adapters", "rank", "confidence"),
    [
        ('["^codec.+$"]', "heads", 8, "possible"),
        ("null", "heads", 8, "certain"),
        ("null", "lora", 8, ""),
        ('["^llm.+$"]', "adapter", 8, ""),
    ],
)
def test_true_precision_of_what_is_not_frozen(
    tmp_path: Path, frozen: str, adapters: str, rank: int, confidence: str
) -> None:
    found = said(tmp_path / "train.yaml", TRAINER.format(frozen=frozen, adapters=adapters, rank=rank))
    assert found == ([("lightning-true-precision", confidence, 10)] if confidence else [])


CHOSEN = """
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs

accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.{kind})])
"""


@pytest.mark.parametrize(("kind", "told"), [("BF16", True), ("NO", False)])
def test_a_hook_that_an_enumeration_names(tmp_path: Path, kind: str, told: bool) -> None:
    found = said(tmp_path / "launch.py", CHOSEN.format(kind=kind))
    assert found == ([("half-gradient-reduction", "certain", 3)] if told else [])
