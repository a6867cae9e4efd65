"""The screen: which files can hold a precision fault at all, by their bytes alone.

Imports nothing heavy, so that a run over files that hold none stays as light as reading them.
"""

TORCH = (b"torch", b"accelerate", b"lightning", b"deepspeed", b"transformers", b"from trl", b"import trl")
WORDS = (
    b"GradScaler", b"scaler", b"unscale_", b"autocast", b"backward(", b"clip_grad", b"loss_scale", b"optim.", b"Adam", b"SGD(",
    b".step(", b"custom_op", b"autograd.Function", b"Trainer(",
)  # fmt: skip


def worth_parsing(data: bytes) -> bool:
    """Whether a file names torch (or a trainer of its field) and something that a check listens to."""
    return any(word in data for word in TORCH) and any(word in data for word in WORDS)
