"""The value flow: dtypes as torch gives them, what a function computes along all paths, and where reading ends."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from dtype_cases import expressions, of_torch, program

from precisionlint import catalogue, check
from precisionlint.checking import with_deep_stack
from precisionlint.checks import RULES as CHECKS
from precisionlint.events import Event
from precisionlint.findings import Report
from precisionlint.source.flow import ops, read, reading
from precisionlint.source.flow.evidence import Evidence
from precisionlint.source.parsing import UnreadableError
from precisionlint.source.project import Project
from precisionlint.subjects import File
from precisionlint.valueflow import RANK, Computed, Dtypes, Returned, Shows, promote

torch = pytest.importorskip("torch")

Code = Callable[..., "Read"]
NORM = "x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)"
"""A fault of norm-without-upcast wherever x is half."""
TRAIN = """
def train(model, optimizer, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = model(x)
    loss.backward()
    optimizer.step()
"""


class Read:
    """What the flow says of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = File(path.name, path, path.read_bytes(), Project(path.parent))
        self.events: list[Event] = with_deep_stack(lambda: list(read(self.file)))

    def returned(self, function: str) -> Dtypes:
        """The dtypes of all that a function returns, on all ways into it."""
        found = [e.value.dtypes for e in self.events if isinstance(e, Returned) and e.scope.function == function]
        assert found, f"{function} returns nothing"
        return frozenset().union(*found)

    def ops(self, function: str) -> list[str]:
        """The families of the ops that a function runs, in order."""
        return [e.value.op for e in self.events if isinstance(e, Computed) and e.scope.function == function]

    def findings(self) -> Report:
        return check([str(self.path)], select=frozenset(catalogue.load()), assume={})

    def faults(self) -> list[tuple[int, str, str]]:
        """Line, rule and confidence of each finding."""
        return sorted((f.place.line, f.rule, f.confidence) for f in self.findings().findings)


@pytest.fixture
def code(tmp_path: Path) -> Code:
    """Reads a file of the given text; others stand beside it."""

    def reader(text: str, **others: str) -> Read:
        for name, content in {**others, "case": text}.items():
            header = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
            (tmp_path / f"{name}.py").write_text(header + textwrap.dedent(content), encoding="utf-8")
        return Read(tmp_path / "case.py")

    return reader


def only(dtype: str) -> Dtypes:
    return frozenset({dtype})


def test_functions_are_read_wherever_the_top_level_defines_them(code: Code):
    read = code(
        """
        import importlib.util
        if importlib.util.find_spec("kernels"):
            SIZE = 16
            def chosen(x):
                return x.half() * SIZE
        else:
            def other(x):
                return x.bfloat16()
        try:
            import kernels
        except ImportError:
            def fallback(x):
                return chosen(x)
        """
    )
    assert read.returned("chosen") == read.returned("fallback") == only("float16")
    assert read.returned("other") == only("bfloat16")


def test_functions_in_functions_are_read_where_nothing_calls_them(code: Code):
    read = code(
        """
        def outer(width):
            def called(x):
                return x.half() * 2
            def handed_on(x):
                def deeper(y):
                    return y.bfloat16()
                return called(x).float(), deeper
            return handed_on
        class Worker:
            def start(self, pool):
                def job(x):
                    return x.half()
                pool.submit(job)
        def at_once():
            def later(x):
                return x.bfloat16()
            return later
        HANDLE = at_once()
        """
    )
    assert read.returned("called") == read.returned("job") == only("float16")
    assert read.returned("deeper") == read.returned("later") == only("bfloat16")


def test_what_a_function_of_the_backward_calls_belongs_to_it(code: Code):
    read = code(
        """
        def product(a, b):
            return torch._scaled_mm(a, b, use_fast_accum=True)

        def linear_forward(x, w):
            return product(x, w)

        def linear_backward(g, w):
            @torch.compile
            def compiled(g, w):
                return torch._scaled_mm(g, w, use_fast_accum=True)
            return compiled(g, w)
        """
    )
    assert read.faults() == [(14, "fp8-fast-accumulation-in-backward", "certain")]


def test_an_attribute_is_what_the_method_set_last(code: Code):
    read = code(
        """
        class Scaled:
            def last(self, x):
                self.kept = x.half()
                self.kept = self.kept.float()
                return self.kept

            def chosen(self, x, wide):
                self.kept = x.half()
                if wide:
                    self.kept = x.float()
                return self.kept

            def changed(self, x):
                self.kept = x.bfloat16()
                self.last(x)
                return self.kept
        """
    )
    assert read.returned("last") == only("float32")
    assert read.returned("chosen") == only("float16") | only("float32")
    assert "float32" in read.returned("changed")


# -- dtypes


def test_promotion_is_torchs():
    wrong = []
    for a, b in itertools.product(RANK, repeat=2):
        try:
            expected = torch.promote_types(getattr(torch, a), getattr(torch, b))
        except RuntimeError:
            continue  # torch itself does not promote uint16 and larger
        if promote(only(a), only(b)) != only(str(expected).removeprefix("torch.")):
            wrong.append((a, b, str(expected)))
    assert not wrong


def test_promotion_of_what_is_not_known():
    assert promote(only("~x"), only("number")) == only("~x")
    assert promote(only("~x"), only("int64")) == only("~x")
    assert promote(only("~x"), only("float32")) == only("float32")  # at least that wide
    assert promote(only("~x"), only("bfloat16")) == only("?")
    assert promote(only("?"), only("bfloat16")) == only("?")
    assert promote(frozenset({"float32", "bfloat16"}), only("bfloat16")) == frozenset({"float32", "bfloat16"})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("device", ["", "cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_ops_give_the_dtypes_that_torch_gives_plain_and_under_either_autocast(dtype: str, device: str, tmp_path: Path):
    path = tmp_path / "case.py"
    path.write_text(program(dtype, device), encoding="utf-8")
    found = Read(path)
    expected = of_torch(dtype, device)
    assert len(expected) >= 200
    wrong = {
        expression: (torchs, sorted(found.returned(f"case_{number}")))
        for number, expression in enumerate(expressions())
        if (torchs := expected.get(expression)) and found.returned(f"case_{number}") != only(torchs)
    }
    assert not wrong


ATEN = {
    "softmax": "softmax.int", "log_softmax": "log_softmax.int", "norm": "norm.Scalar", "pow": "pow.Tensor_Scalar", "loss": "mse_loss",
    "square_pow": "pow.Tensor_Scalar", "cumprod": "cumprod", "prod": "prod", "sum": "sum", "cumsum": "cumsum",
    "bce_with_logits": "binary_cross_entropy_with_logits", "conv_transpose2d": "conv_transpose2d.input",
    "conv_transpose1d": "conv_transpose1d", "rms_norm": "rms_norm",
}  # fmt: skip
WITHOUT_A_KERNEL = {"cross_entropy", "normalize"}
"""Composites: what they are made of is lifted."""


@pytest.mark.parametrize("family", sorted((ops.FP32_ON_CUDA | ops.HALF_ON_CUDA) - WITHOUT_A_KERNEL))
def test_each_family_of_cudas_lists_has_a_kernel_of_autocast(family: str):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{ATEN.get(family, family)}", "AutocastCUDA")


@pytest.mark.parametrize("family", ["sqrt", "mean", "var", "outer", "amax", "sigmoid", "gelu"])
def test_families_that_are_in_no_list_have_none(family: str):
    assert family not in ops.FP32_ON_CUDA | ops.HALF_ON_CUDA
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{family}", "AutocastCUDA")


def test_layers_that_nobody_read_give_what_layers_give_and_operands_of_a_product_agree(code: Code):
    found = code("""
    from somewhere import build_convolution, build_table

    class Block(nn.Module):
        def __init__(self, act=nn.ReLU, norm=None):
            super().__init__()
            self.conv = build_convolution(3)
            self.act = act()
            self.norm = norm(3) if norm else nn.Identity()
            self.freqs = build_table(3)

        def layers(self, x):
            return self.act(self.conv(x))

        def normalised(self, x):
            return self.norm(x)

        def unread(self, x):
            return self.freqs(x)

        def product(self, x, table):
            return self.freqs(x) @ x, torch.matmul(x.double(), self.freqs(x))

        def outside(self, x):
            with torch.autocast("cuda", dtype=torch.float32):
                return self.conv(x)
    """)
    assert found.returned("layers") == only("~layer()")
    assert found.returned("normalised") == frozenset({"^x", "~x"})
    assert found.returned("unread") == only("?")
    products = [e.value for e in found.events if isinstance(e, Computed) and e.value.op == "matmul"]
    assert [value.dtypes for value in products] == [only("~x"), only("float64")]
    assert found.returned("outside") == only("?")


def test_what_an_object_calls_its_model_gives_what_a_model_gives(code: Code):
    found = code("""
    from somewhere import build, prepare

    class Recipe:
        def setup(self, config):
            self._model = build(config)

        def step(self, tokens):
            return self._model(tokens)

        def teacher(self, tokens):
            return self.reference_model(tokens)

        def names(self):
            return self.model()

        def scores(self, tokens):
            return self.tables(tokens)

    def script(config, x):
        unet = prepare(build(config))
        return unet(x)
    """)
    assert found.returned("step") == only("~_model()")
    assert found.returned("teacher") == only("~reference_model()")
    assert found.returned("names") == only("?")
    assert found.returned("scores") == only("?")
    assert found.returned("script") == only("~unet()")


def test_lists_that_grow_hold_what_was_appended(code: Code):
    found = code("""
    def of_two(x):
        parts = [x.half()]
        parts.append(x.float())
        return parts[1]

    def of_many(x):
        parts = []
        for row in x:
            parts.append(row.half())
        return torch.cat(parts)

    def each(x):
        parts = []
        if x is not None:
            parts.append(x.bfloat16())
        return [part.exp() for part in parts][0]

    def put(x):
        wide = torch.empty(3)
        torch.exp(x.half(), out=wide)
        return wide
    """)
    assert found.returned("of_two") == only("float32")
    assert found.returned("of_many") == only("float16")
    assert found.returned("each") == only("bfloat16")
    assert found.returned("put") == only("float16")


def test_a_test_of_a_dtype_tells_it_in_its_branch_alone(code: Code):
    found = code("""
    def inside(x):
        if x.dtype == torch.float16:
            return x * 2

    def gradient(p):
        if p.dtype == torch.bfloat16 and p.grad is not None:
            return p.grad

    def beside(x):
        if x.dtype == torch.float16:
            pass
        else:
            return x * 2

    def behind(x):
        if x.dtype == torch.float16:
            y = x + 1
        return x * 2
    """)
    assert found.returned("inside") == only("float16")
    assert found.returned("gradient") == only("bfloat16")
    assert found.returned("beside") == only("?")
    assert found.returned("behind") == only("?")


def test_what_branches_of_a_constructor_set_is_either(code: Code):
    found = code("""
    class Task(Base):
        def __init__(self, several):
            self.decoder = nn.Linear(3, 3)
            self.scale = 1
            if several:
                self.loss = nn.BCELoss()
            else:
                self.loss = nn.CrossEntropyLoss()
            self.scale = 2

        def step(self, x, y):
            return self.loss(x, y)

        def factor(self):
            return self.scale
    """)
    losses = [e for e in found.events if isinstance(e, Computed)]
    assert {e.value.op for e in losses} == {"bce", "cross_entropy"}
    assert {e.scope.kind for e in losses} == {"module"}
    assert [e.value.constant for e in found.events if isinstance(e, Returned) and e.scope.function == "factor"] == [2]


def test_a_region_that_is_off_or_undecided_changes_nothing(code: Code):
    found = code("""
    def off(x, w):
        x = x.half()
        with torch.autocast("cuda", enabled=False):
            return torch.softmax(x @ x, -1)

    def undecided(use_amp):
        x = torch.ones(4, 4)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=use_amp):
            return torch.softmax(x, -1)

    def wide(x):
        x = x.half()
        with torch.autocast("cpu", dtype=torch.float32):
            return x @ x

    def wide_on_cuda(x):
        x = x.half()
        with torch.autocast("cuda", dtype=torch.float32):
            return x @ x

    @torch.autocast("cuda", dtype=torch.bfloat16)
    def decorated(x):
        return x @ x

    def inner(x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            with torch.autocast("cuda", enabled=False):
                a = x.half() @ x.half()
            return a, x @ x
    """)
    assert found.returned("off") == only("float16")
    assert found.returned("undecided") == only("float32")
    assert found.returned("wide") == only("float16")  # the CPU's autocast switches itself off
    assert found.returned("wide_on_cuda") == only("float32")
    assert found.returned("decorated") == only("bfloat16")
    returned = next(e.value for e in found.events if isinstance(e, Returned) and e.scope.function == "inner")
    assert [part.dtypes for part in returned.inputs] == [only("float16"), only("bfloat16")]


def test_a_layer_follows_the_callers_region_and_a_parameter_its_own_dtype(code: Code):
    found = code("""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.table = nn.Embedding(4, 4)

        def layer(self, x):
            return self.linear(x)

        def parameter(self, x):
            return self.scale * 2

        def lookup(self, ids):
            return self.table(ids)

        def given_fp32(self, x):
            return self.linear(x.float())

        def lifted(self, x):
            return torch.softmax(self.linear(x), -1)

        def lifted_from_fp32(self, x):
            return torch.softmax(self.linear(x.float()), -1)

        def region(self, x):
            with torch.autocast("cuda", dtype=torch.float16):
                return self.linear(x)
    """)
    assert found.returned("layer") == only("~layer()")
    assert found.returned("given_fp32") == only("~region")  # half only where a caller's region makes it so
    assert found.returned("lifted") == only("^layer()")  # half only where the weights are
    assert found.returned("lifted_from_fp32") == only("float32")
    assert found.returned("parameter") == only("~weights")
    assert found.returned("lookup") == only("~weights")
    assert found.returned("region") == only("float16")


# -- paths


def test_branches_are_joined_and_a_path_that_ends_leaves_nothing(code: Code):
    found = code("""
    def joined(x, flag):
        x = x.float()
        if flag:
            x = x.half()
        return x

    def ended(x, flag):
        x = x.float()
        if flag:
            x = x.half()
            raise ValueError
        return x

    def early(x, flag):
        if flag:
            return x.half()
        return x.float()

    def looped(x, steps):
        x = x.float()
        for _ in range(steps):
            y = x
            x = x.bfloat16()
        return y

    def caught(x):
        x = x.float()
        try:
            x = x.half()
        except ValueError:
            pass
        return x

    def chosen(x, flag):
        return x.half() if flag else x.float()
    """)
    half_or_wide = frozenset({"float16", "float32"})
    assert found.returned("joined") == half_or_wide
    assert found.returned("ended") == only("float32")
    assert found.returned("early") == half_or_wide
    assert found.returned("looped") == frozenset({"float32", "bfloat16"})
    assert found.returned("caught") == half_or_wide
    assert found.returned("chosen") == half_or_wide


def test_a_test_of_a_dtype_makes_it_unknown(code: Code):
    found = code(f"""
    def widened(x):
        return x.float() if x.dtype == torch.float16 else x

    def guarded(x):
        if x.dtype in (torch.float16, torch.bfloat16):
            x = x.float()
        return {NORM}

    def unguarded(x):
        return {NORM}
    {textwrap.indent(TRAIN, "    ")}
    """)
    assert found.returned("widened") == frozenset({"float32", "?"})
    assert found.faults() == [(14, "norm-without-upcast", "likely")]


def test_buffers_follow_the_weights_once_init_has_run_and_integers_do_not(code: Code):
    found = code("""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(8).float())
            self.register_buffer("ids", torch.arange(8))
            self.plain = torch.ones(4)
            self.early = self.table * 2

        def buffer(self):
            return self.table * 2

        def integers(self):
            return self.ids + 1

        def attribute(self):
            return self.plain * 2

    class Kept(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(8).float())

        def _apply(self, fn, recurse=True):
            return self

        def kept(self):
            return self.table * 2
    """)
    assert found.returned("buffer") == only("~weights")
    assert found.returned("integers") == only("int64")
    assert found.returned("attribute") == only("float32")
    assert found.returned("kept") == only("float32")


def test_a_buffer_is_what_it_was_made_of_while_init_runs(code: Code):
    found = code("""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(8).float())
            self.register_buffer("cosine", self.angles())

        def angles(self):
            return self.table * 2
    """)
    assert only("float32") <= found.returned("angles")


# -- calls


def test_calls_are_entered_with_what_they_are_given(code: Code):
    found = code(
        """
    from other import cast, Wide

    def local(x, dtype=torch.float32):
        return x.to(dtype)

    def by_position(x):
        return local(x, torch.float16)

    def by_keyword(x):
        return cast(x=x, dtype=torch.bfloat16)

    def by_default(x):
        return cast(x)

    def method(x):
        return Wide().widen(x)

    def called(x):
        return Wide()(x.half())

    def returned_function(x):
        pick = lambda y: y.half()
        return pick(x)
    """,
        other="""
    def cast(x, dtype=torch.float64):
        return x.to(dtype)

    class Base(nn.Module):
        def widen(self, x):
            return x.float()

    class Wide(Base):
        def forward(self, x):
            return self.widen(x) * x
    """,
    )
    assert found.returned("by_position") == only("float16")
    assert found.returned("by_keyword") == only("bfloat16")
    assert found.returned("by_default") == only("float64")
    assert found.returned("method") == only("float32")
    assert found.returned("called") == only("float32")
    assert found.returned("returned_function") == only("float16")


def test_a_model_that_was_moved_is_still_the_model(code: Code):
    found = code("""
    class Model(nn.Module):
        def forward(self, x):
            return x.half()

    def use(x):
        model = Model().to("cuda").train()
        return model(x)
    """)
    assert found.returned("use") == only("float16")


def test_functions_that_call_themselves_and_each_other_end(code: Code):
    found = code("""
    def down(x, n):
        if n == 0:
            return x.half()
        return down(x * 2, n - 1)

    def even(x):
        return odd(x)

    def odd(x):
        return even(x)

    def use(x):
        even(x)
        return down(x, len(x))

    class Node:
        def visit(self, x):
            return self.visit(self.visit(x))
    """)
    assert "float16" in found.returned("use")


def test_modules_that_import_each_other_end(code: Code):
    found = code(
        """
    from other import half

    def narrow(x):
        return half(x)

    def wide(x):
        return x.float()
    """,
        other="""
    from case import wide

    def half(x):
        return wide(x).half()
    """,
    )
    assert found.returned("narrow") == only("float16")


def test_ops_of_another_file_are_told_by_that_file_alone(code: Code):
    found = code(
        "from other import norm\n\ndef use(x):\n    return norm(x.half())\n", other=f"def norm(x):\n    return {NORM}\n"
    )
    assert found.ops("use") == ["cast"]
    assert found.ops("norm") == []


# -- bounds


@pytest.mark.parametrize("length", [900, 20_000])
def test_a_chain_of_twenty_thousand_elifs_is_read_or_said_to_be_unreadable(code: Code, length: int):
    chain = "".join(f"    elif n == {i}:\n        y = {i}\n" for i in range(1, length))
    text = f"def f(x, n):\n    if n == 0:\n        y = 0\n{chain}    x = x.half()\n    return {NORM}\n{TRAIN}"
    try:
        found = code(text)
    except UnreadableError as error:  # by some versions of Python itself
        assert length > 900 and error.message == "nested too deeply to be parsed"
    else:
        assert [(rule, grade) for _, rule, grade in found.faults()] == [("norm-without-upcast", "certain")]


def test_a_sum_of_three_thousand_terms_is_read(code: Code, tmp_path: Path):
    found = code(f"def f(x):\n    x = x.half()\n    y = {' + '.join(['x'] * 3000)}\n    return {NORM}\n{TRAIN}")
    assert found.findings().errors == ()
    assert found.faults() == [(7, "norm-without-upcast", "certain")]


def test_findings_up_to_where_the_budget_ends_stand(code: Code, monkeypatch: pytest.MonkeyPatch):
    text = f"def first(x):\n    x = x.half()\n    return {NORM}\n{TRAIN}\n" + "".join(
        f"\ndef f{n}(x):\n    return {' + '.join(['x'] * 50)}\n" for n in range(200)
    )
    text += f"\ndef last(x):\n    x = x.half()\n    return {NORM}\n"
    whole = code(text)
    assert [rule for _, rule, _ in whole.faults()] == ["norm-without-upcast"] * 2
    monkeypatch.setattr(reading, "BUDGET", 2_000)
    assert whole.faults() == [(6, "norm-without-upcast", "certain")]
    assert whole.findings().errors == ()


# -- evidence


def test_a_likely_finding_needs_a_program_that_shows_half_and_names_the_place(code: Code):
    layer = f"def norm(x):\n    return {NORM}\n"
    plain = "from case import norm\n\ndef train(model, optimizer, x):\n    norm(model(x)).backward()\n    optimizer.step()\n"
    assert code(layer, train=plain).faults() == []
    found = code(layer, train=plain + "\nmodel.to(torch.bfloat16)\n")
    assert found.faults() == [(5, "norm-without-upcast", "likely")]
    (finding,) = found.findings().findings
    assert (Path(finding.trace[0].place.path).name, finding.trace[0].place.line) == ("train.py", 10)


@pytest.mark.parametrize(
    "line",
    [
        "# model.to(torch.bfloat16)",
        '"""Was run as model.to(torch.bfloat16)."""',
        "model.to(torch.float32)",
        "model.eval()",
    ],
)
def test_comments_and_documentation_show_nothing(code: Code, line: str):
    train = (
        f"from case import norm\n\n{line}\n\ndef train(optimizer, x):\n    norm(x).backward()\n    optimizer.step()\n"
    )
    assert code(f"def norm(x):\n    return {NORM}\n", train=train).faults() == []


def test_half_copies_are_half_weights_and_no_half_parameters(code: Code):
    found = code(f"policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)\n{TRAIN}")
    evidence = Evidence(found.file.project)
    assert evidence.shows(Shows("half weights"), found.path, "case.py") is not None
    assert evidence.shows(Shows("half parameters"), found.path, "case.py") is None
    assert evidence.shows(Shows("half weights", bare=True), found.path, "case.py") is None  # it trains under autocast


def test_a_fault_that_is_completed_in_this_file_stands_here(code: Code):
    found = code(
        f"from other import moments\n\ndef spread(x):\n    first, second = moments(x)\n    return second - first * first\n{TRAIN}",
        other="def moments(x):\n    return x.mean(0), (x * x).mean(0)\n",
    )
    assert found.faults() == [(8, "variance-by-difference", "likely")]
    assert not check([str(found.path.parent / "other.py")], select=frozenset(CHECKS), assume={}).findings


@pytest.mark.parametrize(
    "body",
    [
        "for i, x in enumerate(iterable=xs):\n        x.sum().backward()",
        "y = xs.view()\n    model(y, xs.reshape()).backward()",
        "y = (xs.half() @ xs.to()).view() * xs.expand()\n    y.sum().backward()",
        "for a, b in zip():\n        a.backward()",
        "torch.topk(torch.softmax(), 2)\n    (xs.exp() / torch.sum()).log().backward()",
        "make = getattr(torch.optim)\n    make(model.parameters()).step()\n    model(xs).backward()",
        "torch.where()\n    torch.cat()\n    torch.stack(*xs).to(**xs).sum().backward()",
        "y = xs.softmax().type_as().masked_fill() + torch.arange().to()\n    y.backward()",
    ],
)
def test_calls_that_lack_what_they_need_end_no_reading(tmp_path: Path, body: str):
    program = tmp_path / "odd.py"
    program.write_text(
        f"import torch\n\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.randn(2, 2), torch.zeros(3))\n\n\ndef train(xs):\n    {body}\n",
        encoding="utf-8",
    )
    assert check([str(program)], select=frozenset(catalogue.load())).errors == ()
