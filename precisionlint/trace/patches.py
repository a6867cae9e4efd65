"""Replaces attributes of classes and modules for the length of a window and puts them back. Knows nothing of what they
do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

MISSING = object()


class UnsupportedTorchError(RuntimeError):
    """This torch lacks a private function that the audit builds on; the message names it."""


class Patches:
    """The replacements of one window. Each is undone by ``undo``, in reverse order, unless someone replaced it again
    since.
    """

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Sets ``owner.name`` to ``make(original)``; raises UnsupportedTorchError where the owner has no such
        attribute.
        """
        current = getattr(owner, name, None)
        if current is None:
            import torch

            raise UnsupportedTorchError(
                f"torch {torch.__version__} has no {getattr(owner, '__name__', owner)}.{name}, which audit builds on"
            )
        own = vars(owner).get(name, MISSING)
        new = make(current)
        setattr(owner, name, new)
        self._done.append((owner, name, own, new))

    def undo(self) -> None:
        """Puts everything back; a later replacement by someone else stays."""
        while self._done:
            owner, name, own, new = self._done.pop()
            if vars(owner).get(name) is not new:
                continue
            if own is MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def subclasses(cls: type) -> Iterator[type]:
    """All classes below this one, each once."""
    seen: set[type] = set()
    todo = [cls]
    while todo:
        each: type
        for each in todo.pop().__subclasses__():
            if each not in seen:
                seen.add(each)
                todo.append(each)
                yield each
