"""Regular expressions that are compiled when they are first asked.

There are some three hundred of them, of which a run over one file asks a quarter; to compile all took longer than to parse the file.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


class Pattern:
    """Stands for the ``re.Pattern`` of a text and its flags. A method or attribute that was asked for once is found without it."""

    def __init__(self, text: str | bytes, flags: int) -> None:
        self._given = text, flags
        self._compiled: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._compiled is None:
            self._compiled = re.compile(*self._given)
        found = getattr(self._compiled, name)
        setattr(self, name, found)
        return found


def regex(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """A pattern as ``re.compile`` gives it, compiled when it is first asked for anything.

    Raises ``re.error`` then, where the text is none.
    """
    return cast("re.Pattern[AnyStr]", Pattern(text, flags))
