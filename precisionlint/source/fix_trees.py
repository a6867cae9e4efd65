"""Edits rendered over a libcst tree: each kind of ``findings.Edit`` as spans of text."""

from __future__ import annotations

import ast
import contextlib
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property

import libcst as cst
from libcst.metadata import (
    CodeRange,
    MetadataWrapper,
    ParentNodeProvider,
    PositionProvider,
    WhitespaceInclusivePositionProvider,
)

from precisionlint.findings import Edit, Place
from precisionlint.patterns import regex
from precisionlint.source.fix_calls import device_first, named, with_argument
from precisionlint.source.fix_statements import Statements
from precisionlint.source.fixes import NEWLINE, NoFixError, Span
from precisionlint.source.names import Names
from precisionlint.source.parsing import DEFINITIONS, lines_spanned, walk

OUTSIDE = regex(r"(?<![\w.])(?:torch|triton\.language|transformer_engine\.pytorch)(?:\.\w+)+")
"""A name of an outside API in the text of an edit."""
DTYPE = regex(r"(?:float|int)\d+$|\.half$")
FP8 = regex(r"dtype|fp8|float8|e4m3|e5m2|f8", re.I)
COMMENT = regex(r"#\s*precisionlint\s*:\s*[\w-]+\s*\[(?P<words>[^\]]*)\][^#]*", re.I)
"""A comment for this program up to the next one."""
LONGEST = 500_000
"""Characters of what is parsed for fixes at most: libcst takes ten seconds and half a gigabyte for them."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEVICES = {"torch.cuda.amp.": "cuda", "torch.cpu.amp.": "cpu"}


class Renderer:
    """Renders the edits of one file. Of its text only the functions are parsed that they stand in, where that is enough.

    Raises NoFixError where that is too long, or its tree does not give back its text.
    """

    def __init__(self, text: str, edits: Sequence[Edit]) -> None:
        self.text = text
        self.names = Names(text)
        self.starts = line_starts(text)
        kept = concerned(self.names.tree, edits)
        kept = [(1, len(self.starts))] if kept is None else kept
        part = "".join(self.lines(first, last) for first, last in kept)
        self.kept_starts = [start for first, last in kept for start in self.starts[first - 1 : last]]
        """The offset in the text of each line that is parsed."""
        if len(part) > LONGEST:
            raise NoFixError("it is too long to be changed")
        try:
            module = cst.parse_module(part)
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise NoFixError("libcst cannot parse it") from error
        if module.code != part:
            raise NoFixError("its tree does not give back its text")
        self.wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = module
        self.positions = self.wrapper.resolve(PositionProvider)
        self.wide = self.wrapper.resolve(WhitespaceInclusivePositionProvider)
        self.parents = self.wrapper.resolve(ParentNodeProvider)
        self.statements = Statements(module, self.parents)
        self.nodes: dict[tuple[int, int], list[cst.BaseExpression]] = {}
        self.renames = {self.offsets(each.place) for each in edits if each.kind == "rename"}
        self.arguments: dict[tuple[int, int], cst.Arg] = {}
        for node in self.positions:
            if isinstance(node, cst.BaseExpression):
                self.nodes.setdefault(self.span(node), []).append(node)
            elif isinstance(node, cst.Arg) and node.keyword is not None:
                self.arguments[self.span(node.keyword)[0], self.span(node.value)[1]] = node

    # -- places

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The offsets of a node, parentheses around it left out."""
        return self.offsets_of(self.positions[node])

    def offsets_of(self, at: CodeRange) -> tuple[int, int]:
        return self.kept_starts[at.start.line - 1] + at.start.column, self.kept_starts[at.end.line - 1] + at.end.column

    def lines(self, first: int, last: int) -> str:
        """The text of some lines."""
        return self.text[self.starts[first - 1] : self.starts[last] if last < len(self.starts) else len(self.text)]

    def offsets(self, place: Place) -> tuple[int, int]:
        return (
            self.starts[place.line - 1] + place.column - 1,
            self.starts[place.end_line - 1] + place.end_column - 1,
        )

    def at(self, place: Place) -> list[cst.BaseExpression]:
        """The expressions that stand at a place, the outermost first."""
        found = self.nodes.get(self.offsets(place))
        if not found:
            raise NoFixError("nothing stands there that could be changed")
        return found

    def call(self, place: Place) -> cst.Call:
        found = next((node for node in self.at(place) if isinstance(node, cst.Call)), None)
        if found is None:
            raise NoFixError("no call stands there")
        return found

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def replaced(self, old: cst.BaseExpression, new: cst.BaseExpression) -> Span:
        """An expression changed in its place. Where it takes several lines, all of the statement is written: they are indented by what stands
        around them."""
        start, end = self.whole(old)
        code = self.code(new)
        if not NEWLINE.search(self.text, start, end) and not NEWLINE.search(code):
            return start, end, code
        node: cst.CSTNode = old
        while not isinstance(self.parents[node], cst.Module):
            node = self.parents[node]
        start, bare = self.tops[node]
        return start, start + len(self.code(bare)), self.code(bare.deep_replace(old, new))

    @cached_property
    def tops(self) -> dict[cst.CSTNode, tuple[int, cst.CSTNode]]:
        """Each statement of the top level: its offset, and it without the lines above it."""
        found: dict[cst.CSTNode, tuple[int, cst.CSTNode]] = {}
        line = sum(lines_of(self.code(each)) for each in self.module.header)
        for each in self.module.body:
            bare = each.with_changes(leading_lines=())
            above, own = (lines_of(self.code(node)) for node in (each, bare))
            found[each] = self.kept_starts[line + above - own], bare
            line += above
        return found

    def whole(self, node: cst.BaseExpression) -> tuple[int, int]:
        """The offsets of an expression with its parentheses."""
        return self.offsets_of(self.wide[node])

    def source(self, node: cst.BaseExpression) -> str:
        """The text of an expression with its parentheses."""
        start, end = self.whole(node)
        return self.text[start:end]

    # -- edits

    def render(self, edit: Edit) -> list[Span]:
        """The spans that an edit changes. Raises NoFixError."""
        match edit.kind:
            case "argument":
                return self.argument(edit)
            case "rename":
                return self.rename(edit)
            case "receiver":
                return self.receiver(edit)
            case "operands":
                return self.operands(edit)
            case "before":
                return self.before(edit)
            case "comment":
                return [without_comment(self.text, self.starts, edit.place)]

    def filled(self, template: str, place: Place, old: str = "", **parts: str) -> tuple[str, list[Span]]:
        """The text of an edit as this file spells it, and the imports that it needs."""
        imports: list[Span] = []

        def spelled(match: re.Match[str]) -> str:
            name, missing = self.names.spell(match[0], place)
            if missing:
                imports.append(self.names.importing(missing))
            return name

        text = OUTSIDE.sub(spelled, template)
        for key, value in {"": old, **parts}.items():
            text = text.replace(f"{{{key}}}", value)
        return text, imports

    def argument(self, edit: Edit) -> list[Span]:
        name, _, became = edit.name.partition(">")
        name, _, position = name.partition("@")
        argument = self.arguments.get(self.offsets(edit.place))
        if argument is not None:
            text, imports = self.filled(edit.text, edit.place)
            return [(*self.span(argument.value), text), *imports]
        call = self.call(edit.place)
        if any(each.star for each in call.args):
            raise NoFixError("arguments are handed on there")
        held = self.held(call, name, position)
        parts = {"tensor": self.tensor(call)} if "{tensor}" in edit.text else {}
        text, imports = self.filled(edit.text, edit.place, self.source(held.value) if held is not None else "", **parts)
        if held is None:
            if position == "!":
                return []
            return [self.replaced(call, with_argument(call, name, text)), *imports]
        if not became:
            return [(*self.whole(held.value), text), *imports]
        if self.held(call, became, "") is not None:
            raise NoFixError(f"{became} is given there already")
        new = named(held.with_changes(value=cst.parse_expression(text)), became)
        return [self.replaced(call, call.deep_replace(held, new)), *imports]  # type: ignore[arg-type]

    def held(self, call: cst.Call, name: str, position: str) -> cst.Arg | None:
        """The argument of a call by its keyword, or unnamed at its position."""
        plain = [each for each in call.args if each.keyword is None]
        by_keyword = next((each for each in call.args if each.keyword is not None and each.keyword.value == name), None)
        if by_keyword is not None:
            return by_keyword
        if position == "?":
            return next((each for each in plain if self.is_dtype(each.value)), None)
        if position.isdecimal() and int(position) + self.is_function(call) < len(plain):
            return plain[int(position) + self.is_function(call)]
        return None

    def is_dtype(self, node: cst.BaseExpression) -> bool:
        full = self.names.full(dotted(node) or "")
        return full.startswith(("torch.", "triton.language.")) and DTYPE.search(full) is not None

    def is_function(self, call: cst.Call) -> bool:
        """Whether a call names a function of a module, not a method of a tensor."""
        name = dotted(call.func)
        return name is not None and self.names.full(name).startswith(("torch.", "triton."))

    def tensor(self, call: cst.Call) -> str:
        """What an op works on, where to name it twice does nothing twice."""
        if self.is_function(call):
            node = next((each.value for each in call.args if each.keyword is None), None)
        else:
            node = call.func.value if isinstance(call.func, cst.Attribute) else None
        if node is None or dotted(node) is None:
            raise NoFixError("the tensor has no name there")
        return self.code(node)

    def receiver(self, edit: Edit) -> list[Span]:
        call = self.call(edit.place)
        if not isinstance(call.func, cst.Attribute) or self.is_function(call):
            raise NoFixError("no method is called there")
        if edit.name and (call.func.attr.value != "backward" or any(each.keyword is None for each in call.args)):
            raise NoFixError("no method of a loss is called there")
        if edit.name and not self.statements.in_function(call, edit.name):
            raise NoFixError(f"{edit.name} does not stand in this function")
        parts = {}
        if "{dtype}" in edit.text:
            plain = [each.value for each in call.args if each.keyword is None]
            held = self.held(call, "dtype", "")
            dtype = held.value if held is not None else plain[0] if len(plain) == 1 else None
            if dtype is None or dotted(dtype) is None or not FP8.search(self.names.full(dotted(dtype) or "")):
                raise NoFixError("the dtype has no name there")
            parts["dtype"] = self.code(dtype)
        old = call.func.value
        start, end = self.span(old)
        code = self.text[start:end] if "({})" in edit.text else atom(old, self.source(old))
        text, imports = self.filled(edit.text, edit.place, code, **parts)
        return [(*self.whole(old), text), *imports]

    def operands(self, edit: Edit) -> list[Span]:
        node = self.at(edit.place)[0]
        sides: list[cst.BaseExpression] = []
        match node:
            case cst.Call(func=cst.Attribute(value=value)) if not self.is_function(node):
                sides = [value]
            case cst.Call(args=[cst.Arg(keyword=None, star="", value=cst.SimpleString()), *rest]):  # einsum's equation
                sides = [each.value for each in rest if each.keyword is None and not each.star]
            case cst.Call(args=[cst.Arg(keyword=None, star="", value=value), *_]):
                sides = [value]
            case cst.BinaryOperation(left=left, operator=cst.Power()):
                sides = [left]
            case cst.BinaryOperation(left=left, operator=cst.Multiply(), right=right):
                sides = [left, right]
        if not sides:
            raise NoFixError("the operands are not to be seen there")
        spans: list[Span] = []
        for side in sides:
            text, imports = self.filled(edit.text, edit.place, atom(side, self.source(side)))
            spans += [(*self.whole(side), text), *imports]
        return spans

    def before(self, edit: Edit) -> list[Span]:
        """A statement before another one, once for each run of what it is for (``name``, which must follow in a block around it)."""
        old = self.at(edit.place)[0]
        line = self.statements.line_of(old, self.span)
        if not self.statements.followed(line, edit.name):
            raise NoFixError(f"{edit.name} does not follow there")
        if self.statements.runs_beside(line, edit):
            raise NoFixError("the statement runs there already")
        start = self.span(line.body[0])[0]
        text, imports = self.filled(edit.text, edit.place)
        newline = self.module.default_newline
        if isinstance(line, cst.SimpleStatementLine):
            indent = self.indent(start)
            span = (start, start, f"{text}{newline}{indent}")
        else:  # what stands on the line of its `if` becomes a block
            indent = self.indent(self.span(self.parents[line])[0]) + self.module.default_indent
            colon = self.text.rindex(":", 0, start) + 1
            span = (colon, start, f"{newline}{indent}{text}{newline}{indent}")
        self.statements.write(line, edit.text)
        return [span, *imports]

    def indent(self, offset: int) -> str:
        """What stands before an offset in its line, which is white space."""
        start = self.starts[bisect_right(self.starts, offset) - 1]
        if self.text[start:offset].strip():
            raise NoFixError("other statements stand on that line")
        return self.text[start:offset]

    def rename(self, edit: Edit) -> list[Span]:
        """An outside name by its new name; a call by the old one becomes a call by the new one."""
        old = self.at(edit.place)[0]
        name = dotted(old)
        full = self.names.full(name) if name is not None else ""
        device = next((device for prefix, device in DEVICES.items() if full.startswith(prefix)), None)
        if device is None:
            raise NoFixError("it is not called by its old name there")
        last = full.rpartition(".")[2]
        if isinstance(old, cst.Name) and (statement := self.import_of(old.value)) is not None:
            with contextlib.suppress(NoFixError):
                uses = self.uses(old.value)
                if all(self.span(each) in self.renames for each in uses):
                    renamed = [self.renamed(each, last, device, old.value) for each in uses]
                    return [*renamed, *self.moved_import(statement, old.value, edit.name.rpartition(".")[0])]
        text, imports = self.filled(edit.name, edit.place)
        return [self.renamed(old, last, device, text), *imports]

    def renamed(self, old: cst.BaseExpression, last: str, device: str, text: str) -> Span:
        """One use of an old name, which now says the device."""
        parent = self.parents[old]
        if isinstance(parent, cst.Call) and parent.func is old:
            return self.replaced(
                parent, device_first(parent, last, device).with_changes(func=cst.parse_expression(text))
            )
        if last.startswith("custom_") and isinstance(parent, cst.Decorator):
            return (*self.span(old), f'{text}(device_type="{device}")')
        if last == "GradScaler" and device == "cuda":
            return (*self.span(old), text)
        raise NoFixError("it is handed on there")

    # -- imports

    def import_of(self, name: str) -> cst.SimpleStatementLine | None:
        """The top-level ``from … import`` that binds a name and stands alone on its lines."""
        for line in self.module.body:
            if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
                statement = line.body[0]
                if isinstance(statement, cst.ImportFrom) and name in map(bound_by, aliases(statement)):
                    return line
        return None

    def uses(self, name: str) -> list[cst.Name]:
        """Where a name is read, as far as it is told by its own word: not where a string names it."""
        found = []
        for node in self.positions:
            if isinstance(node, cst.Name) and node.value == name:
                parent = self.parents[node]
                if isinstance(parent, (cst.ImportAlias, cst.AsName)) or (
                    isinstance(parent, (cst.Attribute, cst.Arg)) and node is not parent.value
                ):
                    continue
                found.append(node)
            elif isinstance(node, cst.SimpleString) and node.raw_value == name:
                raise NoFixError("the file hands the name on")
        return found

    def moved_import(self, line: cst.SimpleStatementLine, name: str, module: str) -> list[Span]:
        """A name imported from another module: with what comes from there already, or by a statement of its own."""
        statement = line.body[0]
        assert isinstance(statement, cst.ImportFrom)
        moved = next(each for each in aliases(statement) if bound_by(each) == name)
        rest = [each for each in aliases(statement) if each is not moved]
        others = (each.body[0] for each in self.module.body if isinstance(each, cst.SimpleStatementLine))
        goal = next((each for each in others if isinstance(each, cst.ImportFrom) and self.is_from(each, module)), None)
        spans: list[Span] = []
        if goal is not None:
            *held, last = aliases(goal)
            space = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
            names = [*held, last.with_changes(comma=space), moved.with_changes(comma=last.comma)]
            spans.append((*self.span(goal), self.code(goal.with_changes(names=names))))
        if rest:
            rest[-1] = rest[-1].with_changes(comma=aliases(statement)[-1].comma)
            new = self.code(statement.with_changes(names=rest))
            if goal is None:
                alone = self.code(moved.with_changes(comma=cst.MaybeSentinel.DEFAULT))
                new += f"{self.module.default_newline}from {module} import {alone}"
            return [*spans, (*self.span(statement), new)]
        if goal is None:
            assert statement.module is not None
            return [(*self.span(statement.module), module)]
        start, end = self.span(statement)
        newline = NEWLINE.match(self.text, end)
        if newline is None:
            raise NoFixError("something else stands on the line of the import")
        return [*spans, (start, newline.end(), "")]

    def is_from(self, statement: cst.ImportFrom, module: str) -> bool:
        named = statement.module is not None and dotted(statement.module) == module and not statement.relative
        return named and bool(aliases(statement))


