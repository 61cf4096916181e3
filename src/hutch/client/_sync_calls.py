# Generated from _async_calls.py by scripts/unasync. Change that file, and run the script.
"""Calls from a box, answered by functions of this process while the cell runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hutch import operations as op
from hutch.errors import HutchError, InvalidRequest
from hutch.types import Call, CellError, CellResult, Chunk, Execution

from . import transport
from ._sync_compat import Helpers, outcome
from ._sync_stream import Items

Functions = Mapping[str, Callable[..., Any]]
MAX_MESSAGE = 10_000  # characters of what an error says


class Answered:
    """What a cell gives, item by item, but for its calls: those are answered here.

    They end with the cell, however that ends. What runs in a thread cannot be stopped there; its
    answer is then of no interest.
    """

    def __init__(
        self,
        stream: Items[Chunk | CellResult | Call | Execution],
        transport: transport.Transport,
        session: str,
        functions: Functions,
    ) -> None:
        self._stream, self._transport, self._session = stream, transport, session
        self._functions = functions
        self._helpers = Helpers()

    def __iter__(self) -> Answered:
        return self

    def __next__(self) -> Chunk | CellResult | Execution:
        try:
            while isinstance(item := next(self._stream), Call):
                about = self._transport, self._session, item, self._functions
                self._helpers.start(_answer, *about)
            return item
        except StopIteration:
            self._helpers.stop()
            raise

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._helpers.stop()


def _answer(transport: transport.Transport, session: str, call: Call, functions: Functions) -> None:
    value, error = None, None
    try:
        if call.name not in functions:
            raise NameError(f"no function {call.name!r} was given to this cell")
        value, raised = outcome(functions[call.name], call.args, call.kwargs)
        if raised is not None:
            error = _told(raised)
        else:
            _check(call.name, value)
    except Exception as exc:
        value, error = None, _told(exc)
    try:
        transport.perform(op.AnswerCall(session, call.id, value, error))
    except InvalidRequest as exc:
        _give_up(transport, session, call, exc)
    except HutchError:
        pass  # the cell is over, or the box: whoever reads the stream is told


def _give_up(transport: transport.Transport, session: str, call: Call, exc: InvalidRequest) -> None:
    error = CellError("ValueError", f"{call.name} gave an answer that cannot be sent: {exc}")
    try:
        transport.perform(op.AnswerCall(session, call.id, None, error))
    except HutchError:
        pass


def _check(name: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except BaseException as exc:  # of TypeError, ValueError, or of the value's own code
        why = _told(exc).value
        raise TypeError(f"{name} gave something that JSON has no form for: {why}") from None


def _told(exc: BaseException) -> CellError:
    """Its class and what it says. Where it came from is nobody's business in the box."""
    try:
        plain = len(exc.args) == 1 and isinstance(exc.args[0], str)
        text: str = exc.args[0] if plain else str(exc)
    except BaseException:  # what it says is said by code of the function's
        text = "(its message cannot be told)"
    clean = text[:MAX_MESSAGE].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return CellError(type(exc).__name__[:200], clean)
