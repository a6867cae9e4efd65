"""The formats agree with torch, ml_dtypes and gfloat on every code and on every fp16 and bf16 number."""

import math
from collections.abc import Callable

import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import FormatInfo, RoundMode, decode_ndarray, round_ndarray
from torch import Tensor

from precisionlint.formats import (
    BF16,
    E2M1,
    E4M3FN,
    E5M2,
    E8M0FNU,
    FORMATS,
    FP16,
    FP32,
    TF32,
    Format,
    decode,
    encode,
    round_to,
    spacing,
)

ML_DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
GFLOAT = {
    "fp16": gfloat.formats.format_info_binary16,
    "bf16": gfloat.formats.format_info_bfloat16,
    "e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "e5m2": gfloat.formats.format_info_ocp_e5m2,
    "e2m1": gfloat.formats.format_info_ocp_e2m1,
}
SMALL = [each for each in FORMATS.values() if each.bits <= 16]
EIGHT_BITS = [each for each in SMALL if each.bits == 8]


def codes(target: Format) -> Tensor:
    return torch.arange(2**target.bits)


def every_half() -> Tensor:
    """All fp16 and all bf16 numbers, NaN and infinities among them, as fp32."""
    patterns = torch.arange(2**16).to(torch.uint16)
    return torch.cat([patterns.view(torch.float16).float(), patterns.view(torch.bfloat16).float()])


def midpoints(target: Format) -> Tensor:
    """Each midpoint of two neighbouring finite values, and the float64 numbers on either side of it."""
    values = decode(torch.arange(target.top_code + 1), target)
    middle = (values[1:] + values[:-1]) / 2
    upper, lower = torch.nextafter(middle, torch.tensor(math.inf)), torch.nextafter(middle, torch.tensor(-math.inf))
    return torch.cat([middle, upper.double(), lower.double()])


def as_ml_dtypes(values: Tensor, name: str) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(values.numpy().astype(ML_DTYPES[name]).astype(np.float64))


def as_gfloat(values: Tensor, info: FormatInfo, mode: RoundMode, **options: object) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(round_ndarray(info, values.double().numpy(), mode, **options))


def different(ours: Tensor, theirs: Tensor) -> Tensor:
    """Where two float64 tensors differ; the sign of zero counts, that of NaN does not."""
    both_nan = torch.isnan(ours) & torch.isnan(theirs)
    return ~both_nan & ((ours != theirs) | (torch.signbit(ours) != torch.signbit(theirs)))


@pytest.mark.parametrize("target", SMALL, ids=lambda each: each.name)
def test_each_code_means_what_it_means_elsewhere(target: Format) -> None:
    ours = decode(codes(target), target)
    raw = codes(target).numpy().astype(np.uint16 if target.bits == 16 else np.uint8)
    with np.errstate(all="ignore"):
        theirs = torch.from_numpy(raw.view(ML_DTYPES[target.name]).astype(np.float64))
    assert not different(ours, theirs).any()
    if target.torch_name is not None:
        assert not different(ours, torch.from_numpy(raw).view(target.torch_dtype).double()).any()
    if target.name in GFLOAT:
        assert not different(ours, torch.from_numpy(decode_ndarray(GFLOAT[target.name], codes(target).numpy()))).any()


@pytest.mark.parametrize("target", SMALL, ids=lambda each: each.name)
def test_encode_takes_back_what_decode_gave(target: Format) -> None:
    values = decode(codes(target), target)
    numbers = ~torch.isnan(values)
    assert torch.equal(encode(values[numbers], target), codes(target)[numbers])
    if target.nans:
        assert torch.isnan(decode(encode(values[~numbers], target), target)).all()


@pytest.mark.parametrize("target", SMALL, ids=lambda each: each.name)
def test_the_properties_are_those_of_the_decoded_values(target: Format) -> None:
    values = decode(codes(target), target)
    positive = values[torch.isfinite(values) & (values > 0)].sort().values
    assert (target.maximum, target.smallest) == (positive[-1].item(), positive[0].item())
    assert target.epsilon == positive[positive > 1][0].item() - 1
    assert target.infinities == bool(torch.isinf(values).any())
    assert target.nans == bool(torch.isnan(values).any())
    steps = positive.diff()
    assert torch.equal(spacing(positive[:-1], target), steps)


def test_published_ranges() -> None:
    assert (E4M3FN.maximum, E4M3FN.smallest_normal, E4M3FN.smallest) == (448.0, 2.0**-6, 2.0**-9)
    assert E5M2.maximum == 57344.0
    assert (E8M0FNU.smallest, E8M0FNU.maximum) == (2.0**-127, 2.0**127)
    assert (E2M1.maximum, E2M1.smallest) == (6.0, 0.5)
    assert torch.finfo(torch.float32).max == FP32.maximum
    assert (TF32.maximum, TF32.bits) == (3.4011621342146535e38, 19)


def test_published_numbers_of_small_values_in_half() -> None:
    small = torch.tensor([1e-8, 1e-6, 2e-5], dtype=torch.float64)
    assert round_to(small, FP16).tolist() == [0.0, 1.0132789611816406e-06, 2.002716064453125e-05]
    assert round_to(small, BF16).tolist() == [1.0011717677116394e-08, 9.98377799987793e-07, 2.002716064453125e-05]
    assert (round_to(small * 2**16, FP16) / 2**16)[0].item() == 9.997165761888027e-09


