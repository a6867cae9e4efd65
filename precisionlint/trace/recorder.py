"""Records what every op did with its dtypes: one count for each (op, phase, module, line, dtypes), not one entry for
each call.

A dispatch mode sits below autocast and autograd: it sees the casts that autocast inserted, the ops of the backward, of
the optimizer and of the collectives. It does not see what a fused kernel does inside, what a compiled region does, or
launches past the dispatcher.

What keeps it near the cost of an empty mode: exact type checks instead of pytree, integers instead of strings (code
objects and bytecode offsets become lines only in the report), and one dictionary.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sized
from types import CodeType
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from precisionlint.trace.patches import UnsupportedTorchError
from precisionlint.trace.places import is_users
from precisionlint.trace.position import Phase, Position
from precisionlint.trace.registry import Registry

NO_SEQUENCE = 2**64 - 1
"""The sequence number of the nodes that accumulate a parameter's gradient."""
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd"})
"""Namespaces whose ops speak to other ranks."""
UNKNOWN = 0
"""The origin of ops whose line and module are not known."""

Dtypes = tuple[Any, ...]
"""A torch.dtype for each tensor, a frozenset of them for each list of tensors."""
GradientWatcher = Callable[[Any, tuple[Any, ...], dict[str, Any]], "Phase | None"]
Watcher = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, "Call"], None]


class Origin(Struct, frozen=True):
    """What an op belongs to: a module's number, and the user's code with the offset of the call in it."""

    module: int
    code: CodeType | None
    offset: int


class Call(Struct, frozen=True):
    """What a watcher is told of an op that it asked for."""

    phase: Phase
    origin: int
    parameter: int | None


class Kernel(Struct, frozen=True):
    """A kernel that was launched past the dispatcher, in the place of an op."""

    name: str
    namespace: str


class Cell(Struct):
    """How often something happened, and how many floating point operations that took."""

    count: int = 0
    flops: int = 0


Key = tuple[int, Phase, int, int | None, str, Dtypes, Dtypes]
"""``id`` of the op, phase, origin, parameter, device, dtypes in, dtypes out."""


