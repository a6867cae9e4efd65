"""Waits until a file changes that a run could read: those named, the Python files of their projects, and the settings above them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from precisionlint import files
from precisionlint.config import OWN_FILE, Configuration
from precisionlint.errors import InputError
from precisionlint.source.root import find_root, surveyed_files

INTERVAL = 0.5
"""Seconds between two looks: folders are walked, since no way of being told of changes is there on every system."""
SETTLED = 0.05
"""Seconds for which nothing changes before a change is read."""

Stamps = dict[str, tuple[int, int]]


def stamps(paths: Sequence[str], suffixes: tuple[str, ...]) -> Stamps:
    """The time and size of every file that counts; one that is gone has none."""
    found: set[str] = set()
    with contextlib.suppress(InputError):  # settings that are wrong just now: they are among the files that count
        found.update(os.path.abspath(path) for _, path in files.find(paths, Configuration(), files.Kinds(suffixes))[0])
    for path in map(os.path.abspath, paths):
        found.update(map(str, surveyed_files(find_root(Path(path, "x") if os.path.isdir(path) else Path(path)))))
        above = [path, *map(str, Path(path).parents)]
        found.update(os.path.join(folder, name) for folder in above for name in (OWN_FILE, "pyproject.toml"))
    told: Stamps = {}
    for each in found:
        with contextlib.suppress(OSError):
            stat = os.stat(each)
            told[each] = (stat.st_mtime_ns, stat.st_size)
    return told


def wait(paths: Sequence[str], suffixes: tuple[str, ...], before: Stamps) -> Stamps:
    """The stamps as soon as they differ from those before and stand still: editors empty a file before they write it."""
    while (now := stamps(paths, suffixes)) == before:
        time.sleep(INTERVAL)
    while True:
        time.sleep(SETTLED)
        later = stamps(paths, suffixes)
        if later == now:
            return now
        now = later
