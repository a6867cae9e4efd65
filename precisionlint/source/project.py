"""The files of a project: where a module's name leads, and each file read, parsed and lowered when it is needed.

Reads nothing outside the project's root and runs nothing.
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import sys
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from precisionlint.memory import collect
from precisionlint.patterns import regex
from precisionlint.source.apis import table
from precisionlint.source.module import ProjectModule
from precisionlint.source.outline import Outline
from precisionlint.source.parsing import (
    UnreadableError,
    decode,
    parse,
    split_lines,
    without_remarks,
)
from precisionlint.source.root import PRECISION, file_of, surveyed_files
from precisionlint.source.screen import own_words
from precisionlint.subjects import File

IMPORTED = regex(rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import|import[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*))", re.M)

FILE_WORDS = (
    b"GradScaler", b"scaler", b"unscale_", b"autocast", b"clip_grad", b"backward(", b"zero_grad", b"bfloat16", b"float16", b".half(",
    b"optim.", b"Adam", b"SGD(", b"custom_op", b"Function)", b".grad", b"loss_scale", b"FullyShardedDataParallel", b"triton",
    b"torch.save", b"state_dict", b"from_pretrained", b"requires_grad", b"fully_shard", b"Accelerator(", b"set_default_dtype",
)  # fmt: skip
OUTLINES = 6_000
"""How many outlines a project keeps between two programs."""


TREES = 64
"""So many trees are kept: what a file reaches may be thousands of others, of which an outline is all that is wanted."""
KEPT = 40
"""How many parsed files a project keeps between two programs: memory against parsing again."""

LONGEST = 400_000
"""Bytes of a file that another one's values are followed into."""

SKIPPED_NAMES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "transformers", "yaml", "tqdm"}


