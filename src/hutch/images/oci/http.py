"""HTTP requests to registries. All are encrypted, except to localhost, and have timeouts.

Registries are not trusted. A redirect is never followed to an unencrypted URL on another machine,
nor from another machine to localhost, and never takes the password to another origin.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import httpcore

from hutch.errors import BackendUnavailable, InvalidRequest
from hutch.images.stopping import WorkStopped

from .reference import is_local

T = TypeVar("T")
CHECK = 0.1  # seconds between two checks of whether all is over, while a connection is made
WAIT = 30  # seconds for the next bytes
PATIENCE = 60  # seconds that we wait for an answer in all, beside those that its bytes earn
SLOWEST = 16 * 1024  # bytes that earn a second
TRIES = 3
ENOUGH = 1 << 20  # bytes; an attempt that came this far on does not count as one of the tries
PAUSE = 0.5  # seconds before the second try; then twice as long
MAX_PAUSE = 10
MAX_HOPS = 5
PIECE = 256 * 1024

_TIMES = {"connect": 10, "read": WAIT, "write": WAIT, "pool": WAIT}
_REDIRECTS = (301, 302, 303, 307, 308)


class _TooSlow(httpcore.ReadTimeout):
    pass


class RetryLater(Exception):
    """A temporary failure: another attempt may succeed."""

    def __init__(self, message: str, after: float = 0) -> None:
        """`after`: seconds to wait first, as the registry asked for."""
        super().__init__(message)
        self.after = after
        self.reached = 0  # bytes of the download that are kept


class Response:
    """The status and headers of an answer; the body is read on demand."""

    def __init__(self, response: httpcore.Response, url: str) -> None:
        self._response = response
        self.url = url
        self.status = response.status

    def header(self, name: str) -> str:
        found = [v for k, v in self._response.headers if k.lower() == name.lower().encode()]
        return found[0].decode("latin-1") if found else ""

    def pieces(self) -> Iterator[bytes]:
        """The body, in pieces. Raises RetryLater if it breaks off, or comes too slowly."""
        with _failures(self.url):
            body: Iterable[bytes] = self._response.iter_stream()
            yield from body

    def body(self, most: int) -> bytes:
        """The whole body. Raises InvalidRequest if it exceeds `most` bytes, and RetryLater."""
        data = b""
        for piece in self.pieces():
            data += piece
            if len(data) > most:
                raise InvalidRequest(f"{_host(self.url)} answers with more than {most >> 10} KiB")
        return data


class HttpClient:
    """Pools of connections. `stop` interrupts the threads that wait for an answer."""

    def __init__(self) -> None:
        self._sockets = _Sockets()
        self._pools: dict[str, httpcore.ConnectionPool] = {}
        self._mutex = threading.Lock()
        self._stopped = threading.Event()

    @contextmanager
    def get(self, url: str, headers: dict[str, str]) -> Iterator[Response]:
        """Send a GET request, and follow redirects. `Authorization` is dropped at another origin.

        Raises RetryLater, InvalidRequest for a URL that is not allowed, BackendUnavailable after
        too many redirects, and WorkStopped after `stop`.
        """
        for _ in range(MAX_HOPS):
            check_url(url)
            if self._stopped.is_set():
                raise WorkStopped
            with contextlib.ExitStack() as stack:
                with _failures(url):
                    request = self._pool(url).stream(
                        "GET", url, headers=_raw(headers), extensions={"timeout": _TIMES}
                    )
                    answer = Response(stack.enter_context(request), url)
                if answer.status not in _REDIRECTS:
                    yield answer
                    return
                there = _join(url, answer.header("location"))
            check_hop(url, there)
            if origin(there) != origin(url):
                headers = {k: v for k, v in headers.items() if k != "Authorization"}
            url = there
        raise BackendUnavailable(f"too many redirects from {_host(url)}")

    def patiently(self, act: Callable[[], T]) -> T:
        """Call `act`, and again after a RetryLater.

        Raises BackendUnavailable after TRIES attempts that together brought less than ENOUGH,
        WorkStopped after `stop`, and what `act` raises.
        """
        tried, pause, furthest = 0, PAUSE, 0
        while True:
            try:
                return act()
            except RetryLater as exc:
                if self._stopped.is_set():
                    raise WorkStopped from None
                tried += 1
                if exc.reached >= furthest + ENOUGH:
                    tried, pause, furthest = 0, PAUSE, exc.reached
                if tried == TRIES:
                    kept = ": what was downloaded is kept" if exc.reached else ""
                    raise BackendUnavailable(f"{exc}; try again later{kept}") from exc
                # Random, so that clients of a registry do not all retry at the same moment.
                self._stopped.wait(min(MAX_PAUSE, max(exc.after, pause * random.uniform(1, 1.5))))
            pause *= 2

    def stop(self) -> None:
        """Interrupt all requests, from any thread."""
        self._stopped.set()
        self._sockets.end()

    def close(self) -> None:
        """Close all connections. Call it when no thread waits for an answer."""
        self.stop()
        for pool in self._pools.values():
            pool.close()

    def _pool(self, url: str) -> httpcore.ConnectionPool:
        proxy = proxy_for(url)
        with self._mutex:
            if proxy not in self._pools:
                self._pools[proxy] = _make_pool(proxy, self._sockets)
            return self._pools[proxy]


def proxy_for(url: str) -> str:
    """The proxy that the usual environment variables set for this URL; "" for none."""
    parts = urlsplit(url)
    if is_local(parts.netloc) or proxy_bypass(parts.hostname or ""):
        return ""
    return getproxies().get(parts.scheme, "")


def check_url(url: str) -> None:
    """Raises InvalidRequest if the URL is invalid, or unencrypted and not of localhost."""
    parts = urlsplit(url)
    if parts.scheme == "http" and not is_local(parts.netloc):
        raise InvalidRequest(
            f"refusing {_host(url)} without encryption: only localhost may do without it"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequest(f"invalid URL from registry: {url[:200]!r}")


def check_hop(here: str, there: str) -> None:
    """Raises InvalidRequest if `here` may not redirect to `there`."""
    check_url(there)
    if _is_here(there) and not is_local(urlsplit(here).netloc):
        raise InvalidRequest(f"{_host(here)} redirects to this machine itself, which is refused")


# --- below -------------------------------------------------------------------------------


class _Sockets(httpcore.SyncBackend):
    """Keeps a duplicate of each socket, to shut it down while another thread waits for it."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self._mutex = threading.Lock()
        self._over = False

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        # In a thread that is left behind when all is over: nothing can interrupt the lookup of a
        # name, nor, before there is a socket, the wait for a host that does not answer.
        made: Future[httpcore.NetworkStream] = Future()

        def connect() -> None:
            try:
                made.set_result(self._connect(*args, **options))
            except BaseException as exc:
                made.set_exception(exc)

        threading.Thread(target=connect, name="hutch-connect", daemon=True).start()
        while not wait([made], CHECK).done:
            if self._over:
                raise httpcore.ConnectError("stopped")
        return made.result()

    def _connect(self, *args: Any, **options: Any) -> httpcore.NetworkStream:
        stream = super().connect_tcp(*args, **options)
        with self._mutex:
            if self._over:
                stream.close()
                raise httpcore.ConnectError("stopped")
            self._open.append(stream.get_extra_info("socket").dup())
        return _Stream(stream)

    def end(self) -> None:
        with self._mutex:
            self._over = True
            self._end()

    def _end(self) -> None:
        for each in self._open:
            with contextlib.suppress(OSError):  # the peer has closed it already
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open.clear()


