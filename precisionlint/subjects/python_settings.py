"""Settings in Python source that are configurations by another name: DeepSpeed's dicts, Megatron's arguments and config objects, torchtitan's
training section, FSDP's mixed precision, DDP's communication hooks.

Each is read where it is written down, a dict with what the same block adds to it; what the program does with it elsewhere is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from copy import deepcopy

from msgspec.structs import replace

from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.recipes import HALVES, UNKNOWN, Recipe, Setting
from precisionlint.source.parsing import walk
from precisionlint.subjects import File, deepspeed, megatron
from precisionlint.subjects.branches import enclosing, set_once, truth
from precisionlint.subjects.grown import grown, literal
from precisionlint.subjects.names import last_name
from precisionlint.subjects.stated import defaults, stated
from precisionlint.subjects.tree import Table, constant, joined, of_python, tables

POLICIES = ("MixedPrecision", "MixedPrecisionPolicy")
POLICY = ("param_dtype", "reduce_dtype")
"""The first arguments of either, in their order."""
SUMS = regex(
    r"(?:\w+_)?grad(?:ient)?s?_(?:comm|reduce|sync|reduction)_(?:data_?)?d?type|communication_data_type|mixed_precision_reduce|all_?reduce_dtype"
)
"""What frameworks other than FSDP call the dtype in which gradients are summed over ranks."""
TRIED = regex(r"(?:^|/)tests?/|(?:^|/)test_\w+\.py$|_test\.py$")
"""The tests of such a framework, which try each dtype."""
BF16 = regex(r"bf16|bfloat16")
HALF = regex(r"[bf]p?16|float16|half")
MEGATRON_CONFIGS = ("DistributedDataParallelConfig", "MegatronMixedPrecision", "MixedPrecisionConfig")
DDP_CONFIGS = ("DistributedDataParallelConfig", "ddp", "ddp_config")
"""Where Megatron itself reads the dtype of gradients. NeMo's and Megatron-Bridge's mixed precision, where there is one, overrides it."""
MEGATRON_POLICY = regex(r"mixed_precision|MixedPrecision|bf16_mixed|bf16-mixed")
COLLECTIVES = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "_allreduce_fut")
HOOK = regex(r"(?:fp16|bf16)_compress_(?:hook|wrapper)|(?:FP16|BF16)_COMPRESS")
TAKES_HOOKS = regex(r"ddp_comm_hooks|register_comm_hook")
MEGATRON_BF16 = regex(r"bf16[_-]mixed|bf16_with_\w+|\bbf16\s*=\s*True|params_dtype\s*=\s*torch\.bfloat16")
MEGATRON_TRAINS = regex(r"OptimizerConfig|OptimizerModule|pretrain|finetune|get_megatron_optimizer")
INFERENCE = regex(r"\bgenerate\b|\binference\b|\bdeploy")


def read(file: File) -> Iterator[Recipe]:
    """The recipes of a file, in its order.

    Raises: UnreadableError.
    """
    ways = grown(file.nodes)
    pending: list[ast.AST] = [file.syntax]
    while pending:
        node = pending.pop()
        inner = list(ast.iter_child_nodes(node))
        table = literal(node) if isinstance(node, ast.expr) else None
        if table is not None:
            assert isinstance(node, ast.expr)
            for way in ways.get(node, [table]):
                yield from _dict(file, way)
            inner = [each for each in inner if not isinstance(each, ast.Dict)]
        if isinstance(node, (ast.List, ast.Tuple)):
            yield from _arguments(file, node)
        elif isinstance(node, ast.Call):
            yield from _call(file, node)
        elif isinstance(node, ast.Assign):
            yield from _assignment(file, node)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield from _default(file, node)
        pending.extend(reversed(inner))


def _dict(file: File, node: ast.Dict) -> Iterator[Recipe]:
    for each in node.values:  # a table of hooks, one of which a setting chooses
        if (
            isinstance(each, (ast.Name, ast.Attribute))
            and HOOK.fullmatch(last_name(each))
            and TAKES_HOOKS.search(file.text)
        ):
            sent = Setting(last_name(each), last_name(each)[:4].lower(), file.place(each))
            yield Recipe(at=sent.at, when=(), framework="DDP", reduces=sent, sure=False, left=True)
    tree = of_python(file, node)
    for table in tables(tree) if isinstance(tree, Table) else ():
        yield from (recipe for recipe in (deepspeed.recipe(table), megatron.of_table(table)) if recipe is not None)


def _arguments(file: File, node: ast.List | ast.Tuple) -> Iterator[Recipe]:
    """A list of command-line words, ``["--bf16", "--main-grads-dtype", "bf16"]``."""
    words = [(constant(item), item) for item in node.elts]
    if not any(isinstance(word, str) and word.startswith("--") for word, _ in words):
        return
    found = []
    for (word, item), (following, _) in zip(words, [*words[1:], (None, node)], strict=True):
        if isinstance(word, str) and word.startswith("--"):
            name, equals, value = word.partition("=")
            other = following if isinstance(following, str) and not following.startswith("--") else True
            found.append(Setting(name, value if equals else other, file.place(item)))
    yield from megatron.of_arguments(found)


def _call(file: File, node: ast.Call) -> Iterator[Recipe]:
    name = last_name(node.func)
    if name in POLICIES:
        yield from _policy(file, node)
    elif name in MEGATRON_CONFIGS:
        for keyword in node.keywords:
            if keyword.arg == "grad_reduce_in_fp32" and constant(keyword.value) is False and not _is_fp16(file, node):
                yield from _megatron(file, _setting(file, keyword), name)
    elif name == "OptimizerArgs" and "nanotron" in file.text:
        yield from _nanotron(file, node)
    elif name == "TrainingConfig" and "torchtitan" in file.text:
        for keyword in node.keywords:
            setting = _setting(file, keyword)
            if keyword.arg == "dtype" and setting.half:
                remedy = 'dtype="float32" keeps them, and mixed_precision_param="bfloat16" computes in half'
                yield Recipe(at=setting.at, when=(), framework="torchtitan", weights=setting, remedy=remedy)
    elif name == "DistributedDataParallelKwargs":
        yield from _accelerate_hook(file, node)
    elif name in ("register_comm_hook", "register_ddp_comm_hook"):
        yield from _hooks(file, [*node.args, *(keyword.value for keyword in node.keywords)], node)
    elif set(POLICY) <= {keyword.arg for keyword in node.keywords}:
        yield from _policy_of_another(file, node)
    else:
        handed = [k.value for k in node.keywords if k.arg in ("ddp_comm_hook", "ddp_comm_wrapper", "compression")]
        yield from _hooks(file, handed, node)
        for keyword in node.keywords:
            if keyword.arg == "fp16_compression" and constant(keyword.value) is True:
                yield _compressed(_setting(file, keyword))
            elif keyword.arg == "fp16_compression" and isinstance(keyword.value, (ast.Attribute, ast.Subscript)):
                yield replace(_compressed(_setting(file, keyword)), sure=False, left=True)  # as a setting says
            elif SUMS.fullmatch(keyword.arg or "") and not TRIED.search(file.display):
                half = _half(keyword.value)
                yield from [_sums(replace(_setting(file, keyword), value=half))] if half else []


def _nanotron(file: File, node: ast.Call) -> Iterator[Recipe]:
    """nanotron's gradients summed in the dtype of the model, where the file says that this is half and how many they are."""
    wide = next((each for each in node.keywords if each.arg == "accumulate_grad_in_fp32"), None)
    if wide is None or constant(wide.value) is not False:
        return
    others = [_setting(file, each) for each in file.every(ast.keyword) if each.arg]
    dtype = next((each.half for each in others if each.name == "dtype" and each.half), "")
    steps = next((each for each in others if each.name == "batch_accumulation_per_replica"), None)
    if dtype:
        sums = replace(_setting(file, wide), value=dtype)
        yield Recipe(at=sums.at, when=(), framework="nanotron", accumulates=sums, steps=steps)


