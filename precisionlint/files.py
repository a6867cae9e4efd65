"""Which files a run reads: every file that is named, and the files in named folders that are the project's own programs and configurations.

A folder is walked without what git ignores (`.gitignore` files from the repository's root down, `.git/info/exclude`;
not a user's global ignore file), what the settings exclude, environments and hidden names. Links to folders are not followed, as git
does not follow them, so no walk is endless; links to nothing, pipes and sockets are passed over. What is in the files matters for
configurations alone: most JSON is none.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from precisionlint import gitignore
from precisionlint.config import Configuration
from precisionlint.findings import FileError

CONFIGURATIONS = (".json", ".yaml", ".yml", ".sh")
LARGEST = 256 * 1024
"""Bytes of the largest configuration that a folder is read for."""
MOST = 500
"""A folder that holds more such files than this holds data."""

ENVIRONMENT_MARKS = frozenset({"pyvenv.cfg", "conda-meta"})


class Kinds(Struct, frozen=True):
    """The files that a folder is read for: those of the suffixes, and the configurations that are wanted, by their name and bytes."""

    suffixes: tuple[str, ...] = (".py",)
    wanted: Callable[[str, bytes], bool] = lambda display, data: True


class _Found(Struct, frozen=True):
    display: str
    """As the user would write it, with `/`."""
    path: Path
    real: str
    """Without links: what tells one file from another."""


class _Ignores(Struct, frozen=True):
    """The patterns of one ignore file, and the folder (without links) from which they count."""

    base: str
    patterns: gitignore.Patterns


def find(
    paths: Iterable[str], configuration: Configuration | None = None, kinds: Kinds | None = None
) -> tuple[list[tuple[str, Path]], list[FileError]]:
    """The files to read as (path as the user would write it, path), and an error for each path that cannot be read.

    Both are sorted, and neither depends on the order of `paths`. A file that is reached in several ways is there once,
    under its shortest name. In folders only files of these `kinds` count. Raises ConfigError.
    """
    configuration, kinds = configuration or Configuration(isolated=True), kinds or Kinds()
    files: dict[str, _Found] = {}
    errors: dict[str, FileError] = {}
    for given in sorted(set(paths)):
        for found in _below(given, configuration, kinds):
            if isinstance(found, FileError):
                errors[found.path] = found
                continue
            other = files.get(found.real, found)
            files[found.real] = min(found, other, key=lambda each: (len(each.display), each.display))
    by_name = sorted(files.values(), key=lambda each: each.display)
    return [(each.display, each.path) for each in by_name], [errors[path] for path in sorted(errors)]


def _below(given: str, configuration: Configuration, kinds: Kinds) -> Iterator[_Found | FileError]:
    display = given.replace(os.sep, "/")
    if not os.path.isdir(given):  # as it stands: `Path("")` would be the current folder
        found = _file(given, display)
        if isinstance(found, FileError) or not left_out(Path(found.real), configuration):
            yield found
    elif display.rstrip("/") == ".":
        yield from _walk(Path(given), "", configuration, kinds)
    else:
        yield from _walk(Path(given), display.rstrip("/") + "/", configuration, kinds)


def left_out(path: Path, configuration: Configuration) -> bool:
    """Whether a file (absolute) is left out although it was named: hooks name files that the project excludes."""
    settings = configuration.of_folder(path.parent)
    if not settings.force_exclude:
        return False
    above = (each for each in path.parents if settings.base in each.parents)
    return settings.excludes(str(path)) or any(settings.excludes(f"{folder}/") for folder in above)


def _file(path: str, display: str) -> _Found | FileError:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return FileError(display, None, "link to nothing" if os.path.islink(path) else "no such file or folder")
    except OSError as error:
        return FileError(display, None, _reason(error))
    if not stat.S_ISREG(mode):
        return FileError(display, None, "not a regular file")
    return _Found(display, Path(path), os.path.realpath(path))


def _walk(top: Path, prefix: str, configuration: Configuration, kinds: Kinds) -> Iterator[_Found | FileError]:
    """What lies below a folder. `prefix` stands before each display name: empty, or ending in `/`."""
    real_top = top.resolve()
    pending = [(top, prefix, real_top, _ignores_above(real_top))]
    while pending:
        folder, prefix, real, ignores = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            yield FileError(prefix.rstrip("/") or ".", None, _reason(error))
            continue
        names = {entry.name for entry in entries}
        if real != real_top and names & ENVIRONMENT_MARKS:
            continue
        ignores = _ignores_in(real, names, ignores)
        settings = configuration.of_folder(real)
        data = sum(name.endswith(CONFIGURATIONS) for name in names) > MOST
        for entry in entries:
            if entry.name.startswith("."):  # editors leave locks that end in `.py`, archives from a Mac resource forks
                continue
            display, inside = prefix + entry.name, real / entry.name
            if entry.is_dir(follow_symlinks=False):
                if not settings.excludes(f"{inside}/") and not _ignored(f"{inside}/", ignores):
                    pending.append((folder / entry.name, f"{display}/", inside, ignores))
            elif (
                not entry.name.endswith(kinds.suffixes)
                or _ignored(str(inside), ignores)
                or settings.excludes(str(inside))
            ):
                continue
            elif entry.name.endswith(CONFIGURATIONS):
                if not data and _is_configuration(entry, kinds):
                    yield _Found(display, Path(entry.path), str(inside))
            elif entry.is_file(follow_symlinks=False):
                yield _Found(display, Path(entry.path), str(inside))
            elif not os.path.isdir(entry) and _leads_to_a_file(
                entry.path
            ):  # `entry.is_dir()` raises on a link to itself
                yield _file(entry.path, display)


def _leads_to_a_file(path: str) -> bool:
    """Whether there is a file to read behind what a folder holds, or may be: that it may not be looked at is an error."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def _is_configuration(entry: os.DirEntry[str], kinds: Kinds) -> bool:
    """Whether a file is a configuration of a training run, as far as its size and bytes tell."""
    if not entry.is_file(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_size > LARGEST:
        return False
    try:
        with open(entry.path, "rb", buffering=0) as file:
            return kinds.wanted(entry.name, file.read(LARGEST))
    except OSError:
        return True  # reading says why it cannot be read


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _ignores_above(top: Path) -> tuple[_Ignores, ...]:
    """What the repository around `top` ignores, from its root down to the folder above `top`.

    Nothing, where that covers `top` itself: whoever names an ignored folder wants to see what is in it.
    """
    root = next((folder for folder in (top, *top.parents) if os.path.exists(folder / ".git")), top)
    ignores: tuple[_Ignores, ...] = ()
    folder = root
    for part in top.relative_to(root).parts:
        ignores = _ignores_in(folder, {".git", ".gitignore"} if folder == root else {".gitignore"}, ignores)
        folder /= part
        if _ignored(f"{folder}/", ignores):
            return ()
    return ignores


def _ignores_in(folder: Path, names: set[str], above: tuple[_Ignores, ...]) -> tuple[_Ignores, ...]:
    """`above` and the patterns that `folder` (which holds `names`) adds; a repository in a repository begins anew."""
    sources = []
    if ".git" in names:
        above = ()
        sources.append(_git_folder(folder / ".git") / "info" / "exclude")
    if ".gitignore" in names:
        sources.append(folder / ".gitignore")
    return (*above, *(_Ignores(str(folder), patterns) for source in sources if (patterns := _patterns(source))))


def _git_folder(dot_git: Path) -> Path:
    """The folder that holds `info/`: `.git` itself, or where the `.git` file of a worktree or submodule points."""
    try:
        folder = dot_git.parent / dot_git.read_text().removeprefix("gitdir:").strip()
        return folder / (folder / "commondir").read_text().strip()
    except IsADirectoryError:
        return dot_git
    except (OSError, UnicodeDecodeError):
        return dot_git


def _patterns(source: Path) -> gitignore.Patterns | None:
    """The patterns of an ignore file; None without one. git goes on where it cannot read one, and so does this."""
    try:
        return gitignore.parse(source.read_bytes().decode("utf-8-sig", errors="surrogateescape"))
    except OSError:
        return None


def _ignored(path: str, ignores: tuple[_Ignores, ...]) -> bool:
    """Whether the last word on a path (a folder's ends in `/`) is to ignore it; the deepest ignore file speaks last."""
    for each in reversed(ignores):
        verdict = each.patterns.verdict(path[len(each.base) :].lstrip("/"))
        if verdict is not None:
            return verdict
    return False
