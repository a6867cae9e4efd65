"""Where the code around an autocast region puts its tensors: what says that a region for CUDA may be met on another device."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from precisionlint.patterns import regex

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

CUDA = regex(r"autocast\((?:device_type=)?['\"]cuda['\"]|torch\.cuda\.amp\b")
"""How a region says CUDA: what else does ties the code to it."""
TIES = regex(r"['\"]cuda|\.cuda\(|torch\.cuda\b")
KERNELS = regex(r"\btriton\b|cuda_runtime|cupy")
TRAINS = regex(r"GradScaler|\.backward\(")
"""A program that trains with a scaler for CUDA, or beside one, is written for it."""
PLACED = regex(r"(?:\.to\((?:device=)?|\bdevice=)((?:\w+\.)*\w*device)\b(?!\.type|\()")
"""Tensors that go to a device which is not written out."""
ASKS = regex(
    r"is_cuda|is_available|nullcontext|device_type\b(?!=)|\.type\b|['\"](?:cpu|mps|xpu|npu|hpu)|autocast_available"
)
"""What only code holds that looks at the device before it enters the region."""


def placed(frame: Frame, literal: bool) -> str:
    """The device, by its name, that the code around a region for CUDA puts its tensors on; ``"the caller's device"`` in a module that names
    none; empty where the code asks what it is, or is for CUDA alone. ``literal``: the device is an argument, and no part of the API's name."""
    function = frame.function
    if function is None or frame.scope.kind == "test":
        return ""
    data = frame.source.file.data
    if TRAINS.search(text := data.decode("utf-8", "replace")):
        return ""
    body = CUDA.sub("", ast.unparse(function.node))
    if ASKS.search(body) or TIES.search(body):
        return ""
    owner = function.owner
    found = PLACED.search(body) or (PLACED.search(ast.unparse(owner.node)) if owner is not None else None)
    if found is not None:
        return f"'{found[1]}'"
    tied = TIES.search(CUDA.sub("", text)) or KERNELS.search(text)
    return "the caller's device" if literal and frame.scope.kind == "module" and not tied else ""


def also_place(frame: Frame, device: ast.expr) -> bool:
    """Whether the code around a region puts tensors on what the region is given for its device's type."""
    if isinstance(device, ast.Call) and device.args:
        device = device.args[0]  # str(device)
    if not isinstance(device, (ast.Name, ast.Attribute)):
        return False
    used = re.compile(rf"(?:\.to\((?:\w+, )?|\bdevice=){re.escape(ast.unparse(device))}(?![\w.(])")
    function = frame.function
    if function is None:
        return False
    around = [function.node, *([function.owner.node] if function.owner is not None else [])]
    return any(used.search(ast.unparse(node)) for node in around)
