"""What a backend is. Everything else about a box happens through its guest."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Protocol

from hutch.errors import InvalidRequest
from hutch.types import Grade, Limits, Mount, Packages, Relaxation, Report, Root, Stats


class Can(Enum):
    """What some backends can do and others cannot. Declared, so the engine never probes."""

    FREEZE = auto()
    SNAPSHOT = auto()


class ByteStream(Protocol):
    """A connection to a guest. Every method raises OSError when it is over."""

    async def read(self, at_most: int) -> bytes:
        """At least one byte, or b"" once the guest has hung up."""

    async def write(self, data: bytes) -> None:
        """Returns when the data is on its way. One caller at a time."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Spec:
    """What a box shall be."""

    image: str = "host"
    limits: Limits = field(default_factory=Limits)
    workdir: str = "/workspace"
    user: str = "user"
    mounts: tuple[Mount, ...] = ()  # by paths without links
    give: tuple[str, ...] = ()  # of their sources, those that may become the box's user's
    packages: Packages | None = None  # of the image, if it is made of packages
    root: Root | None = None  # of the image, if it was pulled or imported to this machine
    digest: str | None = None  # what the image's tag stood for, if that was found out before
    runtime: str = ""  # of the engine that makes containers; none: its default
    relax: tuple[Relaxation, ...] = ()
    warm: bool = True  # False for a program that starts one box: it shall not wait for `preload`


class Box(ABC):
    """One isolated place with a guest in it."""

    id: str
    isolation: Grade
    degraded: tuple[str, ...] = ()  # layers that are not whole here, in words
    digest: str | None = None  # of its image, if that has one
    runtime: str = ""
    root: Root | None = None  # held by whoever looks after the box: it must not be removed

    @abstractmethod
    async def connect(self) -> ByteStream:
        """A connection to the guest. Raises BoxLost if there is none to be had.

        There is one at a time. It can be asked for again when the one before has ended, and
        takes its place if it has not; shells, kernels and jobs of the guest do not notice.
        """

    async def outlive(self, seconds: float) -> None:
        """Let it live on for so long, from now, should this process go away before it.

        Asked again, it counts from then. While somebody looks after the box, it means nothing,
        nor does it for a backend whose boxes never outlive it. Raises BoxLost if the box is gone.
        """
        return

    @abstractmethod
    async def kill(self) -> None:
        """Stop everything inside and free what it held.

        Safe to call twice, and on a box that is already gone: when this returns, it is gone.
        """

    def oom_kills(self) -> int:
        """How many programs were killed for want of memory so far. Asked around each command."""
        return 0

    @abstractmethod
    async def stats(self) -> Stats:
        """What it uses now. Raises BoxLost if it is gone."""


class Backend(ABC):
    """Makes boxes. A new backend is this class, `Box`, and a row in the docs."""

    name: ClassVar[str]
    can: ClassVar[frozenset[Can]] = frozenset()
    default_image: ClassVar[str] = "host"
    best: ClassVar[Grade] = "ns"  # what a box can have at most, whatever it is asked to be
    has_runtimes: ClassVar[bool] = False  # whether `runtime` and `relax` mean anything to it
    lasts: bool = False  # whether boxes can outlive it, to be adopted by the next one

    async def prepare(self, spec: Spec) -> None:
        """Do what may take long before the first box of this kind: fetch its image, say.

        Nothing has to be done here: `start` does what is left. Raises NotFound if there is no such
        image.
        """
        return

    async def keep_files(self) -> None:
        """Get hold of all files that later starts need.

        A server calls it once, first: the package it came from may be replaced while it runs.
        """
        return

    @abstractmethod
    async def start(self, spec: Spec, id: str | None = None) -> Box:
        """Return once the guest can be talked to. On StartFailed, nothing is left behind.

        `id` is what the box shall be called, out of a-z, 0-9 and "-" (see `named`); else it gets
        a name. Raises Conflict if there is a box of that name.
        """

    @abstractmethod
    async def adopt(self, id: str) -> Box:
        """A box that is alive, whoever started it. Raises BoxLost if there is none.

        IncompatibleBox, if it is alive and was started by a version we cannot talk to.

        It is not touched, and its guest not talked to: `connect` does that.
        """

    @abstractmethod
    async def list(self) -> list[str]:
        """Ids of the boxes of this backend that are alive, those of the one before it too."""

    @abstractmethod
    async def folder(self) -> str:
        """A new folder on this machine for files of the engine's: no folders in it.

        It goes when the backend is closed, and when this process ends in any other way.
        """

    @abstractmethod
    async def report(self) -> Report:
        """Try each layer of isolation for real, and say what holds here."""

    async def digest_of(self, image: str) -> str | None:
        """What the name of an image stands for now, if that is for the backend to say."""
        return None

    async def leave(self) -> None:
        """Go away, and leave the boxes that may outlive us to the next one.

        A backend whose boxes cannot (see `lasts`) closes.
        """
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Kill every box that is left, and free what the backend itself held."""


def named(id: str | None) -> str:
    """The name for a new box: the one that was asked for, if it will do, or one of our own."""
    if id is None:
        return os.urandom(6).hex()
    if not re.fullmatch("[0-9a-z-]{1,63}", id):
        raise InvalidRequest(f"a box cannot be called {id!r}: 1 to 63 of a-z, 0-9 and '-' will do")
    return id


# Connections to guests, as backends make them.


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
