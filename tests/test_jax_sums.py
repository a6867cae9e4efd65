"""Trees of gradients that a JAX program adds up in half, whichever function adds and whichever loop carries them; and sums that are not half."""

from pathlib import Path

import pytest

from precisionlint import check

PROGRAM = """import functools

import jax
import jax.numpy as jnp
from loops import fold_left


def accumulated(f, model, batches):
    empty = (jnp.zeros(()), jax.tree_util.tree_map(lambda m: jnp.zeros_like(m, dtype=jnp.{dtype}), model), 0)

    def microbatch(sofar, batch):
        loss, grads = f(model, batch)
        total, sums, count = sofar

        def add(x, y):
            {add}
            return x

        return loss + total, jax.tree_util.tree_map(add, sums, grads), count + 1  # <-

    return {loop}
"""


def told(folder: Path, text: str) -> list[int]:
    (folder / "train.py").write_text(text, encoding="utf-8")
    report = check([str(folder / "train.py")], select=["jax-half-accumulation"])
    assert not report.errors
    return [each.place.line for each in report.findings]


@pytest.mark.parametrize(
    "loop",
    [
        "fold_left(microbatch, empty, *batches)",
        "functools.reduce(microbatch, batches, empty)",
        "jax.lax.fori_loop(0, 8, lambda i, sofar: microbatch(sofar, batches[i]), empty)",
    ],
)
def test_trees_that_a_function_of_the_program_adds(tmp_path: Path, loop: str) -> None:
    text = PROGRAM.format(dtype="bfloat16", add="x += y.astype(x.dtype)", loop=loop)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# <-")]
    assert told(tmp_path, text) == lines * ("lambda" not in loop)  # a body that hands on is not followed


@pytest.mark.parametrize(
    ("dtype", "add", "loop"),
    [
        ("float32", "x += y", "fold_left(microbatch, empty, *batches)"),
        ("bfloat16", "x += y", "fold_left(microbatch, empty, *batches)"),  # of fp32 gradients, which widen it
        ("bfloat16", "x = jnp.maximum(x, y)", "fold_left(microbatch, empty, *batches)"),
        ("bfloat16", "x += y", "logical.reduce(batches, empty)"),
        ("bfloat16", "x += y", "empty"),
    ],
)
def test_sums_in_fp32_and_what_adds_nothing(tmp_path: Path, dtype: str, add: str, loop: str) -> None:
    assert told(tmp_path, PROGRAM.format(dtype=dtype, add=add, loop=loop)) == []
