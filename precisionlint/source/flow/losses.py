"""Losses and log-probabilities that others compute, known by their names alone: whether they widen what they are given, nobody here knows."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from precisionlint.patterns import regex
from precisionlint.valueflow import UNKNOWN, Value, named

if TYPE_CHECKING:
    from precisionlint.source.flow.evaluate import Frame

LOSS = regex(r"(?:^|[._])loss(?:_|$)|cross_entropy|(?:^|_)(?:nll|xent)(?:_|$)")
PREDICTED = frozenset({"layer", "linear", "attribute"})
"""What may be the output of a model."""
LOG_PROBABILITIES = regex(
    r"log_?probs?_(?:from|of|and|for)|(?:gather|selective|batch|token|get|compute|calc)\w*_log_?(?:probs?|softmax|ps)\b|logps?_from"
    r"|entropy_(?:from|of)_logits|(?:vocab_?parallel|compute|calc\w*|get|token)_entropy$"
)
"""And those that compute log-probabilities of tokens, or what is made of all of them."""
OUTPUT = regex(r"logits?$|^(?:outputs?|preds?|predictions?)$")
"""What the output of a model is called where it is handed in."""


def outside_loss(frame: Frame, name: str, args: list[Value], options: dict[str, Value], node: ast.Call) -> None:
    """Tells of a call of an outside function, if its name says that it computes a loss, or log-probabilities, and it is given what a layer
    made. (What torch does with dtypes in its own is known.)"""
    given = [*args, *options.values()]
    predicted = next((part for part in given if part.op in PREDICTED or named(part, OUTPUT)), None)
    if predicted is None or name.startswith("torch."):
        return
    last = name.rpartition(".")[2]
    if LOSS.search(name):
        frame.made("criterion", [predicted, *given], UNKNOWN, node, last, options)
    elif LOG_PROBABILITIES.search(last):
        frame.made("log probabilities", [predicted, *given], UNKNOWN, node, last, options)
