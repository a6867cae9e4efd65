"""What became of a half value: tags that follow a tensor's storage from the op that made it to the op that uses it.

Only the few ops that make or use a tagged value are watched, and only where they work in half. Faults that no single
op shows (a softmax or a norm written by hand, a stale copy of a weight) show as a chain of tags. Every fault carries
the origins of its chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct, field
from torch import Tensor

from precisionlint.findings import Place
from precisionlint.trace.position import Position
from precisionlint.trace.recorder import Call, Watcher
from precisionlint.trace.storages import Storages

HALF = (torch.float16, torch.bfloat16)
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}
NORMED = {"mean of squares": "rms_norm", "sum of squares": "linalg.vector_norm"}
"""What a norm takes the root of, and the function of torch that takes it in fp32."""
CROWD = 64
"""From how many terms on one row a sum in half is told: below, its error stays within a few roundings."""

Station = tuple[int, str]
"""An origin, and what happened there."""


class Fault(Struct, frozen=True):
    """A fault that was measured. ``origin`` is where it stands, ``trace`` what led there; ``training``: only in a step
    with a backward.
    """

    rule: str
    origin: int
    message: str
    trace: tuple[Station, ...] = ()
    training: bool = True
    at: Place | None = None
    """Where it stands, if not at ``origin``."""
    region: Place | None = None
    """Where the autocast region is entered that it is about."""


class Tag(Struct, frozen=True):
    """What a storage holds, and the stations that made it so."""

    kind: str
    stations: tuple[Station, ...]


class Copy(Struct):
    """A half copy of a weight that autocast's cache may hand out again."""

    weight: Tensor
    version: int
    origin: int


class Dataflow(Struct):
    """The tags and faults of one window."""

    position: Position
    faults: dict[tuple[str, int | Place], Fault] = field(default_factory=dict)
    _tags: Storages[Tag] = field(default_factory=Storages)
    _copies: Storages[Copy] = field(default_factory=Storages)

    def watch(self, func: Any) -> Watcher | None:
        """The watcher for an op that makes or uses a tagged value."""
        if func.namespace != "aten":
            return None
        handler = WATCHERS.get(func._overloadpacket.__name__)
        return None if handler is None else lambda func, args, kwargs, out, call: handler(self, args, kwargs, out, call)

    def tag(self, tensor: Tensor, kind: str, *stations: Station) -> None:
        self._tags.put(tensor, Tag(kind, stations))

    def tag_of(self, value: Any, kind: str) -> Tag | None:
        """The tag of that kind on a half tensor."""
        if not isinstance(value, Tensor) or value.dtype not in HALF or not self._tags:
            return None
        tag = self._tags.get(value)
        return tag if tag is not None and tag.kind == kind else None

    def found(self, fault: Fault) -> None:
        self.faults.setdefault((fault.rule, fault.origin if fault.at is None else fault.at), fault)

    # -- copies of weights that autocast keeps

    def keep_copy(self, weight: Tensor, copy: Tensor, origin: int) -> None:
        """A weight was cast in a region whose cache is on."""
        self._copies.put(copy, Copy(weight, weight._version, origin))

    def forget_copies(self) -> None:
        """The outermost region was left: autocast dropped its cache."""
        self._copies.clear()

    def stale(self, args: tuple[Any, ...]) -> Copy | None:
        """A copy among an op's inputs whose weight has changed since it was made."""
        if not self._copies:
            return None
        for value in args:
            if isinstance(value, Tensor):
                copy = self._copies.get(value)
                if copy is not None and copy.weight._version != copy.version:
                    return copy
        return None


Handler = Callable[[Dataflow, tuple[Any, ...], dict[str, Any], Any, Call], None]
WATCHERS: dict[str, Handler] = {}


