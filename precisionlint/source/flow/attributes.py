"""What attributes of tensors and of torch's modules are."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.patterns import regex
from precisionlint.source.flow.words import wants_wide_gradients
from precisionlint.valueflow import HALF, NUMBER, UNKNOWN, WEIGHTS, WIDE, Value

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

CONFIGURATION = regex(r"(?:^|_)(?:cfg|conf|config|args|hparams)$")
SIZES = frozenset({"shape", "device", "ndim", "is_cuda", "size", "requires_grad", "layout", "itemsize", "nbytes"})
WEIGHED = frozenset({"weight", "bias"})
"""What torch's modules call their parameters."""


def told(obj: Value, name: str) -> bool:
    """Whether something is known of an attribute: of a module of torch's, its parameters."""
    if obj.op == "module":
        return name == "dtype" or name in WEIGHED
    return obj.op not in ("builtin", "constructed", "unknown") or name == "dtype"


def attribute(frame: Frame, obj: Value, name: str, node: ast.AST) -> Value:
    """An attribute of a tensor, or of something that may hold tensors."""
    at = frame.at(node)
    if obj.op == "module" and name in WEIGHED:
        return Value("parameter", (), WEIGHTS, at, name)
    if name == "dtype":
        return Value("dtype_of", (obj,), UNKNOWN, at, "dtype")
    if name in SIZES:
        return Value("size", (obj,), NUMBER, at, name)
    if name == "grad":
        known = obj.dtypes <= HALF | WIDE  # as where its weight was asked for its dtype
        wide = frame.function is not None and wants_wide_gradients(frame.function.node)
        return Value(
            "gradient", (obj,), frozenset({"float32"}) if wide else obj.dtypes if known else WEIGHTS, at, "grad"
        )
    if name in ("T", "mT", "H", "mH", "data"):
        return Value("view", (obj,), obj.dtypes, at, name)
    if name in ("min", "max", "eps", "tiny", "smallest_normal", "resolution") and obj.op in ("finfo", "iinfo"):
        return Value("limit", (obj,), NUMBER, at, name)
    # What a configuration holds is a number, a name or a dtype: it lends no tensor its own.
    held = obj.op in ("input", "attribute", "view") and CONFIGURATION.search(obj.name)
    dtypes = NUMBER if held else obj.dtypes
    return Value("attribute", (obj,), dtypes, at, name)
