"""Edits rendered over a libcst tree: each kind of ``findings.Edit`` as spans of text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from precisionlint.findings import Edit, Place
from precisionlint.source.fixes import NEWLINE, NoFixError, Span
from precisionlint.source.names import Names

OUTSIDE = re.compile(r"(?<![\w.])(?:torch|triton\.language|transformer_engine\.pytorch)(?:\.\w+)+")
"""A name of an outside API in the text of an edit."""
DEVICES = {"torch.cuda.amp.": "cuda", "torch.cpu.amp.": "cpu"}
AUTOCAST = ("enabled", "dtype", "cache_enabled")
"""The arguments of autocast by its old name, in their order; the new one has another."""


class Renderer:
    """The edits of one file. Raises NoFixError where its tree does not give back its text."""

    def __init__(self, text: str) -> None:
        try:
            module = cst.parse_module(text)
        except (cst.ParserSyntaxError, RecursionError) as error:
            raise NoFixError("libcst cannot parse it") from error
        if module.code != text:
            raise NoFixError("its tree does not give back its text")
        self.text = text
        self.names = Names(text)
        self.wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = module
        self.positions = self.wrapper.resolve(PositionProvider)
        self.parents = self.wrapper.resolve(ParentNodeProvider)
        self.starts = [0, *(match.end() for match in NEWLINE.finditer(text))]
        self.nodes: dict[tuple[int, int], list[cst.BaseExpression]] = {}
        for node in self.positions:
            if isinstance(node, cst.BaseExpression):
                self.nodes.setdefault(self.span(node), []).append(node)

    # -- places

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """The offsets of a node, parentheses around it left out."""
        at = self.positions[node]
        return self.starts[at.start.line - 1] + at.start.column, self.starts[at.end.line - 1] + at.end.column

    def at(self, place: Place) -> list[cst.BaseExpression]:
        """The expressions that stand at a place, the outermost first."""
        start = self.starts[place.line - 1] + place.column - 1
        end = self.starts[place.end_line - 1] + place.end_column - 1
        found = self.nodes.get((start, end))
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
        """An expression changed in its place, where its parentheses stay."""
        return (*self.span(old), self.code(new.with_changes(lpar=(), rpar=())))

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
            case "expression":
                old = self.at(edit.place)[0]
                text, imports = self.filled(edit.text, edit.place, self.code(old.with_changes(lpar=(), rpar=())))
                return [(*self.span(old), text), *imports]
            case "before":
                return self.before(edit)

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
        call = self.call(edit.place)
        if any(each.star for each in call.args):
            raise NoFixError("arguments are handed on there")
        name, _, position = edit.name.partition("@")
        function = self.is_function(call)
        held = next((each for each in call.args if each.keyword is not None and each.keyword.value == name), None)
        plain = [each for each in call.args if each.keyword is None]
        if held is None and position and int(position) + function < len(plain):
            held = plain[int(position) + function]
        parts = {"tensor": self.tensor(call, function)} if "{tensor}" in edit.text else {}
        text, imports = self.filled(edit.text, edit.place, self.code(held.value) if held is not None else "", **parts)
        if held is not None:
            return [(*self.span(held.value), text), *imports]
        return [self.replaced(call, with_argument(call, name, text)), *imports]

    def is_function(self, call: cst.Call) -> bool:
        """Whether a call names a function of a module, not a method of a tensor."""
        name = dotted(call.func)
        return name is not None and self.names.full(name).startswith("torch.")

    def tensor(self, call: cst.Call, function: bool) -> str:
        """What an op works on, where to name it twice does nothing twice."""
        if function:
            node = next((each.value for each in call.args if each.keyword is None), None)
        else:
            node = call.func.value if isinstance(call.func, cst.Attribute) else None
        if node is None or dotted(node) is None:
            raise NoFixError("the tensor has no name there")
        return self.code(node)

    def receiver(self, edit: Edit) -> list[Span]:
        call = self.call(edit.place)
        if not isinstance(call.func, cst.Attribute) or self.is_function(call) or not call.args:
            raise NoFixError("no method of a tensor is called there")
        first = next((each.value for each in call.args if each.keyword is None), None)
        if first is None or dotted(first) is None:
            raise NoFixError("the argument has no name there")
        old = call.func.value
        start, end = self.span(old)
        text, imports = self.filled(edit.text, edit.place, self.code(old), **{"0": self.code(first)})
        return [(start - width(old.lpar), end + width(old.rpar), text), *imports]

    def before(self, edit: Edit) -> list[Span]:
        """A statement before another one, once for each run of what it is for (``name``, which must follow in a block around it)."""
        node: cst.CSTNode = self.at(edit.place)[0]
        while not isinstance(node, cst.SimpleStatementLine):
            node = self.parents[node]
        if not self.followed(node, edit.name):
            raise NoFixError(f"{edit.name} does not follow there")
        start = self.span(node)[0]
        line = max(each for each in self.starts if each <= start)
        indent = self.text[line:start]
        if indent.strip():
            raise NoFixError("other statements stand on that line")
        text, imports = self.filled(edit.text, edit.place)
        return [(start, start, f"{text}{self.module.default_newline}{indent}"), *imports]

    def followed(self, node: cst.CSTNode, code: str) -> bool:
        """Whether a statement runs each time after this one, before this one runs again."""
        while True:
            parent = self.parents[node]
            if not isinstance(parent, (cst.IndentedBlock, cst.Module)):
                return False
            body: list[cst.CSTNode] = list(parent.body)
            for later in body[body.index(node) + 1 :]:
                if any(isinstance(each, (cst.Return, cst.Break, cst.Continue, cst.Raise)) for each in inside(later)):
                    return False
                if any(isinstance(each, cst.Call) and self.code(each) == code for each in inside(later)):
                    return isinstance(later, cst.SimpleStatementLine)
            node = self.parents[parent]
            if isinstance(node, cst.Else):
                node = self.parents[node]
            if not isinstance(node, (cst.If, cst.With)):
                return False

    def rename(self, edit: Edit) -> list[Span]:
        """An outside name by its new name; a call by the old one becomes a call by the new one."""
        old = self.at(edit.place)[0]
        name = dotted(old)
        full = self.names.full(name) if name is not None else ""
        device = next((device for prefix, device in DEVICES.items() if full.startswith(prefix)), None)
        if device is None:
            raise NoFixError("it is not called by its old name there")
        last = full.rpartition(".")[2]
        text, imports = self.filled(edit.name, edit.place)
        parent = self.parents[old]
        if isinstance(parent, cst.Call) and parent.func is old:
            new = device_first(parent, last, device).with_changes(func=cst.parse_expression(text))
            return [self.replaced(parent, new), *imports]
        if last.startswith("custom_"):
            if not isinstance(parent, cst.Decorator):
                raise NoFixError("it is handed on there")
            return [(*self.span(old), f'{text}(device_type="{device}")'), *imports]
        if last == "GradScaler" and device == "cuda":
            return [(*self.span(old), text), *imports]
        raise NoFixError("it is handed on there")


def device_first(call: cst.Call, last: str, device: str) -> cst.Call:
    """A call by the old name with the device that the new one asks for."""
    if any(each.star for each in call.args):
        raise NoFixError("arguments are handed on there")
    quoted = f'"{device}"'
    if last.startswith("custom_"):
        return with_argument(call, "device_type", quoted)
    args = list(call.args)
    if last == "autocast":
        plain = [index for index, each in enumerate(args) if each.keyword is None]
        if len(plain) > len(AUTOCAST):
            raise NoFixError("it has too many arguments there")
        for index in plain:
            args[index] = named(args[index], AUTOCAST[index])
    made = cst.Arg(cst.parse_expression(quoted))
    if args:
        made = made.with_changes(comma=cst.Comma(whitespace_after=plain_space(between(call))))
    return call.with_changes(args=[made, *args])


def named(argument: cst.Arg, keyword: str) -> cst.Arg:
    space = cst.SimpleWhitespace("")
    return argument.with_changes(
        keyword=cst.Name(keyword), equal=cst.AssignEqual(whitespace_before=space, whitespace_after=space)
    )


def with_argument(call: cst.Call, keyword: str, source: str) -> cst.Call:
    """A call with one more argument, laid out as the others are."""
    made = named(cst.Arg(cst.parse_expression(source)), keyword)
    if not call.args:
        return call.with_changes(args=[made])
    *rest, last = call.args
    comma = cst.Comma(whitespace_after=plain_space(between(call)))
    if isinstance(last.comma, cst.Comma):
        made = made.with_changes(comma=last.comma)
        after = last.comma.whitespace_after
        if isinstance(after, cst.ParenthesizedWhitespace) and after.first_line.comment is not None:
            comma = comma.with_changes(whitespace_after=after.with_changes(last_line=last_indent(between(call))))
            made = made.with_changes(comma=cst.Comma(whitespace_after=plain_space(after)))
        last = last.with_changes(comma=comma)
    else:
        made = made.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*rest, last, made])


def between(call: cst.Call) -> cst.BaseParenthesizableWhitespace:
    """What stands between two arguments of a call."""
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        return call.args[-2].comma.whitespace_after
    before = call.whitespace_before_args
    return before if isinstance(before, cst.ParenthesizedWhitespace) else cst.SimpleWhitespace(" ")


def plain_space(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """White space without the comments in it."""
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space.with_changes(
            first_line=space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace("")), empty_lines=()
        )
    return space


def last_indent(space: cst.BaseParenthesizableWhitespace) -> cst.SimpleWhitespace:
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space.last_line
    return cst.SimpleWhitespace("")


def dotted(node: cst.CSTNode) -> str | None:
    """``a.b.c`` as it is written, None for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        above = dotted(node.value)
        return None if above is None else f"{above}.{node.attr.value}"
    return None


def inside(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it, what functions defined there do left out."""
    yield node
    for child in node.children if not isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)) else ():
        yield from inside(child)


def width(parentheses: Sequence[cst.LeftParen] | Sequence[cst.RightParen]) -> int:
    """How many characters parentheses take, with the white space that belongs to them."""
    return sum(len(cst.Module(()).code_for_node(each)) for each in parentheses)
