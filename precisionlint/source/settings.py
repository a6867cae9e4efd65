"""A program's settings as a class of fields: a dataclass, a pydantic model, a NamedTuple.

Functions are handed an object of such a class that nothing which is read makes (``def train(cfg: TrainConfig)``), or an outside
parser makes it (``tyro.cli(TrainConfig)``, ``HfArgumentParser((ModelArgs, DataArgs))``). What its fields hold is open, as an option
of ``argparse`` is, and like one it has a default: what its class says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.classes import external_base, mro
from precisionlint.source.evaluate import class_attribute, evaluate, fields_of
from precisionlint.source.state import State
from precisionlint.source.values import Class, Const, External, Obj, Sym, Tup, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter

SETTINGS = regex(
    r"(?i)_*(?:args?|cfgs?|config(?:s|uration)?|conf|hps?|hparams?|opts?|options?|params?|settings?|flags?)"
)
"""What a program's settings are called where a function is handed them."""


def is_settings(it: Interpreter, state: State, value: Value) -> bool:
    """Whether a class says what its objects hold by its fields alone: it has some, and no constructor of its own."""
    return (
        isinstance(value, Class)
        and any(fields_of(base) for base in mro(it, state, value) if isinstance(base, Class))
        and not external_base(it, state, value)
        and class_attribute(it, state, value, "__init__") is None
    )


def declare(it: Interpreter, state: State, annotation: p.Expr, value: Sym) -> None:
    """An annotation names the class of a value that is handed in: where it is one of settings, the fields have their defaults."""
    cls = evaluate(it, state, annotation)
    if is_settings(it, state, cls):
        value.declared = cls


def field(it: Interpreter, state: State, obj: Sym, name: str, value: Value) -> None:
    """What the class of ``obj`` says of its field: a default, or a class of fields of its own (``cfg.optim.lr``)."""
    if not (isinstance(value, Sym) and isinstance(obj.declared, Class)):
        return
    match class_attribute(it, state, obj.declared, name):
        case Const() | External() as default:
            value.default = default
        case Sym() as default:
            value.default, value.declared = default.default, default.declared
        case Obj(cls=cls) if is_settings(it, state, cls):
            value.declared = cls


def parsed(it: Interpreter, state: State, given: list[Value], value: Sym) -> None:
    """An outside function that is handed a class of settings, or several, gives an object of it, or one that does."""
    for one in given:
        classes = one.items if isinstance(one, Tup) else (one,)
        if classes and all(is_settings(it, state, cls) for cls in classes):
            value.declared = one


def objects(it: Interpreter, parser: Value) -> tuple[Value, ...] | None:
    """The objects that a parser of settings gives, one of each class; None where it was handed none."""
    if not (isinstance(parser, Sym) and parser.declared is not None):
        return None
    classes = parser.declared.items if isinstance(parser.declared, Tup) else (parser.declared,)
    made = []
    for cls in classes:
        assert isinstance(cls, Class)
        one = it.derived(("parsed", parser, cls), cls.cls.name, (parser,))
        if isinstance(one, Sym):
            one.declared = cls
        made.append(one)
    return tuple(made)
