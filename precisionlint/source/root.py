"""Where a project lies: its root, its Python files, and at which files the name of a module may lead. Imports nothing heavy, so that a
run answered from the cache can ask too."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from precisionlint.patterns import regex


def python_files(root: Path) -> Iterator[Path]:
    """The Python files below a folder, hidden folders left out, and pipes and the like, which may never end."""
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in ("node_modules", "site-packages")
        )
        for name in names:
            if name.endswith(".py") and os.path.isfile(path := os.path.join(folder, name)):
                yield Path(path)


PRECISION = regex(rb"allow_tf32|float32_matmul_precision|fp32_precision")
PRECISION_FILES = 5_000
"""How many files of a project are searched for a setting of the matmul precision."""

IMPORTED = regex(
    rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(?:\(([^)]*)\)|([^\n#;]*))|import[ \t]+([\w., \t]+))", re.M
)
"""An import: the module that names are taken from, these names in brackets or not, or the modules imported as a whole."""
DEFINED = regex(rb"^(?:class|def)[ \t]+(\w+)", re.M)
"""What a file defines at its top level."""

ROOT_MARKS = ("pyproject.toml", "setup.py", "setup.cfg", ".git")


def find_root(path: Path, marked: dict[str, bool] | None = None) -> Path:
    """The project that a file belongs to: the nearest folder above it with a pyproject.toml, setup.py or .git; where there is none,
    the current folder if the file is in it, else the file's own. ``marked`` remembers which folders are roots, from call to call."""
    marked = {} if marked is None else marked
    for folder in path.parents:
        name = str(folder)
        if name not in marked:
            marked[name] = any(os.path.exists(f"{name}/{mark}") for mark in ROOT_MARKS)
        if marked[name]:
            return folder
    here = Path.cwd()
    return here if here in path.parents else path.parent


def surveyed_files(root: Path) -> list[Path]:
    """The Python files of a project that are searched for a setting of the matmul precision."""
    return sorted(itertools.islice(python_files(root), PRECISION_FILES))


def file_of(base: Path) -> Path | None:
    """The file of a module whose path without a suffix is ``base``: that of a package before a single one; None where there is none, or
    nobody may look."""
    init = base / "__init__.py"
    if os.path.isfile(init):  # `Path.is_file` raises where a folder may not be entered, and on a name that is too long
        return init
    single = base.with_name(f"{base.name}.py")
    return single if os.path.isfile(single) else None


def uses(name: bytes, data: bytes) -> set[bytes]:
    """What stands behind a module's name: ``.part.thing``."""
    return set(re.findall(rb"\b" + re.escape(name) + rb"((?:\.\w+)+)", data))


def names_in(data: bytes) -> bytes:
    """What decides which files a file imports, and what others may import from it: as long as all files of a project keep this, each has
    the same importers."""
    told = [*DEFINED.findall(data)]
    for match in IMPORTED.finditer(data):
        told.append(match[0])
        for whole in (match[4] or b"").split(b","):
            module, _, alias = whole.partition(b" as ")
            if name := (alias or module).strip():
                told += sorted(uses(name, data))
    return b"\n".join(told)
