# Generated from _async_buffer.py by scripts/unasync. Change that file, and run the script.
"""Connections that send a request in one piece.

httpcore writes the head of a request, then its body. The first write wakes the server, which finds
half of what it needs: on a busy machine that is a millisecond of each call.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore

ENOUGH = 64 * 1024


class Wire(httpcore.NetworkStream):
    """Keeps what is written until there is enough of it, or until an answer is wanted."""

    def __init__(self, real: httpcore.NetworkStream) -> None:
        self._real = real
        self._held = bytearray()

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._held += buffer
        if len(self._held) >= ENOUGH:
            self._flush(timeout)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._held:
            try:
                self._flush(timeout)
            except httpcore.WriteError:
                pass  # it does not listen any more, and perhaps said why
        return self._real.read(max_bytes, timeout)

    def _flush(self, timeout: float | None) -> None:
        data = bytes(self._held)
        self._held.clear()
        self._real.write(data, timeout)

    def close(self) -> None:
        self._real.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return Wire(self._real.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._real.get_extra_info(info)


class Dialer(httpcore.NetworkBackend):
    """Makes such connections."""

    def __init__(self) -> None:
        self._real = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        return Wire(self._real.connect_tcp(host, port, timeout, local_address, socket_options))

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.NetworkStream:
        return Wire(self._real.connect_unix_socket(path, timeout, socket_options))
