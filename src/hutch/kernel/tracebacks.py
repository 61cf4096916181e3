"""Errors as a user wants to see them: their own lines and what they called, nothing of ours."""

from __future__ import annotations

import linecache
import os
import traceback
from typing import Any

from .pretty import said

OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST = 64 * 1024
HEAD = 24 * 1024  # of what is cut, so much of the beginning stays: the user's lines are there


def describe(exc: BaseException) -> dict[str, Any]:
    """The error of a cell. May take as long as the user's own `__str__` takes."""
    return {
        "name": type(exc).__name__,
        "value": _cut(_value(exc)),
        "traceback": _cut(format_error(exc)),
    }


def describe_briefly(exc: BaseException) -> dict[str, Any]:
    """Its name and no more: for when the user's own code must not be asked again."""
    name = type(exc).__name__
    return {"name": name, "value": "", "traceback": f"{name}\n"}


def format_error(exc: BaseException) -> str:
    try:
        _show_line(exc)
        summary = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _leave_out_ours(summary)
        return "".join(summary.format())
    except Exception:
        return said(exc) + "\n"  # out of memory, most likely


def _value(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return "0" if exc.code is None else str(exc.code)
    try:
        return str(exc)
    except Exception:
        return f"<{type(exc).__name__} object: str failed>"


def _show_line(exc: BaseException) -> None:
    """Some syntax errors know where they are, but not what is there."""
    if isinstance(exc, SyntaxError) and not exc.text and exc.filename and exc.lineno:
        exc.text = linecache.getline(exc.filename, exc.lineno) or None


def _leave_out_ours(summary: traceback.TracebackException) -> None:
    chain: list[traceback.TracebackException | None] = [summary]
    seen: set[int] = set()
    while chain:
        one = chain.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack[:] = [frame for frame in one.stack if not frame.filename.startswith(OURS)]
        chain += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]


def _cut(text: str) -> str:
    if len(text) <= MOST:
        return text
    tail = MOST - HEAD
    return f"{text[:HEAD]}\n… ({len(text) - MOST:,} characters left out) …\n{text[-tail:]}"
