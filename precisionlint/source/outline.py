"""What a file defines, names and imports: enough to say which functions can matter, without lowering it.

A function matters if its text, or that of what it names, holds a mark of a precision event. The bodies of all others are never interpreted.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from sys import intern

from precisionlint.source.parsing import definitions, lines_spanned

WORD = re.compile(r"[^\W\d]\w*")

TRIGGER = re.compile(
    r"\bbackward\w*\(|\.step\(|\.scale\(|unscale_|zero_grad|get_scale|[Aa]utocast|\.grad\b|parameters\(|\bhalf\b|b?float16|float32\b"
    r"|from_pretrained|state_dict|torch\.save|requires_grad|custom_op|custom_[fb]wd|\.apply\(|[Oo]ptim|clip_grad|no_sync|nullcontext"
    r"|contextmanager|set_default_dtype|matmul_precision|allow_tf32|fp32_precision|[Ss]caler|\bamp\b|_amp\b|\bamp_|fp16|bf16"
    r"|loss_scale|mixed_precision|param_groups|triton|torch\.ops\.|torch\.library|Trainer\(|TrainingArguments|[a-z]_peft_model|\bprecision="
)
"""What a function's text must hold for its body to matter."""
STRONG = re.compile(
    r"\bbackward\w*\(|\.step\(|unscale_|[Ss]caler\b|clip_grad|custom_op|autograd\.Function|[A-Z]\w*\.apply\(|torch\.ops\.|triton|Trainer\("
)
"""What a program's text must reach for it to be able to hold a fault at all."""
MARKS = {"event": TRIGGER, "strong": STRONG}


@dataclass(frozen=True)
class Definition:
    """A function or class of a file: its lines, every word in them, and which kinds of mark its text holds (see ``MARKS``)."""

    name: str
    words: frozenset[str]
    marks: frozenset[str]


@dataclass(frozen=True)
class Imported:
    """A name of another module: ``name`` is None where the module itself is meant."""

    module: str
    level: int
    name: str | None


class Outline:
    """The definitions and imports of one file."""

    def __init__(self, syntax: ast.Module, lines: list[str]) -> None:
        self.definitions: dict[str, list[Definition]] = {}
        for node in definitions(syntax.body):
            first, last = lines_spanned(node)
            text = "\n".join(lines[first - 1 : last])
            marks = frozenset(kind for kind, pattern in MARKS.items() if pattern.search(text))
            self.definitions.setdefault(node.name, []).append(
                Definition(node.name, frozenset(map(intern, WORD.findall(text))), marks)
            )
        self.imports: dict[str, Imported] = {}
        self.stars: list[Imported] = []
        for statement in ast.walk(syntax):
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self.imports[alias.asname or alias.name.partition(".")[0]] = Imported(alias.name, 0, None)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    target = Imported(statement.module or "", statement.level, alias.name)
                    if alias.name == "*":
                        self.stars.append(target)
                    else:
                        self.imports[alias.asname or alias.name] = target


GUARDED = re.compile(
    r"\bbackward\w*\(|\.step\(|\.scale\(|unscale_|clip_grad|zero_grad|[Aa]utocast|GradScaler|\.grad\b|scaler|\.half\(|float16|optim\.|no_sync"
)
"""What a branch must hold for the test before it to be remembered."""
LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def telling_names(syntax: ast.Module, lines: list[str]) -> set[str]:
    """The names that decide whether something happens to precision: those in the tests around it, and what they are made from.

    Two paths that differ in the value of any other name are one path.
    """
    names: set[str] = set()
    assigned: list[tuple[set[str], set[str]]] = []
    guarded_lines = {number for number, line in enumerate(lines, 1) if GUARDED.search(line)}
    scopes = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(syntax)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]

    def guards(first: int, last: int | None) -> bool:
        return any(number in guarded_lines for number in range(first, (last or first) + 1))

    def scope_guards(line: int) -> bool:
        around = [scope for scope in scopes if scope[0] <= line <= scope[1]]
        return guards(*max(around)) if around else bool(guarded_lines)

    asked: dict[str, int] = {}
    leaving: set[str] = set()
    for node in ast.walk(syntax):
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            for name in identifiers_of(node.test):
                asked[name] = asked.get(name, 0) + 1
            leaves = isinstance(node, ast.If) and any(isinstance(last, LEAVES) for last in (*node.body, *node.orelse))
            if guards(node.lineno, node.end_lineno):
                names |= identifiers_of(node.test)
            elif leaves and scope_guards(node.lineno):
                leaving |= identifiers_of(node.test)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            targets: list[ast.expr] = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
            if node.value is not None:
                assigned.append(({name for t in targets for name in last_identifiers(t)}, identifiers_of(node.value)))
        elif (isinstance(node, ast.keyword) and node.arg == "enabled") or (
            isinstance(node, ast.Return) and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp))
        ):
            names |= identifiers_of(node.value)
    # A test that only leaves the function matters to a later one that asks the same.
    names |= {name for name in leaving if asked[name] > 1}
    grown = True
    while grown:
        before = len(names)
        for made, parts in assigned:
            if len(parts) <= 8 and not names.isdisjoint(made):
                names |= parts
        grown = len(names) > before
    return names


def identifiers_of(node: ast.AST | None) -> set[str]:
    found: set[str] = set()
    for child in ast.walk(node) if node is not None else ():
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str) and child.value.isidentifier():
            found.add(child.value)
    return found - {"self", "torch", "args", "cfg", "config", "opt"}


def last_identifiers(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Attribute):
        return {target.attr}
    if isinstance(target, (ast.Tuple, ast.List)):
        return {name for element in target.elts for name in last_identifiers(element)}
    return set()
