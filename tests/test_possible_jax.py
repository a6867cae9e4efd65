"""JAX programs whose norms, log-probabilities and decays are in the dtype that they are handed: possible, and nothing of what they widen."""

from pathlib import Path

import pytest

from precisionlint import check

RULES = ["norm-without-upcast", "softmax-in-half", "exp-in-half"]
HEAD = """import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

DTYPE = jnp.bfloat16


"""
BROKEN = {
    "a norm in the dtype of its module": """
class RMSNorm(nn.Module):
    eps: float = 1e-6
    dtype: jnp.dtype = jnp.bfloat16

    def _norm(self, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)  # <- norm-without-upcast

    def __call__(self, x):
        return self._norm(x.astype(self.dtype)).astype(self.dtype)
""",
    "a norm whose parts have names": """
def normalized(x, weight, eps):
    squares = x**2
    variance = jnp.mean(squares, axis=-1, keepdims=True)  # <- norm-without-upcast
    return x / jnp.sqrt(variance + eps) * weight
""",
    "log-probabilities of logits as they come": """
def loss(logits, labels, temperature):
    log_probs = jax.nn.log_softmax(logits[:, :-1] / temperature)  # <- softmax-in-half
    return -jnp.sum(log_probs * labels)


def evaluate(model, params, tokens, labels):
    logits = model.apply(params, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # <- softmax-in-half
""",
    "a decay of the parameters": """
def decay(params, a):
    return -jnp.exp(params["A_log"]) * jax.nn.softplus(a)  # <- exp-in-half
""",
}
SOUND = {
    "what is cast first, wherever that is": """
class RMSNorm(nn.Module):
    dtype: jnp.dtype = jnp.bfloat16

    def _norm(self, x):
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)

    def __call__(self, x):
        x = x.astype(jnp.promote_types(self.dtype, jnp.float32))
        return self._norm(x).astype(self.dtype)


def normalized(x):
    dtype = x.dtype
    x = x.astype(DTYPE_OF_NORMS)
    return (x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)).astype(dtype)


def loss(logits, labels, compute_dtype):
    logits = logits.astype(compute_dtype)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * labels, axis=-1)


def decay(params, a):
    return -jnp.exp(params["A_log"].astype(jnp.float32)) * jax.nn.softplus(a)
""",
    "what is no norm, no logits and no decay": """
def attention(scores):
    return jax.nn.logsumexp(scores, axis=-1), jnp.sqrt(jnp.mean(scores) + 1e-6), jnp.exp(scores)
""",
}


def told(folder: Path, text: str) -> list[tuple[int, str, str]]:
    (folder / "layers.py").write_text(text, encoding="utf-8")
    report = check([str(folder / "layers.py")], select=RULES, min_confidence="possible")
    assert not report.errors
    return [(each.place.line, each.rule, each.confidence) for each in report.findings]


@pytest.mark.parametrize("name", [*BROKEN, *SOUND])
def test_what_jax_does_in_the_dtype_it_is_handed(tmp_path: Path, name: str) -> None:
    text = HEAD + {**BROKEN, **SOUND}[name]
    lines = [(number, line.partition("  # <- ")[2]) for number, line in enumerate(text.splitlines(), 1)]
    assert told(tmp_path, text) == [(number, rule, "possible") for number, rule in lines if rule]


def test_a_file_that_knows_of_no_dtype_is_left_alone(tmp_path: Path) -> None:
    plain = HEAD.replace("DTYPE = jnp.bfloat16\n", "") + BROKEN["a decay of the parameters"]
    assert told(tmp_path, plain) == []
