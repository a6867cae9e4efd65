"""What calls of torch compute: functions, methods of tensors, modules, autocast regions."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from precisionlint.events import Region
from precisionlint.patterns import regex
from precisionlint.source.flow import ops, products
from precisionlint.source.flow.buffers import register_buffer
from precisionlint.source.flow.devices import also_place, placed
from precisionlint.source.flow.heap import NOTHING
from precisionlint.source.flow.joins import element
from precisionlint.source.flow.losses import outside_loss
from precisionlint.source.flow.python_calls import dtypes_of_numbers, folded_math
from precisionlint.source.flow.words import ast_name, outlives
from precisionlint.valueflow import (
    BOOL,
    HALF,
    HALF_LAYERS,
    INT32,
    INT64,
    INTEGERS,
    NUMBER,
    RANK,
    UNKNOWN,
    WEIGHTS,
    WIDE,
    Called,
    Dtypes,
    Scope,
    Value,
    agreed,
    constant,
    lifted,
    lowered,
    may_be_half,
    promote,
    promote_all,
    promote_values,
    same,
)

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

DEVICE_NAME = regex(r"device|rank|cuda|gpu|cpu", re.I)
DTYPE_NAME = regex(r"dtype|precision|^(?:fp|float)8", re.I)


AMBIENT = regex(r"^torch\.get_autocast_(?:gpu_|cpu_)?dtype$")
"""What tells the dtype of the region that is on."""


ENGINES = regex(r"^(?:accelerator|fabric)$|\.(?:Accelerator|Fabric)$")
"""What enters the region that its settings ask for."""
WEIGHED = regex(r"(?:^|_)(?:params|parameters|weights)$")
"""What the weights are called of which gradients are taken by hand."""


def is_setting(name: str) -> bool:
    """Whether something is called as a device or a dtype is."""
    return bool(DEVICE_NAME.search(name) or DTYPE_NAME.search(name))


TORCH = ("torch", "torch.nn.functional", "torch.special", "torch.linalg", "torch.Tensor")
"""The modules whose functions are ops."""
FILLED = frozenset({"zeros", "empty", "new_zeros", "new_empty", "zeros_like", "empty_like"})
"""What makes a tensor whose values are written into it afterwards."""
COUNTS = frozenset({"size", "dim", "numel", "nelement", "element_size", "stride"})


def external(frame: Frame, name: str, args: list[Value], options: dict[str, Value], node: ast.Call) -> Value:
    """A call of an outside API by its canonical name."""
    last = name.rpartition(".")[2]
    if name in frame.flow.apis.autocast:
        return autocast(frame, name, args, options, node)
    if name.endswith(".out_dtype") and len(args) > 2 and args[0].name.endswith("mm.default"):
        return frame.made("matmul", args[2:], dtypes_named(args[1]) or UNKNOWN, node, last)
    if name.startswith("torch."):
        if name.startswith("torch.nn.") and not name.startswith("torch.nn.functional.") and last[:1].isupper():
            return made_module(frame, last, name, args, options, node)
        if name == "torch.autograd.grad" and len(args) > 1 and WEIGHED.search(args[1].name):
            gradient = Value("gradient", (args[1],), WEIGHTS, frame.at(node), last)
            return Value("many", (gradient,), WEIGHTS, frame.at(node))
        if name.rpartition(".")[0] in TORCH:
            value = compute(frame, last, args, options, node)
            if value is not None:
                return value
    elif name.startswith("einops."):
        if last == "reduce" and len(args) > 2 and args[2].constant in ("mean", "sum"):
            return compute(frame, args[2].constant, args[:1], {}, node) or NOTHING
        return Value("view", tuple(args), args[0].dtypes if args else UNKNOWN, frame.at(node))
    elif name.startswith("math."):
        return folded_math(last, args) or Value("number", tuple(args), NUMBER, frame.at(node))
    dtypes = NUMBER if RANKS.search(last) else UNKNOWN
    value = Value("constructed", tuple(args), dtypes, frame.at(node), name, options=options)
    frame.tell(Called(value.at, (), value, frame.scope))
    outside_loss(frame, name, args, options, node)
    off = options.get("enabled")
    if "autocast" in last and off is not None and off.constant is False:  # of a library, by its name
        return Value("region", (), UNKNOWN, value.at, name, ref=(False, Region("", "", at=value.at)))
    return value


RANKS = regex(r"(?:^|_)(?:world_size|rank|device_count)$")
"""What gives how many processes or devices there are, or which this one is."""


def made_module(
    frame: Frame, last: str, name: str, args: list[Value], options: dict[str, Value], node: ast.Call
) -> Value:
    at = frame.at(node)
    if last in ("Parameter", "Buffer"):
        return Value("parameter" if last == "Parameter" else "buffer", tuple(args), WEIGHTS, at)
    value = Value("module", tuple(args), UNKNOWN, at, last, options=options)
    frame.tell(Called(at, (), Value("constructed", tuple(args), UNKNOWN, at, name, options=options), frame.scope))
    return value


def module(frame: Frame, made: Value, args: list[Value], node: ast.Call) -> Value:
    """A call of one of torch.nn's modules."""
    if not args:
        return Value("layer", (), frozenset({"~layer()"}), frame.at(node), made.name)
    family = ops.MODULES.get(made.name)
    if made.name == "Sequential" and made.inputs and all(part.op in ("module", "instance") for part in made.inputs):
        value = args[0]
        for part in made.inputs:
            value = frame.apply(part, [value], {}, node)
        return value
    if family is None:
        # Given fp32, its weights are fp32 as well: only a region makes the result half.
        wide = "float32" if frame.scope.enabled is False else "~region"
        follows = frozenset({wide if args[0].dtypes <= WIDE else "~layer()"})
        dtypes = under_autocast(frame.scope, "linear", follows) if made.name in HALF_LAYERS else WEIGHTS
        return Value("layer", tuple(args), dtypes, frame.at(node), made.name)
    if family == "view":
        return Value("view", tuple(args), args[0].dtypes, frame.at(node))
    return frame.made(
        family, args, under_autocast(frame.scope, family, args[0].dtypes), node, made.name, dict(made.options)
    )


