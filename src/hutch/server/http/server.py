"""The HTTP server: listens on TCP and on a Unix socket. Signals are handled by the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

from uvicorn.config import Config
from uvicorn.server import ServerState

from hutch.errors import Conflict, InvalidRequest

from .http_protocol import HTTPProtocol, WebSocketProtocol
from .limits import ConnectionLimits
from .request import ASGIApp
from .tls import Certificate, protocol_factory

MAX_FRAME = 1 << 20  # bytes, of a message over a WebSocket
KEEP_ALIVE = 75  # seconds a connection may be open without a request
BACKLOG = 2048  # connections that the kernel holds until we accept them
# Connections accepted in one turn of the event loop. With many more, a burst from one address would
# reach its limit before the first requests are read.
ACCEPT = 64


class _Address(Protocol):
    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class HTTPServer:
    """A running server: `HTTPServer.start` makes one, `stop` ends it; `url` is for clients."""

    def __init__(
        self, app: ASGIApp, limits: ConnectionLimits, certificate: Certificate | None = None
    ) -> None:
        self._limits, self._state = limits, ServerState()
        self._certificate = certificate
        self._following: asyncio.Task[None] | None = None  # the files of the certificate
        self._servers: list[asyncio.Server] = []
        self._socket_path: tuple[str, int] | None = None
        self.addresses: list[tuple[str, int]] = []
        self._config = Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            ws_max_size=MAX_FRAME,
            ws_per_message_deflate=False,
            timeout_keep_alive=KEEP_ALIVE,
        )
        self._config.load()

    @classmethod
    async def start(
        cls,
        app: ASGIApp,
        listen: _Address | None,
        socket_path: Path | None = None,
        limits: ConnectionLimits | None = None,
        certificate: Certificate | None = None,
    ) -> HTTPServer:
        """Listen. Requests are answered when this returns. Port 0 means any free port.

        With a certificate, the address speaks HTTPS only; the Unix socket speaks HTTP. Raises
        Conflict if it cannot listen, and InvalidRequest if others could replace the socket.
        """
        server = cls(app, limits or ConnectionLimits(), certificate)
        try:
            if listen is not None:
                await server._listen_tcp(listen.host, listen.port)
            if socket_path is not None:
                await server._listen_unix(str(socket_path))
        except BaseException:
            await server.stop(0)
            raise
        return server

    @property
    def url(self) -> str:
        host, port = self.addresses[0]
        scheme = "https" if self._certificate else "http"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    def __repr__(self) -> str:
        return f"<HTTPServer at {self.addresses}, {len(self._state.connections)} connections>"

    async def _listen_tcp(self, host: str, port: int) -> None:
        try:
            server = await asyncio.get_running_loop().create_server(
                protocol_factory(
                    lambda: self._protocol(local=False), self._certificate, self._limits
                ),
                host,
                port,
                backlog=ACCEPT,
            )
        except OSError as exc:
            raise Conflict(f"cannot listen on {host}:{port}: {_why_not(exc)}") from exc
        self._servers.append(server)
        for listener in server.sockets:
            # asyncio has one number for the backlog and for `ACCEPT`, so set the backlog again.
            with socket.socket(fileno=os.dup(listener.fileno())) as same:
                same.listen(BACKLOG)
        if self._certificate:
            self._following = asyncio.create_task(self._certificate.follow())
        self.addresses += [sock.getsockname()[:2] for sock in server.sockets]

    async def _listen_unix(self, path: str) -> None:
        """For the server's own user only, who must own the folder of the socket, too."""
        _make_way(path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            before = os.umask(0o177)
            try:
                sock.bind(path)
            finally:
                os.umask(before)
        except OSError as exc:
            sock.close()
            raise Conflict(f"cannot listen on {path}: {exc.strerror or exc}") from exc
        self._socket_path = (path, os.lstat(path).st_ino)
        server = await asyncio.get_running_loop().create_unix_server(
            lambda: self._protocol(local=True), sock=sock, backlog=BACKLOG
        )
        self._servers.append(server)

    def _protocol(self, *, local: bool) -> HTTPProtocol:
        return HTTPProtocol(self._config, self._state, self._limits, local)

    async def stop(self, patience: float = 5.0) -> None:
        """Stop listening, wait `patience` seconds for running requests, and abort the rest."""
        for server in self._servers:
            server.close()
        if self._following:
            self._following.cancel()
        if self._socket_path:
            path, inode = self._socket_path
            with contextlib.suppress(OSError):
                if os.lstat(path).st_ino == inode:
                    os.unlink(path)
        for connection in list(self._state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(patience):
                await self._all_done()
        except TimeoutError:
            pass
        for connection in list(self._state.connections):
            assert isinstance(connection, HTTPProtocol | WebSocketProtocol)
            connection.cut()
        for task in list(self._state.tasks):
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await self._all_done()

    async def _all_done(self) -> None:
        while self._state.tasks or self._state.connections:
            if self._state.tasks:
                await asyncio.wait(list(self._state.tasks))
            await asyncio.sleep(0.01)


def _why_not(exc: OSError) -> str:
    """Why an address cannot be listened on. asyncio's own message repeats the address."""
    if exc.errno == errno.EADDRINUSE:
        return (
            "something else listens there; choose another port with --listen HOST:PORT (port 0: "
            "any free port)"
        )
    if exc.errno is not None and exc.errno > 0:  # below 0: the name has no address
        return os.strerror(exc.errno)
    return exc.strerror or str(exc)


def _make_way(path: str) -> None:
    """Remove a stale socket. Raises InvalidRequest if other users could replace the socket."""
    folder = os.path.dirname(os.path.abspath(path))
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o022:
        raise InvalidRequest(f"{folder} must be a folder that only you can write to: chmod 700")
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode):
        raise Conflict(f"{path} is in the way, and is not a socket: remove it")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        else:
            raise Conflict(f"another process listens on {path}: stop it first")
