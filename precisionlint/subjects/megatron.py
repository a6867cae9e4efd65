"""What Megatron's arguments say about precision, wherever they stand: shell scripts, YAML, lists and config objects in Python.

Read in Megatron-LM's ``megatron/training/arguments.py``: with ``--bf16`` gradients are accumulated and reduced in fp32 without being asked
(``accumulate_allreduce_grads_in_fp32`` is set), so ``--bf16`` alone is right; only what asks for half sums by name is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import Recipe, Setting
from precisionlint.subjects import File
from precisionlint.subjects.tree import Scalar, Table

SUMS = ("--grad-reduce-in-bf16", "--main-grads-dtype", "--megatron-fsdp-main-grads-dtype")
"""Arguments that decide the dtype of summed gradients; the first is a switch."""
SWITCH = SUMS[0]
BF16 = regex(
    r"^\s*(?:bf16:\s*true|(?:\w*precision|params_dtype|dtype):\s*[\"']?(?:torch\.)?(?:bf16|bfloat16)\b)", re.I | re.M
)
MIXED = regex(r"^\s*mixed_precision:|bf16_mixed|bf16-mixed", re.M)
ARGUMENT = regex(r"(?<![\w$-])(--[a-z][\w-]*)(?:[ \t]*[= \t][ \t]*(?!--)([\w.+-]+))?")
COMMENT = regex(r"(?:^|(?<=\s))#.*")


def read(file: File) -> Iterator[Recipe]:
    """The recipe of a shell script, if it gives Megatron's arguments."""
    found = []
    for number, line in enumerate(file.lines, 1):
        for match in ARGUMENT.finditer(COMMENT.sub("", line)):
            name, value = match.groups()
            end = match.end(2) if value is not None and name != SWITCH else match.end(1)
            place = Place(file.display, number, match.start() + 1, number, end + 1)
            found.append(Setting(name, True if value is None or name == SWITCH else value, place))
    yield from of_arguments(found)


def of_table(table: Table) -> Recipe | None:
    """The recipe of a table whose keys are arguments (``--bf16: true``)."""
    if "--bf16" not in table and "--fp16" not in table:
        return None
    found = (
        Setting(key, entry.node.value, entry.at)
        for key, entry in table.entries.items()
        if key.startswith("--") and isinstance(entry.node, Scalar)
    )
    return next(of_arguments(setting for setting in found if setting.value is not False), None)


def of_ddp(table: Table, text: str) -> Recipe | None:
    """Megatron's gradients in the dtype of the weights (``grad_reduce_in_fp32: false``), in a configuration that says these are bf16.

    Read in ``megatron/core/distributed``: the buffers of gradients are in fp32 or in the dtype of the parameters. ``mixed_precision``,
    where there is one, decides instead.
    """
    setting = table.setting("grad_reduce_in_fp32")
    if setting is None or setting.value is not False or MIXED.search(text) or not BF16.search(text):
        return None
    sums = Setting(f"{setting.name}: false", "bf16", setting.at)
    return Recipe(at=setting.at, when=(), framework="Megatron", accumulates=sums)


def of_arguments(arguments: Iterable[Setting]) -> Iterator[Recipe]:
    """The recipe of a list of arguments, if it is one of Megatron's: in half, by one of the two switches."""
    found: dict[str, Setting] = {}
    for setting in arguments:
        found.setdefault(setting.name, setting)
    bf16, fp16 = found.get("--bf16"), found.get("--fp16")
    half = bf16 or fp16
    sums = next((found[name] for name in SUMS if name in found and (name == SWITCH or found[name].half)), None)
    if half is None or not (sums is not None or "--loss-scale" in found):
        return
    if sums is not None and sums.name == SWITCH:
        sums = Setting(sums.name, "bf16", sums.at) if bf16 is not None else None
    yield Recipe(
        at=half.at, when=(), framework="Megatron", fp16=fp16, bf16=bf16, accumulates=sums, scale=found.get("--loss-scale"),
    )  # fmt: skip
