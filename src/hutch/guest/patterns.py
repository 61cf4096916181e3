"""Patterns for paths, as regular expressions that are never slow."""

from __future__ import annotations

import re

from .agent import RequestError

MANY = 256  # what the braces of one pattern may stand for


def is_magic(part: str) -> bool:
    return any(char in part for char in "*?[{")


def compile_glob(pattern: str) -> re.Pattern[str]:
    """A pattern for a path relative to some folder.

    `*` and `?` stay within a name, `[a-z]` and `[!a-z]` are one character of it, `**` as a whole
    component is any number of folders, none included, and `{a,b}` is either. A leading dot is a
    character like any other. Everything else is itself.
    """
    return re.compile("|".join(path(plain) for plain in expand(pattern)), re.DOTALL)


def expand(pattern: str) -> list[str]:
    """The patterns without braces that one with braces stands for."""
    done: list[str] = []
    todo = [(pattern, 0)]
    while todo:
        text, start = todo.pop()
        found = _braces(text, start)
        if not found:
            done.append(text)
            continue
        at, end, choices = found
        for choice in reversed(choices):
            todo.append((text[:at] + choice + text[end:], at))
        if len(done) + len(todo) > MANY:
            raise RequestError(
                "invalid_request", f"braces that stand for more than {MANY} patterns"
            )
    return done


def _braces(text: str, start: int) -> tuple[int, int, list[str]] | None:
    """Where the first braces with a comma are, and what they offer. Others are themselves."""
    while (at := text.find("{", start)) >= 0:
        depth, choices, begin = 0, [], at + 1
        for here in range(at, len(text)):
            char = text[here]
            depth += (char == "{") - (char == "}")
            if depth == 0 or (char == "," and depth == 1):
                choices.append(text[begin:here])
                begin = here + 1
            if depth == 0:
                if len(choices) > 1:
                    return at, here + 1, choices
                break
        start = at + 1
    return None


def path(pattern: str, *, escapes: bool = False) -> str:
    """The regular expression of a pattern without braces."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    out = []
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if part != "**":
            out.append(name(part, escapes=escapes) + ("" if last else "/"))
        elif last:
            out.append(".+")
        elif at == 0 or parts[at - 1] != "**":  # two in a row say no more than one
            out.append("(?:[^/]+/)*")
    return "".join(out)


def name(part: str, *, escapes: bool = False) -> str:
    """One component. After a `*` the first place where the rest up to the next `*` fits is as
    good as any other, so there is no going back (`(?>`), and no pattern is slow.

    `escapes`, as git has them: after a backslash, any character is itself; `[^a]` is `[!a]`.
    """
    no = ("!", "^") if escapes else ("!",)
    fixed, at = [""], 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            if fixed[-1] or len(fixed) == 1:
                fixed.append("")
        elif char == "?":
            fixed[-1] += "[^/]"
        elif char == "[" and (end := part.find("]", at + 1 + part.startswith(no, at))) > 0:
            fixed[-1] += _one_of(part[at:end], no)
            at = end + 1
        elif char == "\\" and escapes and at < len(part):
            fixed[-1] += re.escape(part[at])
            at += 1
        else:
            fixed[-1] += re.escape(char)
    if len(fixed) == 1:
        return fixed[0]
    first, *middle, last = fixed
    return first + "".join(f"(?>[^/]*?{piece})" for piece in middle) + f"[^/]*{last}"


def _one_of(inside: str, no: tuple[str, ...]) -> str:
    """What is between brackets, as a class of a regular expression. It never matches a slash."""
    negated = inside.startswith(no)
    chars = inside[1:] if negated else inside
    out, at = "", 0
    while at < len(chars):
        low, high = chars[at], chars[at]
        if chars[at + 1 : at + 2] == "-" and at + 2 < len(chars):
            high = chars[at + 2]
            at += 2
        at += 1
        if low <= high:
            out += f"{re.escape(low)}-{re.escape(high)}"
    if not out:
        return "[^/]" if negated else "(?!)"
    return f"(?!/)[{'^' if negated else ''}{out}]"
