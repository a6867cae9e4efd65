"""Arithmetic in half: products that have to fit fp16, whose largest number is 65504, before they are scaled down. The patterns and the grades
are those of ``half_arithmetic``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Seen
from precisionlint.checks.half_arithmetic import TRAINING, grade, hit, likely_of
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    INTEGERS,
    NUMBER,
    VIEWS,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    named,
    number,
    same,
    sources,
)

FAMILY = Family(Automaton("half-products", None))


SHOWN = frozenset({"view", "either", "index", "attribute", "cast"})
"""What shows a product again: a cast of what has overflowed comes too late."""
BETWEEN = frozenset({"masked_fill", "add", "sub", "where", "clamp", "dropout", "max", "maximum"})
"""What else may stand between scores and their softmax."""
BOUNDED = frozenset({"softmax", "sigmoid", "tanh", "normalize", "layer_norm", "rms_norm", "norm", "mul", "div"})
"""What keeps the operands of a product small, or scales them before it."""


@FAMILY.rule("scale-after-matmul", Computed, ops=("mul", "div", "matmul", "softmax", "sqrt"))
def scale_after_matmul(state: None, event: Computed) -> Iterator[Any]:
    """A product that has to fit fp16 before it is scaled down."""
    value, scope = event.value, event.scope
    if scope.kind == "test" or not value.inputs:
        return
    if value.op == "sqrt":
        yield from mean_of_extremes(value, scope)
    if value.op == "mul":
        yield from area_of_boxes(value, scope)
    if value.op == "softmax":
        yield from scaled_scores(value, scope)
    elif value.op in ("mul", "div") and len(value.inputs) == 2:
        yield from dequantised(value, scope)
        if value.op == "div":
            yield from normalised_last(value, scope)
            yield from averaged_last(value, scope)
    if value.op in ("mul", "matmul"):
        yield from normalised_by_factor(value, scope)


def scaled_scores(soft: Value, scope: Scope) -> Iterator[Any]:
    """``softmax(q @ k * scale)``: how most have it, and a fault where activations are large alone, hence never more than possible."""
    for scaled in sources(soft.inputs[0], SHOWN | BETWEEN):
        if scaled.op not in ("mul", "div") or len(scaled.inputs) != 2:
            continue
        left, right = scaled.inputs
        for product, factor in ((left, right), (right, left))[: 1 if scaled.op == "div" else 2]:
            scores = matmul_of(product)
            if scores is None or not scales_down(factor, scaled.op) or bounded(scores):
                continue
            how = grade(scores.dtypes, scope)
            if how is None or (how == "certain" and "float16" not in scores.dtypes):
                continue
            yield hit(
                "scale-after-matmul",
                scaled,
                "possible",
                f"the scores are stored in {fp16_of(how, scores)} before they are scaled: one above 65504 is inf there, and the softmax NaN, "
                "although scaled it would fit; scale the queries before the product",
                (TRAINING, Shows("fp16")),
                (Seen(scores.at, "the product"), Seen(soft.at, "its softmax")),
            )
            return


MADE = frozenset({"layer", "linear", "matmul", "parameter", "softmax", "cross_entropy"})
"""What no factor is made of that only scales."""
UPWARDS = regex(r"temp|tau")


def scales_down(factor: Value, op: str) -> bool:
    """Whether a factor is one number for all, and makes smaller as far as it is known."""
    known = number(factor)
    if known is not None:
        return abs(known) < 1.0 if op == "mul" else abs(known) > 1.0
    # The root of a width is a number, whatever it is the width of.
    upwards = find(factor, lambda v: v.op in MADE or bool(UPWARDS.search(v.name)), lambda v: v.op == "size", 24)
    return upwards is None


def dequantised(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch._int_mm(a, b) * scales``, sums of int8 products that become half before they are scaled; and ``x @ w.to(x.dtype) * scales``
    of weights that are still integers."""
    for product, factor in (value.inputs, value.inputs[::-1]):
        for made in sources(product, SHOWN - {"cast"}):
            total = next(sources(made.inputs[0])) if made.op == "cast" else made
            if total.op not in ("matmul", "linear"):
                continue
            of_integers = total.dtypes <= INTEGERS
            if made is not total and not of_integers:
                continue
            if not of_integers and not (named(uncast(factor), SCALES) and any(map(quantised, total.inputs))):
                continue
            # Cast first, or by what they are multiplied with.
            narrow = made.dtypes if made is not total else factor.dtypes if of_integers else total.dtypes
            how = grade(narrow, scope)
            if how is None or (how == "certain" and "float16" not in narrow):
                continue
            what = (
                "sums of integer products are cast to" if of_integers else "products with integer weights are stored in"
            )
            yield hit(
                "scale-after-matmul",
                value,
                how,
                f"{what} {'fp16' if how == 'certain' else f'the dtype of {likely_of(narrow)}'} before they are scaled: 5 products of int8 can be "
                "above 65504, which is inf in fp16; multiply in fp32 and cast the result",
                (Shows("fp16"),),
                (Seen(total.at, "the product"),),
            )
            return


