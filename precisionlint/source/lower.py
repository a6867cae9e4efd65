"""Lowering: from a libcst tree to the program tree, one pass with a dispatch table of its own.

It knows Python's syntax and nothing of torch. Function bodies are lowered only when they are first entered, which
is what keeps a large file cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import libcst as cst

from precisionlint.source import program as p

NONE = p.Const(None)

BINARY = {
    cst.Add: "+", cst.Subtract: "-", cst.Multiply: "*", cst.Divide: "/", cst.FloorDivide: "//", cst.Modulo: "%",
    cst.Power: "**", cst.MatrixMultiply: "@", cst.BitAnd: "&", cst.BitOr: "|", cst.BitXor: "^", cst.LeftShift: "<<",
    cst.RightShift: ">>",
    cst.AddAssign: "+", cst.SubtractAssign: "-", cst.MultiplyAssign: "*", cst.DivideAssign: "/",
    cst.FloorDivideAssign: "//", cst.ModuloAssign: "%", cst.PowerAssign: "**", cst.MatrixMultiplyAssign: "@",
    cst.BitAndAssign: "&", cst.BitOrAssign: "|", cst.BitXorAssign: "^", cst.LeftShiftAssign: "<<",
    cst.RightShiftAssign: ">>",
}  # fmt: skip
COMPARE = {
    cst.Equal: "==", cst.NotEqual: "!=", cst.LessThan: "<", cst.LessThanEqual: "<=", cst.GreaterThan: ">",
    cst.GreaterThanEqual: ">=", cst.In: "in", cst.NotIn: "not in", cst.Is: "is", cst.IsNot: "is not",
}  # fmt: skip
SEQUENCES: dict[type, str] = {cst.Tuple: "tuple", cst.List: "list", cst.Set: "set"}
UNARY: dict[type, str] = {cst.Not: "not", cst.Minus: "-", cst.Plus: "+", cst.BitInvert: "~"}


CHOICES = 32
"""How deep conditional expressions are followed inside each other."""


class Lowering:
    """Lowers one function (or module, or class) body; temporaries are numbered within it."""

    def __init__(self, spans: dict[Any, tuple[int, int]]) -> None:
        self.spans = spans
        self.code: list[p.Instr] = []
        self.temps = 0
        self.generator = False
        self.functions: list[p.Function] = []
        self.testing = False
        self.choices = 0
        self.renamed: dict[str, int] = {}  # the variables of the comprehensions around, which are nobody else's

    # -- blocks

    def block(self, body: cst.BaseSuite | cst.Module | list[Any]) -> p.Block:
        outer, self.code = self.code, []
        if isinstance(body, list):
            self.statements(body)
        elif isinstance(body, cst.SimpleStatementSuite):
            for small in body.body:
                STATEMENTS.get(type(small), Lowering.nothing)(self, small)
        else:
            self.statements(body.body)
        block, self.code = p.Block(self.code), outer
        return block

    def into(self, fill: Callable[[], None]) -> p.Block:
        """The block that ``fill`` emits."""
        outer, self.code = self.code, []
        fill()
        block, self.code = p.Block(self.code), outer
        return block

    def statements(self, body: Any) -> None:
        for statement in body:
            if type(statement) is cst.SimpleStatementLine:
                for small in statement.body:
                    STATEMENTS.get(type(small), Lowering.nothing)(self, small)
            else:
                STATEMENTS.get(type(statement), Lowering.nothing)(self, statement)

    def temp(self) -> int:
        self.temps += 1
        return self.temps

    def nothing(self, node: Any) -> None:
        pass

    # -- statements

    def expression_statement(self, node: cst.Expr) -> None:
        if type(node.value) in (cst.SimpleString, cst.ConcatenatedString):
            return
        value = self.expr(node.value)
        if isinstance(value, (p.Attr, p.Index)):
            self.code.append(p.Assign(p.Name(self.temp()), value, node.value))

    def assign(self, node: cst.Assign) -> None:
        value = self.expr(node.value)
        last = self.code[-1] if self.code else None
        if isinstance(last, p.Call) and isinstance(value, p.Name) and last.target == value.slot:
            last.name = dotted(node.targets[0].target)
        if len(node.targets) > 1 and not isinstance(value, (p.Const, p.Name)):
            temp = p.Name(self.temp())
            self.code.append(p.Assign(temp, value, node))
            value = temp
        for target in node.targets:
            self.code.append(p.Assign(self.target(target.target), value, node))

    def ann_assign(self, node: cst.AnnAssign) -> None:
        annotation = self.annotation(node.annotation)
        if node.value is not None:
            self.code.append(p.Assign(self.target(node.target), self.expr(node.value), node, annotation))
        elif isinstance(node.target, cst.Name):
            # A dataclass field without a default, or a bare declaration: the name exists, its value is unknown.
            self.code.append(p.Assign(p.Name(node.target.value), p.Opaque((), node.target), node, annotation))

    def aug_assign(self, node: cst.AugAssign) -> None:
        op = BINARY[type(node.operator)]
        target = self.target(node.target)
        value = self.expr(node.value)
        self.code.append(p.Assign(target, p.Binary(op, target, value), node, op=op))

    def target(self, node: cst.BaseExpression) -> p.Expr:
        if isinstance(node, (cst.Tuple, cst.List)):
            return p.Sequence("tuple", tuple(self.target(e) for e in node.elements), node)  # type: ignore[arg-type]
        if isinstance(node, (cst.Element, cst.StarredElement)):
            inner = self.target(node.value)
            return p.Star(inner) if isinstance(node, cst.StarredElement) else inner
        return self.expr(node)

    def delete(self, node: cst.Del) -> None:
        targets = node.target.elements if isinstance(node.target, cst.Tuple) else [node.target]
        for target in targets:
            inner = target.value if isinstance(target, cst.Element) else target
            self.code.append(p.Delete(self.expr(inner)))

    def if_(self, node: cst.If) -> None:
        test = self.test(node.test)
        then = self.block(node.body)
        if node.orelse is None:
            other = p.Block([])
        elif isinstance(node.orelse, cst.Else):
            other = self.block(node.orelse.body)
        else:
            orelse = node.orelse
            other = self.into(lambda: self.if_(orelse))
        self.code.append(p.If(test, then, other, node.test))

    def assert_(self, node: cst.Assert) -> None:
        test = self.test(node.test)
        self.code.append(p.If(test, p.Block([]), p.Block([p.Raise()]), node.test, quiet=True))

    def for_(self, node: cst.For) -> None:
        iterable = self.expr(node.iter)
        target = self.target(node.target)
        body = self.block(node.body)
        other = self.block(node.orelse.body) if node.orelse else p.Block([])
        self.code.append(p.For(target, iterable, body, other, node))

    def while_(self, node: cst.While) -> None:
        tests: list[p.Expr] = []
        head = self.into(lambda: tests.append(self.test(node.test)))
        body = self.block(node.body)
        other = self.block(node.orelse.body) if node.orelse else p.Block([])
        self.code.append(p.While(head, tests[0], body, other, node))

    def with_(self, node: cst.With) -> None:
        self.with_items(list(node.items), node)

    def with_items(self, items: list[cst.WithItem], node: cst.With) -> None:
        first, *rest = items
        context = self.expr(first.item)
        target = self.target(first.asname.name) if first.asname else None
        body = self.into(lambda: self.with_items(rest, node)) if rest else self.block(node.body)
        self.code.append(p.With(context, target, body, first.item))

    def try_(self, node: Any) -> None:
        body = self.block(node.body)
        handlers = []
        for handler in node.handlers:

            def fill(handler: Any = handler) -> None:
                if handler.name is not None:
                    name = handler.name.name
                    self.code.append(p.Assign(self.target(name), p.Opaque((), handler), handler))
                self.statements(handler.body.body if hasattr(handler.body, "body") else [])

            handlers.append(self.into(fill))
        other = self.block(node.orelse.body) if node.orelse else p.Block([])
        final = self.block(node.finalbody.body) if node.finalbody else p.Block([])
        self.code.append(p.Try(body, tuple(handlers), other, final))

    def match(self, node: cst.Match) -> None:
        subject = self.expr(node.subject)
        cases = list(node.cases)

        def case(index: int) -> None:
            if index == len(cases):
                return
            current = cases[index]
            tests = list(self.pattern(current.pattern, subject))

            def bind() -> None:
                for child in names_bound(current.pattern):
                    self.code.append(p.Assign(p.Name(child), p.Opaque((subject,), current.pattern), current))
                if current.guard is not None:
                    guard = self.expr(current.guard)
                    body = self.block(current.body)
                    rest = self.into(lambda: case(index + 1))
                    self.code.append(p.If(guard, body, rest, current.guard))
                else:
                    self.statements(current.body.body)

            then = self.into(bind)
            if tests == []:
                self.code.extend(then.code)
                return
            other = self.into(lambda: case(index + 1))
            block = then
            if len(tests) > 1:  # an or-pattern: one test that is any of them
                temp = p.Name(self.temp())
                self.code.append(p.Assign(temp, tests[0], current))
                for test in tests[1:]:
                    self.code.append(
                        p.If(temp, p.Block([]), p.Block([p.Assign(temp, test, current)]), current.pattern, quiet=True)
                    )
                self.code.append(p.If(temp, block, other, current.pattern))
            else:
                self.code.append(p.If(tests[0], block, other, current.pattern))

        case(0)

    def pattern(self, node: Any, subject: p.Expr) -> Iterator[p.Expr]:
        """The tests of a pattern, of which any one suffices; none: it always matches."""
        if isinstance(node, cst.MatchValue):
            yield p.Compare("==", subject, self.expr(node.value))
        elif isinstance(node, cst.MatchSingleton):
            yield p.Compare("is", subject, self.expr(node.value))
        elif isinstance(node, cst.MatchOr):
            for element in node.patterns:
                yield from self.pattern(element.pattern, subject)
        elif isinstance(node, cst.MatchAs) and node.pattern is not None:
            yield from self.pattern(node.pattern, subject)
        elif not isinstance(node, cst.MatchAs):
            yield p.Opaque((subject,), node)

    def return_(self, node: cst.Return) -> None:
        self.code.append(p.Return(self.expr(node.value) if node.value is not None else NONE))

    def raise_(self, node: cst.Raise) -> None:
        if node.exc is not None:
            self.expr(node.exc)
        self.code.append(p.Raise())

    def break_(self, node: cst.Break) -> None:
        self.code.append(p.Break())

    def continue_(self, node: cst.Continue) -> None:
        self.code.append(p.Continue())

    def def_(self, node: cst.FunctionDef) -> None:
        decorators = tuple(self.expr(d.decorator) for d in node.decorators)
        self.code.append(p.Define(self.function(node, node.name.value, node.params, decorators)))

    def function(self, node: Any, name: str, params: cst.Parameters, decorators: tuple[p.Expr, ...]) -> p.Function:
        first, last = self.spans.get(node, (0, 0))
        function = p.Function(name, tuple(self.params(params)), decorators, node, first, last)
        self.functions.append(function)
        return function

    def params(self, params: cst.Parameters) -> Iterator[p.Param]:
        for kind, group in (("plain", params.posonly_params), ("plain", params.params)):
            yield from (self.param(param, kind) for param in group)
        if isinstance(params.star_arg, cst.Param):
            yield self.param(params.star_arg, "*")
        yield from (self.param(param, "keyword") for param in params.kwonly_params)
        if params.star_kwarg is not None:
            yield self.param(params.star_kwarg, "**")

    def param(self, param: cst.Param, kind: str) -> p.Param:
        default = self.expr(param.default) if param.default is not None else None
        return p.Param(param.name.value, default, kind, self.annotation(param.annotation))

    def annotation(self, node: cst.Annotation | None) -> p.Expr | None:
        """An annotation, as far as it can name a class: evaluated for its name, never for its value."""
        if node is None:
            return None
        inner = node.annotation
        if isinstance(inner, cst.Subscript) and isinstance(inner.value, cst.Name) and inner.value.value == "Optional":
            index = inner.slice[0].slice
            if isinstance(index, cst.Index):
                inner = index.value
        if isinstance(inner, cst.BinaryOperation) and isinstance(inner.operator, cst.BitOr):
            inner = inner.left
        return self.expr(inner) if isinstance(inner, (cst.Name, cst.Attribute)) else None

    def class_(self, node: cst.ClassDef) -> None:
        bases = tuple(self.expr(a.value) for a in node.bases)
        decorators = tuple(self.expr(d.decorator) for d in node.decorators)
        body = self.block(node.body)
        methods = tuple(i.function for i in body.code if isinstance(i, p.Define))
        self.code.append(p.DefineClass(p.ClassDef(node.name.value, bases, decorators, body, node, methods)))

    def import_(self, node: cst.Import) -> None:
        for alias in node.names:
            self.code.append(p.Import(dotted(alias.name), 0, None, alias.evaluated_alias))

    def import_from(self, node: cst.ImportFrom) -> None:
        module = dotted(node.module) if node.module is not None else ""
        level = len(node.relative)
        if isinstance(node.names, cst.ImportStar):
            self.code.append(p.Import(module, level, "*", None))
            return
        for alias in node.names:
            name = dotted(alias.name)
            self.code.append(p.Import(module, level, name, alias.evaluated_alias or name))

    def global_(self, node: cst.Global | cst.Nonlocal) -> None:
        kind = "global" if isinstance(node, cst.Global) else "nonlocal"
        self.code.append(p.Outer(tuple(item.name.value for item in node.names), kind))

    # -- expressions

    def expr(self, node: Any) -> p.Expr:
        handler = EXPRESSIONS.get(type(node))
        return handler(self, node) if handler else p.Opaque((), node)

    def name(self, node: cst.Name) -> p.Expr:
        value = node.value
        if value in ("True", "False", "None"):
            return p.Const({"True": True, "False": False, "None": None}[value])
        return p.Name(self.renamed.get(value, value))

    def attribute(self, node: cst.Attribute) -> p.Expr:
        return p.Attr(self.expr(node.value), node.attr.value, node)

    def literal(self, node: Any) -> p.Expr:
        try:
            return p.Const(node.evaluated_value)
        except (ValueError, SyntaxError):
            return p.Opaque((), node)

    def integer(self, node: Any) -> p.Expr:
        value = node.evaluated_value
        # A literal of thousands of digits is legal, but nothing here wants it.
        return p.Const(value) if not isinstance(value, int) or value.bit_length() < 1024 else p.Opaque((), node)

    def formatted(self, node: cst.FormattedString) -> p.Expr:
        parts = [self.expr(i.expression) for i in node.parts if isinstance(i, cst.FormattedStringExpression)]
        return p.Opaque(tuple(parts), node)

    def subscript(self, node: cst.Subscript) -> p.Expr:
        obj = self.expr(node.value)
        if len(node.slice) == 1 and isinstance(node.slice[0].slice, cst.Index):
            return p.Index(obj, self.expr(node.slice[0].slice.value))
        parts = [obj]
        for element in node.slice:
            if isinstance(element.slice, cst.Index):
                parts.append(self.expr(element.slice.value))
        return p.Index(obj, p.Opaque(tuple(parts[1:]), node))

    def binary(self, node: cst.BinaryOperation) -> p.Expr:
        # Left-nested sums of thousands of terms are legal: walk down the left spine without recursion.
        spine: list[cst.BinaryOperation] = []
        current: Any = node
        while type(current) is cst.BinaryOperation:
            spine.append(current)
            current = current.left
        value = self.expr(current)
        for depth, step in enumerate(reversed(spine)):
            right = self.expr(step.right)
            if depth < 64:
                value = p.Binary(BINARY[type(step.operator)], value, right)
        return value

    def unary(self, node: cst.UnaryOperation) -> p.Expr:
        return p.Unary(UNARY[type(node.operator)], self.expr(node.expression))

    def boolean(self, node: cst.BooleanOperation) -> p.Expr:
        spine: list[cst.BooleanOperation] = []
        current: Any = node
        kind = type(node.operator)
        while type(current) is cst.BooleanOperation and type(current.operator) is kind:
            spine.append(current)
            current = current.left
        first = self.expr(current)
        rights: list[tuple[p.Block, p.Expr]] = []
        for step in reversed(spine):
            values: list[p.Expr] = []

            def fill(right: Any = step.right, values: list[p.Expr] = values) -> None:
                values.append(self.expr(right))

            block = self.into(fill)
            rights.append((block, values[0]))
        if not self.testing and len(rights) < 16 and not any(block.code for block, _ in rights):
            value = first
            for _, right in rights:
                value = p.Binary("and" if kind is cst.And else "or", value, right)
            return value
        temp = p.Name(self.temp())
        self.code.append(p.Assign(temp, first, node))
        for (block, right), step in zip(rights, reversed(spine), strict=True):
            block.code.append(p.Assign(temp, right, node))
            empty = p.Block([])
            then, other = (block, empty) if kind is cst.And else (empty, block)
            self.code.append(p.If(temp, then, other, step, quiet=True))
        return temp

    def test(self, node: Any) -> p.Expr:
        """A condition that forks the path right here: its ``and`` and ``or`` are choices of their own."""
        outer, self.testing = self.testing, True
        value = self.expr(node)
        self.testing = outer
        return value

    def comparison(self, node: cst.Comparison) -> p.Expr:
        left = self.expr(node.left)
        if len(node.comparisons) == 1:
            only = node.comparisons[0]
            return p.Compare(COMPARE[type(only.operator)], left, self.expr(only.comparator))
        return p.Opaque((left, *(self.expr(c.comparator) for c in node.comparisons)), node)

    def conditional(self, node: cst.IfExp) -> p.Expr:
        if self.choices >= CHOICES:  # nobody writes this by hand
            return p.Opaque((), node)
        self.choices += 1
        try:
            return self.choice(node)
        finally:
            self.choices -= 1

    def choice(self, node: cst.IfExp) -> p.Expr:
        test = self.test(node.test)
        temp = p.Name(self.temp())
        then = self.into(lambda: self.code.append(p.Assign(temp, self.expr(node.body), node)))
        other = self.into(lambda: self.code.append(p.Assign(temp, self.expr(node.orelse), node)))
        self.code.append(p.If(test, then, other, node.test, quiet=True))
        return temp

    def lambda_(self, node: cst.Lambda) -> p.Expr:
        return p.Closure(self.function(node, "<lambda>", node.params, ()))

    def sequence(self, node: Any) -> p.Expr:
        kind = SEQUENCES[type(node)]
        items = []
        for element in node.elements:
            value = self.expr(element.value)
            items.append(p.Star(value) if isinstance(element, cst.StarredElement) else value)
        return p.Sequence(kind, tuple(items), node)

    def dict_(self, node: cst.Dict) -> p.Expr:
        items: list[tuple[p.Expr | None, p.Expr]] = []
        for element in node.elements:
            key = self.expr(element.key) if isinstance(element, cst.DictElement) else None
            items.append((key, self.expr(element.value)))
        return p.Mapping(tuple(items), node)

    def comprehension(self, node: Any) -> p.Expr:
        kind = "dict" if isinstance(node, cst.DictComp) else "list"
        result = p.Name(self.temp())
        self.code.append(p.Begin(result.slot, kind, node))  # type: ignore[arg-type]
        self.comp_for(node, node.for_in, result)
        return result

    def comp_for(self, node: Any, clause: cst.CompFor, result: p.Name) -> None:
        iterable = self.expr(clause.iter)
        outer = self.renamed
        self.renamed = outer | {name: self.temp() for name in identifiers(clause.target)}
        target = self.target(clause.target)

        def inner(conditions: list[Any]) -> None:
            if conditions:
                test = self.test(conditions[0].test)
                then = self.into(lambda: inner(conditions[1:]))
                self.code.append(p.If(test, then, p.Block([]), conditions[0].test, quiet=True))
            elif clause.inner_for_in is not None:
                self.comp_for(node, clause.inner_for_in, result)
            elif isinstance(node, cst.DictComp):
                self.code.append(p.Collect(result.slot, self.expr(node.value), self.expr(node.key)))  # type: ignore[arg-type]
            else:
                self.code.append(p.Collect(result.slot, self.expr(node.elt)))  # type: ignore[arg-type]

        body = self.into(lambda: inner(list(clause.ifs)))
        self.renamed = outer
        self.code.append(p.For(target, iterable, body, p.Block([]), clause, comprehension=True))

    def named(self, node: cst.NamedExpr) -> p.Expr:
        target = self.target(node.target)
        self.code.append(p.Assign(target, self.expr(node.value), node))
        return target

    def await_(self, node: cst.Await) -> p.Expr:
        return self.expr(node.expression)

    def yield_(self, node: cst.Yield) -> p.Expr:
        self.generator = True
        value = NONE
        if isinstance(node.value, cst.From):
            value = p.Opaque((self.expr(node.value.item),), node)  # type: ignore[assignment]
        elif node.value is not None:
            value = self.expr(node.value)  # type: ignore[assignment]
        temp = self.temp()
        self.code.append(p.Yield(temp, value, node))
        return p.Name(temp)

    def call(self, node: cst.Call) -> p.Expr:
        outer, self.testing = self.testing, False
        func = self.expr(node.func)
        args: list[tuple[str | None, p.Expr]] = []
        for arg in node.args:
            value = self.expr(arg.value)
            args.append((arg.star or (arg.keyword.value if arg.keyword is not None else None), value))
        self.testing = outer
        temp = self.temp()
        self.code.append(p.Call(temp, func, tuple(args), node))
        return p.Name(temp)


STATEMENTS: dict[type, Callable[[Lowering, Any], None]] = {
    cst.Expr: Lowering.expression_statement, cst.Assign: Lowering.assign, cst.AnnAssign: Lowering.ann_assign,
    cst.AugAssign: Lowering.aug_assign, cst.Del: Lowering.delete, cst.If: Lowering.if_, cst.Assert: Lowering.assert_,
    cst.For: Lowering.for_, cst.While: Lowering.while_, cst.With: Lowering.with_, cst.Try: Lowering.try_,
    cst.TryStar: Lowering.try_, cst.Match: Lowering.match, cst.Return: Lowering.return_, cst.Raise: Lowering.raise_,
    cst.Break: Lowering.break_, cst.Continue: Lowering.continue_, cst.FunctionDef: Lowering.def_,
    cst.ClassDef: Lowering.class_, cst.Import: Lowering.import_, cst.ImportFrom: Lowering.import_from,
    cst.Global: Lowering.global_, cst.Nonlocal: Lowering.global_,
}  # fmt: skip

EXPRESSIONS: dict[type, Callable[[Lowering, Any], p.Expr]] = {
    cst.Name: Lowering.name, cst.Attribute: Lowering.attribute, cst.Integer: Lowering.integer,
    cst.Float: Lowering.literal, cst.SimpleString: Lowering.literal, cst.ConcatenatedString: Lowering.literal,
    cst.FormattedString: Lowering.formatted, cst.Subscript: Lowering.subscript, cst.BinaryOperation: Lowering.binary,
    cst.UnaryOperation: Lowering.unary, cst.BooleanOperation: Lowering.boolean, cst.Comparison: Lowering.comparison,
    cst.IfExp: Lowering.conditional, cst.Lambda: Lowering.lambda_, cst.Tuple: Lowering.sequence,
    cst.List: Lowering.sequence, cst.Set: Lowering.sequence, cst.Dict: Lowering.dict_, cst.ListComp: Lowering.comprehension,
    cst.SetComp: Lowering.comprehension, cst.DictComp: Lowering.comprehension,
    cst.GeneratorExp: Lowering.comprehension, cst.NamedExpr: Lowering.named, cst.Await: Lowering.await_,
    cst.Yield: Lowering.yield_, cst.Call: Lowering.call,
}  # fmt: skip


def dotted(node: Any) -> str:
    """``a.b.c`` of an import."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def names_bound(pattern: Any) -> Iterator[str]:
    """The names that a match pattern binds, in order."""
    if isinstance(pattern, (cst.MatchAs, cst.MatchStar)) and pattern.name is not None:
        yield pattern.name.value
    for child in getattr(pattern, "children", ()):
        yield from names_bound(child)


