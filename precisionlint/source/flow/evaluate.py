"""Expressions and statements, evaluated once along all paths; calls of the project's functions are entered."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from msgspec import structs

from precisionlint.events import Event
from precisionlint.source.flow import attributes, contexts, torch_calls
from precisionlint.source.flow.demonstrations import is_demonstration, made_up
from precisionlint.source.flow.heap import DEPTH, NOTHING, Class, Environment, Function, Source, Spent, Spot, instance
from precisionlint.source.flow.joins import either, element, unpacked
from precisionlint.source.flow.puts import put
from precisionlint.source.flow.python_calls import builtin, held
from precisionlint.source.flow.statements import STATEMENTS, keep
from precisionlint.source.flow.words import (
    BINARY,
    CALLED,
    CRITERION,
    HANDED,
    NO_TENSOR,
    ast_name,
    foreign,
    is_decided,
    is_device,
    is_number,
    is_of_arrays,
    is_property,
    is_static,
    told_of,
)
from precisionlint.source.root import file_of
from precisionlint.valueflow import (
    BOOL,
    INTEGERS,
    NO_OPTIONS,
    NUMBER,
    UNKNOWN,
    VIEWS,
    Called,
    Computed,
    Dtypes,
    Scope,
    Touched,
    Value,
    agreed,
    constant,
    may_be_half,
    promote_values,
    sources,
)

if TYPE_CHECKING:
    from precisionlint.source.flow.reading import Flow


FOLD: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "floordiv": lambda a, b: a // b, "remainder": lambda a, b: a % b, "pow": lambda a, b: a**b if abs(b) < 400 else None,
}  # fmt: skip
AMP = ("torch.cuda.amp.", "torch.cpu.amp.", "transformer_engine.pytorch.fp8_autocast")
"""Names that are told where they are used."""


class Frame:
    """One call: the variables, and where it stands."""

    def __init__(
        self,
        flow: Flow,
        source: Source,
        names: Environment,
        around: tuple[Environment, ...],
        scope: Scope,
        depth: int,
        quiet: bool,
    ) -> None:
        self.flow = flow
        self.source = source
        self.names = names
        self.top = names is source.names  # of a file: also in the branches of its tests and attempts
        self.around = around
        self.scope = scope
        self.depth = depth
        self.quiet = quiet
        self.returned: list[Value] = []
        self.loops = 0
        self.choices = 0  # of which branches this is one
        self.decorating = False
        self.ranked: ast.AST | None = None  # a call of which only the values are taken, no indices
        self.gone = False  # the path has returned, raised or left its loop
        self.owner: Class | None = None
        self.function: Function | None = None

    # -- calls in

    def bind(self, function: Function, args: list[Value], options: dict[str, Value], receiver: Value | None) -> None:
        """The parameters: arguments where they are given, defaults or inputs that nobody knows where not."""
        spec = function.node.args
        positional = [*spec.posonlyargs, *spec.args]
        self.owner, self.function = function.owner, function
        values = list(args)
        if receiver is not None and not is_static(function.node):
            values.insert(0, receiver)
        known = self.depth > 0 and bool(args or options) and "" not in options
        offset = len(positional) - len(spec.defaults)
        for index, param in enumerate(positional):
            default = spec.defaults[index - offset] if index >= offset else None
            self.names[param.arg] = self.parameter(param, default, values[index : index + 1], options, known)
        for param, given in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
            self.names[param.arg] = self.parameter(param, given, [], options, known)
        if spec.vararg is not None:
            self.names[spec.vararg.arg] = Value("input", dtypes=UNKNOWN, name=spec.vararg.arg)
        if spec.kwarg is not None:
            self.names[spec.kwarg.arg] = NOTHING

    def parameter(
        self, param: ast.arg, default: ast.expr | None, given: list[Value], options: dict[str, Value], known: bool
    ) -> Value:
        argument = given[0] if given else options.get(param.arg)
        if argument is not None:
            if argument is NOTHING and not torch_calls.is_setting(param.arg):
                return Value("unknown", (), torch_calls.followed(argument, param.arg), name=param.arg)
            if argument.op in NO_TENSOR or argument.name == param.arg:
                return argument
            # The name says what the function takes it for.
            return Value("view", (argument,), torch_calls.followed(argument, param.arg), argument.at, param.arg)
        if default is not None:
            value = self.expr(default)
            if known:
                return value
            if value.op == "module":  # or what a caller gives
                return either([value, Value("input", dtypes=UNKNOWN, name=param.arg)])
            if value.op != "constant" or not (value.constant is None or isinstance(value.constant, bool)):  # 0 == False
                # What a caller may pass in its place is of the same kind: a number, a name, a dtype.
                dtypes = NUMBER if is_number(value.constant) else UNKNOWN
                return Value("input", (value,), dtypes, self.at(param), param.arg)
            if torch_calls.DTYPE_NAME.search(param.arg):  # None: the default dtype, or what a caller gives
                return Value("input", (), UNKNOWN, self.at(param), param.arg)
        known_dtypes = told_of(param)
        of_arrays = self.source.numpy and self.function is not None and is_of_arrays(self.function.node)
        free = UNKNOWN if of_arrays else frozenset({f"~{param.arg}"})
        follows = free if known_dtypes is None else known_dtypes
        kind = "torch.device" if is_device(param.annotation) else None
        return Value("input", (), follows, self.at(param), param.arg, ref=kind)

    def decorators(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.decorating = True
            value = self.expr(decorator)
            self.decorating = False
            contexts.enter(self, value)

    def result(self) -> Value:
        return either(self.returned) if self.returned else constant(None)

    # -- telling

    def at(self, node: Any) -> Spot:
        return Spot(self.source.file, node)

    def tell(self, event: Event) -> None:
        if not self.quiet or sets(event):
            self.flow.events.append(event)

    def made(
        self,
        op: str,
        inputs: Iterable[Value],
        dtypes: Dtypes,
        node: ast.AST,
        name: str = "",
        options: dict[str, Value] | None = None,
    ) -> Value:
        """A value that an op makes; the op is told."""
        if op == "topk" and node is self.ranked:
            op = "largest"
        value = Value(op, tuple(inputs), dtypes, self.at(node), name, options=options or NO_OPTIONS)
        self.tell(Computed(value.at, (), value, self.scope))
        return value

    # -- statements

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            if self.gone:
                return
            handler = STATEMENTS.get(type(statement))
            if handler is not None:
                handler(self, statement)

    def entries(self, node: ast.expr) -> tuple[Class, str] | None:
        """The table ``self.name`` whose entries a subscript means, as (its class, the name that they are kept under)."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            obj = self.lookup("self")
            if obj is not None and obj.op == "instance" and obj.ref is not None:
                return obj.ref, f"{node.attr}[]"
        return None

    def assign(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name():
                if value.op == "index" and value.inputs[0].op == "size":  # a length goes by what the program calls it
                    value = Value("index", value.inputs, value.dtypes, value.at, target.id)
                elif value is NOTHING and not torch_calls.is_setting(target.id):  # known by what it is called alone
                    value = Value("unknown", name=target.id)
                self.names[target.id] = value
            case ast.Tuple() | ast.List():
                for index, part in enumerate(target.elts):
                    inner = part.value if isinstance(part, ast.Starred) else part
                    self.assign(inner, unpacked(value, index, self.at(part), ast_name(inner)))
            case ast.Attribute():
                obj = self.expr(target.value)
                if obj.op == "instance" and obj.ref is not None:
                    old = obj.ref.attributes.get(target.attr)
                    known = self.choices > 0 or self.scope.function not in ("__init__", "setup")
                    if value.op == "parameter" and not value.name:
                        dtypes = frozenset({"float32"}) if obj.ref.keeps(target.attr) else value.dtypes
                        value = Value("parameter", value.inputs, dtypes, value.at, target.attr)
                    obj.ref.keep(target.attr, either([old, value]) if known and old is not None else value)
                    if isinstance(target.value, ast.Name) and target.value.id == "self":
                        self.names[f"self.{target.attr}"] = value  # until another method may have changed it
                elif obj.op in ("external", "file"):
                    name = self.flow.apis.canonical(f"{obj.name}.{target.attr}")
                    self.tell(Touched(self.at(target), (), name, value, self.scope))
            case ast.Subscript():
                put(self, target, value)
            case ast.Starred():
                self.assign(target.value, value)

    def nested(self) -> Frame:
        """Where the body of a class stands."""
        return Frame(self.flow, self.source, {}, self.inside, self.scope, self.depth, self.quiet)

    # -- expressions

    def expr(self, node: ast.expr | None) -> Value:
        if node is None:
            return NOTHING
        self.flow.budget -= 1
        if self.flow.budget < 0:
            raise Spent
        handler = EXPRESSIONS.get(type(node))
        if handler is not None:
            return handler(self, node)  # type: ignore[no-any-return]
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.expr(child)
        return NOTHING

    def constant(self, node: ast.Constant) -> Value:
        return constant(node.value, self.at(node))

    @property
    def inside(self) -> tuple[Environment, ...]:
        """The variables around what is defined here; those of the top level are found by ``Flow.global_of``."""
        return () if self.names is self.source.names else (self.names, *self.around)

    def lookup(self, name: str) -> Value | None:
        for variables in (self.names, *self.around):
            if name in variables:
                return variables[name]
        return self.flow.global_of(self.source, name)

    def name(self, node: ast.Name) -> Value:
        value = self.lookup(node.id)
        if value is None:
            return Value("builtin", name=node.id)
        if value.op == "import":
            value = self.flow.resolve(value)
        if value.op == "external" and value.name.startswith(AMP):
            self.tell(Touched(self.at(node), (), value.name, None, self.scope))
        return value

    def attribute(self, node: ast.Attribute) -> Value:
        kept = self.names.get(f"self.{node.attr}")
        if kept is not None and isinstance(node.value, ast.Name) and node.value.id == "self":
            return kept
        if node.attr == "values":
            self.ranked = node.value
        obj = self.expr(node.value)
        return self.attribute_of(obj, node.attr, node)

    def attribute_of(self, obj: Value, name: str, node: ast.AST) -> Value:
        match obj.op:
            case "external":
                full = self.flow.apis.canonical(f"{obj.name}.{name}")
                value = foreign(full, self.at(node))
                if full.startswith(("torch.backends.", *AMP)):
                    self.tell(Touched(self.at(node), (), full, None, self.scope))
                return value
            case "file":
                source = self.flow.other(obj.ref)
                found = self.flow.global_of(source, name) if source is not None else None
                if found is not None:
                    return self.flow.resolve(found)
                part = file_of(obj.ref.parent / name) if obj.ref.name == "__init__.py" else None
                return Value("file", name=f"{obj.name}.{name}", ref=part) if part else NOTHING
            case "instance" if obj.ref is not None:
                self.flow.prepare(obj.ref)
                method = obj.ref.method(name)
                if method is not None:
                    if is_property(method.node):
                        return self.enter_call(method, [], {}, obj, node)
                    return Value("function", name=name, ref=method, inputs=(obj,))
                value = obj.ref.attribute(name)
                if value is not None:
                    return self.flow.resolve(value)
                return Value("unknown", (), UNKNOWN, self.at(node), name, ref=("attribute", obj))
            case "class":
                method = obj.ref.method(name)
                if method is not None:
                    return Value("function", name=name, ref=method)
                value = obj.ref.attribute(name)
                return value if value is not None else Value("unknown", name=name, ref=obj if name == "apply" else None)
            case _ if not attributes.told(obj, name):
                return Value("unknown", (), UNKNOWN, self.at(node), name, ref=("attribute", obj))
        return attributes.attribute(self, obj, name, node)

    def subscript(self, node: ast.Subscript) -> Value:
        if isinstance(node.slice, ast.Constant) and node.slice.value == 0:
            self.ranked = node.value
        obj, key = self.expr(node.value), self.expr(node.slice)
        entries = self.entries(node.value)
        if entries is not None and entries[1] in entries[0].attributes:
            return entries[0].attributes[entries[1]]
        match obj.op:
            case "tuple":
                if (
                    key.op == "constant"
                    and isinstance(key.constant, int)
                    and -len(obj.inputs) <= key.constant < len(obj.inputs)
                ):
                    return obj.inputs[key.constant]
                return either(list(obj.inputs)) if obj.inputs else NOTHING
            case "dict":
                if key.op == "constant" and key.constant in obj.ref:
                    return obj.ref[key.constant]  # type: ignore[no-any-return]
                return either(list(obj.inputs)) if obj.inputs else NOTHING
            case "constant" | "external" | "builtin" | "function" | "class" | "module" | "constructed" | "instance":
                return NOTHING
        called = key.constant if key.op == "constant" and isinstance(key.constant, str) else ast_name(node)
        return Value("index", (obj, key), obj.dtypes, self.at(node), called)  # output["logits"] goes by what it is

    def call(self, node: ast.Call) -> Value:
        func = self.expr(node.func)
        args = [self.expr(arg.value if isinstance(arg, ast.Starred) else arg) for arg in node.args]
        options = {keyword.arg: self.expr(keyword.value) for keyword in node.keywords if keyword.arg is not None}
        spread = [keyword.value for keyword in node.keywords if keyword.arg is None]
        for each in spread:  # besides what it is seen to hold it may hold more
            options[""] = self.expr(each)
            options.update(held(self, each, options[""], options))
        starred = bool(spread) or ast.Starred in map(type, node.args)
        value = self.apply(func, args, options, node, starred)
        keep(self, node, args, value)
        return value

    def apply(
        self, func: Value, args: list[Value], options: dict[str, Value], node: ast.Call, starred: bool = False
    ) -> Value:
        if func.op in HANDED and len(args) > 1 and CRITERION.search(ast_name(node.func)):
            return self.made("criterion", args, UNKNOWN, node, ast_name(node.func), options)
        handed = any(one.op in HANDED for one in func.inputs) if func.op == "either" else func.op in HANDED
        if handed and args and torch_calls.MODEL.search(ast_name(node.func)):
            return torch_calls.model(self, args, node, ast_name(node.func))
        match func.op:
            case "function":
                receiver = func.inputs[0] if func.inputs else None
                if "reduce_dtype" in options:  # what sums over ranks in it stands in another file
                    made = Value("constructed", tuple(args), UNKNOWN, self.at(node), func.name, options=options)
                    self.tell(Called(made.at, (), made, self.scope))
                shown = self.flow.shown
                self.flow.shown = shown or (self.top and is_demonstration(func.ref, [*args, *options.values()]))
                value = self.enter_call(func.ref, [] if starred else args, {} if starred else options, receiver, node)
                self.flow.shown = shown
                return value
            case "class":
                return self.construct(func.ref, {} if starred else options, node)
            case "instance" if func.ref is not None:
                method = func.ref.method("forward") or func.ref.method("__call__")
                if method is not None:
                    shown = self.flow.shown
                    self.flow.shown = shown or (func.ref.kind == "module" and made_up([*args, *options.values()]))
                    value = self.enter_call(method, [] if starred else args, {} if starred else options, func, node)
                    self.flow.shown = shown
                    return value
                return NOTHING
            case "external":
                return torch_calls.external(self, func.name, args, options, node)
            case "builtin":
                return builtin(self, func.name, args, node, options)
            case "module":
                return torch_calls.module(self, func, args, node)
            case "cast" | "view" if func.name not in ("data", "T"):
                # A model that was moved or cast: it may widen what it gives, and follows its weights.
                held = next(sources(func, VIEWS | {"cast"}))
                return Value("layer", tuple(args), frozenset({f"~{held.name}()"}), self.at(node), held.name)
            case "attribute" | "view" | "size" | "gradient" if func.inputs:
                return torch_calls.method(self, func.inputs[0], func.name, args, options, node)
            case "unknown" if isinstance(func.ref, tuple):
                return torch_calls.method(self, func.ref[1], func.name, args, options, node)
            case "unknown" if isinstance(func.ref, Value) and func.ref.op == "class":  # Function.apply
                forward = func.ref.ref.method("forward")
                if forward is not None and not starred:
                    return self.enter_call(forward, [NOTHING, *args], options, None, node)
            case "either" if len(func.inputs) <= 3 and all(one.op in CALLED for one in func.inputs):
                return either([self.apply(one, args, options, node, starred) for one in func.inputs])
            case "either" if len(func.inputs) <= 4 and any(one.op == "module" for one in func.inputs):
                # What was handed in may be anything; without it, it is one of these.
                return either(
                    [self.apply(one, args, options, node, starred) for one in func.inputs if one.op != "input"]
                )
            case "constructed" | "layer" if isinstance(node.func, ast.Attribute):
                return torch_calls.built_layer(self, func, args, node)
            case "input" | "index":
                # A callable that was passed in: a model, most of the time.
                follows = UNKNOWN if torch_calls.asks_for_wide(self.scope) else frozenset({f"~{func.name}()"})
                return Value("layer", tuple(args), follows, self.at(node), func.name)
        return NOTHING

    def enter_call(
        self, function: Function, args: list[Value], options: dict[str, Value], receiver: Value | None, node: ast.AST
    ) -> Value:
        if self.depth >= DEPTH:
            return NOTHING
        if receiver is None and function.owner is not None and not is_static(function.node):
            receiver, args = (args[0], args[1:]) if args else (instance(function.owner), args)
        if function.owner is not None:  # it may set what its object holds
            for name in [name for name in self.names if name.startswith("self.")]:
                del self.names[name]
        if function.node in self.flow.running:
            return NOTHING
        self.flow.running.append(function.node)
        try:
            return self.flow.call(function, args, options, self.scope, self.depth + 1, receiver, self.quiet)
        finally:
            self.flow.running.pop()

    def construct(self, cls: Class, options: dict[str, Value], node: ast.Call) -> Value:
        self.flow.prepare(cls)
        made = Value("instance", at=self.at(node), name=cls.node.name, ref=cls, options=options)
        self.tell(Called(made.at, (), made, self.scope))
        return made

    def binary_(self, node: ast.BinOp) -> Value:
        return self.binary(BINARY[type(node.op)], self.expr(node.left), self.expr(node.right), node)

    def binary(
        self, op: str, left: Value, right: Value, node: ast.AST, in_place: bool = False, state: bool = False
    ) -> Value:
        """``state``: what is changed in place outlives the call."""
        a, b = left.constant, right.constant
        if left.op == right.op == "constant" and op in FOLD and is_number(a) and is_number(b):
            try:
                folded = FOLD[op](a, b)
            except (ArithmeticError, ValueError):
                folded = None
            if folded is not None:
                return constant(folded, self.at(node))
        if left.op in ("tuple", "dict") or right.op in ("tuple", "dict"):
            return NOTHING
        kept = in_place and "number" not in left.dtypes  # a number that a tensor is added to is a tensor from then on
        dtypes = left.dtypes if kept else (agreed if op == "matmul" else promote_values)((left, right))
        if op == "div" and not in_place:
            dtypes = frozenset("float32" if atom in INTEGERS or atom == "bool" else atom for atom in dtypes)
        if op == "pow" and right.op == "constant" and right.constant == 2:
            op = "square_pow"
        elif op == "mul" and left is right:
            op = "square"
        # One over a tensor is its reciprocal.
        family = "reciprocal" if op == "div" and left.dtypes == NUMBER else op
        dtypes = torch_calls.under_autocast(self.scope, family, dtypes)
        return self.made(op, (left, right), dtypes, node, "in-place state" if state else "in-place" if in_place else "")

    def text(self, node: ast.JoinedStr) -> Value:
        """An f-string: known by how it begins."""
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.expr(part.value)
        first = node.values[0] if node.values else None
        return Value("text", at=self.at(node), name=str(first.value) if isinstance(first, ast.Constant) else "")

    def unary(self, node: ast.UnaryOp) -> Value:
        value = self.expr(node.operand)
        if value.op == "constant" and is_number(value.constant):
            if isinstance(node.op, ast.USub):
                return constant(-value.constant, self.at(node))
            if isinstance(node.op, ast.Not):
                return constant(not value.constant, self.at(node))
        if isinstance(node.op, ast.Not):
            return Value("test", (value,), BOOL, self.at(node))
        if isinstance(node.op, ast.USub):
            return Value("neg", (value,), value.dtypes, self.at(node))
        return Value("invert", (value,), value.dtypes, self.at(node))

    def compare(self, node: ast.Compare) -> Value:
        values = [self.expr(node.left), *[self.expr(other) for other in node.comparators]]
        if len(values) == 2 and all(is_decided(value) for value in values):
            same = values[0].constant == values[1].constant
            if isinstance(node.ops[0], (ast.Eq, ast.Is)):
                return constant(same)
            if isinstance(node.ops[0], (ast.NotEq, ast.IsNot)):
                return constant(not same)
        if any(may_be_half(value.dtypes) for value in values):
            return self.made("test", values, BOOL, node)
        return Value("test", tuple(values), BOOL, self.at(node))

    def bool_op(self, node: ast.BoolOp) -> Value:
        return either([self.expr(value) for value in node.values])

    def conditional(self, node: ast.IfExp) -> Value:
        scope = self.scope
        if contexts.asks_version(self, node.test, self.expr(node.test)):
            self.scope = structs.replace(scope, guarded="version")
        contexts.narrow(self, node.test)
        value = either([self.expr(node.body), self.expr(node.orelse)])
        self.scope = scope
        return value

    def sequence(self, node: ast.Tuple | ast.List | ast.Set) -> Value:
        return Value(
            "tuple", tuple(self.expr(e.value if isinstance(e, ast.Starred) else e) for e in node.elts), at=self.at(node)
        )

    def dict_(self, node: ast.Dict) -> Value:
        table: dict[Any, Value] = {}
        values: list[Value] = []
        for key, value in zip(node.keys, node.values, strict=True):
            found = self.expr(value)
            values.append(found)
            if key is None:  # ``**other`` may hold any of those before it
                table.clear()
            elif isinstance(key, ast.Constant):
                table[key.value] = found
        return Value("dict", tuple(values), at=self.at(node), ref=table)

    def comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> Value:
        kept = dict(self.names)
        for generator in node.generators:
            over = self.expr(generator.iter)
            self.assign(generator.target, element(over, self.at(generator.iter)))
            for test in generator.ifs:
                self.expr(test)
        value = self.expr(node.value if isinstance(node, ast.DictComp) else node.elt)
        self.names.clear()
        self.names.update(kept)
        return Value("many", (value,), value.dtypes, self.at(node))

    def lambda_(self, node: ast.Lambda) -> Value:
        return self.flow.defined(Function(node, self.source, self.inside), self.quiet)

    def named(self, node: ast.NamedExpr) -> Value:
        value = self.expr(node.value)
        self.assign(node.target, value)
        return value

    def inner(self, node: Any) -> Value:
        return self.expr(node.value)


def sets(event: Event) -> bool:
    """Whether an event sets something for the whole program: then it is told even where it happens in another file."""
    if isinstance(event, Touched):
        return event.value is not None
    return isinstance(event, Called) and event.value.name == "torch.set_float32_matmul_precision"


Handler = Any
EXPRESSIONS: dict[type[ast.expr], Handler] = {
    ast.Constant: Frame.constant, ast.Name: Frame.name, ast.Attribute: Frame.attribute, ast.Subscript: Frame.subscript,
    ast.Call: Frame.call, ast.BinOp: Frame.binary_, ast.UnaryOp: Frame.unary, ast.Compare: Frame.compare, ast.BoolOp: Frame.bool_op,
    ast.IfExp: Frame.conditional, ast.Tuple: Frame.sequence, ast.List: Frame.sequence, ast.Set: Frame.sequence,
    ast.Dict: Frame.dict_, ast.ListComp: Frame.comprehension, ast.SetComp: Frame.comprehension, ast.GeneratorExp: Frame.comprehension,
    ast.DictComp: Frame.comprehension, ast.Lambda: Frame.lambda_, ast.NamedExpr: Frame.named, ast.Await: Frame.inner,
    ast.Starred: Frame.inner, ast.JoinedStr: Frame.text,
}  # fmt: skip
