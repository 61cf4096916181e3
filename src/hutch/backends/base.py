"""What a backend is. Everything else about a box happens through its guest."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from hutch.errors import InvalidRequest
from hutch.types import Grade, Limits, Mount, Packages, Relaxation, Report, Root, Stats


class ByteStream(Protocol):
    """A connection to a guest. Every method raises OSError when it is over."""

    async def read(self, at_most: int) -> bytes:
        """At least one byte, or b"" once the guest has hung up."""

    async def write(self, data: bytes) -> None:
        """Returns when the data is on its way. One caller at a time."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Spec:
    """What box to start."""

    image: str = "host"
    limits: Limits = field(default_factory=Limits)
    workdir: str = "/workspace"
    user: str = "user"
    mounts: tuple[Mount, ...] = ()  # by paths without links
    give: tuple[str, ...] = ()  # sources of mounts that may be given to the box's user
    packages: Packages | None = None  # of the image, if it is made of packages
    root: Root | None = None  # of the image, if it was pulled or imported to this machine
    digest: str | None = None  # of the image, if its tag was resolved before
    runtime: str = ""  # of the engine that makes containers; "": its default
    relax: tuple[Relaxation, ...] = ()
    warm: bool = True  # False for a program that starts one box: it does not wait for `preload`


class Box(ABC):
    """One isolated place with a guest in it."""

    id: str
    isolation: Grade
    degraded: tuple[str, ...] = ()  # layers that hold only in part here, in words
    digest: str | None = None  # of its image, if that has one
    runtime: str = ""
    root: Root | None = None  # of its image: locked against removal while the box is in use
    # Whether a connection to its guest may end while the box lives, because something carries it
    # that may be restarted. If so, `connect` finds out; if not, the box has ended.
    outlives_links: bool = False

    @abstractmethod
    async def connect(self) -> ByteStream:
        """A connection to the guest. Raises BoxLost if the box is gone, or its guest hangs.

        Raises BackendUnavailable if what leads to the box is away, and the box may live. There is
        one at a time: a new connection replaces the one before. The guest's shells,
        kernels and programs do not notice.
        """

    async def outlive(self, seconds: float) -> None:
        """Let the box live for so long, from now, should this process end before it.

        Each call replaces the deadline. It has no effect while a host is connected, nor for a
        backend whose boxes never outlive it. Raises BoxLost if the box is gone.
        """
        return

    def forget(self) -> None:
        """Release what we hold of it, and leave it to the host that has it now."""
        return

    @abstractmethod
    async def kill(self) -> None:
        """Stop everything inside and free what it held.

        Safe to call twice, and on a box that is already gone: when this returns, it is gone.
        """

    def oom_kills(self) -> int | None:
        """How many programs were OOM-killed so far. Called before and after each command.

        None if the backend cannot tell: then the guest's word is taken.
        """
        return 0

    @abstractmethod
    async def stats(self) -> Stats:
        """What it uses now. Raises BoxLost if it is gone.

        None for a number that the backend cannot tell: then the guest's word is taken.
        """


# --- what servers share ---------------------------------------------------------------------


@dataclass(frozen=True)
class SharedRecord:
    """A text that several servers share. Its version changes with every change of the text."""

    kind: str  # such as "session": one of ours
    key: str  # which one of its kind; any text
    text: str
    version: int  # a later one is larger


@dataclass(frozen=True)
class SharedChange:
    record: SharedRecord
    is_gone: bool = False


