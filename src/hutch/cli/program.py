"""What commands have in common that run something: exit codes, signals, stdin."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shlex
import signal
import stat
import struct
import termios
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import CallerError, HutchError, NotFound
from hutch.operations import StreamOperation
from hutch.types import Chunk, Result

from .screen import OutputStream, cannot_go_on, complain

Launcher = tuple[int, int] | None

TIMED_OUT = 124
FAILED = 125  # hutch itself did, not the command
NOT_EXECUTABLE, NOT_FOUND = 126, 127
HUNG_UP, BROKEN_PIPE = 128 + signal.SIGHUP, 128 + signal.SIGPIPE

_LARGE = re.compile(r"(?<![\w.:/-])(\d{7,})(?: bytes)?(?![\w.:/-])")
READ_SIZE = 64 * 1024
IMAGES = ("alpine", "busybox", "debian", "fedora", "node", "ubuntu")  # typed first, as for docker
NO_PROGRAM = "no such program in the box"  # how a guest says it
TOO_LITTLE = "this key has scope"  # how a server says that it is the key, and not the box


def run_to_end(work: Coroutine[Any, Any, int]) -> int:
    """The exit code of `work`, or of what ended it: a signal, an error, a reader that left."""
    try:
        return asyncio.run(_heeding_signals(work))
    except HutchError as exc:
        complain(_LARGE.sub(_as_written, str(exc)), error=True)
        return exc.exit_code if isinstance(exc, CannotStart) else FAILED
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as exc:
        complain(cannot_go_on(exc), error=True)
        return FAILED


def _as_written(found: re.Match[str]) -> str:
    """A size as people write it, and not in bytes: 64g."""
    count = int(found[1])
    for unit, letter in ((1 << 30, "g"), (1 << 20, "m")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return found[0]


class CannotStart(HutchError):
    """A program could not be started. Its exit code is the one env(1) and docker(1) have for it."""

    def __init__(self, cause: HutchError, exit_code: int) -> None:
        super().__init__(str(cause))
        self.code, self.exit_code = cause.code, exit_code  # type: ignore[misc]


@asynccontextmanager
async def explained(transport: AsyncTransport, session: str, program: str) -> AsyncIterator[None]:
    """For the start of a program: a failure becomes CannotStart, which says what is missing."""
    try:
        yield
    except NotFound as exc:
        if NO_PROGRAM not in str(exc):
            raise
        lacks = f"there is {NO_PROGRAM}"
        if ":" in program or program in IMAGES:
            lacks += f"; if it is an image: hutch run --image {program} -- COMMAND"
        if " " in program:
            lacks += f"; to run it in a shell: hutch run -- sh -c {shlex.quote(program)}"
        if "/" in program and await _exists(transport, session, program):
            lacks = "the interpreter that its first line names is not in the box"
        raise CannotStart(NotFound(f"cannot run {program}: {lacks}"), NOT_FOUND) from None
    except CallerError as exc:
        if TOO_LITTLE in str(exc):
            raise
        raise CannotStart(type(exc)(f"cannot run it: {exc}"), NOT_EXECUTABLE) from None


async def _exists(transport: AsyncTransport, session: str, path: str) -> bool:
    try:
        await transport.perform(op.StatFile(session, path))
    except CallerError:
        return False
    return True


async def follow(
    transport: AsyncTransport,
    operation: StreamOperation[Chunk | Result, Result],
    outputs: tuple[OutputStream, OutputStream] | None,
) -> Result:
    """Copy what a command prints to `outputs`, if given, and return its Result."""
    async with aclosing(await transport.stream(operation)) as stream:
        async for item in stream:
            if isinstance(item, Result):
                for output in outputs or ():
                    await output.finish()
                return item
            if outputs:
                await outputs[item.stream == "stderr"].write(item.data)
    raise AssertionError("a command ended without a result")


def text_of(word: str) -> str:
    """The word's own bytes in the form that survives the way: UTF-8, whatever our locale is."""
    return os.fsencode(word).decode("utf-8", "surrogateescape")


async def own_stdin() -> AsyncIterator[bytes]:
    """What comes in on our own stdin, taken only as fast as it is asked for."""
    loop = asyncio.get_running_loop()
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(0, _settle, readable)
        except PermissionError:
            readable.set_result(None)  # a file: always readable, and nothing to wait for
        try:
            await readable
        finally:
            loop.remove_reader(0)
        try:
            data = os.read(0, READ_SIZE)
        except BlockingIOError:
            continue
        except OSError:
            return  # a terminal that hung up
        if not data:
            return
        yield data


def tell_of_unread_stdin(command: str) -> None:
    """Tell who piped data to a command without --stdin why it did not arrive.

    It is not forwarded unasked: the rest of a script or of a loop's list would vanish in a box,
    and a program that reads to the end would hang on a pipe that a CI job never closes.
    """
    if _has_unread_stdin():
        complain(f"your stdin was not passed on; to give it to the command: {command} -i")


def _has_unread_stdin() -> bool:
    """Whether there is data on a stdin that was made for us, as by `echo data | hutch run`."""
    try:
        ours = os.fstat(0)
        if stat.S_ISREG(ours.st_mode):
            waiting = ours.st_size if os.lseek(0, 0, os.SEEK_CUR) == 0 else 0
        elif stat.S_ISFIFO(ours.st_mode) or stat.S_ISSOCK(ours.st_mode):
            (waiting,) = struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
        else:
            return False
    except OSError:
        return False
    return waiting > 0 and not _is_stdin_of_parent(ours)


def _is_stdin_of_parent(ours: os.stat_result) -> bool:
    """Then we only inherited it: it is a script that a shell reads, or the list of a loop."""
    try:
        return os.path.samestat(ours, os.stat(f"/proc/{os.getppid()}/fd/0"))
    except OSError:
        return False


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _heeding_signals(work: Coroutine[Any, Any, int]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    heard: list[int] = []

    def stop(number: int) -> None:
        if not heard:  # once: the end of a box takes milliseconds, and nobody may break it off
            heard.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a job in the background
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if heard:
            return 128 + heard[0]
        raise