class _Stream(httpcore.NetworkStream):
    """A connection whose peer may pause, but not for PATIENCE seconds more than its bytes earn.

    A time-out for each read alone would never end an answer that comes byte by byte.
    """

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream
        self._left = float(PATIENCE)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        begun = time.monotonic()
        data = self._stream.read(max_bytes, timeout)
        waited = time.monotonic() - begun
        self._left = min(PATIENCE, self._left - waited + len(data) / SLOWEST)
        if self._left < 0:
            raise _TooSlow
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._left = PATIENCE  # the next request
        self._stream.write(buffer, timeout)

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _make_pool(proxy: str, sockets: _Sockets) -> httpcore.ConnectionPool:
    trust = ssl.create_default_context()
    if not proxy:
        return httpcore.ConnectionPool(ssl_context=trust, network_backend=sockets)
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        who = (unquote(parts.username or ""), unquote(parts.password or ""))
        return httpcore.HTTPProxy(
            where, proxy_auth=who if any(who) else None, ssl_context=trust, network_backend=sockets
        )
    except ValueError:
        raise InvalidRequest("invalid HTTPS_PROXY: write it like http://HOST:PORT") from None


@contextmanager
def _failures(url: str) -> Iterator[None]:
    """Translate exceptions of httpcore to ours."""
    host = _host(url)
    try:
        yield
    except httpcore.ConnectError as exc:
        raise RetryLater(f"{host} cannot be reached ({exc})") from exc
    except _TooSlow as exc:
        raise RetryLater(f"{host} sends too slowly") from exc
    except httpcore.TimeoutException as exc:
        raise RetryLater(f"{host} does not answer") from exc
    except (httpcore.NetworkError, httpcore.RemoteProtocolError) as exc:
        raise RetryLater(f"{host} hung up ({exc})") from exc
    except httpcore.ProxyError as exc:
        raise BackendUnavailable(f"the proxy refuses to connect to {host} ({exc})") from exc
    except (httpcore.LocalProtocolError, httpcore.UnsupportedProtocol, ValueError) as exc:
        raise InvalidRequest(f"invalid request to {host} ({exc})") from exc


def _is_here(url: str) -> bool:
    """Whether the host of a URL is this machine, in any notation."""
    name = (urlsplit(url).hostname or "").rstrip(".")
    try:
        # As a resolver parses it: 127.1 is an address, too.
        address = ipaddress.ip_address(name if ":" in name else socket.inet_aton(name))
    except (OSError, ValueError):
        return name == "localhost" or name.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def _raw(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def _host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2][:100]


def origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc.lower()


def _join(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise InvalidRequest(f"{_host(url)} redirects to an invalid URL") from None
