"""What the programs show in which a file takes part: that they train, and in which half precision. A likely finding rests on it, and names
the place.

The programs of a file are the files that lead to it by imports, and what these import. Read from bytes, line by line:
where a line says it, that line is the evidence.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from msgspec import structs

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.source.flow.bearers import Bearers
from precisionlint.source.flow.casts import Casts
from precisionlint.source.flow.outside import Outside
from precisionlint.source.flow.unused import Unused
from precisionlint.source.parsing import REMARK
from precisionlint.source.project import Project
from precisionlint.source.root import DEFINED, IMPORTED, file_of, python_files, uses
from precisionlint.valueflow import Shows

FILES = 5_000
"""How many files of a project are looked at."""

COMPILED = rb"(?<!_cuda)(?<!_cpp)(?<!_ext)(?<!_C)(?<!_module)(?<!_backend)(?<!_lib)(?<!kernels)"
"""Not after a module of compiled code: its ``backward`` is one of an op."""
TRAINS = regex(
    COMPILED + rb"(?<!\.sum\(\))\.backward\((?!ctx\b)|loss\w*\.sum\(\)\.backward\("
    rb"|\.sum\(\)\.backward\(\)(?=[^\0]{0,300}?\.step\()|\bTrainer\(|class[^\n(]*\([^)\n]*LightningModule|\.fit\("
    rb"|\btrain(?:ing)?_step\(|\btrainer\.train\("
)
"""What only a program that trains holds; optimizers and schedules are made and wrapped by libraries too."""
SELF_TEST = regex(rb"^def (?:test|bench)\w*\([^\0]*?(?=^[^\s)#]|\Z)", re.M)
"""A function of a library's file that tries the rest of it, and is no program that trains."""
STEPPED = regex(rb"\bLightningModule\b|\bdef training_step\(")
RUNS = regex(rb"\.backward\(|\bTrainer\(|LightningCLI\(|\.fit\(")
"""What a trainer steps, and what makes one."""
OF_TORCH = rb"(?<!\bte\.)(?<!transformer_engine\.)(?<!fp8_)(?<!\bdef )(?<!\bclass )"
"""What does not stand before ``autocast``: Transformer Engine's regions are of FP8, and leave other ops as they are."""
PATTERNS = {
    "training": TRAINS,
    "fp16": regex(
        rb"(?<![=!]= torch\.)(?<!np\.)(?<!numpy\.)(?<![bB])\b[Ff]loat16\b|\.half\(\)|torch\.half\b|fp16|16-mixed|16-true"
        rb"|" + OF_TORCH + rb"\bautocast\((?![^)\n]*(?:dtype|False|['\"]cpu))"
    ),
    "bf16": regex(rb"bfloat16|\bbf16\b"),
    "half autocast": regex(
        OF_TORCH + rb"\bautocast\((?!\s*False|['\"]cpu|[^)\n]*(?:enabled\s*=\s*False|float32))|mixed_precision\s*=\s*['\"](?:fp16|bf16)"
        rb"|bf16-mixed|16-mixed"
    ),
    "loss under autocast": regex(
        rb"with [^\n]*" + OF_TORCH + rb"autocast\((?!\s*False|[^\n]*(?:['\"]cpu|enabled\s*=\s*False))"
        rb"[^\n]*:[ \t]*\n(?:[^\n]*\n){0,8}?[^\n]*(?:loss|criterion|targets?\b)"
    ),
    "half parameters": regex(
        rb"set_default_dtype\(\s*(?:torch\.)?b?(?:float16|half)|bf16-true|16-true|\.convert_to_fp16\(\)"
        rb"|Float16Module|FP16_?Optimizer|\bpure_(?:half|bf16|fp16)"
    ),
    "a device with its index": regex(
        rb"['\"](?:cuda|xpu|npu|hip):(?:\d|\{|['\"])|\btorch\.device\(\s*['\"](?:cuda|xpu|npu|hip)['\"]\s*,"
    ),
    "half copies": regex(rb"\bparam_dtype\s*=(?!\s*torch\.float(?:32)?\b)"),
    "dtypes": regex(
        rb"\.dtype\b|\btype_as\(|\bdtype\s*=\s*dtype\b|\b\w+\.float\(\)\.\w|b?float16\b|\.half\(\)|\.to\(tl\.float32\)"
        rb"|dtype\w*\s*:\s*(?:\w+\.)*constexpr"
    ),
}  # fmt: skip
"""What a file says. Of dtypes: what only code writes that meets others than fp32. (``.float()`` by itself makes numbers of integers too.)"""
WORDS: dict[str, tuple[bytes, ...]] = {
    "training": (b"backward(", b"rainer", b"LightningModule", b".fit(", b"_step("),
    "dtypes": (b"dtype", b"type_as", b"float", b"half"),
    "a device with its index": (b"cuda", b"xpu", b"npu", b"hip"),
    "half autocast": (b"autocast", b"mixed"),
    "loss under autocast": (b"autocast",),
    "half parameters": (b"16", b"half"),
    "half copies": (b"param_dtype",),
}
"""What a file must hold for the slower patterns to match anywhere in it."""
CASTS = frozenset({"half parameters", "half buffers"})
"""What is shown by a setting that casts all models, or by a cast of one that may hold the code at hand; what shows the second shows the
first."""
TEXT = regex(rb'"{3}(?:[^\\]|\\.)*?"{3}' + rb"|'{3}(?:[^\\]|\\.)*?'{3}", re.S)
"""Documentation: what it speaks of, the program need not do."""
COMMENT = regex(REMARK.encode(), re.M)
AUTOCAST = regex(
    OF_TORCH + rb"\bautocast\((?!\s*False|[^)\n]*enabled\s*=\s*False)|\bAccelerator\(|\bTrainingArguments\b"
)
"""What only a program says that runs its forward under autocast, or can be told to."""
OTHERWISE = regex(rb"\bnullcontext\(\)\s*if\b|\belse\s+(?:contextlib\.)?nullcontext\(\)")
"""What a program says that runs without a region where a setting says so."""
OPTIMIZES = regex(rb"optim(?:izer)?\b|\boptim\.")
"""What a program holds that trains, and leaves the step to others."""
KINDS = {
    "half": ("bf16", "fp16"),
    "half weights": ("half parameters", "half copies"),
    "half gradients": ("half parameters",),
}
"""What shows it. Weights of a forward are half where parameters are kept so, or where FSDP makes half copies of them; gradients only in
the first case."""
IN_TRAINING = frozenset({"half weights", "half gradients"})
"""What is shown by a file that trains, or by the file at hand, alone: others cast models for inference."""
SPOKEN = frozenset({"fp16", "bf16", "half autocast"})
"""What any file speaks of that has to do with half precision."""
SETTINGS = regex(r"conf|cfg|opt(?:s|ion)|arg|setting|default|param", re.I)
"""Files that say what a program does."""
SEEN_ONLY = frozenset({"loss under autocast", "a device with its index"})
"""What handling dtypes says nothing of: only a line that shows it counts."""
TESTS = regex(r"(?:^|/)(?:tests?|docs?|benchmarks?)/|(?:^|/)(?:test_|conftest)|_test\.py$")
WORD = regex(r"\w+")
SAID = regex(rb"\.?\w+")
AS = regex(r"\bas\s+\w+")
REGISTERS = regex(rb"regist(?!er_(?:buffer|parameter|\w*hook))|entry_point", re.I)
MODULE = regex(rb"def forward\(")
GENERAL = frozenset(
    {
        b"__init__",
        b"main",
        b"forward",
        b"utils",
        b"util",
        b"common",
        b"model",
        b"models",
        b"train",
        b"loss",
        b"norm",
        b"layers",
    }
)
"""Names that many files use, each for something of its own."""


