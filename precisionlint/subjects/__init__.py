"""What ``check`` reads beside training programs: subjects of their own, each with a small reader and its own checks.

A subject is a line of ``SUBJECTS`` and a module with one function, ``read(file) -> Iterable[Event]``. It gives facts, which are events:
frozen records whose ``at`` is a ``findings.Place``. The rules that listen to them are functions in ``precisionlint.checks`` like any
other, and never see the file. ``words`` is the screen: a file is parsed only if it holds one word of each group.

A reader raises ``UnreadableError`` for a file that it cannot parse; whatever else it raises is told as a fault of ours, and the
findings of other files stand.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from msgspec import Struct

from precisionlint import documents
from precisionlint.findings import Place
from precisionlint.patterns import regex
from precisionlint.source import parsing

if TYPE_CHECKING:
    from precisionlint.events import Event
    from precisionlint.source.project import Project


Node = TypeVar("Node", bound=ast.AST)
REMARKS = regex(r'"{3}.*?"{3}' + r"|'{3}.*?'{3}|#[^\n]*", re.S)


class Subject(Struct, frozen=True):
    """``module`` is imported when a file passes the screen, and not before."""

    module: str
    suffixes: tuple[str, ...]
    words: tuple[tuple[bytes, ...], ...]

    def wants(self, path: str, data: bytes) -> bool:
        """Whether a file can hold anything of this subject, by its name and bytes alone."""
        own = path.endswith(self.suffixes) or (".py" in self.suffixes and documents.kind(path) != "other")
        return own and all(any(word in data for word in group) for group in self.words)

    def read(self, file: File) -> Iterable[Event]:
        """The facts of a file, in its order."""
        return cast("Iterable[Event]", importlib.import_module(self.module).read(file))


HALF = (b"bf16", b"bfloat16", b"fp16", b"float16", b"16-true")
CONFIGURED = (
    b"enabled",
    b"loss_scale",
    b"scale_power",
    b"accum_dtype",
    b"communication_data_type",
    b"master_weights_and_grads",
    b"--grad-reduce-in-bf16",
    b"main-grads-dtype",
    b"_component_",
    b"_target_: torch.optim",
    b"base_model",
    b"pure_bf16",
    b"downcast_bf16",
    b"deepspeed_config",
    b"16-true",
    b"reduce_dtype",
    b"grad_sync_dtype",
    b"PURE",
    b"accumulate_grad_in_fp32",
    b"main_grads_dtype",
    b"grad_reduce_in_fp32",
    b"fp16_compression",
    b"ddp_comm_hook",
    b"FP16_ALLREDUCE",
    b"fp16_allreduce",
)
NAMED_HALF = (b"bfloat16", b"float16", b".half")
TAKEN = (
    b"allclose",
    b"assert_close",
    b".numpy()",
    b"np.asarray",
    b"np.array",
    b"error < ",
    b"err < ",
    b"assertLess",
    b".max() <",
)
JAX = (b".add(", b"segment_sum", b"scan", b"fori_loop", b"pallas_call", b"jnp.zeros", b"optax", b"softmax", b"float32")
DTYPED = (b"dtype", b"float32", b"bfloat16", b"float16")
HANDED = (b"sqrt(", b"log_softmax", b"logsumexp", b"softmax_cross_entropy", b"_log", b"log_")
"""What JAX programs call ops that lose most in half, and the logarithms of decays."""
WRITTEN = (
    b"communication_data_type",
    b"grad_comm_dtype",
    b"grad_sync_dtype",
    b"grad_reduce_dtype",
    b"gradient_reduction",
    b"mixed_precision_reduce",
    b"accum_dtype",
    b"loss_scale",
    b"master_weights_and_grads",
    b"grad_reduce_in_fp32",
    b"--grad-reduce-in-bf16",
    b"main-grads-dtype",
    b"main_grads_dtype",
    b"accumulate_grad_in_fp32",
    b"--loss-scale",
    b"reduce_dtype",
    b"MixedPrecision",
    b"comm_hook",
    b"fp16_compression",
    b"Compression.fp16",
    b"torchtitan",
    b"deepspeed.initialize",
    b'gradient_accumulation_steps":',
    b"gradient_accumulation_steps':",
)
"""What a setting of half precision in Python source is called, of those that are read."""

ARITHMETIC = (
    b"mean(", b"softmax", b"logsumexp", b"exp(", b"arange(", b"inv_freq", b"masked_fill", b"norm(", b".grad", b"float8", b"amax",
    b"use_fast_accum", b"autocast", b"GradScaler", b"binary_cross_entropy", b"BCELoss", b"allow_tf32",
    b"fp32_precision", b"float32_matmul_precision", b"cudnn.flags", b"torch.log(", b".log()", b"log1p(", b"topk(", b"F.normalize(",
    b".half()", b"float16", b"MXFP8BlockScaling", b"autograd.Function", b"(Function", b"custom_op(",
    b"_int_mm", b".transpose(-", b".mT", b".t() @", b".T @", b"torch.where(", b"cumsum(", b".buffer()", b"cross_entropy", b"CrossEntropyLoss",
    b"mse_loss(", b"l1_loss(", b"kl_div(", b"zeros_like(", b"] = -1", b"* -1e", b"* 1e1", b"pow(2)", b"square()",
    b"logsigmoid(", b"get_total_norm", b"rsqrt(", b"+ 1e-", b"+ eps", b"clamp(min=",
    b"index_add", b"scatter_add", b"scatter_reduce", b".sin(", b"_loss(", b"index_reduce", b"_from_logits(", b"_logps(", b"_log_probs(",
    b"_logprobs(", b"_log_softmax(", b".sum()", b"cosine_similarity(", b"CosineSimilarity(", b"sqrt(", b".std(", b"scatter(", b"scatter_sum(",
    b"scatter_mean(", b"replace_masked_values(", b"bmm(", b"einsum(",
)  # fmt: skip
"""What an op or a call of value flow's rules is called."""

