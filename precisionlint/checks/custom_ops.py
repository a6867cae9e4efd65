"""Ops that autocast does not know: it casts nothing for them, so they take whatever mixture arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.events import CustomOp

FAMILY = Family(Automaton("custom-ops", None, lambda state, event: state))


@FAMILY.rule("unregistered-custom-op", CustomOp)
def unregistered_custom_op(state: None, event: CustomOp) -> Iterator[Any]:
    if event.kind not in ("op", "launch") or event.autocast or event.region is None:
        return
    what = f"custom op '{event.name}'" if event.kind == "op" else f"Triton kernel '{event.name}'"
    remedy = "register_autocast says what it wants" if event.kind == "op" else "cast them before the launch"
    yield Hit(
        "unregistered-custom-op",
        event.defined,
        f"{what} runs under autocast without an autocast rule: its inputs arrive as they are, half and fp32 mixed; {remedy}",
        (
            Seen(event.region.at, f"{event.region.dtype or 'half'} autocast"),
            Seen(event.at, "called inside the region", event.when),
        ),
    )


@FAMILY.rule("function-without-custom-fwd", CustomOp)
def function_without_custom_fwd(state: None, event: CustomOp) -> Iterator[Any]:
    if event.kind != "function" or event.autocast or event.region is None:
        return
    yield Hit(
        "function-without-custom-fwd",
        event.defined,
        f"autograd.Function '{event.name}' runs under autocast without custom_fwd and custom_bwd: its forward runs under autocast, its "
        "backward does not, and the two see different dtypes",
        (
            Seen(event.region.at, f"{event.region.dtype or 'half'} autocast"),
            Seen(event.at, "applied inside the region", event.when),
        ),
    )
