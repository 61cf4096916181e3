"""A KernelLite server as its clients have it: a process, and a socket to ask."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds; what is waited for takes far less


def timed_out(ask: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
    """The answer to a cell that prints something and never ends, with time enough to print it."""
    for timeout in (0.5, 4, 32):
        answer = ask(timeout)
        if answer["stdout"]:
            break
    return answer


class Served:
    """`hutch kernel` in the foreground, until the `with` is left."""

    def __init__(self, project: Path, *options: str, image: str = "host") -> None:
        self.project = project
        self.path = project / ".sandbox/kernel.sock"
        argv = [sys.executable, "-m", "hutch", "kernel", f"--project={project}", f"--image={image}"]
        self.process = subprocess.Popen(
            [*argv, *options], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        assert self.process.stdout and self.process.stderr
        self.said = self._line()

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end(signal.SIGKILL)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe:
                pipe.close()

    def _line(self) -> str:
        assert self.process.stdout
        if not select.select([self.process.stdout], [], [], PATIENCE)[0]:
            raise TimeoutError("the server says nothing")
        return self.process.stdout.readline().decode()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code, after this signal."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def complaint(self) -> str:
        """What it said on stderr, when it has ended."""
        self.process.wait(PATIENCE)
        assert self.process.stderr
        return self.process.stderr.read().decode()

    @property
    def log(self) -> str:
        return (self.path.parent / "daemon.log").read_text()

    def connect(self) -> socket.socket:
        return connect(self.path)

    def ask(self, **request: Any) -> dict[str, Any]:
        with self.connect() as sock:
            return ask(sock, request)

    def exec(self, code: str, **more: Any) -> dict[str, Any]:
        return self.ask(op="exec", code=code, **more)

    def time_out(self, code: str) -> dict[str, Any]:
        """The answer to a cell that prints something and never ends."""
        return timed_out(lambda timeout: self.exec(code, timeout=timeout))

    def start(self, code: str, **more: Any) -> socket.socket:
        """Ask for a cell, and do not wait for its answer."""
        sock = self.connect()
        send(sock, {"op": "exec", "code": code, **more})
        return sock

    def wait_for(self, name: str) -> None:
        """Until a cell has made this file in the project."""
        wait_until((self.project / name).exists)


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE)
    folder = os.open(path.parent, os.O_PATH)  # paths of tests are long, addresses are not
    try:
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(folder)
    return sock


def ask(sock: socket.socket, request: Any) -> dict[str, Any]:
    send(sock, request)
    return receive(sock)


def send(sock: socket.socket, request: Any) -> None:
    body = json.dumps(request).encode()
    sock.sendall(struct.pack("!I", len(body)) + body)


def receive(sock: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!I", _exactly(sock, 4))
    answer = json.loads(_exactly(sock, length))
    try:
        more = sock.recv(1)
    except ConnectionResetError:  # it did not care to read all that we sent
        more = b""
    assert isinstance(answer, dict) and not more
    return answer


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        assert piece, f"the answer ended after {len(data)} of {size} bytes"
        data += piece
    return data


def wait_until(true: Any, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.01)
