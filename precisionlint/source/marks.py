"""Patterns of many words, looked for as fast as plain words are.

Python's ``re`` tries every alternative at every character. To say that a text holds none of some plain words is a hundred times faster,
and most texts hold none.
"""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.patterns import regex


class Marks:
    """Alternatives of a pattern. Each stands behind the plain word that a text must hold for it to match; a word without one is itself
    what is looked for."""

    def __init__(self, *plain: str, patterns: dict[str, str] | None = None) -> None:
        self.plain = plain
        self.patterns = tuple((word, regex(pattern)) for word, pattern in (patterns or {}).items())

    def found(self, text: str, start: int = 0, end: int | None = None) -> bool:
        """Whether a text, or the part of it from ``start`` to before ``end``, holds one of them."""
        stop = len(text) if end is None else end
        return any(text.find(word, start, stop) >= 0 for word in self.plain) or any(
            text.find(word, start, stop) >= 0 and pattern.search(text, start, stop) is not None
            for word, pattern in self.patterns
        )

    def places(self, text: str) -> Iterator[int]:
        """Where they stand, in no order; of one that begins before its plain word, a place in the same line."""
        for word in self.plain:
            at = text.find(word)
            while at >= 0:
                yield at
                at = text.find(word, at + 1)
        for word, pattern in self.patterns:
            if word in text:
                yield from (match.start() for match in pattern.finditer(text))


TRIGGER = Marks(
    ".step(", ".scale(", "unscale_", "zero_grad", "get_scale", "utocast", "parameters(", "float16", "from_pretrained", "state_dict",
    "torch.save", "requires_grad", "custom_op", "custom_fwd", "custom_bwd", ".apply(", "ptim", "clip_grad", "no_sync", "nullcontext",
    "contextmanager", "set_default_dtype", "matmul_precision", "allow_tf32", "fp32_precision", "caler", "fp16", "bf16",
    "loss_scale", "mixed_precision", "param_groups", "triton_op", "wrap_triton", "torch.ops.", "torch.library", "Trainer(", "Trainer)",
    "Trainer,", "TrainingArguments",
    patterns={
        "backward": r"\bbackward\w*\(",
        "grad": r"\.grad\b",
        "half": r"\bhalf\b",
        "float32": r"float32\b",
        "amp": r"\bamp\b|_amp\b|\bamp_",
        "triton": r"\btriton\.\w",
        "precision=": r"\bprecision=",
        "_peft_model": r"[a-z]_peft_model",
    },
)  # fmt: skip
"""What a function's text must hold for its body to matter."""

STRONG = Marks(
    "clip_grad", "Trainer(", "Trainer)", "Trainer,", "on_after_backward",
    patterns={
        "unscale_": r"unscale_(?!\w*layer)",
        ".step(": r"(?<!cheduler)(?<!chedulers)(?<!sched)\.step\(",
        "backward": r"(?<!def )\bbackward\w*\(",
        "caler": r"GradScaler|(?<![Uu]p)[Ss]caler\s*[.(\[]",
        "from_pretrained": r"from_pretrained\([^()]*dtype=torch\.(?:b?float16|half)",
        "parameters": r"\b(?:AdamW?|SGD)\(\s*(?:params=)?\w*model\.parameters\(",
    },
)  # fmt: skip
"""What a program's text must reach for it to be able to hold a fault at all; see ``NEEDING`` for what does so beside something else. A
scheduler's step is none: those of diffusion models denoise, those of learning rates matter beside a scaler's; nor is a scaler that is only
handed on, or the definition of a backward."""

OPS = Marks(
    "custom_op", "autograd.Function", "torch.ops.", "triton_op", "wrap_triton",
    patterns={
        "apply": r"[A-Z]\w*\.apply\(",
        "triton": r"\btriton\.\w",
    },
)  # fmt: skip
"""What calls an op that autocast may not know."""

AVERAGES = Marks(
    ".lerp_(",
    patterns={
        "decay": r"\b1(?:\.0?)? ?- ?(?:\w+\.)*\w*decay\b",
        "momentum": r"\b1(?:\.0?)? ?- ?(?:\w+\.)*\w*momentum\b",
        "ema": r"\b1(?:\.0?)? ?- ?(?:\w+\.)*\w*ema\b",
        "alpha": r"\b1(?:\.0?)? ?- ?(?:\w+\.)*\w*alpha\b",
        "tau": r"\b1(?:\.0?)? ?- ?(?:\w+\.)*\w*tau\b",
    },
)
"""What averages weights."""

AUTOCAST = Marks(patterns={"utocast": r"utocast(?:\w*\(|\b(?!\s*=[^=]))"})
"""What may enter a region; an argument that is called after one enters none."""
HALF = Marks("half", "float16", "fp16", "bf16", "utocast", "dtype", "recision")
"""What a text that makes something half holds."""

MADE = Marks(
    patterns={"dtype": r"\bdtype['\"]?\s*[=:]\s*(?:\w+\.)*(?:\w*_)?(?:dtype|b?float16|half)\b|\.to\([^()]*dtype\)"}
)
"""What makes layers or parameters in a dtype that it chooses or is handed."""

MARKS = {
    "event": TRIGGER,
    "strong": STRONG,
    "op": OPS,
    "average": AVERAGES,
    "autocast": AUTOCAST,
    "half": HALF,
    "made": MADE,
}
NEEDING = {"op": "autocast", "average": "half"}
"""What is strong only beside something else: an op that autocast does not know where there is an autocast, an average of half weights."""

GUARDED = Marks(
    ".step(", ".scale(", "unscale_", "clip_grad", "zero_grad", "utocast", "GradScaler", "scaler", ".half(", "float16", "optim.", "no_sync",
    patterns={
        "backward": r"\bbackward\w*\(",
        "grad": r"\.grad\b",
    },
)  # fmt: skip
"""What a branch must hold for the test before it to be remembered."""