class SharedRecords(Protocol):
    """Where servers keep what they share. All methods raise BackendUnavailable if it is away."""

    def now(self) -> float:
        """Seconds, by a clock that all servers read alike, whatever those of their machines say."""

    async def get(self, kind: str, key: str) -> SharedRecord | None: ...

    async def create(self, kind: str, key: str, text: str) -> SharedRecord:
        """Raises Conflict if there is one, and InvalidRequest if the text is too large."""

    async def replace(self, record: SharedRecord, text: str) -> SharedRecord:
        """Raises Conflict if it was changed since that version, or removed; and InvalidRequest."""

    async def remove(self, record: SharedRecord) -> None:
        """Raises Conflict if it was changed since that version."""

    def follow(self) -> AsyncGenerator[SharedChange | None, None]:
        """All records, None, and then each change; while it is away, this waits for it."""

    async def lead(self, name: str, who: str, seconds: int) -> bool:
        """Whether `who` is the one with this task, for so long. To be called again before that.

        Another one becomes it once it has seen no such call for `seconds`, by its own clock.
        """

    async def resign(self, name: str, who: str) -> None:
        """Let another one have the task at once. Best effort: never raises an error of ours."""


class Backend(ABC):
    """Makes boxes. CONTRIBUTING.md lists what a new backend needs besides this class and `Box`."""

    name: str
    default_image: ClassVar[str] = "host"
    best: ClassVar[Grade] = "ns"  # what a box can have at most, whatever it is asked to be
    has_runtimes: ClassVar[bool] = False  # whether `runtime` and `relax` mean anything to it
    lasts: bool = False  # whether boxes can outlive it, to be adopted by the next one

    @property
    def plain_image(self) -> str:
        """The image of boxes in which no program runs, only the guest."""
        return self.default_image

    async def prepare(self, spec: Spec) -> None:
        """Do slow work ahead of the first such box, such as fetching its image.

        Optional: `start` does what is left. Raises NotFound if there is no such image.
        """
        return

    async def keep_files(self) -> None:
        """Secure all files that later starts need.

        A server calls it once, at its start: its package may be replaced while it runs.
        """
        return

    @abstractmethod
    async def start(self, spec: Spec, id: str | None = None) -> Box:
        """Return once the guest can be reached. If this raises, nothing is left behind.

        `id`: the name of the box (see `named`); by default, it gets one. Raises Conflict if a box
        of that name exists, NotFound if there is no such image, InvalidRequest for what this
        backend cannot do, NoCapacity, BackendUnavailable, and StartFailed.
        """

    @abstractmethod
    async def adopt(self, id: str) -> Box:
        """A live box, whichever process started it.

        This does not contact its guest: `connect` does. Raises BoxLost if there is no such box,
        and IncompatibleBox if it was started by a version that we cannot talk to.
        """

    @abstractmethod
    async def list(self) -> list[str]:
        """Ids of all live boxes, including those that an earlier process left to this one."""

    @abstractmethod
    async def folder(self) -> str:
        """A new folder on this machine for files of the engine: no folders in it.

        It is removed when the backend is closed, or when this process ends in any other way.
        """

    @abstractmethod
    async def report(self) -> Report:
        """Try each layer of isolation for real, and say what holds here."""

    async def shared_records(self) -> SharedRecords | None:
        """Where all servers that share our boxes keep what they know. None: there is only one."""
        return None

    async def digest_of(self, image: str) -> str | None:
        """What the name of an image stands for now, if the backend resolves names."""
        return None

    async def leave(self) -> None:
        """Disconnect, and leave the boxes that may outlive us to the next process.

        A backend whose boxes cannot (see `lasts`) is closed instead.
        """
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Kill every box that is left, and free what the backend itself holds."""


def named(id: str | None) -> str:
    """The name of a new box: `id`, or a random one. Raises InvalidRequest for an invalid `id`."""
    if id is None:
        return os.urandom(6).hex()
    if not re.fullmatch("[0-9a-z-]{1,63}", id):
        raise InvalidRequest(f"invalid box id {id!r}: use 1 to 63 of a-z, 0-9 and '-'")
    return id


class SocketStream:
    """A ByteStream over a connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 20)
        self._sock = sock
        self._loop = asyncio.get_running_loop()

    async def read(self, at_most: int) -> bytes:
        return await self._loop.sock_recv(self._sock, at_most)

    async def write(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data)

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()
