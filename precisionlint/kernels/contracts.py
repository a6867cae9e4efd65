"""The contracts: for each kind of kernel the form of its launcher, its options, its inputs, and its judgement.

It knows what is promised; `judge` holds the arithmetic of the bounds, `inputs` the numbers to try. A launcher is a
Python function of tensors that returns tensors; its form stands in the contract's `form`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from precisionlint.formats import E8M0FNU, FORMATS, FP32, decode
from precisionlint.kernels import inputs, inputs_nvfp4, judge, judge_nvfp4, operands, reference
from precisionlint.kernels.inputs import Case
from precisionlint.kernels.outcome import Violation


class ContractError(Exception):
    """A contract or an option was named that does not exist; the text is one line that says what does."""


class Option(Struct, frozen=True):
    """A declared property of a kernel: the words that it may have, the first of which is the default."""

    name: str
    words: tuple[str, ...]
    meaning: str
    number: bool = False
    """Whether a number may stand in place of the words."""


Options = Mapping[str, str]


class Contract(Struct, frozen=True):
    """What any correct kernel of a kind may return."""

    name: str
    form: str
    """The launcher's signature, with shapes and dtypes."""
    example: str
    options: tuple[Option, ...]
    cases: Callable[[Options], Iterator[Case]]
    judge: Callable[[Sequence[Tensor], Sequence[Tensor], Options], list[Violation]]
    """(inputs, outputs, options) to the clauses broken; all tensors on the CPU."""

    def resolve(self, given: Mapping[str, str]) -> Options:
        """The value of every option, from those given and the defaults; raises ContractError."""
        known = {option.name: option for option in self.options}
        for name, value in given.items():
            if name not in known:
                raise ContractError(f"contract {self.name} has no option '{name}'{_nearest(name, known)}")
            option = known[name]
            if value not in option.words and not (option.number and _is_number(value)):
                choice = ", ".join((*option.words, *(["a number"] if option.number else [])))
                raise ContractError(f"contract {self.name}: {name} is one of {choice}, not '{value}'")
        return MappingProxyType({option.name: given.get(option.name, option.words[0]) for option in self.options})


FORMAT = Option("format", ("e4m3fn", "e5m2"), "the element format")
SCALE = Option("scale", ("fp32", "power-of-two"), "the largest magnitude over the maximum, or the power of two above")
QUOTIENT = Option("quotient", ("full", "ieee", "reciprocal"), "how x is divided by its scale: Triton's `/`, tl.div_rn, "
                  "or times an inverse")  # fmt: skip
FLOOR = Option("floor", ("undeclared",), "the least magnitude that a scale is made for", number=True)
NONFINITE = Option("nonfinite", ("propagate", "unspecified"), "what becomes of NaN and infinities")
SHAPES = Option("shapes", ("any", "aligned"), "which sizes the launcher takes")
STRIDES = Option("strides", ("any", "contiguous"), "which strides the launcher takes")
OUT = Option("out", ("bf16", "fp16", "fp32"), "the dtype of the result")
ACCUMULATOR = Option("accumulator", ("fp32", "tensor-core"), "what a sum is kept in before it is promoted: fp32, or "
                     "about 14 bits, as sm_90 does")  # fmt: skip
PROMOTION = Option("promotion", ("128",), "after how many of K a sum of the tensor core is promoted", number=True)
QUANTIZER = (FORMAT, SCALE, QUOTIENT, FLOOR, NONFINITE, SHAPES, STRIDES)

WHOLE = None
"""A block that spans a whole dimension."""

BLOCKS = {"1x128": (1, 128), "128x128": (128, 128), "row": (1, WHOLE), "tensor": (WHOLE, WHOLE)}