SCALES = regex(r"scale")
QUANTISED = regex(r"int_?\d|int_data|quant|qweight|qdata|packed")


def uncast(value: Value) -> Value:
    return value.inputs[0] if value.op == "cast" and value.inputs else value


def quantised(value: Value) -> bool:
    """Whether a value is a cast of integers, by its dtype or its name."""
    for source in sources(value):
        if source.op == "cast" and source.inputs:
            inner = source.inputs[0]
            if (inner.dtypes <= INTEGERS) or named(inner, QUANTISED):
                return True
    return False


def normalised_last(value: Value, scope: Scope) -> Iterator[Any]:
    """``q @ (k.T @ v) / (q @ k.sum())``: attention without a softmax, whose two sums grow with the length of the sequence."""
    above = matmul_of(value.inputs[0])
    if above is None:
        return
    below = matmul_of(value.inputs[1], SHOWN | {"add", "clamp"})
    if below is None:
        yield from pooled_last(value, above, scope)
        return
    if matmul_within(above) is None or bounded(above) or bounded(below):
        return
    how = grade(above.dtypes, scope)
    if how is None or (how == "certain" and "float16" not in above.dtypes):
        return
    if above is not below and not any(same(a, b) for a in above.inputs for b in below.inputs):
        return
    if find(above, lambda v: bool(GEOMETRY.search(v.name)), limit=80) is not None:
        return
    yield hit(
        "scale-after-matmul",
        value,
        how,
        f"both sums of this attention are stored in {fp16_of(how, above)} and divided afterwards: they grow with the sequence, fp16 is inf above "
        "65504, and inf by inf is NaN; take both products in fp32, with autocast disabled",
        (TRAINING, Shows("fp16")),
        (Seen(above.at, "the sum over all positions"),),
    )


def pooled_last(value: Value, above: Value, scope: Scope) -> Iterator[Any]:
    """``torch.bmm(weights, x) / weights.sum(-1, keepdim=True)``: a weighted mean, whose sum grows with what is pooled."""
    total = next((s for s in sources(value.inputs[1], SHOWN | {"add", "clamp"}) if s.op == "sum" and s.inputs), None)
    if total is None or scope.enabled is False or grade(above.dtypes, scope) is None:
        return
    weights = next((each for each in above.inputs if same(each, total.inputs[0])), None)
    if weights is None or any(source.op in ("softmax", "div") for source in sources(weights)):
        return
    yield hit(
        "scale-after-matmul",
        value,
        "possible",
        f"the sum of a weighted mean is stored in {fp16_of('possible', above)} and divided by the weights' afterwards: it grows with what is "
        "pooled, and is inf in fp16 above 65504; divide the weights first, or take both sums in fp32",
        (TRAINING, Shows("fp16")),
        (Seen(above.at, "the weighted sum"), Seen(total.at, "the sum of the weights")),
    )


def averaged_last(value: Value, scope: Scope) -> Iterator[Any]:
    """``features @ features.transpose(1, 2) / (channels * height * width)``: the products of a tensor with itself, divided by how many they are."""
    gram, count = matmul_of(value.inputs[0]), value.inputs[1]
    if gram is None or count.dtypes != NUMBER or len(gram.inputs) != 2 or scope.enabled is False:
        return
    if not same(*gram.inputs) or bounded(gram) or grade(gram.dtypes, scope) is None:
        return
    if find(count, sized, lambda v: v.op not in COUNTING, 16) is None:
        return
    yield hit(
        "scale-after-matmul",
        value,
        "possible",
        f"the products of a tensor with itself are stored in {fp16_of('possible', gram)} and divided by how many there are afterwards: their sum "
        "grows with what is summed over, and is inf in fp16 above 65504; divide the tensor first, or cast it to float",
        (TRAINING, Shows("fp16")),
        (Seen(gram.at, "the sum"),),
    )


def sized(value: Value) -> bool:
    """Whether a number is a size of a tensor: asked for, or unpacked under a name."""
    return value.op == "size" or (value.op == "constant" and value.constant is None and bool(value.name))


COUNTING = frozenset({"mul", "sub", "index", "view", "either", "size"})
"""What sizes are multiplied to a count by; the root of one scales a sum by its spread."""


def normalised_by_factor(value: Value, scope: Scope) -> Iterator[Any]:
    """``einsum("nd,de,n->ne", q, k.T @ v, 1 / (q @ k.sum(0)))``: the same, by the inverse of the sum."""
    operands = {id(each): next(sources(each)) for each in value.inputs[:4]}
    inverse = next((each for each in operands.values() if inverted(each) is not None), None)
    below = inverted(inverse) if inverse is not None else None
    if below is None:
        return
    parts = [each for each in operands.values() if each is not inverse]
    above = next((made for each in parts if (made := matmul_of(each, SHOWN)) is not None), None)
    if above is None or bounded(above) or bounded(below) or scope.enabled is False:
        return
    together = [*parts, *above.inputs]
    if not any(same(a, b) for a in together for b in below.inputs) or grade(above.dtypes, scope) is None:
        return
    yield hit(
        "scale-after-matmul",
        value,
        "possible",
        f"both sums of this attention are stored in {fp16_of('possible', above)} and multiplied by the inverse afterwards: they grow with the "
        "sequence, and fp16 is inf above 65504; take both products in fp32, with autocast disabled",
        (TRAINING, Shows("fp16")),
        (Seen(above.at, "the sum over all positions"), Seen(below.at, "what it is divided by")),
    )


