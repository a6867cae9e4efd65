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

from precisionlint.findings import Place
from precisionlint.source.project import Project
from precisionlint.source.root import file_of, python_files

FILES = 5_000
"""How many files of a project are looked at."""

MODEL = rb"(?:\w*[Mm]odel|\w*[Nn]et|unet\w*|\w*transformer|\w*encoder\w*|\w*decoder|backbone|generator|module|self|\w*critic|policy)"
MOVED = rb"(?:\.(?:cuda|to|train|eval|requires_grad_)\([^()\n]*\))*"
TRAINS = re.compile(
    rb"\.backward\(|\bTrainer\(|class[^\n(]*\([^)\n]*LightningModule|\.fit\(|\btrain(?:ing)?_step\(|\btrainer\.train\("
)
"""What only a program that trains holds; optimizers and schedules are made and wrapped by libraries too."""
PATTERNS = {
    "training": TRAINS,
    "fp16": re.compile(
        rb"(?<![bB])\b[Ff]loat16\b|\.half\(\)|torch\.half\b|fp16|16-mixed|16-true|\bautocast\(\s*(?:['\"]cuda['\"]\s*)?\)|GradScaler"
    ),
    "bf16": re.compile(rb"bfloat16|\bbf16\b"),
    "half autocast": re.compile(
        rb"\bautocast\((?![^)\n]*enabled\s*=\s*False)(?![^)\n]*float32)(?!['\"]cpu)|mixed_precision\s*=\s*['\"](?:fp16|bf16)"
        rb"|bf16-mixed|16-mixed"
    ),
    "loss under autocast": re.compile(
        rb"with [^\n]*autocast\((?![^\n]*['\"]cpu)(?![^\n]*enabled\s*=\s*False)[^\n]*:[ \t]*\n(?:[^\n]*\n){0,8}?[^\n]*(?:loss|criterion|targets?\b)"
    ),
    "half parameters": re.compile(
        MODEL + rb"(?:\([^()\n]*\))?" + MOVED + rb"\.(?:half\(\)|bfloat16\(\)|to\([^)\n]*(?:float16|bfloat16|torch\.half|dtype\b))"
        rb"|\btorch_dtype\s*=|set_default_dtype\(\s*(?:torch\.)?b?(?:float16|half)|bf16-true|16-true|\.convert_to_fp16\(\)"
        rb"|Float16Module|FP16_?Optimizer|\bpure_(?:half|bf16|fp16)|\.half\(\)\.cuda\(\)"
    ),
    "half copies": re.compile(rb"\bparam_dtype\s*=(?!\s*torch\.float(?:32)?\b)"),
}  # fmt: skip
WORDS: dict[str, tuple[bytes, ...]] = {
    "half autocast": (b"autocast", b"mixed"),
    "loss under autocast": (b"autocast",),
    "half parameters": (b"16", b"half", b".to("),
    "half copies": (b"param_dtype",),
}
"""What a file must hold for the slower patterns to match anywhere in it."""
ASIDE = {"half parameters": re.compile(rb"save\w*\(|state_dict\(|copy\(|export|onnx|\beval\(\)", re.I)}
"""What says in the same line that it is done to a copy: for a file, or to look at."""
DTYPE_AWARE = re.compile(
    rb"\.dtype\b|\btype_as\(|\bdtype\s*=\s*dtype\b|\b\w+\.float\(\)\.\w|b?float16\b|\.half\(\)|\.to\(tl\.float32\)"
)
"""What only code writes that meets other dtypes than fp32. (``.float()`` by itself makes numbers of integers as well.)"""
TEXT = re.compile(rb'"{3}(?:[^\\]|\\.)*?"{3}' + rb"|'{3}(?:[^\\]|\\.)*?'{3}", re.S)
"""Documentation: what it speaks of, the program need not do."""
IN_TRAINING = {"half weights": ("half parameters", "half copies"), "half gradients": ("half parameters",)}
"""What is shown by a file that trains, or by the file at hand, alone: others cast models for inference. Weights of a forward are half where
parameters are kept so, or where FSDP makes half copies of them; gradients only in the first case."""
SEEN_ONLY = frozenset({"loss under autocast"})
"""What handling dtypes says nothing of: only a line that shows it counts."""
TESTS = re.compile(r"(?:^|/)(?:tests?|docs?|benchmarks?)/|(?:^|/)(?:test_|conftest)|_test\.py$")
IMPORTED = re.compile(
    rb"^[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import[ \t]*(?:\(([^)]*)\)|([^\n#;]*))|import[ \t]+([\w., \t]+))", re.M
)
WORD = re.compile(r"\w+")
DEFINED = re.compile(rb"^(?:class|def)[ \t]+(\w+)", re.M)
REGISTERS = re.compile(rb"regist|entry_point", re.I)


