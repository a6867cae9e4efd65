"""Autocast regions: what runs inside one that should not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.events import Backward

FAMILY = Family(Automaton("autocast", None, lambda state, event: state))


@FAMILY.rule("backward-under-autocast", Backward)
def backward_under_autocast(state: None, event: Backward) -> Iterator[Any]:
    region = event.open_region
    if region is None or region.dtype not in ("float16", "bfloat16"):
        return
    yield Hit(
        "backward-under-autocast",
        event.at,
        "backward runs inside the autocast region: its ops already run in their forward's dtypes, and what it runs anew (recomputation, "
        "hooks, double backward) is cast once more; leave the region first",
        (Seen(region.at, f"{region.dtype} autocast is entered"), Seen(event.at, "backward, still inside", event.when)),
    )
