"""Checkpoints: what a program writes to go on from later."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from precisionlint.events import Checkpoint, Named, Weights
from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.effects.common import Outcome, argument, is_optimizer, is_scaler, one, when
from precisionlint.source.objects import dtype_of, is_container, model_weights, named
from precisionlint.source.records import Where
from precisionlint.source.state import State, reachable
from precisionlint.source.values import NONE, PLAIN, External, Obj, Sym, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.records import Args


SAVES = regex(r"^save(?:_|$)|^write_|ckpt|checkpoint|snapshot", re.I)
"""What a function that is not read is called where it writes what it is given to a file."""


def save(it: Interpreter, state: State, instr: p.Call, callee: External, args: Args) -> Outcome:
    """``torch.save``: what the checkpoint holds."""
    checkpoint(it, state, instr, argument(args, 0, "obj"))
    return one(state, NONE)


def saved(it: Interpreter, state: State, instr: p.Call, name: str, args: Args) -> None:
    """A function that is not read writes what it is given: a scaler, or a dictionary with an optimizer's state."""
    if not SAVES.search(name):
        return
    reached = [one for _, value in args for one in reachable(state, value, 2)]
    scalers = tuple(named(one, "") for one in reached if is_scaler(it, state, one))
    if scalers:
        it.emit(state, Checkpoint(it.where(state, instr.at), when(state), True, False, (), scalers, False))
        return
    tables = [value for _, value in args if isinstance(value, Obj) and value.cls == External("builtins.dict")]
    if len(tables) == 1 and any(optimizer_state(it, state, one) is not None for one in reachable(state, tables[0], 3)):
        checkpoint(it, state, instr, tables[0])


SAVER = regex(r"save_?(?:checkpoint|ckpt|state)|(?:checkpoint|ckpt)_?(?:er|manager|saver)$|checkpoint_?save", re.I)
"""What a function or class is called that writes checkpoints of the objects that it is given."""


