"""Which servers run, by name: who starts one may end, and somebody else stops it.

One small file for each, which is also the lock for starting and stopping it. A process is known
by its id, the moment it began and the boot it began in, so that no other is ever taken for it.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from hutch.errors import BackendUnavailable
from hutch.images.store import data_dir

END_TIMEOUT = 10.0  # seconds to end by itself; then it is killed, and its box with it


@dataclass(frozen=True)
class Running:
    """A server, as it was started."""

    pid: int
    began: int  # in clock ticks after boot
    boot: str
    project: str
    socket: str

    @classmethod
    def now(cls, pid: int, project: Path, socket: Path) -> Running:
        return cls(pid, _began(pid) or 0, _boot(), str(project), str(socket))

    @property
    def is_alive(self) -> bool:
        return self.boot == _boot() and _began(self.pid) == self.began

    def end(self) -> None:
        """When this returns, it is gone. Never touches a process that only has its number."""
        try:
            process = os.pidfd_open(self.pid)
        except OSError:
            return
        try:
            # Asked after it was opened: from here on the number cannot change hands.
            for number in (signal.SIGTERM, signal.SIGKILL) if self.is_alive else ():
                signal.pidfd_send_signal(process, number)
                if select.select([process], [], [], END_TIMEOUT)[0]:
                    return
        except ProcessLookupError:
            pass
        finally:
            os.close(process)


class Record:
    """What is known of one name, while it is locked."""

    def __init__(self, file: int) -> None:
        self._file = file

    def read(self) -> Running | None:
        return _parse(os.pread(self._file, 65536, 0))

    def write(self, running: Running) -> None:
        self.clear()
        os.pwrite(self._file, json.dumps(asdict(running)).encode(), 0)

    def clear(self) -> None:
        os.ftruncate(self._file, 0)


@contextmanager
def record(name: str) -> Iterator[Record]:
    """The record of this name. Whoever else asks for it waits."""
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
    """The server of this project, if one was started by name and lives."""
    for path in _folder().glob("*.json"):
        try:
            running = _parse(path.read_bytes())
        except OSError:
            continue
        if running and running.project == str(project) and running.is_alive:
            return running
    return None


def empty_folder() -> Path:
    """What a box sees in place of a folder that is not for it."""
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


def _parse(data: bytes) -> Running | None:
    try:
        return Running(**json.loads(data))
    except (ValueError, TypeError):
        return None


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _began(pid: int) -> int | None:
    """When a process began; None if it has ended, also if nobody has buried it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
