"""What a configuration says about precision: facts that no timeline has, since nothing of the program is seen in it.

``subjects/`` makes them from JSON, YAML, shell scripts and the dicts and config objects of Python source; the checks judge them.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from precisionlint.events import Event
from precisionlint.findings import Place

UNKNOWN: Any = object()
"""The value of a setting that is computed somewhere else."""

HALVES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "torch.half": "fp16",
}
"""The spellings of the two halves -> the one that messages use."""


class Setting(Struct, frozen=True):
    """One setting: its name as it is written (with the names around it, ``bf16.enabled``), its value (a string, number, bool, None, or
    ``UNKNOWN``), and where it stands."""

    name: str
    value: Any
    at: Place

    @property
    def half(self) -> str:
        """``"bf16"``, ``"fp16"``, or nothing where the value is no such dtype."""
        return HALVES.get(self.value.strip().lower(), "") if isinstance(self.value, str) else ""

    @property
    def number(self) -> float | None:
        """The value as a number, also where YAML takes it for a string (``1e-5``)."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float, str)):
            return None
        try:
            return float(self.value)
        except ValueError:
            return None


class Recipe(Event, frozen=True, eq=False):
    """One configuration of one framework; a field is None where the configuration does not give it.

    ``fp16``, ``bf16``: the switches. ``scale``: a loss scale that stays. ``stray``: loss-scale settings of a block that has none.
    ``accumulates``, ``reduces``: the dtype in which gradients are summed over micro-batches and over ranks. ``steps``: micro-batches an
    update. ``weights``: the dtype of trainable weights that have no fp32 copy, ``optimizer`` what steps them, ``rate`` its learning rate.
    ``remedy``: what keeps an fp32 copy. ``sure``: nothing that the file does not show can change it; ``left``: a setting
    of its own decides it elsewhere, or the framework where there is none. ``unasked``: nothing asks for the dtype of the sums over
    micro-batches, and the framework has its own.
    """

    framework: str
    fp16: Setting | None = None
    bf16: Setting | None = None
    scale: Setting | None = None
    stray: tuple[Setting, ...] = ()
    accumulates: Setting | None = None
    reduces: Setting | None = None
    steps: Setting | None = None
    weights: Setting | None = None
    optimizer: Setting | None = None
    rate: Setting | None = None
    remedy: str = ""
    sure: bool = True
    left: bool = False
    unasked: bool = False
