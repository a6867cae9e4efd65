"""Number formats as values: range, spacing, special values, and one rounding for all of them, exact in float64.

It knows formats and arithmetic on single numbers; scales, blocks and kernels are elsewhere. The constants and
properties need no torch; the functions take and give torch tensors and import torch when they are called.

Every format here has at most 24 significant bits, so each of its values, each midpoint of two neighbours, and a value
divided by a power of two are exact in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    from torch import Tensor, dtype

Special = Literal["ieee", "top-code", "negative-zero", "none"]
"""Which codes are no numbers: all with the top exponent (the first is the infinity, the rest are NaN); the one with all
bits set, of either sign (NaN); the code of minus zero (NaN); no code at all."""

Mode = Literal["nearest-even", "toward-zero", "stochastic"]

Overflow = Literal["saturate", "special"]
"""What becomes of values beyond the maximum, infinities included: the maximum, or the infinity (NaN where a format has
none). OCP's 'saturating' and 'non-saturating' conversion (OCP 8-bit Floating Point Specification 1.0, table 3)."""


class Format(Struct, frozen=True):
    """A binary floating-point format: sign, exponent and mantissa fields from the top of the code down."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    """Stored bits of the significand, without the implicit leading one."""
    bias: int
    special: Special
    torch_name: str | None
    """The attribute of torch that is this format's dtype; None where torch has none that holds one value an element."""
    signed: bool = True
    subnormals: bool = True
    """Whether exponent field 0 means zero and subnormals; if not, it is one more power of two, and zero has no code."""

    @property
    def bits(self) -> int:
        """Bits of a code (tf32: the 19 that count, of the 32 that it is stored in)."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return (1 if self.subnormals else 0) - self.bias

    @property
    def top_code(self) -> int:
        """The code of the largest finite value."""
        reserved = {"ieee": 1 << self.mantissa_bits, "top-code": 1, "negative-zero": 0, "none": 0}[self.special]
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1 - reserved

    @property
    def maximum(self) -> float:
        """The largest finite value."""
        exponent, fraction = divmod(self.top_code, 2**self.mantissa_bits)
        return float((1 + fraction * 2.0**-self.mantissa_bits) * 2.0 ** (exponent - self.bias))

    @property
    def max_exponent(self) -> int:
        """The exponent of the largest finite value: floor(log2(maximum))."""
        return (self.top_code >> self.mantissa_bits) - self.bias

    @property
    def smallest_normal(self) -> float:
        return float(2.0**self.min_exponent)

    @property
    def smallest(self) -> float:
        """The smallest positive value: the spacing of the subnormals, or the smallest normal where there are none."""
        return float(2.0 ** (self.min_exponent - (self.mantissa_bits if self.subnormals else 0)))

    @property
    def epsilon(self) -> float:
        """The spacing of the values between 1 and 2."""
        return float(2.0**-self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of rounding to nearest, subnormals aside: half of `epsilon`."""
        return self.epsilon / 2

    @property
    def infinities(self) -> bool:
        return self.special == "ieee"

    @property
    def nans(self) -> bool:
        return self.special != "none"

    @property
    def torch_dtype(self) -> dtype:
        """The dtype that stores one value of this format an element; raises ValueError where torch has none."""
        import torch

        if self.torch_name is None:
            raise ValueError(f"torch has no dtype that holds one {self.name} value an element")
        found: dtype = getattr(torch, self.torch_name)
        return found


