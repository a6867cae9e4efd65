"""What the YAML of fine-tuning tools says about precision: torchtune, LLaMA-Factory, axolotl, Lightning's CLI, Composer, NeMo, nanotron,
Hydra's ``_target_`` (NeMo AutoModel), and accelerate's launcher.

Read in torchtune's recipes (``training.set_default_dtype(dtype)`` around the model), LLaMA-Factory's ``model/adapter.py`` (``pure_bf16``
leaves trained weights in half), axolotl's ``utils/config/__init__.py`` (``bf16`` loads the model in bf16; DeepSpeed and FSDP make fp32
masters of that, DDP and a single GPU do not), Composer's ``get_mixed_precision`` (``PURE`` reduces in half), nanotron's ``helpers.py``
(``accumulate_grad_in_fp32`` makes an ``FP32GradientAccumulator``) and torch_xla's ``XLA_DOWNCAST_BF16``. Adapters are left alone: their
dtype is another question.
"""

from __future__ import annotations

import re

from precisionlint.patterns import regex
from precisionlint.recipes import Recipe, Setting
from precisionlint.subjects.tree import Table, tables

ADAPTER = regex(r"(?:^|[._])(?:q?lora|dora)(?:$|[._])")
PLAIN = regex(
    r"(?:torch\.optim|bitsandbytes\.optim|torchao\.optim|torchao\.prototype\.low_bit_optim)\.|(?:paged_)?(?:adamw|lion|ademamix)(?:_|$)|sgd$|adafactor$"
)
"""Optimizers that are known to add an update to the weights as they are. Others may have masters or make up for the rounding."""
COMPOSER = {"amp_bf16": "bf16", "amp_fp16": "fp16"}
TRUE_PRECISION = {"bf16-true": "bf16", "16-true": "fp16"}
FP16_SUMS = ("fp16_compression", "fp16_allreduce", "FP16_ALLREDUCE")
"""Switches of detectron2, Horovod's examples and SlowFast: gradients are summed over ranks in fp16."""
OPTIMIZERS = tuple(
    f"{above}{key}"
    for above in ("optimizer.", "model.optimizer.", "model.init_args.optimizer.", "model.optim.")
    for key in ("class_path", "_target_")
)
ADAPTERS = regex(r"lora|peft|quantize|(?<!modality_)(?<!vision_)(?<!audio_)(?<!speech_)adapter", re.IGNORECASE)
"""A key that says so where what is trained stands beside the weights; what joins two modalities is a part of the model."""
FROZEN = regex(r"freeze|frozen", re.IGNORECASE)
"""A key that says so where only a part of the weights is trained, which part the file leaves open."""


def torchtune(table: Table) -> Recipe | None:
    """A recipe of torchtune that trains every weight."""
    model, optimizer, dtype = (
        table.text("model._component_"),
        table.setting("optimizer._component_"),
        table.setting("dtype"),
    )
    if optimizer is None or dtype is None or not dtype.half or not model or ADAPTER.search(model):
        return None
    if not PLAIN.match(str(optimizer.value)) or table.truth("optimizer.bf16_stochastic_round"):
        return None
    return Recipe(
        at=table.at,
        when=(),
        framework="torchtune",
        weights=dtype,
        optimizer=optimizer,
        rate=table.setting("optimizer.lr"),
        remedy="dtype: fp32 keeps them, or an optimizer with stochastic rounding",
    )


def llama_factory(table: Table) -> Recipe | None:
    """A LLaMA-Factory run that trains weights in pure bf16."""
    pure = table.setting("pure_bf16")
    optimizer = table.setting("optim")
    if pure is None or pure.value is not True or table.text("finetuning_type") not in ("full", "freeze"):
        return None
    if optimizer is not None and not PLAIN.match(str(optimizer.value)):
        return None
    return Recipe(
        at=table.at,
        when=(),
        framework="LLaMA-Factory",
        weights=Setting(pure.name, "bf16", pure.at),
        optimizer=optimizer,
        rate=table.setting("learning_rate"),
        remedy="bf16: true trains fp32 weights under autocast",
    )


