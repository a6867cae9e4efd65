"""torch's two families of TF32 switches, as torch 2.9 and later keep them: what each sets, and which readings raise.

The old ones (``set_float32_matmul_precision``, ``allow_tf32``) set both families; the new ones (``fp32_precision``) set only theirs.
An old getter compares the two and raises RuntimeError where they differ. Read in ATen/Context.cpp, and held against torch by a test.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

NEW = {
    "torch.backends.fp32_precision": "all",
    "torch.backends.cudnn.fp32_precision": "cuda",
    "torch.backends.cuda.matmul.fp32_precision": "cuda.matmul",
    "torch.backends.cudnn.conv.fp32_precision": "cuda.conv",
    "torch.backends.cudnn.rnn.fp32_precision": "cuda.rnn",
    "torch.backends.mkldnn.fp32_precision": "all",  # as torch 2.13 has it
    "torch.backends.mkldnn.matmul.fp32_precision": "mkldnn.matmul",
}
"""The new switches, and what they decide."""
MATMUL, CUDNN = "torch.backends.cuda.matmul.allow_tf32", "torch.backends.cudnn.allow_tf32"
GET, SET, FLAGS = (
    "torch.get_float32_matmul_precision",
    "torch.set_float32_matmul_precision",
    "torch.backends.cudnn.flags",
)
STAGES = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}
"""set_float32_matmul_precision: what it makes of CUDA's and of mkldnn's switch."""
BEFORE = {"cuda.conv": "tf32", "cuda.rnn": "tf32"}
"""The two that torch begins with; a wider switch overrides them."""

Values = tuple[tuple[str, str | None], ...]


class Switches(Struct, frozen=True):
    """``stage``: what the old switch of matmuls says, ``cudnn``: that of cuDNN; ``new``: what was set of the new ones. None: set to
    what nobody knows."""

    stage: str | None = "highest"
    cudnn: bool | None = True
    new: Values = ()

    def precision(self, switch: str) -> str | None:
        """What a new switch comes to: its own value, or that of the next wider one that is set."""
        new = dict(self.new)
        for name in (switch, switch.partition(".")[0], "all"):
            value = new.get(name, "none")
            if value != "none":
                return value
        return BEFORE.get(switch, "none") if switch not in new else "none"

    def with_(self, **changes: str | None) -> Values:
        return tuple(sorted({**dict(self.new), **{name.replace("_", "."): to for name, to in changes.items()}}.items()))

    def set(self, name: str, value: object) -> Switches:
        """After ``name`` (of either family) was set; a value that is neither a string nor a bool is one that nobody knows."""
        if name in NEW:
            known = value if isinstance(value, str) else None
            return replace(self, new=self.with_(**{NEW[name]: known}))
        if name == SET:
            cuda, mkldnn = STAGES.get(value, (None, None)) if isinstance(value, str) else (None, None)
            return replace(self, stage=value if cuda else None, new=self.with_(cuda_matmul=cuda, mkldnn_matmul=mkldnn))
        allowed = value if isinstance(value, bool) else None
        to = None if allowed is None else "tf32" if allowed else "none"
        if name == MATMUL:
            stage = None if allowed is None else "high" if allowed else "highest"
            return replace(self, stage=stage, new=self.with_(cuda_matmul="ieee" if to == "none" else to))
        if name == CUDNN:
            return replace(self, cudnn=allowed, new=self.with_(cuda_conv=to, cuda_rnn=to))
        return self

    def clash(self, getter: str) -> str | None:
        """The new switches' value with which an old getter finds itself at odds, or None if it can be read."""
        matmul, products = self.precision("cuda.matmul"), self.precision("mkldnn.matmul")
        if getter == MATMUL and None not in (self.stage, matmul):
            return matmul if (self.stage != "highest") != (matmul == "tf32") else None
        if getter == GET and self.stage is not None:
            if matmul == "tf32" and self.stage == "highest":
                return matmul
            at_odds = {"bf16": "medium", "tf32": "high"}.get(products or "", self.stage) != self.stage
            return products if at_odds else None
        if getter in (CUDNN, FLAGS) and self.cudnn is not None:
            for value in (self.precision("cuda.conv"), self.precision("cuda.rnn")):
                if value is not None and (value == "tf32") != self.cudnn:
                    return value
        return None
