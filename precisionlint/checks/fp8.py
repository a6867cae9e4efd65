"""FP8: scales that divide by zero, casts that do not saturate, gradients accumulated in 14 bits."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import Struct

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.kernel_facts import ScaledByAmax
from precisionlint.patterns import regex
from precisionlint.valueflow import (
    AMAX_NAME,
    FP8,
    WIDE,
    Called,
    Computed,
    Returned,
    Scope,
    Shows,
    Value,
    find,
    may_be_half,
    named,
    number,
    sources,
)

FAMILY = Family(Automaton("fp8", None))

LIMITS = frozenset({448.0, 57344.0, 240.0})
"""The largest values of E4M3, E5M2 and E4M3 FNUZ."""
LIMIT_OF_FP4 = 6.0
LIMITS_OF_BLOCKS = frozenset({448.0 * LIMIT_OF_FP4})
"""The largest value of FP4 in blocks whose scales are E4M3: the scale over them all is this over amax."""
LIMIT_NAME = regex(r"(?:fp8|f8|e4m3|e5m2|float8|quant|q|w_dtype).*max|max_?val|^fp8_max$", re.I)
LIMIT_OF_FP4_NAME = regex(r"(?:fp4|f4|e2m1|float4).*max", re.I)
E4M3 = frozenset({"float8_e4m3fn"})
"""The format whose casts saturate from torch 2.12 on."""
E5M2 = frozenset({"float8_e5m2"})
FP8_NAME = regex(r"f(?:p|loat)?8|e4m3|e5m2|w_dtype|quant", re.I)
CALLS = frozenset({"constructed", "unknown"})
"""What a function of another file gives."""
GIVEN = frozenset({"input", "buffer", "parameter"})
"""What does not come from the values at hand."""
SCALED = frozenset({"view", "either", "cast", "clamp", "round"})
"""Ops through which scaled values stay what they are, NaN among them."""
SCALE_NAME = regex(r"scale|inv_s|amax")
NAMES_A_SCALE = regex(r"scale|quant|sf\b|_sf_|factor")
ACTIVATIONS = regex(
    r"x|inp|inputs?|hidden(?:_states?)?|act(?:ivations?)?|q(?:uery)?|k(?:ey)?|v(?:alue)?|dy|dout|grads?|grad_out(?:put)?",
    re.I,
)
"""What a function's argument is called that is no weight."""
GRADIENT = regex(r"backward|(?:^|_)bwd(?:_|$)|grad_?(?:weight|input)|dgrad|wgrad")
FAST_AT = {"torch._scaled_mm": 7, "torch._scaled_grouped_mm": 8}
"""At which place a product takes ``use_fast_accum``, given without its name."""
PRODUCT = regex(r"scaled|gemm|mm(?:_|$)|matmul|f8f8")
OUTSIDE_TRAINING = regex(r"convert|export|infer|generat")
GUARDS = frozenset({"clamp", "maximum", "where", "nan_to_num", "masked_fill", "add"})
SHOWN = frozenset({"view", "either", "cast", "attribute", "stack", "index"})
"""Ops behind which the same magnitudes stand: ``x.abs().max(dim=-1)[0]``, ``scale[:, None]``."""


def is_limit(value: Value) -> bool:
    """Whether a value is the largest one of a narrow format: a constant, ``finfo(…).max``, or by its name."""
    for source in sources(value):
        if number(source) in LIMITS or is_limit_of_blocks(source):
            return True
        if source.op == "limit" and source.name == "max" and source.inputs[0].op == "finfo":
            return True
    return named(value, LIMIT_NAME)


def is_limit_of_blocks(value: Value) -> bool:
    """Whether a value is the largest one of numbers whose blocks have scales of a narrow format of their own: the product of two limits."""
    if value.op != "mul" or len(value.inputs) != 2:
        return number(value) in LIMITS_OF_BLOCKS
    return any(
        (is_limit(one) and (number(other) == LIMIT_OF_FP4 or named(other, LIMIT_OF_FP4_NAME)))
        or (one.op == other.op == "attribute" and one.name == other.name == "max")
        for one, other in (value.inputs, value.inputs[::-1])
    )


def replaced(value: Value) -> bool:
    """Whether a value is a constant on another path: the code has looked at what it came to."""
    return value.op == "either" and any(
        source.op in ("constant", "tensor", "ones", "ones_like", "full", "full_like")
        for option in value.inputs
        for source in sources(option, frozenset({"view", "cast"}))
    )


def looked_at(value: Value) -> bool:
    """Whether a value, or what it is a cast or a view of, is a constant on another path."""
    return any(map(replaced, sources(value, SHOWN - {"either"})))