def lower_module(tree: cst.Module, spans: dict[Any, tuple[int, int]]) -> tuple[p.Block, list[p.Function]]:
    """The top level of a file, and every function that stands in it outside another function's body."""
    lowering = Lowering(spans)
    block = lowering.block(tree)
    # A name of the top level may be asked for from anywhere, unless only a loop there mentions it.
    mark_kills(block, frozenset(), captured_names(lowering.functions) | outside_loops(block))
    return block, lowering.functions


def outside_loops(block: p.Block) -> frozenset[str]:
    """The names that a block mentions outside its loops."""
    names: set[p.Slot] = set()
    for instr in block.code:
        names |= own_slots(instr)
        if not isinstance(instr, (p.For, p.While)):
            for inner in blocks(instr):
                names |= outside_loops(inner)
    return frozenset(name for name in names if isinstance(name, str))


def lower_body(function: p.Function, spans: dict[Any, tuple[int, int]]) -> p.Block:
    """The body of a function; it is kept on the function."""
    if function.body is None:
        lowering = Lowering(spans)
        node = function.node
        if isinstance(node, cst.Lambda):
            function.body = lowering.into(lambda: lowering.code.append(p.Return(lowering.expr(node.body))))
        else:
            function.body = lowering.block(node.body)
        function.generator = lowering.generator
        # What nested functions read must outlive its last mention here.
        function.captured = captured_names(lowering.functions)
        mark_kills(function.body, frozenset(), function.captured | outer_names(function.body))
    return function.body