FP32 = Format("fp32", 8, 23, 127, "ieee", "float32")
TF32 = Format("tf32", 8, 10, 127, "ieee", None)
"""The inputs of a tensor core's fp32 product: fp32's range, fp16's spacing. Stored as fp32 with 13 bits unused."""
FP16 = Format("fp16", 5, 10, 15, "ieee", "float16")
BF16 = Format("bf16", 8, 7, 127, "ieee", "bfloat16")
E4M3FN = Format("e4m3fn", 4, 3, 7, "top-code", "float8_e4m3fn")
"""OCP E4M3. Overflow: torch gave NaN before 2.12 and saturates since (infinities too); ml_dtypes gives NaN; Triton's
conversions on NVIDIA GPUs saturate, infinities too (`cvt.rn.satfinite`). Here the caller says which. The largest value
that still rounds to 448 is 464, a tie that goes to the even code."""
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, "negative-zero", "float8_e4m3fnuz")
"""AMD's E4M3 before gfx950: one NaN, no infinity, no minus zero."""
E5M2 = Format("e5m2", 5, 2, 15, "ieee", "float8_e5m2")
"""OCP E5M2. Overflow: torch and ml_dtypes give the infinity, Triton's conversions on NVIDIA GPUs the maximum."""
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, "negative-zero", "float8_e5m2fnuz")
E8M0FNU = Format("e8m0fnu", 8, 0, 127, "top-code", "float8_e8m0fnu", signed=False, subnormals=False)
"""OCP's block scale: powers of two from 2^-127 to 2^127 and NaN; neither sign nor zero. A tie, which is 1.5 times a
power of two, goes up, as in torch 2.13 and ml_dtypes 0.6. What is nearer to 2^-127 than to 2^-126 becomes 2^-127 here;
both others take 2^-126 for numbers above 2^-127, and of zero torch makes 2^-127, ml_dtypes NaN. Of a negative number
torch takes the magnitude; ml_dtypes and this module make it NaN."""
E2M1 = Format("e2m1", 2, 1, 1, "none", None)
"""OCP FP4. It has neither NaN nor infinity, so only saturating rounding of numbers is defined. torch packs two to a
byte."""

FORMATS: Mapping[str, Format] = MappingProxyType(
    {each.name: each for each in (FP32, TF32, FP16, BF16, E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, E8M0FNU, E2M1)}
)


def round_to(
    values: Tensor,
    target: Format,
    *,
    mode: Mode = "nearest-even",
    overflow: Overflow = "special",
    noise: Tensor | None = None,
) -> Tensor:
    """Each value, rounded once to a value of `target`; float64, of the shape of `values`.

    `values` is a floating-point tensor of a dtype that float64 holds exactly. `noise`, for mode 'stochastic' alone, is
    float64 in [0, 1), of the same shape: a value at fraction f between two neighbours goes away from zero where
    f + noise >= 1, that is with probability f for uniform noise.

    Overflow is decided as in IEEE 754: by the result that an unbounded exponent would give. Toward zero, no number
    overflows; an infinity is treated as `overflow` says.

    Raises ValueError where `target` has no code for a result (NaN, or overflow that may not saturate, in e2m1), and
    where mode and noise do not belong together.
    """
    import torch

    if (mode == "stochastic") != (noise is not None):
        raise ValueError("mode 'stochastic' needs noise, and no other mode takes it")
    exact = values.to(torch.float64)
    finite = torch.isfinite(exact)
    magnitude = torch.where(finite, exact, 0.0).abs()
    quantum = _spacing(magnitude, target)
    steps = magnitude / quantum
    if mode == "nearest-even":
        steps = steps.round()
    elif noise is None:
        steps = steps.floor()
    else:
        # floor(steps + noise) would round the sum; the fraction of `steps` is exact, and so is this comparison.
        whole = steps.floor()
        steps = whole + (steps - whole >= 1.0 - noise)
    rounded = steps * quantum
    if not target.subnormals:
        rounded = rounded.clamp(min=target.smallest)
    if mode == "toward-zero":
        rounded = rounded.clamp(max=target.maximum)
    return _with_specials(exact, rounded, target, overflow)


def _with_specials(exact: Tensor, rounded: Tensor, target: Format, overflow: Overflow) -> Tensor:
    """`rounded` magnitudes with signs, and with what becomes of NaN, infinities, overflow and unsigned formats."""
    import torch

    nan = torch.isnan(exact)
    if not target.signed:
        nan = nan | (exact < 0)
    beyond = (rounded > target.maximum) | torch.isinf(exact)
    if not target.nans and bool((nan | (beyond & (overflow != "saturate"))).any()):
        raise ValueError(f"{target.name} has neither NaN nor infinity, and a value needs one")
    limit = target.maximum if overflow == "saturate" else float("inf" if target.infinities else "nan")
    rounded = torch.where(beyond, limit, rounded)
    if target.signed:
        rounded = torch.copysign(rounded, exact)
    if target.special == "negative-zero":
        rounded = torch.where(rounded == 0, 0.0, rounded)
    return torch.where(nan, torch.nan, rounded)