def line_starts(text: str) -> list[int]:
    """The offset at which each line begins."""
    return [0, *(match.end() for match in NEWLINE.finditer(text))]


def lines_of(code: str) -> int:
    return len(NEWLINE.findall(code))


def concerned(tree: ast.Module, edits: Sequence[Edit]) -> list[tuple[int, int]] | None:
    """The lines of the functions and classes at the top level that edits stand in: the tree of libcst takes a hundred times as long to
    make as that of ``ast``. None where an edit has to do with more than its own function."""
    if any(edit.kind == "rename" for edit in edits):
        return None
    lines = {edit.place.line for edit in edits if edit.kind != "comment"}
    kept: list[tuple[int, int]] = []
    for top in tree.body:
        if isinstance(top, DEFINITIONS):
            first, last = lines_spanned(top)
            inner = [top] if isinstance(top, FUNCTIONS) else [each for each in walk(top) if isinstance(each, FUNCTIONS)]
            held = {line for line in lines if first <= line <= last}
            spans = [lines_spanned(each) for each in inner] if held else []
            if any(not any(begin <= line <= end for begin, end in spans) for line in held):
                return None
            lines -= held
            kept += [(first, last)] if held else []
    return kept if not lines else None


def aliases(statement: cst.ImportFrom) -> list[cst.ImportAlias]:
    """The names that a statement imports; none where it imports all."""
    return [] if isinstance(statement.names, cst.ImportStar) else list(statement.names)


