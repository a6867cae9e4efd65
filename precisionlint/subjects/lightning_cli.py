"""Lightning's command line: a configuration that names the precision and the module's class, whose file says what steps the weights."""

from __future__ import annotations

import ast
import re

from precisionlint.patterns import regex
from precisionlint.recipes import Recipe, Setting
from precisionlint.source.parsing import FunctionDef, walk
from precisionlint.subjects import File
from precisionlint.subjects.finetuning import OPTIMIZERS, TRUE_PRECISION
from precisionlint.subjects.half_models import MASTERS, is_optimizer
from precisionlint.subjects.names import argument, last_name
from precisionlint.subjects.tree import Table, constant

SPARED = regex(r"freeze|frozen|requires_grad|lora|peft|adapter", re.I)
"""What a module's file says that trains a part of the weights."""
WHOLE = regex(r"self(?:\.\w+)*\.parameters\(\)|self(?:\.\w+)*\.named_parameters\(\)")
"""The weights of the module, or of a part of it."""


def recipe(table: Table, file: File) -> Recipe | None:
    """``trainer: {precision: bf16-true}`` over ``model: {class_path: net.Module}``, whose own ``configure_optimizers`` makes a plain one."""
    precision, named = table.setting("trainer.precision"), table.text("model.class_path")
    dtype = TRUE_PRECISION.get(str(precision.value)) if precision is not None else None
    if precision is None or dtype is None or any(table.text(path) for path in OPTIMIZERS):
        return None
    if any("deepspeed" in table.text(f"trainer.strategy{part}").lower() for part in ("", ".class_path")):
        return None  # whose engine keeps masters
    module, _, name = named.rpartition(".")
    path = file.project.resolve(module, 0, file.path) if module else None
    other = file.beside(path) if path is not None else None
    if other is None or SPARED.search(other.text) or MASTERS.search(other.text):
        return None
    made = optimizer_of(other, name)
    if made is None:
        return None
    rate = argument(made, "lr", 1)
    return Recipe(
        at=table.at,
        when=(),
        framework="Lightning",
        weights=Setting(precision.name, dtype, precision.at),
        optimizer=Setting("configure_optimizers", last_name(made.func), other.place(made)),
        rate=Setting("lr", constant(rate), other.place(rate)) if rate is not None else None,
        remedy=f'"{str(precision.value).replace("true", "mixed")}" keeps them',
    )


def optimizer_of(file: File, name: str) -> ast.Call | None:
    """The plain optimizer that a class of the file makes in ``configure_optimizers``, over weights of its own."""
    for owner in file.every(ast.ClassDef):
        if owner.name == name:
            for method in owner.body:
                if isinstance(method, FunctionDef) and method.name == "configure_optimizers":
                    whole = WHOLE.search(ast.unparse(method)) is not None
                    calls = (node for node in walk(method) if isinstance(node, ast.Call) and is_optimizer(node))
                    return next(calls, None) if whole else None
    return None
