"""PID files that tell reliably whether their process is still alive.

A PID may have been reused by the time it is read. So a PID file also has the start time of the
process and the id of the boot, and signals are sent through a pidfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

C = TypeVar("C", bound="PidFile")


@dataclass(frozen=True)
class PidFile:
    """Identifies one process, even if its PID is reused."""

    pid: int
    began: int  # in clock ticks after boot
    boot: str

    @property
    def is_alive(self) -> bool:
        return self.boot == boot() and began(self.pid) == self.began

    @contextmanager
    def held(self) -> Iterator[ProcessHandle | None]:
        """Open the process for the `with` block; None if it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        try:
            # Checked after it was opened: a pidfd never refers to another process.
            yield ProcessHandle(handle) if self.is_alive else None
        finally:
            os.close(handle)

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class ProcessHandle:
    """A process, by its pidfd."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def ends_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._handle], [], [], seconds)[0])


@dataclass(frozen=True)
class ServerPidFile(PidFile):
    """The PID file of `hutch serve`, which is in its data folder as long as the server answers."""

    url: str
    socket: str
    version: str

    def leave_in(self, folder: Path) -> None:
        path = _place(folder)
        new = path.with_suffix(".new")
        new.write_bytes(self.dump())
        new.replace(path)


def server_of(folder: Path) -> ServerPidFile | None:
    """The PID file of the server that runs with this data folder, if there is one."""
    try:
        card = parse(ServerPidFile, _place(folder).read_bytes())
    except OSError:
        return None
    return card if card and card.is_alive else None


@contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """Lock a data folder for the `with` block. Yields False if it is locked already.

    Raises FileNotFoundError if it has no folder `run`.
    """
    lock = os.open(folder / "run/daemon.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(lock)


def take_back(folder: Path) -> None:
    """Remove the PID file of a server that no longer answers."""
    _place(folder).unlink(missing_ok=True)


def parse(kind: type[C], data: bytes) -> C | None:
    """Parse what `dump` wrote; None if it is something else."""
    try:
        return kind(**json.loads(data))
    except (ValueError, TypeError):
        return None


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def began(pid: int) -> int | None:
    """The start time of a process; None if it has exited (zombies count as exited)."""
    try:
        # The name of the program, in parentheses, may contain spaces and parentheses itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _place(folder: Path) -> Path:
    return folder / "run" / "daemon.json"
