"""When a request is sent again. Only what cannot be done twice by that; decided without I/O."""

from __future__ import annotations

import socket
import ssl
import time

from hutch import operations as op
from hutch.errors import HutchError, ServerUnavailable

BUDGET = 10.0  # seconds, of all pauses of one request: a server that is started anew takes less
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
# Asked twice, these do what they do once. (A session is opened under a key of the request's own.)
REPEATABLE = (op.OpenSession, op.CloseSession, op.ExtendSession)
COMMANDS = (op.RunShell, op.RunCode, op.RunProgram)
NOT_FOR_NOW = (socket.gaierror, ssl.SSLError, PermissionError)  # waiting does not help


class Attempts:
    """Of one request. Each method is told how an attempt failed, and answers how long to pause
    before the next; or it raises what the caller is to be told."""

    def __init__(self, operation: op.Operation, url: str) -> None:
        self._operation, self._url = operation, url
        self._deadline = time.monotonic() + BUDGET
        self._pause = FIRST_PAUSE

    @property
    def _may_repeat(self) -> bool:
        return self._operation.verb == "GET" or isinstance(self._operation, REPEATABLE)

    def after_no_connection(self, exc: Exception) -> float:
        """Nothing was sent."""
        pause = None if _is_lasting(exc) else self._next()
        if pause is None:
            why = f"cannot reach {self._url}: {exc or type(exc).__name__}"
            raise ServerUnavailable(f"{why}. Does `hutch serve` run there?") from None
        return pause

    def after_loss(self, exc: Exception) -> float:
        """Something was sent, and the answer did not come, or not all of it."""
        pause = self._next() if self._may_repeat else None
        if pause is None:
            raise self.lost(exc) from None
        return pause

    def after_refusal(self, error: HutchError, retry_after: float | None) -> float:
        """The server was there, and did not want to."""
        pause = self._next(retry_after) if retry_after is not None and self._may_repeat else None
        if pause is None:
            raise error
        return pause

    def lost(self, exc: Exception) -> ServerUnavailable:
        """For a connection that ended too early."""
        why = f"the connection to {self._url} was lost ({exc or type(exc).__name__})"
        if isinstance(self._operation, COMMANDS):
            what = "before the result came; a command whose caller is gone is stopped"
        elif self._may_repeat:
            what = "before all of the answer came"
        else:
            what = f"and whether {type(self._operation).__name__} was done is not known"
        return ServerUnavailable(f"{why} {what}")

    def _next(self, at_least: float = 0.0) -> float | None:
        pause = max(at_least, self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self._deadline else None


def _is_lasting(exc: BaseException | None) -> bool:
    """Whether the cause of it, at any depth, is one that stays."""
    while exc is not None:
        if isinstance(exc, NOT_FOR_NOW):
            return True
        exc = exc.__cause__ or exc.__context__
    return False
