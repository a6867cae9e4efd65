"""`--deep`: inputs drawn by hypothesis on top of the fixed corpus, and made as small as they can be while they still fail.

It knows which inputs a launcher of each contract takes, not what it should return. Sizes, strides, dtypes, a size of the
numbers for each block, and single numbers in chosen places are drawn; the rest comes from a seed. So what is left of a
failure after shrinking names the size, stride or number that it needs. The draw is the same in every run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from precisionlint.formats import FORMATS
from precisionlint.kernels.contracts import BLOCKS, Contract, Options
from precisionlint.kernels.inputs import Case
from precisionlint.kernels.outcome import Tried
from precisionlint.kernels.run import try_case

EXAMPLES = 100
"""Inputs drawn for a launcher, before shrinking."""

SPECIAL = (0.0, -0.0, 1.0, -448.0, 448.0, 464.0, 2.0**-126, 2.0**-149, -(2.0**-110), 3.4e38, float("nan"), float("inf"))

QUIET = settings(
    max_examples=EXAMPLES,
    database=None,
    derandomize=True,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.generate, Phase.shrink),
    print_blob=False,
)


class _BrokenError(Exception):
    """An input broke the contract."""


def search(launch: Callable[..., Any], contract: Contract, options: Options, tell: Callable[[str], None]) -> Tried:
    """The smallest drawn input that breaks a contract, or one entry that says how many kept it.

    `tell` is called with the name of each input before it runs. Raises interpreter.RefusedError.
    """
    start = time.perf_counter()
    broken: list[Tried] = []
    count = 0

    @QUIET
    @given(STRATEGIES[contract.name](options))
    def holds(case: Case) -> None:
        nonlocal count
        count += 1
        tell(case.name)
        tried = try_case(launch, contract, case, options)
        if tried.violations:
            broken.append(tried)
            raise _BrokenError

    try:
        holds()
    except _BrokenError:  # hypothesis runs the smallest one last
        return replace(broken[-1], case=f"drawn: {broken[-1].case}", seconds=time.perf_counter() - start)
    return Tried(f"{count} drawn inputs", (), time.perf_counter() - start)


@st.composite
def _sizes(draw: st.DrawFn, options: Options, largest: int) -> int:
    if options.get("shapes", "any") == "aligned":
        return 128 * draw(st.integers(1, max(1, largest // 128)))
    return draw(st.integers(1, largest))


def _strided(x: Tensor, stride: str) -> Tensor:
    """The same numbers in another layout; what lies between is the largest number of the dtype, or its NaN."""
    if stride == "transposed":
        return x.t().contiguous().t()
    if stride == "every second column":
        wide = torch.full((x.shape[0], 2 * x.shape[1]), 0x7E, dtype=torch.uint8)
        wide = wide.view(x.dtype) if x.element_size() == 1 else torch.full(wide.shape, 3e4, dtype=x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    return x


def _strides(options: Options) -> st.SearchStrategy[str]:
    free = options.get("strides", "any") == "any"
    return st.sampled_from(("contiguous", "transposed", "every second column") if free else ("contiguous",))


@st.composite
def _matrix(draw: st.DrawFn, options: Options, width: int | None = None) -> tuple[str, Tensor]:
    """Numbers of a drawn size for each 16 columns, single numbers among them, and what was drawn in words."""
    m = draw(_sizes(options, 140))
    n = width * draw(st.integers(1, 20)) if width else draw(_sizes(options, 300))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    stride = draw(_strides(options))
    seed = draw(st.integers(0, 1000))
    sizes = draw(st.lists(st.integers(-140, 120), min_size=1, max_size=6))
    numbers = draw(
        st.lists(st.tuples(st.integers(0, m - 1), st.integers(0, n - 1), st.sampled_from(SPECIAL)), max_size=4)
    )
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(seed))
    powers = torch.exp2(torch.tensor(sizes, dtype=torch.float64)).repeat(-(-n // 16))[: -(-n // 16)]
    x = (x.double() * powers.repeat_interleave(16)[:n]).to(dtype)
    for row, column, number in numbers:
        x[row, column] = number
    named = "".join(f", {number:g} at [{row}, {column}]" for row, column, number in numbers)
    powers_text = ", ".join(f"2^{size}" for size in sizes)
    kind = str(dtype).removeprefix("torch.")
    return f"{m}x{n} {kind} {stride}, seed {seed}, sizes {powers_text}{named}", _strided(x, stride)


def _quantizer(options: Options) -> st.SearchStrategy[Case]:
    return _matrix(options).map(lambda drawn: _case(drawn[0], drawn[1]))


@st.composite
def _nvfp4(draw: st.DrawFn, options: Options) -> Case:
    hadamard, stochastic = options["hadamard"] == "16", options["rounding"] == "stochastic"
    name, x = draw(_matrix(options, width=16 if hadamard else None))
    signs = torch.tensor(draw(st.lists(st.sampled_from((1.0, -1.0)), min_size=16, max_size=16))) if hadamard else None
    seed = torch.tensor(draw(st.integers(0, 2**31))) if stochastic else None
    return _case(name, *(each for each in (x, signs, seed) if each is not None))


@st.composite
def _stochastic(draw: st.DrawFn, options: Options) -> Case:
    name, x = draw(_matrix({}))
    seed = draw(st.integers(0, 2**31))
    return _case(f"{name}, noise {seed}", x.float().contiguous().reshape(-1), torch.tensor(seed))


@st.composite
def _codes(draw: st.DrawFn, options: Options, rows: int, columns: int, seed: int) -> Tensor:
    """Random codes of the format, rarely NaN among them."""
    target = FORMATS[options["format"]]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, target.top_code + 1, (rows, columns), generator=generator, dtype=torch.uint8)
    codes |= torch.randint(0, 2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    if draw(st.booleans()):
        codes[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = 0x7F
    return codes.view(target.torch_dtype)


@st.composite
def _scales(draw: st.DrawFn, shape: tuple[int, ...], mx: bool) -> Tensor:
    seed, spread = draw(st.integers(0, 1000)), draw(st.integers(0, 20))
    generator = torch.Generator().manual_seed(seed)
    power = torch.randint(-spread, spread + 1, shape, generator=generator)
    if mx:
        return (power + 127).to(torch.uint8)
    return torch.exp2(power.float()) * (1 + torch.rand(shape, generator=generator) * bool(spread))


@st.composite
def _coded(draw: st.DrawFn, options: Options) -> Case:
    m, n = draw(_sizes(options, 140)), draw(_sizes(options, 300))
    stride, seed = draw(_strides(options)), draw(st.integers(0, 1000))
    height, width = BLOCKS[options["block"]]
    codes = _strided(draw(_codes(options, m, n, seed)), stride)
    scales = draw(_scales((-(-m // (height or m)), -(-n // (width or n))), mx=False))
    return _case(f"{m}x{n} {stride}, seed {seed}", codes, scales)


def _product(kind: str) -> Callable[[Options], st.SearchStrategy[Case]]:
    @st.composite
    def drawn(draw: st.DrawFn, options: Options) -> Case:
        m, n, k = (draw(_sizes(options, size)) for size in (140, 140, 300))
        seed = draw(st.integers(0, 1000))
        strides = draw(_strides(options)), draw(_strides(options))
        a, b = (
            _strided(draw(_codes(options, rows, k, seed + rows)), each)
            for rows, each in zip((m, n), strides, strict=True)
        )
        groups = -(-k // (32 if kind == "mx" else 128))
        shapes: tuple[tuple[int, ...], tuple[int, ...]] = {
            "mx": ((m, groups), (n, groups)),
            "blocks": ((m, groups), (-(-n // 128), groups)),
            "tensor": ((), ()),
        }[kind]
        a_scales, b_scales = (draw(_scales(shape, kind == "mx")) for shape in shapes)
        return _case(f"{m}x{n}x{k}, a {strides[0]}, b {strides[1]}, seed {seed}", a, a_scales, b, b_scales)

    return drawn


def _case(name: str, *tensors: Tensor) -> Case:
    return Case(name, lambda: tensors)


STRATEGIES: Mapping[str, Callable[[Options], st.SearchStrategy[Case]]] = MappingProxyType(
    {
        "cast": lambda options: _matrix(options).map(lambda drawn: _case(drawn[0], drawn[1].reshape(-1))),
        "stochastic_cast": _stochastic,
        **{f"quantize_{block}": _quantizer for block in (*BLOCKS, "mx")},
        "quantize_nvfp4": _nvfp4,
        "dequantize": _coded,
        "gemm_mx": _product("mx"),
        "gemm_blockscaled": _product("blocks"),
        "gemm_tensor": _product("tensor"),
    }
)
"""For each contract, from its options, the inputs that may be drawn."""
