"""The reading of one file: its classes and functions, each from what nobody calls down, and the other files that names lead to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precisionlint.events import Event
from precisionlint.patterns import regex
from precisionlint.source.flow.evaluate import Frame
from precisionlint.source.flow.heap import DEPTH, NOTHING, Class, Function, Source, Spent, instance
from precisionlint.source.flow.remembered import Remembered
from precisionlint.source.flow.words import Asked, foreign, words_of
from precisionlint.source.root import file_of
from precisionlint.valueflow import HALF, WIDE, Called, Ended, Scope, Touched, Value

if TYPE_CHECKING:
    from precisionlint.subjects import File

BACKWARD = regex(r"(?:^|_)(?:backward|bwd|dgrad|wgrad)(?:_|$)")
"""Functions that compute gradients, by their names: what they call does so too."""
ANEW = regex(r"^(?:update|extend|refresh|grow)(?:_|$)")
"""Methods that others call at any time, though ``__init__`` may be the first, by their names."""
SOURCES = 24
"""How many files of the project one file's values are followed into."""
BUDGET = 150_000
"""How many expressions are evaluated for one file."""


def read(file: File) -> Iterator[Event]:
    """What the functions of a file compute, op by op."""
    flow = Flow(file)
    yield from flow.run()


class Flow:
    """The reading of one file. ``about``: tells of the ops of that other file, which this one calls, and not of its own."""

    def __init__(self, file: File, about: Path | None = None) -> None:
        self.file = file
        self.told = about or file.path
        self.handed: dict[
            int, bool
        ] = {}  # first line of a function of that file -> whether each call decides its dtypes
        self.apis = file.project.apis
        self.source = Source(file, file.project)
        self.sources: dict[Path, Source | None] = {file.path: self.source}
        self.events: list[Event] = []
        self.entered: set[int] = set()
        self.classes: list[Class] = []
        self.functions: list[Function] = []
        self.nested: list[Function] = []
        self.tests: dict[ast.expr, Asked] = {}
        self.running: list[ast.AST] = []
        self.remembered = Remembered()
        self.inherited = False  # a method of a class above runs, which other files hold
        self.shown = False  # a module is shown on numbers that were made up: what others give it, this does not tell
        self.top: Frame | None = None
        self.budget = BUDGET

    def run(self) -> Iterator[Event]:
        try:
            quiet = self.told != self.file.path
            self.top = Frame(self, self.source, self.source.names, (), Scope(), 0, quiet)
            self.top.block(self.file.syntax.body)
            self.end(None)
            called = self.file.called
            later: list[Function] = []
            for cls in list(self.classes):
                before = self.entered.copy()
                self.prepare(cls)
                for name, method in cls.methods.items():
                    again = ANEW.search(name) and id(method.node) not in before  # not only while the object is made
                    if name in ("__init__", "__new__") or (id(method.node) in self.entered and not again):
                        continue
                    if again:
                        self.root(method)
                    elif name in called and name not in ("forward", "backward", "__call__", "step"):
                        later.append(method)
                    elif not self.through_base(cls, name):
                        self.root(method)
            for function in list(self.functions):
                (later.append if function.name in called else self.root)(function)
            for function in later:
                if id(function.node) not in self.entered:
                    self.root(function)
        except Spent:
            pass
        yield from self.events

    def asked(self, test: ast.expr) -> Asked:
        found = self.tests.get(test)
        if found is None:
            found = self.tests[test] = words_of(test)
        return found

    def global_of(self, source: Source, name: str) -> Value | None:
        """A name of a file's top level. Of other files than the one at hand, only the statement that makes the name is run."""
        found = source.names.get(name)
        if found is None and source is self.source and self.top is not None:
            return self.top.names.get(name)  # what the branch has made that runs there: ``if __name__ == "__main__":``
        if found is None and source is not self.source and name in source.makers:
            statements = source.makers.pop(name)  # what a cycle of imports sees meanwhile is nothing
            Frame(self, source, source.names, (), Scope(), DEPTH - 1, quiet=True).block(statements)
            found = source.names.get(name)
        return found

    def prepare(self, cls: Class) -> None:
        """Runs ``__init__`` for the attributes that it leaves."""
        for one in reversed(cls.lineage):
            if not one.ready:
                one.ready = True
                for name in ("__init__", "setup", "__post_init__"):
                    if name in one.methods:
                        self.call(
                            one.methods[name],
                            [],
                            {},
                            Scope(setup=True),
                            1,
                            receiver=instance(one),
                            quiet=one.source is not self.source,
                        )
                one.settle_buffers()

    def through_base(self, cls: Class, name: str) -> bool:
        """Enters a method by those of the classes above that call it, with what they hand it; whether any did."""
        above = [
            method
            for base in cls.lineage[1:]
            if base.source is not self.source
            for method in base.methods.values()
            if method.name not in ("__init__", name) and cls.method(method.name) is method and name in method.siblings
        ]
        self.inherited = True
        for method in above:
            self.call(method, [], {}, Scope(), 0, receiver=instance(cls))
            self.end(method.node)
        self.inherited = False
        return id(cls.methods[name].node) in self.entered

    def root(self, function: Function) -> None:
        """A function from its parameters, whose dtypes nobody knows."""
        self.call(function, [], {}, Scope(), 0, receiver=instance(function.owner) if function.owner else None)
        self.end(function.node)

    def defined(self, function: Function, quiet: bool, at: Any = None) -> Value:
        """A function that another one defines, as a value."""
        if function.source is self.source and not quiet:
            self.nested.append(function)
        return Value("function", at=at, name=function.name, ref=function)

    def end(self, node: ast.AST | None) -> None:
        """Ends what ran from the top, then reads the functions that it defined and that nothing here calls: others run them."""
        self.events.append(Ended(node, ()))
        inner, self.nested = self.nested, []
        for each in inner:
            if id(each.node) not in self.entered:
                self.root(each)

    def call(
        self,
        function: Function,
        args: list[Value],
        options: dict[str, Value],
        scope: Scope,
        depth: int,
        receiver: Value | None = None,
        quiet: bool = False,
    ) -> Value:
        """What a function of the project returns for these arguments; its ops are told, once for all calls that cannot be told apart."""
        mine = function.source is self.source
        scope = scope_of(function, scope)
        if self.inherited or (mine and (self.shown or function.around)):
            return self.follow(function, args, options, scope, depth, receiver, quiet)
        key = self.remembered.key(function, args, options, receiver, scope, quiet and mine)
        arguments = [*args, *options.values(), *([receiver] if receiver is not None else [])]
        again = self.remembered.again(key, arguments, depth) if key is not None else None
        if again is None:
            told = len(self.events)
            again = self.follow(function, args, options, scope, depth, receiver, quiet)
            if key is not None and not any(map(switches, self.events[told:])):
                self.remembered.keep(key, arguments, depth, again)
        return again

    def follow(
        self,
        function: Function,
        args: list[Value],
        options: dict[str, Value],
        scope: Scope,
        depth: int,
        receiver: Value | None,
        quiet: bool,
    ) -> Value:
        """The same by way of its body. ``scope``: its own."""
        if not self.shown:
            self.entered.add(id(function.node))
        source = function.source
        quiet = source.file.path != self.told or (quiet and not self.inherited and source is self.source)
        if source.file.path == self.told and source is not self.source:
            decided = scope.setup or any(map(decides, (*args, *options.values())))
            self.handed[function.node.lineno] = self.handed.get(function.node.lineno, True) and decided
        frame = Frame(self, source, {}, function.around, scope, depth, quiet)
        frame.bind(function, args, options, receiver)
        node = function.node
        if isinstance(node, ast.Lambda):
            return frame.expr(node.body)
        frame.decorators(node)
        frame.block(node.body)
        return frame.result()

    def import_name(self, source: Source, module: str, level: int, name: str | None) -> Value:
        """A name of another module: of the project if there is such a file, else of an outside API."""
        outside = module if name is None else f"{module}.{name}" if module else (name or "")
        path = source.project.resolve(module, level, source.file.path)
        if path is None:
            return foreign(self.apis.canonical(outside))
        if name is not None and self.apis.own:
            acts = self.apis.own.get(f"{source.project.name_of(path)}.{name}")
            if acts is not None:
                return Value("external", name=acts)
        if name is not None and path.name == "__init__.py":
            part = file_of(path.parent / name)
            if part is not None:
                return Value("file", name=outside, ref=part)
        if name is None:
            return Value("file", name=outside, ref=path)
        return Value("import", name=outside, ref=(path, name))

    def star(self, source: Source, node: ast.ImportFrom) -> dict[str, str]:
        """What a star import brings in, as far as it is known."""
        known = {} if node.level or not node.module else self.apis.star(node.module)
        return known if known and source.project.resolve(node.module or "", 0, source.file.path) is None else {}

    def exported(self, source: Source, node: ast.ImportFrom) -> list[str]:
        """The names that a star import of a file of the project brings into the file at hand, in their order."""
        path = (
            source.project.resolve(node.module or "", node.level, source.file.path) if source is self.source else None
        )
        other = self.other(path) if path is not None else None
        return [name for name in other.makers if not name.startswith("_")] if other is not None else []

    def resolve(self, value: Value, hops: int = 0) -> Value:
        """The value of an imported name; the file is read when this is first asked."""
        if value.op != "import" or hops > 5:
            return value if value.op != "import" else NOTHING
        path, name = value.ref
        source = self.other(path)
        if source is None:
            return NOTHING
        found = self.global_of(source, name)
        return self.resolve(found, hops + 1) if found is not None else NOTHING

    def other(self, path: Path) -> Source | None:
        """Another file of the project, as long as there are not too many."""
        if path not in self.sources and len(self.sources) < SOURCES:
            self.sources[path] = None
            file = self.file.beside(path)
            if file is not None:
                self.sources[path] = Source(file, self.file.project)
        return self.sources.get(path)


def decides(argument: Value) -> bool:
    """Whether an argument decides what a function's values are: a wide dtype, or a tensor whose dtype is known."""
    wide = argument.op == "external" and argument.name.removeprefix("torch.") in WIDE
    return wide or (argument.op != "constant" and argument.dtypes <= HALF | WIDE)


def switches(event: Event) -> bool:
    """Whether an event reads or sets what holds for the whole program: when it happens matters, and how often."""
    return isinstance(event, Touched) or (isinstance(event, Called) and "precision" in event.value.name)


def scope_of(function: Function, caller: Scope) -> Scope:
    owner = function.owner
    kind = owner.kind if owner is not None else ""
    if kind == "function":
        kind = "backward" if function.name == "backward" else "forward"
    if kind in ("", "module") and (function.name.startswith("test") or function.source.tests):
        kind = "test"
    if caller.kind == "backward" or BACKWARD.search(caller.function):
        kind = "backward"
    name = owner.node.name if owner else ""
    guarded = "version" if caller.guarded == "version" else ""
    return Scope(
        function.name, name, kind, caller.region, caller.enabled, caller.grad, caller.setup, guarded, caller.switched
    )