class Evidence:
    """The evidence of one project; files are read when something is first asked."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._lines: dict[tuple[str, Path], int | None] = {}
        self._programs: dict[Path, list[Path]] = {}
        self._callers: dict[Path, list[Path]] = {}
        self._registered: dict[Path, bool] = {}
        self._cut_off: dict[Path, bool] = {}
        self._exports: dict[Path, dict[str, Path]] = {}
        self._reached: dict[Path, frozenset[Path]] = {}
        self._under_autocast: dict[Path, bool] = {}
        self._texts: dict[Path, bytes] = {}
        self.bearers = Bearers(project, self.leads, self.importing, self.text, self.taken)
        self.casts = Casts(self.bearers)

    def handled(self, where: Place, near: Path, display: str) -> bool:
        """Whether a place shows no more than that a library's file handles dtypes."""
        return not self.trains and (where.path, where.line) == (display, self.first("dtypes", near))

    def shows(self, need: Shows, near: Path, display: str) -> Place | None:
        """Where a program of the file at ``near`` shows what is needed (named ``display`` in its place); None if nothing does.

        In a project that trains nothing, a file is a library's: what reaches it is its callers' affair, and that it handles dtypes at
        all shows that they come with others than fp32.
        """
        files = self.asked(need, near)
        if files is None:
            line = 1 if need.what == "training" else self.first("dtypes", near)
            return Place(display, line, 1, line, 1) if line is not None else None
        for what in KINDS.get(need.what, (need.what,)):
            for path in files:
                line = self.line_of(need, what, path, near)
                if line is not None:
                    return Place(display if path == near else path.as_posix(), line, 1, line, 1)
        return None

    def asked(self, need: Shows, near: Path) -> list[Path] | None:
        """The files in which something counts that a file needs, the nearest first; None where its callers decide."""
        programs = self.programs(near)
        if need.elsewhere:
            return self.all_of(near)[1:]
        if self.is_trained(near):
            return [*programs, *(self.files if self.is_registered(near) else ())]
        if need.what in SEEN_ONLY:
            return [*programs, *self.callers(near)]  # a loss, or a device, may come by a name
        if not self.trains:
            return None
        return [near, *(self.files if need.what == "training" else self.callers(near))]

    def line_of(self, need: Shows, what: str, path: Path, near: Path) -> int | None:
        """Where a file shows it to the one at hand."""
        line = self.first("half parameters" if what in CASTS else what, path)
        if (line is None and what not in CASTS) or (need.bare and self.under_autocast(path)):
            return None
        if need.what in IN_TRAINING and path != near and self.first("training", path) is None:
            return None
        if need.what == "half gradients" and path != near and not OPTIMIZES.search(self.text(path)):
            return None  # gradients of what it casts are not its to step: a frozen model that others learn from
        if what in CASTS:
            if path != near and self.trains and not any(self.leads(one, path) for one in self.training):
                return None  # what no program that trains runs: for inference
            cast = self.cast(path, near, what, trained=need.what == "half gradients")
            return min((each for each in (line, cast) if each is not None), default=None)
        return None if what in SPOKEN and not self.takes_part(path, near) else line

    def at_times_bare(self, need: Shows, near: Path, display: str) -> Place | None:
        """Where a program shows what is needed that runs under autocast in some of its configurations, and by FSDP's half copies in others:
        ``nullcontext() if fsdp else torch.autocast(…)``."""
        where = self.shows(structs.replace(need, bare=False), near, display) if need.bare else None
        path = near if where is not None and where.path == display else Path(where.path) if where is not None else None
        if path is None or self.first("half copies", path) is None or not OTHERWISE.search(self.text(path)):
            return None
        return where

    def takes_part(self, path: Path, near: Path) -> bool:
        """Whether what a file says of half precision may be of this one: it trains or sets what a program does, it is led to from there, or
        leads there, from a file that trains or as one that has another step. What else stands beside it has dtypes of its own."""
        if self.leads(near, path) or SETTINGS.search(path.stem):
            return True
        if self.first("training", path) is not None:  # a file with a model of its own trains that one
            return self.leads(path, near) or path in self.programs(near) or not MODULE.search(self.text(path))
        if not self.leads(path, near):
            return False
        optimizes = OPTIMIZES.search(self.text(path)) is not None
        training = (one for one in self.programs(near) if self.first("training", one) is not None)
        return any(self.leads(one, path) or (optimizes and self.leads(path, one)) for one in training)

    def cast(self, path: Path, near: Path, what: str, *, trained: bool) -> int | None:
        """The first line in which a file casts an object that may hold the code at hand; where that is no module's, any object. ``trained``:
        one that gets gradients, whatever its code is."""
        is_module = MODULE.search(self.text(near)) is not None
        for cast in self.casts.of(path):
            if cast.loads and what == "half buffers":
                continue
            counts = not self.bearers.is_frozen(cast, path) if trained else self.bearers.holds(cast, path, near)
            if counts or not (trained or is_module):
                return cast.line
        return None

    def under_autocast(self, path: Path) -> bool:
        """Whether the programs of a file run under autocast: it says so, or one of those that train with it."""
        if path not in self._under_autocast:
            training = (one for one in self.programs(path) if one == path or self.first("training", one) is not None)
            self._under_autocast[path] = any(next(lines_of(AUTOCAST, self.text(one)), None) for one in training)
        return self._under_autocast[path]

    def leads(self, path: Path, target: Path) -> bool:
        """Whether a file is another, or leads to it by imports."""
        if path not in self._reached:
            self._reached[path] = frozenset(reached([path], self.imports))
        return target in self._reached[path]

    def callers(self, path: Path) -> list[Path]:
        """The files that may run what no program imports: those that speak of it, or of a file that leads to it, or of what these define.
        Where one of these registers something, or a file makes objects by names, it is found by a name in a configuration."""
        if path in self._callers:
            return self._callers[path]
        if self.is_registered(path):
            return self.files
        library = reached([path], self.importers)
        stem = path.stem.encode()
        named = {stem, *(name for one in library for name in DEFINED.findall(self.text(one)))} - GENERAL
        # ``F.gelu`` is no function of the project's, and what a class is an attribute of may be its package.
        attributes = {b"." + name for name in named if not name[:1].islower() or name == stem}
        mine = frozenset(library)
        self._callers[path] = [
            other
            for other in self.files
            if other not in mine
            and (self.bearers.by_name(other) or self.means(other, self.spoken[other] & (named | attributes), mine))
        ]
        return self._callers[path]

    def means(self, path: Path, said: frozenset[bytes], library: frozenset[Path]) -> bool:
        """Whether a file that says these names speaks of what a library defines, and not of what it has by the same name from elsewhere. A
        function's name that others define as well says nothing: ``evaluate``."""
        for name in {each.lstrip(b".") for each in said}:
            others = self.definers.get(name, set()) - library
            if not others or (name[:1].isupper() and not any(self.leads(path, one) for one in others)):
                return True
        return False

    @cached_property
    def spoken(self) -> dict[Path, frozenset[bytes]]:
        """File -> which it says of the names that files define, and of those of the files; with a dot where it is said as an attribute."""
        known = {*self.definers, *(path.stem.encode() for path in self.files)} - GENERAL
        known |= {b"." + name for name in known}
        return {path: frozenset(known.intersection(SAID.findall(self.text(path)))) for path in self.files}

    @cached_property
    def definers(self) -> dict[bytes, set[Path]]:
        """Name -> the files that define a class or function of it."""
        found: dict[bytes, set[Path]] = {}
        for path in self.files:
            for name in DEFINED.findall(self.text(path)):
                found.setdefault(name, set()).add(path)
        return found

    def is_registered(self, path: Path) -> bool:
        """Whether a file, or one that leads to it, registers what it defines: a program finds it by a name in its configuration."""
        if path not in self._registered:
            library = reached([path], self.importers)
            parts = (self.text(one) for one in library if self.is_part(one))
            self._registered[path] = any(next(lines_of(REGISTERS, text), None) for text in parts)
        return self._registered[path]

    def is_part(self, path: Path) -> bool:
        """Whether a file holds parts of models, and not a program that uses them."""
        return MODULE.search(self.text(path)) is not None or path.name == "__init__.py"

    def is_cut_off(self, path: Path) -> bool:
        """Whether a file imports others of its own package that are not there, or is stepped by a trainer that none of them makes: what its
        program shows, nobody can tell."""
        if path not in self._cut_off:
            below = path.parent.relative_to(self.project.root) if path.is_relative_to(self.project.root) else Path()
            packages = set(below.parts)
            self._cut_off[path] = False
            for match in IMPORTED.finditer(self.project.read(path) or b""):
                module = (match[1] or b"").decode("ascii", "replace")
                name = module.lstrip(".")
                own = len(module) > len(name) or name.partition(".")[0] in packages
                if own and module and self.project.resolve(name, len(module) - len(name), path) is None:
                    self._cut_off[path] = True
                    break
            else:
                self._cut_off[path] = bool(STEPPED.search(self.project.read(path) or b"")) and not self.runs
        return self._cut_off[path]

    @cached_property
    def outside(self) -> Outside:
        """The programs that run files of the project and are not there to be read."""
        return Outside(self.project.root, self.files, self.text, self.first, self.is_trained)

    def is_trained(self, path: Path) -> bool:
        """Whether one of the programs of a file trains."""
        return any(self.first("training", one) is not None for one in self.programs(path))

    @cached_property
    def unused(self) -> Unused:
        """The classes of the project that none of its files speaks of."""
        return Unused(self.files, self.project.read)

    @cached_property
    def runs(self) -> bool:
        """Whether a file of the project takes the steps itself, or makes a trainer that does."""
        return any(RUNS.search(self.project.read(path) or b"") for path in self.files)

    @cached_property
    def training(self) -> list[Path]:
        """The files of the project that train."""
        return [path for path in self.files if self.first("training", path) is not None]

    @cached_property
    def trains(self) -> bool:
        """Whether anything in the project trains; else it is a library, and its callers decide on dtypes."""
        return bool(self.training)

    def first(self, what: str, path: Path) -> int | None:
        """The first line in which a file shows something of ``PATTERNS``."""
        key = (what, path)
        if key not in self._lines:
            self._lines[key] = self.found(what, path) if self.holds_any(WORDS.get(what), path) else None
        return self._lines[key]

    def found(self, what: str, path: Path) -> int | None:
        data = self.text(path)
        if what == "training" and b"\ndef " in data:
            data = SELF_TEST.sub(lambda text: b"\n" * text[0].count(b"\n"), data)
        return next(lines_of(PATTERNS[what], data), None)

    def holds_any(self, words: tuple[bytes, ...] | None, path: Path) -> bool:
        """Whether a file holds any of these words, be it in its documentation."""
        data = self.project.read(path) or b""
        return words is None or any(word in data for word in words)

    def text(self, path: Path) -> bytes:
        """A file without its documentation. All are kept: each question goes through the files of the project once more, and taking the
        documentation out costs more than the question."""
        if path not in self._texts:
            data = self.project.read(path) or b""
            if b'"""' in data or b"'''" in data:
                data = TEXT.sub(lambda text: b"\n" * text[0].count(b"\n"), data)
            self._texts[path] = COMMENT.sub(b"", data)
        return self._texts[path]

    def programs(self, path: Path) -> list[Path]:
        """The files that run together with one: it and those that lead to it, what it leads to, and what the others import themselves;
        the nearest first. (All that these import in turn would be half the project, most of which never meets this file.)"""
        if path not in self._programs:
            leading = reached([path], self.importers)
            beside = itertools.chain.from_iterable(self.imports.get(one, ()) for one in leading)
            self._programs[path] = list(dict.fromkeys([*leading, *reached([path], self.imports), *beside]))
        return self._programs[path]

    def all_of(self, path: Path) -> list[Path]:
        """The files that run together with one, with all that they import in turn."""
        return reached(self.programs(path), self.imports)

    @cached_property
    def files(self) -> list[Path]:
        found = itertools.islice(python_files(self.project.root), FILES)
        return sorted(path for path in found if not TESTS.search(path.relative_to(self.project.root).as_posix()))

    @cached_property
    def imports(self) -> dict[Path, list[Path]]:
        """File -> the project's files that it imports."""
        return {path: list(dict.fromkeys(self.imported(path))) for path in self.files}

    @cached_property
    def importers(self) -> dict[Path, list[Path]]:
        """File -> the project's files that import it."""
        found: dict[Path, list[Path]] = {}
        for path, targets in self.imports.items():
            for target in targets:
                found.setdefault(target, []).append(path)
        return found

    def importing(self, path: Path) -> list[Path]:
        """The project's files that import a file."""
        return self.importers.get(path, [])

    def imported(self, path: Path) -> Iterator[Path]:
        for match in IMPORTED.finditer(self.project.read(path) or b""):
            module, inside, plain, whole = (part.decode("ascii", "replace") if part else "" for part in match.groups())
            if not module:
                for name in whole.split(","):
                    module, _, alias = (part.strip() for part in name.partition(" as "))
                    target = self.project.resolve(module, 0, path)
                    if target is not None:
                        yield from self.used(target, alias or module, path)
                continue
            name = module.lstrip(".")
            target = self.project.resolve(name, len(module) - len(name), path)
            if target is None:
                continue
            if target.name != "__init__.py":
                yield target
                continue
            # A package stands for what is taken from it: through its own file everything in it would lead everywhere.
            for word in WORD.findall(AS.sub(" ", inside or plain)) or ["*"]:
                yield self.taken(target, word)

    def used(self, target: Path, name: str, path: Path) -> Iterator[Path]:
        """The files that a file uses of a module that it imports under a name: of a package, those of the names behind the dots."""
        if target.name != "__init__.py":
            yield target
            return
        for dotted in uses(name.encode(), self.text(path)):
            found = target
            for word in dotted.decode("ascii", "replace")[1:].split("."):
                if found.name != "__init__.py":
                    break
                found = self.taken(found, word)
            yield found

    def taken(self, package: Path, name: str) -> Path:
        """The file that a name of a package comes from."""
        return file_of(package.parent / name) or self.exports(package).get(name) or package

    def exports(self, package: Path) -> dict[str, Path]:
        """Which files the names come from that a package takes from others."""
        if package not in self._exports:
            found = self._exports[package] = {}
            for match in IMPORTED.finditer(self.project.read(package) or b""):
                module, inside, plain, _ = (part.decode("ascii", "replace") if part else "" for part in match.groups())
                name = module.lstrip(".")
                target = self.project.resolve(name, len(module) - len(name), package) if module else None
                if target is None:
                    continue
                further = self.exports(target) if target.name == "__init__.py" else {}
                if (inside or plain).strip() == "*":
                    names = [each.decode() for each in DEFINED.findall(self.project.read(target) or b"")]
                    found |= dict.fromkeys(names, target) | further
                    continue
                for each in (inside or plain).split(","):
                    word, _, alias = each.strip().partition(" as ")
                    part = (
                        file_of(target.parent / word) if target.name == "__init__.py" and word.isidentifier() else None
                    )
                    found[(alias or word).strip()] = part or further.get(word) or target
        return self._exports[package]


def reached(starts: list[Path], edges: dict[Path, list[Path]]) -> list[Path]:
    """Everything that edges lead to from some files, these first, nearest next."""
    found, todo = set(starts), list(starts)
    for path in todo:
        for target in edges.get(path, ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return todo


def lines_of(pattern: re.Pattern[bytes], data: bytes) -> Iterator[int]:
    """The lines that a pattern matches outside a comment."""
    for match in pattern.finditer(data):
        start = data.rfind(b"\n", 0, match.start()) + 1
        if b"#" not in data[start : match.start()]:
            yield data.count(b"\n", 0, match.start()) + 1