def _policy(file: File, node: ast.Call) -> Iterator[Recipe]:
    """FSDP's mixed precision whose sums of gradients are half: by name, whatever the file chooses between, or because they take the dtype
    of the computation, and the policy changes something only where that is half. Else a setting decides, or FSDP itself."""
    given = dict(zip(POLICY, node.args, strict=False)) | {each.arg: each.value for each in node.keywords}
    reduce, compute = given.get("reduce_dtype"), given.get("param_dtype")
    if reduce is None:
        yield from _compute_alone(file, node, compute)
        return
    keyword = next((each for each in node.keywords if each.arg == "reduce_dtype"), None)
    setting = _setting(file, keyword) if keyword else Setting("reduce_dtype", constant(reduce), file.place(reduce))
    held = list(_choices(file, reduce, node))
    values = [replace(setting, value=constant(value)) for value in held]
    sure = all(value.half for value in values)
    tied = compute is not None and constant(reduce) is UNKNOWN and _is_one(reduce, compute)
    spoken = HALF.search(file.text) is not None
    if not sure and not tied and (half := _stated(file, held, node)):
        yield Recipe(at=setting.at, when=(), framework="FSDP", reduces=replace(setting, value=half), sure=False)
        return
    if sure or tied or any(value.half or (spoken and value.value is UNKNOWN) for value in values):
        half = next((value.half for value in values if value.half), _half_named(file))
        setting = setting if setting.half else replace(setting, value=half)
        left = not (sure or (tied and spoken))
        yield Recipe(at=setting.at, when=(), framework="FSDP", reduces=setting, sure=sure, left=left)


