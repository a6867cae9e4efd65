"""The screen: which files can hold a precision fault at all, by their bytes alone.

Imports nothing heavy, so that a run over files that hold none stays as light as reading them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

TORCH = (
    b"torch", b"accelerate", b"lightning", b"deepspeed", b"transformers", b"from trl", b"import trl",
    b"unscale_(", b"GradScaler", b"loss_scaler",
)  # fmt: skip
WORDS = (
    b"GradScaler", b"scaler", b"unscale_", b"autocast", b"backward(", b"clip_grad", b"loss_scale", b"optim.", b"Adam", b"SGD(",
    b".step(", b"custom_op", b"autograd.Function", b"Trainer(", b"Trainer)",
)  # fmt: skip
AVERAGES = (b"decay", b".lerp_(", b"ema_", b"_ema")
HALVES = (b".half()", b"float16")
"""With what an average of weights is kept, and in half: a file of its own may hold nothing else."""


def worth_parsing(data: bytes, own: tuple[bytes, ...] = ()) -> bool:
    """Whether a file names torch (a trainer of its field, or what nothing else has) and something that a check listens to, or one of these words."""
    if own and any(word in data for word in own):
        return True
    if not any(word in data for word in TORCH):
        return False
    return any(word in data for word in WORDS) or all(
        any(word in data for word in words) for words in (AVERAGES, HALVES)
    )


def own_words(frameworks: Iterable[tuple[str, str]]) -> Iterator[bytes]:
    """The last words of the names that the settings say what they act as."""
    return (name.rpartition(".")[2].encode() for name, _ in frameworks)
