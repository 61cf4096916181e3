"""Cells: run source code, keep its variables, and show the value of its last expression.

A cell is Python with three extensions: it may await at the top level, use magics, or be indented as
a whole. `linecache` gets its source, so that tracebacks and `inspect.getsource` show it.
"""

from __future__ import annotations
import __future__

import ast
import linecache
import os
import sys
import textwrap
import traceback
from collections.abc import Coroutine
from types import CodeType
from typing import Any

from . import display
from .magics import Magic, rewrite
from .pretty import error_text

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
FUTURES = 0
for _name in __future__.all_feature_names:
    FUTURES |= getattr(__future__, _name).compiler_flag

CO_COROUTINE = 0x80  # as in `inspect`, which is slow to load

# Characters of source that are kept for tracebacks: cells may contain large data.
MOST_SOURCE = 32 << 20


class Cells:
    """Runs cells, one after the other, in one namespace."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.namespace = namespace
        self.count = 0
        self.magic = Magic(namespace)
        self._sources = Sources()
        self._futures = 0  # flags: `from __future__ import …` also applies to later cells
        self._loop: Any = None
        self._last = 0  # the id of the value that we put into `_`

    def run(self, source: str) -> None:
        """Run one cell and show its value. Raises what the cell raises."""
        parts = self._compiled(normal(source), f"<cell {self.count}>")
        try:
            value = self._execute(*parts)
        finally:
            # A tracer that the cell has set must not trace our own code.
            sys.settrace(None)
            sys.setprofile(None)
        if value is not None:
            names = self.namespace
            # As `_`, unless the user has assigned that.
            if "_" not in names or id(names["_"]) == self._last:
                names["_"] = value
                self._last = id(value)
            display.show_value(value)

    def memory(self) -> dict[str, object]:
        """The state besides the variables that another kernel needs to continue, as JSON."""
        ours = "_" in self.namespace and id(self.namespace["_"]) == self._last
        return {"count": self.count, "futures": self._futures, "last": ours}

    def recall(self, memory: dict[str, Any]) -> None:
        """Continue from the `memory` of another kernel, after its variables were loaded."""
        self.count = memory.get("count", self.count)
        self._futures = memory.get("futures", 0)
        self._last = id(self.namespace.get("_")) if memory.get("last") else 0

    def _compiled(self, source: str, name: str) -> tuple[CodeType | None, CodeType | None]:
        """The code of the statements, and that of the last expression."""
        tree, source = self._parsed(source, name)
        body = last = None
        value = tree.body[-1] if tree.body else None
        if isinstance(value, ast.Expr) and not _hidden(source, value):
            tree.body.pop()
        else:
            value = None
        if tree.body:
            body = self._code(tree, name, "exec")
            self._futures |= body.co_flags & FUTURES
        if value:
            last = self._code(ast.Expression(value.value), name, "eval")
        return body, last

    def _code(self, tree: ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
        flags = FLAGS | self._futures
        code: CodeType = compile(tree, name, mode, flags, dont_inherit=True)
        return code

    def _parsed(self, source: str, name: str) -> tuple[ast.Module, str]:
        """The syntax tree of a cell, and the text that it was made from."""
        self._sources.add(name, source)
        error: SyntaxError
        try:
            return self._tree(source, name), source
        except IndentationError as exc:
            # Perhaps all of it is indented, like code that was copied out of a text.
            error, level = exc, textwrap.dedent(source)
        except SyntaxError as exc:
            error, level = exc, source
        if level != source:
            return self._parsed(level, name)
        python = rewrite(source)
        if python is None:
            raise error
        tree = self._tree(python, name)
        _place(tree, source.split("\n"), python.split("\n"))
        return tree, python

    def _tree(self, source: str, name: str) -> ast.Module:
        flags = ast.PyCF_ONLY_AST | FLAGS | self._futures
        try:
            tree: ast.Module = compile(source, name, "exec", flags, dont_inherit=True)
        except UnicodeEncodeError:
            raise SyntaxError("the source contains invalid characters (lone surrogates)") from None
        except ValueError as exc:  # null bytes, in older Pythons
            raise SyntaxError(str(exc)) from None
        return tree

    def _execute(self, body: CodeType | None, last: CodeType | None) -> Any:
        if any(code is not None and code.co_flags & CO_COROUTINE for code in (body, last)):
            return self._await(self._inside_loop(body, last))
        if body is not None:
            eval(body, self.namespace)
        return None if last is None else eval(last, self.namespace)

    async def _inside_loop(self, *codes: CodeType | None) -> object:
        """Run all of a cell that awaits anywhere: its other statements may need the loop, too."""
        value = None
        for code in codes:
            if code is not None:
                value = eval(code, self.namespace)
                if code.co_flags & CO_COROUTINE:
                    value = await value
        return value if codes[-1] is not None else None

    def _await(self, work: Coroutine[Any, Any, Any]) -> object:
        import asyncio  # most kernels never need it, and it is slow to load

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: give it a second to clean up
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}, timeout=1))
            if task.done() and not task.cancelled():
                task.exception()  # so that asyncio does not warn that it was never retrieved
            raise


class Sources:
    """The source of cells in `linecache`, up to MOST_SOURCE: the oldest are dropped."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._total = 0

    def add(self, name: str, source: str) -> None:
        self._total += len(source) - self._sizes.pop(name, 0)
        self._sizes[name] = len(source)
        while self._total > MOST_SOURCE and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self._total -= self._sizes.pop(oldest)
            linecache.cache.pop(oldest, None)
        lines = [line + "\n" for line in source.split("\n")]
        linecache.cache[name] = (len(source), None, lines, name)


