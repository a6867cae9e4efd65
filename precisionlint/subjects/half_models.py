"""Models that stand in a file as half, and an optimizer over their parameters in the same file, whichever way the program runs.

Read as they are written, by names: a cast or a load of ``model`` before ``AdamW(model.parameters())`` in one function, or of ``self.model``
anywhere in a class. Paths are not followed: what the timeline shows of the same line is surer. Silent where the model is frozen, adapted
or goes back to fp32, and where the file speaks of what keeps fp32 copies.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from precisionlint.facts import HalfLogits, HalfModel
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES
from precisionlint.source.flow.words import TEST_PATH
from precisionlint.source.parsing import DEFINITIONS, walk
from precisionlint.subjects import File
from precisionlint.subjects.names import last_name, spelled

OPTIMIZER = regex(
    r"^(?:\w*Adam\w*|SGD|Lion\w*|RMSprop|Adagrad|Adadelta|Adafactor|optim(?:izer)?_(?:cls|class)|opt_(?:cls|class))$"
)
MADE_FOR_HALF = regex(r"BF16|Bf16|CPU|Half|Distributed")
"""Optimizers that are made for half weights."""
MASTERS = regex(
    r"(?i:master_?(?:param|weight|cop|grad|model)|(?:fp32|float)_?master|masters\b|kahan|stochastic|compensat)|param\w*_fp32|fp32_param"
    r"|FP16_?(?:Optimizer|Module)|(?:amp|deepspeed)\.initialize\(|AnyPrecision|network_to_half"
)
"""What keeps fp32 copies of half weights, or makes up for their rounding."""
ASIDE = regex(r"valid|infer|sampl|save|export|eval|generat|convert|bench|test|predict|demo", re.I)
"""Functions that train nothing."""
QUANTISED = regex(r"^(?:load_in_\dbit|quantization_config)$")
SCALES = {
    "a GradScaler steps in this file": ("GradScaler(", regex(r"scaler\w*\.(?:step|unscale_)\(")),
    "accelerate steps with a GradScaler under fp16": ("Accelerator(", regex(r"accelerator\.backward\(")),
}
"""What is said of a file that scales, and what it holds."""
LOADS = ("from_pretrained", "from_config")
DTYPES = ("torch_dtype", "dtype")
WIDE = regex(r"float32|\bfloat\(\)|double")
WIDENS = regex(r"autocast|\.(?:float|double)\(|torch\.(?:float(?:32|64)?|double|get_default_dtype)\b|FP32|\.logits\b")
"""What a file says that may give logits another dtype than the weights have."""
WRAPS = regex(r"^(?:DDP|FSDP|FullyShardedDataParallel|(?:Distributed)?DataParallel\w*|compile)$")
ADAPTS = regex(r"peft|lora|adapter|kbit|freeze|frozen", re.I)
PARAMETERS = regex(r"^(?:named_|trainable_|get_)?param(?:eter)?s(?:_\w+)?$")
NO_GRAD = regex(r"^(?:no_grad|inference_mode)$")
OF_PARAMETERS = regex(r"param|group|optim|trainable", re.I)
"""What a function is called that chooses the parameters of a model."""
DEPTH = 3


class Made(Struct, frozen=True):
    """A model that is half: its name, in which, and where that is asked for."""

    name: str
    dtypes: frozenset[str]
    at: ast.expr


def read(file: File) -> Iterator[HalfModel | HalfLogits]:
    """The half models of a file that an optimizer takes, and the losses of what they give."""
    if TEST_PATH.search(file.display) or MASTERS.search(file.text):
        return
    scaling = (what for what, (made, used) in SCALES.items() if made in file.text and used.search(file.text))
    scales = next(scaling, "")
    functions = [node for node in file.functions if not ASIDE.search(node.name)]
    top: list[ast.stmt] = [node for node in file.syntax.body if not isinstance(node, DEFINITIONS)]
    scopes: list[tuple[Sequence[ast.stmt], bool]] = [(top, False)]
    scopes += [([function], False) for function in functions]
    scopes += [([method for method in owner.body if method in functions], True) for owner in file.every(ast.ClassDef)]
    told: set[ast.expr] = set()
    own = {each.name for each in file.every(ast.ClassDef)}
    for body, of_class in scopes:
        scope = Scope(body, top, of_class)
        for made, taken in scope.trained():
            if made.at not in told:
                for call in scope.losses(made) if not WIDENS.search(file.text) else ():
                    if scope.root(made.name) in own or scope.root(made.name).startswith("nn."):
                        yield HalfLogits(file.place(call), (), min(made.dtypes), file.place(made.at))
                told.add(made.at)
                dtype = min(made.dtypes) if len(made.dtypes) == 1 else "half"
                scaled = scales if "fp16" in made.dtypes else ""
                yield HalfModel(
                    file.place(made.at), (), made.name, dtype, last_name(taken.func), file.place(taken), scaled
                )


class Scope:
    """The statements of one function with the functions in it, of the module, or of the methods of a class: in these only what belongs to
    ``self`` has one name in all of them."""

    def __init__(self, body: Sequence[ast.stmt], top: Sequence[ast.stmt], of_class: bool) -> None:
        self.body = body
        nodes = [node for each in body for node in walk(each)]
        self.nodes = sorted(nodes, key=lambda node: (getattr(node, "lineno", 0), getattr(node, "col_offset", 0)))
        self.of_class = of_class
        self.values: dict[str, list[ast.expr]] = {}
        for node in [*self.nodes, *(top if body is not top else ())]:
            for name, value in bound(node):
                if name:
                    self.values.setdefault(name, []).append(value)

    def trained(self) -> Iterator[tuple[Made, ast.Call]]:
        """Half models with the optimizer that takes them."""
        optimizers = [node for node in self.nodes if isinstance(node, ast.Call) and is_optimizer(node)]
        for made in self.halves() if optimizers else ():
            names = self.called(made.name)
            for call in optimizers:
                later = self.of_class or call.lineno > made.at.lineno
                if later and any(self.takes(call, name) for name in names):
                    apart = self.only_adapted(call)
                    if made.at not in apart and not any(self.spared(name, made.at.lineno, apart) for name in names):
                        yield made, call
                    break

    def halves(self) -> Iterator[Made]:
        for node in self.nodes:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name, value = receiver(node.value), node.value
            elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.value, ast.Call):
                name, value = spelled(node.targets[0]), node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                name, value = spelled(node.target), node.value
            else:
                continue
            at, dtypes = self.cast(value)
            if at is not None and dtypes and name and name.startswith("self.") is self.of_class:
                yield Made(name, dtypes, at)

    def cast(self, node: ast.expr) -> tuple[ast.expr | None, frozenset[str]]:
        """What a chain of calls leaves a model in: the last cast decides."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            op = node.func.attr
            if op in ("float", "double", "requires_grad_", "parameters", "state_dict", "eval"):
                break
            if op in ("half", "bfloat16") and not node.args:
                return node, frozenset({"fp16" if op == "half" else "bf16"})
            if op in ("to", "type"):
                given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
                dtypes = frozenset(each for value in given for each in self.dtypes(value))
                if dtypes or any(WIDE.search(ast.unparse(value)) for value in given):
                    return node, dtypes
            if op in LOADS:
                return self.loaded(node)
            node = node.func.value
        return None, frozenset()

    def loaded(self, call: ast.Call) -> tuple[ast.expr | None, frozenset[str]]:
        """``AutoModel.from_pretrained(name, torch_dtype=dtype)``, or with its keywords in a dict."""
        if any(QUANTISED.search(keyword.arg or "") for keyword in call.keywords):
            return None, frozenset()
        for keyword in call.keywords:
            if keyword.arg in DTYPES:
                return keyword.value, self.dtypes(keyword.value) or written(keyword.value)
            for table in self.values.get(spelled(keyword.value), []) if keyword.arg is None else ():
                for key, value in entries(table):
                    if key in DTYPES and (dtypes := self.dtypes(value) or written(value)):
                        return call, dtypes
        return None, frozenset()

    def dtypes(self, node: ast.expr, depth: int = 0) -> frozenset[str]:
        """The half dtypes that an expression can be."""
        if isinstance(node, ast.IfExp):
            return self.dtypes(node.body, depth) | self.dtypes(node.orelse, depth)
        if isinstance(node, ast.Subscript):
            tables = [node.value, *self.values.get(spelled(node.value), [])]
            return frozenset(d for table in tables for _, value in entries(table) for d in self.dtypes(value, DEPTH))
        name = spelled(node)
        if name.startswith("torch."):
            return frozenset({HALVES[name]}) if name in HALVES else frozenset()
        held = self.values.get(name, []) if depth < DEPTH else []
        return frozenset(dtype for each in held for dtype in self.dtypes(each, depth + 1))

    def losses(self, made: Made) -> Iterator[ast.Call]:
        """The cross entropies of what a model gives once it is half, by itself or by the one name that holds it, where they have gradients."""
        names = self.called(made.name)
        aside = self.without_gradients()
        for node in self.nodes:
            if isinstance(node, ast.Call) and last_name(node.func) == "cross_entropy" and node.args:
                first = node.args[0]
                held = [first] if isinstance(first, ast.Call) else self.values.get(spelled(first), [])
                calls = [each for each in held if isinstance(each, ast.Call) and spelled(each.func) in names]
                half = [each for each in calls if each not in aside and self.follows(each, made.at, node)]
                if half and len(calls) == len(held) and node not in aside:
                    yield node

    def without_gradients(self) -> set[ast.AST]:
        """What stands in a block under ``no_grad`` or ``inference_mode``, or in a function that is decorated with one."""
        found: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, (ast.With, ast.AsyncWith)):
                over = [item.context_expr for item in node.items]
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                over = node.decorator_list
            else:
                continue
            called = [each.func if isinstance(each, ast.Call) else each for each in over]
            if any(NO_GRAD.search(last_name(each)) for each in called):
                found.update(walk(node))
        return found

    def follows(self, call: ast.Call, cast: ast.expr, loss: ast.Call) -> bool:
        """Whether a model is called between its cast and a loss, by the lines; which method of a class runs first they do not say."""
        if self.of_class:
            methods = [each for each in self.body if each.lineno <= cast.lineno <= (each.end_lineno or 0)]
            if not any(each.lineno <= call.lineno <= (each.end_lineno or 0) for each in methods):
                return True
        return cast.lineno < call.lineno <= (loss.end_lineno or loss.lineno)

    def root(self, name: str) -> str:
        """What is called to make a model, before it is moved and cast."""
        for value in self.values.get(name, []):
            while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and not spelled(value.func):
                value = value.func.value
            if isinstance(value, ast.Call) and spelled(value.func).partition(".")[0] != name:
                return spelled(value.func).removeprefix("torch.")
        return ""

    def called(self, name: str) -> list[str]:
        """A model's name, the other names that it goes by, and those of what only wraps it."""
        others = (other for other, values in self.values.items() for value in values if other and wraps(value, name))
        return list(dict.fromkeys((name, *others)))

    def takes(self, call: ast.Call, name: str) -> bool:
        """Whether an optimizer is given parameters of the model."""
        given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg in ("params", None))]
        return any(self.mentions(each, name) for each in given)

    def mentions(self, node: ast.expr, name: str, depth: int = 0) -> bool:
        for each in walk(node):
            if isinstance(each, ast.Call):
                of = spelled(each.func.value) if isinstance(each.func, ast.Attribute) else ""
                if PARAMETERS.search(last_name(each.func)) and (of == name or of.startswith(f"{name}.")):
                    return True
                if OF_PARAMETERS.search(last_name(each.func)) and name in map(spelled, each.args):
                    return True
            elif isinstance(each, (ast.Name, ast.Attribute)) and depth < DEPTH:
                values = self.values.get(spelled(each), []) if spelled(each) != name else []
                if any(self.mentions(value, name, depth + 1) for value in values if value is not node):
                    return True
        return False

    def only_adapted(self, taken: ast.Call) -> set[ast.AST]:
        """What stands in branches for adapters that the optimizer is not in: the other branch trains the whole model."""
        apart: set[ast.AST] = set()
        for node in self.nodes:
            if isinstance(node, ast.If) and ADAPTS.search(ast.unparse(node.test)):
                without = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
                inside = {each for statement in (node.orelse if without else node.body) for each in walk(statement)}
                if taken not in inside:
                    apart |= inside
        return apart

    def spared(self, name: str, line: int, apart: set[ast.AST]) -> bool:
        """Whether a model is frozen, is adapted (``apart``: in one of the configurations only), or goes back to fp32 after a line."""
        for node in self.nodes:
            if isinstance(node, ast.Call) and node not in apart:
                text = ast.unparse(node)
                if ADAPTS.search(ast.unparse(node.func)) and (
                    name in map(spelled, node.args) or receiver(node) == name
                ):
                    return True
                if receiver(node) == name and (
                    "requires_grad_(False)" in text or (node.lineno > line and WIDE.search(text.removeprefix(name)))
                ):
                    return True
            elif isinstance(node, ast.For) and self.mentions(node.iter, name, DEPTH):
                body = "\n".join(map(ast.unparse, node.body))
                if re.search(r"requires_grad(?:_\(False\)| = False)|\.data = .*(?:float\(\)|float32)", body):
                    return True
        return False