MOMENTS = (b"exp_avg_sq", b"square_avg", b"second_moment", b"variance", b"addcmul_", b".mul_(")
"""What an optimizer calls the average of its squared gradients."""

AVERAGES = (b".lerp_(", b".mul_(", b".sub_(", b"1 - ", b"1-", b"1. - ", b"1.0 - ", b"dtype=", b"ema.to(")
"""How an average of weights is spelled, or given a dtype."""
NAMED_AVERAGES = (
    b"ema",
    b"EMA",
    b"Ema",
    b"averag",
    b"shadow",
    b"teacher",
    b"momentum",
    b"polyak",
    b"target_net",
    b"decay",
)

TRAINED = (b"Adam", b"SGD(", b"Lion", b"RMSprop", b"Adagrad", b"Adadelta", b"Adafactor", b"optimizer_cl", b"opt_cl")
"""Optimizers that keep no fp32 copy of what they are given."""

KERNELS = (b".dot(", b".sum(", b".cumsum(", b".zeros(", b".full(", b".fma(", b".max(", b".atomic_add(")
"""What a Triton kernel calls of which anything can be said."""

SUBJECTS: tuple[Subject, ...] = (
    Subject("precisionlint.source.flow", (".py",), ((b"torch", b"MXFP8BlockScaling"), ARITHMETIC)),
    Subject("precisionlint.subjects.configurations", (".json", ".yaml", ".yml"), (HALF, CONFIGURED)),
    Subject("precisionlint.subjects.scripts", (".sh",), (HALF, WRITTEN)),
    Subject("precisionlint.subjects.jax_programs", (".py",), (HALF, (b"jax",), JAX)),
    Subject("precisionlint.subjects.jax_arithmetic", (".py",), (DTYPED, (b"jax", b"haliax"), HANDED)),
    Subject("precisionlint.subjects.half_values", (".py",), (NAMED_HALF, (b"torch",), TAKEN)),
    Subject("precisionlint.subjects.python_settings", (".py",), ((*HALF, b"MixedPrecision", b"HookType."), WRITTEN)),
    Subject(
        "precisionlint.subjects.written",
        (".py",),
        ((b"torch",), (b"backward(", b"autocast("), (b"autocast", b"amp_", b"_amp", b"mixed_precision")),
    ),
    Subject("precisionlint.subjects.unsaved", (".py",), ((b"torch",), (b"GradScaler(",))),
    Subject(
        "precisionlint.subjects.half_models",
        (".py",),
        ((b"torch",), NAMED_HALF, TRAINED, (b"param",), (b"backward(", b".step(")),
    ),
    Subject("precisionlint.subjects.optimizers", (".py",), ((b"torch",), MOMENTS)),
    Subject(
        "precisionlint.subjects.averages",
        (".py",),
        ((b"torch",), AVERAGES, NAMED_AVERAGES, (b"param", b"state_dict(", b".data", b".backward(")),
    ),
    Subject(
        "precisionlint.subjects.gradient_sums",
        (".py",),
        ((b"torch",), (b"GradientAccum", b"GradAccum", b".grad"), (b"dtype=", b".add_(", b"+=", b".get(", b"] + ")),
    ),
    Subject("precisionlint.subjects.triton", (".py",), ((b"jit",), (b"triton",), KERNELS)),
)


