"""Arithmetic in half: sums over all elements of a tensor, whose result is rounded to its dtype, or too large for it. Parts of
``half-running-sum``; the patterns and the grades are those of ``half_arithmetic``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Seen
from precisionlint.checks.half_arithmetic import TRAINING, grade, hit, kept_in, of_half, untold
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    BOOL,
    VIEWS,
    WIDE,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    shown_by,
    sources,
)

LOSSES = frozenset({"cross_entropy", "nll_loss", "bce_with_logits", "loss", "criterion"})
"""What a loss is, of one element or of all."""
LOSS = regex(r"^(?:\w+_)?loss(?:es)?$")
MASK = regex(r"(?:^|_)mask$")


def totals(event: Computed) -> Iterator[Any]:
    """The sums of one tensor that a half dtype does not hold."""
    value, scope = event.value, event.scope
    if scope.kind == "test" or not value.inputs:
        return
    if value.op == "exp":
        yield from perplexity(value, scope)
    elif value.op == "log10":
        yield from signal_to_noise(value, scope)
    elif value.op == "sum" and "dtype" in value.options:
        yield from rounded_terms(value, scope)
    elif value.op == "sum" and (gradient := gradient_within(value)) is not None:
        yield from sum_of_gradient(value, gradient)
    elif value.op == "sum" and scope.enabled is not False and grade(value.dtypes, scope) is not None:
        yield from sum_of_losses(value)
        yield from counted_mask(value)
        yield from sum_over_pixels(value)
    elif value.op == "add" and value.name == "in-place state" and len(value.inputs) == 2:
        yield from summed_in_python(value.inputs[1], scope)


def sum_of_losses(value: Value) -> Iterator[Any]:
    """``losses.sum() / count``, ``loss.sum()`` of one loss an element: all of them, in their own dtype."""
    if len(value.inputs) > 1 or "dim" in value.options or "axis" in value.options:
        return
    losses = value.inputs[0]
    given = any(source.op == "input" and LOSS.search(source.name) for source in sources(losses))
    made = find(losses, lambda v: v.op in LOSSES, lambda v: v.op not in ELEMENTWISE, 24)
    if given or made is not None:
        yield hit(
            "half-running-sum",
            value,
            "possible",
            f"the losses of all elements are summed up in {kept_in('possible', value.dtypes)}: above 65504 that is inf in fp16, and a division "
            "comes too late; give the sum dtype=torch.float32",
            (TRAINING, shown_by(value.dtypes)),
            (Seen(made.at, "the losses"),) if made is not None else (),
        )


ELEMENTWISE = VIEWS | {"mul", "neg", "add", "masked_fill", "where"}
"""What keeps one loss an element."""


COUNTED = (
    "a count above 256 is rounded",
    "a count above 2048 is rounded, and above 65504 it is inf",
    "a count above 256 is rounded in bf16 (fp16: 2048), and above 65504 it is inf in fp16",
)


def counted_mask(value: Value) -> Iterator[Any]:
    """``mask.to(logits).sum()``: a count, in the dtype of what is counted."""
    for cast in sources(value.inputs[0]):
        if cast.op != "cast" or not cast.inputs:
            continue
        if is_mask(cast.inputs[0]):
            yield hit(
                "half-running-sum",
                value,
                "possible",
                f"a mask is counted in {kept_in('possible', value.dtypes)}: {of_half(value.dtypes, *COUNTED)}; count in fp32, or before the cast",
                (TRAINING, shown_by(value.dtypes)),
                (Seen(cast.at, "cast here"),),
            )
            return


def is_mask(value: Value) -> bool:
    """Whether a value is boolean, or a mask by its name or by the one that a table has it under."""
    key = value.inputs[1].constant if value.op == "index" and len(value.inputs) > 1 else None
    return value.dtypes == BOOL or named(value, MASK) or bool(isinstance(key, str) and MASK.search(key))


FLATTENED = frozenset({"flatten", "view", "reshape", "rearrange"})
"""Views that put the pixels of an image into one row."""


def down_views(value: Value) -> Iterator[Value]:
    """A value and what it is a view of, one after the other, down to what made it."""
    yield value
    while value.op == "view" and value.inputs:
        value = value.inputs[0]
        yield value


def sum_over_pixels(value: Value) -> Iterator[Any]:
    """``(probabilities.flatten(1) * target.flatten(1)).sum(-1)``, as a dice loss and the score of a mask have it: one of each pixel."""
    if len(value.inputs) < 2 and "dim" not in value.options:
        return
    product = next((s for s in sources(value.inputs[0]) if s.op == "mul" and len(s.inputs) == 2), None)
    for factor in product.inputs if product is not None else ():
        chain = list(down_views(factor))
        made = chain[-1]
        if made.op == "sigmoid" and any(each.name in FLATTENED for each in chain):
            yield hit(
                "half-running-sum",
                value,
                "possible",
                f"one term of each pixel is summed up in {kept_in('possible', value.dtypes)}: of an image of 256 by 256 that may be above 65504, "
                "which is inf in fp16, and a division comes too late; give the sum dtype=torch.float32",
                (TRAINING, shown_by(value.dtypes)),
                (Seen(made.at, "the probabilities"),),
            )
            return


def gradient_within(value: Value) -> Value | None:
    """The gradient that a sum is one of, by what it is or by its name."""
    return next(
        (s for s in sources(value.inputs[0]) if s.op == "gradient" or (s.op == "unknown" and s.name == "grad")), None
    )


def sum_of_gradient(value: Value, gradient: Value) -> Iterator[Any]:
    """``float(weight.grad.sum())``, by which an overflow is looked for: the sum overflows before an element does."""
    free = may_be_half(value.dtypes) or untold(value)
    if free and len(value.inputs) == 1 and "dim" not in value.options:
        yield hit(
            "half-running-sum",
            value,
            "possible",
            "the sum of a gradient is kept in its own dtype: of half gradients it is inf in fp16 above 65504, although no element is; give it "
            "dtype=torch.float32, or ask isfinite() of the elements",
            (Shows("half gradients"),),
            (Seen(gradient.at, "the gradient"),) if gradient.at is not None else (),
        )


def summed_in_python(term: Value, scope: Scope) -> Iterator[Any]:
    """``self.score += (gradient * weight).abs().sum().item()``: a sum over a whole tensor, which is rounded before it becomes a number."""
    total = term.inputs[0] if term.op == "number" and term.inputs else None
    total = next(sources(total)) if total is not None else None
    if (
        total is None
        or total.op != "sum"
        or len(total.inputs) > 1
        or "dim" in total.options
        or "dtype" in total.options
    ):
        return
    product = find(total.inputs[0], lambda v: v.op == "mul", lambda v: v.op not in VIEWS | {"abs"}, 8)
    how = grade(total.dtypes, scope) or ("possible" if untold(total) else None)
    if product is None or how is None or scope.enabled is False:
        return
    yield hit(
        "half-running-sum",
        total,
        "possible",
        f"products over a whole tensor are summed up in {kept_in('possible', total.dtypes)}: the sum is rounded to 8 bits in bf16, and inf above "
        "65504 in fp16; cast the factors to float first",
        (Shows("half"),),
        (Seen(product.at, "the products"),),
    )


def rounded_terms(value: Value, scope: Scope) -> Iterator[Any]:
    """``partial_sums.sum(0, dtype=x.dtype)``: torch casts the terms, not the sum of them."""
    how = grade(value.dtypes, scope)
    if how is not None and value.inputs[0].dtypes <= WIDE:
        yield hit(
            "half-running-sum",
            value,
            "possible",
            f"terms in fp32 are summed up in {kept_in(how, value.dtypes)}: given a dtype, torch rounds each of them before it adds; sum in fp32 and "
            "cast the sum",
            (Shows("half"),),
        )


def perplexity(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch.exp(torch.stack(losses).mean())`` of losses in the dtype of the logits."""
    loss = find(value.inputs[0], lambda v: v.op in LOSSES, lambda v: v.op not in AVERAGED, 24)
    if (
        loss is None
        or not loss.inputs
        or scope.enabled is False
        or any(map(differs, sources(value.inputs[0], AVERAGED)))
    ):
        return
    if not (may_be_half(loss.dtypes) or (untold(loss) and "dtype" not in loss.options)):
        return
    yield hit(
        "half-running-sum",
        loss,
        "possible",
        f"the exp of a mean of losses in {kept_in('possible', loss.dtypes)}: above 2 bf16 rounds a loss by up to 1/128, and the perplexity is off "
        "by 0.8 %; cast the logits to float first",
        (Shows("half"),),
        (Seen(value.at, "exp of their mean"),),
    )