LAYERS = regex(
    r"conv|linear|proj|dense|\bfc|act|norm|layer|block|mlp|qkv|gate|head|transformer|[ed]ncoder|backbone|model\b|net\b",
    re.I,
)
"""What the layers of a network are called."""
OTHERS = regex(r"rope|rotary|pos|freq|emb|loss|crit|mask|quant|metric|proc|token|sched|spec|resampl|extract", re.I)
"""What returns something else than activations in the dtype of what it is given, or need not."""


MODEL = regex(r"^_?(?:model|net|network|module|transformer|encoder|decoder|backbone|unet)$|_model$")
"""What an object calls the network that it holds."""


def model(frame: Frame, args: list[Value], node: ast.Call, name: str) -> Value:
    """A call of what the program calls a model, whoever has built it."""
    dtypes = UNKNOWN if asks_for_wide(frame.scope) else frozenset({f"~{name}()"})
    return Value("layer", tuple(args), dtypes, frame.at(node), name)


def built_layer(frame: Frame, made: Value, args: list[Value], node: ast.Call) -> Value:
    """A call of what a function nobody read, or a class that was passed in, has built for a module: a layer by its name."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    called = f"{name} {made.name.rpartition('.')[2]}"
    follows = bool(args) and may_be_half(args[0].dtypes)
    if frame.scope.kind != "module" or not follows or OTHERS.search(called):
        return NOTHING
    if made.op == "constructed" and not LAYERS.search(called):
        return NOTHING
    dtypes = lifted(args[0].dtypes) if "norm" in name.lower() else frozenset({"~layer()"})
    return Value("layer", tuple(args), UNKNOWN if asks_for_wide(frame.scope) else dtypes, frame.at(node), name)


def method(frame: Frame, obj: Value, name: str, args: list[Value], options: dict[str, Value], node: ast.Call) -> Value:
    """A method of a value."""
    if name in ("parameters", "named_parameters", "buffers"):
        if name.startswith("named"):
            return Value("many", (Value("tuple", (Value("unknown"), Value("weight", (), WEIGHTS))),))
        return Value("parameters", (), WEIGHTS, frame.at(node), name)
    if name in ("items", "values", "keys"):
        if name == "keys":
            return Value("unknown")
        return Value("items" if name == "items" else "many", (obj,), obj.dtypes, frame.at(node))
    if name == "register_buffer" and len(args) >= 2 and obj.op == "instance":
        register_buffer(frame, obj, args, node)
        return constant(None)
    if name == "buffer" and obj.name == "bucket":  # of DDP's communication hooks
        return Value("gradient", (obj,), WEIGHTS, frame.at(node), name)
    if name == "backward":
        return constant(None)
    if name == "autocast" and ENGINES.search(obj.name):
        return Value("region", (), UNKNOWN, frame.at(node), name, ref=(None, Region("cuda", "", at=frame.at(node))))
    if name in COUNTS and is_tensor(obj):
        return Value("size", (obj,), NUMBER, frame.at(node), name)
    if name in ops.MODULE_ITSELF and obj.op in ("module", "instance"):
        return obj
    value = compute(frame, name, [obj, *args], options, node)
    if value is not None:
        return value
    made = Value("constructed", (obj, *args), UNKNOWN, frame.at(node), f".{name}", options=options)
    frame.tell(Called(made.at, (), made, frame.scope))
    # A method of a model or a batch: what it gives follows the model, like a layer's output.
    dtypes = UNKNOWN if obj.op == "unknown" or asks_for_wide(frame.scope) else obj.dtypes
    if dtypes == NUMBER and obj.op == "attribute":  # of a configuration: something that it makes
        dtypes = frozenset({f"~{name}()"})
    return Value("attribute", (obj,), dtypes, frame.at(node), name)


def asks_for_wide(scope: Scope) -> bool:
    """Whether a region asks for fp32: a layer gives that there, or what only its code tells."""
    return scope.region is not None and scope.region.dtype in WIDE


# -- ops


def compute(frame: Frame, name: str, inputs: list[Value], options: dict[str, Value], node: ast.Call) -> Value | None:
    """The value of an op by its torch name, over its inputs in order; None for what is no op of torch that is known."""
    at = frame.at(node)
    first = inputs[0] if inputs else options.get("input")
    if first is not None and not inputs:
        inputs = [first]
    own = first.dtypes if first is not None else UNKNOWN
    if name in ops.CASTS and inputs:
        return cast(frame, inputs[0], frozenset({ops.CASTS[name]}), node)
    if name in ("to", "type", "type_as", "_cast_Float") and inputs:
        return to(frame, inputs, options, node)
    if name == "copy_" and len(inputs) > 1:
        return Value("cast", (inputs[1],), own, at, name)
    if name in ops.VIEW_OPS and inputs:
        return Value("view", tuple(inputs), own, at, name)
    if name in ops.INDEX_OPS and inputs:
        return Value("index", tuple(inputs), own, at, name)
    if name in ops.STACKS:
        lists = tuple(inputs[:1])
        if lists and lists[0].op == "either":
            lists = lists[0].inputs
        parts = tuple(part for each in lists for part in (each.inputs if each.op in ("tuple", "many") else (each,)))
        return Value("stack", parts, promote_all(parts), at, name)
    if name == "_foreach_norm" and inputs:
        norm = frame.made("norm", [element(inputs[0], at), *inputs[1:]], own, node, name, options)
        return Value("many", (norm,), norm.dtypes, at)
    if name == "_int_mm" and inputs:
        return frame.made("matmul", inputs, INT32, node, name, options)
    if name in ops.PROMOTING and inputs:
        return promoting(frame, name, inputs, options, node)
    if name in ops.LOSSES and inputs:
        family = ops.RENAMED.get(name, name)
        if family == "bce_with_logits" and len(inputs) > 1:
            own = promote(own, inputs[1].dtypes)
        return frame.made(
            family, [*inputs, *options.values()], under_autocast(frame.scope, family, own), node, name, options
        )
    if name in ops.REDUCING and inputs:
        dtypes = dtype_option(options, frozenset("int64" if a in INTEGERS or a == "bool" else a for a in own))
        return frame.made(
            ops.RENAMED.get(name, name), inputs, under_autocast(frame.scope, name, dtypes), node, name, options
        )
    if name in ops.SAME and inputs:
        family = ops.RENAMED.get(name, name.rstrip("_") if name in ops.IN_PLACE else name)
        return same_dtype(frame, family, name, inputs, options, node)
    if name in ("square", "square_") and inputs:  # calls pow
        return frame.made("square_pow", inputs, under_autocast(frame.scope, "square_pow", own), node, name)
    if name in ops.TESTS and inputs:
        return frame.made("test", inputs, BOOL, node, name)
    if name in ops.INDICES:
        return frame.made("argmax" if name not in ("multinomial", "one_hot") else name, inputs, INT64, node, name)
    if name in ops.NUMBERS and inputs:
        return Value("number", tuple(inputs), NUMBER, at, name)
    return factory(frame, name, inputs, options, node)


def factory(frame: Frame, name: str, inputs: list[Value], options: dict[str, Value], node: ast.Call) -> Value | None:
    """What makes a tensor from nothing, and limits of dtypes."""
    if name == "arange":
        integral = all(
            v.op in ("size", "count", "number", "range") or isinstance(v.constant, int) or v.dtypes == NUMBER
            for v in inputs
        )
        default = INT64 if integral else frozenset({"float32"})
        if any(isinstance(v.constant, float) for v in inputs):
            default = frozenset({"float32"})
        return frame.made("arange", inputs, dtype_option(options, default), node, name, options)
    if name in ops.FACTORIES:
        default = frozenset({"float32"})
        if name in ("tensor", "as_tensor", "full"):
            default = dtypes_of_numbers(inputs[-1] if inputs else None)
        return frame.made(name, inputs, dtype_option(options, default), node, name, options)
    if name in ("finfo", "iinfo"):
        return Value(name, tuple(inputs), UNKNOWN, frame.at(node), name)
    return None


def same_dtype(
    frame: Frame, family: str, name: str, inputs: list[Value], options: dict[str, Value], node: ast.Call
) -> Value:
    dtypes = inputs[0].dtypes
    if family in ("round", "clamp", "masked_fill", "nan_to_num") or "dtype" not in options:
        dtypes = under_autocast(frame.scope, family, dtypes)
    if family == "embedding" and len(inputs) > 1:
        dtypes = inputs[1].dtypes
    if family in ("max", "min") and len(inputs) > 1 and inputs[1].op != "constant":
        dtypes = promote_values(inputs[:2])
    return frame.made(family, inputs, dtype_option(options, dtypes), node, name, options)


def promoting(frame: Frame, name: str, inputs: list[Value], options: dict[str, Value], node: ast.Call) -> Value:
    family = ops.PROMOTING[name]
    if name in products.ADDED and (added := products.added(frame, name, inputs, options, node)) is not None:
        return added
    parts = list(inputs)
    if name == "einsum":
        parts = [part for part in inputs[1:] for part in (part.inputs if part.op == "tuple" else (part,))]
    elif family == "where":
        parts = [*inputs[1:]]
    parts += [
        value for key, value in options.items() if key in ("other", "exponent", "tensor2", "mat2", "target", "weight")
    ]
    dtypes = (agreed if family in ops.HALF_ON_CUDA else promote_values)(parts if family != "linear" else parts[:2])
    if name == "einsum" and len(parts) == 2 and same(*parts) and ops.adds_squares(inputs[0].constant):
        dtypes = under_autocast(frame.scope, family, dtypes)
        return frame.made("sum", (Value("square", (parts[0],), dtypes, frame.at(node)),), dtypes, node, name)
    if name.endswith("_") and inputs:
        dtypes = inputs[0].dtypes
    if family == "pow" and len(parts) > 1 and parts[1].op == "constant" and parts[1].constant == 2:
        family = "square_pow"
    if family == "mul" and len(parts) > 1 and parts[0] is parts[1]:
        family = "square"
    kept = inputs if family == "where" else parts
    told = name
    if name.endswith("_"):
        func = node.func
        state = isinstance(func, ast.Attribute) and outlives(frame, func.value)
        told = "in-place state" if state else "in-place"
    return frame.made(
        family,
        kept,
        under_autocast(frame.scope, family, dtypes),
        node,
        told,
        options,
    )


def under_autocast(scope: Scope, family: str, dtypes: Dtypes) -> Dtypes:
    """What autocast makes of an op's result, in a region that the function enters itself, or on CUDA in one that its caller may have
    entered; a region whose device is not known is taken for CUDA's, which lifts more."""
    region = scope.region
    if scope.enabled is False:
        return dtypes
    if region is None or scope.enabled is None:
        if family in ops.FP32_ON_CUDA:
            return lifted(dtypes)
        return lowered(dtypes) if family in ops.HALF_ON_CUDA else dtypes
    if region.device not in ("cuda", "cpu", ""):
        return UNKNOWN
    if family in (ops.FP32_ON_CPU if region.device == "cpu" else ops.FP32_ON_CUDA):
        return frozenset("float32" if atom in HALF or atom[0] in "~^?" else atom for atom in dtypes)
    if family in (ops.HALF_ON_CPU if region.device == "cpu" else ops.HALF_ON_CUDA):
        if "float64" in dtypes:  # which it leaves alone
            return dtypes
        return frozenset({region.dtype or "~autocast"})
    return dtypes


