"""A real server in a thread of its own, and a client that hides nothing of HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

from must_work import need

from hutch.backends.namespaces import NamespacesBackend
from hutch.errors import BackendUnavailable
from hutch.images.held_images import HeldImages
from hutch.server.http.app import App
from hutch.server.http.http_protocol import ConnectionLimits
from hutch.server.http.pages import DashboardPages
from hutch.server.http.server import HTTPServer
from hutch.server.http.tls import Certificate
from hutch.server.rules import Rules
from hutch.server.service import Service

KEY = "key-of-the-operator-0123456789"
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    host: str
    port: int


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return str(self.json["error_code"])


class Running:
    """A server. `do` runs something in its loop."""

    def __init__(
        self, folder: Path, *, rules: Rules | None = None, limits: ConnectionLimits | None = None,
        key: str | None = KEY, hosts: tuple[str, ...] = (), socket_path: bool = False,
        certificate: Certificate | None = None, pages: DashboardPages | None = None,
    ) -> None:  # fmt: skip
        self.key = key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        (folder / "run").mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path = folder / "run/hutch.sock"

        async def start() -> None:
            backend = NamespacesBackend(lasting=str(folder / "run"))
            try:
                self.service = await Service.open(
                    folder, backend, HeldImages(), rules or Rules(), key
                )
            except BackendUnavailable as exc:
                need("namespaces", str(exc))
            self.server = await HTTPServer.start(
                App(self.service, hosts=hosts, pages=pages), Place("127.0.0.1", 0),
                self.socket_path if socket_path else None, limits, certificate,
            )  # fmt: skip

        self.do(start())
        self.port = self.server.addresses[0][1]

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self.do(self.server.stop(2))
        self.do(self.service.close(kill=True))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # --- asking ---------------------------------------------------------------------------

    def ask(
        self, verb: str, path: str, json_body: Any = None, /, *, data: Any = None,
        key: str | None = "", headers: dict[str, str] | None = None, **query: Any,
    ) -> Answer:  # fmt: skip
        """`key=None`: without one."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(verb, *self._prepared(path, json_body, data, key, headers, query))
            answer = connection.getresponse()
            return Answer(answer.status, _lower(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def events(
        self, verb: str, path: str, json_body: Any = None, /, **query: Any
    ) -> Iterator[tuple[str, Any]]:
        """(event, what it says), as they come. Leaving hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Accept": "text/event-stream"}
        answer = None
        try:
            connection.request(verb, *self._prepared(path, json_body, None, "", headers, query))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            name = ""
            for line in answer:
                field, _, value = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)
        finally:
            connection.close()
            if answer:
                answer.close()

    def _prepared(
        self, path: str, json_body: Any, data: Any, key: str | None,
        headers: dict[str, str] | None, query: dict[str, Any],
    ) -> tuple[str, Any, dict[str, str]]:  # fmt: skip
        headers = dict(headers or {})
        if query:
            path += "?" + urlencode(query)
        if key == "":
            key = self.key
        if key is not None:
            headers.setdefault("Authorization", f"Bearer {key}")
        if json_body is not None:
            headers.setdefault("Content-Type", "application/json")
            data = json.dumps(json_body)
        return path, data, headers

    def raw(self, data: bytes, *, timeout: float = 20) -> bytes:
        """What comes back for these bytes, until the server hangs up."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as sock:
            try:
                sock.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                pass
            return read_all(sock)

    # --- sessions -------------------------------------------------------------------------

    def session(self, **fields: Any) -> str:
        answer = self.ask("POST", "/v1/sessions", fields)
        assert answer.status == 201, answer.body
        return str(answer.json["id"])

    def run(self, session: str, command: str, **more: Any) -> Any:
        path = f"/v1/sessions/{session}/shells/main/run"
        answer = self.ask("POST", path, {"command": command, **more})
        assert answer.status == 200, answer.body
        return answer.json


def _lower(headers: list[tuple[str, str]]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers}


def read_all(sock: socket.socket) -> bytes:
    got = b""
    try:
        while piece := sock.recv(65536):
            got += piece
    except (ConnectionResetError, TimeoutError):
        pass
    return got


def eventually(check: Any, seconds: float = 120) -> Any:
    """What `check` answers once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.02)
    return found
