"""Arithmetic in half: what is too large for fp16, whose largest number is 65504.

Constants of masks and products before they are scaled. The patterns and the grades are those of ``half_arithmetic``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.checks.half_arithmetic import (
    AUTOCAST,
    FP16,
    TRAINING,
    grade,
    hit,
    likely_of,
    untold,
)
from precisionlint.valueflow import (
    BOOL,
    HALF_LAYERS,
    INTEGERS,
    NUMBER,
    VIEWS,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    number,
    same,
    sources,
)

FAMILY = Family(Automaton("half-range", None))

FP16_MAX = 65504.0
FILLS = {"masked_fill": ("value", 2), "index_fill": ("value", 3), "full_like": ("fill_value", 1), "fill_": ("value", 1),
         "new_full": ("fill_value", 2), "pad": ("value", 3)}  # fmt: skip
"""Ops that put one number into a tensor, and raise where its dtype does not hold it: the number's keyword and position."""
SCORES = re.compile(r"scores?$|attn|attention|energy|logits?$")
PICKED = re.compile(r"scores?$|logits?$|(?:^|_)l(?:og)?_?probs?$")
"""What a program calls the scores among which the largest is picked."""


DOES_NOT_FIT = "{:g} does not fit fp16 (at most 65504): {} raises on scores in fp16; torch.finfo(scores.dtype).min or -inf fits any dtype"


