"""stdin, stdout and stderr: as they should be at the start of every cell, whatever became of them.

User code may close, replace or redirect them, in Python or below. That is its right while it runs;
the next cell begins with the true ones.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
import termios
import time
from typing import TextIO

from .channel import LOWEST_FD

PATIENCE = 0.5  # seconds that a reader may take before order is given up


class Streams:
    """Keeps copies of descriptors 0, 1 and 2, and puts back what is missing."""

    def __init__(self) -> None:
        self._copies = [_copy(fd) for fd in range(3)]
        self.stderr_copy = self._copies[2]
        self._identities = [_identity(fd) for fd in self._copies]
        self._stdin, self._stdout, self._stderr = _reader(), _writer(1), _writer(2)
        self.restore()

    def restore(self) -> None:
        """Everything written has left this process, and all is as at the beginning."""
        if not _usable(self._stdin):
            self._stdin = _reader()
        if not _usable(self._stdout):
            self._stdout = _writer(1)
        if not _usable(self._stderr):
            self._stderr = _writer(2)
        self._restore_descriptors()
        _flush(self._stdout)
        _flush(self._stderr)
        sys.stdin = sys.__stdin__ = self._stdin  # type: ignore[misc, assignment]
        sys.stdout = sys.__stdout__ = self._stdout  # type: ignore[misc, assignment]
        sys.stderr = sys.__stderr__ = self._stderr  # type: ignore[misc, assignment]

    def drain(self) -> None:
        """Returns when all that was printed has been read: what is shown now comes after it."""
        for stream in (sys.stdout, sys.stderr):
            _flush(stream)
        patience = time.monotonic() + PATIENCE
        while any(map(_unread, self._copies[1:])) and time.monotonic() < patience:
            time.sleep(0.0001)

    def _restore_descriptors(self) -> None:
        for fd, (copy, identity) in enumerate(zip(self._copies, self._identities)):  # noqa: B905
            if _identity(fd) != identity:
                # What is still in the buffer was meant for where it goes now.
                _flush((self._stdin, self._stdout, self._stderr)[fd])
                os.dup2(copy, fd)
            elif not os.get_inheritable(fd):
                os.set_inheritable(fd, True)  # another file of the same kind, opened in its place
            if not os.get_blocking(fd):
                os.set_blocking(fd, True)


def flush_current() -> None:
    """Ask what the user has put in place of stdout and stderr to write it all. May take long."""
    for name in ("stdout", "stderr"):
        _flush(getattr(sys, name, None))


def _unread(fd: int) -> bool:
    """Whether there is something in this pipe; on Linux its writer may ask."""
    try:
        return any(fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    except OSError:
        return False


def _copy(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, LOWEST_FD)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, fd)
        return null


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _reader() -> TextIO:
    return open(0, encoding="utf-8", errors="replace", closefd=False)


def _writer(fd: int) -> TextIO:
    raw = io.FileIO(fd, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw, 1 << 16),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def _usable(stream: TextIO) -> bool:
    try:
        return not stream.closed
    except ValueError:  # its buffer was taken away
        return False


def _flush(stream: object) -> None:
    try:
        stream.flush()  # type: ignore[attr-defined]
    except Exception:
        pass  # an object of user code, or a closed pipe
