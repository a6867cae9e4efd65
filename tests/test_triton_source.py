"""What `check` reads in Triton kernels: faults of the four rules and of FP8 scales, and as much sound code that looks like them."""

from pathlib import Path

import pytest

from precisionlint import check
from precisionlint.findings import Confidence

RULES = (
    "triton-half-accumulator",
    "triton-half-reduction",
    "triton-imprecise-fp8-dot",
    "triton-default-tf32",
    "fp8-zero-amax",
)
HEAD = (
    "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\n"
    "def kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr, fp8_max: tl.constexpr = 448.0):\n"
)


def found(tmp_path: Path, body: str, after: str = "", least: Confidence = "likely") -> list[tuple[str, str]]:
    """(rule, confidence) of what is found in a kernel of that body, and in what follows it."""
    path = tmp_path / "kernels.py"
    lines = "".join(f"    {line}\n" for line in body.strip("\n").splitlines())
    path.write_text(f"{HEAD}{lines}\n\n{after}", encoding="utf-8")
    report = check([str(path)], select=RULES, isolated=True, min_confidence=least)
    assert report.errors == ()
    return [(finding.rule, finding.confidence) for finding in report.findings]


ACCUMULATORS = {
    "a dot into a half sum": """
acc = tl.zeros((BLOCK, BLOCK), tl.float16)
for k in range(N):
    acc += tl.dot(tl.load(x_ptr + k), tl.load(y_ptr + k), out_dtype=tl.float16)
""",
    "by keyword": """
acc = tl.zeros([BLOCK], dtype=tl.bfloat16)
for k in range(N):
    acc = acc + tl.load(x_ptr + k)
""",
    "in an inner loop": """
for m in range(N):
    acc = tl.zeros([BLOCK], dtype=tl.bfloat16)
    for k in range(N):
        acc += tl.load(x_ptr + k).to(tl.bfloat16)
    tl.store(y_ptr + m, acc)
""",
    "under a condition": """
acc = tl.full([BLOCK], 0.0, dtype=tl.float16)
k = 0
while k < N:
    if k % 2 == 0:
        acc += tl.load(x_ptr + k)
    k += 1
""",
    "after a cast": """
acc = tl.load(x_ptr).to(tl.float16)
for k in range(N):
    acc = tl.fma(tl.load(x_ptr + k).to(tl.float16), tl.load(y_ptr + k).to(tl.float16), acc)
""",
}


@pytest.mark.parametrize("body", ACCUMULATORS.values(), ids=ACCUMULATORS.keys())
def test_a_sum_in_half_around_a_loop_is_found(tmp_path: Path, body: str):
    assert found(tmp_path, body) == [("triton-half-accumulator", "certain")]


