"""How gradients are summed over ranks: a sum in half loses more the more ranks there are."""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy
from precisionlint.recipes import Recipe

FAMILY = Family(Automaton("data-parallel", None))


@FAMILY.rule("half-gradient-reduction", Recipe)
def half_gradient_reduction(state: None, recipe: Recipe) -> Iterator[Hit]:
    dtype = recipe.reduces
    if dtype is None or not dtype.half:
        return
    lost = (
        "in fp16 sums above 65504 become inf and small gradients 0"
        if dtype.half == "fp16"
        else "in bf16 each addition rounds the sum to 8 bits, and the error grows with the number of ranks"
    )
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