def cast(frame: Frame, value: Value, dtypes: Dtypes, node: ast.Call, name: str = "") -> Value:
    """A cast; ``name``: what the program calls the dtype, where it is not known."""
    if value.op == "module":
        return value
    return frame.made("cast", (value,), dtypes, node, name)


def to(frame: Frame, inputs: list[Value], options: dict[str, Value], node: ast.Call) -> Value:
    """``x.to(…)``, ``x.type(…)``, ``x.type_as(y)``."""
    value, *rest = inputs
    for other in [*rest, *(options[key] for key in ("dtype", "other") if key in options)]:
        dtypes = dtypes_named(other)
        if dtypes is not None:
            return cast(frame, value, dtypes, node, other.name)
        if is_tensor(other):
            return cast(frame, value, other.dtypes, node)
    if any(isinstance(arg, ast.Call) and DTYPE_NAME.search(ast_name(arg.func)) for arg in node.args):
        return cast(frame, value, UNKNOWN, node)  # what gives the dtype was not read
    return Value("view", (value,), value.dtypes, frame.at(node), "to")


def followed(argument: Value, name: str) -> Dtypes:
    """The dtypes of an argument, of which nothing may be known but that it is one."""
    return argument.dtypes | {f"~{name}"} if argument.dtypes == UNKNOWN else argument.dtypes


