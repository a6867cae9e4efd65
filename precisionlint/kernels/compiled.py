"""Compiles what a launcher launches for real targets, without a GPU, and reads the result.

It knows how to catch a launch before it happens, triton's compiler, and the tools that report registers. What a dot
accumulates into is read by `ttir`. Nothing is run, so nothing is said of the numbers.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from precisionlint.kernels import ttir
from precisionlint.kernels.outcome import Compiled, Evidence, Multiplication
from precisionlint.kernels.run import shown

TARGETS: Mapping[str, tuple[str, int | str, int]] = {
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""Triton's backend, architecture and warp size of each."""

UNBOUNDED = 2**20
"""A bound on imprecise additions that no K reaches; triton's default for sm_90 is 2^30."""

FP8 = ("f8E4M3FN", "f8E5M2", "f8E4M3FNUZ", "f8E5M2FNUZ")


class Launch(Struct, frozen=True):
    """A kernel with the arguments of one launch."""

    function: Any
    arguments: Mapping[str, Any]
    options: Mapping[str, Any]
    """num_warps, num_stages and the like."""


def launches(launch: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Launch, ...]:
    """What a launcher launches for these inputs, each configuration of an autotuned kernel among it; nothing runs.

    What the launcher raises before it launches anything passes through. What it raises afterwards does not count: it
    sees outputs that no kernel wrote.
    """
    caught: list[Launch] = []
    with _catching(caught):
        try:
            launch(*inputs)
        except BaseException:
            if not caught:
                raise
    return tuple(caught)


def compile_for(launch: Launch, target: str) -> Compiled:
    """Compiles one launch for one of TARGETS; a failure is part of the result."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = launch.function
    start = time.perf_counter()
    signature, constants, attributes = specialised(function, launch.arguments)
    try:
        built = triton.compile(
            ASTSource(function, signature, constants, attributes),
            target=GPUTarget(*TARGETS[target]),
            options=dict(launch.options),
        )
    except Exception as error:  # whatever the compiler raises is its verdict on this kernel
        text = " ".join(str(error).split())[:300]
        return Compiled(function.__name__, target, failed=f"{type(error).__name__}: {text}")
    text = built.asm["ttir"]
    products = tuple(
        Multiplication(dot.a, dot.b, dot.result, _promotion(dot, target), shown(dot.spot.path), dot.spot.line)
        for dot in ttir.dots(text)
    )
    machine = built.asm.get("ptx") or built.asm.get("amdgcn") or ""
    registers, spills = _resources(machine, target)
    return Compiled(
        kernel=function.__name__,
        target=target,
        products=products,
        evidence=tuple(_evidence(text, target)),
        divisions=_divisions(machine),
        registers=registers,
        spills=spills,
        shared=getattr(built.metadata, "shared", None),
        seconds=time.perf_counter() - start,
    )


def _promotion(dot: ttir.Dot, target: str) -> str:
    """After how many of K a dot's sum reaches fp32 arithmetic outside of the tensor core, in words.

    Only sm_90 looks at maxNumImpreciseAcc, and only for fp8.
    """
    if dot.carried is None:
        return "unknown"
    if not dot.carried:
        return f"every {dot.inner} of K" if dot.inner else "after each dot"
    if target == "sm_90" and dot.a in FP8 and dot.imprecise:
        return "never" if dot.imprecise >= UNBOUNDED else f"every {dot.imprecise} of K"
    return "left to the tensor core"


def _evidence(text: str, target: str) -> Iterator[Evidence]:
    """What the rules of the family triton say of a kernel's IR."""
    for dot in ttir.dots(text):
        where = (shown(dot.spot.path), dot.spot.line)
        if dot.result in ttir.HALF and (dot.carried is not False or dot.a in FP8):
            yield Evidence("triton-half-accumulator", "error", f"a dot of {dot.a} accumulates in {dot.result}", *where)
        if target == "sm_90" and dot.a in FP8 and dot.carried and (dot.imprecise or 0) >= UNBOUNDED:
            yield Evidence(
                "triton-imprecise-fp8-dot",
                "error",
                f"the sum of {dot.a} products stays in the tensor core along all of K, in about 14 bits: pass "
                "max_num_imprecise_acc, or add the result of each dot to an accumulator yourself",
                *where,
            )
        if dot.tf32:
            yield Evidence("triton-default-tf32", "info", "a dot of fp32 operands runs in TF32", *where)
    for half in ttir.half_sums(text):
        rule = "triton-half-accumulator" if half.kind == "loop" else "triton-half-reduction"
        what = "a loop carries a sum" if half.kind == "loop" else "a reduction adds"
        severity = "error" if half.kind == "loop" else "warning"
        yield Evidence(rule, severity, f"{what} in {half.dtype}", shown(half.spot.path), half.spot.line)


@contextmanager
def _catching(caught: list[Launch]) -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    def run(function: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
        own = {name: value for name, value in kwargs.items() if name in function.arg_names}
        bound = inspect.signature(function.fn).bind(*args, **own)
        bound.apply_defaults()
        options = {name: value for name, value in kwargs.items() if name not in own}
        caught.append(Launch(function, dict(bound.arguments), options))

    def run_each(tuner: Any, *args: Any, **kwargs: Any) -> None:
        for config in tuner.configs:
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())

    before = JITFunction.run, Autotuner.run
    JITFunction.run, Autotuner.run = run, run_each
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = before


def specialised(function: Any, arguments: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """The signature, constants and attributes that triton's launcher would choose for these arguments.

    Integers that are 1 become constants; pointers and integers that 16 divides are marked so, without which figures of
    registers mean nothing.
    """
    from triton.runtime.jit import mangle_type

    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, parameter in enumerate(function.params):
        value = arguments[parameter.name]
        fixed = parameter.do_not_specialize or isinstance(value, bool | float)
        if parameter.is_constexpr or value is None or (not fixed and isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = mangle_type(value)
        number = value.data_ptr() if hasattr(value, "data_ptr") else value
        if not fixed and isinstance(number, int) and number % 16 == 0:
            attributes[(index,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _divisions(machine: str) -> tuple[tuple[str, int], ...]:
    """The fp32 division and reciprocal instructions of PTX, with how often each stands in the code."""
    found = re.findall(r"^\s*(?:@\S+\s+)?((?:div|rcp)\.[\w.]*f32)\b", machine, re.MULTILINE)
    return tuple((name, found.count(name)) for name in sorted(set(found)))


def _resources(machine: str, target: str) -> tuple[int | None, int | None]:
    """Registers of a thread, and bytes (NVIDIA) or registers (AMD) spilled; None where no tool can say."""
    if target.startswith("gfx"):
        counts = [re.search(rf"\.{name}:\s+(\d+)", machine) for name in ("vgpr_count", "vgpr_spill_count")]
    else:
        log = _ptxas_log(machine)
        counts = [re.search(pattern, log) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    registers, spills = (int(count.group(1)) if count else None for count in counts)
    return registers, spills


def _ptxas_log(ptx: str) -> str:
    """What triton's own ptxas says of the code; empty where it has none that knows this version of PTX."""
    import triton

    goal = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as home:
        source = Path(home, "kernel.ptx")
        source.write_text(ptx, encoding="utf-8")
        for tool in (folder / "ptxas", folder / "ptxas-blackwell"):
            if not tool.exists() or goal is None:
                continue
            command = [
                str(tool),
                "-v",
                f"--gpu-name={goal.group(1)}",
                str(source),
                "-o",
                str(Path(home, "kernel.cubin")),
            ]
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode == 0:
                return ran.stderr
    return ""
