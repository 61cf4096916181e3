"""What the backends with containers share: what is in a container, boxes, and relays into them.

The guest comes from the bundle, which every container sees at BUNDLE.

A *relay* is a program of the bundle (guest/relay.py) that the engine starts beside the guest for
each connection, and whose standard streams it carries. One connection more is always open, the
*spare*: while it is, the guest knows that the box has a host. `connect` takes it as the link, and
the next becomes the spare. guest/contained.py has the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from hutch.errors import BackendUnavailable, BoxLost
from hutch.types import Grade, Limits, MiB

from .base import Box, ByteStream

PATIENCE = 30  # seconds for a guest to connect or answer, on a busy machine
READ_SIZE = 1 << 16
RETRY_PAUSE = 0.05  # seconds until a guest that was not there yet is tried again
MAX_COMPLAINT = 1000  # characters
FRAME = b"\0"  # how messages of a guest begin: with a size of four bytes, which is never large


BUNDLE = "/.hutch"
PRIVATE = "/run/hutch"
HOME = "/home/user"
ROOMS = {"/workspace": 0o755, HOME: 0o700, "/tmp": 0o1777, "/var/tmp": 0o1777}
OWN = range(0x2000_0000, 0x3000_0000)  # user ids unused on any machine: one for each box
OWN_OF_FEW = range(20_000, 60_000)  # the same, if a box can have 65,536 ids only

GUEST_MEMORY = 32 * MiB
GVISOR_MEMORY = 128 * MiB  # gVisor's kernel runs in the container's control groups
RUN_SIZE = 16 * MiB
MAX_ORDERS = 100_000  # bytes; the kernel accepts 131,072 in one argument


class RuntimeBundle(Protocol):
    """See images/bundle.py."""

    @property
    def path(self) -> Path: ...

    def command(self, module: str, *args: str, at: str = ...) -> list[str]: ...


async def make_bundle(maker: Callable[[], RuntimeBundle]) -> RuntimeBundle:
    """Make the bundle in a thread, as the first time takes a second.

    Raises BackendUnavailable if it is not there afterwards.
    """
    bundle = await asyncio.to_thread(maker)
    if not os.path.isdir(bundle.path):
        raise BackendUnavailable(f"the bundle is not at {bundle.path}")
    return bundle


def program_limits(limits: Limits, *, is_own: bool) -> dict[str, int]:
    """The rlimits of programs. `is_own`: no other process has the user id of the box."""
    # A file may be as large as the disk, or as the swap file of the Python kernels.
    rlimits = {"NOFILE": limits.open_files, "FSIZE": max(limits.disk_size + MiB, 4 * limits.memory)}
    if is_own:  # otherwise it would also count other processes with this uid
        rlimits["NPROC"] = limits.pids
    return rlimits


def room_sizes(limits: Limits, rooms: Iterable[str]) -> dict[str, int]:
    """The size of each folder in memory. If all are full, programs should have some memory left.

    Writing to a full one then fails for lack of space, and the OOM killer is not involved.
    """
    sizes = {path: limits.disk_size for path in rooms}
    others = [path for path in sizes if path != "/workspace"]
    left = limits.memory - limits.shared_memory - run_size(limits) - sizes.get("/workspace", 0)
    for path in others:
        sizes[path] = min(limits.disk_size, max(MiB, left * 3 // 4 // len(others)))
    return sizes


def run_size(limits: Limits) -> int:
    return min(RUN_SIZE, limits.memory // 16)


# --- guests ---------------------------------------------------------------------------------


class GuestConnector(Protocol):
    """Connects to the guest of one box."""

    async def connect(self) -> ByteStream:
        """A link to the guest. Raises BoxLost if it is gone or does not answer."""

    async def outlive(self, seconds: float) -> None:
        """Let the box live for so long without a host. Raises BoxLost if it is gone."""

    def close(self) -> None:
        """Hang up. The guest has no host from now on, unless another one connects."""


class HandedOver:
    """In place of a connector that another object has taken over."""

    async def connect(self) -> ByteStream:
        raise BoxLost("another host has taken over this box")

    async def outlive(self, seconds: float) -> None:
        raise BoxLost("another host has taken over this box")

    def close(self) -> None:
        return


def outlive_command(seconds: float) -> bytes:
    return f"f{max(0.0, seconds):.3f}\n".encode()


# --- relays ---------------------------------------------------------------------------------


class ProgramStreams(Protocol):
    """The standard streams of a program that an engine has started."""

    async def receive(self) -> tuple[bytes, bool] | None:
        """What it wrote, and whether that was to stderr. None once it has ended."""

    async def send(self, data: bytes) -> None:
        """Raises OSError if it has ended."""

    def close(self) -> None: ...


class RelayEngine(Protocol):
    """What relays need of an engine, for one box."""

    async def start_relay(self) -> ProgramStreams:
        """Raises BoxLost if the container does not run."""

    async def is_running(self) -> bool:
        """Whether the container runs."""

    async def wait(self) -> None:
        """Returns when the container has ended, or when that can no longer be known."""


class RelayStream:
    """A ByteStream over the standard streams of a relay."""

    def __init__(self, streams: ProgramStreams) -> None:
        self._streams = streams
        self._unread = b""
        self.complaint = ""
        self._closed = False

    async def read(self, at_most: int) -> bytes:
        while not self._unread:
            received = await self._streams.receive()
            if received is None:
                return b""
            data, is_stderr = received
            if is_stderr:
                self.complaint = (self.complaint + data.decode(errors="replace"))[:MAX_COMPLAINT]
            else:
                self._unread = data
        data, self._unread = self._unread[:at_most], self._unread[at_most:]
        return data

    def unread(self, data: bytes) -> None:
        """Put data back, to be read again."""
        self._unread = data + self._unread

    async def write(self, data: bytes) -> None:
        await self._streams.send(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._streams.close()


class Relays:
    """The relays of one box."""

    def __init__(self, engine: RelayEngine, box: str, patience: float = PATIENCE) -> None:
        self._engine, self._box, self._patience = engine, box, patience
        self._spare: asyncio.Task[RelayStream] | None = None
        self._link: RelayStream | None = None
        self._is_over = False
        # Not every runtime closes the streams of a program when its container ends.
        self._watch = asyncio.create_task(self._wait())

    async def connect(self) -> RelayStream:
        """A link to the guest, which has answered on it. Raises BoxLost."""
        try:
            async with asyncio.timeout(self._patience):
                while True:
                    relay = await self._take_spare()
                    try:
                        first = await _greet(relay)
                    except BaseException:  # the time is over, or the caller has left
                        relay.close()  # while it is open, the guest has a host
                        raise
                    if first:
                        relay.unread(first)
                        self._stock()
                        self._link = relay
                        if self._watch.done():  # the engine was gone for a while
                            self._watch = asyncio.create_task(self._wait())
                        return relay
                    relay.close()
                    await self._check(relay.complaint)
                    await asyncio.sleep(RETRY_PAUSE)
        except TimeoutError:
            raise BoxLost(
                f"the guest of box {self._box} did not answer in {self._patience:g} seconds"
            ) from None

    async def outlive(self, seconds: float) -> None:
        command = outlive_command(seconds)
        for _ in range(3):  # an old spare may have ended, with its engine
            relay = await self._peek_spare()
            spare = self._spare
            if not (spare and spare.done() and _kept(spare) and spare.result() is relay):
                continue  # `connect` took it: what is written now would go to the agent
            try:
                await relay.write(command)
                return
            except OSError:
                if self._spare is spare:  # else `connect` has taken it, and opened the next
                    self._spare = None
                relay.close()
                await self._check(relay.complaint)
        raise BoxLost(f"box {self._box} is gone")

    async def _check(self, complaint: str) -> None:
        """Raises BoxLost if another attempt is pointless."""
        if self._is_over or not await self._engine.is_running():
            raise BoxLost(f"box {self._box} is gone" + (f" ({complaint})" if complaint else ""))

    def _stock(self) -> asyncio.Task[RelayStream]:
        if self._spare is None or (self._spare.done() and not _kept(self._spare)):
            self._spare = asyncio.create_task(self._open())
        return self._spare

    async def _peek_spare(self) -> RelayStream:
        if self._is_over:
            raise BoxLost(f"box {self._box} is gone")
        return await asyncio.shield(self._stock())

    async def _take_spare(self) -> RelayStream:
        relay = await self._peek_spare()
        self._spare = None
        return relay

    async def _open(self) -> RelayStream:
        return RelayStream(await self._engine.start_relay())

    async def _wait(self) -> None:
        await self._engine.wait()
        if self._link:
            self._link.close()

    def close(self) -> None:
        self._is_over = True
        self._watch.cancel()
        spare, self._spare = self._spare, None
        if spare:
            spare.cancel()
            spare.add_done_callback(_discard)
        if self._link:
            self._link.close()


def _kept(task: asyncio.Task[RelayStream]) -> bool:
    return not task.cancelled() and task.exception() is None


def _discard(task: asyncio.Task[RelayStream]) -> None:
    if _kept(task):
        task.result().close()


async def _greet(relay: RelayStream) -> bytes:
    """Ask for a link. Returns the first bytes of the guest, or b"" if it did not answer."""
    word = b""
    with contextlib.suppress(OSError):
        await relay.write(b"c")
        word = await relay.read(READ_SIZE)
    if word and not word.startswith(FRAME):
        # If the engine cannot start the relay, its error comes in place of the relay's output.
        relay.complaint, word = word.decode(errors="replace").strip()[:MAX_COMPLAINT], b""
    return word


# --- boxes ----------------------------------------------------------------------------------


class ContainedBox(Box):
    """A box that an engine runs, once its guest has answered."""

    def __init__(
        self,
        id: str,
        connector: GuestConnector,
        *,
        isolation: Grade,
        lasts: bool,
        gone: Callable[[], None],
        first: ByteStream | None = None,
    ) -> None:
        """`lasts`: it may outlive us. `gone` is called after it was killed.

        `first`: a connection to its guest that is already open.
        """
        self.id, self._connector, self.isolation = id, connector, isolation
        self.outlives_links = isinstance(connector, Relays)  # an engine carries them
        self._gone = gone
        self._lasts, self._until = lasts, float("inf")
        self._first = first
        self._dying: asyncio.Task[None] | None = None
        self._is_cut_off = self._is_forgotten = False

    @abstractmethod
    async def _remove(self) -> None:
        """End it, whatever it takes, and return when it is gone."""

    async def connect(self) -> ByteStream:
        self._check()
        first, self._first = self._first, None
        return first or await self._connector.connect()

    async def outlive(self, seconds: float) -> None:
        self._check()
        if self._lasts:
            await self._connector.outlive(seconds)
            self._until = now() + seconds

    @property
    def may_stay(self) -> bool:
        """Whether it may live on without us.

        True for an adopted box, whose guest still knows the deadline that its last host set.
        """
        return self._until > now()

    def expect_end(self) -> None:
        """From now on, it ends with us unless `outlive` is called."""
        self._until = 0.0

    async def kill(self) -> None:
        # All callers share one attempt, which continues if one of them is cancelled. If it
        # failed, the next call tries again.
        if self._dying is None or (self._dying.done() and failed(self._dying)):
            self._dying = asyncio.create_task(self._kill())
        await asyncio.shield(self._dying)

    async def _kill(self) -> None:
        if self._is_forgotten:
            return  # the backend was closed, which killed it, or another host has it now
        try:
            await self._remove()
        finally:
            self._cut_off()
        self.forget()
        self._gone()

    @property
    def is_forgotten(self) -> bool:
        return self._is_forgotten

    def forget(self) -> None:
        """Release everything that we hold of it, without ending it."""
        self._is_forgotten = True
        self._cut_off()

    def _cut_off(self) -> None:
        """Close our connections to it. It may still have to be killed."""
        if self._is_cut_off:
            return
        self._is_cut_off = True
        if self._first:
            self._first.close()
        self._connector.close()

    def hand_over(self) -> GuestConnector:
        """Give the connection to another object, which stands for the box from now on."""
        connector, self._connector = self._connector, HandedOver()
        if self._first:
            self._first.close()
            self._first = None
        self.forget()
        return connector

    def _check(self) -> None:
        if self._is_cut_off or self._dying:
            raise BoxLost(f"box {self.id} is gone")


def now() -> float:
    """Seconds since boot, including those of a suspended machine: the clock of the guest."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def failed(task: asyncio.Task[None]) -> bool:
    return task.cancelled() or task.exception() is not None
