"""`!command`, `%magic`, `name?`: what notebooks understand besides Python, because models write it.

Only a cell that is not Python is looked at here, and in it only lines that begin a statement: a
`%` in a string or in the middle of an expression is none of our business. Each such line becomes a
call of `__magic__`, in its place, so that line numbers stay what they are. What those calls do is
in `commands`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

# name, name.name, name[0], a, b
_TARGET = r"[A-Za-z_][\w.]*(?:\[[^\]=]*\])?"
_ASSIGNED = re.compile(rf"({_TARGET}(?:\s*,\s*{_TARGET})*)\s*=\s*([!%])(?!=)(.+)", re.DOTALL)
_HELP = re.compile(rf"(\?{{1,2}})?\s*({_TARGET})\s*(\?{{1,2}})?\s*$")
_WORD = re.compile(r"[A-Za-z_]\w*")
_STRING = re.compile(r"\"\"\"|'''|\"|'")


def rewrite(source: str) -> str | None:
    """`source` as Python, or None if there is no magic in it."""
    lines = source.split("\n")
    first = next((at for at, line in enumerate(lines) if line.strip()), 0)
    if lines[first].startswith("%%"):
        return _whole_cell(lines, first)
    changed = False
    statements = _statements(lines)
    for start, end in statements:
        text = "\n".join(lines[start:end])
        body = text.lstrip()
        call = _call(body)
        if call is not None:
            indent = text[: len(text) - len(body)]
            lines[start:end] = [indent + call, *[""] * (end - start - 1)]
            changed = True
    return "\n".join(lines) if changed else None


def _whole_cell(lines: list[str], first: int) -> str:
    name, _, rest = lines[first][2:].strip().partition(" ")
    body = "\n".join(lines[first + 1 :])
    if name == "time":
        # The body stays a cell of its own: its last value is shown, its lines keep their numbers.
        clock = "__magic__.start_clock()"
        return "\n".join([*lines[:first], clock, *(rewrite(body) or body).split("\n")])
    return "\n" * first + f"__magic__.cell({name!r}, {rest.strip()!r}, {body!r})"


def _call(body: str) -> str | None:
    """A statement that is no Python as one that is."""
    if body.startswith(("!", "%")):
        return _invoked(body[0], body[1:])
    if assigned := _ASSIGNED.fullmatch(body):
        targets, sign, rest = assigned.groups()
        return f"{targets} = {_invoked(sign, rest, captured=True)}"
    asked = _HELP.fullmatch(body)
    if asked and (asked[1] or asked[3]):
        return f"__magic__.explain({asked[2]!r}, {asked[1] == '??' or asked[3] == '??'})"
    return None


def _invoked(sign: str, rest: str, captured: bool = False) -> str:
    rest = rest.replace("\\\n", " ").strip()
    if sign == "!":
        return f"__magic__.{'lines_of' if captured else 'shell'}({rest!r})"
    name = _WORD.match(rest)
    word = name[0] if name else rest
    return f"__magic__.line({word!r}, {rest[len(word) :].strip()!r})"


def _statements(lines: list[str]) -> Iterator[tuple[int, int]]:
    """From which line to which each statement goes: over brackets, long strings, backslashes.

    Lines may be replaced, but not added or removed, while this goes on.
    """
    at = 0
    while at < len(lines):
        start, depth, quote = at, 0, ""
        special = _call(lines[at].lstrip()) is not None
        while True:
            line = lines[at]
            at += 1
            if not special:
                depth, quote = _after(line, depth, quote)
            if at >= len(lines) or not (depth or quote or line.endswith("\\")):
                break
        yield start, at


def _after(line: str, depth: int, quote: str) -> tuple[int, str]:
    """How many brackets, and which long string, are open at the end of a line."""
    at = 0
    while at < len(line):
        character = line[at]
        if quote:
            if character == "\\":
                at += 1
            elif line.startswith(quote, at):
                at += len(quote) - 1
                quote = ""
        elif character == "#":
            break
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(0, depth - 1)
        elif opening := _STRING.match(line, at):
            quote = opening[0]
            at += len(quote) - 1
        at += 1
    # A short string ends with its line, unless a backslash carries it over.
    if len(quote) == 1 and not line.endswith("\\"):
        quote = ""
    return depth, quote