def spacing(values: Tensor, target: Format) -> Tensor:
    """The distance of `target`'s values around each value, float64; at a power of two, that above it.

    The unit in the last place, as in Goldberg (1991). Beyond the maximum it grows on, as if the exponent were
    unbounded. Raises ValueError for NaN and infinities.
    """
    import torch

    exact = values.to(torch.float64)
    if not bool(torch.isfinite(exact).all()):
        raise ValueError("NaN and infinities have no spacing")
    return _spacing(exact.abs(), target)


def decode(codes: Tensor, target: Format) -> Tensor:
    """The value of each code (an integer tensor with entries in 0 .. 2**bits - 1), float64."""
    import torch

    codes = codes.to(torch.int64)
    if bool(((codes < 0) | (codes >= 2**target.bits)).any()):
        raise ValueError(f"a code of {target.name} lies in 0 .. {2**target.bits - 1}")
    body = codes & (2 ** (target.exponent_bits + target.mantissa_bits) - 1)
    negative = body != codes
    exponent, fraction = body >> target.mantissa_bits, body & (2**target.mantissa_bits - 1)
    normal = (exponent > 0) | (not target.subnormals)
    significand = (fraction + normal * 2**target.mantissa_bits).to(torch.float64)
    value = significand * _power_of_two(torch.where(normal, exponent, 1) - target.bias - target.mantissa_bits)
    special = body > target.top_code
    value = torch.where(special, torch.nan, value)
    if target.infinities:
        value = torch.where(body == target.top_code + 1, torch.inf, value)
    value = torch.where(negative, -value, value)
    if target.special == "negative-zero":
        value = torch.where(negative & (body == 0), torch.nan, value)
    return value


def encode(values: Tensor, target: Format) -> Tensor:
    """The code of each value, int64; NaN gets the quiet one with no sign that the format has.

    Raises ValueError where a value is not one of `target`'s: round it first.
    """
    import torch

    exact = values.to(torch.float64)
    finite = torch.isfinite(exact)
    magnitude = torch.where(finite, exact, 0.0).abs()
    exponent = _exponent(magnitude, target)
    significand = magnitude * _power_of_two(target.mantissa_bits - exponent)
    fraction = significand.to(torch.int64)
    normal = fraction >= 2**target.mantissa_bits
    code = torch.where(
        normal, ((exponent + target.bias) << target.mantissa_bits) + fraction - 2**target.mantissa_bits, fraction
    )
    known = (fraction == significand) & (code <= target.top_code) & (normal | target.subnormals)
    sign = torch.signbit(exact) & ~torch.isnan(exact)
    if target.infinities:
        known, code = known | torch.isinf(exact), torch.where(torch.isinf(exact), target.top_code + 1, code)
    elif bool(torch.isinf(exact).any()):
        raise ValueError(f"{target.name} has no infinity")
    if target.nans:
        known, code = known | torch.isnan(exact), torch.where(torch.isnan(exact), _nan_code(target), code)
    elif bool(torch.isnan(exact).any()):
        raise ValueError(f"{target.name} has no NaN")
    minus_zero = sign & (exact == 0) & (target.special == "negative-zero")
    if not bool((known & ~minus_zero & (~sign | target.signed)).all()):
        raise ValueError(f"a value is not one of {target.name}'s; round it first")
    return code + sign * (1 << (target.bits - 1))


def _nan_code(target: Format) -> int:
    if target.special == "ieee":
        return target.top_code + 1 + (1 << (target.mantissa_bits - 1))
    return 1 << (target.bits - 1) if target.special == "negative-zero" else target.top_code + 1


def _spacing(magnitude: Tensor, target: Format) -> Tensor:
    return _power_of_two(_exponent(magnitude, target) - target.mantissa_bits)


def _exponent(magnitude: Tensor, target: Format) -> Tensor:
    """floor(log2(magnitude)), int64, but not below the format's smallest exponent."""
    import torch

    # frexp's mantissa lies in [0.5, 1); its exponent of 0 is 0, which would be the exponent of values near 1.
    exponent = torch.frexp(magnitude).exponent.to(torch.int64) - 1
    return torch.where(magnitude == 0, target.min_exponent, exponent).clamp(min=target.min_exponent)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, exactly, for exponents of normal float64 numbers: torch's own pow and ldexp pass through fp32."""
    import torch

    return ((exponent + 1023) << 52).view(torch.float64)
