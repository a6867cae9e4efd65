"""Arithmetic in half: constants of masks that are too large for fp16, whose largest number is 65504. The patterns and the grades are those of
``half_arithmetic``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.checks.half_arithmetic import (
    AUTOCAST,
    FP16,
    grade,
    hit,
    untold,
)
from precisionlint.checks.half_products import SHOWN
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    BOOL,
    HALF_LAYERS,
    NUMBER,
    Called,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    known_half,
    may_be_half,
    named,
    number,
    sources,
)

FAMILY = Family(Automaton("half-range", None))

FP16_MAX = 65504.0
FILLS = {"masked_fill": ("value", 2), "index_fill": ("value", 3), "full_like": ("fill_value", 1), "fill_": ("value", 1),
         "new_full": ("fill_value", 2), "pad": ("value", 3)}  # fmt: skip
"""Ops that put one number into a tensor, and raise where its dtype does not hold it: the number's keyword and position."""
SCORES = regex(r"scores?$|attn|attention|energy|logits?$")
PICKED = regex(r"scores?$|logits?$|(?:^|_)l(?:og)?_?probs?$")
"""What a program calls the scores among which the largest is picked."""


DOES_NOT_FIT = "{:g} does not fit fp16 (at most 65504): {} raises on scores in fp16; torch.finfo(scores.dtype).min or -inf fits any dtype"


@FAMILY.rule(
    "mask-constant-overflow",
    Computed,
    Called,
    ops=(*FILLS, "where", "index_put", "cast", "mul", "add", "sub"),
)
def mask_constant_overflow(state: None, event: Computed | Called) -> Iterator[Any]:
    value = event.value
    if isinstance(event, Called):
        yield from filled_by_others(value, event.scope)
        return
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


MASKS = regex(r"mask", re.I)


def filled_by_others(value: Value, scope: Scope) -> Iterator[Any]:
    """``replace_masked_values(scores, mask, -1e7)`` of another library."""
    last = value.name.rpartition(".")[2]
    if not MASKS.search(last) or len(value.inputs) < 2 or scope.enabled is False or scope.kind == "test":
        return
    filled = value.inputs[0]
    given = [number(each) for each in (*value.inputs[2:], *value.options.values())]
    constant = next((each for each in given if each is not None and -float("inf") < each < -FP16_MAX), None)
    if constant is not None and (may_be_half(filled.dtypes) or untold(filled)):
        message = (
            f"{constant:g} does not fit fp16 (at most 65504): '{last}' raises on scores in fp16, or makes -inf of it; "
            "torch.finfo(scores.dtype).min fits any dtype"
        )
        yield hit("mask-constant-overflow", value, "possible", message, (FP16,))


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
        recast = not free and scope.enabled is None and value.op == "where" and scaled_product(filled)
        if "float16" not in filled.dtypes and (scope.enabled is False or not (free or recast)):
            continue
        yield hit(
            "mask-constant-overflow",
            value,
            "possible",
            f"{constant:g} does not fit fp16 (at most 65504): on scores in fp16 {'where gives' if value.op == 'where' else 'it becomes'} "
            f"{'-' * (constant < 0)}inf{' (some versions of torch raise)' if value.op == 'where' else ''}, and a row that is masked whole is "
            "NaN; torch.finfo(scores.dtype).min fits any dtype",
            (FP16, AUTOCAST) if recast else (FP16,),
            (Seen(scores.at, "the scores"),) if scores is not None else (),
        )
        return


MASK = regex(r"mask|(?:^|_)pad(?:ding)?$", re.I)


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
