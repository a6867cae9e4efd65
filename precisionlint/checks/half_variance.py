"""Arithmetic in half: variances as the difference of two means. The grades are those of ``half_arithmetic``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.checks.half_arithmetic import TRAINING, grade, hit, likely_of, operand_of_square, untold
from precisionlint.patterns import regex
from precisionlint.valueflow import NUMBER, Computed, Scope, Value, find, named, number, same, shown_by, sources

FAMILY = Family(Automaton("half-variance", None))

AVERAGING = frozenset({"mean", "avg_pool2d", "conv1d", "conv2d", "conv3d"})
"""What takes a mean of everything, or of what lies near."""
OPAQUE = frozenset({"layer", "constructed"})
"""What may take one: a filter, a reduction over ranks."""
STOP = frozenset({"softmax", "matmul", "linear", "layer", "cast"})
"""What the two means of a variance are not looked for above."""


def averaged(value: Value) -> Iterator[tuple[Value, Value | None]]:
    """(what a value is the mean of, with which weights): the sum over a count, ``(w * x).sum()`` and ``w @ x`` are means as well, and so may be
    what a layer, or a function that nobody read, makes of x."""
    inner: list[tuple[Value, Value | None]] = []
    if value.op in AVERAGING and value.inputs:
        inner = [(value.inputs[0], None)]
    elif value.op in OPAQUE:
        inner = [(part, None) for part in value.inputs[:4]]
    elif value.op == "div" and len(value.inputs) == 2:
        count = None if value.inputs[1].dtypes == NUMBER else value.inputs[1]
        inner = [(source.inputs[0], count) for source in sources(value.inputs[0]) if source.op in ("sum", "cumsum")]
    elif value.op == "matmul" and len(value.inputs) == 2:
        left, right = value.inputs
        inner = [(left, right), (right, left)]
    yield from inner
    for part in [part for part, count in inner if count is None] or (value.inputs[:1] if value.op == "sum" else ()):
        for product in sources(part):
            if product.op == "mul" and len(product.inputs) == 2:
                left, right = product.inputs
                yield left, right
                yield right, left


def averaged_square(value: Value) -> tuple[Value, Value | None] | None:
    """(x, the weights), where a value is the mean of x squared."""
    for inner, weights in averaged(value):
        operand = next((x for source in sources(inner) if (x := operand_of_square(source)) is not None), None)
        if operand is not None:
            return operand, weights
    return None


@FAMILY.rule("variance-by-difference", Computed, ops=("add", "sub"))
def variance_by_difference(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if value.op in ("add", "sub") and len(value.inputs) == 2 and event.scope.kind != "test":
        yield from distance_by_expansion(value, event.scope)
    if value.op != "sub" or len(value.inputs) != 2 or event.scope.kind == "test":
        return
    left, right = value.inputs
    base = next((operand_of_square(source) for source in sources(right)), None)
    if base is None:
        return
    mean = find(left, lambda v: averaged_square(v) is not None, lambda v: v.op in STOP, 40)
    found = averaged_square(mean) if mean is not None else None
    if mean is None or found is None:
        yield from handed_in(value, left, base, event.scope)
        return
    operand, weights = found

    def wanted(v: Value) -> bool:
        alien = (mean.op in OPAQUE or v.op in OPAQUE) and (v.op, v.name) != (mean.op, mean.name)
        return (
            v is not mean
            and not alien
            and any(same(inner, operand) and alike(weights, by) for inner, by in averaged(v))
        )

    plain = find(base, wanted, lambda v: v.op in STOP, 40)
    how = grade(operand.dtypes, event.scope)
    if plain is None or how is None:
        return
    if how == "likely" and mean.op != "mean":
        how = "possible"  # the windows of a loss, or the weights of a pooling, which many take in fp32
    yield hit(
        "variance-by-difference",
        mean,
        how,
        by_difference(likely_of(operand.dtypes)),
        (TRAINING, shown_by(plain.dtypes)),  # a mean that was rounded spoils squares in fp32 as well
        (Seen(plain.at, "the mean"), Seen(mean.at, "the mean of squares"), Seen(value.at, "their difference")),
    )


def alike(left: Value | None, right: Value | None) -> bool:
    """Whether two means have the same weights, or both none."""
    return left is right if left is None or right is None else same(left, right)


SQUARED = regex(
    r"(?:^|_)(?:mean|avg|average)_?(?:of_?)?sq(?:r|uare[ds]?)?s?$|(?:^|_)sq(?:r|uare[ds]?)?s?_?(?:mean|avg|average)$"
)
"""What a mean of squares is called."""
MEAN = regex(r"(?:^|_)(?:mean|avg|average)$|^mu$")


def handed_in(value: Value, left: Value, base: Value, scope: Scope) -> Iterator[Hit]:
    """``square_mean - mean**2`` of what is handed in, or comes from a function that nobody read: by their names."""
    if not named(left, SQUARED) or not named(base, MEAN) or scope.enabled is False:
        return
    if not untold(value) and grade(value.dtypes, scope) is None:
        return
    trace = (Seen(left.at, "the mean of squares"),) if left.at is not None else ()
    message = by_difference("what is handed in")
    yield hit("variance-by-difference", value, "possible", message, (TRAINING, shown_by(value.dtypes)), trace)


def by_difference(what: str) -> str:
    return (
        f"variance as E[x^2] - E[x]^2 of {what} in its own dtype: the difference of two rounded numbers (bf16 around 20: 0.0 "
        "for 0.986); take both in fp32, or the mean of squared differences"
    )


def distance_by_expansion(value: Value, scope: Scope) -> Iterator[Hit]:
    """``x.pow(2).sum(1, True) - 2 * x @ y.T + y.pow(2).sum(1)``: squared distances as the difference of two larger numbers."""
    terms = added(value, 3)
    products = [made for term in terms if (made := product_of(term)) is not None]
    squares = [x for term in terms if term.op == "sum" and term.inputs for x in squared(term.inputs[0])]
    if len(products) != 1 or len(squares) != 2:
        return
    product = products[0]
    how = grade(product.dtypes, scope)
    if how is None or not all(any(same(unscaled(factor), x) for x in squares) for factor in product.inputs[:2]):
        return
    yield hit(
        "variance-by-difference",
        value,
        "possible",
        f"squared distances as x^2 - 2xy + y^2 with products in {likely_of(product.dtypes)}: those of near points are the difference of rounded "
        "numbers, and in fp16 inf above 65504; cast x and y to float first, with autocast disabled",
        (TRAINING, shown_by(product.dtypes)),
        (Seen(product.at, "the product"),) if product.at is not value.at else (),
    )


ADDED = frozenset({"add", "sub"})


def added(total: Value, most: int) -> list[Value]:
    """The terms of a sum, seen through views; none where they are more, which a long sum shows at its end."""
    terms: list[Value] = []
    left = [total]
    while left:
        if len(terms) + len(left) > most:
            return []
        part = left.pop()
        if part.op in ADDED:
            left += reversed(part.inputs[:2])
        elif part.op in ("view", "neg") and part.inputs:
            left.append(part.inputs[0])
        else:
            terms.append(part)
    return terms


def product_of(term: Value) -> Value | None:
    """The product of matrices that a term is, or twice that."""
    for source in sources(term, frozenset({"view", "mul", "neg"})):
        if source.op == "matmul" and len(source.inputs) >= 2:
            return source
    if term.op == "mul" and len(term.inputs) == 2 and number(term.inputs[0]) is not None:
        return product_of(term.inputs[1])
    return None


def unscaled(factor: Value) -> Value:
    """What a factor is, without the number that it was multiplied by."""
    if factor.op == "mul" and len(factor.inputs) == 2:
        return next((part for part in factor.inputs if number(part) is None), factor)
    return factor


def squared(value: Value) -> Iterator[Value]:
    yield from (operand for source in sources(value) if (operand := operand_of_square(source)) is not None)