def _stated(file: File, held: list[ast.expr], call: ast.Call) -> str:
    """The half that a setting is in if nobody gives it another value, or nothing; of a table, one of which no key is known, all are."""
    found = [_half(value) for each in held if constant(each) is UNKNOWN for value in stated(file, each, call)]
    return found[0] if all(found) and found else ""


def _policy_of_another(file: File, node: ast.Call) -> Iterator[Recipe]:
    """A trainer's own settings for FSDP, whose words are FSDP's: ``shard(model, param_dtype=…, reduce_dtype=DType.bfloat16)``. Sums in
    the dtype of the computation, whichever it is, are half where the settings change anything."""
    given = {each.arg: each for each in node.keywords}
    keyword, compute = given["reduce_dtype"], given["param_dtype"].value
    if half := HALVES.get(last_name(keyword.value)):
        yield _sums(replace(_setting(file, keyword), value=half))
    elif constant(keyword.value) is UNKNOWN and _is_one(keyword.value, compute):
        tied = _sums(replace(_setting(file, keyword), value=_half_named(file)))
        yield replace(tied, sure=False, left=True)


def _default(file: File, node: ast.ClassDef | ast.FunctionDef) -> Iterator[Recipe]:
    """What the sums of FSDP are in where nobody says so: the default of a field or a parameter that stands beside ``param_dtype``."""
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
        given = {each.target.id: each.value for each in fields if isinstance(each.target, ast.Name)}
    else:
        given = defaults(node)
    for name, value in given.items():
        known = SUMS.fullmatch(name) or (name == "reduce_dtype" and "param_dtype" in given)
        if value is not None and known and (half := _half(value)):
            yield replace(_sums(Setting(name, half, file.place(value))), sure=False, left=True)


def _sums(sums: Setting) -> Recipe:
    return Recipe(at=sums.at, when=(), framework="FSDP", reduces=sums)


def _half(value: ast.expr) -> str:
    """The half that a dtype or its name says, or nothing."""
    return HALVES.get(last_name(value) or str(constant(value)), "")


def _compute_alone(file: File, node: ast.Call, compute: ast.expr | None) -> Iterator[Recipe]:
    """A policy that names the dtype of the computation only: FSDP sums gradients in that."""
    keyword = next((each for each in node.keywords if each.arg == "param_dtype"), None)
    if compute is not None and keyword is not None:
        setting = _setting(file, keyword)
        half = next(
            (s.half for each in _choices(file, compute, node) if (s := replace(setting, value=constant(each))).half), ""
        )
        if half:
            setting = replace(setting, value=half)
            yield Recipe(at=setting.at, when=(), framework="FSDP", reduces=setting, sure=False, left=True)


def _half_named(file: File) -> str:
    return "bf16" if BF16.search(file.text) or not HALF.search(file.text) else "fp16"


def _choices(file: File, value: ast.expr, call: ast.Call, depth: int = 3) -> Iterator[ast.expr]:
    """The expressions that a value can come from: the sides of a conditional expression, the one that the file decides for where it does, and
    what a name was given, locally or once and for all."""
    held = _assigned(file, value, call) if depth else []
    if isinstance(value, ast.IfExp):
        decided = truth(file, value.test, enclosing(file, value), {})
        held = [side for side, taken in ((value.body, True), (value.orelse, False)) if decided in (None, taken)]
    if not held:
        yield value
    for each in held:
        yield from _choices(file, each, call, depth - 1)


def _is_one(reduce: ast.expr, compute: ast.expr) -> bool:
    """Whether sums have the dtype of the computation, if nothing else is asked for (``other or compute``)."""
    return ast.unparse(_Fallback().visit(deepcopy(reduce))) == ast.unparse(compute)


class _Fallback(ast.NodeTransformer):
    """``a or b`` as ``b``."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        return node.values[-1] if isinstance(node.op, ast.Or) else node


def _assignment(file: File, node: ast.Assign) -> Iterator[Recipe]:
    (target, *others) = node.targets
    if others or not isinstance(target, ast.Attribute):
        return
    at = joined(file.place(target), file.place(node.value))
    if target.attr == "fp16_compression" and constant(node.value) is True:
        yield _compressed(Setting("fp16_compression", True, at))
    elif SUMS.fullmatch(target.attr) and (half := _half(node.value)):
        yield _sums(Setting(target.attr, half, at))
    elif target.attr == "main_grads_dtype" and _setting_of(file, node, at).half:
        yield Recipe(at=at, when=(), framework="Megatron", accumulates=_setting_of(file, node, at))
    elif target.attr == "grad_reduce_in_fp32" and constant(node.value) is False:
        yield from _megatron(file, Setting("grad_reduce_in_fp32", False, at), last_name(target.value))


def _setting_of(file: File, node: ast.Assign, at: Place) -> Setting:
    target = node.targets[0]
    return Setting(target.attr if isinstance(target, ast.Attribute) else "", constant(node.value), at)


def _megatron(file: File, setting: Setting, owner: str) -> Iterator[Recipe]:
    """Megatron's gradients in the dtype of the weights, where the file shows that this is bf16 and that they are trained."""
    if owner in DDP_CONFIGS and MEGATRON_POLICY.search(file.text):
        return
    if MEGATRON_BF16.search(file.text) and MEGATRON_TRAINS.search(file.text) and not INFERENCE.search(file.text):
        sums = Setting(f"{setting.name}=False", "bf16", setting.at)
        yield Recipe(at=setting.at, when=(), framework="Megatron", accumulates=sums)


