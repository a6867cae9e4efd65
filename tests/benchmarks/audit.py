"""What the audit costs: per op on tiny kernels beside other dispatch modes, and on one step of a small GPT.

``python tests/benchmarks/audit.py`` prints a table. Each round runs every mode in turn on one thread and takes the CPU
time of the process, so that what else runs on the machine counts little; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import precisionlint
from precisionlint.trace.position import Position
from precisionlint.trace.recorder import Recorder
from precisionlint.trace.registry import Registry

Make = Callable[[], contextlib.AbstractContextManager[Any]]


class Empty(TorchDispatchMode):
    """What every dispatch mode costs at least."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, c))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(
        self, vocabulary: int = 8192, width: int = 256, depth: int = 6, heads: int = 4, length: int = 256
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tiny(operations: int = 300) -> Callable[[], None]:
    """A forward and backward of many ops on eight numbers, under a module as in a real step."""

    class Chain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(operations):
                x = x * 1.5
                x = x + 0.5
            return x

    chain, x = Chain(), torch.ones(8, requires_grad=True)

    def run() -> None:
        chain(x).sum().backward()
        x.grad = None

    return run


def gpt_step() -> Callable[[], None]:
    """One bf16 autocast step with AdamW and a clip."""
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    tokens = torch.randint(0, 8192, (4, 257))

    def run() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return run


def recording_alone() -> Recorder:
    """The recorder without patches."""
    return Recorder(Position(), Registry(), lambda func: None)


MODES: dict[str, Make] = {
    "plain": contextlib.nullcontext,
    "empty dispatch mode": Empty,
    "audit, recorder alone": recording_alone,
    "audit, whole": precisionlint.audit,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
}
if find_spec("torch.utils._debug_mode"):  # torch 2.9 brought it
    from torch.utils._debug_mode import DebugMode

    MODES["DebugMode"] = DebugMode


def measure(run: Callable[[], None], modes: dict[str, Make], rounds: int, calls: int) -> list[dict[str, float]]:
    """Of each round CPU seconds a call under each mode; opening and closing a mode is not counted."""
    for make in modes.values():
        with make():
            run()
    found = []
    for _ in range(rounds):
        taken: dict[str, float] = {}
        for name, make in modes.items():
            with make():
                run()
                start = time.process_time()
                for _ in range(calls):
                    run()
                taken[name] = (time.process_time() - start) / calls
        found.append(taken)
    return found


def ratio(rounds: list[dict[str, float]], mode: str, to: str) -> float:
    """The median over the rounds of the ratio of two modes."""
    return statistics.median(each[mode] / each[to] for each in rounds)


def count_ops(run: Callable[[], None]) -> int:
    with precisionlint.audit() as audit:
        run()
    return sum(op.count for op in audit.report.ops)


def table(title: str, run: Callable[[], None], rounds: int, calls: int) -> None:
    ops = count_ops(run)
    found = measure(run, MODES, rounds, calls)
    plain = statistics.median(each["plain"] for each in found)
    print(f"{title}, {ops} ops")
    for name in MODES:
        over, empty = ratio(found, name, "plain"), ratio(found, name, "empty dispatch mode")
        added = (over - 1) * plain / ops * 1e6
        print(
            f"  {name:24} {over * plain * 1e3:9.2f} ms  x plain {over:5.2f}  x empty {empty:5.2f}  +{added:5.1f} us/op"
        )


def main() -> int:
    torch.set_num_threads(1)
    table("tiny kernels", tiny(), rounds=15, calls=3)
    table("small GPT, bf16 autocast, AdamW, clip", gpt_step(), rounds=5, calls=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
