"""Branches that precision has nothing to do with: they are not run, what they assign is unknown afterwards.

Logging, printing and the arithmetic of batch sizes make most of the branches of a training script and none of its faults. A branch is
passed over if its text holds no mark of a precision event, names nothing that a test around precision asks for, calls nothing that
could reach either, and leaves neither a loop nor a function; and if what it assigns holds nothing that precision is made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

from precisionlint.patterns import regex
from precisionlint.source import program as p
from precisionlint.source.blur import flow_in, is_kept, plain
from precisionlint.source.evaluate import evaluate
from precisionlint.source.liveness import own_slots, walk
from precisionlint.source.marks import TRIGGER
from precisionlint.source.objects import is_container
from precisionlint.source.parsing import words_in
from precisionlint.source.state import State
from precisionlint.source.values import PLAIN, Class, Func, Obj, Partial, Sym, Tensors, Value

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter
    from precisionlint.source.module import ProjectModule

TOUCHES = regex(
    r"grad|norm\b|scale|DataParallel|compile|wrap|[a-z]_\(|\.data\b|\bema|averag|isinstance\((?s:.*)\.float\(\)"
)
"""What else a branch may not hold, besides the words that make a function matter."""
LEAVES = (p.Return, p.Break, p.Continue, p.Yield)
DECLARES = (p.Define, p.DefineClass, p.Import, p.Outer, p.Delete, p.With, p.Try)


class Inert(Struct, frozen=True):
    """What a branch that is passed over assigns, what it hands to calls, and all that it mentions."""

    targets: tuple[p.Name | p.Attr, ...]
    handed: tuple[p.Name, ...]
    mentioned: frozenset[p.Slot]


def passed_over(it: Interpreter, instr: p.If, state: State) -> bool:
    """Takes a path past a branch without running it, where that loses nothing; False where it has to be run."""
    inert = inert_of(it, instr, it.module_of(state))
    if inert is None or not harmless(it, state, inert):
        return False
    if instr.asked and isinstance(instr.test, p.Name):  # what an and, an or gives is asked by the branch that follows
        state.scope(state.frame)[instr.test.slot] = it.site(state, (instr.at, "asked"), "…", PLAIN, ())
    for target in inert.targets:
        if isinstance(target, p.Name):
            state.scope(state.frame)[target.slot] = it.unknown((state.frame, target.slot), str(target.slot), PLAIN, [])
        else:
            owner = evaluate(it, state, target.obj)
            state.attributes(owner)[target.name] = it.unknown((owner, target.name), target.name, PLAIN, [])
    return True


def harmless(it: Interpreter, state: State, inert: Inert) -> bool:
    """Whether what a branch assigns, mentions and hands on is nothing that precision is made of on this path."""
    info = it.frames[state.frame]
    scope = state.frames.get(state.frame, {})
    for target in inert.targets:
        if isinstance(target, p.Name):
            old = scope.get(target.slot)
            if target.slot in info.outer or not plain(str(target.slot), old, it.kept):
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
    return isinstance(value, (Func, Partial, Class, Tensors)) or (isinstance(value, Obj) and not is_container(value))


def inert_of(it: Interpreter, instr: p.If, module: ProjectModule) -> Inert | None:
    """What passing over a branch would mean, or None where its text alone says that it has to be run."""
    known = it.inert.get(instr)
    if known is None or known[0] != len(it.kept):
        known = it.inert[instr] = (len(it.kept), judge(it, instr, module))
    return known[1]


def judge(it: Interpreter, instr: p.If, module: ProjectModule) -> Inert | None:
    text = "\n".join(module.code[instr.at.lineno - 1 : instr.at.end_lineno])
    if TRIGGER.found(text) or is_kept(text) or TOUCHES.search(text):
        return None
    words = words_in(text)
    if not words.isdisjoint(it.kept):
        return None
    targets: list[p.Name | p.Attr] = []
    handed: list[p.Name] = []
    mentioned: set[p.Slot] = set()
    for block in (instr.then, instr.other):
        for inner in walk(block):
            if isinstance(inner, (*LEAVES, *DECLARES)) or (isinstance(inner, p.Raise) and inner is not block.code[-1]):
                return None
            mentioned |= own_slots(inner)
            if isinstance(inner, p.Call):
                handed.extend(arg for _, arg in inner.args if isinstance(arg, p.Name) and isinstance(arg.slot, str))
            elif isinstance(inner, (p.Assign, p.For)):
                found = targets_of(inner.target)
                if found is None:
                    return None
                targets.extend(found)
    if any(module.project.reaches(module.path, word, "event") for word in sorted(words & module.known_names)):
        return None
    return Inert(tuple(targets), tuple(handed), frozenset(mentioned))


def targets_of(target: p.Expr) -> list[p.Name | p.Attr] | None:
    """The variables and attributes of variables that an assignment sets; None where it sets something else."""
    match target:
        case p.Name(slot=int()):
            return []
        case p.Name() | p.Attr(obj=p.Name()):
            return [target]
        case p.Sequence():
            parts = [targets_of(item) for item in target.items]
            return None if any(part is None for part in parts) else [name for part in parts for name in part or ()]
        case p.Star():
            return targets_of(target.value)
    return None