def normal(source: str) -> str:
    """Remove a byte order mark, and carriage returns."""
    return source.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _hidden(source: str, last: ast.stmt) -> bool:
    """Whether a semicolon after the last expression suppresses its value."""
    if ";" not in source or last.end_lineno is None:
        return False
    line = source.split("\n")[last.end_lineno - 1].encode()
    return line[last.end_col_offset :].lstrip().startswith(b";")


def _place(tree: ast.Module, written: list[str], rewritten: list[str]) -> None:
    """Let nodes of rewritten lines span the whole line: their columns mean nothing to the user."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0) - 1
        if line >= 0 and line < len(written) and written[line] != rewritten[line]:
            text = written[line]
            vars(node).update(
                col_offset=len(text) - len(text.lstrip()), end_col_offset=len(text.encode())
            )


OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST_TRACEBACK = 64 * 1024
TRACEBACK_HEAD = 24 * 1024  # characters of the beginning that are kept: it has the user's lines


def describe_error(exc: BaseException) -> dict[str, object]:
    """The error of a cell. Runs the user's `__str__`, which may take long."""
    return {
        "name": type(exc).__name__,
        "value": _cut(_value(exc)),
        "traceback": _cut(format_error(exc)),
    }


def describe_briefly(exc: BaseException) -> dict[str, object]:
    """Only the name of an error: runs no code of the user."""
    name = type(exc).__name__
    return {"name": name, "value": "", "traceback": f"{name}\n"}


def format_error(exc: BaseException) -> str:
    try:
        _show_line(exc)
        summary = traceback.TracebackException(type(exc), exc, exc.__traceback__)
        _leave_out_ours(summary)
        return "".join(summary.format())
    except Exception:
        return error_text(exc) + "\n"  # out of memory, most likely


def _value(exc: BaseException) -> str:
    if isinstance(exc, SystemExit):
        return "0" if exc.code is None else str(exc.code)
    try:
        return str(exc)
    except Exception:
        return f"<{type(exc).__name__} object: str failed>"


def _show_line(exc: BaseException) -> None:
    """Add the source line to a syntax error that has only its number."""
    if isinstance(exc, SyntaxError) and not exc.text and exc.filename and exc.lineno:
        exc.text = linecache.getline(exc.filename, exc.lineno) or None


def _leave_out_ours(summary: traceback.TracebackException) -> None:
    chain: list[traceback.TracebackException | None] = [summary]
    seen: set[int] = set()
    while chain:
        error = chain.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        error.stack[:] = [frame for frame in error.stack if not frame.filename.startswith(OURS)]
        chain += [error.__cause__, error.__context__, *(getattr(error, "exceptions", None) or ())]


def _cut(text: str) -> str:
    if len(text) <= MOST_TRACEBACK:
        return text
    head, tail = text[:TRACEBACK_HEAD], text[TRACEBACK_HEAD - MOST_TRACEBACK :]
    return f"{head}\n… ({len(text) - MOST_TRACEBACK:,} characters left out) …\n{tail}"
