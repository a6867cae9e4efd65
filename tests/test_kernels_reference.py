"""The references are right where the answer is known by hand, by publication, or from an independent implementation."""

import math

import numpy as np
import pytest
import torch
from gfloat import BlockFormatInfo, compute_scale_amax
from gfloat.formats import format_info_mxfp4_e2m1, format_info_mxfp8_e4m3, format_info_mxfp8_e5m2
from torch import Tensor

from precisionlint.formats import E2M1, E4M3FN, E5M2, E8M0FNU, FP32, Format, round_to
from precisionlint.kernels.reference import (
    AMAX_FLOOR,
    block_amax,
    blockscaled_matmul,
    delayed_scale,
    dequantize,
    hadamard,
    matmul_with_narrow_accumulator,
    mx_scale,
    power_of_two_scale,
    quantize,
    quantize_mx,
    quantize_nvfp4,
    quantize_with_scale,
    random_hadamard,
    spread,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_block_at_the_edge_may_be_smaller() -> None:
    x = torch.arange(15.0).reshape(3, 5)
    assert block_amax(x, (2, 2)).tolist() == [[6.0, 8.0, 9.0], [11.0, 13.0, 14.0]]
    assert spread(torch.tensor([[1.0, 2.0]]), (2, 2), torch.Size((1, 3))).tolist() == [[1.0, 1.0, 2.0]]


def test_published_per_tensor_scale_loses_a_small_number() -> None:
    x = torch.tensor([[5000.0, 0.01]])
    found = quantize(x, (1, 2))
    assert round(found.scales.item(), 2) == 11.16
    assert found.values.tolist() == [[448.0, 0.0]]


@pytest.mark.parametrize("target", [E4M3FN, E5M2], ids=lambda each: each.name)
def test_a_power_of_two_scale_is_the_smallest_that_saturates_nothing(target: Format) -> None:
    edges = torch.tensor([target.maximum * 2.0**k for k in range(-40, 40)], dtype=torch.float32)
    for amax in (edges, torch.nextafter(edges, torch.tensor(math.inf)), torch.nextafter(edges, torch.tensor(0.0))):
        scale = power_of_two_scale(amax, target)
        assert (amax.double() <= target.maximum * scale).all()
        assert (amax.double() > target.maximum * scale / 2).all()


@pytest.mark.parametrize("kind", ["fp32", "power-of-two"])
@pytest.mark.parametrize("target", [E4M3FN, E5M2], ids=lambda each: each.name)
def test_zeros_and_the_least_magnitudes_have_normal_scales(target: Format, kind: str) -> None:
    scales = quantize(torch.tensor([[0.0], [AMAX_FLOOR]]), (1, 1), target, kind).scales
    assert (scales >= FP32.smallest_normal).all()


def test_quantising_is_within_half_a_spacing_on_the_way_back() -> None:
    x = normal(8, 256)
    found = quantize(x, (1, 128))
    back = dequantize(found.values, found.scales, (1, 128))
    # Half of the spacing at a number is at most its magnitude times 2^-4, or half of the subnormal spacing.
    bound = torch.maximum(x.abs() * 2**-4, spread(found.scales, (1, 128), x.shape) * E4M3FN.smallest / 2)
    assert ((back - x).abs() <= bound * (1 + 1e-6)).all()


def test_a_delayed_scale_follows_the_largest_of_the_last_steps() -> None:
    assert delayed_scale(torch.tensor([1.0, 448.0, 3.0])).item() == 1.0
    assert delayed_scale(torch.tensor([448.0]), margin=2).item() == 4.0
    assert delayed_scale(torch.zeros(4)).item() == 1.0
    jump = quantize_with_scale(torch.tensor([[1000.0]]), delayed_scale(torch.tensor([448.0])))
    assert jump.item() == E4M3FN.maximum


@pytest.mark.parametrize(
    ("info", "target"),
    [(format_info_mxfp8_e4m3, E4M3FN), (format_info_mxfp8_e5m2, E5M2), (format_info_mxfp4_e2m1, E2M1)],
    ids=["e4m3", "e5m2", "e2m1"],
)
def test_the_floor_rule_of_mx_is_gfloats(info: BlockFormatInfo, target: Format) -> None:
    x = normal(40, 32) * torch.exp2(torch.arange(-20.0, 20.0, dtype=torch.float64))[:, None]
    found = quantize_mx(x, target)
    theirs = [compute_scale_amax(target.max_exponent, row) for row in x.numpy()]
    assert np.array_equal(found.scales.flatten().numpy(), np.array(theirs))


def test_the_four_rules_of_mx_at_their_boundaries() -> None:
    # 448 = 1.75 * 2^8. In order: a power of two, just above one, the maximum, just above it, just below the next.
    amax = torch.tensor([256.0, 257.0, 448.0, 449.0, 511.0])
    assert mx_scale(amax, E4M3FN, "floor").tolist() == [1.0, 1.0, 1.0, 1.0, 1.0]
    assert mx_scale(amax, E4M3FN, "ceil").tolist() == [1.0, 2.0, 2.0, 2.0, 2.0]
    assert mx_scale(amax, E4M3FN, "rceil").tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    assert mx_scale(amax, E4M3FN, "even").tolist() == [1.0, 1.0, 1.0, 1.0, 2.0]
    special = torch.tensor([0.0, 1e-45, math.nan, math.inf])
    found = mx_scale(special, E4M3FN, "floor")
    assert found[:2].tolist() == [E8M0FNU.smallest, E8M0FNU.smallest]
    assert torch.isnan(found[2:]).all()


def test_nvfp4_puts_the_largest_block_on_both_maxima() -> None:
    x = normal(4, 64)
    found = quantize_nvfp4(x)
    assert found.scales.max().item() == E4M3FN.maximum
    assert found.values.abs().max().item() == E2M1.maximum
    back = found.values * spread(found.scales * found.tensor_scale, (1, 16), x.shape)
    # Between 4 and 6 the spacing is 2: half of it is a sixth of a block's largest magnitude; the scale's own rounding
    # (2^-4) comes on top, and so does what saturates for it.
    assert ((back - x).abs() <= spread(block_amax(x, (1, 16)), (1, 16), x.shape) * (1 / 6 + 2**-4)).all()
    assert quantize_nvfp4(torch.zeros(1, 16)).values.eq(0).all()


def test_nvfp4_rounds_stochastically_with_noise_alone() -> None:
    x = normal(64, 64)
    noise = torch.rand(64, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    nearest, noisy = quantize_nvfp4(x), quantize_nvfp4(x, noise)
    assert torch.equal(nearest.scales, noisy.scales)
    assert not torch.equal(nearest.values, noisy.values)


def test_a_random_hadamard_transform_spreads_an_outlier_and_keeps_the_product() -> None:
    signs = torch.randint(0, 2, (16,), generator=torch.Generator().manual_seed(0)) * 2 - 1
    a, b = normal(4, 64), normal(5, 64, seed=1)
    a[0, 0] = 1000.0
    turned = random_hadamard(a, signs), random_hadamard(b, signs)
    assert torch.allclose(turned[0] @ turned[1].t(), a @ b.t(), rtol=1e-12, atol=1e-9)
    assert turned[0].abs().max() < 300
    assert torch.equal(hadamard(8) @ hadamard(8).t(), 8 * torch.eye(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="power of two"):
        hadamard(12)


def test_what_promotion_saves_on_hopper() -> None:
    a, b = torch.ones(1, 1024), torch.ones(1024, 1)
    a[0, 0] = b[0, 0] = 448.0
    assert matmul_with_narrow_accumulator(a, b, bits=24).item() == 201727.0
    assert matmul_with_narrow_accumulator(a, b).item() == 201600.0
    assert matmul_with_narrow_accumulator(a, b, promote=None).item() == 200704.0


def test_a_blockscaled_product_is_that_of_the_dequantised_matrices() -> None:
    a, b = quantize(normal(5, 200), (1, 128)), quantize(normal(200, 130, seed=1), (128, 128))
    product = blockscaled_matmul(a.values, a.scales, (1, 128), b.values, b.scales, (128, 128))
    by_hand = torch.zeros(5, 130, dtype=torch.float64)
    for k, (start, stop) in enumerate(((0, 128), (128, 200))):
        for n, (left, right) in enumerate(((0, 128), (128, 130))):
            part = a.values[:, start:stop] @ b.values[start:stop, left:right]
            by_hand[:, left:right] += part * a.scales[:, k : k + 1] * b.scales[k, n]
    assert torch.allclose(product, by_hand, rtol=1e-13)


def test_fp32_scales_are_numbers_that_fp32_holds() -> None:
    scales = quantize(normal(16, 256), (1, 128)).scales
    assert torch.equal(scales, round_to(scales, FP32))
