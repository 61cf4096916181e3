"""Where a server is: what people write, and what an HTTP connection needs."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from hutch.codec import EncodedRequest
from hutch.errors import InvalidRequest

EXAMPLES = "http://127.0.0.1:8080, https://boxes.example.com or unix:/run/hutch.sock"

# A peer that is gone without a word is noticed within a minute. A command may be silent for
# days; the kernel asks for us whether anybody is there.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


@dataclass(frozen=True)
class Address:
    """Of a server."""

    url: str  # as it is shown to people
    scheme: str
    host: str
    port: int
    prefix: str = ""  # before every path
    socket: str | None = None  # a Unix socket, which is dialled instead

    def target(self, request: EncodedRequest) -> str:
        """What stands in the first line of the request."""
        query = "&".join(f"{name}={_quoted(value)}" for name, value in request.query.items())
        return self.prefix + request.path + ("?" + query if query else "")

    @property
    def authority(self) -> str:
        """What stands in its Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = {"http": 80, "https": 443}[self.scheme]
        return host if self.port == usual else f"{host}:{self.port}"


def address_of(url: str) -> Address:
    """InvalidRequest says what a url looks like."""
    if url.startswith("unix:"):
        path = "/" + url.removeprefix("unix:").lstrip("/")
        return Address(f"unix:{path}", "http", "localhost", 80, socket=path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _wrong(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _wrong(url)
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("a url is only where the server is: give the key as api_key")
    port = port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else None
    return Address(
        url.rstrip("/"), parts.scheme, host or parts.hostname, port, prefix=parts.path.rstrip("/")
    )


def _wrong(url: str) -> InvalidRequest:
    return InvalidRequest(f"a url is {EXAMPLES}, not {url!r:.200}")


def _quoted(value: str) -> str:
    return quote(value.encode("utf-8", "surrogateescape"), safe="")
