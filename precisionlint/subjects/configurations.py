"""Configuration files of training runs: JSON and YAML, as the frameworks that read them understand them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from precisionlint.patterns import regex
from precisionlint.recipes import Recipe
from precisionlint.subjects import File, deepspeed, finetuning, lightning_cli, megatron
from precisionlint.subjects.tree import tables
from precisionlint.subjects.yaml_trees import documents

FRAMEWORKS = (
    deepspeed.recipe,
    megatron.of_table,
    finetuning.torchtune,
    finetuning.llama_factory,
    finetuning.axolotl,
    finetuning.lightning,
    finetuning.instantiated,
    finetuning.nanotron,
    finetuning.main_grads,
    finetuning.accelerate,
    finetuning.accelerate_sums,
    finetuning.reduction,
)

UNTRAINED = regex(r"(?:^|_)(?:teacher|ema)(?:_|$)", re.I)
"""What a table lies under that speaks of a model which gets no gradients."""


def read(file: File) -> Iterator[Recipe]:
    """The recipes of a file; a table belongs to the first framework that knows it.

    Raises: UnreadableError.
    """
    for document in documents(file):
        off: set[int] = set()
        for table in tables(document, but=UNTRAINED):
            if (switch := table.setting("enabled")) is not None and switch.value is False:
                off.update(map(id, tables(table)))
            yield from (recipe for each in FRAMEWORKS if (recipe := each(table)) is not None)
            module = lightning_cli.recipe(table, file)
            yield from [module] if module is not None else []
            ddp = megatron.of_ddp(table, file.text) if id(table) not in off else None
            yield from [ddp] if ddp is not None else []
