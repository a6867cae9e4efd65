"""Arithmetic in half: what is normalised by hand, by the root of a mean of squares or by a standard deviation. The patterns and the grades are
those of ``half_arithmetic``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from precisionlint.checks.as_handed import NORM, told
from precisionlint.checks.base import Automaton, Change, Family, Remedy, Seen
from precisionlint.checks.half_arithmetic import TRAINING, grade, hit, kept_in, mean_of_squares, trains
from precisionlint.facts import AsHanded
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    UNKNOWN,
    Computed,
    Scope,
    Shows,
    Value,
    find,
    may_be_half,
    number,
    same,
    shown_by,
    sources,
)

FAMILY = Family(Automaton("half-moments", None))


OPS = ("cosine_similarity", "normalize", "sqrt", "pow", "mul", "div")


@FAMILY.rule("norm-without-upcast", Computed, AsHanded, ops=OPS)
def norm_without_upcast(state: None, event: Computed | AsHanded) -> Iterator[Any]:
    if isinstance(event, AsHanded):
        if event.what == NORM:
            yield told("norm-without-upcast", event)
        return
    value = event.value
    if value.op == "cosine_similarity":
        yield from cosine_similarity(value, event.scope)
    if not trains(event.scope):
        return
    if value.op in ("sqrt", "pow"):
        yield from root_by_hand(value, event.scope)
    if value.op in ("normalize", "div"):
        yield from by_length(value, event.scope)
    if value.op not in ("mul", "div") or len(value.inputs) != 2:
        return
    yield from standardised(value, event.scope)
    for x, factor in ((value.inputs[0], value.inputs[1]), (value.inputs[1], value.inputs[0])):
        root = inverse_root(factor, value.op)
        found = mean_of_squares(root) if root is not None else None
        if found is None:
            continue
        mean, square, operand = found
        # The variance of a hand-written layer norm is the mean of (x - mean) squared.
        if not (same(operand, x) or find(x, lambda v, o=operand: v is o, limit=20) or same_base(operand, x)):  # type: ignore[misc]
            continue
        how = grade(operand.dtypes, event.scope)
        if how is None and may_be_half(operand.dtypes - UNKNOWN):
            how = "possible"  # a region that is off casts nothing: what comes in half is half in it
        if how is None or "float32" in mean.dtypes:
            continue
        if mean.op == "sum":
            how = "possible"  # of vectors that are short, or of length one but for rounding
        needs = (TRAINING, shown_by(square.dtypes))
        what = "sum" if mean.op == "sum" else "mean"
        yield hit(
            "norm-without-upcast",
            mean,
            how,
            f"the {what} of squares is taken in {kept_in(how, operand.dtypes)}: in "
            "fp16 300 squared is inf, in bf16 the norm keeps 8 bits; normalise in fp32 and cast the result back",
            needs,
            (
                Seen(square.at, "squared as it comes"),
                Seen(value.at, f"and divided by the root of their {what}"),
            ),
            Remedy(
                (Change("operands", square.at, text="{}.float()"),), "what is not cast back after the norm becomes fp32"
            ),
        )
        return


def cosine_similarity(value: Value, scope: Scope) -> Iterator[Any]:
    """``F.cosine_similarity(x, y)``, which torch normalises and multiplies in their own dtype."""
    how = grade(value.dtypes, scope)
    if how is not None and scope.kind != "test":
        yield hit(
            "norm-without-upcast",
            value,
            "possible",
            f"the norms and the product of a cosine similarity are taken in {kept_in(how, value.dtypes)}: bf16 has steps of 1/256 near 1 (fp16: "
            "1/2048), and the guard of 1e-8 is 0 in fp16; cast both to float first",
            (Shows("half") if how == "certain" else shown_by(value.dtypes),),
        )


def root_by_hand(root: Value, scope: Scope) -> Iterator[Any]:
    """``(x - y).pow(2).mean().sqrt()``: a norm, or the root of a mean of squares, whatever it is for."""
    if root.op == "pow" and number(root.option("exponent", 1)) != 0.5:
        return
    found = mean_of_squares(root.inputs[0])
    how = grade(found[1].dtypes, scope) if found is not None else None
    if found is None or how is None or "float32" in found[0].dtypes or scope.enabled is False:
        return
    total, square, _ = found
    yield hit(
        "norm-without-upcast",
        total,
        "possible",
        f"a root of squares is taken in {kept_in(how, square.dtypes)}: in fp16 a number above 256 squared is inf, in bf16 8 bits of each square "
        "are left; square in fp32 and cast the root back",
        (TRAINING, shown_by(square.dtypes)),
        (Seen(square.at, "squared as it comes"), Seen(root.at, "the root")),
    )


NORMS = regex(r"norm|rms", re.I)


def by_length(value: Value, scope: Scope) -> Iterator[Any]:
    """``F.normalize(x, dim=-1) * scale``, ``x / (x.norm(dim=-1, keepdim=True) * width**-0.5 + eps)`` of a module that is called a norm."""
    if not NORMS.search(scope.owner) or scope.kind != "module" or not value.inputs:
        return
    length: Value | None = value
    if value.op == "div":
        length = find(value.inputs[1], lambda v: v.op == "norm", lambda v: v.op not in OF_A_SPREAD | {"mul"}, 16)
        if length is None or length.op != "norm" or not length.inputs or not same(length.inputs[0], value.inputs[0]):
            return
    assert length is not None
    how = grade(length.dtypes, scope)
    if how is None or "float32" in length.dtypes or "dtype" in length.options:
        return
    yield hit(
        "norm-without-upcast",
        length,
        "possible",
        f"the length that a norm divides by is rounded to {kept_in(how, length.dtypes)}: in bf16 it has 8 bits, and all of a row are off by up to "
        "0.4 % together; take it of x.float()",
        (TRAINING, shown_by(length.dtypes)),
        (Seen(value.at, "divided by it"),) if value is not length else (),
    )


def standardised(value: Value, scope: Scope) -> Iterator[Any]:
    """``(x - x.mean(-1)) / (x.std(-1) + eps)``: a layer norm of torch's own mean and deviation, both rounded before they are used."""
    for top, factor in (value.inputs, value.inputs[::-1])[: 1 if value.op == "div" else 2]:
        centred = next((s for s in factors(top) if s.op == "sub" and len(s.inputs) == 2), None)
        spread = find(factor, lambda v: v.op in ("var", "std"), lambda v: v.op not in OF_A_SPREAD, 16)
        if centred is None or spread is None or not spread.inputs or spread.op not in ("var", "std"):
            continue
        x, taken = centred.inputs
        mean = next((s for s in sources(taken) if s.op == "mean" and s.inputs), None)
        alongside = len(spread.inputs) > 1 or not spread.options.keys().isdisjoint({"dim", "axis"})
        if mean is None or not alongside or not same(mean.inputs[0], spread.inputs[0]) or not same(mean.inputs[0], x):
            continue
        how = grade(spread.dtypes, scope)
        if how is None or "float32" in spread.dtypes or scope.kind == "test":
            continue
        yield hit(
            "norm-without-upcast",
            spread,
            "possible",
            f"mean and deviation of a norm written by hand are rounded to {kept_in(how, spread.dtypes)} before they are used: around 10 the result "
            "is off by 2 % in bf16, where torch.nn.LayerNorm is by 0.2 %; take them of x.float()",
            (TRAINING, shown_by(spread.dtypes)),
            (Seen(mean.at, "the mean"), Seen(value.at, "what is divided by it")),
        )
        return