def magnitude(value: Value) -> bool:
    """Whether a value is made of magnitudes; ones in their shape are made of none."""
    return find(value, lambda v: v.op == "abs", lambda v: v.op.endswith("_like"), limit=6) is not None


def amax_in(value: Value) -> Value | None:
    """The largest magnitude that a value is made of, where nothing on the way keeps it from zero. That of random numbers is not zero."""
    if looked_at(value) or find(value, lambda v: v.name.startswith("rand"), limit=24):
        return None
    for source in sources(value, SHOWN | {"number"}):
        if source.op in ("amax", "max") and source.inputs and magnitude(source.inputs[0]):
            return source
        if source.op == "maximum" and len(source.inputs) == 2 and all(map(magnitude, source.inputs)):
            return source  # of the smallest and the largest value
        if source.op == "norm" and any(
            number(v) == float("inf") for v in [*source.inputs[1:], *source.options.values()]
        ):
            return source
        if source.op == "input" and AMAX_NAME.search(source.name):
            return source
        if source.op in CALLS and AMAX_NAME.search(source.name.rpartition(".")[2]):
            return source
    computed = any(source.op in GUARDS for source in sources(value, SHOWN))
    return value if named(value, AMAX_NAME) and not computed else None


def raw_scale(value: Value, is_limit: Callable[[Value], bool] = is_limit) -> tuple[Value, Value, bool] | None:
    """(the scale, its amax, whether amax is the divisor) where a value is a scale whose amax may be zero."""
    scale = quotient(value, is_limit)
    return None if scale is None or looked_at(value) else scale


def quotient(value: Value, is_limit: Callable[[Value], bool]) -> tuple[Value, Value, bool] | None:
    """What ``raw_scale`` gives, whatever else the value is on another path."""
    for source in sources(value, SHOWN):
        if source.op == "div" and len(source.inputs) == 2:
            over, under = source.inputs
            if is_limit(under) and (amax := amax_in(over)) is not None:
                return source, amax, False
            # Python raises for a number.
            if under.op != "number" and is_limit(over) and (amax := amax_in(under)) is not None:
                return source, amax, True
        if source.op == "mul" and len(source.inputs) == 2:  # amax * (1 / limit), or a margin
            for one, other in (source.inputs, source.inputs[::-1]):
                if one.op == "div" and is_limit(one.inputs[1]) and (amax := amax_in(other)) is not None:
                    return source, amax, False
        if (
            source.op in ("div", "mul")
            and source.inputs
            and number(source.inputs[-1]) is None
            and source.inputs[-1].op == "pow"
        ):
            return raw_scale(source.inputs[0], is_limit)
        if source.op == "reciprocal" and source.inputs:
            inner = raw_scale(source.inputs[0], is_limit)
            if inner is not None and not inner[2]:
                return source, inner[1], True
    return None


@FAMILY.rule("fp8-zero-amax", Computed, Returned, ScaledByAmax, ops=("cast", "div", "mul"))
def fp8_zero_amax(state: None, event: Computed | Returned | ScaledByAmax) -> Iterator[Any]:
    if isinstance(event, ScaledByAmax):
        yield from scaled_in_kernel(event)
        return
    value = event.value
    if event.scope.kind == "test":
        return
    if isinstance(event, Returned):
        parts = value.inputs if value.op == "tuple" else (value,)
        for part in parts:
            yield from returned_scale(part, event)
        return
    if value.op == "cast" and not FP8.isdisjoint(value.dtypes):  # into FP8, by whatever range
        for scaled in sources(value.inputs[0], SCALED):
            yield from scaled_by_zero(scaled, another_range)
    else:
        yield from scaled_by_zero(value, is_limit)


def another_range(value: Value) -> bool:
    """Whether a value may be the range that numbers are scaled to for FP8, and is not that of FP8 itself, nor one of integers."""
    return not is_limit(value) and number(value) not in (7.0, 15.0, 127.0, 128.0, 255.0, 256.0)


def scaled_by_zero(value: Value, limit: Callable[[Value], bool]) -> Iterator[Hit]:
    """Values that are divided by, or multiplied with, a scale whose amax may be zero."""
    if value.op not in ("div", "mul") or len(value.inputs) != 2 or all(map(raw_scale, value.inputs)):  # of two scales
        return
    found = raw_scale(value.inputs[1], limit) or (raw_scale(value.inputs[0], limit) if value.op == "mul" else None)
    if found is None:
        return
    scale, amax, inverted = found
    if inverted == (value.op == "mul"):
        yield zero_amax(scale, amax, inverted, Seen(value.at, "the values are scaled by it"), "certain")


