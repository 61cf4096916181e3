"""Saving in a child process, so that the kernel does not change, whatever happens.

The child is a fork: it has all variables without copying them, and what user code does while it is
pickled (`__reduce__`, `__getstate__`) only affects the child. If memory runs out, the child is
killed. It writes to a pipe, and the kernel passes that on.

    size of payload (4) | kind (1) | payload

    D: data, A: the report, E: the end, X: why it failed

The pipe may stay open for longer: user code that forks while it is pickled passes it on. So a save
is over when its end frame was read, or when the child has ended, and never waits for the end of the
pipe. Forks of the child are in its process group and are killed with it. A process that left that
group lives on like one that a cell has started: the save does not wait for it, what it writes to
the pipe is not read, and it has no channel to the guest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import json
import os
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from . import pages, state, surroundings
from .channel import Buffer, Channel
from .pickling import in_short

_FRAME = struct.Struct(">Ic")
_DATA, _REPORT, _END, _FAILED = b"D", b"A", b"E", b"X"
_PIECE = 1 << 20
_SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ, which `fcntl` has since Python 3.10
_MOST = 64 << 20  # bytes of a report
_LOOK = 1.0  # seconds between two checks whether the child still runs
PATIENCE = 100.0  # seconds, unless the request has another number


class StateNotSaved(Exception):
    """The state could not be saved. The message says why; the kernel is unchanged."""


def save(
    namespace: dict[str, object],
    channel: Channel,
    extra: dict[str, object],
    patience: float = PATIENCE,
) -> dict[str, object]:
    """Send the state as data, and return the report. Raises StateNotSaved."""
    # Before the fork: the child has no other threads, and its random generators differ.
    running, around = surroundings.running(), surroundings.gather()
    kernel, die_with_parent = os.getpid(), pages.death_signal()
    reader, writer = os.pipe()
    try:
        fcntl.fcntl(writer, _SET_PIPE_SIZE, _PIECE)
    except OSError:
        pass  # over the quota: only slower
    try:
        child = _fork()
        if not child:
            die_with_parent(signal.SIGKILL)
            if os.getppid() != kernel:
                os._exit(1)  # the kernel ended before the death signal was set
            os.close(reader)
            _be_the_child(
                writer, lambda write: state.save(namespace, write, extra, around, running)
            )
    except OSError as error:
        os.close(reader)
        why = "the box has no room for another process" if error.errno == errno.EAGAIN else ""
        raise StateNotSaved(
            f"no process could be started to save it: {why or error.strerror}"
        ) from None
    finally:
        os.close(writer)
    try:
        report = _Relay(reader, child, channel, time.monotonic() + patience).run()
    finally:
        os.close(reader)
        status = _end(child)  # only once: after that, another process may have its pid
    try:
        answer: dict[str, object] = json.loads(report)
    except ValueError:  # the report is empty
        raise StateNotSaved(_why(status)) from None
    return answer


def _fork() -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn if there are threads. They do not exist in the child; if one holds a
        # lock that pickling needs, the child waits until its time is over.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _end(child: int) -> int | None:
    """Kill the child and its forks. Returns its wait status, or None if that is lost."""
    for kill in (os.kill, os.killpg):  # it may not have a group yet
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # Linux reaps it if SIGCHLD is ignored
        return None


def _has_ended(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


# --- the child --------------------------------------------------------------------------


def _be_the_child(fd: int, act: Callable[[Callable[[Buffer], None]], dict[str, Any]]) -> NoReturn:
    status, child = 1, os.getpid()

    def send(kind: bytes, payload: Buffer) -> None:
        if os.getpid() != child:
            os._exit(0)  # user code forked while it was pickled: only one may go on
        _send(fd, kind, payload)

    try:
        os.setpgid(0, 0)
        gc.disable()  # it would write to, and so copy, every page
        _volunteer()
        try:
            report = act(lambda data: send(_DATA, data))
            send(_REPORT, json.dumps(report).encode("utf-8", "replace"))
            send(_END, b"")
            status = 0
        except MemoryError:
            send(_FAILED, b"there is not enough memory for it in the box")
        except BaseException as error:
            send(_FAILED, in_short(error).encode("utf-8", "replace"))
    finally:
        # Without atexit and flushing: what is open here belongs to the kernel.
        os._exit(status)


def _volunteer() -> None:
    """Let this process be killed first if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
            file.write(b"1000")
    except OSError:
        pass  # it is still at least as large as the kernel


def _send(fd: int, kind: bytes, payload: Buffer) -> None:
    view = memoryview(payload).cast("B")
    for at in range(0, len(view) or 1, _PIECE):
        part = view[at : at + _PIECE]
        _write(fd, _FRAME.pack(len(part), kind))
        _write(fd, part)


def _write(fd: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- the kernel -------------------------------------------------------------------------


class _Relay:
    """Passes on what the child writes, until that is complete or cancelled."""

    def __init__(self, fd: int, child: int, channel: Channel, deadline: float) -> None:
        self._fd, self._child, self._channel, self._deadline = fd, child, channel, deadline
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self) -> bytes:
        """The report; empty if the child ended before its end frame. Raises StateNotSaved."""
        report = b""
        while (head := self._read(_FRAME.size)) is not None:
            size, kind = _FRAME.unpack(head)
            payload = self._read(size)
            if payload is None:
                break
            if kind == _DATA:
                self._channel.data(payload)
            elif kind == _REPORT:
                report += payload
                if len(report) > _MOST:
                    raise StateNotSaved(
                        "the list of what was saved is too long: too many variables"
                    )
            elif kind == _END:
                return report
            elif kind == _FAILED:
                raise StateNotSaved(payload.decode("utf-8", "replace"))
        return b""

    def _read(self, size: int) -> bytes | None:
        """Exactly `size` bytes; None if the child ended before."""
        data = bytearray()
        while len(data) < size:
            part = os.read(self._fd, size - len(data)) if self._wait() else b""
            if not part:
                return None
            data += part
        return bytes(data)

    def _wait(self) -> bool:
        """Wait for something to read; False if the child has ended and nothing is left.

        Raises StateNotSaved if it takes too long, or the guest cancels.
        """
        has_ended = False
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise StateNotSaved(
                    "it took too long: perhaps pickling one of its values never ends"
                )
            # While a state is saved, the only thing the guest sends is a cancel.
            if self._channel.pending():
                raise StateNotSaved("it was cancelled")
            pause = 0 if has_ended else max(1, int(min(left, _LOOK) * 1000))
            if self._fd in [fd for fd, _ in self._poll.poll(pause)]:
                return True
            if has_ended:
                return False
            has_ended = _has_ended(self._child)


def _why(status: int | None) -> str:
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return (
                "the process that saved it was killed, most likely because the box has too little "
                "free memory: give it more, or delete variables"
            )
        return f"the process that saved it was killed by signal {number}"
    return "the process that saved it ended too early"
