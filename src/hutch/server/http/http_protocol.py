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
import logging
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
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import ProtocolError
from websockets.frames import CTRL_OPCODES, CloseCode, Frame
from websockets.server import ServerProtocol

from .limits import ClientConnection, ConnectionLimits
from .tls import READ, WRITE_AHEAD, TlsProtocol

MAX_HEAD = 64 * 1024
BODY_RATE = 100  # bytes per second
# What a client still sends after its request was answered is read and discarded, up to this many
# bytes: most clients read a response only after they have sent everything.
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
        self.parser = httptools.HttpRequestParser(self)  # strict, unlike uvicorn's
        self.limits, self.local = limits, local
        self.task: asyncio.Task[object] | None = None  # that answers now; set by the application
        self.is_gone = self.only_looks_on = False
        self.in_reserve = False  # answers one request, about the server's health
        self.before: TlsProtocol | None = None  # what encrypts the connection
        self._timer: asyncio.TimerHandle | None = None  # of the head, then of the body
        self._in_head, self._in_body = True, False
        self._begun = False  # the next request began in the same bytes as the last one ended
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

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.flow = Flow(transport, self._is_held)
        if self.before:
            transport.set_write_buffer_limits(WRITE_AHEAD)
            transport.set_read_buffer_limits(READ)  # type: ignore[attr-defined]  # only TLS has it
            self.write_buffer = WriteBuffer(transport, self.limits.write_stall, self.before.unsent)
        else:
            self.write_buffer = WriteBuffer(transport, self.limits.write_stall)
        self.transport = self.write_buffer
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
            # Otherwise uvicorn logs an error, because the request was not answered.
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
        self.transport.abort()  # then `connection_lost` cancels the task

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
            if not self.pipeline:  # otherwise it is us who do not read on
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
            self.loop.call_soon(self._go_on)  # after other connections had their turn

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
            self._refuse_here(400, "the only supported transfer encoding is chunked")
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        names = [name for name, _ in self.headers]
        if version not in ("1.0", "1.1"):
            self._refuse_here(400, "this server speaks HTTP/1.1")
        if version == "1.0" and b"transfer-encoding" in names:
            self._refuse_here(400, "HTTP/1.0 has no transfer encoding")
        if not _TARGET.fullmatch(self.url) or self.parser.get_method() == b"CONNECT":
            self._refuse_here(400, "the target of a request must be a path")
        if self._get_upgrade() == b"websocket" and not self._is_handshake():
            self._refuse_here(400, "not a valid WebSocket handshake: send a GET without a body")
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
                self._refuse_here(413, "the request was answered already")
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

    # --- timeouts -------------------------------------------------------------------------

    def _arm(self, seconds: float, act: Callable[[], None]) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(seconds, act)

    def _disarm(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self.refuse(408, "the head of the request did not arrive in time")

    def _body_is_slow(self) -> None:
        self._timer = None
        grown, self._body_before = self._body - self._body_before, self._body
        if self.flow.read_paused or grown >= BODY_RATE * self.limits.body_window:
            self._arm(self.limits.body_window, self._body_is_slow)
        else:
            self.refuse(408, "the body of the request arrives too slowly")


def _peer_uid(sock: socket.socket) -> int:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", credentials)[1]
    return uid


READ_RATE = 1024  # bytes per second


class WriteBuffer(asyncio.Transport):
    """A transport that aborts if its peer does not read, and can hold back what is written.

    Data that was written and not sent takes up memory, and its connection counts against a limit.
    So the peer must read something in every window; and of a complete response, at a minimum rate.
    Holding back sends a head with its body: one packet less, and the reader wakes up once.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        window: float,
        unsent_below: Callable[[], int] = lambda: 0,
    ) -> None:
        """`unsent_below`: bytes that wait below this transport, where it does not count them."""
        super().__init__()
        self._transport, self._window = transport, window
        self._unsent_below = unsent_below
        self._held: list[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0  # bytes
        self._left = self._taken = 0  # when the window began
        self.is_live = False  # whether more comes as a program makes it

    def __repr__(self) -> str:
        return f"<WriteBuffer {self.get_write_buffer_size()} of {self._written} unread>"

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def read_at_most(self, size: int) -> None:
        """Read this many bytes at once, so that what follows them does not block the loop."""
        self._transport.max_size = size  # type: ignore[attr-defined]  # of asyncio's own class

    def abort(self) -> None:
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._unsent_below()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._held is not None:
            self._held.append(bytes(data))
            return
        self._transport.write(data)
        self._written += len(data)
        if self._timer is None and self.get_write_buffer_size():
            self._begin_window()

    def cork(self) -> None:
        self._held = []

    def uncork(self) -> None:
        held, self._held = self._held, None
        if held:
            self.write(b"".join(held))

    def close(self) -> None:
        self.uncork()
        if self._transport.is_closing():
            return  # after a second `close`, a TLS transport cannot be aborted
        self._transport.close()
        if self._timer is None:  # TLS waits for the peer's close_notify, but not forever
            self._begin_window()

    def forget(self) -> None:
        """Call it when the connection is lost."""
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _begin_window(self) -> None:
        self._left = self.get_write_buffer_size()
        self._taken = self._written - self._left
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._window, self._end_window)

    def _end_window(self) -> None:
        self._timer = None
        left = self.get_write_buffer_size()
        if not left:
            if self._transport.is_closing():
                self._transport.abort()
            return
        taken = self._written - left - self._taken
        least = 1 if self.is_live else int(READ_RATE * self._window)
        if taken < min(least, self._left):  # a peer that read everything has caught up
            self._transport.abort()
        else:
            self._begin_window()


MAX_PONGS = 1 << 20  # bytes of unread answers to pings
MAX_PIECES = 1024  # of one message
MAX_EMPTY = 100  # frames per second that are for control, or empty
FRAMES_AT_ONCE = 16 * 1024  # bytes at once, so that small frames do not block the event loop


class FrameCounter(ServerProtocol):
    """Reads frames, and limits how many there are.

    A frame costs the same whether or not it has content. So the number of frames in a message, and
    the rate of empty and control frames, are limited.
    """

    def __init__(self, *, max_size: int, logger: logging.Logger) -> None:
        super().__init__(max_size=max_size, logger=logger)
        self._pieces = 0  # of this message
        self._empty, self._second = 0, 0.0

    def recv_frame(self, frame: Frame) -> None:
        is_control = frame.opcode in CTRL_OPCODES
        if not is_control:
            self._pieces += 1
        if self._pieces > MAX_PIECES:
            return self._give_up(
                CloseCode.MESSAGE_TOO_BIG, f"a message can have {MAX_PIECES} pieces"
            )
        if frame.fin and not is_control:
            self._pieces = 0
        if (is_control or not frame.data) and self._is_one_too_many():
            return self._give_up(
                CloseCode.POLICY_VIOLATION,
                f"more than {MAX_EMPTY} empty or control frames a second",
            )
        super().recv_frame(frame)

    def _is_one_too_many(self) -> bool:
        now = time.monotonic()
        if now - self._second > 1:
            self._empty, self._second = 0, now
        self._empty += 1
        return self._empty > MAX_EMPTY

    def _give_up(self, code: CloseCode, why: str) -> None:
        self.fail(code, why)  # discards what else was received
        self.parser_exc = ProtocolError(why)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket with frame-rate limits."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        limits: ConnectionLimits,
        before: ClientConnection,
    ) -> None:
        """`before`: what the connection was until the handshake."""
        super().__init__(config, server_state, {**app_state, "connection": self})
        self.conn: ServerProtocol = FrameCounter(max_size=config.ws_max_size, logger=self.logger)
        self.limits, self._before = limits, before
        self.task: asyncio.Task[object] | None = None  # that ends with the connection
        self.is_gone = self.is_idle = self.only_looks_on = self.in_reserve = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, WriteBuffer)
        super().connection_made(transport)
        self.write_buffer = transport
        transport.is_live = True
        transport.read_at_most(FRAMES_AT_ONCE)
        self.limits.replace(self._before, self)

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated and not self.handshake_complete:
            # A client has to wait for the answer. websockets would parse this data as frames, and
            # fail to answer the handshake if they are malformed.
            return self.cut()
        super().data_received(data)
        if not self.handshake_initiated:  # websockets takes fewer and shorter headers than we do
            self.cut()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # before the handshake no close frame can be sent
            self.cut()
        elif not self.transport.is_closing():
            super().handle_parser_exception()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError:  # uvicorn does the same, and logs an error
                self.frames = []
                self.conn.send_close(CloseCode.INVALID_DATA)
                return self.handle_parser_exception()
        super().send_receive_event_to_app()

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_PONGS:
            self.cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_gone = True
        self.write_buffer.forget()
        self.limits.leave(self)
        super().connection_lost(exc)
        if self.task:
            self.task.cancel()

    def refused(self) -> None:
        """Call it when the handshake was refused: otherwise uvicorn logs an error."""
        self.handshake_complete = True

    def cut(self) -> None:
        """Abort the connection."""
        self.transport.abort()
