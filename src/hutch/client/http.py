"""What the HTTP clients share: addresses of servers, when to try again, and events. No I/O."""

from __future__ import annotations

import errno
import math
import os
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from hutch import operations as op
from hutch.codec import EncodedRequest
from hutch.codec.values import quoted
from hutch.errors import HutchError, InvalidRequest, ServerBusy, ServerUnavailable

# --- addresses ----------------------------------------------------------------------


EXAMPLES = "http://127.0.0.1:8080, https://boxes.example.com or unix:/run/hutch.sock"

# A command may be silent for days. With these, the operating system notices within a minute that
# the other machine is gone.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True)
class Address:
    """Where a server is, for HTTP connections."""

    url: str  # for messages
    scheme: str
    host: str
    port: int
    prefix: str = ""  # before every path
    socket: str | None = None  # a Unix socket to connect to, instead of host and port

    def target(self, request: EncodedRequest) -> str:
        """The target in the first line of a request: path and query."""
        query = "&".join(f"{name}={quoted(value)}" for name, value in request.query.items())
        return self.prefix + request.path + ("?" + query if query else "")

    @property
    def authority(self) -> str:
        """The value of the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"


def address_of(url: str) -> Address:
    """The address in a url. Raises InvalidRequest, with examples, if it is not a url of ours."""
    if url.startswith("unix:"):
        path = "/" + url.removeprefix("unix:").lstrip("/")
        return Address(f"unix:{path}", "http", "localhost", 80, socket=path)
    try:
        parts = urlsplit(url)
        port, host = parts.port, parts.hostname or ""
        if not host.isascii():
            host = host.encode("idna").decode()
    except ValueError:  # so is a UnicodeError
        raise _wrong(url) from None
    if parts.scheme not in ("http", "https") or not host:
        raise _wrong(url)
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("a url has no user, query or fragment: give the key as api_key")
    port = port or (443 if parts.scheme == "https" else 80)
    return Address(url.rstrip("/"), parts.scheme, host, port, prefix=parts.path.rstrip("/"))


def _wrong(url: str) -> InvalidRequest:
    return InvalidRequest(f"a url is {EXAMPLES}, not {url!r:.200}")


# --- when to try again --------------------------------------------------------------


BUDGET = 10.0  # seconds, for all pauses of a request: a restart of the server takes less
BUSY_BUDGET = 60.0  # if the server is busy and says when to try again
SHORT_BUDGET = 1.0  # if the server has never answered: more likely the url is wrong
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
# Idempotent requests. (OpenSession has an idempotency key.)
REPEATABLE = (op.OpenSession, op.CloseSession, op.ExtendSession)
COMMANDS = (op.RunShell, op.RunCode, op.RunProgram)
PERMANENT = (socket.gaierror, ssl.SSLError, PermissionError)  # waiting does not help


class NotReached(ServerUnavailable):
    """There is no connection to the server, so nothing was sent."""


class Attempts:
    """The attempts of one request.

    The `after_` methods take how an attempt failed, and return how long to pause before the next;
    or they raise the error for the caller.
    """

    def __init__(
        self,
        operation: op.Operation[object],
        url: str,
        *,
        reached: bool = True,
        patient: bool = True,
    ) -> None:
        """`reached`: the server has answered before. `patient` False: there is one attempt."""
        self._operation, self._url = operation, url
        began = time.monotonic()
        self._deadline = began + (BUDGET if reached else SHORT_BUDGET) if patient else -math.inf
        self._busy_deadline = began + BUSY_BUDGET if patient else -math.inf
        self._pause = FIRST_PAUSE

    @property
    def _may_repeat(self) -> bool:
        return self._operation.verb == "GET" or isinstance(self._operation, REPEATABLE)

    def after_no_connection(self, exc: Exception) -> float:
        """Nothing was sent. Raises NotReached."""
        is_permanent = any(isinstance(cause, PERMANENT) for cause in _causes(exc))
        pause = None if is_permanent else self._next()
        if pause is None:
            why = f"cannot reach {self._url}: {_reason(exc)}"
            # Starting a server would not help against a permanent error.
            advice = "" if is_permanent else ". Does `hutch serve` run there?"
            raise NotReached(why + advice) from None
        return pause

    def after_loss(self) -> float:
        """Something was sent, and the answer did not come completely. Raises ServerUnavailable."""
        pause = self._next() if self._may_repeat else None
        if pause is None:
            raise self.lost() from None
        return pause

    def after_refusal(self, error: HutchError, retry_after: float | None) -> float:
        """The server answered with an error. Raises it."""
        if isinstance(error, ServerBusy):
            self._deadline = self._busy_deadline
            error.retry_after = error.retry_after if retry_after is None else retry_after
        pause = self._next(retry_after) if retry_after is not None and self._may_repeat else None
        if pause is None:
            raise error
        return pause

    def lost(self) -> ServerUnavailable:
        """The error for a connection that ended too early."""
        why = f"the connection to {self._url} was lost"
        if isinstance(self._operation, COMMANDS):
            what = "before the result came; the server stops a command whose client is gone"
        elif self._may_repeat:
            what = "before all of the answer came"
        else:
            what = f"and it is not known whether {type(self._operation).__name__} was done"
        return ServerUnavailable(f"{why} {what}")

    def _next(self, at_least: float = 0.0) -> float | None:
        pause = max(at_least, self._pause)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return pause if time.monotonic() + pause <= self._deadline else None


def _causes(exc: BaseException | None) -> Iterator[BaseException]:
    """The exception and its causes, at any depth. A group has one for each address tried."""
    while exc is not None:
        yield exc
        if isinstance(exc, BaseExceptionGroup):
            for member in exc.exceptions:
                yield from _causes(member)
        exc = exc.__cause__ or exc.__context__


def _reason(exc: BaseException) -> str:
    """Why there is no connection, in the same words for every HTTP library."""
    for cause in _causes(exc):
        if isinstance(cause, socket.gaierror):
            return "no such host"
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not accepted: {cause.verify_message} ({_trust()})"
        if isinstance(cause, ssl.SSLError):
            return "it does not speak HTTPS"
        if isinstance(cause, TimeoutError):
            return "no answer in time"
        if isinstance(cause, OSError) and cause.errno is not None:
            return _REASONS.get(cause.errno) or os.strerror(cause.errno)
    return "no answer"


def _trust() -> str:
    """How SSL_CERT_FILE is used. OpenSSL ignores one that it cannot read, silently."""
    name = os.environ.get("SSL_CERT_FILE")
    if not name:
        return "to trust a certificate of your own, name it in SSL_CERT_FILE"
    try:
        with open(name, "rb"):
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(name)
    except ssl.SSLError:
        return f"SSL_CERT_FILE names {name}, which has no PEM certificate"
    except OSError as exc:
        return f"SSL_CERT_FILE names {name}, which cannot be read: {exc.strerror}"
    return f"SSL_CERT_FILE names {name}"


_REASONS = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ENOENT: "no such socket",
    errno.EACCES: "permission denied: run this as the server's user, or use a url and a key",
}


# --- events -------------------------------------------------------------------------


# Of one event. The largest are results with pictures, of some megabytes.
MAX_EVENT = 64 * 1024 * 1024


class Events:
    """Bytes in, events out. Lines end in \\n or \\r\\n; comments are heartbeats, and dropped."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._seen = 0  # how far the buffer was searched for the end of a line
        self._name = ""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """The events that are now complete, as (name, data). Raises ServerUnavailable."""
        self._buffer += piece
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._seen))) >= 0:
            line = bytes(memoryview(self._buffer)[start:end]).removesuffix(b"\r")
            start = self._seen = end + 1
            if line:
                self._take(line)
                continue
            name, data = self._name or "message", self._data
            self._name, self._data, self._size = "", [], 0
            if data:
                yield name, b"\n".join(data)
        del self._buffer[:start]
        self._seen = len(self._buffer)
        self._check(self._seen + self._size)

    def _take(self, line: bytes) -> None:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            self._name = value.decode("utf-8", "replace")
        elif field == b"data":
            self._data.append(value)
            self._size += len(value)
            self._check(self._size)

    def _check(self, size: int) -> None:
        if size > MAX_EVENT:
            raise ServerUnavailable(f"the server sent an event of more than {MAX_EVENT} bytes")