def handed_over(it: Interpreter, state: State, instr: p.Call, name: str, values: list[Value]) -> None:
    """An unread function that saves, or an object that will, gets an optimizer: the scaler is among what it gets, or is not saved."""
    if not SAVER.search(name):
        return
    reached = [inner for value in values for inner in reachable(state, value, 1)]
    held = [is_optimizer(it, state, value) for value in values]
    optimizers = tuple(named(value, "optimizer") for value, is_one in zip(values, held, strict=True) if is_one)
    if optimizers and not any(is_scaler(it, state, inner) for inner in reached):
        node = instr.at
        given = [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else []
        where = it.where(state, given[held.index(True)] if len(given) == len(values) else node)
        it.emit(state, Checkpoint(where, when(state), True, False, optimizers, (), True, handed=True))


def returned(it: Interpreter, state: State, node: ast.AST, value: Value) -> None:
    """A method gives its object's state to whoever saves it: a scaler's, or an optimizer's where all that is in it is known."""
    if not (isinstance(value, Obj) and is_container(value)):
        return
    parts = list(reachable(state, value, 3))
    optimizers = [owner for part in parts if (owner := optimizer_state(it, state, part)) is not None]
    owners = [part.key[1] for part in parts if isinstance(part, Sym) and part.key[0] == "state_dict"]
    scalers = tuple(named(owner, "scaler") for owner in owners if is_scaler(it, state, owner))
    if scalers or (optimizers and is_whole(it, state, value)):
        told = tuple(named(each, it.names.get(getattr(each, "site", None), "optimizer")) for each in optimizers)
        it.emit(state, Checkpoint(it.where(state, node), when(state), True, False, told, scalers, True, handed=True))


def optimizer_state(it: Interpreter, state: State, value: Value) -> Value | None:
    """The optimizer whose state this is."""
    if isinstance(value, Sym) and value.key[0] == "state_dict" and not is_scaler(it, state, value.key[1]):
        return value.key[1] if is_optimizer(it, state, value.key[1]) else None
    return None


def is_whole(it: Interpreter, state: State, value: Value | None) -> bool:
    """Whether all that a saved value holds is known, as far as scalers go: a dictionary, one that a function that has no scaler has passed
    on, or the state of an optimizer by itself."""
    if isinstance(value, Sym) and value.key[0] == "site" and value.flow is PLAIN:
        tables = [part for part in value.of if is_container(part)]
        return len(tables) == 1 and is_whole(it, state, tables[0])
    if value is None or not is_container(value):
        return value is not None and optimizer_state(it, state, value) is not None
    return "*" not in state.heap.get(value, {})


def checkpoint(it: Interpreter, state: State, instr: p.Call, value: Value | None) -> None:
    """What is saved, as an event."""
    optimizers: list[Named] = []
    scalers: list[Named] = []
    weights: Weights = frozenset()
    half = ""
    modules, complete = False, is_whole(it, state, value)
    parts = list(reachable(state, value, 3)) if value is not None else []
    if isinstance(value, Sym) and complete:
        parts += [part for table in value.of for part in reachable(state, table, 3)]
    for reached in parts:
        half = half or half_of(it, state, reached) or ""
        if isinstance(reached, Obj) and it.kind(state, reached) == "module":
            weights |= model_weights(it, reached) or frozenset()
        if isinstance(reached, Obj) and is_scaler(it, state, reached):
            scalers.append(named(reached, it.names.get(reached.site, "")))
        if isinstance(reached, Sym) and reached.key[0] == "state_dict":
            owner = reached.key[1]
            if is_scaler(it, state, owner):
                scalers.append(named(owner, reached.text.removesuffix(".state_dict()")))
            elif is_optimizer(it, state, owner):
                name = it.names.get(getattr(owner, "site", None), "") or reached.text.removesuffix(".state_dict()")
                optimizers.append(named(owner, name))
            else:
                modules = True
                weights |= model_weights(it, owner) or frozenset()
        elif isinstance(reached, Sym) and reached is not value and reached.key[0] == "site":
            complete = complete and not any(is_scaler(it, state, o) for o in reached.of)
    it.emit(
        state,
        Checkpoint(
            put_together(it, state, instr, value), when(state), True, complete, tuple(optimizers), tuple(scalers), modules, weights, half,
        ),
    )  # fmt: skip


def put_together(it: Interpreter, state: State, instr: p.Call, value: Value | None) -> Where:
    """Where a checkpoint is saved: for whoever reads of it, the call in the function that put it together, where another one writes it."""
    where = it.where(state, instr.at)
    maker = it.frames[value.site[1]] if isinstance(value, Obj) and is_container(value) else None
    if maker is None or maker.function in (None, it.frames[state.frame].function):
        return where
    first, last = maker.function.node.lineno, maker.function.node.end_lineno
    for depth, (module, call) in enumerate(where.stack):
        if module is maker.module and first <= call.lineno <= last:
            return Where(module, call, where.stack[:depth])
    return where


def half_of(it: Interpreter, state: State, value: Value) -> str | None:
    """The half dtype that a tensor was cast to before, also through products with numbers and sums with its like."""
    if not isinstance(value, Sym):
        return None
    if value.key[0] == "cast":
        return value.key[2] if value.key[2] in ("float16", "bfloat16") else None
    kept = dtype_of(state.heap.get(value, {}).get("dtype"))
    if kept is not None:
        return kept if kept in ("float16", "bfloat16") else None
    if value.key[0] == "op" and value.key[1] in "+-*/":
        sides = [(side, half_of(it, state, side)) for side in value.key[2:4]]
        halves = {dtype for _, dtype in sides if dtype is not None}
        known = all(dtype is not None or value.key[1] in "*/" for _, dtype in sides)
        return halves.pop() if len(halves) == 1 and known else None
    return None