def watches(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler for the ops of these names; it is called in the forward only, with half results or not."""

    def register(handler: Handler) -> Handler:
        for name in names:
            WATCHERS[name] = handler
        return handler

    return register


def is_half(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in HALF


def in_forward(call: Call) -> bool:
    return call.phase in ("forward", "recompute")


# -- softmax and losses


@watches("exp", "exp_")
def exponentials(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if is_half(out) and in_forward(call):
        flow.tag(out, "exp", (call.origin, f"exp in {SHORT[out.dtype]}"))


@watches("sum")
def sums(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    exp = flow.tag_of(args[0], "exp") if is_half(out) and in_forward(call) else None
    if exp is not None:
        flow.tag(out, "sum of exp", *exp.stations, (call.origin, f"their sum is stored in {SHORT[out.dtype]}"))
    else:
        of_squares(flow, "sum", args[0], out, call)


@watches("mean")
def means(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    of_squares(flow, "mean", args[0], out, call)


def of_squares(flow: Dataflow, what: str, squares: Any, out: Any, call: Call) -> None:
    """Marks a sum or mean of squares."""
    square = flow.tag_of(squares, "square") if is_half(out) and in_forward(call) else None
    if square is not None:
        station = (call.origin, f"their {what} is stored in {SHORT[out.dtype]}")
        flow.tag(out, f"{what} of squares", *square.stations, station)


@watches("div", "div_")
def quotients(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    total = flow.tag_of(args[1], "sum of exp") if len(args) > 1 else None
    if total is not None and flow.tag_of(args[0], "exp") is not None:
        name = SHORT[out.dtype]
        flow.found(
            Fault(
                "softmax-in-half",
                call.origin,
                f"a softmax written by hand in {name}: its exponentials and their sum are rounded to {name} before "
                "they are divided; torch.softmax adds up in fp32 and stores the same dtype",
                (*total.stations, (call.origin, "divided here")),
            )
        )


@watches("_log_softmax", "log_softmax", "logsumexp")
def log_softmaxes(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if not is_half(out) or not in_forward(call):
        return
    name = SHORT[out.dtype]
    flow.tag(out, "log-softmax", (call.origin, f"log-probabilities are stored in {name}"))
    flow.found(
        Fault(
            "softmax-in-half",
            call.origin,
            f"log-probabilities are stored in {name}: near -10 its steps are "
            f"{0.0625 if name == 'bf16' else 0.0078:g}, whatever they were added up in; ask for dtype=torch.float32 "
            "or cast the logits",
            ((call.origin, f"stored in {name}"),),
        )
    )


@watches("nll_loss_forward", "nll_loss2d_forward")
def losses(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    tag = flow.tag_of(args[0], "log-softmax")
    if tag is None or tag.stations[0][0] != call.origin:
        return  # a log_softmax of another line has its own name
    flow.faults.pop(("softmax-in-half", call.origin), None)
    name = SHORT[args[0].dtype]
    flow.found(
        Fault(
            "loss-on-half-logits",
            call.origin,
            f"cross entropy of {name} logits keeps its log-softmax in {name}: the gradients that start here are "
            "several times as far off as those of logits.float()",
            (*tag.stations, (call.origin, "the loss is taken of them")),
        )
    )


# -- norms


@watches("pow", "square")
def powers(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    exponent = args[1] if len(args) > 1 else 2
    if not is_half(out) or not in_forward(call):
        return
    if exponent == 2:
        flow.tag(out, "square", (call.origin, f"squares in {SHORT[out.dtype]}"))
    elif exponent == -0.5 or exponent == 0.5:
        roots(flow, args, kwargs, out, call)


@watches("mul")
def products(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if is_half(out) and in_forward(call) and len(args) > 1 and args[0] is args[1]:
        flow.tag(out, "square", (call.origin, f"squares in {SHORT[out.dtype]}"))


@watches("add", "add_")
def additions(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    for what in NORMED:
        total = flow.tag_of(args[0], what) if is_half(out) else None
        if total is not None and not isinstance(args[1], Tensor):
            flow.tag(out, what, *total.stations)  # an epsilon


@watches("rsqrt", "sqrt", "rsqrt_", "sqrt_")
def roots(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    for what, instead in NORMED.items():
        total = flow.tag_of(args[0], what) if in_forward(call) else None
        if total is None:
            continue
        name, word = SHORT[args[0].dtype], what.partition(" ")[0]
        lost = (
            "300 squares to inf" if name == "fp16" else f"squares, their {word} and its root are each rounded to 0.4 %"
        )
        flow.found(
            Fault(
                "norm-without-upcast",
                total.stations[-1][0],
                f"a norm takes its {what} in {name}: {lost}; cast to fp32 before squaring, or use torch's {instead}",
                (*total.stations, (call.origin, "the norm divides by its root")),
            )
        )


# -- sums by index


@watches("index_add", "index_add_")
def index_sums(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if is_half(out) and in_forward(call):
        crowded(flow, args[2], out.dtype, call, "index_add")


@watches("embedding_dense_backward")
def embedding_gradients(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if is_half(out):
        crowded(flow, args[1], out.dtype, call, "the embedding's gradient")


def crowded(flow: Dataflow, index: Tensor, dtype: torch.dtype, call: Call, what: str) -> None:
    """Tells of a sum in half where many terms fall on one row."""
    if ("half-scatter", call.origin) in flow.faults or not index.numel():
        return
    most = int(torch.unique(index, return_counts=True)[1].max())
    if most >= CROWD:
        name = SHORT[dtype]
        flow.found(
            Fault(
                "half-scatter",
                call.origin,
                f"{what} adds up to {most} terms on one row in {name}: its running sum stalls once a term is below "
                f"half a step of it ({name} stalls at {256 if name == 'bf16' else 2048} ones); add up in fp32",
                ((call.origin, f"{most} terms fall on one row"),),
            )
        )


# -- stale copies under autocast


@watches("_to_copy")
def weight_copies(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    region, weight = flow.position.region, args[0]
    cached = region is not None and region.cache and weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
    if cached and is_half(out) and weight.dtype is torch.float32:
        flow.keep_copy(weight, out, call.origin)


@watches("mm", "addmm", "bmm", "baddbmm", "convolution")
def products_of_copies(flow: Dataflow, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, call: Call) -> None:
    if not is_half(out) or not in_forward(call):
        return
    if flow.position.functions:
        flow.position.functions[-1] = True
    spanning, copy = flow.position.spanning, flow.stale(args)
    if spanning is not None and flow.position.region is spanning:
        flow.found(
            Fault(
                "autocast-around-training-loop",
                call.origin,
                "this autocast region spans optimizer steps: the half copies of the weights that its cache keeps are "
                "never refreshed, and the model stops learning; enter the region anew for each forward",
                ((call.origin, "a forward inside it, after a step"),),
                at=spanning.at,
                region=spanning.at,
            )
        )
    elif copy is not None:
        flow.found(
            Fault(
                "autocast-around-training-loop",
                call.origin,
                "the forward multiplies by a half copy of a weight that an optimizer has changed since: the autocast "
                "region spans the step, and its cache hands out the old weights; enter the region anew for each "
                "forward",
                (
                    (copy.origin, "the weight is cast, and kept by the region's cache"),
                    (call.origin, "the old copy is used again"),
                ),
                region=None if flow.position.region is None else flow.position.region.at,
            )
        )
