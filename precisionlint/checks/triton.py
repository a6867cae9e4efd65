"""Triton kernels: what they accumulate in, and how their dots are made, as their source says it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Change, Family, Hit, Remedy, Seen
from precisionlint.findings import Confidence
from precisionlint.kernel_facts import FOLLOWS, FP8, HALVES, Accumulated, Dotted, Reduced, Typed
from precisionlint.valueflow import Shows

FAMILY = Family(Automaton("triton", None))
DIGITS = {"fp16": 11, "bf16": 8}
STALLS = {"fp16": 2048, "bf16": 256}
"""Where adding ones to a sum stops to change it: 2 to the number of significant bits."""


@FAMILY.rule("triton-half-accumulator", Accumulated, Dotted)
def triton_half_accumulator(state: None, event: Accumulated | Dotted) -> Iterator[Any]:
    if isinstance(event, Dotted):
        yield from summed_in_half(event)
        return
    dtype = event.dtype.dtype
    if dtype == FOLLOWS:
        how = "tl.atomic_add adds in" if event.shared else f"'{event.name}' is summed up in"
        yield from follows("triton-half-accumulator", event, how, event.made)
    if dtype not in HALVES:
        return
    if event.shared:
        yield Hit(
            "triton-half-accumulator",
            event.at,
            f"tl.atomic_add to '{event.name}' adds in {dtype}: each program of the launch rounds the sum to {DIGITS[dtype]} bits, in an order "
            "that differs from run to run; add to an fp32 tensor and convert it once",
            (*_shown(event.dtype), Seen(event.at, "added to by each program")),
            confidence=_confidence(event.dtype),
        )
        return
    what = "the products of each tile" if event.by_dot else "each term"
    yield Hit(
        "triton-half-accumulator",
        event.at,
        f"'{event.name}' adds {what} in {dtype}: every turn of the loop rounds the sum to {DIGITS[dtype]} bits; make it in "
        f"tl.float32 and convert the result once, where it is stored",
        (
            Seen(event.made, f"'{event.name}' made in {dtype}"),
            *_shown(event.dtype),
            Seen(event.at, "added to in each turn"),
        ),
        confidence=_confidence(event.dtype),
        fix=Remedy(
            (
                Change("argument", event.made, "dtype@?", "triton.language.float32"),
                *((Change("argument", event.at, "out_dtype@!", "triton.language.float32"),) if event.by_dot else ()),
            ),
            "what the kernel does with the sum meets fp32 there",
        ),
    )


def summed_in_half(event: Dotted) -> Iterator[Hit]:
    """A dot that is told to sum its products in half, whatever its result goes on in."""
    out = event.summed_in
    if out is None or out.dtype not in HALVES:
        return
    then = (
        "whatever is made of the result: what overflows or is rounded off there is gone"
        if event.lifted
        else "and nothing lifts the result"
    )
    yield Hit(
        "triton-half-accumulator",
        event.at,
        f"out_dtype makes this dot sum its products in {out.dtype}, {DIGITS[out.dtype]} bits, {then}: leave out_dtype away "
        "(fp32), and convert where it is stored",
        _shown(out),
        confidence="possible" if event.lifted else _confidence(out),
    )


@FAMILY.rule("triton-half-reduction", Reduced)
def triton_half_reduction(state: None, event: Reduced) -> Iterator[Any]:
    dtype = event.dtype.dtype
    if dtype == FOLLOWS:
        yield from follows("triton-half-reduction", event, f"{event.api} adds in", event.at)
    if dtype not in HALVES:
        return
    yield Hit(
        "triton-half-reduction",
        event.at,
        f"{event.api} of {dtype} numbers adds in {dtype}, {DIGITS[dtype]} bits (ones stop to count at {STALLS[dtype]}); Triton does not "
        f"widen it: add .to(tl.float32) before",
        (*_shown(event.dtype), Seen(event.at, f"added up in {dtype}")),
        confidence=_confidence(event.dtype),
    )


def follows(rule: str, event: Accumulated | Reduced, what: str, made: Any) -> Iterator[Hit]:
    """A sum in the dtype of a tensor that the file's callers hand in."""
    pointers = " and ".join(sorted(event.dtype.of))
    if not all("type" in each.lower() for each in event.dtype.of):  # else the kernel is handed the dtype itself
        pointers = f"the dtype of {pointers}"
    given = isinstance(event, Accumulated) and event.shared and event.dtype.at is None  # made for it, perhaps in fp32
    yield Hit(
        rule,
        event.at,
        f"{what} {pointers}, which callers decide: of bf16 numbers it keeps 8 bits (ones stop to count at {STALLS['bf16']}), of "
        f"fp16 {DIGITS['fp16']}; Triton does not widen it: convert to tl.float32 first",
        (Seen(made, f"in {pointers}"), Seen(event.at, "added up in it")),
        confidence="likely" if event.dtype.handed and not given else "possible",
        needs=(Shows("half"),),
    )


@FAMILY.rule("triton-imprecise-fp8-dot", Dotted)
def triton_imprecise_fp8_dot(state: None, event: Dotted) -> Iterator[Any]:
    sides = [each for each in (event.a, event.b) if each is not None and each.dtype in FP8]
    if len(sides) < 2 or not event.carried or event.bounded:
        return
    yield Hit(
        "triton-imprecise-fp8-dot",
        event.at,
        f"on sm_90 '{event.carried}' stays in the tensor core over all of K, in about 14 bits: pass max_num_imprecise_acc=128, or add "
        f"the result of each dot: {event.carried} += tl.dot(a, b)",
        (*_shown(sides[0]), Seen(event.at, f"a dot of FP8 adds to '{event.carried}' in each turn of the loop")),
        confidence="certain" if all(each.sure for each in sides) else "likely",
    )


@FAMILY.rule("triton-default-tf32", Dotted)
def triton_default_tf32(state: None, event: Dotted) -> Iterator[Any]:
    if event.precise or event.a is None or event.b is None or (event.a.dtype, event.b.dtype) != ("fp32", "fp32"):
        return
    yield Hit(
        "triton-default-tf32",
        event.at,
        "a dot of fp32 operands runs in TF32 where the GPU has it: 11 bits of each operand count; say which is meant, "
        'input_precision="ieee", "tf32x3" or "tf32"',
        (*_shown(event.a), Seen(event.at, "a dot of fp32 with no input_precision")),
        confidence="certain" if event.a.sure and event.b.sure else "likely",
    )


def _confidence(dtype: Typed) -> Confidence:
    return "certain" if dtype.sure else "likely"


def _shown(dtype: Typed) -> tuple[Seen, ...]:
    return () if dtype.at is None else (Seen(dtype.at, f"{dtype.dtype} here, which a launch hands to the kernel"),)