SOUND = {
    "an fp32 sum": """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
for k in range(N):
    acc += tl.dot(tl.load(x_ptr + k), tl.load(y_ptr + k))
tl.store(y_ptr, acc.to(tl.float16))
""",
    "a half tile made anew in each turn": """
acc = tl.zeros([BLOCK], dtype=tl.float32)
for k in range(N):
    tile = tl.zeros([BLOCK], dtype=tl.float16)
    tile += tl.load(x_ptr + k).to(tl.float16)
    acc += tile.to(tl.float32)
""",
    "a half maximum": """
top = tl.zeros([BLOCK], dtype=tl.float16)
for k in range(N):
    top = tl.maximum(top, tl.load(x_ptr + k).to(tl.float16))
""",
    "an integer counter beside half numbers": """
count = tl.zeros([BLOCK], dtype=tl.int32)
zero = tl.zeros([BLOCK], dtype=tl.float16)
for k in range(N):
    count += 1
    tl.store(y_ptr + k, zero)
""",
    "a sum once, outside of a loop": """
acc = tl.zeros([BLOCK], dtype=tl.float16)
acc += tl.load(x_ptr).to(tl.float16)
""",
    "pointers that move on": """
pointers = x_ptr + tl.arange(0, BLOCK)
for k in range(N):
    value = tl.load(pointers).to(tl.float16)
    pointers += BLOCK
    tl.store(y_ptr + k, value)
""",
    "the element type of an argument": """
acc = tl.zeros([BLOCK], dtype=y_ptr.dtype.element_ty)
for k in range(N):
    acc += tl.load(x_ptr + k)
""",
    "an unrolled sum that becomes fp32": """
acc = tl.zeros([BLOCK], dtype=tl.float16)
for k in tl.static_range(4):
    acc = acc + tl.load(x_ptr + k).to(tl.float32)
""",
    "a sum of integers": """
i = tl.load(x_ptr).to(tl.int32)
tl.store(y_ptr, tl.sum(i, axis=0))
""",
    "a sum of fp32": """
x = tl.load(x_ptr).to(tl.float16)
tl.store(y_ptr, tl.sum(x.to(tl.float32) * 2, axis=0))
""",
    "a half sum with fp32 asked for": """
x = tl.load(x_ptr).to(tl.float16)
tl.store(y_ptr, tl.sum(x, axis=0, dtype=tl.float32))
""",
    "a half maximum of a tile": """
x = tl.load(x_ptr).to(tl.float16)
tl.store(y_ptr, tl.max(x, axis=0))
""",
    "a load of unknown dtype": """
tl.store(y_ptr, tl.sum(tl.load(x_ptr), axis=0))
""",
    "an fp8 dot added outside": """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
for k in range(N):
    acc += tl.dot(tl.load(x_ptr + k).to(tl.float8e5), tl.load(y_ptr + k).to(tl.float8e5))
""",
    "an fp8 dot that is bounded": """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
for k in range(N):
    acc = tl.dot(tl.load(x_ptr + k).to(tl.float8e5), tl.load(y_ptr + k).to(tl.float8e5), acc, max_num_imprecise_acc=32)
""",
    "one fp8 dot with no loop": """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
acc = tl.dot(tl.load(x_ptr).to(tl.float8e5), tl.load(y_ptr).to(tl.float8e5), acc)
""",
    "a bf16 dot along K": """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
for k in range(N):
    acc = tl.dot(tl.load(x_ptr + k).to(tl.bfloat16), tl.load(y_ptr + k).to(tl.bfloat16), acc)
""",
    "an fp32 dot that says how": """
tl.store(y_ptr, tl.dot(tl.load(x_ptr).to(tl.float32), tl.load(y_ptr).to(tl.float32), allow_tf32=False))
""",
    "a scale with a floor": """
x = tl.load(x_ptr).to(tl.float32)
s = tl.maximum(tl.max(tl.abs(x)), 1e-10) / 448.0
tl.store(y_ptr, (x / s).to(tl.float8e4nv))
""",
    "a scale with an epsilon": """
x = tl.load(x_ptr).to(tl.float32)
s = tl.max(tl.abs(x)) / 448.0 + 1e-8
tl.store(y_ptr, (x / s).to(tl.float8e4nv))
""",
    "a scale that is looked at": """
x = tl.load(x_ptr).to(tl.float32)
s = tl.max(tl.abs(x)) / 448.0
s = 1.0 if s == 0 else s
tl.store(y_ptr, (x / s).to(tl.float8e4nv))
""",
    "a scale under a condition": """
x = tl.load(x_ptr).to(tl.float32)
amax = tl.max(tl.abs(x))
if amax > 0:
    tl.store(y_ptr, (x * (448.0 / amax)).to(tl.float8e4nv))
""",
    "a scale from a running maximum above zero": """
amax = tl.full([BLOCK], 1e-4, tl.float32)
for k in range(N):
    amax = tl.maximum(amax, tl.max(tl.abs(tl.load(x_ptr + k).to(tl.float32)), 1))
tl.store(y_ptr, (tl.load(x_ptr).to(tl.float32) / (amax / 448.0)).to(tl.float8e4nv))
""",
    "int8, which is another matter": """
x = tl.load(x_ptr).to(tl.float32)
s = tl.max(tl.abs(x)) / 127.0
tl.store(y_ptr, (x / s).to(tl.int8))
""",
    "a scale from elsewhere": """
x = tl.load(x_ptr).to(tl.float32)
tl.store(y_ptr, (x / tl.load(y_ptr)).to(tl.float8e4nv))
""",
}


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND.keys())
def test_sound_kernels_are_silent(tmp_path: Path, body: str):
    assert found(tmp_path, body) == []


