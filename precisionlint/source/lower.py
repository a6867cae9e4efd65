"""Lowering: from an ast to the program tree, one pass with a dispatch table of its own.

It knows Python's syntax and nothing of torch. Function bodies are lowered only when they are first entered, which
is what keeps a large file cheap.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from precisionlint.source import program as p
from precisionlint.source.liveness import Mentions, mark_kills, mentions, outer_names, outside_loops
from precisionlint.source.parsing import lines_spanned, walk

NONE = p.Const(None)

BINARY: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.MatMult: "@", ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
}  # fmt: skip
COMPARE: dict[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in",
    ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
SEQUENCES: dict[type, str] = {ast.Tuple: "tuple", ast.List: "list", ast.Set: "set"}
UNARY: dict[type, str] = {ast.Not: "not", ast.USub: "-", ast.UAdd: "+", ast.Invert: "~"}
HALVES = frozenset({"float16", "bfloat16", "half"})
"""What a setting that nobody gives falls back to is a path of its own where it is half: ``dtype or torch.float16``."""

CHOICES = 32
"""How deep conditional expressions are followed inside each other."""

Comprehension: TypeAlias = "ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp"


class Lowering:
    """Lowers one function (or module, or class) body; temporaries are numbered within it."""

    def __init__(self) -> None:
        self.code: list[p.Instr] = []
        self.temps = 0
        self.generator = False
        self.functions: list[p.Function] = []
        self.testing = False
        self.choices = 0
        self.renamed: dict[str, int] = {}  # the variables of the comprehensions around, which are nobody else's

    # -- blocks

    def block(self, body: list[ast.stmt]) -> p.Block:
        return self.into(lambda: self.statements(body))

    def into(self, fill: Callable[[], None]) -> p.Block:
        """The block that ``fill`` emits."""
        outer, self.code = self.code, []
        fill()
        block, self.code = p.Block(self.code), outer
        return block

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            STATEMENTS.get(type(statement), Lowering.nothing)(self, statement)

    def temp(self) -> int:
        self.temps += 1
        return self.temps

    def nothing(self, node: ast.stmt) -> None:
        pass

    # -- statements

    def expression_statement(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring, or nothing at all
            return
        value = self.expr(node.value)
        if isinstance(value, (p.Attr, p.Index)):
            self.code.append(p.Assign(p.Name(self.temp()), value, node.value))

    def assign(self, node: ast.Assign) -> None:
        value = self.expr(node.value)
        name_result(self.code, value, dotted(node.targets[0]))
        if len(node.targets) > 1 and not isinstance(value, (p.Const, p.Name)):
            temp = p.Name(self.temp())
            self.code.append(p.Assign(temp, value, node))
            value = temp
        for target in node.targets:
            self.code.append(p.Assign(self.target(target), value, node))

    def ann_assign(self, node: ast.AnnAssign) -> None:
        annotation = self.annotation(node.annotation)
        if node.value is not None:
            value = self.expr(node.value)
            name_result(self.code, value, dotted(node.target))
            self.code.append(p.Assign(self.target(node.target), value, node, annotation))
        elif isinstance(node.target, ast.Name):
            # A dataclass field without a default, or a bare declaration: the name exists, its value is unknown.
            self.code.append(p.Assign(p.Name(node.target.id), p.Opaque((), node.target), node, annotation))

    def aug_assign(self, node: ast.AugAssign) -> None:
        op = BINARY[type(node.op)]
        target = self.target(node.target)
        value = self.expr(node.value)
        self.code.append(p.Assign(target, p.Binary(op, target, value), node, op=op))

    def target(self, node: ast.expr) -> p.Expr:
        if isinstance(node, (ast.Tuple, ast.List)):
            return p.Sequence("tuple", tuple(self.target(element) for element in node.elts), node)
        if isinstance(node, ast.Starred):
            return p.Star(self.target(node.value))
        return self.expr(node)

    def delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                self.code.append(p.Delete(self.expr(one)))

    def if_(self, node: ast.If) -> None:
        test = self.test(node.test)
        then = self.block(node.body)
        self.code.append(p.If(test, then, self.block(node.orelse), node))

    def assert_(self, node: ast.Assert) -> None:
        test = self.test(node.test)
        self.code.append(p.If(test, p.Block([]), p.Block([p.Raise()]), node.test, quiet=True))

    def for_(self, node: ast.For) -> None:
        iterable = self.expr(node.iter)
        target = self.target(node.target)
        body = self.block(node.body)
        self.code.append(p.For(target, iterable, body, self.block(node.orelse), node))

    def while_(self, node: ast.While) -> None:
        tests: list[p.Expr] = []
        head = self.into(lambda: tests.append(self.test(node.test)))
        body = self.block(node.body)
        self.code.append(p.While(head, tests[0], body, self.block(node.orelse), node))

    def with_(self, node: ast.With) -> None:
        self.with_items(node.items, node)

    def with_items(self, items: list[ast.withitem], node: ast.With) -> None:
        first, *rest = items
        context = self.expr(first.context_expr)
        target = self.target(first.optional_vars) if first.optional_vars is not None else None
        body = self.into(lambda: self.with_items(rest, node)) if rest else self.block(node.body)
        self.code.append(p.With(context, target, body, first.context_expr))

    def try_(self, node: Any) -> None:
        body = self.block(node.body)
        handlers = []
        for handler in node.handlers:

            def fill(handler: ast.ExceptHandler = handler) -> None:
                if handler.name is not None:
                    self.code.append(p.Assign(self.variable(handler.name), p.Opaque((), handler), handler))
                self.statements(handler.body)

            handlers.append(self.into(fill))
        other = self.block(node.orelse)
        self.code.append(p.Try(body, tuple(handlers), other, self.block(node.finalbody)))

    def match(self, node: ast.Match) -> None:
        subject = self.expr(node.subject)
        cases = node.cases

        def case(index: int) -> None:
            if index == len(cases):
                return
            current = cases[index]
            tests = list(self.pattern(current.pattern, subject))

            def bind() -> None:
                for child in names_bound(current.pattern):
                    self.code.append(p.Assign(p.Name(child), p.Opaque((subject,), current.pattern), current.pattern))
                if current.guard is not None:
                    guard = self.expr(current.guard)
                    body = self.block(current.body)
                    rest = self.into(lambda: case(index + 1))
                    self.code.append(p.If(guard, body, rest, current.guard))
                else:
                    self.statements(current.body)

            then = self.into(bind)
            if tests == []:
                self.code.extend(then.code)
                return
            other = self.into(lambda: case(index + 1))
            test = tests[0]
            if len(tests) > 1:  # an or-pattern: one test that is any of them
                temp = p.Name(self.temp())
                self.code.append(p.Assign(temp, test, current.pattern))
                for alternative in tests[1:]:
                    again = p.Block([p.Assign(temp, alternative, current.pattern)])
                    self.code.append(p.If(temp, p.Block([]), again, current.pattern, quiet=True))
                test = temp
            self.code.append(p.If(test, then, other, current.pattern))

        case(0)

    def pattern(self, node: ast.pattern, subject: p.Expr) -> Iterator[p.Expr]:
        """The tests of a pattern, of which any one suffices; none: it always matches."""
        if isinstance(node, ast.MatchValue):
            yield p.Compare("==", subject, self.expr(node.value))
        elif isinstance(node, ast.MatchSingleton):
            yield p.Compare("is", subject, p.Const(node.value))
        elif isinstance(node, ast.MatchOr):
            for element in node.patterns:
                yield from self.pattern(element, subject)
        elif not isinstance(node, ast.MatchAs):
            yield p.Opaque((subject,), node)
        elif node.pattern is not None:
            yield from self.pattern(node.pattern, subject)

    def return_(self, node: ast.Return) -> None:
        self.code.append(p.Return(self.expr(node.value) if node.value is not None else NONE))

    def raise_(self, node: ast.Raise) -> None:
        if node.exc is not None:
            self.expr(node.exc)
        self.code.append(p.Raise())

    def break_(self, node: ast.Break) -> None:
        self.code.append(p.Break())

    def continue_(self, node: ast.Continue) -> None:
        self.code.append(p.Continue())

    def def_(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        decorators = tuple(self.expr(decorator) for decorator in node.decorator_list)
        first, last = lines_spanned(node)
        self.code.append(p.Define(self.function(node, node.name, decorators, first, last)))

    def function(
        self, node: p.FunctionNode, name: str, decorators: tuple[p.Expr, ...], first: int, last: int
    ) -> p.Function:
        function = p.Function(name, tuple(self.params(node.args)), decorators, node, first, last)
        self.functions.append(function)
        return function

    def params(self, args: ast.arguments) -> Iterator[p.Param]:
        plain = [*args.posonlyargs, *args.args]
        defaults = [*[None] * (len(plain) - len(args.defaults)), *args.defaults]
        for arg, default in zip(plain, defaults, strict=True):
            yield self.param(arg, default, "plain")
        if args.vararg is not None:
            yield self.param(args.vararg, None, "*")
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
            yield self.param(arg, default, "keyword")
        if args.kwarg is not None:
            yield self.param(args.kwarg, None, "**")

    def param(self, arg: ast.arg, default: ast.expr | None, kind: str) -> p.Param:
        value = self.expr(default) if default is not None else None
        return p.Param(arg.arg, value, kind, self.annotation(arg.annotation))

    def annotation(self, node: ast.expr | None) -> p.Expr | None:
        """An annotation, as far as it can name a class: evaluated for its name, never for its value."""
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Optional":
            node = node.slice
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            node = node.left
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            return self.variable(node.value)
        return self.expr(node) if isinstance(node, (ast.Name, ast.Attribute)) else None

    def class_(self, node: ast.ClassDef) -> None:
        bases = tuple(self.expr(unstarred(base)) for base in node.bases)
        decorators = tuple(self.expr(decorator) for decorator in node.decorator_list)
        body = self.block(node.body)
        methods = tuple(each.function for each in p.defined(body) if isinstance(each, p.Define))
        self.code.append(p.DefineClass(p.ClassDef(node.name, bases, decorators, body, node, methods)))

    def import_(self, node: ast.Import) -> None:
        for alias in node.names:
            self.code.append(p.Import(alias.name, 0, None, alias.asname))

    def import_from(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            bound = None if alias.name == "*" else alias.asname or alias.name
            self.code.append(p.Import(node.module or "", node.level, alias.name, bound))

    def global_(self, node: ast.Global | ast.Nonlocal) -> None:
        kind = "global" if isinstance(node, ast.Global) else "nonlocal"
        self.code.append(p.Outer(tuple(node.names), kind))

    # -- expressions

    def expr(self, node: ast.expr) -> p.Expr:
        handler = EXPRESSIONS.get(type(node))
        return handler(self, node) if handler else p.Opaque((), node)

    def name(self, node: ast.Name) -> p.Expr:
        return self.variable(node.id)

    def variable(self, name: str) -> p.Name:
        return p.Name(self.renamed.get(name, name))

    def attribute(self, node: ast.Attribute) -> p.Expr:
        return p.Attr(self.expr(node.value), node.attr, node)

    def constant(self, node: ast.Constant) -> p.Expr:
        value = node.value
        # A literal of thousands of digits is legal, but nothing here wants it.
        if value is ... or isinstance(value, complex) or (isinstance(value, int) and value.bit_length() >= 1024):
            return p.Opaque((), node)
        return p.Const(value)

    def formatted(self, node: ast.JoinedStr) -> p.Expr:
        return p.Opaque(tuple(self.expr(v.value) for v in node.values if isinstance(v, ast.FormattedValue)), node)

    def subscript(self, node: ast.Subscript) -> p.Expr:
        obj, key = self.expr(node.value), node.slice
        if isinstance(key, ast.Tuple):
            parts = (self.expr(unstarred(part)) for part in key.elts if not isinstance(part, ast.Slice))
            return p.Index(obj, p.Opaque(tuple(parts), node))
        return p.Index(obj, p.Opaque((), node) if isinstance(key, ast.Slice) else self.expr(key))

    def binary(self, node: ast.BinOp) -> p.Expr:
        # Left-nested sums of thousands of terms are legal: walk down the left spine without recursion.
        spine: list[ast.BinOp] = []
        current: ast.expr = node
        while isinstance(current, ast.BinOp):
            spine.append(current)
            current = current.left
        value = self.expr(current)
        for depth, step in enumerate(reversed(spine)):
            right = self.expr(step.right)
            if depth < 64:
                value = p.Binary(BINARY[type(step.op)], value, right)
        return value

    def unary(self, node: ast.UnaryOp) -> p.Expr:
        return p.Unary(UNARY[type(node.op)], self.expr(node.operand))

    def boolean(self, node: ast.BoolOp) -> p.Expr:
        conjunction = isinstance(node.op, ast.And)
        sides = list(node.values)
        while isinstance(sides[0], ast.BoolOp) and isinstance(sides[0].op, ast.And) == conjunction:
            sides[:1] = sides[0].values
        first = self.expr(sides[0])
        rights: list[tuple[p.Block, p.Expr]] = []
        for side in sides[1:]:
            values: list[p.Expr] = []

            def fill(side: ast.expr = side, values: list[p.Expr] = values) -> None:
                values.append(self.expr(side))

            block = self.into(fill)
            rights.append((block, values[0]))
        chosen = not conjunction and any(isinstance(side, ast.Attribute) and side.attr in HALVES for side in sides[1:])
        if not (self.testing or chosen) and len(rights) < 16 and not any(block.code for block, _ in rights):
            value = first
            for _, right in rights:
                value = p.Binary("and" if conjunction else "or", value, right)
            return value
        temp = p.Name(self.temp())
        self.code.append(p.Assign(temp, first, node))
        for block, right in rights:
            block.code.append(p.Assign(temp, right, node))
            empty = p.Block([])
            then, other = (block, empty) if conjunction else (empty, block)
            self.code.append(p.If(temp, then, other, node, quiet=not chosen, asked=self.testing))
        return temp

    def test(self, node: ast.expr) -> p.Expr:
        """A condition that forks the path right here: its ``and`` and ``or`` are choices of their own."""
        outer, self.testing = self.testing, True
        value = self.expr(node)
        self.testing = outer
        return value

    def comparison(self, node: ast.Compare) -> p.Expr:
        left = self.expr(node.left)
        if len(node.ops) == 1:
            return p.Compare(COMPARE[type(node.ops[0])], left, self.expr(node.comparators[0]))
        return p.Opaque((left, *(self.expr(right) for right in node.comparators)), node)

    def conditional(self, node: ast.IfExp) -> p.Expr:
        if self.choices >= CHOICES:  # nobody writes this by hand
            return p.Opaque((), node)
        self.choices += 1
        try:
            return self.choice(node)
        finally:
            self.choices -= 1

    def choice(self, node: ast.IfExp) -> p.Expr:
        test = self.test(node.test)
        temp = p.Name(self.temp())
        then = self.into(lambda: self.code.append(p.Assign(temp, self.expr(node.body), node)))
        other = self.into(lambda: self.code.append(p.Assign(temp, self.expr(node.orelse), node)))
        self.code.append(p.If(test, then, other, node.test, quiet=True))
        return temp

    def lambda_(self, node: ast.Lambda) -> p.Expr:
        return p.Closure(self.function(node, "<lambda>", (), 0, 0))

    def sequence(self, node: Any) -> p.Expr:
        return p.Sequence(SEQUENCES[type(node)], tuple(self.expr(element) for element in node.elts), node)

    def starred(self, node: ast.Starred) -> p.Expr:
        return p.Star(self.expr(node.value))

    def dict_(self, node: ast.Dict) -> p.Expr:
        items: list[tuple[p.Expr | None, p.Expr]] = []
        for key, value in zip(node.keys, node.values, strict=True):
            items.append((self.expr(key) if key is not None else None, self.expr(value)))
        return p.Mapping(tuple(items), node)

    def comprehension(self, node: Comprehension) -> p.Expr:
        kind = "dict" if isinstance(node, ast.DictComp) else "list"
        temp = self.temp()
        self.code.append(p.Begin(temp, kind, node))
        self.comp_for(node, node.generators, temp)
        return p.Name(temp)

    def comp_for(self, node: Comprehension, clauses: list[ast.comprehension], result: int) -> None:
        clause, *rest = clauses
        iterable = self.expr(clause.iter)
        outer = self.renamed
        self.renamed = outer | {name: self.temp() for name in identifiers([clause.target])}
        target = self.target(clause.target)

        def inner(conditions: list[ast.expr]) -> None:
            if conditions:
                test = self.test(conditions[0])
                then = self.into(lambda: inner(conditions[1:]))
                self.code.append(p.If(test, then, p.Block([]), conditions[0], quiet=True, filter=True))
            elif rest:
                self.comp_for(node, rest, result)
            elif isinstance(node, ast.DictComp):
                self.code.append(p.Collect(result, self.expr(node.value), self.expr(node.key)))
            else:
                self.code.append(p.Collect(result, self.expr(node.elt)))

        body = self.into(lambda: inner(clause.ifs))
        self.renamed = outer
        self.code.append(p.For(target, iterable, body, p.Block([]), clause, comprehension=True))

    def named(self, node: ast.NamedExpr) -> p.Expr:
        target = self.target(node.target)
        self.code.append(p.Assign(target, self.expr(node.value), node))
        return target

    def await_(self, node: ast.Await) -> p.Expr:
        return self.expr(node.value)

    def yield_(self, node: ast.Yield) -> p.Expr:
        return self.yielded(node, self.expr(node.value) if node.value is not None else NONE)

    def yield_from(self, node: ast.YieldFrom) -> p.Expr:
        return self.yielded(node, p.Opaque((self.expr(node.value),), node))

    def yielded(self, node: ast.expr, value: p.Expr) -> p.Expr:
        self.generator = True
        temp = self.temp()
        self.code.append(p.Yield(temp, value, node))
        return p.Name(temp)

    def call(self, node: ast.Call) -> p.Expr:
        outer, self.testing = self.testing, False
        func = self.expr(node.func)
        args: list[tuple[str | None, p.Expr]] = []
        for arg in node.args:
            args.append(("*" if isinstance(arg, ast.Starred) else None, self.expr(unstarred(arg))))
        args.extend((keyword.arg or "**", self.expr(keyword.value)) for keyword in node.keywords)
        self.testing = outer
        temp = self.temp()
        self.code.append(p.Call(temp, func, tuple(args), node))
        return p.Name(temp)


STATEMENTS: dict[type, Callable[[Lowering, Any], None]] = {
    ast.Expr: Lowering.expression_statement, ast.Assign: Lowering.assign, ast.AnnAssign: Lowering.ann_assign,
    ast.AugAssign: Lowering.aug_assign, ast.Delete: Lowering.delete, ast.If: Lowering.if_, ast.Assert: Lowering.assert_,
    ast.For: Lowering.for_, ast.AsyncFor: Lowering.for_, ast.While: Lowering.while_, ast.With: Lowering.with_,
    ast.AsyncWith: Lowering.with_, ast.Try: Lowering.try_, getattr(ast, "TryStar", ast.Try): Lowering.try_,
    ast.Match: Lowering.match, ast.Return: Lowering.return_, ast.Raise: Lowering.raise_, ast.Break: Lowering.break_,
    ast.Continue: Lowering.continue_, ast.FunctionDef: Lowering.def_, ast.AsyncFunctionDef: Lowering.def_,
    ast.ClassDef: Lowering.class_, ast.Import: Lowering.import_, ast.ImportFrom: Lowering.import_from,
    ast.Global: Lowering.global_, ast.Nonlocal: Lowering.global_,
}  # fmt: skip

EXPRESSIONS: dict[type, Callable[[Lowering, Any], p.Expr]] = {
    ast.Name: Lowering.name, ast.Attribute: Lowering.attribute, ast.Constant: Lowering.constant,
    ast.JoinedStr: Lowering.formatted, ast.Subscript: Lowering.subscript, ast.BinOp: Lowering.binary,
    ast.UnaryOp: Lowering.unary, ast.BoolOp: Lowering.boolean, ast.Compare: Lowering.comparison,
    ast.IfExp: Lowering.conditional, ast.Lambda: Lowering.lambda_, ast.Tuple: Lowering.sequence,
    ast.List: Lowering.sequence, ast.Set: Lowering.sequence, ast.Starred: Lowering.starred, ast.Dict: Lowering.dict_,
    ast.ListComp: Lowering.comprehension, ast.SetComp: Lowering.comprehension, ast.DictComp: Lowering.comprehension,
    ast.GeneratorExp: Lowering.comprehension, ast.NamedExpr: Lowering.named, ast.Await: Lowering.await_,
    ast.Yield: Lowering.yield_, ast.YieldFrom: Lowering.yield_from, ast.Call: Lowering.call,
}  # fmt: skip


def unstarred(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Starred) else node


def name_result(code: list[p.Instr], value: p.Expr, name: str) -> None:
    """Says of the call that a value comes from what its result is assigned to; of both calls in ``A() if test else B()``."""
    last = code[-1] if code else None
    if isinstance(last, p.Call) and isinstance(value, p.Name) and last.target == value.slot:
        last.name = name
    elif isinstance(last, p.If) and last.quiet:
        for side in (last.then.code, last.other.code):
            if side and isinstance(side[-1], p.Assign) and side[-1].target == value:
                name_result(side[:-1], side[-1].value, name)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` as it is written."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names_bound(pattern: ast.pattern) -> Iterator[str]:
    """The names that a match pattern binds, in order."""
    name = pattern.rest if isinstance(pattern, ast.MatchMapping) else getattr(pattern, "name", None)
    if name is not None:
        yield name
    for child in ast.iter_child_nodes(pattern):
        if isinstance(child, ast.pattern):
            yield from names_bound(child)


def lower_module(tree: ast.Module) -> p.Block:
    """The top level of a file."""
    lowering = Lowering()
    block = lowering.block(tree.body)
    # A name of the top level may be asked for from anywhere, unless only a loop there mentions it, and no function.
    keep = outside_loops(block)
    known: Mentions = {}
    if any(isinstance(name, str) and name not in keep for instr in block.code for name in mentions(instr, known)):
        keep |= captured_names(lowering.functions)
    mark_kills(block, keep, known)
    return block


def lower_body(function: p.Function) -> p.Block:
    """The body of a function; it is kept on the function."""
    if function.body is None:
        lowering = Lowering()
        node = function.node
        if isinstance(node, ast.Lambda):
            body = node.body
            function.body = lowering.into(lambda: lowering.code.append(p.Return(lowering.expr(body))))
        else:
            function.body = lowering.block(node.body)
        function.generator = lowering.generator
        # What nested functions read must outlive its last mention here.
        function.captured = captured_names(lowering.functions)
        mark_kills(function.body, function.captured | outer_names(function.body), {})
    return function.body


def captured_names(functions: list[p.Function]) -> frozenset[str]:
    names: set[str] = set()
    for function in functions:
        body = function.node.body
        names.update(identifiers(body if isinstance(body, list) else [body]))
    return frozenset(names)


def identifiers(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every name in these subtrees (not attributes): what a nested function may take from around it."""
    return (each.id for node in nodes for each in walk(node) if isinstance(each, ast.Name))
