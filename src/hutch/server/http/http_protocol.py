"""The HTTP protocol of one connection: strict parsing, timeouts and limits.

The parser refuses what two readers could read differently (two lengths, folded headers, bare line
feeds). This module refuses more, and adds timeouts: a head must arrive within ten seconds, a body
at a minimum rate, and a peer that does not read its response is cut off.

Pipelined requests are parsed in small slices, and parsing stops at the first one that has to wait
for another response. What was received and not parsed stays in one buffer, and nothing more is read
from the socket: TCP holds the sender back.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import time
from collections.abc import Callable
from email.utils import formatdate
from functools import partial
from http import HTTPStatus

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from .limits import ConnectionLimits
from .tls import READ, WRITE_AHEAD, TlsProtocol
from .write_buffer import WriteBuffer
from .ws_protocol import WebSocketProtocol

MAX_HEAD = 64 * 1024
BODY_RATE = 100  # bytes per second
# What is still sent after it was answered is read and thrown away, up to here: most clients look
# at an answer only when they have sent everything.
MAX_UNWANTED = 64 << 20
MAX_PIPELINED = 100  # requests sent without waiting for an answer; then the connection closes
# Bytes given to the parser at once. It cannot stop inside a slice, so this bounds how many requests
# are queued: the smallest has 18 bytes. Bodies of a known length are not sliced.
SLICE = 512
BODY_SLICE = 4096  # of a chunked body, whose end we do not know
_NONCE = re.compile(rb"[A-Za-z0-9+/]{22}==")
_TARGET = re.compile(rb"/[!-\"$-~]*")  # a path of ours: no absolute URL, no fragment, ASCII


class Flow(FlowControl):
    """Flow control that does not resume reading while received requests wait for their turn.

    uvicorn pauses when it queues a request, and resumes after every answer and for every body.
    """

    def __init__(self, transport: asyncio.Transport, is_held: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._is_held = is_held

    def resume_reading(self) -> None:
        if not self._is_held():
            super().resume_reading()


class HTTPProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, config: Config, server_state: ServerState, limits: ConnectionLimits, local: bool
    ) -> None:
        self.state: dict[str, object] = {"local": local, "connection": self}
        super().__init__(config, server_state, self.state)
        self.parser = httptools.HttpRequestParser(self)  # without the leniency that uvicorn wants
        self.limits, self.local = limits, local
        self.task: asyncio.Task[object] | None = None  # what answers now; whoever answers sets it
        self.is_gone = self.only_looks_on = False
        self.in_reserve = False  # answers one request, about the server's health
        self.before: TlsProtocol | None = None  # what encrypts the connection
        self._timer: asyncio.TimerHandle | None = None  # of the head, then of the body
        self._in_head, self._in_body = True, False
        self._begun = False  # with a next request, in the same bytes as the end of the last
        self._head = 0  # bytes, of this request
        self._fed = self._body = self._body_before = self._unwanted = 0  # likewise
        self._refusal: tuple[int, str] | None = None
        self._unparsed = memoryview(b"")  # received, and held back from the parser
        self._length: int | None = None  # of this request's body, where its head says so
        self._in_burst = 0  # requests since the peer last waited for an answer
        self._takes_no_more = False
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest request

    def __repr__(self) -> str:
        return f"<HTTPProtocol {self.client[0] if self.client else 'local'}>"

    # --- the connection -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = Flow(transport, self._is_held)
        if self.before:
            transport.set_write_buffer_limits(WRITE_AHEAD)
            transport.set_read_buffer_limits(READ)  # type: ignore[attr-defined]  # only TLS has it
            self.write_buffer = WriteBuffer(transport, self.limits.write_stall, self.before.unsent)
        else:
            self.write_buffer = WriteBuffer(transport, self.limits.write_stall)
        self.transport = self.write_buffer  # type: ignore[assignment]
        if self.local:
            uid = _peer_uid(transport.get_extra_info("socket"))
            if uid not in (0, os.getuid()):
                return self.refuse(403, "this socket is for the user that runs the server")
        elif self.before:
            self.in_reserve = self.before.in_reserve
            self.limits.replace(self.before, self)
        elif self.client:
            self.in_reserve = not self.limits.enter(self.client[0], self)
        self._arm(self.limits.head_time, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if self._answering:
            # Else uvicorn takes it for a failure of ours that it gets no answer, and logs an error.
            self._answering.disconnected = True
            self._answering.message_event.set()
        self._leave()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._unparsed = memoryview(b"")
        if answering and self.task:
            self.task.cancel()

    def eof_received(self) -> None:
        self.transport.close()

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, and nothing is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def shutdown(self) -> None:
        """Finish the current request, and take no more."""
        self._disarm()
        if self.only_looks_on:
            self.cut()
        else:
            super().shutdown()

    def cut(self) -> None:
        """Abort the connection, and cancel its request."""
        self.transport.abort()  # and `connection_lost` cancels what answers

    def _leave(self) -> None:
        self.is_gone = True
        self._disarm()
        self.write_buffer.forget()
        self.limits.leave(self)

    def handle_websocket_upgrade(self) -> None:
        if self.in_reserve:
            return self.refuse(503, "too many connections")
        self._disarm()
        self.ws_protocol_class = partial(  # type: ignore[assignment]
            WebSocketProtocol, limits=self.limits, before=self
        )
        super().handle_websocket_upgrade()

    # --- what comes in --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._takes_no_more:
            return
        self._unset_keepalive_if_required()
        if not self._unparsed and (self.cycle is None or self.cycle.response_complete):
            self._in_burst = 0
        held = bytes(self._unparsed)
        self._unparsed = memoryview(held + data if held else data)
        self._parse()

    def _is_held(self) -> bool:
        """Whether received data has to be handled before more is read."""
        return bool(self.pipeline or self._unparsed or self._takes_no_more)

    def _parse(self) -> None:
        """Parse what was received, until a request has to wait for another's answer."""
        while self._unparsed and not self.pipeline:
            size = SLICE
            if self._in_body and self._length is None:
                size = BODY_SLICE
            elif self._in_body and self._length is not None:
                size = max(SLICE, self._length - self._body)
            piece, self._unparsed = self._unparsed[:size], self._unparsed[size:]
            if not self._feed(piece):
                self._unparsed = memoryview(b"")
                return
        if self._unparsed:
            self.flow.pause_reading()

    def _feed(self, piece: memoryview) -> bool:
        """Whether to go on after this slice."""
        self._fed += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.scope["method"] == "CONNECT":
                self.refuse(400, "this server is not a proxy")
            return False
        except (httptools.HttpParserError, UnicodeDecodeError):
            if self._takes_no_more:
                self._finish()
            elif self._unwanted > MAX_UNWANTED:
                self.cut()
            else:
                self.refuse(*(self._refusal or (400, "not an HTTP request")))
            return False
        if self._in_head and (self._fed or self._begun):
            if self._fed > MAX_HEAD:
                self.refuse(431, "the head of a request can have 64 KiB")
                return False
            if not self.pipeline:  # otherwise we are the ones who do not read on
                self._arm(self.limits.head_time, self._head_is_late)
        elif self._in_body:
            # Chunks of one byte each are six bytes; what is more is padding.
            if self._fed > 16 * self._body + MAX_HEAD:
                self.refuse(400, "more padding than body")
                return False
            self._arm(self.limits.body_window, self._body_is_slow)
        return not self.transport.is_closing()

    def on_response_complete(self) -> None:
        self._answering = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.flow.read_paused:
            self.loop.call_soon(self._go_on)  # after others had their turn

    def _go_on(self) -> None:
        """Parse what was held back, once nothing is queued before it; then read again."""
        if self.transport.is_closing() or self.pipeline or self._takes_no_more:
            return
        if self._unparsed:
            self._unset_keepalive_if_required()
            self._parse()
        elif self._begun and self._in_head:
            self._arm(self.limits.head_time, self._head_is_late)
        if self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def _finish(self) -> None:
        """Answer what is queued, with `Connection: close`, and nothing after it."""
        self._disarm()
        self.limits.ended["pipelining"] += 1
        if self.cycle.response_complete:
            self.transport.close()
        else:
            self.flow.pause_reading()
            self.cycle.keep_alive = False

    def on_message_begin(self) -> None:
        self._in_burst += 1
        if self._in_burst > MAX_PIPELINED:
            self._takes_no_more = True
            raise ValueError("too many pipelined requests")  # `_feed` sees it
        self._begun = True
        self._in_head, self._in_body = True, False
        self._length = None
        self._head = self._body = self._body_before = self._unwanted = 0
        super().on_message_begin()
        self._refusal = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            self._refuse_here(431, "the head of a request can have 64 KiB")
        if not self._in_head:
            return  # trailers are ignored
        if name.lower() == b"transfer-encoding" and value.lower() != b"chunked":
            self._refuse_here(400, "the one transfer encoding here is chunked")
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            self._refuse_here(400, "this is a server for HTTP/1.1")
        if version == "1.0" and b"transfer-encoding" in names:
            self._refuse_here(400, "HTTP/1.0 has no transfer encoding")
        if not _TARGET.fullmatch(self.url) or self.parser.get_method() == b"CONNECT":
            self._refuse_here(400, "the target of a request here is a path")
        if self._get_upgrade() == b"websocket" and not self._is_handshake():
            self._refuse_here(400, "this is no handshake of a WebSocket: a GET without a body")
        self._length = next((int(v) for n, v in self.headers if n == b"content-length"), None)
        now = time.time()
        if now - self.limits.dated > 1:
            self.limits.dated = now
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
        self._disarm()
        self._in_head, self._in_body = False, True
        self._fed = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        if self.cycle and (self.parser.should_upgrade() or self.in_reserve):
            self.cycle.keep_alive = False  # after an upgrade, the parser goes no further

    def _is_handshake(self) -> bool:
        given = dict(self.headers)
        return (
            (self.cycle is None or self.cycle.response_complete)
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and given.get(b"sec-websocket-version") == b"13"
            and _NONCE.fullmatch(given.get(b"sec-websocket-key", b"")) is not None
            and b"content-length" not in given
            and b"transfer-encoding" not in given
        )

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        if self.cycle.response_complete:
            self._unwanted += len(body)
            if self._unwanted > MAX_UNWANTED:
                self._refuse_here(413, "it was answered already")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._disarm()
        self._begun = False
        self._in_head, self._in_body = True, False
        self._fed = 0
        super().on_message_complete()

    def _refuse_here(self, status: int, why: str) -> None:
        self._refusal = (status, why)
        raise ValueError(why)  # the parser stops, and `data_received` refuses

    def refuse(self, status: int, why: str) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        self._disarm()
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.cut()
            return
        body = msgspec.json.encode(
            {"error_code": "INVALID_REQUEST", "message": why, "code": "invalid_request"}
        )
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            + body
        )
        self.transport.close()

    # --- the clocks -----------------------------------------------------------------------

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, act)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self.refuse(408, "the head of the request did not come in time")

    def _body_is_slow(self) -> None:
        self._timer = None
        grown, self._body_before = self._body - self._body_before, self._body
        if self.flow.read_paused or grown >= BODY_RATE * self.limits.body_window:
            self._arm(self.limits.body_window, self._body_is_slow)
        else:
            self.refuse(408, "the body of the request comes too slowly")


def _peer_uid(sock: socket.socket) -> int:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", found)[1]
    return uid