@pytest.mark.parametrize(
    ("body", "rule"),
    [
        ("x = tl.load(x_ptr).to(tl.float16)\ntl.store(y_ptr, tl.sum(x * x, 0))", "triton-half-reduction"),
        ("x = tl.load(x_ptr).to(tl.bfloat16)\ntl.store(y_ptr, (x * 2).sum(0))", "triton-half-reduction"),
        ("x = tl.load(x_ptr).to(tl.bfloat16)\ntl.store(y_ptr, tl.cumsum(x[:, None], 0))", "triton-half-reduction"),
        ("x = tl.load(x_ptr).to(tl.float32)\ntl.store(y_ptr, tl.dot(x, tl.trans(x)))", "triton-default-tf32"),
        (
            "x = tl.load(x_ptr).to(tl.float32)\nm = tl.max(tl.abs(x))\n"
            "s = tl.exp2(tl.ceil(tl.log2(m / 448.0)))\ntl.store(y_ptr, (x / s).to(tl.float8e4nv))",
            "fp8-zero-amax",
        ),
        (
            "x = tl.load(x_ptr).to(tl.float32)\ninv = 1.0 / (tl.max(tl.abs(x), axis=1) / 448.0)\n"
            "tl.store(y_ptr, tl.clamp(x * inv[:, None], -448.0, 448.0))",
            "fp8-zero-amax",
        ),
        (
            "x = tl.load(x_ptr).to(tl.float32)\nx *= N\ns = tl.max(tl.abs(x)) / 448.0\ncode = x / s\n"
            "code = code.to(tl.float8e4nv)\ntl.store(y_ptr, code)",
            "fp8-zero-amax",
        ),
        (
            "r = 1 / fp8_max\nx = tl.load(x_ptr).to(tl.float32)\ns = tl.max(tl.abs(x)) * r\ntl.store(y_ptr, x / s)",
            "fp8-zero-amax",
        ),
        (
            "m = tl.zeros([BLOCK], tl.float32)\nfor k in range(N):\n"
            "    m = tl.maximum(m, tl.max(tl.abs(tl.load(x_ptr + k).to(tl.float32)), 1))\n"
            "tl.store(y_ptr, (tl.load(x_ptr).to(tl.float32) / (m / 448.0)).to(tl.float8e4nv))",
            "fp8-zero-amax",
        ),
    ],
)
def test_what_a_kernel_says_itself_is_found_and_certain(tmp_path: Path, body: str, rule: str):
    assert found(tmp_path, body) == [(rule, "certain")]


SUMS = "tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))"
DOTS = """
acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
for k in range(N):
    acc = tl.dot(tl.load(x_ptr + k), tl.load(y_ptr + k), acc)
"""
LAUNCH = "def launch(x, y):\n    kernel[(1,)](x, y, x.numel(), BLOCK=128)\n\n\n"


@pytest.mark.parametrize(
    ("body", "after", "rule"),
    [
        (SUMS, LAUNCH + "launch(torch.ones(128, dtype=torch.float16), torch.empty(1))", "triton-half-reduction"),
        (SUMS, LAUNCH + "x = torch.ones(128).half()\nlaunch(x.view(-1), torch.empty(1))", "triton-half-reduction"),
        (SUMS, "def launch(x):\n    assert x.dtype in (torch.float16, torch.bfloat16)\n    kernel[(1,)](x, x, 1, 128)", "triton-half-reduction"),
        (SUMS, "def launch(x, dtype=torch.bfloat16):\n    x = x.to(dtype)\n    kernel[(1,)](x_ptr=x, y_ptr=x, N=1)", "triton-half-reduction"),
        ("p = dl.consume_token(x_ptr, dl.wait(y_ptr))\nq = p + tl.arange(0, BLOCK) * N\ntl.store(y_ptr, tl.sum(tl.load(q), axis=0))",
         LAUNCH + "launch(torch.ones(128, dtype=torch.float16), torch.empty(1))", "triton-half-reduction"),
        (DOTS, LAUNCH + "a = torch.ones(8, 8).to(torch.float8_e5m2)\nlaunch(a, a)", "triton-imprecise-fp8-dot"),
    ],
)  # fmt: skip
def test_a_launch_in_the_file_says_the_dtype_and_that_is_likely(tmp_path: Path, body: str, after: str, rule: str):
    assert found(tmp_path, body, after) == [(rule, "likely")]