def probe() -> None:
    """Raises UnsupportedTorchError where a private function is missing that the recorder needs."""
    for owner, name in (
        (torch._C, "_current_autograd_node"),
        (torch._C._autograd, "_get_sequence_nr"),
    ):
        if not hasattr(owner, name):
            raise UnsupportedTorchError(f"torch {torch.__version__} has no {name}, which audit builds on")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The dispatch mode of one window. ``counts`` and ``origins`` are its result."""

    supports_higher_order_operators = True

    def __init__(
        self, position: Position, registry: Registry, flops: Callable[[Any], Callable[..., int] | None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = position
        self.registry = registry
        self.counts: dict[Key, Cell] = {}
        self.origins: list[Origin] = [Origin(0, None, 0)]
        self.ops: dict[int, Any] = {}
        self.watchers: dict[int, Watcher] = {}
        """``id`` of an op -> who is told of its calls."""
        self.watch: Callable[[Any], Watcher | None] = lambda func: None
        """Asked once for each op: who wants to be told of its calls."""
        self.on_gradients: GradientWatcher = lambda func, args, kwargs: None
        """Asked for ops outside modules, backward and optimizer while gradients stand: the phase, where they touch
        those.
        """
        self.fresh: Sized = ()
        """Storages that nothing has written yet; while there are any, ``on_fresh`` is told of each op before it runs."""
        self.on_fresh: Callable[[Any, tuple[Any, ...], dict[str, Any], Callable[[], int]], None]
        self.paused = False
        """While set, ops run unrecorded: those of the audit itself."""
        self._flops = flops
        self._flop_formulas: dict[int, Callable[..., int]] = {}
        self._origin_numbers: dict[tuple[int, int, int], int] = {}
        self._sequence: dict[int, int] = {}
        self._users: dict[int, bool] = {}
        self._distributed: dict[tuple[type, ...], bool] = {}
        self._collectives: set[int] = set()
        self.kernels: dict[str, Kernel] = {}
        self._codes: list[CodeType] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else newer torch puts dynamo's wrapper around every call

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if types and self._is_distributed(types):
            return NotImplemented  # it unwraps itself, and its local ops and collectives come here
        number = id(func)
        if self.paused:
            return func(*args, **(kwargs or {}))
        if number not in self.ops:
            if not isinstance(func, OpOverload):
                return func(*args, **(kwargs or {}))
            self._meet(func, number)
        if self.fresh:
            self.on_fresh(func, args, kwargs or {}, self.line)
        position = self.position
        parameter = None
        phase: Phase
        node = torch._C._current_autograd_node()
        if number in self._collectives:
            phase, origin = "collective", self._walk(sys._getframe(1))
        elif position.section:  # also of an optimizer that steps in a hook of the backward
            phase, origin = position.section, self._walk(sys._getframe(1))
        elif node is None:
            origin = self._walk(sys._getframe(1))
            if position.modules:
                phase = "forward"
            else:
                phase = "forward" if torch.is_grad_enabled() else "other"
                if position.gradients or position.taken:
                    phase = self.on_gradients(func, args, kwargs or {}) or phase
        elif len(position.modules) > position.bases[-1]:
            phase, origin = "recompute", self._walk(sys._getframe(1))
        else:
            phase = "backward"
            sequence = node._sequence_nr()
            if sequence == NO_SEQUENCE:
                parameter, origin = self._accumulated(node), UNKNOWN
            else:
                known = self._sequence.get(sequence)
                origin = self._walk(sys._getframe(1)) if known is None else known
        out = func._op(*args, **kwargs) if kwargs else func._op(*args)

        # A node that this op made: the backward finds its origin by the node's number. (Under create_graph also within
        # a backward.)
        self._sequence.setdefault(torch._C._autograd._get_sequence_nr() - 1, origin)
        inputs = self._dtypes(args)
        if kwargs:
            inputs += self._dtypes(tuple(kwargs.values()))
        kind = type(out)
        if kind is Tensor:
            outputs, probe = (out.dtype,), out
        else:
            outputs, probe = self._dtypes(out) if kind is tuple else self._dtypes((out,)), first_tensor(args)
        device = "" if probe is None else "cpu" if probe.is_cpu else probe.device.type
        key = (number, phase, origin, parameter, device, inputs, outputs)
        cell = self.counts.get(key)
        if cell is None:
            cell = self.counts[key] = Cell()
        cell.count += 1
        formula = self._flop_formulas.get(number)
        if formula is not None:
            cell.flops += formula(args, kwargs or {}, out)
        watcher = self.watchers.get(number)
        if watcher is not None:
            watcher(func, args, kwargs or {}, out, Call(phase, origin, parameter))
        return out

    def launch(self, namespace: str, name: str, tensors: Iterable[Tensor]) -> None:
        """Counts a kernel that no dispatcher saw, as an op whose accumulation and results are not known."""
        kernel = self.kernels.setdefault(name, Kernel(name, namespace))
        self.ops[id(kernel)] = kernel
        position, node = self.position, torch._C._current_autograd_node()
        origin = self.line()
        phase: Phase = position.section or ("forward" if position.modules or torch.is_grad_enabled() else "other")
        if node is not None:
            phase = "recompute" if len(position.modules) > position.bases[-1] else "backward"
            origin = self._sequence.get(node._sequence_nr(), origin) if phase == "backward" else origin
        tensors = list(tensors)
        device = tensors[0].device.type if tensors else ""
        key = (id(kernel), phase, origin, None, device, tuple(each.dtype for each in tensors), ())
        self.counts.setdefault(key, Cell()).count += 1

    def line(self) -> int:
        """The origin of the user's line that is running."""
        return self._walk(sys._getframe(1))

    def module_of(self, sequence: int) -> int:
        """The number of the module whose op made a node of the graph; 0 where that is not known."""
        return self.origins[self._sequence.get(sequence, UNKNOWN)].module

    def _is_distributed(self, types: tuple[type, ...]) -> bool:
        known = self._distributed.get(types)
        if known is None:
            module = sys.modules.get("torch.distributed.tensor")
            cls = getattr(module, "DTensor", None)
            known = self._distributed[types] = cls is not None and any(issubclass(each, cls) for each in types)
        return known

    def _meet(self, func: Any, number: int) -> None:
        self.ops[number] = func
        if func.namespace in COLLECTIVES:
            self._collectives.add(number)
        watcher = self.watch(func)
        if watcher is not None:
            self.watchers[number] = watcher
        formula = self._flops(func)
        if formula is not None:
            self._flop_formulas[number] = formula

    def _walk(self, frame: Any) -> int:
        users = self._users
        while frame is not None:
            code = frame.f_code
            number = id(code)
            known = users.get(number)
            if known is None:
                known = users[number] = is_users(code)
                self._codes.append(code)  # keeps it alive, so that its id stays its own
            if known:
                modules = self.position.modules
                key = (modules[-1] if modules else 0, number, frame.f_lasti)
                origin = self._origin_numbers.get(key)
                if origin is None:
                    origin = self._origin_numbers[key] = len(self.origins)
                    self.origins.append(Origin(key[0], code, key[2]))
                return origin
            frame = frame.f_back
        return UNKNOWN

    def _accumulated(self, node: Any) -> int | None:
        variable = getattr(node, "variable", None)
        return None if variable is None else self.registry.parameter(variable)

    def _dtypes(self, values: Any) -> Dtypes:
        found: list[Any] = []
        for value in values:
            kind = type(value)
            if kind is Tensor or kind is Parameter:
                found.append(value.dtype)
            elif kind is list or kind is tuple:
                if value:
                    first = type(value[0])
                    if first is int or first is float or first is bool:
                        continue
                    inner = {each.dtype for each in value if isinstance(each, Tensor)}
                    if len(inner) == 1:
                        found.extend(inner)
                    elif inner:
                        found.append(frozenset(inner))
            elif isinstance(value, Tensor):
                found.append(value.dtype)
        return tuple(found)


def first_tensor(values: Any) -> Tensor | None:
    """The first tensor among values and the lists among them."""
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            return value[0]
    return None
