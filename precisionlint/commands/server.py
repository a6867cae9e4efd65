"""``precisionlint server``: a language server on standard input and output."""

from __future__ import annotations

import argparse

from precisionlint.commands.common import Outcome, UsageError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    server = commands.add_parser(
        "server",
        help="serve an editor",
        description="Serves an editor by the Language Server Protocol, on standard input and output. Needs the extra lsp.",
    )
    server.set_defaults(run=run)


def run(options: argparse.Namespace) -> Outcome:
    from importlib.util import find_spec

    if find_spec("pygls") is None:
        raise UsageError("server needs pygls: pip install 'precisionlint[lsp]'")

    from precisionlint.server import serve

    serve()
    return Outcome(0, ())
