"""The address of a server: a URL, and what an HTTP connection needs of it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from hutch.codec import EncodedRequest
from hutch.errors import InvalidRequest

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
        query = "&".join(f"{name}={_quoted(value)}" for name, value in request.query.items())
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
        port = parts.port
    except ValueError:
        raise _wrong(url) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _wrong(url)
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("a url has no user, query or fragment: give the key as api_key")
    port = port or (443 if parts.scheme == "https" else 80)
    host = parts.hostname.encode("idna").decode() if not parts.hostname.isascii() else None
    return Address(
        url.rstrip("/"), parts.scheme, host or parts.hostname, port, prefix=parts.path.rstrip("/")
    )


def _wrong(url: str) -> InvalidRequest:
    return InvalidRequest(f"a url is {EXAMPLES}, not {url!r:.200}")


def _quoted(value: str) -> str:
    return quote(value.encode("utf-8", "surrogateescape"), safe="")
