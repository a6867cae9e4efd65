"""What was read before: results of files that still hold, kept in a folder of the user's, a file for each project and plan.

A result holds while its file, every file that its reading led to, and the answers to every question where a module lies stay what
they are. Contents decide: a file whose times and size are as before is not read again, another is read and its hash compared. What
the file of a cache holds is not trusted: it is checked by its own hash, and one that is broken or foreign is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct, convert, to_builtins

from precisionlint import __version__, catalogue, plugins
from precisionlint.codec import decode, encode
from precisionlint.config import Settings
from precisionlint.patterns import regex
from precisionlint.reader import NOTHING, FileResult, Looked, Plan, Reading, Survey, digest
from precisionlint.source.root import PRECISION, find_root, names_in, surveyed_files

HEADER = "precisionlint cache 6 "
RACY = 2.0
"""Seconds: the times of a file that changed so shortly before a run do not tell whether it changed again."""
MOMENT = 0.05
"""Seconds: a file that changed after this much before the run's start may have changed while it was read."""
OLD = 14 * 24 * 3600
"""Seconds after which a file of a cache that nobody used is taken away."""
BLOCK = regex(r"(\.(?:md|markdown))#\d+$")
"""How the path of a block of Markdown ends, see ``reader``."""

Stat = list[int]


class Held(Struct, array_like=True):
    """A result kept: what of the whole project it rests on, itself (None for one that holds nothing), and the files that were asked how they
    call its own."""

    surveyed: tuple[Survey, ...]
    result: Any
    callers: tuple[str, ...]


def folder(setting: str, base: Path) -> Path | None:
    """Where caches lie: the setting (from its configuration's folder), $PRECISIONLINT_CACHE_DIR, or the user's cache folder."""
    if setting:
        return base / setting
    if given := os.environ.get("PRECISIONLINT_CACHE_DIR"):
        return Path(given)
    if sys.platform == "win32":
        above = os.environ.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        above = os.path.expanduser("~/Library/Caches")
    else:
        above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(above, "precisionlint") if above and os.path.isabs(above) else None


@lru_cache(maxsize=1)
def program() -> str:
    """What names this program: its version, its files as they stand now, and the Python that parses."""
    told = hashlib.blake2b(f"{__version__} {sys.version}".encode(), digest_size=16)
    for top in (Path(__file__).parent, catalogue.folder(), *(each.pages.parent for each in plugins.installed())):
        for place, folders, names in os.walk(top):
            folders[:] = sorted(each for each in folders if each not in ("__pycache__", "trace", "kernels"))
            for name in sorted(names):
                if name.endswith((".py", ".toml", ".md")):
                    found = os.stat(os.path.join(place, name))
                    told.update(
                        f"{place}/{name} {found.st_mtime_ns} {found.st_size}\n".encode(errors="surrogateescape")
                    )
    return told.hexdigest()


