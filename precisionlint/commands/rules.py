"""``precisionlint rules`` and ``precisionlint explain``: the catalogue in the terminal."""

from __future__ import annotations

import argparse
import sys

from precisionlint import catalogue
from precisionlint.commands.common import Outcome, add_color
from precisionlint.report.color import colored


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rules = commands.add_parser("rules", help="list the rules", description="Lists the rules by family.")
    rules.set_defaults(run=_rules)

    explain = commands.add_parser(
        "explain",
        help="show a rule's page, or list a family",
        description="Shows a rule's page: what goes wrong, wrong and right code, an experiment, sources.",
    )
    explain.add_argument(
        "name", metavar="NAME", help="the rule, such as clip-before-unscale, or a family, whose rules are listed"
    )
    add_color(explain)
    explain.set_defaults(run=_explain)


def _rules(options: argparse.Namespace) -> Outcome:
    from precisionlint.report.page import listing

    return Outcome(0, listing(catalogue.load(), catalogue.select()))


def _explain(options: argparse.Namespace) -> Outcome:
    from shutil import get_terminal_size

    from precisionlint.report.page import listing, page, styled

    family = catalogue.families().get(options.name)
    if family is not None:
        return Outcome(0, listing({rule.name: rule for rule in family}, catalogue.select()))
    text = page(catalogue.find(options.name))
    if colored(options.color, sys.stdout):
        text = styled(text, width=min(get_terminal_size().columns, 120))
    return Outcome(0, text.splitlines())