def axolotl(table: Table) -> Recipe | None:
    """A full fine-tuning of axolotl's on one GPU or under DDP. The command line may add DeepSpeed: likely, not certain."""
    half = next(
        (s for s in (table.setting("bf16"), table.setting("bfloat16")) if s and s.value in (True, "auto", "full")), None
    )
    mine = {"base_model", "micro_batch_size", "datasets", "sequence_len"} & table.entries.keys()
    elsewhere = any(
        table.filled(key) for key in ("adapter", "deepspeed", "fsdp", "fsdp_config", "lora_model_dir", "peft")
    )
    optimizer = table.setting("optimizer")
    if half is None or "base_model" not in mine or len(mine) < 3 or elsewhere or optimizer is None:
        return None
    if not PLAIN.match(str(optimizer.value)) or table.filled("unfrozen_parameters"):
        return None
    return Recipe(
        at=table.at,
        when=(),
        framework="axolotl",
        weights=Setting(half.name, "bf16", half.at),
        optimizer=optimizer,
        rate=table.setting("learning_rate"),
        remedy="deepspeed or fsdp_config keeps fp32 masters",
        sure=False,
    )


LOADS = regex(r"\.from_(?:pretrained|config)$")
"""What a recipe instantiates that takes ``torch_dtype`` for the dtype of its weights."""
MASTERS = regex(r"megatron|deepspeed", re.IGNORECASE)
"""How weights are distributed by engines with fp32 masters of their own."""


def instantiated(table: Table) -> Recipe | None:
    """A recipe of NeMo AutoModel's, or of Hydra's: ``_target_`` names what loads the model, and the optimizer over all of it. The command
    line may say other dtypes: likely, not certain."""
    loads, optimizer = table.text("model._target_"), table.setting("optimizer._target_")
    dtype = table.setting("model.torch_dtype") or table.setting("model.dtype")
    if optimizer is None or dtype is None or not dtype.half or not LOADS.search(loads or ""):
        return None
    spread = f"{table.text('distributed.strategy')} {table.text('distributed._target_')}"
    if not PLAIN.match(str(optimizer.value)) or ADAPTER.search(loads or "") or MASTERS.search(spread):
        return None
    if any(table.filled(key) for key in ("peft", "lora", "adapter", "deepspeed", "model.quantization_config")):
        return None
    return Recipe(
        at=table.at,
        when=(),
        framework="AutoModel" if (loads or "").startswith("nemo_automodel.") else "Hydra",
        weights=dtype,
        optimizer=optimizer,
        rate=table.setting("optimizer.lr"),
        remedy="torch_dtype: float32 keeps them, or an optimizer with fp32 masters",
        sure=False,
    )


SHARDS = regex(r"^(?:dp|tp)_(?:size|shard|replicate)|fsdp|shard|cast_forward_inputs|buffer_dtype|output_dtype")
"""What stands beside ``reduce_dtype`` where it is FSDP's."""


def reduction(table: Table) -> Recipe | None:
    """Sums of gradients over ranks: FSDP's policies as they stand in YAML, Composer's ``PURE``, the optimizers of NeMo, and hooks of DDP."""
    sharded = "param_dtype" in table or any(SHARDS.search(key) for key in table.entries)
    setting = table.setting("reduce_dtype") if sharded else None
    setting = setting or table.setting("grad_sync_dtype") or table.setting("fsdp_grad_reduce_dtype")
    setting = setting or table.setting("ddp_comm_hook")
    switch = next((s for name in FP16_SUMS if (s := table.setting(name)) is not None), None)
    if switch is not None and switch.value is True:
        setting = Setting(switch.name, "fp16", switch.at)
    pure, half = table.setting("fsdp_config.mixed_precision"), COMPOSER.get(table.text("precision"))
    if pure is not None and half is not None and "optimizer" in table and str(pure.value).upper() == "PURE":
        setting = Setting(pure.name, half, pure.at)
    if setting is None or not setting.half:
        return None
    return Recipe(at=setting.at, when=(), framework="FSDP", reduces=setting)


