"""Whether what is written to a stream is to be coloured."""

from __future__ import annotations

import os
from typing import TextIO


def colored(choice: str, stream: TextIO | None) -> bool:
    """``choice``: ``always``, ``never``, or ``auto``: on a terminal that shows colours, unless NO_COLOR is set."""
    if choice != "auto":
        return choice == "always"
    quiet = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream is not None and stream.isatty() and not quiet