def is_tensor(value: Value) -> bool:
    if value.op == "either":
        return all(is_tensor(option) for option in value.inputs)
    if value.op in ("constant", "unknown", "external", "size", "builtin", "constructed", "number", "dtype_of"):
        return False
    if value.dtypes == NUMBER:  # the type of a device
        return False
    return not (
        value.op in ("input", "attribute") and (DEVICE_NAME.search(value.name) or DTYPE_NAME.search(value.name))
    )


def dtypes_named(value: Value) -> Dtypes | None:
    """The dtypes that a value names, if it is a dtype."""
    match value.op:
        case "external" if value.name.startswith(("torch.", "jax.numpy.")):
            last = value.name.rpartition(".")[2]
            last = ops.DTYPES.get(last, last)
            return frozenset({last}) if last in RANK or last.startswith("float8") or last in ("bfloat16",) else None
        case "dtype_of":
            return value.inputs[0].dtypes
        case "constant" if isinstance(value.constant, str):
            last = ops.DTYPES.get(value.constant.removeprefix("torch."), value.constant.removeprefix("torch."))
            return frozenset({last}) if last in RANK else None
        case "either":
            named = [dtypes_named(option) for option in value.inputs]
            return frozenset().union(*[one or UNKNOWN for one in named]) if any(named) else None
        case "input" if value.inputs:  # an argument with a default: a caller may pass another
            inner = dtypes_named(value.inputs[0])
            return inner | frozenset({f"~{value.name}"}) if inner else None
    if value.op == "constructed" and AMBIENT.search(value.name):
        return frozenset({"~autocast"})
    if value.op in ("external", "constructed") and DTYPE_NAME.search(value.name.rpartition(".")[2]):
        return UNKNOWN  # FP8.dtype, get_fp8_dtype(): of a file that was not read
    if DTYPE_NAME.search(value.name) and value.op in ("input", "attribute", "unknown", "index"):
        if value.op == "input" and value.dtypes == UNKNOWN:
            return UNKNOWN
        return frozenset({f"~{value.name}"})
    return None


