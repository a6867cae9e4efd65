"""The fixed corpus for NVFP4: what is hard about two kinds of scales, sixteen elements and seven midpoints.

Each case makes x, and with a Hadamard transform the signs, and with stochastic rounding a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from msgspec.structs import replace
from torch import Tensor

from precisionlint.formats import E2M1, E4M3FN, decode
from precisionlint.kernels import inputs
from precisionlint.kernels.inputs import Case
from precisionlint.kernels.reference import NVFP4_BLOCK

WHOLE = 2688.0
"""The largest magnitude of a tensor with a scale of 1: E4M3's maximum times E2M1's."""


def matrices(hadamard: bool, stochastic: bool) -> Iterator[Case]:
    """Matrices for an NVFP4 quantiser, (M, N), with what else its launcher is given."""

    def with_more(case: Case, seed: int = 0) -> Case:
        def make() -> tuple[Tensor, ...]:
            signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(3)) * 2.0 - 1.0
            return (*case.make(), *([signs] if hadamard else []), *([torch.tensor(seed)] if stochastic else []))

        return replace(case, make=make)

    for case in inputs.matrices(NVFP4_BLOCK, E2M1):
        if case.aligned or not hadamard:
            yield with_more(case)
    own: list[tuple[str, Callable[[], Tensor]]] = [
        ("every midpoint of a code under a scale of 1", _midpoints),
        ("every midpoint of a block's scale", _scale_midpoints),
        ("blocks far below the largest", _far_below),
        ("each code", _each_code),
        ("more than one tile", lambda: torch.randn(40, 400, generator=torch.Generator().manual_seed(1)).bfloat16()),
    ]
    if stochastic:
        own += [(f"a fraction of {part} {where}", _constant(value)) for part, where, value in FRACTIONS]
    for name, make in own:
        yield with_more(Case(name, _alone(make)))
    if stochastic:
        yield with_more(Case("another seed", _alone(_constant(0.125))), seed=12345)


FRACTIONS = ((0.25, "below 1", 0.125), (0.5, "below 2", 1.25), (0.1, "between 2 and 3", 2.1), (0.7, "above 4", -5.4))
"""A fraction between two neighbours of E2M1, where, and a number with it under a scale of 1."""


def _alone(make: Callable[[], Tensor]) -> Callable[[], tuple[Tensor]]:
    return lambda: (make(),)


def _in_blocks(numbers: Tensor, largest: float) -> Tensor:
    """Rows of blocks, each with its largest magnitude in front and 15 of the numbers behind; block 0 sets a scale of 1."""
    count = 7 + 8 * -(-numbers.numel() // 120)
    x = numbers.repeat(-(-count * 15 // numbers.numel()))[: count * 15].reshape(count, 15)
    blocks = torch.cat([torch.full((count, 1), largest), x], 1)
    return torch.cat([torch.full((1, 16), WHOLE), blocks]).reshape(-1, 128)


def _midpoints() -> Tensor:
    """Each midpoint of two codes, its fp32 neighbours, and both signs, under block scales of 1 and a tensor's of 1."""
    table = decode(torch.arange(8), E2M1).float()
    middle = (table[1:] + table[:-1]) / 2
    bits = middle.view(torch.int32)
    around = torch.cat([middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    return _in_blocks(torch.cat([around, -around]), 6.0)


def _scale_midpoints() -> Tensor:
    """Blocks whose largest magnitude is 6 times each midpoint of two E4M3 numbers, exactly and one step to each side."""
    table = decode(torch.arange(E4M3FN.top_code + 1), E4M3FN).float()
    middle = 6 * (table[1:] + table[:-1]) / 2
    bits = middle.view(torch.int32)
    largest = torch.cat([middle, (bits + 1).view(torch.float32), (bits - 1).view(torch.float32)])
    count = -(-(largest.numel() + 1) // 8) * 8 - 1
    largest = torch.cat([torch.full((1,), WHOLE), largest.repeat(2)[:count]])
    part = torch.linspace(-1, 1, 16).flip(0)
    return (largest[:, None] * part[None, :]).reshape(-1, 128)


def _far_below() -> Tensor:
    """Blocks of each power of two down to 2^-40 of the largest: scales that are subnormal, and that round to 0."""
    x = torch.randn(41, 128, generator=torch.Generator().manual_seed(2)).clamp(-4, 4)
    return x * torch.exp2(-torch.arange(41.0))[:, None]


def _each_code() -> Tensor:
    table = decode(torch.arange(16), E2M1).float()
    return _in_blocks(table, 6.0)


def _constant(number: float) -> Callable[[], Tensor]:
    """2^15 elements: 15 of each 16 hold the number, under block scales of 1, after a block that makes the tensor's 1."""

    def make() -> Tensor:
        x = torch.full((64, 32, 16), number)
        x[:, :, 0] = 6.0
        x[0, 0, 0] = WHOLE
        return x.reshape(64, 512)

    return make
