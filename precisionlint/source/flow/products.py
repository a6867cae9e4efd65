"""Products of matrices that are added to something by one call: ``total.addmm_(x.mT, x)``, ``torch.addmm(total, a, b, out=total)``."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.source.flow import torch_calls
from precisionlint.source.flow.words import outlives
from precisionlint.valueflow import Value, agreed, number, same

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

ADDED = frozenset({"addmm", "baddbmm", "addbmm", "addmm_", "baddbmm_", "addbmm_", "addmv_"})
FACTORS = ("mat1", "mat2", "batch1", "batch2", "vec")


def added(frame: Frame, name: str, inputs: list[Value], options: dict[str, Value], node: ast.Call) -> Value | None:
    """The sum, whose product is told first; None where the factors are not all given here."""
    held = inputs[0]
    # ``total.addmm_(1, -2, x, x.mT)`` of old.
    factors = [
        *(inputs[3:5] if len(inputs) == 5 else inputs[1:3]),
        *(options[key] for key in FACTORS if key in options),
    ]
    if len(factors) != 2:
        return None
    dtypes = agreed([held, *factors])  # all of one dtype, or torch raises
    if not name.endswith("_"):
        dtypes = torch_calls.under_autocast(frame.scope, "matmul", dtypes)
    product = frame.made("matmul", factors, dtypes, node, name)
    beta = options.get("beta")
    if number(beta) == 0:
        return product
    if beta is not None and number(beta) != 1:  # an iteration that scales what it has is no sum over steps
        return frame.made(
            "add", (frame.made("mul", (beta, held), held.dtypes, node), product), dtypes, node, "", options
        )
    told, func, out = "", node.func, options.get("out")
    if name.endswith("_"):
        state = isinstance(func, ast.Attribute) and outlives(frame, func.value)
        told, dtypes = ("in-place state" if state else "in-place"), held.dtypes
    elif out is not None and same(out, held):
        told = "in-place"
    return frame.made("add", (held, product), dtypes, node, told, options)
