"""Ops of JAX programs in the dtype in which they are handed their arrays: jax lifts none of them, and callers decide."""

from __future__ import annotations

from precisionlint.checks.base import Hit
from precisionlint.facts import AsHanded
from precisionlint.valueflow import Shows

NORM = "norm"
DECAY = "exp"


def told(rule: str, event: AsHanded) -> Hit:
    """What is lost where the array of an op is half."""
    if event.what == NORM:
        message = (
            f"the mean of squares is taken in the dtype of '{event.name}', which jax does not lift: in fp16 300 squared is inf, in bf16 the norm "
            "keeps 8 bits; .astype(jnp.float32) first, and cast the result back"
        )
    elif event.what == DECAY:
        message = (
            f"exp of '{event.name}' is taken in the dtype of the parameters: where they are bf16 a decay of 0.999 is 1.0; "
            ".astype(jnp.float32) first"
        )
    else:
        message = (
            f"{event.what} is stored in the dtype of '{event.name}', which jax does not lift: bf16 is off by up to 0.03 at values of 10; give it "
            f"{event.name}.astype(jnp.float32)"
        )
    return Hit(rule, event.at, message, (), confidence="possible", needs=(Shows("half"),))