@pytest.mark.parametrize(
    "after",
    [
        LAUNCH + "launch(torch.ones(128), torch.empty(1))",
        LAUNCH + "x = torch.ones(128, dtype=torch.float16)\nx = x.float()\nlaunch(x, torch.empty(1))",
        LAUNCH + "launch(torch.empty(1), torch.ones(128, dtype=torch.float16))",
        "def launch(x):\n    x = x.half()\n    x = x + torch.ones(1)\n    kernel[(1,)](x, x, 1, 128)",
        "def launch(*args):\n    kernel[(1,)](*args)",
    ],
)
def test_a_launch_with_other_dtypes_or_unknown_ones_says_nothing(tmp_path: Path, after: str):
    assert found(tmp_path, SUMS, after) == []


TAKEN = "y = torch.empty_like(x)\n    kernel[(1,)](x, y, x.numel(), 128)\n    return y\n"
WIDENING = "z = tl.load(y_ptr).to(tl.float32)\n"


@pytest.mark.parametrize(
    "after",
    [
        "def launch(x):\n    " + TAKEN,
        "def launch(x, /, n=8, *, dtype=None):\n    " + TAKEN,
        "def launch(n=8, dtype=torch.float32, /, x=None):\n    " + TAKEN,
        "def launch(x: torch.Tensor):\n    x = x.contiguous().view(-1)\n    " + TAKEN,
        "class F(torch.autograd.Function):\n    def backward(ctx, dy):\n        x = dy.contiguous()\n        "
        + TAKEN.replace("\n    ", "\n        "),
        "def forward(x):\n    return x, x.new_empty(8)\n\n\ndef backward(g):\n    _, x = forward(g)\n    " + TAKEN,
        "class F(torch.autograd.Function):\n    def forward(ctx, a, b):\n        ctx.save_for_backward(torch.ones(8), b)\n"
        "    def backward(ctx, dy):\n        _, x = ctx.saved_tensors\n        "
        + TAKEN.replace("\n    ", "\n        "),
    ],
    ids=[
        "a parameter",
        "by position",
        "after others",
        "a view of one",
        "a gradient",
        "what a function returns",
        "what a forward saves",
    ],
)
def test_what_callers_hand_in_is_summed_in_their_dtype_and_that_is_likely(tmp_path: Path, after: str):
    assert found(tmp_path, WIDENING + SUMS, after) == [("triton-half-reduction", "likely")]
    accumulated = "acc = tl.zeros([BLOCK], x_ptr.dtype.element_ty)\nfor k in range(N):\n    acc += tl.load(x_ptr + k)\n"
    assert found(tmp_path, accumulated, after) == [("triton-half-accumulator", "likely")]


@pytest.mark.parametrize(
    ("body", "after"),
    [
        (SUMS, "def launch(x):\n    " + TAKEN),  # nothing in the file speaks of half
        (WIDENING + SUMS, "def launch(x):\n    x = torch.empty(8, dtype=torch.float32)\n    " + TAKEN),
        (WIDENING + SUMS, "def launch(count: int):\n    x = torch.arange(count)\n    " + TAKEN),
        (WIDENING + SUMS.replace("x_ptr", "idx_ptr"), "def launch(x):\n    " + TAKEN),
        (WIDENING + SUMS, "def launch(x):\n    x = x * other\n    " + TAKEN),
        (WIDENING + "tl.store(y_ptr, tl.sum(tl.exp(tl.load(x_ptr + tl.arange(0, BLOCK)))))", "def launch(x):\n    " + TAKEN),
        (WIDENING + "tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)) * z))", "def launch(x):\n    " + TAKEN),
        (
            "x = tl.load(x_ptr + tl.arange(0, BLOCK))\nif MODE == 1:\n    x = x.to(tl.float32)\ntl.store(y_ptr, tl.sum(x))",
            "def launch(x):\n    " + TAKEN,
        ),
    ],
    ids=["no half", "fp32", "integers", "unknown pointer", "unknown", "exp", "times fp32", "widened on a path"],
)  # fmt: skip
def test_sums_of_what_is_not_the_callers_half_are_silent(tmp_path: Path, body: str, after: str):
    assert found(tmp_path, body, after) == []


