"""Frequencies of rotary embeddings that are kept in a buffer, which a cast of the whole model rounds with everything else."""

from __future__ import annotations

from collections.abc import Iterator

from precisionlint.checks.base import Hit, Seen
from precisionlint.checks.half_arithmetic import TRAINING, of_half, short, trains
from precisionlint.findings import Confidence
from precisionlint.patterns import regex
from precisionlint.valueflow import VIEWS, Scope, Shows, Value, sources

READ = VIEWS | {"cast"}


def asked(freq: Value) -> Value | None:
    """The buffer of frequencies whose dtype the program asks for, and then only casts what has been rounded."""
    held = list(sources(freq, READ))
    return held[0] if all(s.op == "buffer" and s.ref == "asked" for s in held) else None


def widened(freq: Value) -> Value | None:
    """The buffer that frequencies are cast to fp32 from, where they are used."""
    held = list(sources(freq, READ))
    wide = "float32" in freq.dtypes and any(s.op == "cast" for s in sources(freq))
    return held[0] if wide and all(s.op == "buffer" and s.dtypes == {"~weights"} for s in held) else None


def frequencies_in_a_buffer(held: Value | None, freq: Value, used: Value, scope: Scope) -> Iterator[Hit]:
    """What a cast of the model rounds. Who widens it where it is used has thought of its dtype: then another file must cast the model. Who
    keeps it in fp32 in an object that is made in half by what it is handed (``"chosen"``) has, too: nobody has to cast that. Where tables are
    made at once (``"tabled"``), only positions beyond them meet what is left."""
    if held is not None and held.ref != "chosen" and scope.enabled is not False:
        yield cast_frequencies(held, used, "possible" if held.ref == "tabled" else "likely", Shows("half buffers"))
    elif held is None and (late := widened(freq)) is not None:
        yield cast_frequencies(late, used, "possible", Shows("half buffers", elsewhere=True))


def cast_frequencies(held: Value, used: Value, how: Confidence, needs: Shows) -> Hit:
    """Frequencies in a buffer, which ``model.to(dtype)`` rounds with everything else: what reads them can no longer mend it."""
    angles = f"the angles of '{held.name}'" if held.name else "the angles"
    return Hit(
        "half-rope",
        held.at,
        f"the frequencies are a buffer, which model.to(dtype) casts: in bf16 8 bits of them are left, .float() does not bring the others "
        f"back, and {angles} are wrong by radians within 8k positions; make them anew in fp32, or keep them out of the cast",
        (Seen(used.at, "the angles are made of them"),),
        confidence=how,
        needs=(TRAINING, needs),
    )


DECODERS = regex(
    r"^transformers\.(?:\w+\.)*(?:AutoModelForCausalLM|(?:Llama|Mistral|Mixtral|Qwen|Gemma|Phi|Olmo|GPTNeoX|Falcon)\w*)\.from_pretrained$"
)
"""What loads a model with rotary embeddings."""


LEFT = ("8 bits of them are left", "11 bits of them are left", "8 bits of them are left in bf16")
"""What a cast leaves of frequencies: in bf16, in fp16, in either."""


def loaded_and_cast(cast: Value, scope: Scope) -> Iterator[Hit]:
    """``AutoModelForCausalLM.from_pretrained(name).to(torch.bfloat16)``: what is loaded with a dtype keeps its buffers, what is cast does not."""
    made = next((s for s in sources(cast.inputs[0]) if s.op == "constructed" and DECODERS.search(s.name)), None)
    if made is not None and trains(scope):
        yield Hit(
            "half-rope",
            cast.at,
            f"the cast to {short(cast.dtypes)} rounds the buffers of the model as well, the rotary frequencies among them: "
            f"{of_half(cast.dtypes, *LEFT)}, and angles are wrong by radians within 8k positions; from_pretrained(dtype=…) casts the weights alone",
            (Seen(made.at, "loaded"),),
            confidence="possible",
            needs=(TRAINING,),
        )
