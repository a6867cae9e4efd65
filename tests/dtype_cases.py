"""Expressions over ``x`` (4 x 4), ``w`` (4 x 4, fp32), ``n`` (4, int64) and ``mask`` (4 x 4, bool), for which torch itself says what comes out.

The value flow's tables of dtypes are held against torch with them (``test_flow.py``): plain, under the CPU's autocast, and under CUDA's,
whose lists a CPU build has as well: tensors that hold no data can stand on a device that is not there.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

UNARY = """
    relu sigmoid tanh neg abs absolute sign floor ceil round trunc frac sqrt rsqrt reciprocal exp expm1 log log2 log10 log1p sin cos tan
    sinh cosh asin acos atan erf erfinv exp2 square mean var std norm amax amin max min prod clone detach contiguous t nan_to_num sum
    tril triu diag ravel logcumsumexp(-1) logsumexp(-1) softmax(-1) log_softmax(-1) cumsum(-1) cumprod(-1) clamp(min=0) clip(0,1)
    clamp_min(0) clamp_max(1) masked_fill(mask,0.0) reshape(-1) view(-1) permute(1,0) transpose(0,1) unsqueeze(0) flatten() repeat(1,2)
    expand(4,4) roll(1) flip(0) new_zeros(3) new_ones(3) new_full((3,),1.0) argmax() argmin() argsort() isnan() isfinite() eq(0) lt(0)
    any() logical_not() nansum() lerp(x,0.5) copy_(w) half() float() double() bfloat16() int() long() bool() type_as(w) to(w)
    to(torch.float16) to(dtype=torch.float64) T mT pow(2) pow(3) add(w) sub(w) mul(w) div(w) add_(w) mul_(w) matmul(w) mm(w) mv(x.amax(0))
    index_select(0,n) gather(0,n.unsqueeze(0)) scatter_add(0,n.unsqueeze(0),x) index_add(0,n,x) maximum(w) minimum(w)
    logaddexp(w) hypot(w) atan2(w) remainder(w) fmod(w)
"""
FUNCTIONS = """
    F.relu(x) F.gelu(x) F.silu(x) F.softplus(x) F.elu(x) F.leaky_relu(x) F.mish(x) F.hardtanh(x) F.logsigmoid(x) F.dropout(x)
    F.layer_norm(x,(4,)) F.rms_norm(x,(4,)) F.normalize(x) F.softmax(x,dim=-1) F.log_softmax(x,dim=-1) F.linear(x,w)
    F.softmax(x,dim=-1,dtype=torch.float32) torch.softmax(x,-1,dtype=torch.float64) F.mse_loss(x,w) F.l1_loss(x,w)
    F.smooth_l1_loss(x,w) F.huber_loss(x,w) F.kl_div(x,w) F.cross_entropy(x,n) F.nll_loss(x,n) F.pad(x,(1,1))
    F.binary_cross_entropy_with_logits(x,w) F.group_norm(x,2) F.conv1d(x.unsqueeze(0),w.unsqueeze(-1)) F.embedding(n,x)
    F.conv2d(x.view(1,4,2,2),w.view(4,4,1,1)) F.scaled_dot_product_attention(x.view(1,1,4,4),x.view(1,1,4,4),x.view(1,1,4,4))
    torch.matmul(x,w) torch.einsum('ij,jk->ik',x,w) torch.bmm(x.unsqueeze(0),w.unsqueeze(0)) torch.addmm(x,x,w) torch.outer(n,n)
    torch.cat([x,w]) torch.stack([x,x]) torch.where(mask,x,w) torch.linalg.vector_norm(x) torch.linalg.vector_norm(x,dtype=torch.float32)
    torch.norm(x) torch.zeros(3) torch.ones(3,dtype=torch.float16) torch.zeros_like(x) torch.full((2,),1.0) torch.arange(4)
    torch.arange(4.0) torch.arange(4,dtype=torch.bfloat16) torch.linspace(0,1,3) torch.eye(3) torch.sum(n) torch.cumsum(n,0)
    torch.sqrt(x) torch.exp(x) torch.pow(x,2) torch.square(x) torch.mean(x,dim=-1) torch.logsumexp(x,-1) torch.rsqrt(x)