def scaled_in_kernel(event: ScaledByAmax) -> Iterator[Hit]:
    """What a Triton kernel does."""
    if event.floored:
        return
    what = "0 times an infinite scale" if event.inverse else "0 divided by a scale of 0"
    yield Hit(
        "fp8-zero-amax",
        event.at,
        f"where all of the numbers are zero this is {what}, NaN, and stays it in FP8: raise the largest magnitude to a floor first, such "
        "as 1e-12",
        (
            Seen(event.amax, "the largest magnitude, which may be 0"),
            Seen(event.used, "scaled by it, with no floor in between"),
        ),
    )


def returned_scale(value: Value, event: Returned) -> Iterator[Hit]:
    """A scale that a function gives back: whoever divides by it meets zero."""
    found = raw_scale(value)
    plain = found is not None and any(  # Python raises where it divides by it
        find(part, lambda v: v.op == "number", limit=8) for part in found[0].inputs if not is_limit(part)
    )
    if found is not None and not plain and (NAMES_A_SCALE.search(event.scope.function) or of_blocks(found[0])):
        scale, amax, inverted = found
        # A scale of 0 over blocks may do no more than multiply what was quantised without it.
        sure = inverted or not of_blocks(scale)
        yield zero_amax(
            scale, amax, inverted, Seen(event.at, "and is returned as it is"), "likely" if sure else "possible"
        )
        return
    # where(amax > 0, limit / amax, …) leaves an amax so small that the quotient is inf.
    for chosen in sources(value, frozenset({"view", "cast"})):
        if chosen.op == "where" and len(chosen.inputs) == 3:
            inner = find(chosen, lambda v: v.op == "div" and raw_scale(v) is not None, limit=48)
            found = raw_scale(inner) if inner is not None else None
            checked = find(chosen, lambda v: v.op in ("clamp", "maximum", "minimum", "nan_to_num"), limit=48)
            tests = find(chosen, partial(is_test_of, of=inner), limit=48)
            if found is not None and found[2] and checked is None and tests is None:
                scale, amax, _ = found
                yield Hit(
                    "fp8-zero-amax",
                    scale.at,
                    "the limit over amax overflows to inf for an amax below 1.3e-36, which amax > 0 lets through: values "
                    "become inf and zeros among them NaN; give amax a floor",
                    (Seen(amax.at, "the largest magnitude"), Seen(chosen.at, "only zero is excluded")),
                )


def of_blocks(scale: Value) -> bool:
    """Whether a quotient is the scale over blocks that have scales of their own: nothing else is made of two limits."""
    return any(is_limit_of_blocks(part) for each in scale.inputs for part in sources(each))


def is_test_of(value: Value, of: Value | None) -> bool:
    """Whether a value is a test (``isinf(of)``, ``of > 0``) that looks at another one; one of its exponent's sign sees no overflow."""
    sign = not value.name and number(value.inputs[-1]) == 0 if value.op == "test" and value.inputs else False
    return value.op == "test" and any(
        find(part, lambda v: v is of, lambda v: sign and v.op.startswith("log"), limit=8) for part in value.inputs
    )


def zero_amax(scale: Value, amax: Value, inverted: bool, use: Seen, confidence: Any) -> Hit:
    if amax.op not in ("amax", "max", "maximum", "norm"):  # known by its name: what made it may have seen to zeros
        confidence = "possible" if amax.op in CALLS or confidence == "possible" else "likely"
    follows = "the scale is inf, and 0 * inf is NaN" if inverted else "the scale is 0, and 0 / 0 is NaN"
    return Hit(
        "fp8-zero-amax",
        scale.at,
        f"a block of zeros has amax 0: {follows}; give amax a floor (clamp(min=1e-12)) before the division",
        (Seen(amax.at, "the largest magnitude, no floor under it"), use),
        confidence=confidence,
    )