class Cache:
    """The results kept for the files of one project, read by one plan."""

    def __init__(self, place: Path, root: Path, plan: Plan) -> None:
        self.root = str(root)
        name = json.dumps(
            [program(), self.root, sorted(plan.rules), plan.assume, plan.device, plan.frameworks, plan.possible]
        )
        self._file = place / f"{digest(name.encode(errors='surrogatepass'))}.json"
        self._start = time.time()
        self._files: dict[str, list[Any]] = {}
        """Path from the root -> [hash, times and size or null, {base: file found there or null}]."""
        self._results: dict[str, Held] = {}
        self._survey: dict[str, list[Any]] | None = None
        self._fresh: dict[str, bool] = {}
        self._clean: set[str] = set()
        self._answers: dict[str, str | None] = {}
        self._dirty = False
        self._put: set[str] = set()
        self._surveyed_now: dict[str, list[Any]] | None = None
        self._load()

    # -- reading

    def _load(self) -> None:
        try:
            text = self._file.read_text(encoding="ascii")
            header, _, body = text.partition("\n")
            if header != HEADER + digest(body.encode("ascii")):
                raise ValueError("not as it was written")
            self._files, results, self._survey = json.loads(body)
            self._results = convert(results, dict[str, Held])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, RecursionError):
            self._files, self._results, self._survey = {}, {}, None
            self._dirty = True

    def get(self, display: str, path: str) -> FileResult | None:
        """The result of a file (absolute path) as it is named now, where it still holds."""
        key = self._key(path)
        held = self._results.get(key) if key is not None else None
        if held is None or key is None:
            return None
        if not all(map(self._holds, (key, *held.callers))) or not self._survey_holds(held.surveyed):
            return None
        if held.result is None:
            return NOTHING
        above = self.root if os.path.isabs(display) else os.path.relpath(self.root)

        def rename(name: str) -> str:
            return display if not name else os.path.normpath(f"{above}/{name}").replace(os.sep, "/")

        try:
            return decode(FileResult, held.result, rename)  # type: ignore[no-any-return]
        except (TypeError, ValueError, KeyError, IndexError):
            return None

    def _holds(self, key: str) -> bool:
        """Whether a file and all that its reading led to are as they were."""
        seen: set[str] = set()
        pending = [key]
        while pending:
            current = pending.pop()
            if current in seen or current in self._clean:
                continue
            if not self._is_fresh(current):
                return False
            seen.add(current)
            pending += (found for found in self._files[current][2].values() if found is not None)
        self._clean |= seen
        return True

    def _is_fresh(self, key: str) -> bool:
        if key not in self._fresh:
            entry = self._files.get(key)
            self._fresh[key] = entry is not None and self._same(key, entry) and self._same_answers(entry[2])
        return self._fresh[key]

    def _same(self, key: str, entry: list[Any]) -> bool:
        path = f"{self.root}/{key}"
        try:
            stat = _stat(path)
            if entry[1] == stat:
                return True
            with open(path, "rb") as file:
                same: bool = digest(file.read()) == entry[0]
        except OSError:
            return False
        if same and self._settled(stat):
            entry[1] = stat
            self._dirty = True
        return same

    def _same_answers(self, answers: Mapping[str, str | None]) -> bool:
        return all(self._answer(base) == found for base, found in answers.items())

    def _answer(self, base: str) -> str | None:
        """As ``source.root.file_of``, for paths from the root."""
        if base not in self._answers:
            choices = (f"{base}/__init__.py", f"{base}.py")
            self._answers[base] = next((each for each in choices if os.path.isfile(f"{self.root}/{each}")), None)
        return self._answers[base]

    def _survey_holds(self, asked: Iterable[Survey]) -> bool:
        """Whether the project is as before in what a result rests on."""
        return all(
            self._survey is not None and _surveyed(self._survey, what) == _surveyed(self._survey_now(), what)
            for what in asked
        )

    def _survey_now(self) -> dict[str, list[Any]]:
        """Every Python file of the project: path -> [times and size, its hash, the same if it sets the precision of products, else empty, the
        hash of what it imports and defines]."""
        if self._surveyed_now is None:
            known = self._survey or {}
            self._surveyed_now = {}
            for path in surveyed_files(Path(self.root)):
                key = self._key(str(path))
                if key is None:
                    continue
                try:
                    stat = _stat(str(path))
                    if key in known and known[key][0] == stat:
                        self._surveyed_now[key] = known[key]
                        continue
                    data = path.read_bytes()
                except OSError:
                    continue
                hashed = digest(data)
                setter = hashed if PRECISION.search(data) else ""
                self._surveyed_now[key] = [
                    stat if self._settled(stat) else None,
                    hashed,
                    setter,
                    digest(names_in(data)),
                ]
        return self._surveyed_now

    # -- learning

    def put(self, reading: Reading, path: str) -> None:
        """Keeps what reading a file (absolute path) gave; after ``learn``."""
        key, callers = self._key(path), [self._key(each) for each in reading.callers]
        known = (each is not None and self._learn(each, {}) for each in (key, *callers))
        if key is None or not all(known) or self._files[key][0] != reading.digest:
            return
        with contextlib.suppress(ValueError):
            result = None if reading.result == NOTHING else self._encoded(reading.display, reading.result)
            self._results[key] = Held(reading.surveyed, result, tuple(each for each in callers if each is not None))
            self._put.add(key)

    def _encoded(self, display: str, result: FileResult) -> Any:
        """A result with paths from the root, and nothing for the file's own. Raises ValueError where it names a file outside."""

        def rename(name: str) -> str:
            found = "" if name == display else self._key(os.path.abspath(name))
            if found is None:
                raise ValueError(f"{name} is not the project's")
            return found

        return encode(result, rename)

    def learn(self, looked: Mapping[Path, Mapping[Path, Path | None]]) -> None:
        """Keeps what the reading of files led to (see ``source.project.Project.looked``)."""
        for module, answers in looked.items():
            key = self._key(BLOCK.sub(r"\1", str(module)))
            if key is None:
                continue
            found = {
                base: self._key_of(file) for each, file in answers.items() if (base := self._key(str(each))) is not None
            }
            self._learn(key, found)
            for target in found.values():
                if target is not None:
                    self._learn(target, {})

    def _learn(self, key: str, answers: dict[str, str | None]) -> bool:
        """Brings the entry of a file up to date; False where the file changes under the run, so that nothing is known of it."""
        if not self._is_fresh(key):
            path = f"{self.root}/{key}"
            try:
                stat = _stat(path)
                with open(path, "rb") as file:
                    hashed = digest(file.read())
            except OSError:
                return False
            if max(stat[:2]) / 1e9 > self._start - MOMENT:
                return False
            self._forget(key)
            self._files[key] = [hashed, stat if self._settled(stat) else None, {}]
            self._fresh[key] = self._dirty = True
        held = self._files[key][2]
        if not answers.items() <= held.items():
            if any(base in held and held[base] != found for base, found in answers.items()):
                self._forget(key)
            held.update(answers)
            self._dirty = True
        return True

    def _forget(self, changed: str) -> None:
        """Drops the results of earlier runs in which a file, as it was, had part."""
        pending, seen = [changed] if changed in self._files else [], set[str]()
        while pending:
            current = pending.pop()
            if current not in seen:
                seen.add(current)
                pending += self._leads.get(current, ())
                for key in (current, *self._asked.get(current, ())):
                    if key not in self._put:
                        self._results.pop(key, None)

    @cached_property
    def _leads(self) -> dict[str, list[str]]:
        """File -> the files whose reading led there, in earlier runs."""
        leads: dict[str, list[str]] = {}
        for key, entry in self._files.items():
            for found in entry[2].values():
                if found is not None:
                    leads.setdefault(found, []).append(key)
        return leads

    @cached_property
    def _asked(self) -> dict[str, list[str]]:
        """File -> the files whose results rest on how it calls them, in earlier runs."""
        asked: dict[str, list[str]] = {}
        for key, held in self._results.items():
            for caller in held.callers:
                asked.setdefault(caller, []).append(key)
        return asked

    def _settled(self, stat: Stat) -> bool:
        return max(stat[:2]) / 1e9 < self._start - RACY

    # -- writing

    def save(self) -> None:
        """Writes what has changed, the whole file or nothing. A folder that cannot be written is no fault: then nothing is kept."""
        if any(held.surveyed and key in self._put for key, held in self._results.items()):
            now = self._survey_now()
            for key, held in list(self._results.items()):
                if key not in self._put and not self._survey_holds(held.surveyed):
                    del self._results[key]
            self._survey = now
        if not self._dirty:
            return
        import tempfile  # here: a run that changes nothing need not import it

        body = json.dumps([self._files, to_builtins(self._results), self._survey], separators=(",", ":"))
        with contextlib.suppress(OSError):
            _make_folder(self._file.parent)
            descriptor, beside = tempfile.mkstemp(dir=self._file.parent, suffix=".new")
            try:
                with os.fdopen(descriptor, "w", encoding="ascii") as file:
                    file.write(f"{HEADER}{digest(body.encode('ascii'))}\n{body}")
                os.replace(beside, self._file)
            except BaseException:
                os.unlink(beside)
                raise
            _clear(self._file.parent, self._start)

    # -- names

    def _key(self, path: str) -> str | None:
        """A path from the root, None outside of it."""
        above = self.root.rstrip(os.sep) + os.sep
        return path[len(above) :].replace(os.sep, "/") if path.startswith(above) else None

    def _key_of(self, path: Path | None) -> str | None:
        return None if path is None else self._key(str(path))