def captured_names(functions: list[p.Function]) -> frozenset[str]:
    names: set[str] = set()
    for function in functions:
        names.update(identifiers(function.node.body))
    return frozenset(names)


def identifiers(node: Any) -> Iterator[str]:
    """Every name in a subtree (not attributes): what a nested function may take from around it."""
    stack = [node]
    while stack:
        current = stack.pop()
        if type(current) is cst.Name:
            yield current.value
        else:
            stack.extend(current.children)


def outer_names(block: p.Block) -> frozenset[str]:
    names: set[str] = set()
    for instr in walk(block):
        if isinstance(instr, p.Outer):
            names.update(instr.names)
    return frozenset(names)


def blocks(instr: p.Instr) -> tuple[p.Block, ...]:
    """The blocks inside an instruction."""
    match instr:
        case p.If():
            return instr.then, instr.other
        case p.For():
            return instr.body, instr.other
        case p.While():
            return instr.head, instr.body, instr.other
        case p.With():
            return (instr.body,)
        case p.Try():
            return instr.body, *instr.handlers, instr.other, instr.final
    return ()


def walk(block: p.Block) -> Iterator[p.Instr]:
    """Every instruction of a block and of the blocks inside it."""
    for instr in block.code:
        yield instr
        for inner in blocks(instr):
            yield from walk(inner)