def bound(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """What a statement gives names to: an assignment, or an addition to a list."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from ((spelled(t), v) for t, v in zip(target.elts, node.value.elts, strict=False))
            else:
                yield spelled(target), node.value
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        yield spelled(node.target), node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend"):
        yield from ((spelled(node.func.value), value) for value in node.args)


def entries(table: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The entries of a dict that is written out."""
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            yield (str(key.value) if isinstance(key, ast.Constant) else ""), value
    elif isinstance(table, ast.Call) and last_name(table.func) == "dict":
        yield from ((keyword.arg or "", keyword.value) for keyword in table.keywords)


def wraps(value: ast.expr, name: str) -> bool:
    """``DDP(model, …)``, or the model itself"""
    return spelled(value) == name or (
        isinstance(value, ast.Call)
        and bool(value.args)
        and spelled(value.args[0]) == name
        and WRAPS.search(last_name(value.func)) is not None
    )


def is_optimizer(call: ast.Call) -> bool:
    """Whether a call makes an optimizer that is not made for half weights."""
    name = last_name(call.func)
    return bool(OPTIMIZER.search(name) and (call.args or call.keywords)) and not MADE_FOR_HALF.search(name)


def written(node: ast.expr) -> frozenset[str]:
    """A half dtype that is written as a string."""
    name = node.value if isinstance(node, ast.Constant) else None
    return frozenset({HALVES[name]}) if isinstance(name, str) and name in HALVES else frozenset()


def receiver(call: ast.expr) -> str:
    """The name on which a chain of calls of methods is made."""
    node = call
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    return spelled(node)
