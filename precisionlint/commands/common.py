"""What the commands share: their outcome, wrong usage, colours, and the types of options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from msgspec import Struct

from precisionlint.errors import InputError


class UsageError(InputError):
    """The options make no sense together."""


class Outcome(Struct, frozen=True):
    """What a command leaves: its exit code, and the lines for standard output. ``live``: they come one by one, over time."""

    code: int
    lines: Iterable[str]
    live: bool = False


def add_color(command: argparse._ActionsContainer) -> None:
    command.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )


def words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise argparse.ArgumentTypeError("names no rule")
    return words


def complain(message: str) -> None:
    print(f"precisionlint: {message}", file=sys.stderr)