def slots(expr: p.Expr | None, found: set[p.Slot]) -> None:
    """Adds the variables that an expression mentions."""
    match expr:
        case p.Name():
            found.add(expr.slot)
        case p.Attr():
            slots(expr.obj, found)
        case p.Index():
            slots(expr.obj, found)
            slots(expr.key, found)
        case p.Sequence():
            for item in expr.items:
                slots(item, found)
        case p.Mapping():
            for key, value in expr.items:
                slots(key, found)
                slots(value, found)
        case p.Star() | p.Unary():
            slots(expr.value, found)
        case p.Binary() | p.Compare():
            slots(expr.left, found)
            slots(expr.right, found)
        case p.Opaque():
            for part in expr.parts:
                slots(part, found)
        case p.Closure():
            for param in expr.function.params:
                slots(param.default, found)


def own_slots(instr: p.Instr) -> set[p.Slot]:
    """The variables that an instruction mentions itself, outside the blocks in it."""
    found: set[p.Slot] = set()
    match instr:
        case p.Call():
            found.add(instr.target)
            slots(instr.func, found)
            for _, arg in instr.args:
                slots(arg, found)
        case p.Assign():
            slots(instr.target, found)
            slots(instr.value, found)
        case p.Delete():
            slots(instr.target, found)
        case p.If() | p.While():
            slots(instr.test, found)
        case p.For():
            slots(instr.target, found)
            slots(instr.iter, found)
        case p.With():
            slots(instr.context, found)
            slots(instr.target, found)
        case p.Return():
            slots(instr.value, found)
        case p.Define():
            found.add(instr.function.name)
            for param in instr.function.params:
                slots(param.default, found)
            for decorator in instr.function.decorators:
                slots(decorator, found)
        case p.DefineClass():
            found.add(instr.cls.name)
            for base in instr.cls.bases:
                slots(base, found)
        case p.Import():
            found.add(instr.alias or instr.module.partition(".")[0])
        case p.Yield() | p.Collect():
            found.add(instr.target)
            slots(instr.value, found)
            if isinstance(instr, p.Collect):
                slots(instr.key, found)
        case p.Begin():
            found.add(instr.target)
    return found


