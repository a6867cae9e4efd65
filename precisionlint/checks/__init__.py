"""The checks: each rule once, for both front ends. They read events and know neither syntax trees nor tensors."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

from precisionlint import plugins
from precisionlint.checks import (
    autocast,
    averages,
    custom_ops,
    data_parallel,
    fp8,
    gradient_sums,
    half_arithmetic,
    half_limits,
    half_moments,
    half_norms,
    half_positions,
    half_products,
    half_range,
    half_sums,
    half_variance,
    jax,
    loss_scaling,
    master_weights,
    matmul_precision,
    scaler_objects,
    tests,
    trainers,
    triton,
)
from precisionlint.checks.base import Automaton, Change, Check, Evidence, Family, Hit, Judge, Remedy, Seen

FAMILIES = (
    loss_scaling.FAMILY,
    scaler_objects.FAMILY,
    master_weights.FAMILY,
    averages.FAMILY,
    gradient_sums.FAMILY,
    autocast.FAMILY,
    custom_ops.FAMILY,
    half_arithmetic.FAMILY,
    half_limits.FAMILY,
    half_moments.FAMILY,
    half_norms.FAMILY,
    half_positions.FAMILY,
    half_products.FAMILY,
    half_range.FAMILY,
    half_sums.FAMILY,
    half_variance.FAMILY,
    matmul_precision.FAMILY,
    data_parallel.FAMILY,
    trainers.FAMILY,
    jax.FAMILY,
    triton.FAMILY,
    fp8.FAMILY,
    tests.FAMILY,
)

RULES: dict[str, Check] = {check.rule: check for family in FAMILIES for check in family.checks}
"""Rule name -> its check, of this program's own."""


@cache
def all_rules() -> Mapping[str, Check]:
    """Rule name -> its check, those of plugins too. Raises plugins.PluginError for one that does not keep its contract."""
    rules = dict(RULES)
    automata = {check.automaton.name for check in RULES.values()}
    for plugin in plugins.installed():
        own = {check.rule: check for family in _families(plugin) for check in family.checks}
        pages = {page.stem for page in plugin.pages.glob("*/*.md")}
        if lone := sorted(own.keys() ^ pages):
            raise plugin.wrong(f"the rule {lone[0]} has {'no page' if lone[0] in own else 'a page and no check'}")
        if taken := sorted(automata & {check.automaton.name for check in own.values()}):
            raise plugin.wrong(f"another family's automaton is called {taken[0]} already")
        automata |= {check.automaton.name for check in own.values()}
        rules |= own
    return rules


def _families(plugin: plugins.Plugin) -> tuple[Family, ...]:
    try:
        families = tuple(importlib.import_module(plugin.module).FAMILIES)
    except Exception as error:  # whatever a module does when it is imported
        raise plugin.wrong(f"{type(error).__name__}: {error}") from error
    if not all(isinstance(family, Family) for family in families):
        raise plugin.wrong("FAMILIES holds something that is no precisionlint.checks.Family")
    return families


__all__ = ["RULES", "Automaton", "Change", "Check", "Evidence", "Family", "Hit", "Judge", "Remedy", "Seen", "all_rules"]
