"""JAX programs: sums and parameters in half, which XLA rounds as it is told."""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.checks.base import Automaton, Family, Hit, Seen
from precisionlint.checks.master_weights import SIGNIFICANT, severity_at
from precisionlint.facts import HalfParams, HalfSum, RoundedProduct

FAMILY = Family(Automaton("jax", None))

GROWS = {
    "loop": "grows in a loop",
    "fold": "is carried from one input to the next",
    "scatter": "collects what is scattered to the same places",
    "kernel": "collects the products of a kernel's blocks",
}


@FAMILY.rule("jax-half-accumulation", HalfSum, RoundedProduct)
def jax_half_accumulation(state: None, event: HalfSum | RoundedProduct) -> Iterator[Hit]:
    rule = "jax-half-accumulation"
    if isinstance(event, RoundedProduct):
        yield Hit(
            rule,
            event.at,
            f"the product of {event.dtype} operands is rounded to {event.dtype} before {event.into}: preferred_element_type=jnp.float32 "
            f"hands on what {event.op} accumulated",
            (Seen(event.made, f"{event.into} of the rounded product"),),
            confidence="likely",
        )
        return
    yield Hit(
        rule,
        event.at,
        f"'{event.name}' is {event.dtype} and {GROWS[event.how]}: each addition rounds it to {SIGNIFICANT[event.dtype]} bits, and terms below "
        "half a step of it are lost; keep the sum in fp32 and cast it once",
        (Seen(event.made, f"{event.dtype} here"),) if event.made is not None else (),
        confidence="likely" if event.how in ("fold", "scatter") else "certain",
    )


@FAMILY.rule("jax-half-params", HalfParams)
def jax_half_params(state: None, event: HalfParams) -> Iterator[Hit]:
    optimizer, rate = (
        event.optimizer.rpartition(".")[2],
        f" at learning rate {event.rate:g}" if event.rate is not None else "",
    )
    yield Hit(
        "jax-half-params",
        event.at,
        f"optax's {optimizer}{rate} updates {event.dtype} parameters ({event.how}) with no fp32 copy: an update smaller than half a {event.dtype} "
        "step rounds to nothing; keep the parameters in fp32 and cast them in the loss",
        (Seen(event.taken, f"{optimizer} takes them"),),
        severity=severity_at(event.rate),
    )
