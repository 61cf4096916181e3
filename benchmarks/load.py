"""Many commands a second, from a client so lean that the two cores are the server's.

Our SDK spends about as long on a request as the server does. This client sends bytes that were
made before, on connections that stay open, and looks at the status and the exit code only.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field

from hutch import AsyncSandbox

from .measure import quantile
from .server import KEY, Daemon


@dataclass
class Load:
    """What came back."""

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)  # milliseconds, of each command
    errors: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    @property
    def p99(self) -> float:
        return quantile(self.latencies, 0.99)

    def check(self) -> Load:
        if self.errors:
            raise RuntimeError(f"{len(self.errors)} commands failed; the first: {self.errors[0]}")
        return self


def over_http(daemon: Daemon, sessions: int, seconds: float) -> Load:
    """As many commands as can be, one at a time in each of `sessions`."""

    async def measure() -> Load:
        boxes = await asyncio.gather(*[daemon.create_async() for _ in range(sessions)])
        try:
            for box in boxes:
                await box.shell.run("true", check=True)
            return await _press(daemon, [box.id for box in boxes], seconds)
        finally:
            await asyncio.gather(*[box.close() for box in boxes])

    return asyncio.run(measure()).check()


def embedded(sessions: int, seconds: float) -> Load:
    """The same without a server, through our SDK."""

    async def measure() -> Load:
        boxes = await asyncio.gather(*[AsyncSandbox.create() for _ in range(sessions)])
        load = Load()
        try:
            for box in boxes:
                await box.shell.run("true", check=True)
            began = time.perf_counter()
            await asyncio.gather(*[_repeat(box, began + seconds, load) for box in boxes])
            load.seconds = time.perf_counter() - began
        finally:
            await asyncio.gather(*[box.close() for box in boxes])
        return load

    return asyncio.run(measure())


async def _repeat(box: AsyncSandbox, until: float, load: Load) -> None:
    while (sent := time.perf_counter()) < until:
        await box.shell.run("true", check=True)
        load.latencies.append((time.perf_counter() - sent) * 1000)


async def _press(daemon: Daemon, ids: list[str], seconds: float) -> Load:
    loop, load = asyncio.get_running_loop(), Load()
    host, _, port = daemon.url.removeprefix("http://").rpartition(":")
    began = time.perf_counter()
    presses = [_Press(_request(f"{host}:{port}", id), began + seconds, load) for id in ids]
    for press in presses:
        await loop.create_connection(lambda press=press: press, host, int(port))
    await asyncio.gather(*[press.over for press in presses])
    load.seconds = time.perf_counter() - began
    return load


def _request(authority: str, id: str) -> bytes:
    body = json.dumps({"command": "true"}).encode()
    head = (
        f"POST /v1/sessions/{id}/shells/main/run HTTP/1.1\r\nHost: {authority}\r\n"
        f"Authorization: Bearer {KEY}\r\nAccept: application/json\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class _Press(asyncio.Protocol):
    """One connection: the same request again and again."""

    def __init__(self, request: bytes, until: float, load: Load) -> None:
        self._request, self._until, self._load = request, until, load
        self._buffer = b""
        self._sent = 0.0
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        if self._sent >= self._until:
            self._transport.close()
        else:
            self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, body = self._buffer.partition(b"\r\n\r\n")
        if not end or len(body) < _length(head):
            return
        self._buffer = b""
        if head.startswith(b"HTTP/1.1 200 ") and b'"exit_code":0' in body:
            self._load.latencies.append((time.perf_counter() - self._sent) * 1000)
        else:
            self._load.errors.append((head + end + body).decode(errors="replace"))
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.perf_counter() < self._until:
            self._load.errors.append(f"the connection was lost: {exc}")
        self.over.set_result(None)


def _length(head: bytes) -> int:
    begin = head.index(b"content-length: ") + 16
    return int(head[begin:].partition(b"\r")[0])
