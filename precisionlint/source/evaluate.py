"""What an expression is worth in one state. Nothing here forks a path or changes a state's events.

Knows Python's data model as far as precision needs it: attributes through classes, containers, arithmetic on losses and
scales, comparisons as conditions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from precisionlint.source import program as p
from precisionlint.source.objects import (
    WRAPPER_ATTRIBUTES,
    is_container,
    model_weights,
    state_dict_weights,
    weights_of,
)
from precisionlint.source.operators import (
    binary,
    compare,
    truth,
    unary,
    within,
)
from precisionlint.source.state import State
from precisionlint.source.values import (
    NONE,
    PLAIN,
    TRUE,
    UNSURE,
    Class,
    Const,
    External,
    Flow,
    Func,
    Many,
    Method,
    ModuleRef,
    Obj,
    Stream,
    Super,
    Sym,
    Tensors,
    Tup,
    Value,
    const,
    flow_of,
    join,
    text_of,
)

if TYPE_CHECKING:
    from precisionlint.source.interpret import Interpreter


def evaluate(it: Interpreter, state: State, expr: p.Expr) -> Value:
    """The value of an expression."""
    match expr:
        case p.Name():
            return it.lookup(state, expr.slot)
        case p.Const():
            return const(expr.value)
        case p.Attr():
            return attribute(it, state, evaluate(it, state, expr.obj), expr.name)
        case p.Index(key=p.Opaque(at=site)):
            return slice_of(it, state, evaluate(it, state, expr.obj), site)
        case p.Index():
            return index(it, state, evaluate(it, state, expr.obj), evaluate(it, state, expr.key))
        case p.Sequence():
            return sequence(it, state, expr)
        case p.Mapping():
            return mapping(it, state, expr)
        case p.Binary(op="and" | "or"):
            left = evaluate(it, state, expr.left)
            known = truth(state, left)
            if known is not None:
                return evaluate(it, state, expr.right) if known == (expr.op == "and") else left
            right = evaluate(it, state, expr.right)
            return it.derived(
                ("op", expr.op, left, right), f"{text_of(left)} {expr.op} {text_of(right)}", (left, right)
            )
        case p.Binary():
            return binary(it, expr.op, evaluate(it, state, expr.left), evaluate(it, state, expr.right))
        case p.Unary():
            return unary(it, state, expr.op, evaluate(it, state, expr.value))
        case p.Compare(op="in" | "not in"):
            left, right = evaluate(it, state, expr.left), evaluate(it, state, expr.right)
            if is_container(right):
                return within(it, state, expr.op, left, right)
            return compare(it, expr.op, left, right)
        case p.Compare():
            return compare(it, expr.op, evaluate(it, state, expr.left), evaluate(it, state, expr.right))
        case p.Closure():
            return Func(expr.function, it.module_of(state), state.frame)
        case p.Star():
            return evaluate(it, state, expr.value)
        case p.Opaque():
            parts = tuple(evaluate(it, state, part) for part in expr.parts)
            if len(parts) == 1 and isinstance(parts[0], Sym):  # an f-string, a slice: the same thing, as conditions go
                return it.derived(("opaque", id(expr), parts[0]), parts[0].text, parts)
            return it.site(state, expr.at, "…", combine(parts), ())
    raise AssertionError(expr)


def combine(values: Iterable[Value]) -> Flow:
    flow = PLAIN
    for value in values:
        flow = join(flow, flow_of(value))
    # A scale that goes into something unreadable may or may not come out of it.
    return replace(flow, factor="", scaled=UNSURE) if flow.factor else flow


def sequence(it: Interpreter, state: State, expr: p.Sequence) -> Value:
    items: list[Value] = []
    values = [evaluate(it, state, item) for item in expr.items]
    if len(values) > 1 and all(
        isinstance(item, p.Star) and isinstance(value, Tensors) and value.kind == "params"
        for item, value in zip(expr.items, values, strict=True)
    ):
        return functools.reduce(functools.partial(binary, it, "+"), values)  # [*one.parameters(), *other.parameters()]
    for item, value in zip(expr.items, values, strict=True):
        if isinstance(item, p.Star):
            known = elements(it, state, value)
            if known is None:
                return Many(element_of(it, state, value, expr.at))
            items.extend(known)
        else:
            items.append(value)
    if expr.kind == "tuple" or len(items) > 64:
        return Tup(tuple(items))
    obj = Obj(it.here(state, expr.at), External("builtins.list"))
    state.allocate(obj, dict(enumerate(items)))
    return obj


def mapping(it: Interpreter, state: State, expr: p.Mapping) -> Value:
    obj = Obj(it.here(state, expr.at), External("builtins.dict"))
    attributes: dict[Any, Value] = {}
    for key, item in expr.items:
        value = evaluate(it, state, item)
        if key is None:
            attributes.update(state.heap.get(value, {"*": value}))
            continue
        name = evaluate(it, state, key)
        attributes[name.value if isinstance(name, Const) else "*"] = value
    state.allocate(obj, attributes)
    return obj


# -- attributes


def attribute(it: Interpreter, state: State, obj: Value, name: str) -> Value:
    """``obj.name``."""
    stored = state.heap.get(obj)
    if stored is not None and name in stored and not is_container(obj):
        return stored[name]
    match obj:
        case External():
            return External(it.apis.canonical(f"{obj.name}.{name}"), obj.benign)
        case ModuleRef():
            return it.global_of(state, obj.module, name)
        case Obj(cls=Class() as cls):
            found = class_attribute(it, state, cls, name)
            if found is not None:
                return bind(it, state, found, obj, name)
            return outside_attribute(it, state, obj, name)
        case Obj():
            return outside_attribute(it, state, obj, name)
        case Class():
            if name == "__name__":
                return const(obj.cls.name)
            found = class_attribute(it, state, obj, name)
            return found if found is not None else Method(obj, name)
        case Tensors():
            if name == "grad" and obj.kind == "param":
                return replace(obj, kind="grad")
            if name == "requires_grad":
                return TRUE  # what is frozen is said where it is frozen
            if name in ("data", "main_grad", "_local_tensor"):
                return replace(obj, kind="grad") if name == "main_grad" else obj
            return Method(obj, name)
        case Super():
            found = it.super_attribute(state, obj, name)
            return found if found is not None else Method(obj, name)
        case Sym():
            if name == "param_groups":
                return Tensors("groups", None)
            if name in ("grad", "main_grad"):
                # A loop's variable, or what is asked for by one: one after the other, all of what it runs over.
                if obj.key[0] == "site" or (obj.key[0] == "index" and not isinstance(obj.key[2], Const)):
                    return Tensors("grad", None)
                return Tensors("grad", model_weights(it, obj), obj.key[0] == "index")
            if name == "requires_grad" and obj.key[0] in ("site", "index"):  # as of those that are known
                return TRUE
            value = it.derived(("attr", obj, name), f"{obj.text}.{name}", (obj,))
            if obj.declared is not None:
                it.field(state, obj, name, value)
            return value
        case Const():
            if obj == NONE:  # this path raises; what would be read from the object that is not there is unknown
                return it.derived(("attr", obj, name), name, ())
    return Method(obj, name)


def outside_attribute(it: Interpreter, state: State, obj: Obj, name: str) -> Value:
    """An attribute that no code of the project sets."""
    if name == "param_groups" and it.kind(state, obj) == "optimizer":
        return Tensors("groups", weights_of(it, state, state.heap.get(obj, {}).get("params", NONE)))
    if is_container(obj):
        return Method(obj, name)
    if name in WRAPPER_ATTRIBUTES:
        return obj
    return it.derived(("attr", obj, name), f"{it.object_name(obj)}.{name}", ())


def class_attribute(it: Interpreter, state: State, cls: Class, name: str) -> Value | None:
    for current in it.mro(state, cls):
        if isinstance(current, Class):
            found = state.heap.get(current, {}).get(name)
            if found is not None:
                return found
    return None


def fields_of(cls: Class) -> list[p.Slot]:
    """The fields that a class declares with their types, in their order."""
    return [
        instr.target.slot
        for instr in cls.cls.body.code
        if isinstance(instr, p.Assign) and isinstance(instr.target, p.Name) and instr.annotation is not None
    ]


def bind(it: Interpreter, state: State, found: Value, receiver: Value, name: str) -> Value:
    """An attribute found on the class, as the instance has it."""
    if not isinstance(found, Func) or found.receiver is not None:
        return found
    decorators = it.decorators(state, found)
    if "staticmethod" in decorators:
        return found
    if "classmethod" in decorators and isinstance(receiver, Obj):
        return replace(found, receiver=receiver.cls)
    bound = replace(found, receiver=receiver)
    if decorators & {"property", "cached_property", "functools.cached_property"}:
        return it.property_value(state, bound, receiver, name)
    return bound


# -- containers


def index(it: Interpreter, state: State, obj: Value, key: Value) -> Value:
    """``obj[key]``."""
    match obj:
        case Tup() if isinstance(key, Const) and isinstance(key.value, int):
            if -len(obj.items) <= key.value < len(obj.items):
                return obj.items[key.value]
        case Many():
            return obj.element
        case Tensors(kind="groups"):
            if isinstance(key, Const) and isinstance(key.value, str):
                return (
                    replace(obj, kind="params")
                    if key.value == "params"
                    else it.derived(("index", obj, key), key.value, ())
                )
            return obj
        case Tensors():
            if obj.kind == "params" and isinstance(key, Const):
                return Tensors("param", obj.weights, True, obj.flow)
            return replace(obj, part=True) if isinstance(key, Const) else obj
        case Obj() if is_container(obj):
            items = state.heap.get(obj, {})
            if isinstance(key, Const):
                at = key.value
                if isinstance(at, int) and at < 0:
                    at += len(items)
                try:
                    if at in items:
                        return items[at]
                except TypeError:
                    pass
            if "*" in items and not stateful(it, state, items["*"]):
                return items["*"]
            if items and "*" not in items and not isinstance(key, Const):
                first = next(iter(items.values()))
                if all(value == first for value in items.values()) and not stateful(it, state, first):
                    return first
        case Sym():
            weights = state_dict_weights(it, obj)
            if weights is not None:
                return Tensors("param", weights, True)
            if isinstance(key, (Sym, Const)):
                label = key.text if isinstance(key, Sym) else repr(key.value)
                return it.derived(("index", obj, key), f"{obj.text}[{label}]", (obj, key))
    return it.derived(("index", obj, key), f"{text_of(obj)}[{text_of(key)}]", (obj, key))


def slice_of(it: Interpreter, state: State, obj: Value, site: Any) -> Value:
    """``obj[a:b]``: some of the same."""
    match obj:
        case Obj() if is_container(obj):
            return Many(element_of(it, state, obj, site))
        case Tup():
            return Many(element_of(it, state, obj, site))
        case Tensors():
            return replace(obj, part=True)
        case Sym() | Many():
            return obj
    return it.derived(("index", obj, "slice"), f"{text_of(obj)}[:]", (obj,))


def elements(it: Interpreter, state: State, value: Value) -> list[Value] | None:
    """The items of a sequence whose items are all known."""
    match value:
        case Tup():
            return list(value.items)
        case Stream():
            return stream_elements(it, state, value)
        case Obj(cls=Class() as cls) if it.external_name(state, cls) == "typing.NamedTuple":
            return [attribute(it, state, value, str(name)) for name in fields_of(cls)]
        case Obj(cls=External(name="torch.nn.Sequential" | "torch.nn.ModuleList")):
            held = state.heap.get(value, {})
            parts = [item for key, item in held.items() if isinstance(key, int)] if "*" not in held else []
            return parts if parts and all(isinstance(part, Obj) for part in parts) else None
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            if "*" in items:
                return None
            if value.cls == External("builtins.dict"):
                return [const(key) for key in items]
            return list(items.values())
    return None


def stateful(it: Interpreter, state: State, value: Value) -> bool:
    """Whether a value is an object of which each has a state of its own: one that stands for many stands for none."""
    if isinstance(value, Sym):  # what a call that nobody read has made
        return value.key[0] == "site" and value.flow is PLAIN and "copy of" not in state.heap.get(value, {})
    return isinstance(value, Obj) and it.kind(state, value) in ("optimizer", "scaler")


def stream_elements(it: Interpreter, state: State, stream: Stream) -> list[Value] | None:
    inner = [elements(it, state, part) for part in stream.parts]
    first = inner[0] if inner else None
    match stream.kind:
        case "same":
            return first
        case "enumerate" if first is not None:
            return [Tup((const(position), item)) for position, item in enumerate(first)]
        case "zip" if None not in inner:
            return [Tup(items) for items in zip(*(part for part in inner if part is not None), strict=False)]
        case "items" | "values" if first is not None and is_container(stream.parts[0]):
            items = state.heap.get(stream.parts[0], {})
            if stream.kind == "values":
                return list(items.values())
            return [Tup((const(key), item)) for key, item in items.items()]
    return None


def stream_element(it: Interpreter, state: State, stream: Stream, site: Any) -> Value:
    def part(position: int) -> Value:
        return element_of(it, state, stream.parts[position], (site, position))

    match stream.kind:
        case "same":
            return part(0)
        case "enumerate":
            return Tup((it.site(state, (site, "index"), "…", PLAIN, ()), part(0)))
        case "zip":
            return Tup(tuple(part(position) for position in range(len(stream.parts))))
        case "items" | "values":
            owner = stream.parts[0]
            items = state.heap.get(owner, {}) if is_container(owner) else {}
            value = items.get("*")
            if value is None or stateful(it, state, value):
                value = it.site(state, (site, "value"), f"{text_of(owner)}[…]", flow_of(owner), ())
            if stream.kind == "values":
                return value
            return Tup((it.site(state, (site, "key"), "…", PLAIN, ()), value))
    raise AssertionError(stream.kind)


def element_of(it: Interpreter, state: State, value: Value, site: Any) -> Value:
    """What a loop's variable is, over a sequence whose items are not all known."""
    match value:
        case Many() if not stateful(it, state, value.element):
            return value.element
        case Stream():
            return stream_element(it, state, value, site)
        case Tensors(kind="params"):
            return replace(value, kind="param")
        case Tensors(kind="named"):
            return Tup((it.site(state, (site, "name"), "name", PLAIN, ()), replace(value, kind="param")))
        case Tensors():
            return value
        case Obj() if is_container(value):
            items = state.heap.get(value, {})
            values = list(items.values())
            if value.cls == External("builtins.list") and values and not stateful(it, state, values[0]):
                if "*" in items:
                    return items["*"]
                if all(v == values[0] for v in values):
                    return values[0]
        case Obj(cls=External(name="torch.nn.Sequential" | "torch.nn.ModuleList")):
            many = state.heap.get(value, {}).get("*")
            if isinstance(many, Obj):
                return many
    flow = flow_of(value)
    of = (value,) if isinstance(value, Obj) else ()
    held = list(state.heap.get(value, {}).values()) if is_container(value) else []
    made = [value.element] if isinstance(value, Many) else held
    if not made or not isinstance(made[0], Obj) or it.kind(state, made[0]) != "scaler":
        return it.site(state, (site, "element"), f"{text_of(value)}[…]", flow, of)
    one = it.site(state, (site, "element"), "scaler[…]", flow, of)  # another one each time round
    if "enabled" in (own := state.heap.get(made[0], {})):
        state.attributes(one)["enabled"] = own["enabled"]
    return one
