"""The NVFP4 contract takes what the float64 reference makes, and nothing that differs from it by one code or scale."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from precisionlint.formats import E2M1, encode
from precisionlint.kernels import contracts, inputs_nvfp4
from precisionlint.kernels.judge_nvfp4 import unpacked
from precisionlint.kernels.outcome import Violation
from precisionlint.kernels.reference import quantize_nvfp4, random_hadamard

CONTRACT = contracts.find("quantize_nvfp4")


def reference(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's numbers in the form that a launcher returns."""
    found = quantize_nvfp4(x, noise)
    codes = encode(found.values, E2M1).to(torch.uint8)
    even, odd = codes[:, ::2], codes[:, 1::2]
    packed = even | torch.nn.functional.pad(odd, (0, even.shape[1] - odd.shape[1])) << 4
    return packed, found.scales.to(torch.float8_e4m3fn), found.tensor_scale.float()


def judged(x: Tensor, outputs: Sequence[Tensor], *given: Tensor, **options: str) -> list[Violation]:
    return CONTRACT.judge((x, *given), outputs, CONTRACT.resolve({"quotient": "ieee", **options}))


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(4, 64), (3, 17), (1, 1), (5, 15)])
def test_the_reference_keeps_the_contract(shape: tuple[int, int]) -> None:
    x = normal(*shape)
    assert judged(x, reference(x)) == []
    noise = torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert judged(x, reference(x, noise), rounding="stochastic") == []


def test_the_reference_keeps_the_contract_on_the_hard_inputs() -> None:
    for case in inputs_nvfp4.matrices(hadamard=False, stochastic=False):
        (x,) = case.make()
        if bool(torch.isfinite(x).all()) and x.abs().max() > 1e-30:
            assert judged(x, reference(x)) == [], case.name


def test_the_reference_after_a_hadamard_transform_keeps_the_contract() -> None:
    x = normal(4, 64).bfloat16()
    signs = torch.tensor([1.0, -1.0] * 8)
    turned = random_hadamard(x, signs)
    assert judged(x, reference(turned), signs, hadamard="16") == []
    assert {each.clause for each in judged(x, reference(x.float()), signs, hadamard="16")} >= {"scale of the tensor"}


def test_one_code_one_scale_and_the_scale_of_the_tensor_are_each_judged() -> None:
    x = normal(4, 64)
    codes, scales, whole = reference(x)
    byte, scale = codes.clone(), scales.clone()
    byte[2, 5] ^= 0x30
    scale.view(torch.uint8)[1, 3] += 1
    assert [(each.clause, each.count) for each in judged(x, (byte, scales, whole))] == [("code", 1)]
    assert judged(x, (byte, scales, whole))[0].index in {(2, 11), (2, 10)}
    assert judged(x, (codes, scale, whole))[0].clause == "scale of a block"
    assert judged(x, (codes, scales, whole * 1.0001))[0].clause == "scale of the tensor"
    assert judged(x, (codes, scales))[0].clause == "returns"


def test_what_is_lost_of_nan_is_told_and_a_nan_scale_keeps_it() -> None:
    x = normal(4, 64)
    codes, scales, whole = reference(x)
    x[1, 40] = float("nan")
    assert [each.clause for each in judged(x, (codes, scales, whole))] == ["NaN and infinities"]
    assert judged(x, (codes, scales, whole * float("nan"))) == []
    assert judged(x, (codes, scales, whole), nonfinite="unspecified") == []


def test_a_share_that_is_off_is_told_with_the_share() -> None:
    case = next(
        each for each in inputs_nvfp4.matrices(hadamard=False, stochastic=True) if each.name.startswith("a fraction")
    )
    x, seed = case.make()
    noise = torch.rand(*x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert judged(x, reference(x, noise), seed, rounding="stochastic") == []
    clauses = {each.clause for each in judged(x, reference(x, noise / 2), seed, rounding="stochastic")}
    assert "share that goes up" in clauses
    repeated = noise[:1].expand_as(noise)
    clauses = {each.clause for each in judged(x, reference(x, repeated), seed, rounding="stochastic")}
    assert any(clause.startswith("pairs at distance") for clause in clauses)


def test_bytes_hold_the_even_column_in_their_low_half() -> None:
    assert unpacked(torch.tensor([[0x72, 0x0F]], dtype=torch.uint8), 3).tolist() == [[1.0, 6.0, -6.0]]