def dtype_option(options: dict[str, Value], default: Dtypes) -> Dtypes:
    given = options.get("dtype")
    if given is None or (given.op == "constant" and given.constant is None):
        return default
    return dtypes_named(given) or UNKNOWN


# -- regions


def autocast(frame: Frame, name: str, args: list[Value], options: dict[str, Value], node: ast.Call) -> Value:
    """``torch.autocast(…)`` and its relatives: a region that a ``with`` or a decorator enters."""
    at = frame.at(node)
    device_of_class = frame.flow.apis.autocast[name]
    shift = 0 if device_of_class else 1
    # A decorator is made when the file is imported, whatever the machine has.
    made = Value(
        "constructed", tuple(args), UNKNOWN, at, name, options=options, ref="decorator" if frame.decorating else None
    )
    device_value = made.option("device_type", 0) if shift else None
    device = device_of_class
    if device_value is not None and device_value.op == "constant" and isinstance(device_value.constant, str):
        device = device_value.constant.partition(":")[0]
    literal = getattr(device_value.at, "node", None) if device_value is not None else None
    written = device == "cuda" and (not shift or literal in (*node.args, *(each.value for each in node.keywords)))
    given = [*node.args[:1], *(each.value for each in node.keywords if each.arg == "device_type")] if shift else []
    place = not device and bool(given) and also_place(frame, given[0])
    frame.tell(Called(at, (), made, frame.scope, placed(frame, bool(shift)) if written else "", place))
    enabled_value = made.option("enabled", 2 if shift else 0)
    dtype_value = made.option("dtype", 1)
    enabled: bool | None = True
    if enabled_value is not None:
        enabled = (
            enabled_value.constant
            if enabled_value.op == "constant" and isinstance(enabled_value.constant, bool)
            else None
        )
    dtype = {"cuda": "float16", "cpu": "bfloat16"}.get(device, "")
    if dtype_value is not None:
        named = dtypes_named(dtype_value)
        dtype = next(iter(named)) if named and len(named) == 1 else ""
    if dtype in ("float32", "float64") and device not in ("cuda", ""):
        enabled = False  # with a warning; CUDA's autocast takes any dtype, and a device that is not known may be CUDA's
    return Value("region", (), UNKNOWN, at, name, ref=(enabled, Region(device, dtype, at=at)))
