"""Being the only one that runs: no thread, no signal handler, no finalizer beside us."""

from __future__ import annotations

import gc
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

# Workers that have just finished look around for more for a few milliseconds before they wait.
SETTLING = 0.2
_FUTEX = {"x86_64": "202", "aarch64": "98"}
_WAIT, _WAIT_BITSET = 0, 9


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither a signal handler nor a finalizer runs meanwhile. What came is handled after."""
    # To block signals would not do: a native thread takes them then, and Python runs the handler
    # in this one all the same.
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    handlers = {number: one for number, one in handlers.items() if callable(one)}
    came: list[int] = []
    collecting = gc.isenabled()
    gc.disable()
    for number in handlers:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if collecting:
            gc.enable()
        for one in dict.fromkeys(came):
            _raise(one)


def _raise(number: int) -> None:
    """Send it again. What its handler raises has nobody to catch it: no code of the user's runs."""
    try:
        signal.raise_signal(number)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)


def someone_else_runs() -> str:
    """Why another thread could write to memory while it is moved; empty if none can.

    A thread that waits on a futex of its own process without a time limit is woken by another
    thread only. If all others wait like that, as idle workers of BLAS and Arrow do, then none runs
    before we wake it.
    """
    deadline = time.monotonic() + SETTLING
    while True:
        # Twice, and alike: so there was a moment in between at which all of them waited.
        before, after = _waiting(), _waiting()
        # Last, for a thread that has only just begun is not counted.
        others = len(sys._current_frames()) - 1
        if others:
            return "a thread is running" if others == 1 else f"{others} threads are running"
        if before == after and all(after.values()):
            return ""
        if time.monotonic() > deadline:
            busy = [task for task in after if not after[task] or after[task] != before.get(task)]
            return f"a native thread is running ({', '.join(map(_name_of, busy))})"
        time.sleep(0.005)


def _waiting() -> dict[str, str]:
    """The other threads: how often each has begun to wait, or nothing if it does not."""
    tasks = [task for task in os.listdir("/proc/self/task") if int(task) != os.getpid()]
    return {task: _waits_for_us(task) and _times_waited(task) for task in tasks}


def _waits_for_us(task: str) -> str:
    number, *arguments = _read(task, "syscall").split() or [""]
    if number != _FUTEX.get(platform.machine()):
        return ""
    operation, limit = int(arguments[1], 16), int(arguments[3], 16)
    kind, private = operation & 0x7F, operation & 0x80
    return "yes" if kind in (_WAIT, _WAIT_BITSET) and private and not limit else ""


def _times_waited(task: str) -> str:
    return _read(task, "status").partition("voluntary_ctxt_switches:")[2].partition("\n")[0]


def _name_of(task: str) -> str:
    return _read(task, "comm").strip() or "one that has ended"


def _read(task: str, what: str) -> str:
    try:
        with open(f"/proc/self/task/{task}/{what}") as file:
            return file.read()
    except OSError:
        return ""  # it has ended, or this process may not look at itself
