"""A server that says what a test tells it to: real sockets, and nothing of Hutch in it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Asked:
    """A request as it came."""

    verb: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.body)


@dataclass
class Answer:
    """What a script may say. `hold`: wait for this before the end; `cut`: end in mid-sentence."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] | None = None  # chunked, instead of a body
    hold: threading.Event | None = None
    cut: bool = False


def of_json(value: object, status: int = 200, **headers: str) -> Answer:
    return Answer(status, json.dumps(value).encode(), headers)


def of_events(*events: tuple[str, object], **more) -> Answer:
    pieces = [f"event: {n}\ndata: {json.dumps(v)}\n\n".encode() for n, v in events]
    return Answer(pieces=pieces, headers={"Content-Type": "text/event-stream"}, **more)


def refusal(status: int, code: str, **headers: str) -> Answer:
    return of_json({"error_code": code.upper(), "message": "no", "code": code}, status, **headers)


Script = Callable[[Asked], Answer | None]  # None: hang up without a word


class Scripted:
    """Listens on a port of its own, or on a Unix socket, until it is closed."""

    def __init__(
        self, path: str | None = None, port: int = 0, script: Script | None = None
    ) -> None:
        self.asked: list[Asked] = []
        self.gone = threading.Event()  # a client hung up while it was being answered
        self.script: Script = script or (lambda asked: of_json({"ok": True}))
        if path:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(path)
            self.url = f"unix:{path}"
        else:
            self._socket = socket.socket()
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
            self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._socket.listen(64)
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def port(self) -> int:
        return self._socket.getsockname()[1]

    def close(self) -> None:
        for each in (self._socket, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._socket.accept()
                self._open.add(client)
                thread = threading.Thread(target=self._serve, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as source, contextlib.suppress(OSError, ValueError):
            for asked in requests(source):
                self.asked.append(asked)
                answer = self.script(asked)
                if answer is None:
                    break
                self._say(client, answer)
                if answer.cut:
                    break
        self._open.discard(client)

    def _say(self, client: socket.socket, answer: Answer) -> None:
        chunked = answer.pieces is not None
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(answer.body)}"
        head = [f"HTTP/1.1 {answer.status} X", length]
        head += [f"{name.replace('_', '-')}: {value}" for name, value in answer.headers.items()]
        client.sendall("\r\n".join([*head, "", ""]).encode())
        if not chunked:
            body = answer.body[: len(answer.body) // 2] if answer.cut else answer.body
            client.sendall(body)
            return
        for piece in answer.pieces:
            client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        if answer.hold:
            client.setblocking(False)
            while not answer.hold.wait(0.02):
                with contextlib.suppress(BlockingIOError):
                    if client.recv(1, socket.MSG_PEEK) == b"":
                        self.gone.set()
                        return
            client.setblocking(True)
        if not answer.cut:
            client.sendall(b"0\r\n\r\n")


def requests(source) -> Iterator[Asked]:
    while line := source.readline():
        verb, target, _ = line.decode().split()
        headers = {}
        while (line := source.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(source.readline(), 16):
                body += source.read(size)
                source.readline()
            source.readline()
        elif "content-length" in headers:
            body = source.read(int(headers["content-length"]))
        yield Asked(verb, target, headers, body)
