"""Answers and counts the system calls that the filter denies and reports.

The filter returns SECCOMP_RET_USER_NOTIF for the calls of attacks (see `seccomp.REPORTED`), and
this process holds its listener (seccomp_unotify(2)). The answer is always EPERM, as the filter
itself would give it, so a caller sees no difference. If this process ends, the kernel answers
ENOSYS instead.

The caller blocks until the answer. So this process must never make such a call itself, and a
program that makes them in a loop is slowed down: we answer a few, then pause.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import struct
import time
from dataclasses import dataclass

# struct seccomp_notif: id, pid, flags, number, and 60 bytes that we do not need.
_NOTICE = struct.Struct("=QIIi60x")
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV and _SEND

BATCH, REST = 32, 0.01  # this many answers, then a pause of this many seconds
MAX_COUNTERS = 64  # one per program and call; after that, programs share one per call
OTHERS = "(others)"


@dataclass
class Counter:
    count: int
    first: float
    last: float


class Denials:
    """The system calls that were refused since the start of the box."""

    def __init__(self, listener: int, names: dict[int, str]) -> None:
        self._listener, self._names = listener, names
        self._counters: dict[tuple[str, str], Counter] = {}
        self._loop = asyncio.get_running_loop()
        if listener >= 0:
            self._listen()

    def entries(self) -> list[dict[str, object]]:
        return [
            {
                "program": program,
                "call": call,
                "count": counter.count,
                "first": counter.first,
                "last": counter.last,
            }
            for (program, call), counter in self._counters.items()
        ]

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._answer_one)
        self._left = BATCH

    def _answer_one(self) -> None:
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self._listener, _RECEIVE, notice)
        except OSError:
            return  # the caller was killed since
        id, pid, _, number = _NOTICE.unpack(notice)
        program = _name_of(pid)
        try:
            answer = bytearray(_ANSWER.pack(id, 0, -errno.EPERM, 0))
            fcntl.ioctl(self._listener, _SEND, answer)
        except OSError:
            pass  # killed, or interrupted by a signal: then it makes the call again
        self._count(program, self._names.get(number, str(number)))
        self._left -= 1
        if not self._left:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(REST, self._listen)

    def _count(self, program: str, call: str) -> None:
        now = time.time()
        if (program, call) not in self._counters and len(self._counters) >= MAX_COUNTERS:
            program = OTHERS
        counter = self._counters.setdefault((program, call), Counter(0, now, now))
        counter.count += 1
        counter.last = now


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            text = file.read(64).decode("utf-8", "replace").rstrip("\n")
    except OSError:
        return "?"
    return "".join(char if char.isprintable() else "?" for char in text)
