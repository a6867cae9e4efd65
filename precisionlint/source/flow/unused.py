"""Classes that nothing in a project speaks of: what its programs show of half precision does not reach them.

Read from words. A class counts as used where its name stands anywhere else, also in a comment, and where a file of the project may find it
by a name that it is not written with.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.subjects import File

ANY_NAME = regex(
    rb"importlib|import_module|__import__|entry_point|[Rr]egist(?:ry|er\b)|REGISTR|instantiate\w*\(|__subclasses__|__init_subclass__|metaclass"
    rb"|\bgetattr\((?!self\b)[^,()]+,\s*[^\"'\s]|globals\(\)|locals\(\)|__dict__|(?<![.\w])eval\("
)
"""What only a file holds that looks for something under a name which it is given."""


class Unused:
    """The classes of one project. ``files``: those of its programs, ``read``: a file's bytes."""

    def __init__(self, files: list[Path], read: Callable[[Path], bytes | None]) -> None:
        self._texts = {path: read(path) or b"" for path in files}
        self._by_any_name = any(ANY_NAME.search(text) for text in self._texts.values())

    def at(self, file: File, place: Place, shown: Place) -> bool:
        """Whether a place stands in such a class, and another file shows half precision: one that shows it itself may be handed the class."""
        if self._by_any_name or shown.path == file.display:
            return False
        own = around(file.syntax, place.line)
        return own is not None and not self._is_used(own, file, set())

    def _is_used(self, own: ast.ClassDef, file: File, seen: set[str]) -> bool:
        """Whether anything speaks of a class that is itself used; ``seen``: classes that are asked about already."""
        if own.decorator_list:
            return True
        seen.add(own.name)
        word = re.compile(rb"\b" + re.escape(own.name.encode()) + rb"\b")
        if any(path != file.path and word.search(text) for path, text in self._texts.items()):
            return True
        inside = range(own.lineno, (own.end_lineno or own.lineno) + 1)
        for number, line in enumerate(file.lines, 1):
            if number in inside or not word.search(line.encode("utf-8", "replace")):
                continue
            speaker = around(file.syntax, number)
            if speaker is None or (speaker.name not in seen and self._is_used(speaker, file, seen)):
                return True
        return False


def around(tree: ast.Module, line: int) -> ast.ClassDef | None:
    """The class at a file's top level that holds a line."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return next((each for each in classes if each.lineno <= line <= (each.end_lineno or each.lineno)), None)