AVERAGED = VIEWS | {"mean", "sum", "div", "mul"}


def signal_to_noise(value: Value, scope: Scope) -> Iterator[Any]:
    """``10 * torch.log10(1 / ((image - target) ** 2).mean())`` of half images."""
    error = find(value.inputs[0], lambda v: v.op in ("mean", "loss"), lambda v: v.op not in SCALED, 16)
    if error is None or not error.inputs or scope.enabled is not None:
        return
    squared = error.inputs[0]
    sides = error.inputs if error.name == "mse_loss" else ()
    if error.op == "mean" and squared.op in ("pow", "square_pow"):
        sides = next((each.inputs for each in squared.inputs if each.op == "sub"), ())
    if not any(known_half(each.dtypes) for each in sides) or any(each.dtypes & WIDE for each in sides):
        return
    yield hit(
        "half-running-sum",
        error,
        "possible",
        "a signal-to-noise ratio is made of a mean of squares in half: differences below 1/128 have squares that "
        "fp16 stores as subnormals, and bf16 keeps 8 bits of the mean, 0.02 dB; cast both sides to float first",
        (Shows("half"),),
        (Seen(value.at, "its logarithm"),),
    )


SCALED = VIEWS | {"div", "mul", "add", "sqrt", "rsqrt", "reciprocal", "clamp", "maximum"}
"""What stands between a mean of squares and its logarithm."""


def differs(value: Value) -> bool:
    """Whether a value is no number of nats: a difference of losses, or one that was limited."""
    return value.op in ("sub", "neg", "clamp", "minimum")
