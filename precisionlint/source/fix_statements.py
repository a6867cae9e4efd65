"""Where a statement can be put before another: what follows there, and what runs there already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import libcst as cst

from precisionlint.findings import Edit
from precisionlint.source.fixes import NoFixError

Line = cst.SimpleStatementLine | cst.SimpleStatementSuite
"""The simple statements of a line of their own, or of one that begins with ``if …:``."""
LEAVING = (cst.Return, cst.Break, cst.Continue, cst.Raise)


class Statements:
    """The statements of one file, and those that fixes put before some of them."""

    def __init__(self, module: cst.Module, parents: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        self.module = module
        self.parents = parents
        self.written: dict[str, list[Line]] = {}
        """The text of a statement -> the lines that a fix puts it before."""

    def line_of(self, node: cst.CSTNode, span: Callable[[cst.CSTNode], tuple[int, int]]) -> Line:
        """The statements of the line that an expression stands in; ``span``: the offsets of a node.

        Raises NoFixError where nothing can be put before them.
        """
        begin, holding = span(node)[0], {node}
        while not isinstance(node, Line):
            node = self.parents[node]
            holding.add(node)
            if isinstance(node, (cst.BaseCompoundStatement, cst.Module)):
                raise NoFixError("no statement can stand before it")
        if any(isinstance(each, cst.Call) and each not in holding and span(each)[0] < begin for each in inside(node)):
            # The new statement may have to follow it.
            raise NoFixError("something else is called before it in that line")
        return node

    def code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)

    def calls(self, node: cst.CSTNode, code: str) -> Iterator[cst.Call]:
        """The calls of some text in a node."""
        return (each for each in inside(node) if isinstance(each, cst.Call) and self.code(each) == code)

    def in_function(self, node: cst.CSTNode, code: str) -> list[cst.Call]:
        """The calls of some text in the function (or the top level) that a node stands in."""
        while not isinstance(node, (cst.FunctionDef, cst.Module)):
            node = self.parents[node]
        top = node.body.children if isinstance(node, cst.FunctionDef) else node.body
        return [each for part in top for each in self.calls(part, code)]

    def followed(self, line: Line, code: str) -> bool:
        """Whether a call runs each time after a line, before the line runs again."""
        if any(isinstance(each, LEAVING) for each in inside(line)):
            return False
        node: cst.CSTNode = line
        while True:
            parent = self.parents[node]
            if isinstance(parent, (cst.IndentedBlock, cst.Module)):
                body: list[cst.CSTNode] = list(parent.body)
                for later in body[body.index(node) + 1 :]:
                    if any(isinstance(each, LEAVING) for each in inside(later)):
                        return False
                    if any(True for _ in self.calls(later, code)):
                        return isinstance(later, cst.SimpleStatementLine)
                if isinstance(parent, cst.Module):
                    return False
                node = self.parents[parent]
            elif node is line and isinstance(line, cst.SimpleStatementSuite):
                node = parent
            else:
                return False
            while isinstance(node, cst.Else) or (isinstance(node, cst.If) and isinstance(self.parents[node], cst.If)):
                node = self.parents[node]  # up from an else or an elif
            if not isinstance(node, (cst.If, cst.With)):
                return False

    def runs_beside(self, line: Line, edit: Edit) -> bool:
        """Whether the statement that an edit puts before a line may run besides: it stands in the function, or another fix puts it
        there, on a way that leads to this line too. One that a fix puts above, where it runs before, is what this line needs itself."""
        held: list[cst.CSTNode] = [*self.in_function(line, edit.text), *self.written.get(edit.text, ())]
        for each in held:
            above = isinstance(each, cst.SimpleStatementLine) and self.parents[each] in self.around(line)
            if not above and not self.apart(line, each, edit.name):
                return True
        return False

    def apart(self, line: Line, other: cst.CSTNode, code: str) -> bool:
        """Whether two statements stand in different branches, and a call follows each before any of them runs again."""
        while not isinstance(other, Line):
            other = self.parents[other]
            if isinstance(other, (cst.BaseCompoundStatement, cst.Module)):
                return False
        if line is other:
            return False
        ways = [list(self.around(each)) for each in (line, other)]
        meeting = next((each for each in ways[0] if each in ways[1]), None)
        return isinstance(meeting, cst.If) and self.followed(line, code) and self.followed(other, code)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """What a node stands in, from the inside out."""
        while not isinstance(node, cst.Module):
            node = self.parents[node]
            yield node

    def write(self, line: Line, code: str) -> None:
        """Remembers that a fix puts a statement before a line."""
        self.written.setdefault(code, []).append(line)


def inside(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """A node and all below it, what functions defined there do left out."""
    yield node
    for child in node.children if not isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)) else ():
        yield from inside(child)