PARTS = """@triton.jit
def reduce(partial_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.sum(tl.load(partial_ptr + tl.arange(0, BLOCK))))


def launch(x):
    partial = torch.empty(8, {dtype})
    reduce[(1,)](partial, x, BLOCK=8)
"""


@pytest.mark.parametrize(
    ("dtype", "told"),
    [("dtype=x.dtype", True), ("dtype=torch.float32", False), ("", False)],
    ids=["the caller's", "fp32", "torch's default"],
)
def test_partial_sums_that_the_file_makes_in_the_callers_dtype_are_summed_in_it(tmp_path: Path, dtype: str, told: bool):
    parts = PARTS.format(dtype=dtype)
    expected = [("triton-half-reduction", "possible")] if told else []
    assert found(tmp_path, WIDENING, parts, "possible") == expected
    assert found(tmp_path, WIDENING, parts.replace("partial", "partial_count"), "possible") == []


KEPT = "class Layer:\n    def forward(self):\n        kernel[(1,)](self.scores, self.sums, 8, BLOCK=128)\n"


@pytest.mark.parametrize("word", ["dtype", "type"])
def test_sums_in_the_dtype_of_what_an_object_keeps_are_possible(tmp_path: Path, word: str):
    made = f"acc = tl.zeros([BLOCK], x_ptr.{word}.element_ty)\n"
    body = made + "for k in range(N):\n    acc += tl.load(x_ptr + k)\n"
    assert found(tmp_path, body, KEPT, "possible") == [("triton-half-accumulator", "possible")]
    counted = body.replace("x_ptr", "sizes_ptr")
    kernel = "@triton.jit\ndef count(sizes_ptr, N, BLOCK: tl.constexpr):\n" + "".join(
        f"    {line}\n" for line in counted.splitlines()
    )
    assert found(tmp_path, WIDENING, kernel + KEPT, "possible") == []


def test_what_a_kernel_narrows_to_the_callers_dtype_counts_on_every_path(tmp_path: Path):
    body = (
        "x = tl.load(x_ptr + tl.arange(0, BLOCK))\ndtype = x.dtype\nif MODE == 1:\n    x = x.to(tl.float32)\n"
        "z = tl.load(y_ptr).to(tl.float32)\ntl.store(y_ptr, tl.sum(x * z.to(dtype)))"
    )
    assert found(tmp_path, body, "def launch(x):\n    " + TAKEN) == [("triton-half-reduction", "likely")]


ADDED = "tl.atomic_add(y_ptr + tl.arange(0, BLOCK), tl.load(x_ptr + tl.arange(0, BLOCK)).to(tl.float32))"


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (
            "def launch(x):\n    y = torch.zeros(128, dtype=torch.bfloat16)\n    kernel[(8,)](x, y, x.numel(), 128)",
            True,
        ),
        ("def launch(x):\n    y = torch.zeros_like(x)\n    kernel[(8,)](x, y, x.numel(), 128)", True),
        ("def launch(x):\n    y = x.new_zeros(128)\n    kernel[(8,)](x, y, x.numel(), 128)", True),
        ("def launch(x, y):\n    kernel[(8,)](x, y, x.numel(), 128)", False),
        (
            "def launch(x):\n    y = torch.zeros(128, dtype=torch.float32)\n    kernel[(8,)](x, y, x.numel(), 128)",
            False,
        ),
        ("def launch(x, y):\n    y = y.to(torch.float32)\n    kernel[(8,)](x, y, x.numel(), 128)", False),
        ("def launch(x, count):\n    y = torch.zeros(count)\n    kernel[(8,)](x, y, x.numel(), 128)", False),
    ],
)
def test_programs_that_add_to_half_tensors_are_found(tmp_path: Path, after: str, told: bool):
    assert found(tmp_path, ADDED, after) == [("triton-half-accumulator", "likely")] * told


