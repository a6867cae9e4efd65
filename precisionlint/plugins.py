"""Rules from other packages: each names a module by an entry point of the group ``precisionlint.rules``.

The module holds ``FAMILIES``, families of checks as in ``precisionlint.checks``, and beside it lies a folder ``rules`` of pages as in
the catalogue. Finding plugins imports nothing: entry points are read from the metadata of what is installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from precisionlint.errors import InputError

GROUP = "precisionlint.rules"
METADATA = (".dist-info", ".egg-info")


class PluginError(InputError):
    """A plugin that does not keep its contract; the text is one line that names it and says what is wrong."""


class Plugin(Struct, frozen=True):
    """An entry point: its name, its module, and the distribution that declares it."""

    name: str
    module: str
    distribution: str

    @property
    def pages(self) -> Path:
        """The folder of its pages. Raises PluginError."""
        try:
            spec = find_spec(self.module)
        except (ImportError, ValueError) as error:
            raise self.wrong(str(error)) from error
        if spec is None or spec.origin is None:
            raise self.wrong(f"there is no module {self.module}")
        folder = Path(spec.origin).parent / "rules"
        if not folder.is_dir():
            raise self.wrong(f"there is no folder {folder}")
        return folder

    def wrong(self, what: str) -> PluginError:
        """An error that names the plugin."""
        return PluginError(f"the plugin {self.name} of {self.distribution}: {' '.join(what.split())}")


@cache
def installed() -> tuple[Plugin, ...]:
    """The plugins that are installed, by name; of several that have one name, the one that comes first in ``sys.path``."""
    found: dict[str, Plugin] = {}
    for place in dict.fromkeys(sys.path):
        for plugin in _in_folder(place or os.curdir):
            found.setdefault(plugin.name, plugin)
    return tuple(found[name] for name in sorted(found))


def _in_folder(place: str) -> Iterator[Plugin]:
    try:
        names = sorted(name for name in os.listdir(place) if name.endswith(METADATA))
    except OSError:  # no folder: an archive, or nothing
        return
    for name in names:
        try:
            with open(os.path.join(place, name, "entry_points.txt"), encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError):
            continue
        if GROUP in text:
            yield from _entry_points(text, name.rpartition(".")[0])


def _entry_points(text: str, distribution: str) -> Iterator[Plugin]:
    section = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("["):
            section = line.strip("[]").strip()
        elif section == GROUP and "=" in line and not line.startswith(("#", ";")):
            name, _, module = (part.strip() for part in line.partition("="))
            yield Plugin(name, module.partition(":")[0].partition("[")[0].strip(), distribution)
