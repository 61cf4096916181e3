"""The server of a data folder, as a process: whether it runs, and how to end it.

It writes `run/daemon.json` when it is there. A pid may be somebody else's by the time it is used,
so the record has the moment of the start, too, and signals go by a descriptor of the process.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Daemon:
    pid: int
    url: str
    handle: int  # a descriptor of the process

    def terminate(self) -> None:
        signal.pidfd_send_signal(self.handle, signal.SIGTERM)

    def ends_within(self, seconds: float | None) -> bool:
        return bool(select.select([self.handle], [], [], seconds)[0])


@contextmanager
def daemon_of(data: Path) -> Iterator[Daemon | None]:
    """The server of this folder, or None if none runs."""
    try:
        record = json.loads((data / "run" / "daemon.json").read_text())
        pid, began, url = int(record["pid"]), int(record["began"]), str(record["url"])
        handle = os.pidfd_open(pid)
    except (OSError, ValueError, KeyError, TypeError):
        yield None
        return
    try:
        yield Daemon(pid, url, handle) if _began(pid) == began else None
    finally:
        os.close(handle)


def running(data: Path) -> bool:
    with daemon_of(data) as daemon:
        return daemon is not None


def _began(pid: int) -> int | None:
    """In ticks of the clock since the machine was started."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
