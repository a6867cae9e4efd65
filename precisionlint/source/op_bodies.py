"""What the body of one's own op (torch.library, autograd.Function, a Triton launch) says of dtypes, by its words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from precisionlint.patterns import regex

SENSITIVE = regex(
    r"@|matmul|mm\(|einsum|linear|conv|softmax|\bexp\(|\blog\(|\.pow\(|\*\*|\bsum\(|mean\(|norm|rsqrt|\[grid|\[\(|kernel|_cuda\b|triton"
)
"""What a body must hold for its dtypes to matter: products, sums, exponentials, launches."""

CASTS = regex(
    r"\.(?:float|half|bfloat16|double)\(\)|\.to\((?:dtype=)?(?:torch|tl)\.|\.type\(|dtype=torch\.float32|autocast|\.to\(\w*(?:type|dtype)\)"
)
"""How a body brings its inputs to one dtype by itself."""

ALIGNS = regex(r"\.to\([\w.]+\.dtype\b|\btype_as\(|\.dtype [!=]= (?!torch\.)|\b(?:assert|if) [^\n]*\.dtype [!=]= ")
"""How a body brings one input to the dtype of another, or asks for them to agree."""

MULTIPLIES = regex(
    r" @ |\bmatmul\(|(?:\b|(?<!scaled)(?<!int)_)(?:add|badd)?b?mm\(|\beinsum\(|\blinear\(|\bconv(?!ert)\w*\("
)
"""What autocast casts; ``_scaled_mm``, ``_int_mm`` and a kernel of the project's own that is called so, it leaves alone."""
ASSIGNED = regex(r"= [\w.]+(?:\.to\([\w.]+\.dtype\b|\.type_as\()|\b(?:assert|if) [^\n]*\.dtype\b")
"""That it keeps what it aligned, or asks for agreement."""
LAUNCHES = regex(
    r"\[grid|\w\[\(|kernel(?!_?(?:size|width|shape))|(?<!\bis)_cuda(?:_\w+)?\b[.(]|triton|_ext\.|\b_C\.|kernels\."
)
EXTENSIONS = regex(
    r"_ext\b|\bext_module\.|\b_C\.|(?:\b|_)backend\.\w+\(|\bMSDA\.|torch\.ops\.\w+\.|\bgmm\(|\bwp\.launch\("
)
"""Compiled code of a program's own, by the names that such modules are imported as."""
PRODUCT = regex(r"matmul|gemm|(?:^|_)b?mm(?:_|$)|linear|attention|attn|conv\d?d?(?:_|$)", re.I)
"""What an op is called that multiplies."""
KERNELS = regex(r"(?:^|[._])(?:triton|kernels?|cuda|csrc|C|ext)(?:[._]|$)|_(?:cuda|ext|kernels?|ops)(?:\.|$)")
"""What a module of kernels is called."""
RETURNS = regex(
    r"\b(\w+) = \w+\.dtype\b(?s:.*)\.to\((?:dtype=)?\1\)"
    r"|\b(\w+) = torch\.(?:empty|zeros)\([^=]*=[^=]*dtype=torch\.float32\)(?s:.*)\b\2\.to\(\w+\.dtype\)"
)
"""How a body that computes in another dtype gives its result that of an input."""
WEIGHTS = regex(r"(?!attn|attention)(?:\w*_)?(?:weights?|bias(?:es)?|gamma|w\d?|W\d?)|D?W\d?")
"""Parameters by their name: what is kept in fp32 where the activations beside it come in half."""
QUANTISED = regex(r"scales?(?:_|$)|absmax|quant|zero_?points?")
"""Parameters by their name that only weights in few bits bring along."""
COUNTS = regex(
    r"ind(?:ex|ices)|idx|_?ids?$|len|ptr|mask|offset|size|seed|num|count|rows|cols|map|order|group|target|label|shape|coord?s|shift|voxel"
)
"""Inputs that are integers, by their name."""
MADE = regex(
    r"\b(?:new_)?(?:empty|zeros|ones|full)(?:_like)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|\.to\((?:torch|tl)\.u?(?:int|long|bool)\w*\)"
)
"""A tensor that is made, and a cast to integers: their dtypes say nothing of the inputs'."""
LOADED = regex(r"\btl\.load\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)(\.to\()?")


COMPLEX = regex(r"\b(?:i?r?|i?h)fft[n2]?\(|\bview_as_complex\(")


def is_complex(body: str) -> bool:
    """Whether a body computes with complex numbers, whose products autocast leaves as they are."""
    return COMPLEX.search(body) is not None


def settles(body: str) -> bool:
    """Whether a body brings its inputs to one dtype by itself."""
    return CASTS.search(body) is not None


KEPT = regex(r"\b(\w+) = \w+\.dtype\b")
CAST_TO = regex(r"\b(\w+)\.(?:to|type)\((?:dtype=)?(\w+)\)")


def aligns(body: str, inputs: Iterable[str]) -> bool:
    """Whether a body brings one input to the dtype of another, which it may have kept under a name: ``d = x.dtype``, ``weight.to(d)``. A result
    that is cast to that says nothing of what went in."""
    if ALIGNS.search(body):
        return True
    kept = {match[1] for match in KEPT.finditer(body)}
    return any(match[1] in inputs and match[2] in kept for match in CAST_TO.finditer(body))


def allocates_wide(body: str) -> bool:
    """Whether all that looks like a cast in a body is the dtype of what it makes to be filled."""
    return not settles(MADE.sub("", body))


def loads_cast(body: str) -> bool:
    """Whether the Triton kernels of a text cast whatever they load, at once."""
    loads = LOADED.findall(body)
    return bool(loads) and all(loads)


def launches_on_one(inputs: Iterable[str], body: str) -> bool:
    """Whether a body hands one tensor of numbers to kernels and multiplies no matrices: there are no two dtypes that could differ."""
    numbers = [name for name in inputs if not COUNTS.search(name)]
    return len(numbers) == 1 and LAUNCHES.search(body) is not None and not MULTIPLIES.search(body)


def launches_settled(body: str, tree: ast.Module) -> bool:
    """Whether a body computes by launches alone, of kernels of its file that compute in fp32 whatever they load, and multiply no matrices:
    of those the operands must agree."""
    if MULTIPLIES.search(body) or not LAUNCHES.search(body):
        return False
    kernels = [
        ast.unparse(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(each) for each in node.decorator_list)
        and re.search(rf"\b{node.name}\b", body)
    ]
    return bool(kernels) and all(".to(tl.float32)" in kernel and "dot(" not in kernel for kernel in kernels)
