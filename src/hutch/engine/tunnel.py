"""A TCP connection to a port in a box, as a stream of bytes."""

from __future__ import annotations

from hutch import wire
from hutch.errors import GuestMisbehaved

from .link import GuestCall, Link


class Tunnel:
    """Read and write it like any connection to a guest. Closing it is what ends it."""

    def __init__(self, call: GuestCall) -> None:
        self._call = call
        self._held = b""
        self._at_end = False

    @classmethod
    async def open(cls, link: Link, port: int) -> Tunnel:
        """Raises NotFound if nothing listens there."""
        call = link.call(wire.Dial(port))
        try:
            if not isinstance(await anext(call, None), wire.Note):
                raise GuestMisbehaved("the guest did not say that it is connected")
        except BaseException:
            call.close()
            raise
        return cls(call)

    async def read(self, at_most: int) -> bytes:
        """At least one byte, or b"" once the other side has ended."""
        while not self._held and not self._at_end:
            event = await anext(self._call, None)
            if isinstance(event, wire.Data):
                self._held = event.data
            elif event is None or event.body.get("eof"):
                self._at_end = True
        data, self._held = self._held[:at_most], self._held[at_most:]
        return data

    async def write(self, data: bytes) -> None:
        """Returns when the data is on its way. What comes after the end of it all is dropped."""
        await self._call.send(data)

    def end(self) -> None:
        """No more will be written; what the other side still says can be read."""
        self._call.end_input()

    def close(self) -> None:
        self._call.close()