@FAMILY.rule("fp8-cast-without-clamp", Computed, ops=("cast",))
def fp8_cast_without_clamp(state: None, event: Computed) -> Iterator[Any]:
    value = event.value
    if not value.inputs or event.scope.kind == "test":
        return
    if OUTSIDE_TRAINING.search(f"{event.scope.owner} {event.scope.function}".lower()):
        return
    if value.name.startswith("triton."):
        return  # a cast of Triton's saturates
    known = not FP8.isdisjoint(value.dtypes)
    words = (*value.dtypes, value.name, *(named.name for named in (*value.inputs[1:], *value.options.values())))
    if any(word.startswith("triton.") for word in words):  # whose casts saturate
        return
    if not known and not any(FP8_NAME.search(name) for name in (*value.dtypes, value.name)):
        return
    scaled = next(
        (s for s in sources(value.inputs[0], SHOWN | {"round"}) if s.op in ("div", "mul")),
        None,
    )
    if scaled is None and known:
        yield from as_it_is(value)
    if scaled is None or len(scaled.inputs) != 2:
        return
    at = next((place for place in (1, 0) if is_scale(scaled.inputs[place])), None)
    given = at is None
    if given:  # by what was handed in, whatever it is called
        handed = (place for place in (1, 0) if all(s.op in GIVEN for s in sources(scaled.inputs[place], SHOWN)))
        at = next((place for place in handed if place or scaled.op == "mul"), None)
    if at is None or fixed(scaled.inputs[1 - at]):  # a multiple of the scale itself
        return
    if own_amax(scaled.inputs[at], scaled.inputs[1 - at]):
        yield from rounded_scale(value, scaled, scaled.inputs[at], known)
        return
    yield Hit(
        "fp8-cast-without-clamp",
        value.at,
        "scaled values are cast to FP8 with nothing to saturate them, and the scale is not that of their own amax: what lies beyond the format's "
        "largest value becomes NaN in E4M3 (before torch 2.12) and Inf in E5M2; clamp to its limits first",
        (Seen(scaled.at, "scaled here"),),
        confidence="possible" if given else "certain" if known else "likely",
        fix=Remedy(
            (Change("receiver", value.at, text="{}.clamp(torch.finfo({dtype}).min, torch.finfo({dtype}).max)"),),
            "" if known else "it raises where this is a dtype of integers",
        ),
        torch="<2.12" if frozenset(value.dtypes) == E4M3 else "",
    )


def as_it_is(cast: Value) -> Iterator[Hit]:
    """Activations or gradients that a function is handed and casts with no scale at all."""
    if all(each.op == "input" and ACTIVATIONS.fullmatch(each.name) for each in sources(cast.inputs[0])):
        yield Hit(
            "fp8-cast-without-clamp",
            cast.at,
            "what the caller hands in is cast to FP8 as it is, with no scale and nothing to saturate it: an activation or a gradient beyond the "
            "format's largest value becomes NaN in E4M3 (before torch 2.12) and Inf in E5M2; clamp to its limits first",
            (),
            confidence="possible",
            torch="<2.12" if frozenset(cast.dtypes) == E4M3 else "",
        )


class Coarse(Struct, frozen=True):
    """Below which amax a scale, amax over the format's limit, is a number of so few steps of its dtype's least that it may be rounded down
    by more than the format can take, and what comes of it."""

    fp16: str
    bf16: str
    fp32: str
    beyond: str


OF_E4M3 = Coarse("3.6e-4", "5.1e-37", "8.5e-42", "464, which E4M3 makes NaN (before torch 2.12)")
OF_E5M2 = Coarse("0.022", "3.4e-35", "5.2e-40", "61440, which E5M2 makes Inf")


def rounded_scale(cast: Value, scaled: Value, scale: Value, known: bool) -> Iterator[Hit]:
    """An amax over the limit that is itself a small number of fp16, with no floor under it: rounded, it is too small by up to a half."""
    found = raw_scale(scale)
    if found is None or found[2]:
        return
    seen = (Seen(scaled.at, "scaled by it"), Seen(cast.at, "cast with nothing to saturate it"))
    limits = OF_E5M2 if frozenset(cast.dtypes) == E5M2 else OF_E4M3
    if not may_be_half(scaled.dtypes - WIDE) or "bfloat16" in scaled.dtypes:
        yield Hit(
            "fp8-cast-without-clamp",
            found[0].at,
            f"this scale of the values' own amax has no floor, and nothing saturates the cast: below an amax of {limits.fp32} in fp32, or "
            f"{limits.bf16} in bf16, it is rounded so coarsely that scaled values lie beyond {limits.beyond}; give it a floor, and clamp",
            seen,
            confidence="possible",
            torch="<2.12" if frozenset(cast.dtypes) == E4M3 else "",
        )
        return
    yield Hit(
        "fp8-cast-without-clamp",
        found[0].at,
        f"where the values are fp16 so is their scale, and it has no floor: below an amax of {limits.fp16} it is rounded so coarsely that scaled "
        f"values lie beyond {limits.beyond}; scale in fp32, and clamp to the format's limits before the cast",
        seen,
        confidence="certain" if known and scaled.dtypes == {"float16"} else "likely",
        needs=() if scaled.dtypes == {"float16"} else (Shows("fp16"),),
        torch="<2.12" if frozenset(cast.dtypes) == E4M3 else "",
    )