def factors(value: Value) -> Iterator[Value]:
    """What a value is, and where it is a product, what of: ``weight * (x - mean)``."""
    for source in sources(value):
        yield source
        if source.op == "mul":
            for factor in source.inputs:
                yield from sources(factor)


OF_A_SPREAD = frozenset(
    {"sqrt", "rsqrt", "add", "clamp", "pow", "reciprocal", "view", "either", "index", "cast", "div"}
)
"""What a factor is made of that a deviation is in."""


def inverse_root(value: Value, op: str) -> Value | None:
    """What the root is taken of, where a factor is one over a root (or, dividing, a root)."""
    for source in sources(value, frozenset({"view", "index", "either", "cast", "attribute"})):
        if source.op == "rsqrt" and op == "mul":
            return source.inputs[0]
        if source.op == "sqrt" and op == "div":
            return source.inputs[0]
        if source.op == "add" and op == "div":
            for part in source.inputs:
                inner = inverse_root(part, op) if part.op == "sqrt" else None
                if inner is not None:
                    return inner
        if source.op == "pow" and len(source.inputs) > 1:
            exponent = number(source.inputs[1])
            if (exponent == -0.5 and op == "mul") or (exponent == 0.5 and op == "div"):
                return source.inputs[0]
        if source.op == "div" and op == "mul" and number(source.inputs[0]) == 1.0:
            return inverse_root(source.inputs[1], "div")
        if source.op == "reciprocal" and op == "mul":
            return inverse_root(source.inputs[0], "div")
    return None


def same_base(left: Value, right: Value) -> bool:
    """Whether both are differences from one value (``x - mean``)."""
    a, b = next(sources(left), left), next(sources(right), right)
    return a.op == b.op == "sub" and same(a.inputs[0], b.inputs[0])
