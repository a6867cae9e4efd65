"""The model of torch's TF32 switches against torch itself: whatever was set, the same getters raise."""

import itertools
import json
import os
import subprocess
import sys

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


def fresh_torch_says(sequences: list[tuple[tuple[str, object], ...]]) -> list[str]:
    """The same for many, from a process in which nothing was set: other tests leave their settings in this one."""
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(sequences), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def model_says(sequence: tuple[tuple[str, object], ...]) -> str:
    switches = Switches()
    for name, value in sequence:
        switches = switches.set(name, value)
    return "".join(str(int(switches.clash(getter) is not None)) for getter in (MATMUL, CUDNN, GET))


@pytest.mark.filterwarnings("ignore")
def test_the_model_raises_where_torch_does_after_one_and_two_settings():
    pairs = list(itertools.product(SETTINGS, repeat=2))[::17]  # a fork each
    sequences = [(), *itertools.product(SETTINGS, repeat=1), *pairs]
    said = zip(sequences, fresh_torch_says(sequences), map(model_says, sequences), strict=True)
    assert [each for each in said if each[1] != each[2]] == []


@pytest.mark.parametrize("value", ["ieee", "tf32"])
def test_flags_are_read_like_cudnns_own_switch(value):
    switches = Switches().set("torch.backends.cudnn.conv.fp32_precision", value)
    assert (switches.clash(FLAGS) is None) == (value == "tf32")
    assert switches.clash(FLAGS) == switches.clash(CUDNN)


def test_what_nobody_knows_raises_nowhere():
    switches = Switches().set("torch.backends.fp32_precision", None)
    assert [switches.clash(getter) for getter in (MATMUL, CUDNN, GET, FLAGS)] == [None] * 4
    assert Switches().set(SET, None).clash(GET) is None


if __name__ == "__main__":
    print(json.dumps([torch_says(sequence) for sequence in json.load(sys.stdin)]))