class Project:
    """The modules under one root, each loaded at most once. ``device``: what its programs train on, where the settings say so;
    ``frameworks``: what they say of classes and functions that ``apis.table`` does not know."""

    def __init__(self, root: Path, device: str = "", frameworks: tuple[tuple[str, str], ...] = ()) -> None:
        self.root = root
        self.device = device
        self.apis = table(frameworks)
        self.own_words = tuple(own_words(frameworks))
        self.own_names = re.compile("|".join(rf"\b{word.decode()}\b" for word in self.own_words) or "(?!)")
        self.given: dict[Path, bytes] = {}
        """What stands for the file that is being read."""
        self.modules: dict[Path, ProjectModule | None] = {}
        self.files: dict[Path, File | None] = {}
        self.errors: dict[Path, UnreadableError] = {}
        self.outlines: dict[Path, Outline | None] = {}
        self._reaches: dict[tuple[Path, str, str], bool] = {}
        self._trees: dict[Path, tuple[bytes, ast.Module | UnreadableError]] = {}
        self._worth: dict[Path, bool] = {}
        self._found: dict[tuple[str, int, str], tuple[Path | None, dict[Path, Path | None]]] = {}
        self.looked: dict[Path, dict[Path, Path | None]] = {}
        """What the reading of each file asked for: path without a suffix -> the file found there. A result holds while these answers and
        the files that they lead to stay what they are."""
        self.surveyed: set[Path] = set()
        """The files for which every file of the project was asked whether it sets the matmul precision."""
        self.weighed: set[Path] = set()
        """The files for which every file of the project was asked what it shows (see ``flow.evidence``)."""
        self.called: dict[Path, set[Path]] = {}
        """The files for which those that import them were asked what they hand them (see ``callers``), and these."""

    def read(self, path: Path) -> bytes | None:
        """The bytes of a file; of the one at hand, what is read of it (an editor's text, a notebook's cells)."""
        if path in self.given:
            return self.given[path]
        try:
            return path.read_bytes()
        except OSError:
            return None

    def syntax(self, path: Path, data: bytes) -> ast.Module:
        """The tree of a file: parsed once for all that read it, and changed by none of them.

        Raises: UnreadableError.
        """
        kept = self._trees.get(path)
        if kept is None or kept[0] != data:
            try:
                kept = data, parse(data)
            except UnreadableError as error:
                kept = data, error
        else:
            del self._trees[path]
        self._trees[path] = kept
        if len(self._trees) > TREES:
            del self._trees[next(iter(self._trees))]  # the one that was asked for least lately
        if isinstance(kept[1], UnreadableError):
            raise kept[1]
        return kept[1]

    def file(self, path: Path) -> File | None:
        """A Python file of the project as value flow reads it; None where it cannot be parsed or is too long to follow."""
        if path not in self.files:
            self.files[path] = None
            data = self.read(path)
            if data is not None and len(data) < LONGEST:
                file = File(path.as_posix(), path, data, self)
                with contextlib.suppress(UnreadableError, RecursionError):
                    file.syntax  # noqa: B018 - parsed once, here
                    self.files[path] = file
        return self.files[path]

    def load(self, path: Path, data: bytes | None = None) -> ProjectModule | None:
        """The module of a file, or None where it cannot be read (why: ``errors``)."""
        if path not in self.modules:
            if data is None:
                data = self.read(path)
            self.modules[path] = None
            if data is not None:
                try:
                    self.modules[path] = ProjectModule(self, path, self.name_of(path), data)
                except UnreadableError as error:
                    self.errors[path] = error
                except RecursionError:
                    self.errors[path] = UnreadableError(None, "nested too deeply to be read")
        return self.modules[path]

    def outline(self, path: Path) -> Outline | None:
        """What a file defines and imports, or None where it holds nothing that matters."""
        if path not in self.outlines:
            self.outlines[path] = None
            data = self.read(path) if self.worth_reading(path) else None
            if data is not None:
                with contextlib.suppress(UnreadableError, RecursionError):
                    syntax = self.syntax(path, data)
                    self.outlines[path] = self.outlined(
                        path, syntax, without_remarks(syntax, split_lines(decode(data)))
                    )
        return self.outlines[path]

    def outlined(self, path: Path, syntax: ast.Module, code: list[str]) -> Outline:
        """The outline of a file of which the code has been read."""
        return Outline(syntax, code, lambda imported: self.resolve(imported.module, imported.level, path) is None)

    def reaches(self, path: Path, name: str, kind: str) -> bool:
        """Whether a name of a file, or anything that it names in turn, holds a mark of this kind (see ``marks.MARKS``).

        The answer does not depend on what was asked before: that something holds none is kept only where all that it leads to was seen.
        """
        seen: set[tuple[Path, str, str]] = set()
        found = self._search((path, name, kind), seen)
        if not found:
            self._reaches.update(dict.fromkeys(seen, False))
        return found

    def _search(self, key: tuple[Path, str, str], seen: set[tuple[Path, str, str]]) -> bool:
        if key in self._reaches:
            return self._reaches[key]
        if key in seen:
            return False
        seen.add(key)
        path, name, kind = key
        outline = self.outline(path)
        if outline is None or not self._reach(outline, path, name, kind, seen):
            return False
        self._reaches[key] = True
        return True

    def _reach(self, outline: Outline, path: Path, name: str, kind: str, seen: set[tuple[Path, str, str]]) -> bool:
        found = outline.definitions.get(name)
        if found is not None:
            if any(definition.holds(kind) or self.names_own(definition.text, definition.span) for definition in found):
                return True
            named = frozenset().union(*map(outline.named, found)) - {name}
            return any(self._search((path, word, kind), seen) for word in sorted(named))
        imported = outline.imports.get(name)
        targets = [imported] if imported is not None else outline.stars
        for target in targets:
            other = self.resolve(target.module, target.level, path)
            if other is None:
                continue
            if target.name is None:
                inner = self.outline(other)
                if inner is not None and inner.holds(kind):
                    return True
            elif self._search((other, name if target.name == "*" else target.name, kind), seen):
                return True
            elif other.name == "__init__.py":
                part = self.part(other, target.name)
                inner = self.outline(part) if part is not None else None
                if inner is not None and inner.holds(kind):
                    return True
        return False

    def names_own(self, text: str, span: tuple[int, int]) -> bool:
        """Whether a text names something that the settings say a contract of."""
        return bool(self.own_words) and self.own_names.search(text, *span) is not None

    def forget_large(self) -> None:
        """Drops the trees once there are many: the next program loads what it needs itself."""
        if len(self.modules) > KEPT or len(self.files) > KEPT:
            self.modules.clear()
            self.files.clear()
            collect()  # what functions and their frames keep of each other
        if len(self.outlines) > OUTLINES:
            self.outlines.clear()
            self._reaches.clear()

    def sets_matmul_precision(self, path: Path) -> bool:
        """Whether a file that this one imports, or that imports it, says how fp32 products are to run."""
        seen: set[Path] = set()
        todo = [path]
        while todo and len(seen) < 200:
            current = todo.pop()
            data = None if current in seen else self.read(current)
            seen.add(current)
            if data is not None:
                if PRECISION.search(data):
                    return True
                todo.extend(target for target in self.imports_of(current, data) if target is not None)
        self.surveyed.add(path)
        return any(path in self.imports_of(setter, data) for setter, data in self.precision_setters)

    @cached_property
    def precision_setters(self) -> list[tuple[Path, bytes]]:
        """The files under the root that set the matmul precision."""
        found = ((path, self.read(path)) for path in surveyed_files(self.root))
        return [(path, data) for path, data in found if data is not None and PRECISION.search(data)]

    def name_of(self, path: Path) -> str:
        try:
            parts = list(path.relative_to(self.root).with_suffix("").parts)
        except ValueError:
            parts = [path.stem]
        if parts and parts[-1] == "__init__":
            parts.pop()
        if parts and parts[0] == "src":
            parts = parts[1:]
        return ".".join(parts)

    def worth_reading(self, path: Path) -> bool:
        """Whether a file holds a word that a precision event needs, or imports a file that does."""
        if path not in self._worth:
            self._worth[path] = False
            data = self.read(path)
            if data is None:
                return False
            if any(word in data for word in (*FILE_WORDS, *self.own_words)):
                self._worth[path] = True
            elif path.name == "__init__.py" or len(data) < 20_000:
                self._worth[path] = any(
                    target is not None and self.holds_word(target) for target in self.imports_of(path, data)
                )
        return self._worth[path]

    def holds_word(self, path: Path) -> bool:
        data = self.read(path)
        return data is not None and any(word in data for word in (*FILE_WORDS, *self.own_words))

    def imports_of(self, path: Path, data: bytes) -> Iterator[Path | None]:
        for match in IMPORTED.finditer(data):
            for part in (match[1] or match[2]).decode("ascii", "replace").split(","):
                name = part.strip()
                level = len(name) - len(name.lstrip("."))
                yield self.resolve(name.lstrip("."), level, path)

    def find(self, name: str, level: int, module: ProjectModule) -> Path | None:
        return self.resolve(name, level, module.path)

    def resolve(self, name: str, level: int, path: Path) -> Path | None:
        """The file of a module as it is imported in ``path``; None where it is not the project's."""
        key = (name, level, os.path.dirname(path))  # a string: folders that are made anew are hashed anew
        if key not in self._found:
            looked: dict[Path, Path | None] = {}
            self._found[key] = self._resolve(name, level, path, looked), looked
        found, looked = self._found[key]
        self.looked.setdefault(path, {}).update(looked)
        return found

    def part(self, package: Path, name: str) -> Path | None:
        """The file of a module in a package, which is given by its ``__init__.py``."""
        base = package.parent / name
        return self.looked.setdefault(package, {}).setdefault(base, file_of(base))

    def _resolve(self, name: str, level: int, path: Path, looked: dict[Path, Path | None]) -> Path | None:
        parts = [part for part in name.split(".") if part]
        if level:
            folder = path.parent
            for _ in range(level - 1):
                folder = folder.parent
            return self._look(folder.joinpath(*(parts or ["__init__"])), looked) if self.inside(folder) else None
        if not parts or (parts[0] in SKIPPED_NAMES and not os.path.isdir(self.root / parts[0])):
            return None
        for folder in self.search_folders(path):
            found = self._look(folder.joinpath(*parts), looked)
            if found is not None:
                return found
        return None

    def _look(self, base: Path, looked: dict[Path, Path | None]) -> Path | None:
        looked[base] = file_of(base)
        return looked[base]

    def search_folders(self, path: Path) -> Iterator[Path]:
        """Where an absolute import may look: beside a script, then up to the root and its src folder."""
        folder = path.parent
        while self.inside(folder):
            yield folder
            if folder == self.root:
                break
            folder = folder.parent
        yield self.root / "src"

    def inside(self, folder: Path) -> bool:
        return folder == self.root or self.root in folder.parents
