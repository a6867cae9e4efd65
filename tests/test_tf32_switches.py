"""The model of torch's TF32 switches against torch itself: whatever was set, the same getters raise."""

import itertools
import os

import pytest

from precisionlint.checks.tf32_switches import CUDNN, FLAGS, GET, MATMUL, NEW, SET, Switches

torch = pytest.importorskip("torch")

SETTINGS = [
    *[(name, value) for name in NEW for value in ("ieee", "tf32", "none")],
    ("torch.backends.mkldnn.matmul.fp32_precision", "bf16"),
    *[(SET, stage) for stage in ("highest", "high", "medium")],
    *[(name, allowed) for name in (MATMUL, CUDNN) for allowed in (True, False)],
]


def setting(name: str, value: object) -> str:
    return f"{name}({value!r})" if name == SET else f"{name} = {value!r}"


def reading(name: str) -> str:
    return f"{name}().__enter__()" if name == FLAGS else f"{name}()" if name == GET else name


def raises(getter: str) -> bool:
    try:
        eval(reading(getter))
    except RuntimeError:
        return True
    return False


def torch_says(sequence: tuple[tuple[str, object], ...]) -> str:
    """Which getters raise after a sequence of settings, in a fork of its own: 0 and 1 for each."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "failed"
        try:
            for name, value in sequence:
                exec(setting(name, value))
            answer = "".join(str(int(raises(getter))) for getter in (MATMUL, CUDNN, GET))
        finally:
            os.write(writer, answer.encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def model_says(sequence: tuple[tuple[str, object], ...]) -> str:
    switches = Switches()
    for name, value in sequence:
        switches = switches.set(name, value)
    return "".join(str(int(switches.clash(getter) is not None)) for getter in (MATMUL, CUDNN, GET))


@pytest.mark.filterwarnings("ignore")
def test_the_model_raises_where_torch_does_after_one_and_two_settings():
    pairs = list(itertools.product(SETTINGS, repeat=2))[::17]  # a fork each
    sequences = [(), *itertools.product(SETTINGS, repeat=1), *pairs]
    wrong = {sequence: (torch_says(sequence), model_says(sequence)) for sequence in sequences}
    assert {sequence: said for sequence, said in wrong.items() if said[0] != said[1]} == {}


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_flags_are_read_like_cudnns_own_switch(value):
    switches = Switches().set("torch.backends.cudnn.conv.fp32_precision", value)
    assert (switches.clash(FLAGS) is None) == (value == "tf32")
    assert switches.clash(FLAGS) == switches.clash(CUDNN)


def test_what_nobody_knows_raises_nowhere():
    switches = Switches().set("torch.backends.fp32_precision", None)
    assert [switches.clash(getter) for getter in (MATMUL, CUDNN, GET, FLAGS)] == [None] * 4
    assert Switches().set(SET, None).clash(GET) is None
