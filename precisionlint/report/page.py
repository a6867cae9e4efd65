"""Shows rules to people: a rule's page in the terminal, and the list of all rules."""

import re
from collections.abc import Collection, Iterator, Mapping

from precisionlint.catalogue import Rule, body, families


def page(rule: Rule) -> str:
    """The page as Markdown, with what its front matter says under the title; links to other pages become names."""
    text = re.sub(r"\[([^\]]+)\]\([^)\s]+\.md\)", r"\1", body(rule)).strip()
    title, _, rest = text.partition("\n")
    state = "on" if rule.on_by_default else "off unless selected"
    found_by = ", ".join(rule.found_by)
    facts = f"{rule.family} · {rule.severity}, {state} · found by {found_by} · fix: {rule.fix}"
    return f"{title}\n\n{facts}\n\n{rest.lstrip()}"


def styled(markdown: str, width: int) -> str:
    """Markdown laid out for a terminal of so many columns, with its codes."""
    from io import StringIO

    from rich.console import Console
    from rich.markdown import Markdown
    from rich.theme import Theme

    theme = Theme({"markdown.code": "bold cyan"})  # rich's own has a black ground, which a light terminal shows as bars
    console = Console(file=StringIO(), force_terminal=True, width=width, theme=theme)
    with console.capture() as shown:
        console.print(Markdown(markdown, code_theme="ansi_dark", hyperlinks=False))
    return shown.get()


def listing(rules: Mapping[str, Rule], on: Collection[str]) -> Iterator[str]:
    """A line a rule, by family: name, severity, whether it is `on`, which commands find it, what it finds."""
    width = max(map(len, rules))
    finders = {rule.name: ", ".join(rule.found_by) for rule in rules.values()}
    column = max(map(len, finders.values()))
    for family, members in families(rules).items():
        yield family
        for rule in members:
            state = "on " if rule.name in on else "off"
            by = f"{finders[rule.name]:<{column}}"
            yield f"  {rule.name:<{width}}  {rule.severity:<7}  {state}  {by}  {rule.summary}"
        yield ""
    yield f"{len(on)} of {len(rules)} rules are on; `precisionlint explain NAME` shows a rule's page"
