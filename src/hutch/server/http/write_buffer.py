"""A write buffer that aborts connections whose peer does not read.

Data that was written and not sent takes up memory, and its connection counts against a limit. So
the peer must read something in every window; and of a complete response, at a minimum rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

READ_RATE = 1024  # bytes per second


class WriteBuffer:
    """A transport that can hold back what is written, so that a head and its body go at once:
    a packet less, and the reader wakes up once. Ends who does not read."""

    def __init__(
        self,
        transport: asyncio.Transport,
        window: float,
        unsent_below: Callable[[], int] = lambda: 0,
    ) -> None:
        """`unsent_below`: bytes that wait below this transport, where it does not count them."""
        self._transport, self._window = transport, window
        self._unsent_below = unsent_below
        self._held: list[bytes] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0  # bytes
        self._left = self._taken = 0  # when the window began
        self.is_live = False  # whether more comes as a program makes it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def __repr__(self) -> str:
        return f"<WriteBuffer {self.get_write_buffer_size()} of {self._written} unread>"

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + self._unsent_below()

    def write(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
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
            return  # of a TLS transport, a second `close` takes `abort` away
        self._transport.close()
        if self._timer is None:  # TLS waits for the peer's goodbye, but not for ever
            self._begin_window()

    def forget(self) -> None:
        """To be called when the connection is lost."""
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
        if taken < min(least, self._left):  # who took all that there was has caught up
            self._transport.abort()
        else:
            self._begin_window()