@FAMILY.rule("mask-constant-overflow", Computed)
def mask_constant_overflow(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if value.op in ("where", "index_put"):
        yield from chosen_constant(value, event.scope)
    if value.op == "cast":
        yield from narrowed_mask(value, event.scope)
    elif value.op == "mul" and len(value.inputs) == 2:
        yield from widened_mask(value, event.scope)
    elif value.op in ("add", "sub") and len(value.inputs) == 2:
        yield from penalised_scores(value, event.scope)
    if value.op not in FILLS or not value.inputs:
        return
    filled, constant = value.inputs[0], number(value.option(*FILLS[value.op]))
    if constant is None or not FP16_MAX < abs(constant) < float("inf"):
        return
    known = "float16" in filled.dtypes
    scores = find(filled, made_scores, lambda v: v.op in ("cast", "softmax", "layer"), 24)
    if not known and scores is None:
        empty = may_be_half(filled.dtypes) and any(map(began_empty, sources(filled, SHOWN)))
        if event.scope.enabled is not False and (empty or (value.op == "masked_fill" and hidden(filled, constant))):
            yield hit("mask-constant-overflow", value, "possible", DOES_NOT_FIT.format(constant, value.op), (FP16,))
        return
    if value.op == "masked_fill" and not known and of_itself(filled, value.inputs[1:2]):
        made_infinite = (
            f"{constant:g} in a mask that was boolean: cast to fp16 (at most 65504) it is {'-' * (constant < 0)}inf"
        )
        advice = "a row that is masked whole is NaN; torch.finfo of the dtype that it is cast to has the least number"
        yield hit("mask-constant-overflow", value, "possible", f"{made_infinite}, and {advice}", (FP16,))
        return
    needs: tuple[Shows, ...] = () if known else (FP16,)
    if not known and not may_be_half(filled.dtypes):
        # What a matmul gives is half under autocast, whatever it is given.
        if event.scope.enabled is not None:
            return
        if not scaled_product(filled):
            if scores is not None and untold(filled) and event.scope.kind != "test":
                yield hit("mask-constant-overflow", value, "possible", DOES_NOT_FIT.format(constant, value.op), (FP16,))
            return
        needs = (FP16, AUTOCAST)
    yield Hit(
        "mask-constant-overflow",
        value.at,
        DOES_NOT_FIT.format(constant, value.op),
        (Seen(scores.at, "the scores, in half wherever fp16 autocast or fp16 weights reach"),)
        if scores is not None
        else (),
        confidence="certain" if known else "likely",
        needs=needs,
        # The constant stays wherever it fits: the least number instead of it may become -inf where masks are added up.
        fix=Remedy((Change("argument", value.at, "value@1", fitting(constant)),))
        if value.op == "masked_fill"
        else None,
    )


def chosen_constant(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch.where(mask, scores, -1e9)``, ``scores[mask] = -1e9``: it takes the dtype of the scores, and what does not fit becomes infinite."""
    if len(value.inputs) != 3:
        return
    filled_by = {"where": (value.inputs[1:], value.inputs[:0:-1]), "index_put": (value.inputs[::2],)}
    for filled, given in filled_by[value.op]:
        constant = number(given)
        if constant is None or not FP16_MAX < abs(constant) < float("inf"):
            continue
        scores = find(filled, made_scores, lambda v: v.op in ("cast", "softmax", "layer"), 24)
        by_mask = value.op == "index_put" and hides(value.inputs[1]) and hidden(filled, constant)
        picked = value.op == "index_put" and (by_mask or bool(PICKED.search(value.name))) and scope.kind != "test"
        if scores is None and not picked:
            continue
        free = may_be_half(filled.dtypes) or untold(filled)
        if "float16" not in filled.dtypes and (scope.enabled is False or not free):
            continue
        yield hit(
            "mask-constant-overflow",
            value,
            "possible",
            f"{constant:g} does not fit fp16 (at most 65504): on scores in fp16 {'where gives' if value.op == 'where' else 'it becomes'} "
            f"{'-' * (constant < 0)}inf{' (some versions of torch raise)' if value.op == 'where' else ''}, and a row that is masked whole is "
            "NaN; torch.finfo(scores.dtype).min fits any dtype",
            (FP16,),
            (Seen(scores.at, "the scores"),) if scores is not None else (),
        )
        return


MASK = re.compile(r"mask|(?:^|_)pad(?:ding)?$", re.I)


def hidden(filled: Value, constant: float) -> bool:
    """Whether a least number is put into values whose dtype is the caller's, as into what a maximum is taken of; a mask itself is none."""
    return constant < 0 and (may_be_half(filled.dtypes) or untold(filled)) and not named(filled, MASK)


def hides(key: Value) -> bool:
    """Whether an index is a mask."""
    return key.dtypes == BOOL or named(key, MASK) or (key.op == "invert" and hides(key.inputs[0]))


def narrowed_mask(value: Value, scope: Scope) -> Iterator[Any]:
    """``torch.where(seen, 0.0, -1e10).to(x.dtype)``, ``((1 - mask) * -1e9).to(x.dtype)``: a mask of numbers that is cast."""
    if scope.enabled is False or not value.inputs or grade(value.dtypes, scope) is None:
        return
    for made in sources(value.inputs[0]):
        parts = made.inputs[1:] if made.op == "where" else made.inputs if made.op == "mul" else ()
        given = [number(part) for part in parts]
        large = next((each for each in given if each is not None and FP16_MAX < abs(each) < float("inf")), None)
        if large is None or (made.op == "where" and None in given) or may_be_half(made.dtypes):
            continue
        if made.op == "mul" and find(made, lambda v: bool(MASK.search(v.name)), limit=8) is None:
            continue
        yield infinite(made, large, Seen(value.at, "cast here"))
        return


def began_empty(value: Value) -> bool:
    """Whether a tensor began as zeros: a bias that a mask fills."""
    return value.op in ("zeros", "zeros_like", "new_zeros")


def widened_mask(value: Value, scope: Scope) -> Iterator[Any]:
    """``(1 - mask.to(x.dtype)) * -1e9``: a mask that was cast before, and becomes infinite."""
    mask, constant = enlarged(value)
    if mask is None or scope.enabled is False:
        return
    cast = find(mask, lambda v: v.op == "cast" and (known_half(v.dtypes) or may_be_half(v.dtypes)), limit=8)
    if cast is not None and find(mask, lambda v: bool(MASK.search(v.name)), limit=12) is not None:
        yield infinite(value, constant, Seen(cast.at, "cast here"))


def penalised_scores(value: Value, scope: Scope) -> Iterator[Any]:
    """``scores * seen - 1e10 * (1 - seen)``: a mask in the dtype of the weights beside scores."""
    for other, part in (value.inputs, value.inputs[::-1]):
        for product in sources(part):
            mask, constant = enlarged(product) if product.op == "mul" else (None, 0.0)
            if mask is None or scope.enabled is False:
                continue
            scores = find(other, made_scores, lambda v: v.op in ("cast", "softmax", "layer"), 24)
            if scores is not None:
                yield infinite(product, constant, Seen(scores.at, "the scores"))


def enlarged(product: Value) -> tuple[Value | None, float]:
    """(what is multiplied, by which number above 65504), of a product that may be half."""
    if len(product.inputs) == 2 and (known_half(product.dtypes) or may_be_half(product.dtypes)):
        for mask, given in (product.inputs, product.inputs[::-1]):
            constant = number(given)
            if constant is not None and FP16_MAX < abs(constant) < float("inf"):
                return mask, constant
    return None, 0.0


def infinite(product: Value, constant: float, seen: Seen) -> Hit:
    return hit(
        "mask-constant-overflow",
        product,
        "possible",
        f"a mask in half is made of {constant:g}, which is {'-' * (constant < 0)}inf in fp16 (at most 65504): two such masks, or one row of it "
        "masked whole, give NaN; torch.finfo of its dtype has the least number",
        (FP16,),
        (seen,),
    )


def of_itself(filled: Value, mask: Sequence[Value]) -> bool:
    """Whether a value is filled where it itself says so: it was boolean."""
    held = [source for each in mask for source in sources(each)]
    return find(filled, lambda v: any(v is each for each in held), lambda v: v.op == "matmul", 12) is not None


def scaled_product(value: Value) -> bool:
    """Whether a value is a matmul's result, or that by a number."""
    for source in sources(value):
        if source.op in ("mul", "div") and len(source.inputs) == 2 and source.inputs[1].dtypes == NUMBER:
            return scaled_product(source.inputs[0])
        return source.op == "matmul"
    return False


def made_scores(value: Value) -> bool:
    """Whether a value is scores: a product, what a layer gives that computes one, or what a function is given under such a name."""
    if value.op == "input":
        return bool(SCORES.search(value.name))
    if value.op in ("attribute", "unknown"):  # of a function that nobody read
        return bool(SCORES.search(value.name)) and not MASK.search(value.name)
    return value.op in ("matmul", "linear") or (value.op == "layer" and value.name in HALF_LAYERS)


def fitting(constant: float) -> str:
    """A constant, or the number of the tensor's dtype that is nearest to it."""
    return "max({}, torch.finfo({tensor}.dtype).min)" if constant < 0 else "min({}, torch.finfo({tensor}.dtype).max)"


# -- products that are scaled too late


SHOWN = frozenset({"view", "either", "index", "attribute", "cast"})
"""What shows a product again: a cast of what has overflowed comes too late."""
BETWEEN = frozenset({"masked_fill", "add", "sub", "where", "clamp", "dropout", "max", "maximum"})
"""What else may stand between scores and their softmax."""
BOUNDED = frozenset({"softmax", "sigmoid", "tanh", "normalize", "layer_norm", "rms_norm", "norm", "mul", "div"})
"""What keeps the operands of a product small, or scales them before it."""


@FAMILY.rule("scale-after-matmul", Computed)
def scale_after_matmul(state: None, event: Computed) -> Iterator[Any]:
    """A product that has to fit fp16 before it is scaled down."""
    value, scope = event.value, event.scope
    if scope.kind == "test" or not value.inputs:
        return
    if value.op == "mul":
        yield from area_of_boxes(value, scope)
    if value.op == "softmax":
        yield from scaled_scores(value, scope)
    elif value.op in ("mul", "div") and len(value.inputs) == 2:
        yield from dequantised(value, scope)
        if value.op == "div":
            yield from normalised_last(value, scope)


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
UPWARDS = re.compile(r"temp|tau")


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


SCALES = re.compile(r"scale")
QUANTISED = re.compile(r"int_?\d|int_data|quant|qweight|qdata|packed")


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
    below = matmul_of(value.inputs[1], SHOWN | {"add", "clamp"})
    if above is None or below is None or matmul_within(above) is None or bounded(above) or bounded(below):
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


GEOMETRY = re.compile(r"(?:in|ex)trinsic|camera|points|\bw2c|\bc2w|(?:\b|_)pose\b|homograph", re.I)
"""What is divided by its depth: points that matrices project, not sums over a sequence."""


def matmul_of(value: Value, through: frozenset[str] = SHOWN) -> Value | None:
    return next((source for source in sources(value, through) if source.op == "matmul"), None)


def matmul_within(product: Value) -> Value | None:
    """The product that is an operand of another."""
    return next((inner for each in product.inputs if (inner := matmul_of(each)) is not None), None)


def bounded(product: Value) -> bool:
    """Whether an operand of a product was scaled or normalised first."""

    def scaled(value: Value) -> bool:
        return value.op in BOUNDED and value.dtypes != NUMBER  # the products of sizes in a reshape are none

    def stop(value: Value) -> bool:
        return value.op in FRESH or value.dtypes == NUMBER

    return any(find(each, scaled, stop, 16) is not None for each in product.inputs)


FRESH = frozenset({"linear", "layer", "relu", "gelu", "exp"})
"""What gives values of any size, whatever was done before."""


BOXES = re.compile(r"box|xyxy|rois?(?:_|$)|rect|anchor", re.I)
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


def fp16_of(how: str, value: Value) -> str:
    return "fp16" if how == "certain" else f"the dtype of {likely_of(value.dtypes)}"
