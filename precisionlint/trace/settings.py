"""The global settings that decide how matrix products and casts run, read without changing any.

The new fp32 switches come first: once one of them was set, reading a legacy one raises, which is then said in place of
its value.
"""

from __future__ import annotations

from typing import Any

import torch

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
            value = f"not readable: {str(error).splitlines()[0]}"
        found[name] = str(value)
    try:
        found["torch.get_float32_matmul_precision()"] = torch.get_float32_matmul_precision()
    except RuntimeError as error:
        found["torch.get_float32_matmul_precision()"] = f"not readable: {str(error).splitlines()[0]}"
    found["torch.get_default_dtype()"] = str(torch.get_default_dtype()).removeprefix("torch.")
    return found


def matmul_meaning(settings: dict[str, str], devices: set[str]) -> list[str]:
    """What the settings mean for the matrix products of a step on these devices, in sentences."""
    said = []
    if "cuda" in devices:
        tf32 = (
            settings.get("torch.backends.cuda.matmul.fp32_precision") == "tf32"
            or settings.get("torch.backends.cuda.matmul.allow_tf32") == "True"
        )
        said.append(
            "fp32 products on CUDA run in TF32"
            if tf32
            else "fp32 products on CUDA run in full fp32, outside the tensor cores"
        )
        for name, dtype in (("bf16", "bf16"), ("fp16", "fp16")):
            if settings.get(f"torch.backends.cuda.matmul.allow_{name}_reduced_precision_reduction", "").startswith(
                ("True", "(True")
            ):
                said.append(f"{dtype} products on CUDA may add partial sums in {dtype}")
    if "cpu" in devices:
        precision = settings.get("torch.backends.mkldnn.matmul.fp32_precision", "none")
        said.append(
            f"fp32 products on the CPU may run in {precision}"
            if precision in ("bf16", "tf32")
            else "fp32 products on the CPU run in fp32"
        )
    return said