def mark_kills(block: p.Block, after: frozenset[p.Slot], keep: frozenset[str]) -> frozenset[p.Slot]:
    """Notes, for each instruction, which variables nothing mentions any more once it is done.

    Two paths that differ only in such a variable are the same path: without this they could not be merged. ``after``: what is
    mentioned later, outside this block. ``keep``: names that are never noted. Returns what the block mentions.
    """
    everything: list[frozenset[p.Slot]] = [mentions(instr) for instr in block.code]
    kills: list[tuple[p.Slot, ...]] = [()] * len(block.code)
    later = set(after)
    for index in range(len(block.code) - 1, -1, -1):
        instr, mentioned = block.code[index], everything[index]
        inner_after = frozenset(later) if blocks(instr) else frozenset()
        if isinstance(instr, (p.For, p.While, p.Try)):
            # A loop comes round again, a handler follows what it guards; temporaries never outlive their statement.
            inner_after |= {slot for slot in mentioned if isinstance(slot, str)}
        if isinstance(instr, p.While):
            inner_after |= own_slots(instr)
        if isinstance(instr, p.For) and instr.comprehension:
            inner_after |= mentioned
        for inner in blocks(instr):
            mark_kills(inner, inner_after, keep)
        kills[index] = tuple(s for s in mentioned if s not in later and s not in keep)
        later |= mentioned
    block.kills = kills
    return frozenset(later)


def mentions(instr: p.Instr) -> frozenset[p.Slot]:
    found = own_slots(instr)
    for inner in blocks(instr):
        for nested in inner.code:
            found |= mentions(nested)
    return frozenset(found)
