"""Who runs here: a process leaves its card, and whoever finds it knows whether it still lives.

A number of a process may be another's by the time it is used. So a card also has the moment when
the process began and the boot that it began in, and signals go by a descriptor of the process.
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
    """One process, and no other."""

    pid: int
    began: int  # in clock ticks after boot
    boot: str

    @property
    def is_alive(self) -> bool:
        return self.boot == boot() and began(self.pid) == self.began

    @contextmanager
    def held(self) -> Iterator[ProcessHandle | None]:
        """A hold on the process, or None if it is gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            yield None
            return
        try:
            # Asked after it was opened: from here on the number cannot change hands.
            yield ProcessHandle(handle) if self.is_alive else None
        finally:
            os.close(handle)

    def dump(self) -> bytes:
        return json.dumps(asdict(self)).encode()


class ProcessHandle:
    """A process, by its descriptor."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def ends_within(self, seconds: float | None) -> bool:
        return bool(select.select([self._handle], [], [], seconds)[0])


@dataclass(frozen=True)
class ServerPidFile(PidFile):
    """The card of `hutch serve`, in its data folder for as long as it answers."""

    url: str
    socket: str
    version: str

    def leave_in(self, folder: Path) -> None:
        path = _place(folder)
        new = path.with_suffix(".new")
        new.write_bytes(self.dump())
        new.replace(path)


def server_of(folder: Path) -> ServerPidFile | None:
    """The server of this data folder, if one runs."""
    try:
        card = parse(ServerPidFile, _place(folder).read_bytes())
    except OSError:
        return None
    return card if card and card.is_alive else None


@contextmanager
def claim(folder: Path) -> Iterator[bool]:
    """Whether the folder is ours for the length of the `with`: no server has it, or gets it."""
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
    """The card of a server that answers no more."""
    _place(folder).unlink(missing_ok=True)


def parse(kind: type[C], data: bytes) -> C | None:
    """What `dump` made; None if it is something else."""
    try:
        return kind(**json.loads(data))
    except (ValueError, TypeError):
        return None


def boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def began(pid: int) -> int | None:
    """When a process began; None if it has ended, also if nobody has buried it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _place(folder: Path) -> Path:
    return folder / "run" / "daemon.json"
