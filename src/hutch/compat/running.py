"""Which servers are running, by name, so that one process can start a server and another stop it.

Each has a small file, which is also the lock for starting and stopping it.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import BackendUnavailable
from hutch.images.store import data_dir
from hutch.pidfile import PidFile, began, boot, parse

END_TIMEOUT = 10.0  # seconds to exit after SIGTERM; then it is killed, and its box with it


@dataclass(frozen=True)
class Running(PidFile):
    """A server, as it was started."""

    project: str
    socket: str

    @classmethod
    def now(cls, pid: int, project: Path, socket: Path) -> Running:
        return cls(pid, began(pid) or 0, boot(), str(project), str(socket))

    def end(self) -> None:
        """Stop it; when this returns, it is gone. Never signals a process that reuses its pid."""
        with self.held() as process:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process is None or process.ends_within(0):
                    return
                process.signal(number)
                process.ends_within(END_TIMEOUT)


class Record:
    """The file of one name, while it is locked."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self) -> Running | None:
        return parse(Running, os.pread(self._file, 65536, 0))

    def write(self, running: Running) -> None:
        self.clear()
        os.pwrite(self._file, running.dump(), 0)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)


@contextmanager
def record(name: str) -> Iterator[Record]:
    """The record of this name, locked: other callers wait for it."""
    path = _folder() / f"{name}.json"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, path):
                continue  # removed while we waited
            found = Record(file)
            try:
                yield found
            finally:
                if found.read() is None:
                    path.unlink(missing_ok=True)
            return
        finally:
            os.close(file)


def find(project: Path) -> Running | None:
    """The running server of this project, if it was started by name."""
    for path in _folder().glob("*.json"):
        try:
            running = parse(Running, path.read_bytes())
        except OSError:
            continue
        if running and running.project == str(project) and running.is_alive:
            return running
    return None


def empty_folder() -> Path:
    """An empty folder, mounted over what a box must not see."""
    folder = _folder() / "empty"
    folder.mkdir(0o755, exist_ok=True)
    return folder


def _folder() -> Path:
    folder = data_dir() / "kernels"
    try:
        folder.mkdir(0o755, parents=True, exist_ok=True)
    except OSError as exc:
        raise BackendUnavailable(f"cannot make {folder}: {exc.strerror}") from exc
    return folder


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
