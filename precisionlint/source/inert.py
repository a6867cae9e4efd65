"""Branches and loops that precision has nothing to do with: they are not run, what they assign is unknown afterwards.

Logging, printing and the arithmetic of batch sizes make most of the branches of a training script and none of its faults. A branch is
passed over if its text holds no mark of a precision event, names nothing that a test around precision asks for, calls nothing that
could reach either, and leaves neither a loop nor a function; and if what it assigns holds nothing that precision is made of.

So is a loop of a function that only evaluates, in a program that has begun to train, over batches and classes, whatever it casts: it
trains nothing. Where nothing trains, the evaluation is what is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.blur import flow_in, is_kept, plain
from precisionlint.source.evaluate import evaluate
from precisionlint.source.liveness import blocks, own_slots, walk
from precisionlint.source.marks import AUTOCAST, TRIGGER
from precisionlint.source.module import LEFT_HALF, ProjectModule
from precisionlint.source.objects import is_container
from precisionlint.source.parsing import words_in
from precisionlint.source.state import State
from precisionlint.source.values import PLAIN, Class, Func, Obj, Partial, Sym, Tensors, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter

TOUCHES = regex(
    r"grad|norm\b|scale|DataParallel|compile|wrap|[a-z]_\(|\.data\b|\bema|averag|isinstance\((?s:.*)\.float\(\)"
)
"""What else a branch may not hold, besides the words that make a function matter."""
LEAVES = (p.Return, p.Yield)
DECLARES = (p.Define, p.DefineClass, p.Import, p.Outer)
OF_A_BRANCH = (*LEAVES, *DECLARES, p.Break, p.Continue, p.Delete, p.With, p.Try)
"""What a branch that is passed over may not do; a loop comes to an end by itself, whatever guards what is in it."""
OF_A_LOOP = (*LEAVES, *DECLARES)
Passable = p.If | p.For


class Inert(Struct, frozen=True):
    """What a branch or loop that is passed over assigns, what it hands to calls, and all that it mentions. ``evaluates``: it is part of a
    function that only does that, and that has no tests around precision in which its variables could be asked for."""

    targets: tuple[p.Name | p.Attr, ...]
    handed: tuple[p.Name, ...]
    mentioned: frozenset[p.Slot]
    evaluates: bool


def passed_over(it: Interpreter, instr: Passable, state: State) -> bool:
    """Takes a path past a branch or loop without running it, where that loses nothing; False where it has to be run."""
    inert = inert_of(it, instr, state)
    if inert is None or not harmless(it, state, inert):
        return False
    if (
        isinstance(instr, p.If) and instr.asked and isinstance(instr.test, p.Name)
    ):  # what an and, an or gives is asked by the branch that follows
        state.scope(state.frame)[instr.test.slot] = it.site(state, (instr.at, "asked"), "…", PLAIN, ())
    for target in inert.targets:
        if isinstance(target, p.Name):
            state.scope(state.frame)[target.slot] = it.unknown((state.frame, target.slot), str(target.slot), PLAIN, [])
        else:
            owner = evaluate(it, state, target.obj)
            state.attributes(owner)[target.name] = it.unknown((owner, target.name), target.name, PLAIN, [])
    return True


def harmless(it: Interpreter, state: State, inert: Inert) -> bool:
    """Whether what it assigns, mentions and hands on is nothing that precision is made of on this path."""
    info = it.frames[state.frame]
    scope = state.frames.get(state.frame, {})
    for target in inert.targets:
        if isinstance(target, p.Name):
            old = scope.get(target.slot)
            name = "" if inert.evaluates else str(target.slot)
            if target.slot in info.outer or not plain(name, old, it.kept):
                return False
        else:
            owner = evaluate(it, state, target.obj)
            if not isinstance(owner, (Obj, Sym)) or is_container(owner):
                return False
            old = state.heap.get(owner, {}).get(target.name)
            if not plain(target.name, old, it.kept):
                return False
        if is_model(it, old):
            return False
    if inert.targets and any(flow_in(state, scope[slot]) != PLAIN for slot in inert.mentioned if slot in scope):
        return False
    return not any(may_act(it.lookup(state, name.slot)) for name in inert.handed)


def is_model(it: Interpreter, value: Value | None) -> bool:
    """Whether a value is, or may be, a module whose weights have been spoken of."""
    return value in it.weight_roots or (isinstance(value, Obj) and not is_container(value))


def may_act(value: Value) -> bool:
    """Whether what gets this value could do something to precision with it: a function, or a list of parameters."""
    if isinstance(value, Func):
        return value.module.is_relevant(value.function)
    return isinstance(value, (Partial, Class, Tensors)) or (isinstance(value, Obj) and not is_container(value))


def inert_of(it: Interpreter, instr: Passable, state: State) -> Inert | None:
    """What passing over it would mean, or None where its text alone says that it has to be run."""
    known = it.inert.get(instr)
    if known is None or known[0] != len(it.kept):
        known = it.inert[instr] = (len(it.kept), judge(it, instr, state))
    return known[1]


def judge(it: Interpreter, instr: Passable, state: State) -> Inert | None:
    module = it.module_of(state)
    if isinstance(instr, p.If):
        return None if speaks(it, instr, module) else collect(instr, OF_A_BRANCH)
    function = it.frames[state.frame].function
    if instr.comprehension or function is None or not module.only_evaluates(function) or trains(instr, module):
        return None
    return collect(instr, OF_A_LOOP)


def text_of(instr: Passable, module: ProjectModule) -> str:
    return "\n".join(module.code[instr.at.lineno - 1 : instr.at.end_lineno])


def speaks(it: Interpreter, instr: p.If, module: ProjectModule) -> bool:
    """Whether a branch may do something to precision, by its text and what it names."""
    text = text_of(instr, module)
    if TRIGGER.found(text) or is_kept(text) or TOUCHES.search(text):
        return True
    if not words_in(text).isdisjoint(it.kept):
        return True
    return reaches(instr, module, "event")


def trains(instr: p.For, module: ProjectModule) -> bool:
    """Whether a loop of a function that only evaluates does more, by its text and what it names."""
    text = text_of(instr, module)
    return AUTOCAST.found(text) or LEFT_HALF.search(text) is not None or reaches(instr, module, "strong")


def reaches(instr: Passable, module: ProjectModule, kind: str) -> bool:
    """Whether something that it names reaches a mark of this kind."""
    named = module.named_in(instr.at.lineno, instr.at.end_lineno or instr.at.lineno)
    return any(module.project.reaches(module.path, name, kind) for name in sorted(named))


def collect(instr: Passable, barred: tuple[type, ...]) -> Inert | None:
    """What it assigns, hands on and mentions; None where it does what is barred."""
    assigned: list[p.Expr | None] = [instr.target] if isinstance(instr, p.For) else []
    handed: list[p.Name] = []
    mentioned = own_slots(instr) if isinstance(instr, p.For) else set[p.Slot]()
    for block in blocks(instr):
        for inner in walk(block):
            if isinstance(inner, barred) or (isinstance(inner, p.Raise) and inner is not block.code[-1]):
                return None
            mentioned |= own_slots(inner)
            if isinstance(inner, p.Call):
                handed.extend(arg for _, arg in inner.args if isinstance(arg, p.Name) and isinstance(arg.slot, str))
            elif isinstance(inner, (p.Assign, p.For)) or (isinstance(inner, p.With) and inner.target is not None):
                assigned.append(inner.target)
    targets: list[p.Name | p.Attr] = []
    for target in assigned:
        found = [] if target is None else targets_of(target, isinstance(instr, p.For))
        if found is None:
            return None
        targets.extend(found)
    return Inert(tuple(targets), tuple(handed), frozenset(mentioned), isinstance(instr, p.For))


def targets_of(target: p.Expr, filled: bool) -> list[p.Name | p.Attr] | None:
    """The variables and attributes of variables that an assignment sets, or fills if those are asked for; None where it sets something
    else."""
    match target:
        case p.Name(slot=int()):
            return []
        case p.Name() | p.Attr(obj=p.Name()):
            return [target]
        case p.Sequence():
            parts = [targets_of(item, filled) for item in target.items]
            return None if any(part is None for part in parts) else [name for part in parts for name in part or ()]
        case p.Star():
            return targets_of(target.value, filled)
        case p.Index() if filled:
            return targets_of(target.obj, filled)
    return None
