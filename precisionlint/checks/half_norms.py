"""Arithmetic in half: norms over many tensors, of gradients and of weights. The patterns and the grades are those of ``half_arithmetic``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Remedy, Seen
from precisionlint.checks.half_arithmetic import (
    HALF_WEIGHTS,
    TRAINING,
    grade,
    hit,
    kept_in,
    operand_of_square,
    untold,
)
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    VIEWS,
    WIDE,
    Called,
    Computed,
    Scope,
    Shows,
    Value,
    may_be_half,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-norms", None))

GRADIENT = regex(r"^(?:d_p|(?:\w+_)?grads?|gradients?|grad_(?:out|in)(?:put)?s?)$")
OF_GRADIENTS = regex(r"(?:total|global|grad(?:ient)?s?)_norm|clip_grad")
"""A function that takes the norm of gradients, whatever it calls them."""


@FAMILY.rule("half-gradient-norm", Computed, Called, ops=("running_sum", "norm", "sum"))
def half_gradient_norm(state: None, event: Computed | Called) -> Iterator[Any]:
    value = event.value
    if isinstance(event, Called):
        yield from norm_by_torch(value, event.scope)
        return
    if value.op == "running_sum":
        yield from norm_over_tensors(value, event.scope)
    if event.scope.kind == "test" or not value.inputs or value.op not in ("norm", "sum"):
        return
    if "dtype" in value.options:
        return
    yield from norm_of_whole(value, event.scope)
    inner: Value | None = value.inputs[0]
    square: Value | None = None
    if value.op == "sum":
        square = next((s for s in sources(value.inputs[0]) if operand_of_square(s) is not None), None)
        inner = operand_of_square(square) if square is not None else None
    if inner is None:
        return
    how = grade(value.dtypes, event.scope)
    if how == "likely" and any(source.op == "weight" for source in sources(inner)):
        yield hit(
            "half-gradient-norm",
            value,
            "possible",
            "the norm of weights is kept in their own dtype: where they are half, fp16 is inf above 65504 and bf16 has steps of 1/256; "
            "give it dtype=torch.float32",
            (HALF_WEIGHTS,),
        )
    gradient = next((s for s in sources(inner) if s.op == "gradient"), None)
    given = gradient is None and (how == "likely" or untold(value)) and gradients_by_name(inner, event.scope)
    chosen = value.dtypes - WIDE
    if gradient is None and chosen and may_be_half(chosen) and event.scope.enabled is not False:
        # In a dtype that a caller chooses.
        given = given or any(s.op == "gradient" for s in sources(inner, VIEWS | {"cast"}))
    if given:
        yield hit(
            "half-gradient-norm",
            value,
            "possible",
            "the norm of a gradient that is handed in is kept in its own dtype: of half gradients fp16 is inf above 65504 and bf16 has steps of "
            "1/256; give it dtype=torch.float32",
            (Shows("half gradients"),),
        )
    if gradient is None or how is None:
        return
    yield hit(
        "half-gradient-norm",
        value,
        how,
        "the norm of gradients is kept in their own dtype: with half weights fp16 is inf above 65504 and bf16 has steps of 1/256, and what clips or "
        "logs by it takes it as it is; give it dtype=torch.float32",
        (TRAINING, Shows("half gradients")),
        # A dtype for the sum of squares would come too late: fp16 overflows where they are squared.
        fix=Remedy(
            (
                Change("argument", value.at, "dtype", "torch.float32")
                if square is None
                else Change("operands", square.at, text="{}.float()"),
            ),
            "the norm becomes fp32",
        ),
    )


WHOLE = regex(r"^(?:w|weights?|params?|parameters?|deltas?|tensors?|updates?)$")
"""What a function calls a tensor of weights, or any."""


def norm_of_whole(value: Value, scope: Scope) -> Iterator[Any]:
    """``tensor.norm()``, ``weight.abs().sum()``: one number for a whole tensor that is handed in."""
    if len(value.inputs) > 1 or "dim" in value.options or scope.enabled is False or not may_be_half(value.dtypes):
        return
    inner = (
        value.inputs[0] if value.op == "norm" else next((s for s in sources(value.inputs[0]) if s.op == "abs"), None)
    )
    if inner is None or not any(s.op == "input" and WHOLE.search(s.name) for s in sources(inner, VIEWS | {"abs"})):
        return
    yield hit(
        "half-gradient-norm",
        value,
        "possible",
        "the norm of a whole tensor that is handed in is kept in its own dtype: where that is half, fp16 is inf above 65504 and bf16 keeps 8 "
        "bits of it; give it dtype=torch.float32",
        (Shows("half"),),
    )


def gradients_by_name(value: Value, scope: Scope) -> bool:
    """Whether a value is handed in, and a gradient by its name or by that of the function that takes its norm."""
    given = [source for source in sources(value) if source.op in ("input", "unknown")]
    if any(GRADIENT.search(source.name) for source in given):
        return True
    return bool(given) and bool(OF_GRADIENTS.search(scope.function)) and not any("norm" in each.name for each in given)


def norm_by_torch(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch.nn.utils.get_total_norm(gradients)``, which takes each norm, and that of all norms, in the dtype of the gradients."""
    if value.name.endswith("nn.utils.get_total_norm") and value.inputs and scope.kind != "test":
        yield hit(
            "half-gradient-norm",
            value,
            "possible",
            "torch takes the norm of gradients in their own dtype here: of half gradients fp16 is inf above 65504 and bf16 has steps of 1/256; "
            "take torch._foreach_norm(..., dtype=torch.float32) and the norm of these",
            (TRAINING, Shows("half gradients")),
        )


def norm_over_tensors(total: Value, scope: Scope) -> Iterator[Any]:
    """``sum(x.square().sum() for x in tensors)``: squares of several tensors in their own dtype."""
    for term in sources(total.inputs[0], VIEWS | {"many"}) if total.inputs and scope.kind != "test" else ():
        square = (
            next((s for s in sources(term.inputs[0]) if operand_of_square(s) is not None), None)
            if term.op == "sum"
            else None
        )
        operand = operand_of_square(square) if square is not None else None
        if square is None or operand is None or "dtype" in term.options or grade(term.dtypes, scope) is None:
            continue
        if not any(item(each) for each in views_of(operand)):
            continue
        yield hit(
            "half-gradient-norm",
            term,
            "possible",
            f"squares of several tensors are added up in {kept_in('likely', term.dtypes)}: fp16 is inf above 65504 and bf16 has steps of 1/256; "
            "give the sum dtype=torch.float32",
            (TRAINING, shown_by(term.dtypes)),
            (Seen(total.at, "and added up over the tensors"),),
        )


def views_of(value: Value) -> Iterator[Value]:
    """A value, and what it is a view of."""
    seen = [value]
    for each in seen:
        yield each
        if each.op in VIEWS and each.inputs and len(seen) < 16:
            seen += each.inputs if each.op == "either" else each.inputs[:1]


def item(value: Value) -> bool:
    """Whether a value is one of those in a list that was handed in; weights and gradients are told where they are squared."""
    return value.op == "index" and bool(value.inputs) and value.inputs[0].op == "input"
