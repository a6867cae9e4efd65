"""How gradients are summed over ranks: a sum in half loses more the more ranks there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.checks.half_arithmetic import hit, short
from precisionlint.checks.half_limits import cast_to_half
from precisionlint.recipes import Recipe
from precisionlint.valueflow import VIEWS, Called, find, known_half

FAMILY = Family(Automaton("data-parallel", None))


LOST = {
    "fp16": "in fp16 sums above 65504 become inf and small gradients 0",
    "bf16": "in bf16 each addition rounds the sum to 8 bits, and the error grows with the number of ranks",
}
SUMMED = {
    "torch.distributed.all_reduce": 0,
    "torch.distributed.reduce": 0,
    "torch.distributed.reduce_scatter_tensor": 1,
}
"""Collectives that add up, and which of their arguments."""


@FAMILY.rule("half-gradient-reduction", Recipe, Called)
def half_gradient_reduction(state: None, event: Recipe | Called) -> Iterator[Any]:
    if isinstance(event, Called):
        yield from by_hand(event)
        return
    recipe, dtype = event, event.reduces
    if dtype is None or not dtype.half:
        return
    lost = LOST[dtype.half]
    yield Hit(
        "half-gradient-reduction",
        dtype.at,
        f"gradients {'are' if recipe.sure else 'can be'} summed over ranks in {dtype.half}: {lost}; reduce them in fp32",
        (),
        fix=Remedy((Change("argument", dtype.at, dtype.name, "torch.float32"),))
        if str(dtype.value).startswith("torch.")
        else None,
        confidence="possible" if recipe.left else "certain" if recipe.sure else "likely",
    )


def by_hand(event: Called) -> Iterator[Any]:
    """``dist.all_reduce(p.grad.half())``; a hook's bucket is told where the hook is registered."""
    call = event.value
    summed = call.option("tensor", SUMMED[call.name]) if call.name in SUMMED else None
    if summed is None or not known_half(summed.dtypes) or event.scope.kind == "test":
        return
    cast = find(summed, cast_to_half, lambda value: value.op not in VIEWS | {"cast", "div", "mul", "cat"}, 16)
    gradient = find(cast, lambda value: value.op == "gradient", limit=16) if cast is not None else None
    if cast is None or gradient is None or gradient.name == "buffer":
        return
    name = short(cast.dtypes)
    yield hit(
        "half-gradient-reduction",
        call,
        "likely",
        f"gradients are summed over ranks in {name}: {LOST.get(name, LOST['bf16'])}; reduce them in fp32",
        (),
        (Seen(cast.at, f"gradients become {name}"),),
    )
