"""DSPy: an interpreter for RLM, CodeAct and ProgramOfThought, in a box.

    dspy.RLM("context, question -> answer", interpreter_factory=HutchInterpreter)

Tools and predictors stay in this process; the code in the box calls them.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import hutch
from hutch.client._sync import Sandbox
from hutch.errors import HutchError, InvalidRequest
from hutch.types import Execution

from . import checked, needs

with needs("dspy"):
    from dspy.primitives.code_interpreter import (
        CodeExecutionError,
        CodeInterpreterError,
        FinalOutput,
    )

__all__ = ["HutchInterpreter"]

SUBMIT = "_hutch_submit"
VARIABLES = "/tmp/.hutch-dspy.json"
LONG = 1 << 20  # characters; longer variables are passed in a file

_SETUP = """
import json as _json

class _Submission(BaseException):
    pass

def _hutch_plain(value):
    try:
        _json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError):
        return repr(value)

_hutch_fields = {fields!r}

def SUBMIT(*args, **kwargs):
    if _hutch_fields is None:
        if len(args) != 1 or kwargs:
            raise TypeError("SUBMIT takes one value here")
        values = {{"output": args[0]}}
    else:
        if args and kwargs or len(args) > len(_hutch_fields):
            raise TypeError(f"SUBMIT takes {{_hutch_fields}}, by position or by name")
        values = dict(zip(_hutch_fields, args)) if args else kwargs
        if set(values) != set(_hutch_fields):
            raise TypeError(f"SUBMIT takes exactly {{_hutch_fields}}, not {{list(values)}}")
    _hutch_submit({{name: _hutch_plain(value) for name, value in values.items()}})
    raise _Submission
"""


class HutchInterpreter:
    """A `CodeInterpreter`: one box, one kept Python, from the first `execute` to `shutdown`.

    `order` is what `Sandbox.create` takes. Errors of the code are CodeExecutionError (or
    SyntaxError), which a model can correct; CodeInterpreterError is about the interpreter itself.
    `timeout`: seconds for one execution, tools included; then the code is stopped, and variables
    stay.
    """

    execution_instructions = (
        "Code runs as Python in a persistent process inside a sandbox. State, imports, functions "
        "and files stay for this session. Host tools and SUBMIT are global functions; what is "
        "passed to tools must be JSON-compatible."
    )

    def __init__(
        self,
        tools: dict[str, Callable[..., Any]] | None = None,
        output_fields: list[dict[str, Any]] | None = None,
        *,
        timeout: float | None = None,
        **order: Any,
    ) -> None:
        self.tools = dict(tools or {})
        self.output_fields = output_fields
        self._timeout, self._order = timeout, checked(order)
        self._box: Sandbox | None = None
        self._known: str | None = None  # the set-up that the kernel has run
        self._over = False
        self._turn = threading.Lock()

    def start(self) -> None:
        """Create the box. May be called more than once.

        Raises CodeInterpreterError if it cannot be created, or has been shut down.
        """
        if self._over:
            raise CodeInterpreterError("this session is over: make another HutchInterpreter")
        if self._box is None:
            try:
                self._box = hutch.Sandbox.create(**self._order)
            except HutchError as exc:
                raise CodeInterpreterError(str(exc)) from exc

    def execute(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        """Run code. Returns FinalOutput after SUBMIT; else the last value, its output, or None.

        Raises CodeExecutionError or SyntaxError for errors of the code, CodeInterpreterError if the
        interpreter is busy or the session is over.
        """
        if not self._turn.acquire(blocking=False):
            raise CodeInterpreterError("this interpreter is busy with another execution")
        try:
            self.start()
            return self._execute(code, variables or {})
        except InvalidRequest as exc:
            raise CodeInterpreterError(str(exc)) from exc
        except HutchError as exc:
            self._over = True
            raise CodeInterpreterError(f"the box is gone: {exc}") from exc
        finally:
            self._turn.release()

    def shutdown(self) -> None:
        """Close the box. May be called more than once."""
        self._over = True
        box, self._box = self._box, None
        if box:
            box.close()

    def __call__(self, code: str, variables: dict[str, Any] | None = None) -> Any:
        return self.execute(code, variables)

    def __enter__(self) -> HutchInterpreter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.shutdown()

    # --- one execution ----------------------------------------------------------------

    def _execute(self, code: str, variables: dict[str, Any]) -> Any:
        assert self._box is not None
        self._set_up(variables)
        submitted: list[Any] = []
        functions = {name: partial(_called, tool) for name, tool in self.tools.items()}
        functions[SUBMIT] = partial(_called, submitted.append)
        execution = self._box.run_code(code, timeout=self._timeout, functions=functions)
        if execution.error is not None and execution.error.name == "_Submission" and submitted:
            return FinalOutput(submitted[-1])
        self._check(execution)
        value = _value(execution.text)
        printed = (execution.logs.stdout + execution.logs.stderr).rstrip("\n")
        return value if value is not None else printed or None

    def _set_up(self, variables: dict[str, Any]) -> None:
        assert self._box is not None
        names = None if self.output_fields is None else [f["name"] for f in self.output_fields]
        setup = _SETUP.format(fields=names)
        cells = [] if setup == self._known else [setup]
        if variables:
            cells.append(self._assignment(variables))
        for cell in cells:
            self._check(self._box.run_code(cell))
        self._known = setup

    def _assignment(self, variables: dict[str, Any]) -> str:
        assert self._box is not None
        try:
            text = json.dumps(variables, allow_nan=False)
        except (TypeError, ValueError) as exc:
            raise CodeInterpreterError(f"variables must be JSON-compatible: {exc}") from exc
        if len(text) <= LONG:
            return f"globals().update(_json.loads({text!r}))"
        self._box.files.write(VARIABLES, text)
        return f"with open({VARIABLES!r}) as _file: globals().update(_json.load(_file))"

    def _check(self, execution: Execution) -> None:
        if execution.died is not None:
            self._over = True
            raise CodeInterpreterError(f"the session is over, its kernel {execution.died}")
        if execution.timed_out:
            raise CodeExecutionError(f"the code was stopped after {self._timeout:g} seconds")
        if execution.error is None:
            return
        if execution.error.name in ("SyntaxError", "IndentationError", "TabError"):
            raise SyntaxError(execution.error.value)
        raise CodeExecutionError(f"{execution.error.name}: {execution.error.value}")


def _called(tool: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    value = tool(*args, **kwargs)
    return asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _value(text: str | None) -> Any:
    """The value itself if it is JSON-compatible; else its `repr`."""
    if text is None or len(text) > LONG:
        return text
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
    return value