@pytest.mark.parametrize("target", [each for each in SMALL if each not in (E2M1, E8M0FNU)], ids=lambda each: each.name)
def test_rounding_every_half_without_saturation_is_ml_dtypes(target: Format) -> None:
    values = torch.cat([every_half().double(), midpoints(target).float().double()])
    assert not different(round_to(values, target), as_ml_dtypes(values.float(), target.name)).any()


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_rounding_every_half_without_saturation_is_torch(name: str) -> None:
    target, values = FORMATS[name], every_half()
    assert not different(round_to(values, target), values.to(target.torch_dtype).double()).any()


def test_rounding_to_e4m3_is_torch_with_its_overflow() -> None:
    saturates = torch.tensor(1000.0).to(torch.float8_e4m3fn).float().isfinite().item()
    values = every_half()
    ours = round_to(values, E4M3FN, overflow="saturate" if saturates else "special")
    assert not different(ours, values.to(torch.float8_e4m3fn).double()).any()


@pytest.mark.parametrize("overflow", ["special", "saturate"])
@pytest.mark.parametrize("mode", ["nearest-even", "toward-zero"])
@pytest.mark.parametrize("name", sorted(GFLOAT))
def test_rounding_every_half_and_midpoint_is_gfloat(name: str, mode: str, overflow: str) -> None:
    target = FORMATS[name]
    values = torch.cat([every_half().double(), midpoints(target)])
    if not target.nans:
        if overflow == "special":
            pytest.skip("it has no special value")
        values = values[torch.isfinite(values)]
    theirs = as_gfloat(
        values,
        GFLOAT[name],
        {"nearest-even": RoundMode.TiesToEven, "toward-zero": RoundMode.TowardZero}[mode],
        sat=overflow == "saturate",
    )
    assert not different(round_to(values, target, mode=mode, overflow=overflow), theirs).any()


def test_e2m1_is_ml_dtypes() -> None:
    values = every_half()
    values = torch.cat([values[torch.isfinite(values)], midpoints(E2M1).float()])
    assert not different(round_to(values, E2M1, overflow="saturate"), as_ml_dtypes(values, "e2m1")).any()


def test_e8m0_differs_from_the_references_only_where_its_text_says() -> None:
    values = every_half()
    ours = round_to(values, E8M0FNU)
    negative = values < 0
    assert torch.isnan(ours[negative]).all()
    torchs = values.to(torch.float8_e8m0fnu).double()
    low = (values > 2.0**-127) & (values < 1.5 * 2.0**-127)
    assert (ours[low] == 2.0**-127).all()
    assert (torchs[low] == 2.0**-126).all()
    assert not different(ours, torchs)[~negative & ~low].any()
    assert (torchs[negative & (values > -E8M0FNU.maximum)] > 0).all()
    ml = as_ml_dtypes(values, "e8m0fnu")
    assert torch.isnan(ml[values == 0]).all()
    assert not different(ours, ml)[~low & (values != 0)].any()


def test_a_reference_that_rounds_halves_differently_is_seen() -> None:
    values = every_half()
    away = as_gfloat(values, GFLOAT["e5m2"], RoundMode.TiesToAway)
    assert different(round_to(values, E5M2), away).any()


@pytest.mark.parametrize("name", ["e4m3fn", "e2m1", "bf16"])
def test_stochastic_rounding_with_n_bits_is_gfloats(name: str) -> None:
    target, bits = FORMATS[name], 8
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(20_000, generator=generator, dtype=torch.float64)
    draws = torch.randint(2**bits, values.shape, generator=generator)
    ours = round_to(values, target, mode="stochastic", overflow="saturate", noise=draws / 2.0**bits)
    theirs = as_gfloat(
        values, GFLOAT[name], RoundMode.StochasticFastest, sat=True, srbits=draws.numpy(), srnumbits=bits
    )
    assert not different(ours, theirs).any()


def test_stochastic_rounding_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(200_000, generator=generator, dtype=torch.float64)
    values = torch.full_like(draws, 1.03)
    rounded = round_to(values, E4M3FN, mode="stochastic", noise=draws)
    assert set(rounded.tolist()) == {1.0, 1.125}
    # The share that goes up is binomial: five of its standard deviations.
    share, expected = (rounded > 1).double().mean().item(), 0.03 / 0.125
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / draws.numel())


def test_tf32_keeps_the_upper_19_bits_rounded() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50_000, generator=generator)
    bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    rounded = (bits + ((bits >> 13) & 1) + 0xFFF) >> 13
    assert torch.equal(encode(round_to(values, TF32), TF32), rounded)


@pytest.mark.parametrize(
    "call",
    [
        lambda: round_to(torch.tensor([7.5]), E2M1),
        lambda: round_to(torch.tensor([math.nan]), E2M1, overflow="saturate"),
        lambda: round_to(torch.tensor([1.0]), E5M2, mode="stochastic"),
        lambda: round_to(torch.tensor([1.0]), E5M2, noise=torch.tensor([0.5])),
        lambda: encode(torch.tensor([1.03]), E5M2),
        lambda: encode(torch.tensor([-1.0]), E8M0FNU),
        lambda: encode(torch.tensor([0.0]), E8M0FNU),
        lambda: encode(torch.tensor([512.0]), E4M3FN),
        lambda: encode(torch.tensor([math.inf]), E4M3FN),
        lambda: encode(torch.tensor([math.nan]), E2M1),
        lambda: encode(torch.tensor([-0.0]), FORMATS["e5m2fnuz"]),
        lambda: decode(torch.tensor([16]), E2M1),
        lambda: spacing(torch.tensor([math.inf]), E5M2),
        lambda: TF32.torch_dtype,
    ],
)
def test_what_a_format_cannot_hold_raises(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        call()


def test_the_constants_need_no_torch() -> None:
    import subprocess
    import sys

    script = "from precisionlint.formats import E4M3FN; E4M3FN.maximum; import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
