"""A kernel without a box: the process, its channel and its pipes, held by a test."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hutch

SOURCE = Path(hutch.__file__).parent / "kernel"
HEADER = struct.Struct(">Ic")
PATIENCE = 60.0

# As the guest starts it: what lies in the folder a cell starts in must not be imported by us.
EXEC = """
import sys
sys.path[:1] = []
sys.path.append({lib!r})
from hutch_kernel.main import main
main({fd})
"""
# As a fork of a warm process: that one forks, and does what the guest's subreaper would do.
FORK = """
import os, signal, sys
sys.path.append({lib!r})
from hutch_kernel import main, warm
failed = warm.preload({preload!r})
assert not failed, failed
warm.remember()
warm.rehearse()
sys.meta_path.clear()
signal.signal(signal.SIGINT, signal.SIG_IGN)
pid = os.fork()
if not pid:
    main.main({fd}, forked=True, environ={environ!r})
os.close({fd}); os.close(1); os.close(2)
os.waitpid(pid, 0)
"""


class KernelDied(Exception):
    """The kernel ended while it was being asked."""


class Ran:
    """What came of one cell."""

    def __init__(self, answer: dict[str, Any], results: list[dict[str, Any]], out: str, err: str):
        self.count: int = answer["count"]
        self.error: dict[str, Any] | None = answer["error"]
        self.results, self.out, self.err = results, out, err

    @property
    def text(self) -> str | None:
        """The value of the last expression, as text."""
        return next((r["mime"]["text/plain"] for r in self.results if r["main"]), None)

    def picture(self, at: int = 0) -> bytes:
        pictures = [r["mime"]["image/png"] for r in self.results if "image/png" in r["mime"]]
        return base64.b64decode(pictures[at])

    def __repr__(self) -> str:
        return f"<Ran {self.count} {self.results} {self.out!r} {self.err!r} {self.error}>"


class Kernel:
    """One kernel, for the length of a `with`. Every wait in here ends."""

    def __init__(
        self,
        folder: Path,
        python: str = sys.executable,
        *,
        forked: bool = False,
        preload: list[str] | None = None,
        environ: dict[str, str] | None = None,
        start: dict[str, Any] | None = None,
        swap: tuple[int, int] | None = None,
    ) -> None:
        lib = folder / "hutch-lib"
        lib.mkdir(exist_ok=True)
        with contextlib.suppress(FileExistsError):
            (lib / "hutch_kernel").symlink_to(SOURCE, target_is_directory=True)
        self.folder = folder / "work"
        self.folder.mkdir(exist_ok=True)
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE)
        self._pipes = [os.pipe(), os.pipe()]
        code = (FORK if forked else EXEC).format(
            lib=str(lib),
            fd=theirs.fileno(),
            preload=preload or [],
            environ={**os.environ, **(environ or {})},
        )
        self._process = subprocess.Popen(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=self._pipes[0][1],
            stderr=self._pipes[1][1],
            pass_fds=[theirs.fileno(), *([swap[0]] if swap else [])],
            cwd=self.folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **(environ or {})},
        )
        theirs.close()
        for _, writer in self._pipes:
            os.close(writer)
        self._outputs = {reader: bytearray() for reader, _ in self._pipes}
        self._open = set(self._outputs)
        place = {"fd": swap[0], "offset": 0, "size": swap[1]} if swap else None
        wanted = {"context": "main", "cwd": str(self.folder), "swap": place, **(start or {})}
        self.pid: int = self._process.pid
        try:
            self.started = self.ask("start", **wanted)
        except BaseException:
            self.close()
            raise
        self.pid = self.started["pid"]

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # cells

    def run(self, code: str, timeout: float = PATIENCE) -> Ran:
        self.begin(code)
        return self.finish(timeout)

    def value(self, code: str) -> Any:
        """The value of an expression, as JSON can carry it."""
        ran = self.run(f"import json as _json; print(_json.dumps({code}))")
        assert ran.error is None, ran.error["traceback"]
        return json.loads(ran.out)

    def begin(self, code: str) -> None:
        """Start a cell and do not wait for it."""
        self._send(b"R", json.dumps({"do": "run", "code": code}).encode())

    def finish(self, timeout: float = PATIENCE) -> Ran:
        results = []
        deadline = time.monotonic() + timeout
        while True:
            kind, payload = self._receive(deadline)
            if kind == b"A":
                out, err = self._output()
                return Ran(json.loads(payload), results, out, err)
            assert kind == b"N", kind
            results.append(json.loads(payload)["result"])

    def interrupt(self) -> None:
        os.kill(self.pid, signal.SIGINT)

    def wait_for_output(self, text: str) -> None:
        """Until stdout or stderr holds `text`."""
        deadline = time.monotonic() + PATIENCE
        while not any(text.encode() in output for output in self._outputs.values()):
            assert time.monotonic() < deadline, (text, self._outputs)
            self._pump(self._open, deadline)

    # everything else

    def ask(self, do: str, **what: Any) -> dict[str, Any]:
        """Any request that is answered by an answer alone."""
        self._send(b"R", json.dumps({"do": do, **what}).encode())
        kind, payload = self._receive(time.monotonic() + PATIENCE)
        assert kind == b"A", kind
        answer: dict[str, Any] = json.loads(payload)
        return answer

    def save(self) -> tuple[bytes, dict[str, Any]]:
        self._send(b"R", b'{"do": "save"}')
        saved = bytearray()
        while (frame := self._receive(time.monotonic() + PATIENCE))[0] == b"D":
            saved += frame[1]
        assert frame[0] == b"E", frame
        kind, payload = self._receive(time.monotonic() + PATIENCE)
        assert kind == b"A", kind
        return bytes(saved), json.loads(payload)

    def save_fails(self, *, give_up: bool = False, **what: Any) -> dict[str, Any]:
        """Why it could not be saved."""
        self._send(b"R", json.dumps({"do": "save", **what}).encode())
        if give_up:
            self._send(b"E", b"")
        while (frame := self._receive(time.monotonic() + PATIENCE))[0] != b"A":
            pass
        error: dict[str, Any] = json.loads(frame[1])["error"]
        return error

    def load(self, saved: bytes) -> dict[str, Any]:
        """As the host does it: again for as long as the kernel asks for it."""
        while (answer := self.load_once(saved)).pop("again"):
            pass
        return answer

    def load_once(self, saved: bytes) -> dict[str, Any]:
        self._send(b"R", b'{"do": "load"}')
        for at in range(0, len(saved), 1 << 20):
            self._send(b"D", saved[at : at + (1 << 20)])
        self._send(b"E", b"")
        kind, payload = self._receive(time.monotonic() + PATIENCE)
        assert kind == b"A", kind
        answer: dict[str, Any] = json.loads(payload)
        return answer

    def hang_up(self) -> int:
        """Close the channel; the exit code of the kernel."""
        self._socket.close()
        return self._process.wait(PATIENCE)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()
        for reader, _ in self._pipes:
            os.close(reader)

    # the wire

    def _send(self, kind: bytes, payload: bytes) -> None:
        try:
            self._socket.sendall(HEADER.pack(len(payload), kind) + payload)
        except OSError as exc:
            raise KernelDied(self._epitaph()) from exc

    def _receive(self, deadline: float) -> tuple[bytes, bytes]:
        size, kind = HEADER.unpack(self._exactly(HEADER.size, deadline))
        assert size <= (16 << 20) + (64 << 10), f"a frame of {size} bytes"
        return kind, self._exactly(size, deadline)

    def _exactly(self, size: int, deadline: float) -> bytes:
        got = bytearray()
        while len(got) < size:
            if self._socket not in self._pump({self._socket, *self._open}, deadline):
                if time.monotonic() > deadline:
                    os.kill(self.pid, signal.SIGABRT)  # it says where it is
                    raise TimeoutError(self._epitaph())
                continue
            try:
                more = self._socket.recv(size - len(got))
            except ConnectionError:
                more = b""
            if not more:
                raise KernelDied(self._epitaph())
            got += more
        return bytes(got)

    def _pump(self, wanted: set[Any], deadline: float) -> list[Any]:
        """Wait for any of these. Output is read at once, so that the kernel does not block."""
        ready = select.select(wanted, [], [], max(0, deadline - time.monotonic()))[0]
        for fd in self._open.intersection(ready):
            if data := os.read(fd, 1 << 16):
                self._outputs[fd] += data
            else:
                self._open.discard(fd)
        return ready

    def _output(self) -> tuple[str, str]:
        """What has been written by now."""
        while self._pump(self._open, 0):
            pass
        out, err = [bytes(self._outputs[fd]).decode() for fd, _ in self._pipes]
        for output in self._outputs.values():
            output.clear()
        return out, err

    def _epitaph(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        return f"{self._process.returncode}: {self._output()[1]}"


def processes_below(pid: int) -> Iterator[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    for child in children.read_text().split() if children.exists() else ():
        yield int(child)
        yield from processes_below(int(child))
