"""Where gradients are summed: over micro-batches, in the dtype of what holds them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from precisionlint.checks.base import Evidence, Family, Hit, Seen, frozen
from precisionlint.checks.half_arithmetic import hit, kept_in, short
from precisionlint.checks.half_sums import EMPTIED, added_up, is_gradient
from precisionlint.checks.master_weights import AUTOMATON, HALF, SIGNIFICANT, Storage, Took, halves
from precisionlint.events import Backward, Named, Weights, ZeroGrad, overlap
from precisionlint.facts import GradientSum
from precisionlint.findings import Confidence
from precisionlint.recipes import UNKNOWN, Recipe
from precisionlint.recipes import Setting as Choice
from precisionlint.valueflow import VIEWS, Computed, Shows, find, known_half, sources

MANY = 4

FAMILY = Family(AUTOMATON)


@FAMILY.rule("half-gradient-accumulation", Recipe, Backward, ZeroGrad, GradientSum, Computed, ops=("add",))
def half_gradient_accumulation(
    storage: Storage, event: Recipe | Backward | ZeroGrad | GradientSum | Computed
) -> Iterator[Any]:
    if isinstance(event, GradientSum):
        yield kept(event)
    elif isinstance(event, Computed):
        yield from by_chunks(event)
        yield from by_hand(event)
    elif isinstance(event, ZeroGrad):
        if event.optimizer is not None:
            yield Evidence(zeroed(event.optimizer))
    else:
        yield from summed(storage, event) if isinstance(event, Backward) else configured(event)


def kept(event: GradientSum) -> Hit:
    """A sum of the program's own: what its gradients are in is their parameters' affair."""
    where = f"in the dtype of '{event.like}'" if event.like else "in their own dtype"
    return Hit(
        "half-gradient-accumulation",
        event.at,
        f"'{event.name}' sums gradients of several backward passes {where}: where that is half, each addition rounds the sum, to 8 bits in "
        "bf16; keep the sum in fp32",
        (),
        confidence="possible",
    )


def by_chunks(event: Computed) -> Iterator[Hit]:
    """``total = torch.zeros_like(weight)`` and in a loop ``total += errors.T @ rows``: a program's own backward, chunk by chunk."""
    found = added_up(event)
    if found is not None and is_gradient(found[0]):
        made, term = found
        yield hit(
            "half-gradient-accumulation",
            made,
            "possible",
            f"the gradient of a weight is added up over chunks in {kept_in('possible', made.dtypes)}: where that is half, each addition rounds "
            "the sum, to 8 bits in bf16; make the total with dtype=torch.float32, and cast it once",
            (Shows("half"),),
            (Seen(term.at, "what is added"), Seen(event.value.at, "added up")),
        )


def by_hand(event: Computed) -> Iterator[Hit]:
    """``sums = [torch.zeros_like(p, dtype=torch.bfloat16) …]`` and after each backward ``total.add_(p.grad)``."""
    value = event.value
    if not value.name.startswith("in-place") or not known_half(value.dtypes) or event.scope.kind == "test":
        return
    total, term = value.inputs
    made = next((each for each in sources(total) if each.op in EMPTIED and "dtype" in each.options), None)
    gradient = find(term, lambda v: v.op == "gradient", lambda v: v.op not in VIEWS | {"cast", "div", "mul"}, 16)
    if made is None or gradient is None:
        return
    name = short(value.dtypes)
    yield hit(
        "half-gradient-accumulation",
        made,
        "likely",
        f"gradients are summed in {name}, the dtype that is chosen here: each addition rounds the sum to {SIGNIFICANT.get(name, 8)} bits; keep the "
        "sum in fp32",
        (),
        (Seen(value.at, "gradients are added to it"),),
    )


def zeroed(optimizer: Named) -> tuple[str, Any]:
    """The fact that a program itself sets an optimizer's gradients to zero: else what it is handed to may."""
    return ("gradients set to zero", optimizer.id)


def configured(recipe: Recipe) -> Iterator[Hit]:
    """Micro-batches summed in half, from four an update on: the sum of fewer is rounded at most twice. A number that is set elsewhere is
    likely to be one of them."""
    dtype, steps = recipe.accumulates, recipe.steps
    if recipe.framework == "Megatron" and dtype is not None and dtype.half:
        yield Hit(
            "half-gradient-accumulation",
            dtype.at,
            f"'{dtype.name}': gradients are summed in {dtype.half}, over micro-batches and over ranks, where Megatron keeps fp32 sums if it is "
            f"not told otherwise: each addition rounds the sum to {SIGNIFICANT[dtype.half]} bits",
            (Seen(recipe.bf16.at, "bf16 is on"),) if recipe.bf16 is not None else (),
        )
    elif dtype is None or not dtype.half or steps is None:
        return
    else:
        yield from over_micro_batches(dtype, steps, recipe.unasked)


def over_micro_batches(dtype: Choice, steps: Choice, unasked: bool) -> Iterator[Hit]:
    number = steps.number
    if (number is None and (unasked or steps.value is not UNKNOWN)) or (number is not None and number < MANY):
        return
    many = (
        f"the gradients of {number:g} micro-batches" if number is not None else "the gradients of several micro-batches"
    )
    yield Hit(
        "half-gradient-accumulation",
        dtype.at,
        f"{many} are summed in {dtype.half}: each addition rounds the sum to {SIGNIFICANT[dtype.half]} bits; "
        + (
            "DeepSpeed takes the dtype of the computation where data_types.grad_accum_dtype is not given, 'fp32' keeps the sum"
            if unasked
            else "keep the sum in fp32"
        ),
        (
            Seen(
                steps.at,
                f"{number:g} micro-batches an update"
                if number is not None
                else "micro-batches an update: set elsewhere",
            ),
        ),
        confidence="possible" if unasked else "certain" if number is not None else "likely",
    )


def summed(storage: Storage, event: Backward) -> Iterator[Hit]:
    """A backward that adds to gradients of half weights, which stand since the turn of the loop before. Where the optimizer steps these
    weights themselves, another rule asks for fp32 ones, whose gradients are."""
    if not storage.turned or storage.stand is None:
        return
    for masters in storage.masters:
        for took in reached(storage, event, masters.weights):
            yield added(storage.stand, event, took, masters.weights, "certain")
    for own in storage.owned:
        for took in reached(storage, event, own.weights):
            yield replace(added(storage.stand, event, took, own.weights, "possible"), needs=(zeroed(own.optimizer),))


def reached(storage: Storage, event: Backward, weights: Weights) -> list[Took]:
    """How weights came to be in half whose gradients a backward adds to."""
    if overlap(event.weights, weights) is False:
        return []
    return [took for took in halves(storage, weights) if not took.by and not took.sharded]


def added(before: Seen, event: Backward, took: Took, weights: Weights, confidence: Confidence) -> Hit:
    name = HALF[took.dtype]
    return Hit(
        "half-gradient-accumulation",
        event.at,
        f"gradients of several backward passes are summed in {name}, the dtype of the weights: each addition rounds the sum to "
        f"{SIGNIFICANT[name]} bits; keep the weights in fp32 and use autocast, or add the gradients up in fp32",
        (took.seen, before, Seen(event.at, "added to what stands there, a turn of the loop later", event.when)),
        confidence=confidence,
        unless=frozen(weights),
    )
