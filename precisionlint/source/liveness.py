"""Which variables are dead where: what nothing mentions any more is forgotten, so that paths that differ only in it are one.

Knows the program tree and nothing of Python's syntax.
"""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.source import program as p


def outside_loops(block: p.Block) -> frozenset[str]:
    """The names that a block mentions outside its loops."""
    names: set[p.Slot] = set()
    for instr in block.code:
        names |= own_slots(instr)
        if not isinstance(instr, (p.For, p.While)):
            for inner in blocks(instr):
                names |= outside_loops(inner)
    return frozenset(name for name in names if isinstance(name, str))


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


Mentions = dict[p.Instr, frozenset[p.Slot]]
"""What each instruction of a body mentions, itself and in the blocks inside it."""


def mark_kills(block: p.Block, keep: frozenset[str], known: Mentions) -> None:
    """Notes, for each instruction of a body, which variables nothing mentions any more once it is done; see ``mark``."""
    mark(block, frozenset(), keep, known)


def mark(block: p.Block, after: frozenset[p.Slot], keep: frozenset[str], known: Mentions) -> None:
    """Notes, for each instruction, which variables nothing mentions any more once it is done.

    Two paths that differ only in such a variable are the same path: without this they could not be merged. ``after``: what is
    mentioned later, outside this block. ``keep``: names that are never noted.
    """
    kills: list[tuple[p.Slot, ...]] = [()] * len(block.code)
    later = set(after)
    for index in range(len(block.code) - 1, -1, -1):
        instr = block.code[index]
        mentioned = mentions(instr, known)
        inside = blocks(instr)
        inner_after = frozenset(later) if inside else frozenset()
        if isinstance(instr, (p.For, p.While, p.Try)):
            # A loop comes round again, a handler follows what it guards; temporaries never outlive their statement.
            inner_after |= {slot for slot in mentioned if isinstance(slot, str)}
        if isinstance(instr, p.While):
            inner_after |= own_slots(instr)
        if isinstance(instr, p.For) and instr.comprehension:
            inner_after |= mentioned
        for inner in inside:
            mark(inner, inner_after, keep, known)
        kills[index] = tuple(s for s in mentioned if s not in later and s not in keep)
        later |= mentioned
    block.kills = kills


def mentions(instr: p.Instr, known: Mentions) -> frozenset[p.Slot]:
    """The variables that an instruction mentions, itself and in the blocks inside it."""
    if instr not in known:
        found = own_slots(instr)
        for inner in blocks(instr):
            for nested in inner.code:
                found |= mentions(nested, known)
        known[instr] = frozenset(found)
    return known[instr]