def inverted(value: Value) -> Value | None:
    """The product that a value is one over."""
    over = value.inputs[1] if value.op == "div" and len(value.inputs) == 2 and number(value.inputs[0]) == 1.0 else None
    if value.op == "reciprocal" and value.inputs:
        over = value.inputs[0]
    return matmul_of(over, SHOWN | {"add", "clamp"}) if over is not None else None


GEOMETRY = regex(r"(?:in|ex)trinsic|camera|points|\bw2c|\bc2w|(?:\b|_)pose\b|homograph", re.I)
"""What is divided by its depth: points that matrices project, not sums over a sequence."""


def matmul_of(value: Value, through: frozenset[str] = SHOWN) -> Value | None:
    return next((source for source in sources(value, through) if source.op == "matmul"), None)


def matmul_within(product: Value) -> Value | None:
    """The product that is an operand of another."""
    return next((inner for each in product.inputs if (inner := matmul_of(each)) is not None), None)


def bounded(product: Value) -> bool:
    """Whether an operand of a product was scaled or normalised first. Sizes that a view is given are no part of it, and turning it by angles
    leaves its length."""
    todo = [each for each in product.inputs if each.dtypes != NUMBER]
    seen = {id(each) for each in todo}
    for value in todo:
        if value.op in BOUNDED and value.dtypes != NUMBER and not turned(value):
            return True
        if value.op in FRESH or value.dtypes == NUMBER or len(seen) > 24:
            continue
        shown = value.op in VIEWS and value.op not in ("either", "stack", "many")
        for each in value.inputs[:1] if shown else value.inputs:
            if id(each) not in seen:
                seen.add(id(each))
                todo.append(each)
    return False


ANGLE = regex(r"(?:^|_)(?:cos|sin|freqs?)(?:_|$)")


def turned(value: Value) -> bool:
    """Whether a product is one by a sine or cosine, as of rotary embeddings."""
    if value.op != "mul":
        return False
    return any(
        find(each, lambda v: v.op in ("cos", "sin") or bool(ANGLE.search(v.name)), limit=8) is not None
        for each in value.inputs
    )


FRESH = frozenset({"linear", "layer", "relu", "gelu", "exp"})
"""What gives values of any size, whatever was done before."""


BOXES = regex(r"box|xyxy|rois?(?:_|$)|rect|anchor", re.I)
"""What corners are called."""


def area_of_boxes(value: Value, scope: Scope) -> Iterator[Any]:
    """``(boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])``, which an overlap is divided by."""
    sides = [
        next((s for s in sources(part, VIEWS | {"clamp", "add"}) if s.op == "sub"), None) for part in value.inputs[:2]
    ]
    corners = [each for side in sides if side is not None for each in side.inputs[:2]]
    if len(corners) != 4 or not all(each.op == "index" and each.inputs for each in corners) or scope.enabled is False:
        return
    boxes = {id(next(sources(each))) for each in corners}
    if len(boxes) != 1 or not named(corners[0], BOXES) or grade(value.dtypes, scope) is None:
        return
    yield hit(
        "scale-after-matmul",
        value,
        "possible",
        f"the area of a box is kept in {fp16_of('possible', value)}: in pixels, 256 by 256 is above 65504, which is inf in fp16, and an overlap is "
        "divided by it; cast the boxes to float first",
        (Shows("fp16"),),
    )


EXTREMES = ({"max", "amax"}, {"min", "amin"})


def mean_of_extremes(root: Value, scope: Scope) -> Iterator[Any]:
    """``(scales.max() * scales.min()).sqrt()``: the root would fit, the product need not."""
    for product in sources(root.inputs[0], SHOWN):
        ends = product.inputs if product.op == "mul" and len(product.inputs) == 2 else ()
        if not all(any(each.op in found for each in ends) for found in EXTREMES):
            continue
        of = [next(sources(each.inputs[0])) for each in ends if each.inputs]
        how = grade(product.dtypes, scope)
        if how is None or len(of) != 2 or of[0] is not of[1] or (how == "certain" and "float16" not in product.dtypes):
            continue
        yield hit(
            "scale-after-matmul",
            product,
            "possible",
            f"the largest times the smallest is kept in {fp16_of(how, product)} before its root is taken: above 65504 it is inf in fp16, and below "
            "6e-8 zero, although the root would fit; take the roots first, or cast both to float",
            (Shows("fp16"),),
            (Seen(root.at, "the root of it"),),
        )
        return


def fp16_of(how: str, value: Value) -> str:
    return "fp16" if how == "certain" else f"the dtype of {likely_of(value.dtypes)}"