SWAPPED = """
inputs = x_ptr if BLOCK else y_ptr
outputs = y_ptr if BLOCK else x_ptr
tl.atomic_add(outputs + tl.arange(0, BLOCK), tl.load(inputs + tl.arange(0, BLOCK)).to(tl.float32))
"""


@pytest.mark.parametrize(("dtype", "told"), [("torch.float16", True), ("torch.float32", False)])
def test_an_address_that_a_flag_swaps_is_one_in_either(tmp_path: Path, dtype: str, told: bool):
    after = (
        "def launch():\n    x = torch.zeros(128, dtype=torch.float32)\n"
        f"    y = torch.zeros(128, dtype={dtype})\n    kernel[(8,)](x, y, 128, 128)"
    )
    assert found(tmp_path, SWAPPED, after) == [("triton-half-accumulator", "likely")] * told
    assert found(tmp_path, SWAPPED, after.replace("(x, y,", "(x, mask_of(y),")) == []


def test_a_sum_that_a_kernel_makes_in_the_dtype_of_a_buffer_is_possible_and_one_of_its_numbers_is_not_told(
    tmp_path: Path,
):
    path = tmp_path / "kernels.py"
    head = HEAD.replace("x_ptr", "send_buf")
    loop = "for k in range(N):\n        acc += tl.load(send_buf + k)\n    tl.store(y_ptr, tl.sum(tl.load(send_buf + tl.arange(0, BLOCK))))\n"
    path.write_text(f"{head}    acc = tl.zeros([BLOCK], send_buf.dtype.element_ty)\n    {loop}", encoding="utf-8")
    shown = check([str(path)], select=RULES, min_confidence="possible", isolated=True).findings
    assert [(each.rule, each.confidence) for each in shown] == [("triton-half-accumulator", "possible")]


def test_a_kernel_that_another_file_launches_is_possible_and_shown_to_who_asks(tmp_path: Path):
    path = tmp_path / "kernels.py"
    path.write_text(HEAD + "    z = tl.load(y_ptr).to(tl.float32)\n    " + SUMS, encoding="utf-8")
    assert check([str(path)], select=RULES, isolated=True).findings == ()
    (shown,) = check([str(path)], select=RULES, min_confidence="possible", isolated=True).findings
    assert (shown.rule, shown.severity, shown.confidence) == ("triton-half-reduction", "info", "possible")


def test_one_launch_of_several_is_enough(tmp_path: Path):
    after = LAUNCH + (
        "a = torch.ones(8, 8, dtype=torch.bfloat16)\nlaunch(a, a)\n"
        "if torch.cuda.is_available():\n    a = a.to(torch.float8_e4m3fn)\n    b = a.T\n    launch(a, b.contiguous())\n"
    )
    assert found(tmp_path, DOTS, after) == [("triton-imprecise-fp8-dot", "likely")]


def test_a_helper_is_read_with_what_its_caller_knows(tmp_path: Path):
    helper = "@triton.jit\ndef add_up(x):\n    return tl.sum(x, axis=0)\n"
    assert found(tmp_path, "tl.store(y_ptr, add_up(tl.load(x_ptr).to(tl.float16)))", helper) == [
        ("triton-half-reduction", "certain")
    ]
    assert found(tmp_path, "tl.store(y_ptr, add_up(tl.load(x_ptr).to(tl.float32)))", helper) == []