class Evidence:
    """The evidence of one project; files are read when something is first asked."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self._lines: dict[Path, dict[str, int]] = {}
        self._programs: dict[Path, list[Path]] = {}
        self._callers: dict[Path, list[Path]] = {}
        self._cut_off: dict[Path, bool] = {}

    def handled(self, where: Place, near: Path, display: str) -> bool:
        """Whether a place shows no more than that a library's file handles dtypes."""
        return not self.trains and (where.path, where.line) == (display, self.lines(near).get("dtypes"))

    def shows(
        self, what: str, near: Path, display: str, *, elsewhere: bool = False, training: bool = False
    ) -> Place | None:
        """Where a program of the file at ``near`` shows it (named ``display`` in its place); None if nothing does. ``elsewhere``: where
        another of its files says it, and nothing else counts.

        In a project that trains nothing, a file is a library's: what reaches it is its callers' affair, and that it handles dtypes at
        all shows that they come with others than fp32.
        """
        if what == "half":
            return self.shows("bf16", near, display) or self.shows("fp16", near, display)
        if what in IN_TRAINING:
            shown = (self.shows(each, near, display, training=True) for each in IN_TRAINING[what])
            return next((place for place in shown if place is not None), None)
        programs = self.programs(near)
        if elsewhere:
            programs = self.all_of(near)[1:]
        elif what in SEEN_ONLY:
            programs = [*self.all_of(near), *self.files]  # a loss may be loaded by name
        elif not any("training" in self.lines(path) for path in programs):
            if not self.trains:
                line = 1 if what == "training" else self.lines(near).get("dtypes")
                return Place(display, line, 1, line, 1) if line is not None else None
            programs = [near, *(self.files if what == "training" else self.callers(near))]
        for path in programs:
            lines = self.lines(path)
            if what in lines and (not training or path == near or "training" in lines):
                return Place(display if path == near else path.as_posix(), lines[what], 1, lines[what], 1)
        return None

    def callers(self, path: Path) -> list[Path]:
        """The files that may run what no program imports. Where others do import it, or it registers something, these are found by a name in
        a configuration: any of the project. Else those that speak of the file or of what it defines."""
        if path in self._callers:
            return self._callers[path]
        data = self.project.read(path) or b""
        if self.importers.get(path) or REGISTERS.search(data):
            return self.files
        named = {path.stem.encode(), *DEFINED.findall(data)} - {b"__init__", b"main", b"forward"}
        if not named:
            return []
        spoken = re.compile(rb"\b(?:" + b"|".join(re.escape(name) for name in sorted(named)) + rb")\b")
        self._callers[path] = [other for other in self.files if spoken.search(self.project.read(other) or b"")]
        return self._callers[path]

    def is_cut_off(self, path: Path) -> bool:
        """Whether a file imports others of its own package that are not there: what its program shows, nobody can tell."""
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
        return self._cut_off[path]

    @cached_property
    def trains(self) -> bool:
        """Whether anything in the project trains; else it is a library, and its callers decide on dtypes."""
        return any("training" in self.lines(path) for path in self.files)

    def lines(self, path: Path) -> dict[str, int]:
        """What a file shows, and in which line first."""
        if path not in self._lines:
            found: dict[str, int] = {}
            data = self.project.read(path) or b""
            if b'"""' in data or b"'''" in data:
                data = TEXT.sub(lambda text: b"\n" * text[0].count(b"\n"), data)
            for what, pattern in {**PATTERNS, "dtypes": DTYPE_AWARE}.items():
                if what in WORDS and not any(word in data for word in WORDS[what]):
                    continue
                line = first_line(pattern, data, ASIDE.get(what))
                if line is not None:
                    found[what] = line
            self._lines[path] = found
        return self._lines[path]

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

    def imported(self, path: Path) -> Iterator[Path]:
        for match in IMPORTED.finditer(self.project.read(path) or b""):
            module, inside, plain, whole = (part.decode("ascii", "replace") if part else "" for part in match.groups())
            if not module:
                for name in whole.split(","):
                    target = self.project.resolve(name.split(" as ")[0].strip(), 0, path)
                    if target is not None:
                        yield target
                continue
            name = module.lstrip(".")
            target = self.project.resolve(name, len(module) - len(name), path)
            if target is None:
                continue
            yield target
            if target.name == "__init__.py":
                parts = (file_of(target.parent / word) for word in WORD.findall(inside or plain))
                yield from (part for part in parts if part is not None)


def reached(starts: list[Path], edges: dict[Path, list[Path]]) -> list[Path]:
    """Everything that edges lead to from some files, these first, nearest next."""
    found, todo = set(starts), list(starts)
    for path in todo:
        for target in edges.get(path, ()):
            if target not in found:
                found.add(target)
                todo.append(target)
    return todo


def first_line(pattern: re.Pattern[bytes], data: bytes, unless: re.Pattern[bytes] | None = None) -> int | None:
    """The first line that a pattern matches outside a comment; ``unless`` another does as well."""
    for match in pattern.finditer(data):
        start = data.rfind(b"\n", 0, match.start()) + 1
        if unless is not None and unless.search(data[start:].partition(b"\n")[0]):
            continue
        if b"#" not in data[start : match.start()]:
            return data.count(b"\n", 0, match.start()) + 1
    return None