"""
OPERATORS = (
    "x + 1", "x * 0.5", "x / 2", "x ** 2", "x ** 0.5", "2 ** x", "1.0 / x", "x + w", "x - n", "x * w", "x / w", "x @ w", "x @ x", "-x",
    "x * x", "x > 0", "x + mask", "n + 1", "n * 0.5", "n / 2", "n // 2", "n ** 2", "n * 1.0", "10000 ** (n / 4)", "n + n", "mask * x",
    "x[0]", "x[:, None]", "x.T @ w", "(x * w).softmax(-1)", "x.float() @ w", "x.float().sum()", "x.sum() * 0.5", "sum([x, w])", "abs(x)",
    "x.pow(2).mean(-1, keepdim=True)", "x * (x * x).mean(-1, keepdim=True) ** -0.5", "(x if x.sum() > 0 else x * 2)",
    "2 * torch.pi * x", "x * torch.tensor(2.0)", "torch.tensor(2) * x", "x / torch.sqrt(torch.tensor(4.0))", "x / torch.tensor(4).float()",
    "x @ x.T / torch.sqrt(torch.tensor(x.shape[-1]))", "torch.max(x, torch.tensor(0.5))", "torch.maximum(x, torch.tensor(0.5))",
    "torch.where(mask, x, torch.tensor(0.0))", "n * torch.tensor(2.0)", "n * torch.tensor(2)", "x * torch.tensor([2.0])",
    "x + torch.tensor(0.5).expand(4)", "torch.tensor(0.5) + 1", "torch.stack([x.sum(), torch.tensor(1.0)])",
)  # fmt: skip


def expressions() -> list[str]:
    """All expressions, as Python text."""
    methods = [f"x.{call}" if "(" in call or call in ("T", "mT") else f"x.{call}()" for call in UNARY.split()]
    return [*methods, *FUNCTIONS.split(), *OPERATORS]


SOURCE = """
def case_{number}():
    x = torch.ones(4, 4, dtype=torch.{dtype})
    w = torch.ones(4, 4)
    n = torch.ones(4, dtype=torch.int64)
    mask = torch.ones(4, 4, dtype=torch.bool)
    with {region}:
        return {expression}
"""


def program(dtype: str, device: str) -> str:
    """A file with a function for each expression."""
    region = f'torch.autocast("{device}", dtype=torch.bfloat16)' if device else "open('x')"
    cases = (SOURCE.format(number=i, dtype=dtype, region=region, expression=e) for i, e in enumerate(expressions()))
    return "import torch\nimport torch.nn.functional as F\n" + "".join(cases)


def of_torch(dtype: str, device: str) -> dict[str, str]:
    """Expression -> the dtype that torch gives it; what torch refuses, or has no data for, is left out."""
    found: dict[str, str] = {}
    for expression in expressions():
        with ExitStack() as stack:
            if device == "cuda":
                stack.enter_context(FakeTensorMode())
            on: Any = {"device": device or "cpu"}
            x, w = torch.ones(4, 4, dtype=getattr(torch, dtype), **on), torch.ones(4, 4, **on)
            n, mask = torch.ones(4, dtype=torch.int64, **on), torch.ones(4, 4, dtype=torch.bool, **on)
            stack.enter_context(region(device))
            names = {"x": x, "w": w, "n": n, "mask": mask, "torch": torch, "F": torch.nn.functional}
            try:
                result = eval(expression, names)
            except (RuntimeError, NotImplementedError, ValueError, IndexError):
                continue
        found[expression] = str((result[0] if isinstance(result, tuple) else result).dtype).removeprefix("torch.")
    return found


class CudaAutocast:
    """CUDA's autocast on a build without CUDA: ``torch.autocast("cuda")`` would switch itself off."""

    def __enter__(self) -> None:
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.autocast_increment_nesting()

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cuda", False)
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


def region(device: str) -> Any:
    if device == "cuda":
        return CudaAutocast()
    return torch.autocast("cpu", dtype=torch.bfloat16) if device else nullcontext()
