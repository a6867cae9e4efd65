"""What DeepSpeed's configuration says about precision: JSON files and dicts, and gpt-neox, which has the same keys beside its own.

Read in DeepSpeed's ``runtime/config.py``, ``runtime/engine.py`` and ``runtime/precision_config.py``. Settings that are ``"auto"`` come
from the trainer and are unknown here.
"""

from __future__ import annotations

from precisionlint.recipes import UNKNOWN, Recipe, Setting
from precisionlint.subjects.tree import Scalar, Table

MARKS = frozenset(
    {
        "zero_optimization",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "steps_per_print",
        "wall_clock_breakdown",
        "zero_allow_untested_optimizer",
        "communication_data_type",
        "data_types",
    }
)
"""Keys of which a DeepSpeed configuration has at least one beside its precision blocks."""
BLOCKS = frozenset({"fp16", "bf16", "bfloat16", "amp", "optimizer", "scheduler"})
"""Or it has a switch for each of the two halves, and nothing but these."""

QUICK = 100
"""Good steps a doubling within which a dynamic scale that begins too low is soon where it should be."""
SCALE_KEYS = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")


def recipe(table: Table) -> Recipe | None:
    """The recipe of a table that is a DeepSpeed configuration, else None."""
    blocks = [block for block in (table.table("fp16"), table.table("bf16"), table.table("bfloat16")) if block]
    if not (blocks or table.table("data_types") or "communication_data_type" in table):
        return None
    switches = [block for block in ("fp16", "bf16", "bfloat16") if table.setting(f"{block}.enabled") is not None]
    if not MARKS & table.entries.keys() and (len(switches) < 2 or table.entries.keys() - BLOCKS):
        return None
    bf16 = table.table("bf16") or table.table("bfloat16")
    name = "bf16" if table.table("bf16") else "bfloat16"
    steps = _decided(table.setting("gradient_accumulation_steps")) or _steps_of_batches(table)
    accumulates = table.setting("data_types.grad_accum_dtype")
    unasked = accumulates is None and not OFFLOADED & _zero(table) and _switched_on(table, name) and steps is not None
    if unasked and steps is not None:  # get_data_types: "if grad_accum_dtype is None: grad_accum_dtype = model_dtype"
        accumulates = Setting(steps.name, "bf16", steps.at)
    return Recipe(
        at=table.at,
        when=(),
        framework="DeepSpeed",
        fp16=_switch(table, "fp16"),
        bf16=_switch(table, name),
        scale=_scale(table),
        stray=_stray(bf16, name),
        accumulates=accumulates,
        reduces=table.setting("communication_data_type"),
        steps=steps,
        unasked=unasked,
        weights=_half_masters(table, name),
        optimizer=table.setting("optimizer.type"),
        rate=_decided(table.setting("optimizer.params.lr")),
        remedy="without the setting the master weights are fp32",
    )


OFFLOADED = frozenset({"offload_optimizer", "cpu_offload"})
"""What moves the sums of gradients to the host, where they have a dtype of their own."""


def _zero(table: Table) -> frozenset[str]:
    zero = table.table("zero_optimization")
    return frozenset(zero.entries) if zero is not None else frozenset()


def _switched_on(table: Table, block: str) -> bool:
    switch = _switch(table, block)
    return switch is not None and switch.value is True


def _switch(table: Table, block: str) -> Setting | None:
    """Whether a block is switched on. gpt-neox names the dtype too: ``"precision": "bfloat16"``."""
    return _decided(table.setting(f"{block}.enabled")) or _decided(table.setting(f"{block}.fp16"))


def _scale(table: Table) -> Setting | None:
    """The loss scale, if it stays or is long what it began with: a static one, or the first of a dynamic one that begins at 1 or below."""
    static, power = table.setting("fp16.loss_scale"), table.setting("fp16.initial_scale_power")
    window = table.setting("fp16.loss_scale_window")
    dynamic = static is None or static.number == 0
    slow = window is None or (window.number or 0) > QUICK
    if dynamic and slow and power is not None and power.number is not None and power.number <= 0:
        return Setting(power.name, 2.0**power.number, power.at)
    return static


def _decided(setting: Setting | None) -> Setting | None:
    """A setting whose ``"auto"`` is unknown."""
    if setting is not None and setting.value == "auto":
        return Setting(setting.name, UNKNOWN, setting.at)
    return setting


def _steps_of_batches(table: Table) -> Setting | None:
    """DeepSpeed takes as many micro-batches as the batch sizes ask for: unknown where a script fills one of them in."""
    whole, micro = table.setting("train_batch_size"), table.setting("train_micro_batch_size_per_gpu")
    if whole is None or micro is None or UNKNOWN not in (whole.value, micro.value):
        return None
    return Setting(whole.name, UNKNOWN, whole.at)


def _stray(bf16: Table | None, name: str) -> tuple[Setting, ...]:
    """The settings of a loss scale that stand in the block that has none."""
    found = ((key, bf16.entries.get(key)) for key in SCALE_KEYS) if bf16 is not None else ()
    settings = (
        Setting(f"{name}.{key}", entry.node.value, entry.at)
        for key, entry in found
        if entry is not None and isinstance(entry.node, Scalar)
    )
    return tuple(sorted(settings, key=lambda setting: setting.at))


def _half_masters(table: Table, bf16: str) -> Setting | None:
    """The setting that keeps the master weights in half, as the dtype that they then have."""
    for block, dtype in ((bf16, "bf16"), ("fp16", "fp16")):
        setting = table.setting(f"{block}.{dtype}_master_weights_and_grads")
        if setting is not None and setting.value is True:
            return Setting(setting.name, dtype, setting.at)
    return None