def _is_fp16(file: File, call: ast.Call) -> bool:
    """Whether a configuration is one of fp16, whose loss scale is made for half sums."""
    settings = [_setting(file, keyword) for keyword in call.keywords]
    return any(
        (each.name == "fp16" and each.value is True)
        or (each.name == "params_dtype" and each.half == "fp16")
        or (each.name == "precision" and each.value in ("16-mixed", 16))
        for each in settings
    )


def _compressed(setting: Setting) -> Recipe:
    """detectron2's ``create_ddp_model(fp16_compression=True)``, also in its lazy configurations: torch's fp16 hook."""
    return Recipe(at=setting.at, when=(), framework="DDP", reduces=replace(setting, value="fp16"))


def _accelerate_hook(file: File, call: ast.Call) -> Iterator[Recipe]:
    """accelerate's choice of a hook, by its enumeration or the value of that."""
    for keyword in call.keywords:
        setting = _setting(file, keyword)
        named = last_name(keyword.value).lower() or str(setting.value)
        if keyword.arg in ("comm_hook", "comm_wrapper") and named in ("fp16", "bf16"):
            yield Recipe(at=setting.at, when=(), framework="DDP", reduces=replace(setting, value=named))


def _hooks(file: File, handed: list[ast.expr], call: ast.Call) -> Iterator[Recipe]:
    """The compressing hooks among what a call is handed: by name, through a local variable, or as functions of the file."""
    for value in handed:
        for each in _choices(file, value, call):
            name, at = last_name(each), file.place(each)
            half = name[:4].lower() if HOOK.fullmatch(name) else _half_of_hook(file, each)
            if half:
                yield Recipe(at=at, when=(), framework="DDP", reduces=Setting(name, half, at))
            elif isinstance(each, ast.Subscript):  # one of a table, by a setting
                hooks = [last_name(one) for one in stated(file, each, call)]
                name = hooks[0] if hooks and all(map(HOOK.fullmatch, hooks)) else ""
                sums = Setting(name, name[:4].lower(), at)
                yield from [Recipe(at=at, when=(), framework="DDP", reduces=sums, sure=False)] if name else []


def _half_of_hook(file: File, hook: ast.expr) -> str:
    """The half that a hook of the program's own sends, or Horovod's ``Compression``."""
    if isinstance(hook, ast.Attribute):
        return "fp16" if hook.attr == "fp16" and last_name(hook.value) == "Compression" else ""
    own = next((each for each in file.functions if isinstance(hook, ast.Name) and each.name == hook.id), None)
    calls = [each for each in walk(own) if isinstance(each, ast.Call)] if own is not None else []
    if not any(last_name(each.func) in COLLECTIVES for each in calls):
        return ""
    casts = {last_name(each.func): [constant(value) for value in each.args] for each in calls}
    if "half" in casts or any(Setting("", value, file.place(hook)).half == "fp16" for value in casts.get("to", ())):
        return "fp16"
    bf16 = any(Setting("", value, file.place(hook)).half == "bf16" for value in casts.get("to", ()))
    return "bf16" if "bfloat16" in casts or bf16 else ""


def _assigned(file: File, value: ast.expr, call: ast.Call) -> list[ast.expr]:
    """What a name holds at a call: the values assigned to it above, in the same function, or what the file says once and for all."""
    if not isinstance(value, ast.Name):
        return []
    around = enclosing(file, call)
    scope: ast.AST = around[-1] if around else file.syntax
    local = [
        node.value
        for node in walk(scope)
        if isinstance(node, ast.Assign)
        and node.lineno < call.lineno
        and any(isinstance(target, ast.Name) and target.id == value.id for target in node.targets)
    ]
    given = None if local else set_once(file, value.id, around)
    return local if given is None else [given]


def _setting(file: File, keyword: ast.keyword) -> Setting:
    at = file.place(keyword.value)
    start = file.column(keyword.lineno, keyword.col_offset)
    whole = at if keyword.lineno != at.line else type(at)(at.path, at.line, start, at.end_line, at.end_column)
    return Setting(keyword.arg or "", constant(keyword.value), whole)
