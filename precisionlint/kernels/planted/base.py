"""What a planted kernel is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct


class Planted(Struct, frozen=True):
    """A launcher, what is wrong with it (empty where nothing is), and the contract that it should keep."""

    name: str
    launch: Callable[..., Any]
    contract: str
    options: tuple[tuple[str, str], ...] = ()
    fault: str = ""
