"""``dataclass`` as the standard library has it, made in a tenth of the time: what a class is never used for is not compiled.

The standard decorator compiles up to six functions a class, and the two hundred classes of this package would take half of the time
in which a run starts. Here equality, hash and text are closures over the fields, compiled when they are called often, and ``__init__``
is compiled when the first object is made. Fields are the standard library's own, so that ``fields``, ``replace`` and ``asdict`` work.
Only the options used here are taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from operator import attrgetter, ge, gt, le, lt
from types import MemberDescriptorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, order: bool = False, slots: bool = False
    ) -> Any:
        """As ``dataclasses.dataclass``."""

        def make(cls: type) -> type:
            return _made(cls, frozen=frozen, eq=eq, order=order, slots=slots)

        return make if cls is None else make(cls)


UNGIVEN: Any = object()
OFTEN = 200
"""After so many calls it pays to compile a function: compiled, equality and hash take half of the time."""


def _made(cls: type, *, frozen: bool, eq: bool, order: bool, slots: bool) -> type:
    own = set(vars(cls))
    hashed = vars(cls).get("__hash__", UNGIVEN)
    cls.__doc__ = cls.__doc__ or cls.__name__  # the signature that would stand there otherwise is costly to find out
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=slots)(cls)
    held = dataclasses.fields(made)
    compared = tuple(each.name for each in held if each.compare)
    given: dict[str, Any] = {"__init__": _init(made, frozen), "__repr__": _repr(tuple(e.name for e in held if e.repr))}
    if eq:
        given["__eq__"] = _eq(made, compared)
    if order:
        given |= {f"__{each.__name__}__": _order(each, compared) for each in (lt, le, gt, ge)}
    if frozen:
        given |= {"__setattr__": _no_setting, "__delattr__": _no_deleting}
        if slots:
            given |= {"__getstate__": _state, "__setstate__": _set_state}
    for name, value in given.items():
        if name not in own:
            setattr(made, name, value)
    if eq and (hashed is UNGIVEN or (hashed is None and "__eq__" in own)):
        made.__hash__ = _hash(made, compared) if frozen else None
    return made  # type: ignore[no-any-return]


def _values(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives the values of attributes as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda self: ()
    one = attrgetter(*names)
    return lambda self: (one(self),)


def _eq(cls: Any, names: tuple[str, ...]) -> Callable[[Any, object], Any]:
    values, left = _values(names), OFTEN

    def __eq__(self: Any, other: object) -> Any:
        nonlocal left
        left -= 1
        if not left and vars(cls).get("__eq__") is __eq__:
            one, two = (f"({''.join(f'{which}.{name},' for name in names)})" for which in ("self", "other"))
            told = f"{one} == {two} if other.__class__ is self.__class__ else NotImplemented"
            cls.__eq__ = _function(cls, "__eq__", "self, other", [f"return {told}"], {})
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _order(compare: Callable[[Any, Any], Any], names: tuple[str, ...]) -> Callable[[Any, object], Any]:
    values = _values(names)

    def compared(self: Any, other: object) -> Any:
        return compare(values(self), values(other)) if other.__class__ is self.__class__ else NotImplemented

    return compared


def _hash(cls: Any, names: tuple[str, ...]) -> Callable[[Any], int]:
    values, left = _values(names), OFTEN

    def __hash__(self: Any) -> int:
        nonlocal left
        left -= 1
        if not left and vars(cls).get("__hash__") is __hash__:
            told = f"return hash(({''.join(f'self.{name},' for name in names)}))"
            cls.__hash__ = _function(cls, "__hash__", "self", [told], {})
        return hash(values(self))

    return __hash__


def _repr(names: tuple[str, ...]) -> Callable[[Any], str]:
    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return __repr__


def _no_setting(self: Any, name: str, value: Any) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _no_deleting(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, each.name) for each in dataclasses.fields(self)]


def _set_state(self: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, each.name, value)


def _init(cls: Any, frozen: bool) -> Callable[..., None]:
    """An ``__init__`` that puts the compiled one in its place when it is first called."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made = _compiled(cls, frozen)
        if vars(cls).get("__init__") is __init__:
            cls.__init__ = made
        made(self, *args, **kwargs)

    return __init__


def _compiled(cls: Any, frozen: bool) -> Callable[..., None]:
    """The ``__init__`` of a class, as the standard decorator would write it."""
    names: dict[str, Any] = {"UNGIVEN": UNGIVEN}
    parameters, body = ["self"], []
    for field in dataclasses.fields(cls):
        name, value = field.name, field.name
        factory = field.default_factory is not dataclasses.MISSING
        default = field.default is not dataclasses.MISSING
        if factory:
            names[f"make_{name}"] = field.default_factory
            value = f"make_{name}() if {name} is UNGIVEN else {name}" if field.init else f"make_{name}()"
        elif default:
            names[f"default_{name}"] = field.default
            value = name if field.init else f"default_{name}"
        if field.init:
            parameters.append(f"{name}=UNGIVEN" if factory else f"{name}=default_{name}" if default else name)
        elif not factory and not default:
            continue
        if not frozen:
            body.append(f"self.{name} = {value}")
            continue
        slot = getattr(cls, name, None)
        if isinstance(slot, MemberDescriptorType):
            names[f"set_{name}"] = slot.__set__
            body.append(f"set_{name}(self, {value})")
        else:
            names["set_"] = object.__setattr__
            body.append(f"set_(self, {name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    return _function(cls, "__init__", ", ".join(parameters), body or ["pass"], names)


def _function(cls: Any, name: str, parameters: str, body: list[str], names: dict[str, Any]) -> Callable[..., Any]:
    """A function of a class, compiled from its text."""
    exec(f"def {name}({parameters}):\n " + "\n ".join(body), names)
    made: Any = names[name]
    made.__qualname__ = f"{cls.__qualname__}.{name}"
    return made  # type: ignore[no-any-return]
