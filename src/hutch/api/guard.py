"""What stands at the door: how long, how much and from how many a peer may send.

The parser refuses what two readers could read differently (two lengths, folded headers, bare line
feeds). Here is what it lets through and we do not, and the clocks: a head must be there within
ten seconds, a body must come at a rate, and who does not read what it asked for is cut off.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

MAX_HEAD = 64 * 1024
HEAD_TIME = 10.0  # seconds
BODY_WINDOW = 15.0  # seconds, in each of which a body must grow by
BODY_RATE = 100  # bytes per second
# Nothing at all was read for so long: the peer is gone, or wants to hold what we hold for it.
WRITE_STALL = 60.0
# What is still sent after it was answered is read and thrown away, up to here: most clients look
# at an answer only when they have sent everything.
MAX_UNWANTED = 64 << 20
MAX_PONGS = 1 << 20  # bytes of answers to pings that nobody reads
_TARGET = re.compile(rb"/[!-\"$-~]*")  # a path of ours: no absolute URL, no fragment, ASCII


@dataclass
class Watch:
    """What the connections of one server have in common."""

    max_connections: int = 256  # from one address
    head_time: float = HEAD_TIME
    body_window: float = BODY_WINDOW
    write_stall: float = WRITE_STALL
    peers: Counter[str] = field(default_factory=Counter)
    dated: float = 0.0

    def leave(self, peer: str) -> None:
        self.peers[peer] -= 1
        if not self.peers[peer]:
            del self.peers[peer]


class Corked:
    """A transport that can hold back what is written, so that a head and its body go at once:
    a packet less, and the reader wakes up once."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def cork(self) -> None:
        self._held = []

    def uncork(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))

    def close(self) -> None:
        self.uncork()
        self._transport.close()


class Guard(HttpToolsProtocol):
    """One connection."""

    def __init__(
        self, config: Config, server_state: ServerState, watch: Watch, local: bool
    ) -> None:
        self.state: dict[str, Any] = {"local": local, "connection": self}
        super().__init__(config, server_state, self.state)
        self.parser = httptools.HttpRequestParser(self)  # without the leniency that uvicorn wants
        self.watch, self.local = watch, local
        self.task: asyncio.Task[Any] | None = None  # what answers now; whoever answers sets it
        self.is_gone = self.only_looks_on = False
        self._peer: str | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the head, then of the body
        self._stall: asyncio.TimerHandle | None = None
        self._in_head, self._in_body = True, False
        self._begun = False  # with a next request, in the same bytes as the end of the last
        self._head = 0  # bytes, of this request
        self._fed = self._body = self._body_before = self._unwanted = 0  # likewise
        self._refusal: tuple[int, str] | None = None
        self._unsent = 0
        self.ws_protocol_class = partial(GuardedSocket, watch=watch)  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Guard {self._peer or 'local'}>"

    # --- the connection -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.corked = Corked(transport)
        self.transport = self.corked  # type: ignore[assignment]
        if self.local:
            uid = _peer_uid(transport.get_extra_info("socket"))
            if uid not in (0, os.getuid()):
                return self.refuse(403, "this socket is for the user that runs the server")
        elif self.client:
            self._peer = self.client[0]
            self.watch.peers[self._peer] += 1
            if self.watch.peers[self._peer] > self.watch.max_connections:
                return self.refuse(503, "too many connections from this address")
        self._arm(self.watch.head_time, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        self._leave()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        if answering and self.task:
            self.task.cancel()

    def shutdown(self) -> None:
        """Answer what is being asked, and nothing more."""
        self._disarm()
        if self.only_looks_on:
            self.cut()
        else:
            super().shutdown()

    def cut(self) -> None:
        """End it now, with whatever is being answered."""
        self.transport.abort()  # and `connection_lost` cancels what answers

    def _leave(self) -> None:
        self.is_gone = True
        self._disarm()
        if self._stall:
            self._stall.cancel()
        if self._peer:
            self.watch.leave(self._peer)
            self._peer = None

    def handle_websocket_upgrade(self) -> None:
        self._disarm()
        peer, self._peer = self._peer, None
        self.ws_protocol_class = partial(  # type: ignore[assignment]
            GuardedSocket, watch=self.watch, peer=peer
        )
        self.transport = self.corked._transport
        super().handle_websocket_upgrade()

    # --- what comes in --------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._fed += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            elif self.scope["method"] == "CONNECT":
                self.refuse(400, "this is no proxy")
            return
        except (httptools.HttpParserError, UnicodeDecodeError):
            if self._unwanted > MAX_UNWANTED:
                return self.cut()
            return self.refuse(*(self._refusal or (400, "this is no HTTP request")))
        if self._in_head and (self._fed or self._begun):
            if self._fed > MAX_HEAD:
                return self.refuse(431, "the head of a request can have 64 KiB")
            self._arm(self.watch.head_time, self._head_is_late)
        elif self._in_body:
            # Chunks of one byte each are six bytes; what is more is padding.
            if self._fed > 16 * self._body + MAX_HEAD:
                return self.refuse(400, "more padding than body")
            self._arm(self.watch.body_window, self._body_is_slow)

    def on_message_begin(self) -> None:
        self._begun = True
        self._in_head, self._in_body = True, False
        self._head = self._body = self._body_before = self._unwanted = 0
        super().on_message_begin()
        self._refusal = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            self._refuse_here(431, "the head of a request can have 64 KiB")
        if not self._in_head:
            return  # a trailer: nobody reads those, so nobody can be fooled by one
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
        now = time.time()
        if now - self.watch.dated > 1:
            self.watch.dated = now
            self.server_state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]
        self._disarm()
        self._in_head, self._in_body = False, True
        self._fed = 0
        super().on_headers_complete()

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
        """Say so, if nothing else is being said, and hang up."""
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
        if self.flow.read_paused or grown >= BODY_RATE * self.watch.body_window:
            self._arm(self.watch.body_window, self._body_is_slow)
        else:
            self.refuse(408, "the body of the request comes too slowly")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.watch.write_stall, self._is_stalled)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall:
            self._stall.cancel()
            self._stall = None

    def _is_stalled(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent >= self._unsent:
            self.cut()
            return
        self._unsent = unsent
        self._stall = self.loop.call_later(self.watch.write_stall, self._is_stalled)


class GuardedSocket(WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        watch: Watch,
        peer: str | None = None,
    ) -> None:
        super().__init__(config, server_state, {**app_state, "connection": self})
        self.watch, self._peer = watch, peer

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > MAX_PONGS:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer:
            self.watch.leave(self._peer)
            self._peer = None
        super().connection_lost(exc)

    def refused(self) -> None:
        """To be called when the handshake was answered with no: uvicorn would complain."""
        self.handshake_complete = True

    def cut(self) -> None:
        """End it now."""
        self.transport.abort()


def _peer_uid(sock: socket.socket) -> int:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    uid: int = struct.unpack("3i", found)[1]
    return uid
