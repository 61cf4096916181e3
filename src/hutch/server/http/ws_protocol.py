"""A WebSocket with frame-rate limits.

A frame costs the same whether or not it has content. So the number of frames in a message, and the
rate of empty and control frames, are limited.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.exceptions import ProtocolError
from websockets.frames import CTRL_OPCODES, CloseCode, Frame
from websockets.server import ServerProtocol

from .limits import ClientConnection, ConnectionLimits
from .write_buffer import WriteBuffer

MAX_PONGS = 1 << 20  # bytes of answers to pings that nobody reads
MAX_PIECES = 1024  # of one message
MAX_EMPTY = 100  # frames per second that are for control, or empty
READ = 16 * 1024  # bytes at once: so many small frames are no long turn of the loop


class FrameCounter(ServerProtocol):
    """Reads frames, and counts them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
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
                CloseCode.POLICY_VIOLATION, f"{MAX_EMPTY} frames a second may say nothing"
            )
        super().recv_frame(frame)

    def _is_one_too_many(self) -> bool:
        now = time.monotonic()
        if now - self._second > 1:
            self._empty, self._second = 0, now
        self._empty += 1
        return self._empty > MAX_EMPTY

    def _give_up(self, code: CloseCode, why: str) -> None:
        self.fail(code, why)  # which throws away what else was received
        self.parser_exc = ProtocolError(why)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        limits: ConnectionLimits,
        before: ClientConnection,
    ) -> None:
        """`before`: what the connection was until the handshake."""
        super().__init__(config, server_state, {**app_state, "connection": self})
        self.conn: ServerProtocol = FrameCounter(max_size=config.ws_max_size, logger=self.logger)
        self.limits, self._before = limits, before
        self.task: asyncio.Task[Any] | None = None  # what is to end with it
        self.is_gone = self.is_idle = False

    def connection_made(self, transport: WriteBuffer) -> None:  # type: ignore[override]
        super().connection_made(transport)  # type: ignore[arg-type]
        self.write_buffer = transport
        self.write_buffer.is_live = True
        transport._transport.max_size = READ  # type: ignore[attr-defined]
        self.limits.replace(self._before, self)

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated and not self.handshake_complete:
            # A client has to wait for the answer. websockets would read these as frames, and fail
            # to answer the handshake if they are malformed.
            return self.cut()
        super().data_received(data)
        if not self.handshake_initiated:  # websockets takes fewer and shorter headers than we do
            self.cut()

    def handle_parser_exception(self) -> None:
        if self.conn.close_sent is None:  # nothing can be said before the handshake
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
        """To be called when the handshake was answered with no: uvicorn would complain."""
        self.handshake_complete = True

    def cut(self) -> None:
        """End it now."""
        self.transport.abort()