def test_functions_that_triton_does_not_compile_are_not_read(tmp_path: Path):
    plain = (
        "def plain(x):\n    acc = tl.zeros([4], tl.float16)\n    for k in range(4):\n        acc += x\n    return acc\n"
    )
    assert found(tmp_path, "tl.store(y_ptr, tl.load(x_ptr))", plain) == []


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16)\ntl.store(y_ptr, s)", True),
        (
            "s = tl.zeros([BLOCK, BLOCK], tl.float16)\ns += tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16)",
            True,
        ),
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16)\ntl.store(y_ptr, s.to(tl.float32))", False),
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16).to(tl.float32)\ntl.store(y_ptr, s)", False),
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.int32)\ntl.store(y_ptr, s)", False),
    ],
)
def test_a_dot_that_sums_in_half_is_told_where_nothing_lifts_it(tmp_path: Path, body: str, told: bool):
    assert found(tmp_path, body) == ([("triton-half-accumulator", "certain")] if told else [])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16).to(tl.float32)\ntl.store(y_ptr, s)", True),
        (
            "s = tl.zeros([BLOCK, BLOCK], tl.float32)\nfor k in range(N):\n    s += tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.float16)",
            True,
        ),
        ("s = tl.zeros([BLOCK, BLOCK], tl.float32)\nfor k in range(N):\n    s += tl.dot(tl.load(x_ptr), tl.load(y_ptr))", False),
        ("s = tl.dot(tl.load(x_ptr), tl.load(y_ptr), out_dtype=tl.int32).to(tl.float32)\ntl.store(y_ptr, s)", False),
    ],
)  # fmt: skip
def test_a_tile_that_is_summed_in_half_and_lifted_then_is_possible(tmp_path: Path, body: str, told: bool):
    assert found(tmp_path, body, "", "possible") == ([("triton-half-accumulator", "possible")] if told else [])


CHOSEN_ACCUMULATOR = """
import torch
import triton
import triton.language as tl


@triton.jit
def product(a_ptr, b_ptr, c_ptr, K, ACC: tl.constexpr, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK, BLOCK), dtype=ACC)
    for k in range(0, K, BLOCK):
        acc += tl.dot(tl.load(a_ptr + k), tl.load(b_ptr + k), out_dtype=ACC)
    tl.store(c_ptr, acc)


def launch(a, b, c):
    product[(1,)](a, b, c, a.shape[1], ACC={chosen}, BLOCK=64)
"""


@pytest.mark.parametrize(
    ("chosen", "told"), [("tl.float16", True), ("tl.bfloat16", True), ("tl.float32", False), ("a.shape[0]", False)]
)
def test_what_a_launch_chooses_to_accumulate_in(tmp_path: Path, chosen: str, told: bool):
    (tmp_path / "kernels.py").write_text(CHOSEN_ACCUMULATOR.format(chosen=chosen), encoding="utf-8")
    report = check([str(tmp_path / "kernels.py")], select=["triton-half-accumulator"], isolated=True)
    assert [finding.confidence for finding in report.findings] == ["likely"] * told


@pytest.mark.parametrize(("made", "told"), [("tl.zeros_like(q)", True), ("tl.zeros_like(q).to(tl.float32)", False)])
def test_a_sum_that_is_made_like_what_was_loaded(tmp_path: Path, made: str, told: bool):
    body = f"""
q = tl.load(x_ptr + tl.arange(0, BLOCK))
out = {made}
for k in range(N):
    v = tl.load(y_ptr + k)
    out += tl.dot(q.to(v.dtype), v).to(out.dtype)
tl.store(x_ptr, out)
"""
    assert found(tmp_path, body, "", "possible") == ([("triton-half-accumulator", "possible")] if told else [])


LAYER = """
import triton
import triton.language as tl


class Linear:
    @staticmethod
    @triton.jit
    def forward(x_ptr, w_ptr, K, BLOCK: tl.constexpr, dtype: {kind}):
        output = tl.zeros((BLOCK, BLOCK), {made})
        for k in range(0, K, BLOCK):
            output += tl.dot(tl.load(x_ptr + k), tl.load(w_ptr + k), out_dtype=dtype)
        return output.to(dtype)
"""


@pytest.mark.parametrize(
    ("kind", "made", "told"),
    [
        ("tl.constexpr", "dtype", True),
        ("constexpr", "dtype=dtype", True),
        ("tl.constexpr", "tl.float32", False),
        ("int", "dtype", False),
    ],
)
def test_a_kernel_that_is_handed_the_dtype_of_its_sum(tmp_path: Path, kind: str, made: str, told: bool):
    (tmp_path / "linear.py").write_text(LAYER.format(kind=kind, made=made), encoding="utf-8")
    report = check(
        [str(tmp_path / "linear.py")], select=["triton-half-accumulator"], min_confidence="possible", isolated=True
    )
    assert [finding.confidence for finding in report.findings] == ["possible"] * told
    assert all("'output' is summed up in dtype, which callers decide" in each.message for each in report.findings)
