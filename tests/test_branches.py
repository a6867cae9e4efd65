"""What is read as it is written stands in branches as well: those that the file decides are never told, others say what they hang on."""

from pathlib import Path

import pytest

from precisionlint import check

HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

{constant}


def wrap(model, args, compress=False):
    model = DistributedDataParallel(model)
    {test}
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    return model
"""


def told(path: Path, text: str, **settings: object) -> list[tuple[str, str, str]]:
    path.write_text(text.lstrip("\n"))
    report = check([path.as_posix()], select=["all"], **settings)  # type: ignore[arg-type]
    assert not report.errors
    return [(each.rule, each.confidence, each.when) for each in report.findings]


@pytest.mark.parametrize(
    ("constant", "test", "when"),
    [
        ("COMPRESS = True", "if COMPRESS:", ""),
        ("COMPRESS = False", "if COMPRESS:", None),
        ("COMPRESS: bool = False", "if COMPRESS and args.compress:", None),
        ("COMPRESS = False", "if not COMPRESS:", ""),
        ("SUMS = 'fp32'", "if SUMS == 'bf16':", None),
        ("SUMS = 'bf16'", "if SUMS in ('bf16', 'half'):", ""),
        ("SUMS = 'bf16'", "if SUMS != 'bf16':\n        pass\n    elif args.compress:", "args.compress"),
        ("COMPRESS = False", "if not COMPRESS:\n        return model\n    if True:", None),
        ("COMPRESS = False\nCOMPRESS = True", "if COMPRESS:", "COMPRESS"),
        ("COMPRESS = False\nexec(open('overrides.py').read())", "if COMPRESS:", "COMPRESS"),
        ("COMPRESS = False\ndef narrow():\n    global COMPRESS\n    COMPRESS = True", "if COMPRESS:", "COMPRESS"),
        ("COMPRESS = False", "COMPRESS = args.compress\n    if COMPRESS:", "COMPRESS"),
        ("", "if compress:", "compress"),
        ("", "if args.compress and args.ranks > 8:", "args.compress and args.ranks > 8"),
        ("", "if args.wide:\n        pass\n    else:", "not args.wide"),
        ("", "if args.sums == 'fp32':\n        return model\n    if True:", "args.sums != 'fp32'"),
    ],
)
def test_a_hook_in_a_branch(tmp_path: Path, constant: str, test: str, when: str | None) -> None:
    found = told(tmp_path / "wrap.py", HOOK.format(constant=constant, test=test))
    assert found == ([("half-gradient-reduction", "certain", when)] if when is not None else [])


@pytest.mark.parametrize(("value", "hits"), [("False", 0), ("True", 1)])
def test_an_assumption_decides_a_branch(tmp_path: Path, value: str, hits: int) -> None:
    text = HOOK.format(constant="", test="if args.compress:")
    assert len(told(tmp_path / "wrap.py", text, assume={"compress": value})) == hits


POLICY = """
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

{constant}


def policy():
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype={sums})
"""


@pytest.mark.parametrize(
    ("constant", "sums", "found"),
    [
        ("NARROW = False", "torch.bfloat16 if NARROW else torch.float32", []),
        ("NARROW = True", "torch.bfloat16 if NARROW else torch.float32", ["certain"]),
        ("SUMS = torch.float32", "SUMS", []),
        ("SUMS = torch.bfloat16", "SUMS", ["certain"]),
    ],
)
def test_a_constant_says_what_sums_are_in(tmp_path: Path, constant: str, sums: str, found: list[str]) -> None:
    text = POLICY.format(constant=constant, sums=sums)
    assert [confidence for _, confidence, _ in told(tmp_path / "policy.py", text)] == found


READERS = {
    "half-arange": "import torch\n\n\ndef positions(n):\n    {test}\n        return torch.arange(4096, dtype=torch.bfloat16)\n",
    "half-to-numpy": "import torch\n\n\ndef out(x):\n    {test}\n        return x.bfloat16().numpy()\n",
    "jax-half-accumulation": "import jax\nimport jax.numpy as jnp\n\n\ndef total(x, i):\n    {test}\n        return jax.ops.segment_sum("
    "x.astype(jnp.bfloat16), i)\n",
}


@pytest.mark.parametrize("rule", READERS)
@pytest.mark.parametrize(("test", "when"), [("if NARROW:", None), ("if settings.narrow:", "settings.narrow")])
def test_every_reader_keeps_to_the_branch(tmp_path: Path, rule: str, test: str, when: str | None) -> None:
    text = READERS[rule].format(test=test).replace("\n\n\n", "\nfrom settings import settings\nNARROW = False\n\n\n", 1)
    assert [(name, way) for name, _, way in told(tmp_path / "a.py", text)] == ([(rule, when)] if when else [])
