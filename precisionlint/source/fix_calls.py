"""Calls with their arguments changed, laid out as they were."""

from __future__ import annotations

import libcst as cst

from precisionlint.source.fixes import NoFixError

AUTOCAST = ("enabled", "dtype", "cache_enabled")
"""The arguments of autocast by its old name, in their order; the new one has another."""


def device_first(call: cst.Call, last: str, device: str) -> cst.Call:
    """A call by the old name with the device that the new one asks for."""
    if any(each.star for each in call.args):
        raise NoFixError("arguments are handed on there")
    quoted = f'"{device}"'
    if last.startswith("custom_"):
        return with_argument(call, "device_type", quoted)
    args = list(call.args)
    if last == "autocast":
        plain = [index for index, each in enumerate(args) if each.keyword is None]
        if len(plain) > len(AUTOCAST):
            raise NoFixError("it has too many arguments there")
        for index in plain:
            args[index] = named(args[index], AUTOCAST[index])
    made = cst.Arg(cst.parse_expression(quoted))
    if args:
        made = made.with_changes(comma=cst.Comma(whitespace_after=plain_space(between(call))))
    return call.with_changes(args=[made, *args])


def named(argument: cst.Arg, keyword: str) -> cst.Arg:
    space = cst.SimpleWhitespace("")
    return argument.with_changes(
        keyword=cst.Name(keyword), equal=cst.AssignEqual(whitespace_before=space, whitespace_after=space)
    )


def with_argument(call: cst.Call, keyword: str, source: str) -> cst.Call:
    """A call with one more argument, laid out as the others are."""
    made = named(cst.Arg(cst.parse_expression(source)), keyword)
    if not call.args:
        return call.with_changes(args=[made])
    *rest, last = call.args
    comma = cst.Comma(whitespace_after=plain_space(between(call)))
    if isinstance(last.comma, cst.Comma):
        made = made.with_changes(comma=last.comma)
        after = last.comma.whitespace_after
        if isinstance(after, cst.ParenthesizedWhitespace) and after.first_line.comment is not None:
            comma = comma.with_changes(whitespace_after=after.with_changes(last_line=last_indent(between(call))))
            made = made.with_changes(comma=cst.Comma(whitespace_after=plain_space(after)))
        last = last.with_changes(comma=comma)
    else:
        made = made.with_changes(whitespace_after_arg=last.whitespace_after_arg)
        last = last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace(""))
    return call.with_changes(args=[*rest, last, made])


def between(call: cst.Call) -> cst.BaseParenthesizableWhitespace:
    """What stands between two arguments of a call."""
    if len(call.args) > 1 and isinstance(call.args[-2].comma, cst.Comma):
        return call.args[-2].comma.whitespace_after
    before = call.whitespace_before_args
    return before if isinstance(before, cst.ParenthesizedWhitespace) else cst.SimpleWhitespace(" ")


def plain_space(space: cst.BaseParenthesizableWhitespace) -> cst.BaseParenthesizableWhitespace:
    """White space without the comments in it."""
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space.with_changes(
            first_line=space.first_line.with_changes(comment=None, whitespace=cst.SimpleWhitespace("")), empty_lines=()
        )
    return space


def last_indent(space: cst.BaseParenthesizableWhitespace) -> cst.SimpleWhitespace:
    if isinstance(space, cst.ParenthesizedWhitespace):
        return space.last_line
    return cst.SimpleWhitespace("")
