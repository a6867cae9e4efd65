"""The checks: each rule once, for both front ends. They read events and know neither syntax trees nor tensors."""

from __future__ import annotations

from precisionlint.checks import (
    autocast,
    custom_ops,
    data_parallel,
    jax,
    loss_scaling,
    master_weights,
    matmul_precision,
    trainers,
)
from precisionlint.checks.base import Check, Evidence, Hit, Judge, Seen

FAMILIES = (
    loss_scaling.FAMILY,
    master_weights.FAMILY,
    autocast.FAMILY,
    custom_ops.FAMILY,
    matmul_precision.FAMILY,
    data_parallel.FAMILY,
    trainers.FAMILY,
    jax.FAMILY,
)

RULES: dict[str, Check] = {check.rule: check for family in FAMILIES for check in family.checks}
"""Rule name -> its check."""

__all__ = ["RULES", "Check", "Evidence", "Hit", "Judge", "Seen"]
