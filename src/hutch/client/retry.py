"""When a request is sent again. Only what cannot be done twice by that; decided without I/O."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Iterator

from hutch import operations as op
from hutch.errors import HutchError, ServerBusy, ServerUnavailable

BUDGET = 10.0  # seconds, of all pauses of one request: a server that is started anew takes less
BUSY_BUDGET = 60.0  # where the server says that it will have time later, and when
SHORT_BUDGET = 1.0  # where nobody has answered yet: it is rather the url that is wrong
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
# Asked twice, these do what they do once. (A session is opened under a key of the request's own.)
REPEATABLE = (op.OpenSession, op.CloseSession, op.ExtendSession)
COMMANDS = (op.RunShell, op.RunCode, op.RunProgram)
NOT_FOR_NOW = (socket.gaierror, ssl.SSLError, PermissionError)  # waiting does not help


class Attempts:
    """Of one request. Each method is told how an attempt failed, and answers how long to pause
    before the next; or it raises what the caller is to be told."""

    def __init__(self, operation: op.Operation[object], url: str, *, reached: bool = True) -> None:
        """`reached`: this server has answered before."""
        self._operation, self._url = operation, url
        began = time.monotonic()
        self._deadline = began + (BUDGET if reached else SHORT_BUDGET)
        self._busy_deadline = began + BUSY_BUDGET
        self._pause = FIRST_PAUSE

    @property
    def _may_repeat(self) -> bool:
        return self._operation.verb == "GET" or isinstance(self._operation, REPEATABLE)

    def after_no_connection(self, exc: Exception) -> float:
        """Nothing was sent."""
        is_lasting = _is_lasting(exc)
        pause = None if is_lasting else self._next()
        if pause is None:
            why = f"cannot reach {self._url}: {_reason(exc)}"
            # Somebody is there, or it is not known where: a server would not help.
            advice = "" if is_lasting else ". Does `hutch serve` run there?"
            raise ServerUnavailable(why + advice) from None
        return pause

    def after_loss(self) -> float:
        """Something was sent, and the answer did not come, or not all of it."""
        pause = self._next() if self._may_repeat else None
        if pause is None:
            raise self.lost() from None
        return pause

    def after_refusal(self, error: HutchError, retry_after: float | None) -> float:
        """The server was there, and did not want to."""
        if isinstance(error, ServerBusy):
            self._deadline = self._busy_deadline
            error.retry_after = error.retry_after if retry_after is None else retry_after
        pause = self._next(retry_after) if retry_after is not None and self._may_repeat else None
        if pause is None:
            raise error
        return pause

    def lost(self) -> ServerUnavailable:
        """For a connection that ended too early."""
        why = f"the connection to {self._url} was lost"
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


def _is_lasting(exc: BaseException) -> bool:
    return any(isinstance(cause, NOT_FOR_NOW) for cause in _causes(exc))


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    """It and what caused it, at any depth; of several addresses that were tried, each."""
    while exc is not None:
        yield exc
        if isinstance(exc, BaseExceptionGroup):
            for each in exc.exceptions:
                yield from _causes(each)
        exc = exc.__cause__ or exc.__context__


def _reason(exc: BaseException) -> str:
    """Why there is no connection, in the same words whatever library says it."""
    for cause in _causes(exc):
        if isinstance(cause, socket.gaierror):
            return "there is no host of this name"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message} ({_trust()})"
        if isinstance(cause, ssl.SSLError):
            return "it does not speak HTTPS"
        if isinstance(cause, TimeoutError):
            return "nobody answered in time"
        if isinstance(cause, OSError) and cause.errno is not None:
            return _REASONS.get(cause.errno) or os.strerror(cause.errno)
    return "nobody answered"


def _trust() -> str:
    """What SSL_CERT_FILE does. OpenSSL is silent about one that it cannot read."""
    name = os.environ.get("SSL_CERT_FILE")
    if not name:
        return "a certificate of your own is trusted if SSL_CERT_FILE names it"
    try:
        with open(name, "rb"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(name)
    except ssl.SSLError:
        return f"SSL_CERT_FILE names {name}, which has no certificate in PEM form"
    except OSError as exc:
        return f"SSL_CERT_FILE names {name}, which cannot be read: {exc.strerror}"
    return f"trusted is what SSL_CERT_FILE names: {name}"


_REASONS = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ENOENT: "there is no such socket",
    errno.EACCES: "this user may not open it: be the user of the server, or use a url and a key",
}