def fixed(value: Value) -> bool:
    return number(value) is not None or is_limit(value)


def is_scale(value: Value) -> bool:
    if amax_in(value) is not None or raw_scale(value) is not None:
        return True
    return scale_named(value) or bool(find(value, lambda v: v.op in ("amax", "max") and bool(v.inputs), limit=12))


def scale_named(value: Value) -> bool:
    """Whether the program calls a value, or what it is a multiple of, a scale or an amax."""
    todo = list(sources(value, SHOWN - {"attribute"}))
    multiplied = [part for each in todo if each.op in ("div", "mul") for part in each.inputs]
    return named(value, SCALE_NAME) or any(
        named(source, SCALE_NAME) for part in multiplied for source in sources(part, SHOWN - {"attribute"})
    )


def own_amax(scale: Value, scaled: Value) -> bool:
    """Whether a scale comes from the largest magnitude of what it scales: then no scaled value lies beyond the limit."""
    held = upstream(scaled)
    amax = find(scale, lambda v: v.op in ("amax", "max", "norm") or (v.op == "maximum" and magnitude(v)), limit=24)
    return amax is not None and find(amax, lambda v: id(v) in held, limit=120) is not None


def upstream(value: Value, limit: int = 120) -> set[int]:
    """The ids of what a value is made of, numbers and names aside."""
    todo, seen = [value], {id(value)}
    for current in todo:
        for other in current.inputs:
            if (
                id(other) not in seen
                and len(seen) < limit
                and other.op not in ("constant", "external", "number", "size", "limit")
            ):
                seen.add(id(other))
                todo.append(other)
    return seen


@FAMILY.rule("fp8-fast-accumulation-in-backward", Called)
def fp8_fast_accumulation_in_backward(state: None, event: Called) -> Iterator[Any]:
    options = event.value.options
    place = FAST_AT.get(event.value.name)
    if not options and place is None:
        return
    if event.scope.kind == "backward" or GRADIENT.search(event.scope.function):
        flag = options.get("use_fast_accum") if place is None else event.value.option("use_fast_accum", place)
        split = options.get("use_split_accumulator")
        partial_of = event.value.inputs[:1] if event.value.name == "functools.partial" else ()
        called = partial_of[0].name if partial_of else event.value.name
        if flag is not None and flag.constant is True and PRODUCT.search(called):
            named = "use_fast_accum" in options  # without its name it would be given twice
            fix = (
                Remedy((Change("argument", event.at, "use_fast_accum", "False"),), shared(event.scope))
                if named
                else None
            )
            yield fast(flag.at, "use_fast_accum=True", "False", Seen(event.at, "a product of gradients"), fix)
        elif split is not None and split.constant is False and PRODUCT.search(called):
            fix = Remedy((Change("argument", event.at, "use_split_accumulator", "True"),), shared(event.scope))
            yield fast(split.at, "use_split_accumulator=False", "True", Seen(event.at, "a product of gradients"), fix)
    for name, given in options.items():  # a configuration of the product that makes a gradient
        flag = given.options.get("use_fast_accum") if GRADIENT.search(name) else None
        if flag is not None and flag.constant is True:
            yield fast(flag.at, "use_fast_accum=True", "False", Seen(given.at, f"handed on as {name}"), None)


def shared(scope: Scope) -> str:
    """What else changes with a call in a function: by its name it is one of the backward, or it is a helper, which others may call."""
    if GRADIENT.search(scope.function):
        return ""
    return f"{scope.function or 'the function'} is called by the backward, and whatever else calls it changes too"


def fast(at: Any, what: str, instead: str, seen: Seen, fix: Remedy | None) -> Hit:
    return Hit(
        "fp8-fast-accumulation-in-backward",
        at,
        f"{what} in the backward: Hopper then keeps partial sums of gradients in 14 bits; pass {instead} here (the forward can bear it)",
        (seen,),
        fix=fix,
    )


@FAMILY.rule("mxfp8-e5m2", Called)
def mxfp8_e5m2(state: None, event: Called) -> Iterator[Any]:
    made = event.value
    if made.name.rpartition(".")[2] != "MXFP8BlockScaling":
        return
    chosen = made.options.get("fp8_format")
    if chosen is None or not chosen.name.endswith(("Format.HYBRID", "Format.E5M2")):
        return
    yield Hit(
        "mxfp8-e5m2",
        chosen.at,
        f"MXFP8 with {chosen.name.rpartition('.')[2]}: gradients in E5M2 keep 2 bits, and blocks of 32 with a scale each need no wider range; "
        "trainings diverged with it. Use Format.E4M3",
        (Seen(event.at, "the recipe"),),
    )