def _quantizer(name: str, rows: int | None, columns: int | None, scales: str) -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(inputs.matrices((rows, columns), FORMATS[options["format"]]), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        (x,) = given
        target = FORMATS[options["format"]]
        m, n = x.shape
        block = (rows or m, columns or n)
        grid = (-(-m // block[0]), -(-n // block[1]))
        flexible = columns is None and len(outputs) == 2 and isinstance(outputs[1], Tensor)
        if flexible and outputs[1].numel() == grid[0] * grid[1]:  # one scale, or one a row: its shape is free
            outputs = (outputs[0], outputs[1].reshape(grid))
        broken = judge.same_structure(outputs, [("codes", (m, n), target.torch_dtype), ("scales", grid, torch.float32)])
        if broken:
            return broken
        return judge.quantized(x.double(), outputs[0].double(), outputs[1].double(), block, _scaling(options))

    return Contract(
        name=name,
        form=f"launch(x) -> (codes, scales): x (M, N) fp32, fp16 or bf16; codes (M, N) in FP8; scales {scales} fp32, "
        "multipliers for the way back",
        example="def launch(x):\n    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)\n    scales = ...\n"
        "    kernel[grid](x, codes, scales, ...)\n    return codes, scales",
        options=QUANTIZER,
        cases=cases,
        judge=judged,
    )


def _product(name: str, per_block: bool, scales: str) -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(operands.products(FORMATS[options["format"]], per_block), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        a, a_scales, b, b_scales = given
        target = FORMATS[options["out"]]
        shape = (a.shape[0], b.shape[0])
        broken = judge.same_structure(outputs, [("c", shape, target.torch_dtype)])
        if broken:
            return broken
        if per_block:
            left = reference.dequantize(a, a_scales, (1, 128))
            right = reference.dequantize(b, b_scales, (128, 128)).t()
        else:
            left, right = a.double() * a_scales.double(), (b.double() * b_scales.double()).t()
        magnitude = torch.nan_to_num(left.abs()) @ torch.nan_to_num(right.abs())
        error = judge.matmul_error(magnitude, a.shape[1])
        if options["accumulator"] == "tensor-core":
            error += judge.narrow_error(magnitude, float(options["promotion"]))
        return judge.rounded(left @ right, error, outputs[0].double(), target, "special", "product")

    return Contract(
        name=name,
        form="launch(a, a_scales, b, b_scales) -> c: a (M, K) and b (N, K) in FP8; "
        f"{scales} fp32 multipliers; c = a @ b.T, (M, N)",
        example="def launch(a, a_scales, b, b_scales):\n"
        "    c = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)\n"
        "    kernel[grid](a, a_scales, b, b_scales, c, ...)\n    return c",
        options=(FORMAT, OUT, ACCUMULATOR, PROMOTION, SHAPES, STRIDES),
        cases=cases,
        judge=judged,
    )


def _mx_quantizer() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(inputs.matrices(reference.MX_BLOCK, FORMATS[options["format"]]), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        (x,) = given
        target = FORMATS[options["format"]]
        outputs = _e8m0_as_bytes(outputs)
        grid = (x.shape[0], -(-x.shape[1] // 32))
        broken = judge.same_structure(
            outputs, [("codes", tuple(x.shape), target.torch_dtype), ("scales", grid, torch.uint8)]
        )
        if broken:
            return broken
        scales = decode(outputs[1], E8M0FNU)
        rounding, nonfinite = _word(options["rounding"]), _word(options["nonfinite"])
        return judge.mx_quantized(x.double(), outputs[0].double(), scales, target, rounding, nonfinite)

    return Contract(
        name="quantize_mx",
        form="launch(x) -> (codes, scales): x (M, N) fp32, fp16 or bf16; codes (M, N) in FP8; scales (M, ceil(N / 32)) "
        "E8M0, in uint8 or float8_e8m0fnu",
        example="def launch(x):\n    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)\n    scales = ...\n"
        "    kernel[grid](x, codes, scales, ...)\n    return codes, scales",
        options=(
            FORMAT,
            Option("rounding", ("floor", "ceil", "rceil", "even"), "how the shared exponent follows from the maximum"),
            NONFINITE,
            SHAPES,
            STRIDES,
        ),
        cases=cases,
        judge=judged,
    )


def _mx_product() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(operands.mx_products(FORMATS[options["format"]]), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        a, a_scales, b, b_scales = given
        target = FORMATS[options["out"]]
        broken = judge.same_structure(outputs, [("c", (a.shape[0], b.shape[0]), target.torch_dtype)])
        if broken:
            return broken
        left = reference.dequantize(a, decode(a_scales, E8M0FNU), reference.MX_BLOCK)
        right = reference.dequantize(b, decode(b_scales, E8M0FNU), reference.MX_BLOCK).t()
        error = judge.matmul_error(torch.nan_to_num(left.abs()) @ torch.nan_to_num(right.abs()), a.shape[1])
        return judge.rounded(left @ right, error, outputs[0].double(), target, "special", "product")

    return Contract(
        name="gemm_mx",
        form="launch(a, a_scales, b, b_scales) -> c: a (M, K) and b (N, K) in FP8; scales (M, ceil(K / 32)) and "
        "(N, ceil(K / 32)) E8M0 in uint8; c = a @ b.T, (M, N)",
        example="def launch(a, a_scales, b, b_scales):\n"
        "    c = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)\n"
        "    kernel[grid](a, a_scales, b, b_scales, c, ...)\n    return c",
        options=(FORMAT, OUT, SHAPES, STRIDES),
        cases=cases,
        judge=judged,
    )


def _stochastic_cast() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return inputs.stochastic(FORMATS[options["to"]])

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        x, _ = given
        target = FORMATS[options["to"]]
        broken = judge.same_structure(outputs, [("y", tuple(x.shape), target.torch_dtype)])
        return broken or judge.stochastically_rounded(x.double(), outputs[0].double(), target)

    return Contract(
        name="stochastic_cast",
        form="launch(x, seed) -> y: x (N,) fp32, seed one int64 in a tensor; y (N,) in the format, saturated",
        example="def launch(x, seed):\n    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)\n"
        "    kernel[grid](x, y, seed, ...)\n    return y",
        options=(Option("to", ("bf16", "fp16", "e4m3fn", "e5m2"), "the format of the result"),),
        cases=cases,
        judge=judged,
    )


def _nvfp4_quantizer() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        hadamard, stochastic = options["hadamard"] == "16", options["rounding"] == "stochastic"
        return _supported(inputs_nvfp4.matrices(hadamard, stochastic), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        x, (m, n) = given[0], given[0].shape
        outputs = judge_nvfp4.packed_codes(outputs)
        if len(outputs) == 3 and isinstance(outputs[2], Tensor) and outputs[2].numel() == 1:
            outputs = (*outputs[:2], outputs[2].reshape(()))
        broken = judge.same_structure(
            outputs,
            [
                ("codes", (m, -(-n // 2)), torch.uint8),
                ("scales", (m, -(-n // 16)), torch.float8_e4m3fn),
                ("tensor_scale", (), torch.float32),
            ],
        )
        if broken:
            return broken
        promise = judge_nvfp4.Promise(
            quotient=_word(options["quotient"]),
            floor=None if options["floor"] == "undeclared" else float(options["floor"]),
            least_scale=float(options["least-scale"]),
            nonfinite=_word(options["nonfinite"]),
            stochastic=options["rounding"] == "stochastic",
        )
        signs = given[1].double() if options["hadamard"] == "16" else None
        codes = judge_nvfp4.unpacked(outputs[0], n)
        return judge_nvfp4.quantized(x.double(), codes, outputs[1].double(), outputs[2].double(), promise, signs)

    return Contract(
        name="quantize_nvfp4",
        form="launch(x[, signs][, seed]) -> (codes, scales, tensor_scale): x (M, N) fp32, fp16 or bf16; codes "
        "(M, ceil(N / 2)) E2M1, two in a byte, the even column in the low half, in uint8 or float4_e2m1fn_x2; scales "
        "(M, ceil(N / 16)) float8_e4m3fn; tensor_scale one fp32 element; signs (16,) fp32, +-1, with hadamard=16; "
        "seed one int64 in a tensor, with rounding=stochastic",
        example="def launch(x):\n    codes = torch.empty(x.shape[0], -(-x.shape[1] // 2), dtype=torch.uint8)\n"
        "    scales, tensor_scale = ...\n    kernel[grid](x, codes, scales, tensor_scale, ...)\n"
        "    return codes, scales, tensor_scale",
        options=(
            Option("rounding", ("nearest", "stochastic"), "how an element goes to a code"),
            Option("hadamard", ("none", "16"), "the random Hadamard transform of each 16 of a row that comes first"),
            QUOTIENT,
            FLOOR,
            Option("least-scale", ("0",), "the least scale of a block", number=True),
            NONFINITE,
            SHAPES,
            STRIDES,
        ),
        cases=cases,
        judge=judged,
    )


def _e8m0_as_bytes(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    e8m0 = E8M0FNU.torch_dtype
    return tuple(
        each.view(torch.uint8) if isinstance(each, Tensor) and each.dtype == e8m0 else each for each in outputs
    )


def _cast() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(inputs.casts(FORMATS[options["to"]]), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        (x,) = given
        target = FORMATS[options["to"]]
        broken = judge.same_structure(outputs, [("y", tuple(x.shape), target.torch_dtype)])
        if broken:
            return broken
        exact, nothing = x.double(), torch.zeros_like(x, dtype=torch.float64)
        return judge.rounded(exact, nothing, outputs[0].double(), target, _word(options["overflow"]), "number")

    return Contract(
        name="cast",
        form="launch(x) -> y: x fp32, fp16 or bf16; y of its shape in the format, rounded to nearest even",
        example="def launch(x):\n    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)\n"
        "    kernel[grid](x, y, ...)\n    return y",
        options=(
            Option("to", ("e4m3fn", "e5m2", "bf16", "fp16"), "the format of the result"),
            Option("overflow", ("saturate", "special"), "the maximum, or infinity (NaN where there is none)"),
            SHAPES,
            STRIDES,
        ),
        cases=cases,
        judge=judged,
    )


def _dequantizer() -> Contract:
    def cases(options: Options) -> Iterator[Case]:
        return _supported(inputs.coded(BLOCKS[options["block"]], FORMATS[options["format"]]), options)

    def judged(given: Sequence[Tensor], outputs: Sequence[Tensor], options: Options) -> list[Violation]:
        """A product in fp32, rounded by u, and into a narrower format once more; into fp32 nothing else is allowed."""
        codes, scales = given
        target = FORMATS[options["out"]]
        broken = judge.same_structure(outputs, [("y", tuple(codes.shape), target.torch_dtype)])
        if broken:
            return broken
        rows, columns = BLOCKS[options["block"]]
        exact = reference.dequantize(codes, scales, (rows or codes.shape[0], columns or codes.shape[1]))
        once = exact.abs() * judge.U + FP32.smallest / 2
        error = torch.zeros_like(exact) if target == FP32 else torch.nan_to_num(once, posinf=0.0)
        return judge.rounded(exact, error, outputs[0].double(), target, "special", "number")

    return Contract(
        name="dequantize",
        form="launch(codes, scales) -> y: codes (M, N) in FP8, scales fp32 by block; y = codes * scale, (M, N)",
        example="def launch(codes, scales):\n    y = torch.empty(codes.shape, device=codes.device)\n"
        "    kernel[grid](codes, scales, y, ...)\n    return y",
        options=(
            FORMAT,
            Option("block", tuple(BLOCKS), "what shares a scale; scales are (row blocks, column blocks)"),
            Option("out", ("fp32", "bf16", "fp16"), "the dtype of the result"),
            SHAPES,
            STRIDES,
        ),
        cases=cases,
        judge=judged,
    )


def _scaling(options: Options) -> judge.Scaling:
    return judge.Scaling(
        target=FORMATS[options["format"]],
        kind="power-of-two" if options["scale"] == "power-of-two" else "fp32",
        quotient=_word(options["quotient"]),
        floor=None if options["floor"] == "undeclared" else float(options["floor"]),
        nonfinite=_word(options["nonfinite"]),
    )


def _word(value: str) -> Any:
    """A checked option as the literal that it is: `resolve` admits no other words."""
    return value


def _supported(cases: Iterator[Case], options: Options) -> Iterator[Case]:
    for case in cases:
        if (case.aligned or options["shapes"] == "any") and (case.contiguous or options["strides"] == "any"):
            yield case


def _is_number(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _nearest(word: str, known: Mapping[str, object]) -> str:
    near = get_close_matches(word, known, n=1)
    return f"; did you mean '{near[0]}'?" if near else f"; known: {', '.join(known)}"


CONTRACTS: Mapping[str, Contract] = MappingProxyType(
    {
        contract.name: contract
        for contract in (
            _cast(),
            _stochastic_cast(),
            _quantizer("quantize_1x128", 1, 128, "(M, ceil(N / 128))"),
            _quantizer("quantize_128x128", 128, 128, "(ceil(M / 128), ceil(N / 128))"),
            _quantizer("quantize_row", 1, WHOLE, "(M, 1) or (M,)"),
            _quantizer("quantize_tensor", WHOLE, WHOLE, "one element of any shape,"),
            _mx_quantizer(),
            _nvfp4_quantizer(),
            _dequantizer(),
            _mx_product(),
            _product(
                "gemm_blockscaled", True, "a_scales (M, ceil(K / 128)) and b_scales (ceil(N / 128), ceil(K / 128))"
            ),
            _product("gemm_tensor", False, "a_scales and b_scales of no dimension,"),
        )
    }
)


def find(name: str) -> Contract:
    """The contract of that name; raises ContractError, which names the nearest or all."""
    if name not in CONTRACTS:
        raise ContractError(f"no contract is called '{name}'{_nearest(name, CONTRACTS)}")
    return CONTRACTS[name]
