"""Ops that autocast does not know: it casts nothing for them, so they take whatever mixture arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.events import CustomOp
from precisionlint.valueflow import Defined, Shows

FAMILY = Family(Automaton("custom-ops", None))


@FAMILY.rule("unregistered-custom-op", CustomOp, Defined)
def unregistered_custom_op(state: None, event: CustomOp | Defined) -> Iterator[Any]:
    if event.kind == "function":
        return
    what = f"Triton kernel '{event.name}'" if event.kind == "launch" else f"custom op '{event.name}'"
    remedy = "cast them before the launch" if event.kind == "launch" else "register_autocast says what it wants"
    if isinstance(event, Defined):
        comes = (
            "its weights stay fp32 while the activations beside them come in half"
            if event.mixes
            else "it is not cast, and gives fp32 for fp32 inputs where the ops beside it give half"
            if event.follows
            else "its inputs arrive as they are, and where some of them are half and some fp32 nothing brings them to one dtype"
        )
        yield defined(event, "unregistered-custom-op", f"{what} has no autocast rule: under autocast {comes}; {remedy}")
    elif event.region is not None and not event.autocast:
        yield Hit(
            "unregistered-custom-op",
            event.defined,
            f"{what} runs under autocast without an autocast rule: its inputs arrive as they are, half and fp32 mixed; {remedy}",
            (
                Seen(event.region.at, f"{event.region.dtype or 'half'} autocast"),
                Seen(event.at, "called inside the region", event.when),
            ),
        )


@FAMILY.rule("function-without-custom-fwd", CustomOp, Defined)
def function_without_custom_fwd(state: None, event: CustomOp | Defined) -> Iterator[Any]:
    if event.kind != "function":
        return
    what = f"autograd.Function '{event.name}'"
    if isinstance(event, Defined):
        differs = (
            "the inputs of its kernels arrive as they are, half and fp32 mixed, and what it saved may have another dtype than the gradient "
            "that comes back; custom_fwd(cast_inputs=…) brings them to one"
            if event.launches and not event.forward_only
            else "its forward is cast and its backward is not, and what it saved has another dtype than the gradient that comes back"
        )
        what = f"{what} has {'custom_fwd and no custom_bwd' if event.forward_only else 'no custom_fwd and custom_bwd'}"
        yield defined(event, "function-without-custom-fwd", f"{what}: under autocast {differs}")
    elif event.region is not None and not event.autocast:
        yield Hit(
            "function-without-custom-fwd",
            event.defined,
            f"{what} runs under autocast without custom_fwd and custom_bwd: its forward runs under autocast, its backward does not, and the "
            "two see different dtypes",
            (
                Seen(event.region.at, f"{event.region.dtype or 'half'} autocast"),
                Seen(event.at, "applied inside the region", event.when),
            ),
        )


def defined(event: Defined, rule: str, message: str) -> Hit:
    """A finding at a definition: whether it runs under autocast is for the programs of the file to show."""
    needs = (Shows("training"), Shows("half autocast", elsewhere=True))
    return Hit(rule, event.at, message, (), confidence="likely" if event.mixes else "possible", needs=needs)