def _surveyed(survey: Mapping[str, list[Any]], what: Survey) -> dict[str, str]:
    """Path -> hash of what matters in the files of a survey in which anything does."""
    column = {"all": 1, "precision": 2, "names": 3}[what]
    return {key: entry[column] for key, entry in survey.items() if entry[column]}


def _stat(path: str) -> Stat:
    found = os.stat(path)
    return [found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino]


def _make_folder(place: Path) -> None:
    if not place.is_dir():
        place.mkdir(parents=True)
        (place / ".gitignore").write_text("*\n", encoding="ascii")  # it may lie in a project


def _clear(place: Path, now: float) -> None:
    """Takes away what nobody has used for long."""
    for each in place.iterdir():
        if each.suffix in (".json", ".new") and now - each.stat().st_mtime > OLD:
            each.unlink()


class Kept:
    """The caches of a run, one for each project and plan; where it is not enabled, it knows and keeps nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._caches: dict[tuple[Path, Plan, Path], Cache] = {}
        self._marked: dict[str, bool] = {}
        self._in_folder: dict[tuple[str, int], Cache | None] = {}
        """(folder, id of the settings, which live as long as the run) -> cache."""
        self._of: dict[str, Cache] = {}

    def get(self, settings: Settings, plan: Plan, display: str, path: Path) -> FileResult | None:
        """What is known of a file."""
        if not self._enabled:
            return None
        absolute = os.path.abspath(path)
        key = (os.path.dirname(absolute), id(settings))
        if key not in self._in_folder:
            self._in_folder[key] = self._cache(settings, plan, absolute)
        cache = self._in_folder[key]
        if cache is None:
            return None
        self._of[display] = cache
        return cache.get(display, absolute)

    def _cache(self, settings: Settings, plan: Plan, path: str) -> Cache | None:
        place = folder(settings.cache_dir, settings.base)
        if place is None:
            return None
        root = find_root(Path(path), self._marked)
        if (place, plan, root) not in self._caches:
            self._caches[place, plan, root] = Cache(place, root, plan)
        return self._caches[place, plan, root]

    def learn(self, looked: Mapping[Path, Looked]) -> None:
        """Keeps what reading led to, project by project."""
        for (_, _, root), cache in self._caches.items():
            if root in looked:
                cache.learn(looked[root])

    def put(self, reading: Reading, path: Path) -> None:
        """Keeps what reading a file gave."""
        cache = self._of.get(reading.display)
        if cache is not None and reading.digest:
            cache.put(reading, os.path.abspath(path))

    def save(self) -> None:
        """Writes what is new."""
        for cache in self._caches.values():
            cache.save()