def nanotron(table: Table) -> Recipe | None:
    """A run of nanotron that sums the gradients of its micro-batches in the dtype of the model."""
    wide, dtype = table.setting("optimizer.accumulate_grad_in_fp32"), table.setting("model.dtype")
    if wide is None or wide.value is not False or dtype is None or not dtype.half:
        return None
    sums = Setting(wide.name, dtype.half, wide.at)
    steps = table.setting("tokens.batch_accumulation_per_replica")
    return Recipe(at=wide.at, when=(), framework="nanotron", accumulates=sums, steps=steps)


def main_grads(table: Table) -> Recipe | None:
    """Megatron's dtype of summed gradients, wherever a trainer of its own keeps that setting."""
    sums = table.setting("main_grads_dtype")
    if sums is None or not sums.half:
        return None
    return Recipe(at=sums.at, when=(), framework="Megatron", accumulates=sums)


def lightning(table: Table) -> Recipe | None:
    """Lightning's true precision over a plain optimizer: LightningCLI and Hydra (``trainer.precision``), and litgpt (``precision``)."""
    precision = table.setting("trainer.precision") or table.setting("precision")
    dtype = TRUE_PRECISION.get(str(precision.value)) if precision is not None else None
    where = next((path for path in OPTIMIZERS if table.text(path)), None)
    if precision is None or dtype is None or where is None:
        return None
    optimizer = table.setting(where)
    parts = list(tables(table))
    if optimizer is None or not PLAIN.match(str(optimizer.value)) or _says(ADAPTERS, parts):
        return None
    above = where.rpartition(".")[0]
    return Recipe(
        at=table.at,
        when=(),
        framework="Lightning",
        weights=Setting(precision.name, dtype, precision.at),
        optimizer=optimizer,
        rate=table.setting(f"{above}.lr") or table.setting(f"{above}.init_args.lr"),
        remedy=f'"{str(precision.value).replace("true", "mixed")}" keeps them',
        left=_says(FROZEN, parts),
    )


def _says(what: re.Pattern[str], parts: list[Table]) -> bool:
    """Whether one of the tables speaks of that."""
    return any(what.search(key) and table.filled(key) for table in parts for key in table.entries)


def accelerate_sums(table: Table) -> Recipe | None:
    """accelerate's launcher with DeepSpeed's engine in bf16: it sums micro-batches in the dtype of the computation, unless the sums are moved
    to the host or a configuration of DeepSpeed's own says otherwise."""
    settings = table.table("deepspeed_config")
    if settings is None or table.text("mixed_precision") != "bf16" or table.text("distributed_type") != "DEEPSPEED":
        return None
    steps, offload = settings.setting("gradient_accumulation_steps"), settings.setting("offload_optimizer_device")
    if (
        steps is None
        or (offload is not None and offload.value not in (None, "none"))
        or "deepspeed_config_file" in settings
    ):
        return None
    sums = Setting(f"deepspeed_config.{steps.name}", "bf16", steps.at)
    bf16 = table.setting("mixed_precision")
    return Recipe(at=table.at, when=(), framework="DeepSpeed", bf16=bf16, accumulates=sums, steps=steps, unasked=True)


def accelerate(table: Table) -> Recipe | None:
    """accelerate's launcher with XLA's downcast: every float32 of the program, weights and optimizer state too, becomes bf16."""
    downcast = table.setting("downcast_bf16")
    if downcast is None or str(downcast.value).lower() not in ("yes", "true", "y", "on", "1"):
        return None
    if table.text("distributed_type") not in ("TPU", "XLA"):
        return None
    return Recipe(
        at=table.at,
        when=(),
        framework="accelerate",
        weights=Setting(downcast.name, "bf16", downcast.at),
        remedy="mixed_precision: bf16 without the downcast keeps the weights in fp32",
    )
