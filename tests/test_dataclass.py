"""The package's ``dataclass`` does what the standard library's does, before a method is compiled and after."""

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from precisionlint.dataclass import OFTEN, dataclass

KINDS = [
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"frozen": True, "order": True},
    {"frozen": True, "eq": False},
    {"slots": True},
    {"slots": True, "eq": False},
    {},
]


def shapes(decorate: Callable[..., Any], **options: bool) -> tuple[type, type]:
    """A class with each kind of field that the package uses, and one that inherits from it."""

    @decorate(**options)
    class Base:
        a: int
        b: str = "x"
        many: ClassVar[int] = 3
        c: tuple[int, ...] = dataclasses.field(default=(), compare=False)

        @property
        def doubled(self) -> int:
            return 2 * self.a

    @decorate(**options)
    class Shape(Base):
        """A document of its own."""

        d: dict[str, int] = dataclasses.field(default_factory=dict, compare=False)
        hidden: int = dataclasses.field(init=False, repr=False, compare=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "hidden", self.a + 1)

    for each in (Base, Shape):
        each.__qualname__ = each.__name__
    return Base, Shape


def outcome(work: Callable[[], object]) -> object:
    """What a function returns, or the kind of its error."""
    try:
        return work()
    except Exception as error:
        return type(error)


def told(base: Any, shape: Any) -> list[object]:
    """Everything that can be seen of two classes."""
    one, same, other, small = shape(1, "y"), shape(1, b="y", c=(2,)), shape(2), base(1)

    def change(value: Any) -> None:
        value.a = 5

    def remove(value: Any) -> None:
        del value.b

    return [
        *(outcome(lambda v=v: repr(v)) for v in (one, same, other, small)),
        *(
            outcome(lambda p=p: p[0] == p[1])
            for p in ((one, same), (one, other), (one, small), (one, 1), (small, base(1)))
        ),
        *(outcome(lambda p=p: p[0] < p[1]) for p in ((one, other), (other, one), (one, 1))),
        outcome(lambda: one <= same),
        outcome(lambda: hash(one) == hash(same)),
        outcome(lambda: hash(one) == hash(other)),
        shape.__hash__ is None,
        [(each.name, each.init, each.repr, each.compare) for each in dataclasses.fields(shape)],
        dataclasses.asdict(one),
        dataclasses.replace(one, a=7).hidden,
        (one.doubled, one.many, one.d is not same.d, one.hidden),
        shape.__match_args__,
        shape.__doc__,
        "__slots__" in vars(shape),
        *(
            outcome(work)
            for work in (shape, lambda: shape(1, 2, 3, 4, 5), lambda: shape(1, e=2), lambda: shape(a=1, b=2).b)
        ),
        outcome(lambda: change(copy.copy(one))),
        outcome(lambda: remove(copy.copy(one))),
        (copy.copy(one).a, copy.deepcopy(one).b),
    ]


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_classes_are_as_those_of_the_standard_library(options: dict[str, bool]):
    theirs, ours = shapes(dataclasses.dataclass, **options), shapes(dataclass, **options)
    expected = told(*theirs)
    assert told(*ours) == expected
    for _ in range(OFTEN):
        outcome(lambda: hash(ours[1](1)) + (ours[1](1) == ours[1](1)))
        outcome(lambda: hash(ours[0](1)) + (ours[0](1) == ours[0](1)))
    assert told(*ours) == expected


@dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: str = "x"


@dataclass
class Counted:
    """With methods of its own."""

    a: int

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        return "own"


def test_objects_can_be_pickled_and_own_methods_stay():
    assert pickle.loads(pickle.dumps(Slotted(3))) == Slotted(3)
    assert (hash(Counted(1)), repr(Counted(1)), Counted(1) == Counted(1)) == (7, "own", True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Slotted(1).a = 2  # type: ignore[misc]
    match Slotted(5):
        case Slotted(a, b):
            assert (a, b) == (5, "x")
