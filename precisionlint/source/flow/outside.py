"""Whether programs outside a project run a file of it: what the project's own ones show is then not all that may reach it.

A project that packs its code for others is a library for these, whatever its examples train in; and what a folder is searched for when a
program runs is led to by no import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from precisionlint.patterns import regex

PACKS = {
    "setup.py": regex(rb"\bpackages\s*=|\bpy_modules\s*=|find(?:_namespace)?_packages\("),
    "setup.cfg": regex(rb"(?m)^packages\s*=|^py_modules\s*="),
    "pyproject.toml": regex(rb"(?m)^\[(?:project|tool\.poetry|tool\.flit\.metadata)\]"),
}
"""What a file says at a project's root that is packed for others."""
OWN = regex(
    r"^(?:tests?|docs?|examples?|scripts?|tools?|bench(?:mark)?s?|experiments?|projects?|recipes|apps?|demos?|configs?|notebooks?)$"
)
"""Folders that nobody outside a project imports from."""
SEARCHES = regex(rb"\biter_modules\(|\bwalk_packages\(")
IMPORTS = regex(rb"\bimport_module\(|\b__import__\(")


class Outside:
    """The callers of one project. ``files``: those of its programs; ``text``: a file's bytes without documentation; ``first``: where a file
    shows something; ``trained``: whether a program that trains leads to it."""

    def __init__(
        self,
        root: Path,
        files: list[Path],
        text: Callable[[Path], bytes],
        first: Callable[[str, Path], int | None],
        trained: Callable[[Path], bool],
    ) -> None:
        self.root = root
        self.files = files
        self.text = text
        self.first = first
        self.trained = trained

    def run(self, path: Path) -> bool:
        """Whether code that is not in the project may run a file of it in half: it knows of half precision at all."""
        return (self.is_packed(path) or (self.is_searched and not self.trained(path))) and self.knows_half

    def is_packed(self, path: Path) -> bool:
        """Whether a file is in a package that the project hands to others."""
        if not self.packs or not path.is_relative_to(self.root):
            return False
        folders = path.relative_to(self.root).parts[:-1]
        folders = folders[1:] if folders[:1] == ("src",) else folders
        return bool(folders) and not any(map(OWN.match, folders)) and (path.parent / "__init__.py").is_file()

    @cached_property
    def packs(self) -> bool:
        return any(found.search(self.text(self.root / name)) for name, found in PACKS.items())

    @cached_property
    def is_searched(self) -> bool:
        """Whether a program imports whatever it finds in a folder."""
        return any(SEARCHES.search(text) and IMPORTS.search(text) for text in map(self.text, self.files))

    @cached_property
    def knows_half(self) -> bool:
        return any(self.first(what, path) is not None for path in self.files for what in ("bf16", "fp16"))