class File:
    """One file of a run: its text, and for Python source its tree, each made once and only when it is asked for."""

    def __init__(self, display: str, path: Path, data: bytes, project: Project) -> None:
        self.display = display
        self.path = Path(os.path.abspath(path))
        self.data = data
        self.project = project
        self._codes: dict[ast.stmt | None, str] = {}
        self._siblings: dict[ast.AST, frozenset[str]] = {}

    def beside(self, path: Path) -> File | None:
        """Another Python file of the project; None if it cannot be read or parsed."""
        return self.project.file(path)

    @cached_property
    def syntax(self) -> ast.Module:
        """The ast of a Python file.

        Raises: UnreadableError.
        """
        return self.project.syntax(self.path, self.data)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """The nodes of ``syntax``, as ``parsing.walk`` gives them.

        Raises: UnreadableError.
        """
        return parsing.walk(self.syntax)

    @cached_property
    def _by_kind(self) -> dict[type, list[ast.AST]]:
        found: dict[type, list[ast.AST]] = {}
        for node in self.nodes:
            found.setdefault(node.__class__, []).append(node)
        return found

    def every(self, kind: type[Node]) -> list[Node]:
        """The nodes of exactly this class, in the order of ``nodes``, which readers would go through once each to find them.

        Raises: UnreadableError.
        """
        return cast("list[Node]", self._by_kind.get(kind, []))

    @cached_property
    def functions(self) -> list[parsing.FunctionDef]:
        """The functions of the file, however deep they stand: by their depth, then from top to bottom.

        Raises: UnreadableError.
        """
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in self.nodes if node.__class__ in functions]

    @cached_property
    def owners(self) -> dict[ast.stmt, ast.ClassDef]:
        """Statement of a class's body, a method above all -> that class.

        Raises: UnreadableError.
        """
        return {part: owner for owner in self.every(ast.ClassDef) for part in owner.body}

    def siblings(self, method: parsing.FunctionDef | ast.Lambda) -> frozenset[str]:
        """The methods that a method of the file calls of its own object."""
        if method not in self._siblings:
            calls = (node.func for node in parsing.walk(method) if isinstance(node, ast.Call))
            self._siblings[method] = frozenset(
                func.attr
                for func in calls
                if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) and func.value.id == "self"
            )
        return self._siblings[method]

    @cached_property
    def called(self) -> frozenset[str]:
        """The names that the file calls, as functions or methods.

        Raises: UnreadableError.
        """
        functions = [node.func for node in self.every(ast.Call)]
        names = {function.id for function in functions if isinstance(function, ast.Name)}
        return frozenset(names | {function.attr for function in functions if isinstance(function, ast.Attribute)})

    @cached_property
    def text(self) -> str:
        """The text, read as UTF-8 whatever its bytes, Python source in the encoding that it declares; without a byte order mark."""
        if documents.kind(self.display) != "other":
            return parsing.decode(self.data)
        return self.data.decode("utf-8-sig", errors="replace")

    @cached_property
    def lines(self) -> list[str]:
        """The lines as Python counts them: form feeds and the like end none."""
        return parsing.split_lines(self.text)

    def code(self, node: ast.stmt | None) -> str:
        """The lines of a statement without comments and strings of several lines; those of the file for None."""
        if node not in self._codes:
            lines = self.lines if node is None else self.lines[node.lineno - 1 : node.end_lineno]
            self._codes[node] = REMARKS.sub("", "\n".join(lines))
        return self._codes[node]

    def place(self, node: ast.expr | ast.stmt) -> Place:
        """Where a node of ``syntax`` stands."""
        end_line, end = node.end_lineno or node.lineno, node.end_col_offset
        start = self.column(node.lineno, node.col_offset)
        return Place(self.display, node.lineno, start, end_line, self.column(end_line, end or 0))

    def column(self, line: int, offset: int) -> int:
        """The column of a byte offset into a line of UTF-8, counted in characters from 1."""
        return parsing.column(self.lines, line, offset)
