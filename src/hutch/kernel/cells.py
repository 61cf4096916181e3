"""Cells: source in, variables kept, the value of the last expression shown.

A cell is Python, or almost: it may await at the top level, hold magics, or be indented as a whole.
Its source is put where `linecache` finds it, so that tracebacks and `inspect.getsource` show it.
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
from .pretty import said

FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
FUTURES = 0
for _name in __future__.all_feature_names:
    FUTURES |= getattr(__future__, _name).compiler_flag

CO_COROUTINE = 0x80  # as in `inspect`, which is slow to load

# Sources are kept for tracebacks. A model that pastes its data into cells should not fill memory.
MOST_SOURCE = 32 << 20


class Cells:
    """Runs cells, one after the other, in one namespace."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.count = 0
        self.magic = Magic(namespace)
        self._sources = Sources()
        self._futures = 0  # `from __future__ import …` holds for the cells after it, too
        self._loop: Any = None
        self._last = 0  # the identity of what we put into `_`

    def run(self, source: str) -> None:
        """Run one cell and show its value. Raises what the cell raises."""
        parts = self._compiled(normal(source), f"<cell {self.count}>")
        try:
            value = self._execute(*parts)
        finally:
            # What traces a cell is not to trace us.
            sys.settrace(None)
            sys.setprofile(None)
        if value is not None:
            names = self.namespace
            # As `_`, unless the user has put something there.
            if "_" not in names or id(names["_"]) == self._last:
                names["_"] = value
                self._last = id(value)
            display.show_value(value)

    def memory(self) -> dict[str, Any]:
        """What must be known besides the variables to go on elsewhere, as JSON."""
        ours = "_" in self.namespace and id(self.namespace["_"]) == self._last
        return {"count": self.count, "futures": self._futures, "last": ours}

    def recall(self, memory: dict[str, Any]) -> None:
        """Go on where another left off, with its variables in place."""
        self.count = memory.get("count", self.count)
        self._futures = memory.get("futures", 0)
        self._last = id(self.namespace.get("_")) if memory.get("last") else 0

    def _compiled(self, source: str, name: str) -> tuple[CodeType | None, CodeType | None]:
        """The statements, and the expression that gives the value."""
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

    def _code(self, tree: ast.AST, name: str, mode: str) -> CodeType:
        flags = FLAGS | self._futures
        code: CodeType = compile(tree, name, mode, flags, dont_inherit=True)  # type: ignore[call-overload]
        return code

    def _parsed(self, source: str, name: str) -> tuple[ast.Module, str]:
        """The cell as a tree, and the text that this is the tree of."""
        self._sources.add(name, source)
        error: SyntaxError
        try:
            return self._tree(source, name), source
        except IndentationError as exc:
            # Perhaps all of it is indented, as code that was cut out of a text is.
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
            raise SyntaxError("the source holds characters that are no text (surrogates)") from None
        except ValueError as exc:  # null bytes, in older Pythons
            raise SyntaxError(str(exc)) from None
        return tree

    def _execute(self, body: CodeType | None, last: CodeType | None) -> Any:
        if any(code is not None and code.co_flags & CO_COROUTINE for code in (body, last)):
            return self._await(self._inside_loop(body, last))
        if body is not None:
            eval(body, self.namespace)
        return None if last is None else eval(last, self.namespace)

    async def _inside_loop(self, *codes: CodeType | None) -> Any:
        """All of a cell that awaits anywhere: its other statements may need the loop as well."""
        value = None
        for code in codes:
            if code is not None:
                value = eval(code, self.namespace)
                if code.co_flags & CO_COROUTINE:
                    value = await value
        return value if codes[-1] is not None else None

    def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        import asyncio  # most kernels never need it, and it is slow to load

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(work)
        try:
            return self._loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted while it waited: it may clean up, but not for long
                task.cancel()
                self._loop.run_until_complete(asyncio.wait({task}, timeout=1))
            if task.done() and not task.cancelled():
                task.exception()  # so that asyncio does not warn that it was never retrieved
            raise


class Sources:
    """The text of cells, where Python looks for lines: as much as there is room for."""

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
    """Without what editors leave behind: a byte order mark, carriage returns."""
    return source.lstrip("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def _hidden(source: str, last: ast.stmt) -> bool:
    """A semicolon after the last expression says that its value is not wanted."""
    if ";" not in source or last.end_lineno is None:
        return False
    line = source.split("\n")[last.end_lineno - 1].encode()
    return line[last.end_col_offset :].lstrip().startswith(b";")


def _place(tree: ast.Module, written: list[str], rewritten: list[str]) -> None:
    """Where a magic was rewritten, columns mean nothing: such a line is marked as a whole."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0) - 1
        if line >= 0 and line < len(written) and written[line] != rewritten[line]:
            text = written[line]
            node.col_offset = len(text) - len(text.lstrip())  # type: ignore[attr-defined]
            node.end_col_offset = len(text.encode())  # type: ignore[attr-defined]


OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
MOST_TRACEBACK = 64 * 1024
TRACEBACK_HEAD = 24 * 1024  # characters of the beginning that stay: the user's lines are there


def describe_error(exc: BaseException) -> dict[str, Any]:
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
    if len(text) <= MOST_TRACEBACK:
        return text
    head, tail = text[:TRACEBACK_HEAD], text[TRACEBACK_HEAD - MOST_TRACEBACK :]
    return f"{head}\n… ({len(text) - MOST_TRACEBACK:,} characters left out) …\n{tail}"