def bound_by(alias: cst.ImportAlias) -> str | None:
    """The name that an import binds."""
    return alias.evaluated_alias or alias.evaluated_name


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` as it is written, None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        above = dotted(node.value)
        return None if above is None else f"{above}.{node.attr.value}"
    return None


def atom(node: cst.BaseExpression, code: str) -> str:
    """The code of an expression that a method can be called on."""
    simple = (cst.Name, cst.Attribute, cst.Call, cst.Subscript, cst.List, cst.Tuple)
    return code if isinstance(node, simple) or node.lpar else f"({code})"


def without_comment(text: str, starts: Sequence[int], place: Place) -> Span:
    """A comment for this program, or one of its words, taken away; with it the line if nothing else stands there."""
    begin = starts[place.line - 1]
    newline = NEWLINE.search(text, begin)
    end = newline.start() if newline is not None else len(text)
    line = text[begin:end]
    start, stop = place.column - 1, place.end_column - 1
    comment = next((each for each in COMMENT.finditer(line) if each.start() <= start and stop <= each.end()), None)
    if comment is None:
        raise NoFixError("no comment stands there")
    words = [word.strip() for word in (comment["words"] or "").split(",") if word.strip()]
    kept = [word for word in words if word != line[start:stop]]
    if kept and len(kept) < len(words):
        return begin + comment.start("words"), begin + comment.end("words"), ", ".join(kept)
    before, after = line[: comment.start()].rstrip(), line[comment.end() :]
    if not before and after:
        return begin + comment.start(), begin + comment.end(), ""
    if before:
        return begin + len(before), begin + comment.end(), "  " if after else ""
    return begin, newline.end() if newline is not None else end, ""
