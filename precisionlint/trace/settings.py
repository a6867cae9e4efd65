"""The global settings that decide how matrix products and casts run, read without changing any, and what they mean for
the products of a step.

The new fp32 switches come first: once one of them was set, reading a legacy one raises, which is then said in place of
its value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from precisionlint.audit_report import OpRecord

SETTINGS = (
    "torch.backends.fp32_precision",
    "torch.backends.cuda.matmul.fp32_precision",
    "torch.backends.cudnn.conv.fp32_precision",
    "torch.backends.mkldnn.matmul.fp32_precision",
    "torch.backends.cuda.matmul.allow_tf32",
    "torch.backends.cudnn.allow_tf32",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cudnn.benchmark",
)
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
FP32_SWITCHES = {
    ("cuda", False): ("torch.backends.cuda.matmul.fp32_precision", "torch.backends.cuda.matmul.allow_tf32"),
    ("cuda", True): ("torch.backends.cudnn.conv.fp32_precision", "torch.backends.cudnn.allow_tf32"),
    ("cpu", False): ("torch.backends.mkldnn.matmul.fp32_precision", ""),
    ("cpu", True): ("torch.backends.mkldnn.matmul.fp32_precision", ""),
}
"""Device, and whether it is a convolution -> the switch of its fp32 products, and the legacy one."""


def read() -> dict[str, str]:
    """Every setting that this torch has, by its full name, as text."""
    found: dict[str, str] = {}
    for name in SETTINGS:
        value: Any = torch
        try:
            for part in name.split(".")[1:]:
                value = getattr(value, part)
        except (AttributeError, AssertionError):
            continue  # not in this version
        except RuntimeError as error:
            value = unreadable(error)
        found[name] = str(value)
    try:
        found["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        found["torch.get_float32_matmul_precision()"] = unreadable(error)
    found["torch.get_default_dtype()"] = str(torch.get_default_dtype()).removeprefix("torch.")
    return found


def unreadable(error: RuntimeError) -> str:
    """What stands in place of a legacy setting that raises since a new one was set."""
    mixed = "mix of the legacy and new APIs" in str(error)
    return "not readable: fp32_precision was set" if mixed else f"not readable: {str(error).splitlines()[0]}"


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """The settings that a step has changed, as sentences."""
    for name, value in after.items():
        if before.get(name, value) != value:
            yield f"{name} changed in the step, from {before[name]} to {value}"


def meaning(settings: Mapping[str, str], ops: Iterable[OpRecord]) -> Iterator[str]:
    """What the settings mean for the products that ran, in sentences."""
    counts: dict[tuple[str, bool, str], int] = {}
    for op in ops:
        if op.family in ("matmul", "attention") and op.device in ("cpu", "cuda"):
            key = (op.device, "conv" in op.op, next((each for each in op.inputs if each in SHORT), ""))
            counts[key] = counts.get(key, 0) + op.count
    for (device, convolution, dtype), count in sorted(counts.items()):
        what = "convolutions" if convolution else "products"
        said = f"{count} {SHORT.get(dtype, '')} {what} {'on CUDA' if device == 'cuda' else 'on the CPU'}"
        if dtype == "float32":
            yield f"{said} {_fp32(settings, device, convolution)}"
        elif device == "cuda" and dtype and not convolution:  # cuDNN knows no switch for partial sums
            yield from (f"{said} {may}" for may in _half(settings, SHORT[dtype]))
    default = settings.get("torch.get_default_dtype()", "float32")
    if default != "float32":
        yield f"tensors made without a dtype are {default}: counters, tables and buffers too"


def _fp32(settings: Mapping[str, str], device: str, convolution: bool) -> str:
    """How fp32 products run; a switch that is ``none`` follows the one above it."""
    switch, legacy = FP32_SWITCHES[device, convolution]
    precision = settings.get(switch, "none")
    if precision == "none":
        precision = settings.get("torch.backends.fp32_precision", "none")
    if precision == "none" and settings.get(legacy) == "True":
        precision = "tf32"
    if switch not in settings and device == "cpu" and settings.get("torch.get_float32_matmul_precision()") == "medium":
        precision = "bf16"  # before torch 2.9
    if device == "cpu":
        return f"may run in {precision}" if precision in ("bf16", "tf32") else "run in fp32"
    return "run in TF32" if precision == "tf32" else "run in full fp32, outside the tensor cores"


def _half(settings: Mapping[str, str], short: str) -> Iterator[str]:
    """What half products on CUDA may do with partial sums."""
    if short == "fp16" and settings.get("torch.backends.cuda.matmul.allow_fp16_accumulation") == "True":
        yield "may accumulate in fp16"
    name = f"torch.backends.cuda.matmul.allow_{short}_reduced_precision_reduction"
    if settings.get(name, "").startswith(("True", "(True")):
        yield f"may add partial sums in {short}"
