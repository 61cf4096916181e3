"""Servers that share sessions, in one process: with a fake backend, and records in memory."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from hutch import factory
from hutch import operations as op
from hutch.backends.base import (
    ByteStream,
    SharedChange,
    SharedRecord,
    SharedRecords,
)
from hutch.errors import BackendUnavailable, Conflict, Unauthorized
from hutch.operations import Operation, StreamOperation
from hutch.server.http.app import App
from hutch.server.http.server import HTTPServer
from hutch.server.keys import OPERATOR, Caller
from hutch.server.peers import HttpPeer
from hutch.server.replicas import Peer, PeerLost
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.settings.values import ListenAddress
from hutch.testing.fake import FakeBackend
from hutch.types import BoxInfo, Result

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ADMIN = Caller(OPERATOR, "admin")


class MemoryRecords:
    """A SharedRecords, for tests."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], SharedRecord] = {}
        self.last = 0
        self.followers: set[asyncio.Queue[SharedChange | None]] = set()
        self.leader: tuple[str, float] = "", 0.0
        self.is_away = False

    def now(self) -> float:
        return time.time()

    def _check(self) -> None:
        if self.is_away:
            raise BackendUnavailable("the records are away")

    async def get(self, kind: str, key: str) -> SharedRecord | None:
        await asyncio.sleep(0)
        self._check()
        return self.records.get((kind, key))

    def _put(self, kind: str, key: str, text: str) -> SharedRecord:
        self.last += 1
        record = self.records[kind, key] = SharedRecord(kind, key, text, self.last)
        self._tell(SharedChange(record))
        return record

    def _tell(self, change: SharedChange) -> None:
        for follower in self.followers:
            follower.put_nowait(change)

    async def create(self, kind: str, key: str, text: str) -> SharedRecord:
        await asyncio.sleep(0)
        self._check()
        if (kind, key) in self.records:
            raise Conflict(f"{kind} {key} exists")
        return self._put(kind, key, text)

    async def replace(self, record: SharedRecord, text: str) -> SharedRecord:
        await asyncio.sleep(0)
        self._check()
        there = self.records.get((record.kind, record.key))
        if there is None or there.version != record.version:
            raise Conflict(f"{record.kind} {record.key} was changed")
        return self._put(record.kind, record.key, text)

    async def remove(self, record: SharedRecord) -> None:
        self._check()
        there = self.records.get((record.kind, record.key))
        if there is not None:
            if there.version != record.version:
                raise Conflict(f"{record.kind} {record.key} was changed")
            del self.records[record.kind, record.key]
            self.last += 1
            self._tell(SharedChange(replace(there, version=self.last), is_gone=True))

    async def follow(self) -> AsyncGenerator[SharedChange | None, None]:
        queue: asyncio.Queue[SharedChange | None] = asyncio.Queue()
        for record in self.records.values():
            queue.put_nowait(SharedChange(record))
        queue.put_nowait(None)
        self.followers.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self.followers.discard(queue)

    async def lead(self, name: str, who: str, seconds: int) -> bool:
        self._check()
        if self.leader[0] not in ("", who) and time.monotonic() < self.leader[1]:
            return False
        self.leader = who, time.monotonic() + seconds
        return True

    async def resign(self, name: str, who: str) -> None:
        if self.leader[0] == who:
            self.leader = "", 0.0


class SharingBackend(FakeBackend):
    """Its boxes are those of all backends with the same folder."""

    def __init__(self, folder: Path, records: MemoryRecords) -> None:
        super().__init__(lasting=str(folder))
        self._records = records

    async def shared_records(self) -> SharedRecords:
        return self._records


class Servers:
    """Some servers. One whose url is in `away` cannot be reached by the others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records = MemoryRecords()
        self.services: dict[str, Service] = {}
        self.away: set[str] = set()
        self.hung: set[str] = set()  # urls of servers that do not answer, and do not refuse
        self.forwarded: list[Operation[object]] = []

    async def start(self, name: str, rules: Rules | None = None) -> Service:
        url = f"http://{name}"
        folder, boxes = self._folder / name, self._folder / "boxes"
        for path in (folder / "run", boxes):
            path.mkdir(parents=True, exist_ok=True)
        backend = SharingBackend(boxes, self.records)
        self.services[url] = await Service.open(
            folder,
            backend,
            factory.images("kubernetes"),
            rules or Rules(),
            url=url,
            connect=lambda url, key: self._peer(url, key),
        )
        return self.services[url]

    def _peer(self, url: str, key: str) -> Peer:
        return _InProcess(self, url, key)

    async def stop(self, *, kill: bool = True) -> None:
        for service in self.services.values():
            await service.close(kill=kill)
        boxes = FakeBackend(lasting=str(self._folder / "boxes"))
        await boxes.close()


class _InProcess:
    """A Peer without HTTP."""

    def __init__(self, servers: Servers, url: str, key: str) -> None:
        self._servers, self._url, self._key = servers, url, key

    async def _find(self, operation: Operation[object]) -> tuple[Service, Caller]:
        while self._url in self._servers.hung:
            await asyncio.sleep(0.01)
        service = self._servers.services.get(self._url)
        if service is None or self._url in self._servers.away:
            raise PeerLost
        self._servers.forwarded.append(operation)
        return service, service.authenticate(self._key, local=False)

    async def perform(self, operation: Operation[T]) -> T:
        try:
            service, caller = await self._find(operation)
            return await service.perform(operation, caller)
        except Unauthorized as exc:
            raise PeerLost from exc

    async def stream(self, operation: StreamOperation[ItemT, T]) -> AsyncGenerator[ItemT, None]:
        try:
            service, caller = await self._find(operation)
            items = await service.stream(operation, caller)
            async with contextlib.aclosing(items):
                if operation.items is bytes:
                    yield cast(ItemT, b"")
                async for item in items:
                    yield item
        except Unauthorized as exc:
            raise PeerLost from exc

    async def dial(self, session: str, port: int) -> ByteStream:
        service, caller = await self._find(op.GetSession(session))
        return await service.dial(session, port, caller)


@contextlib.asynccontextmanager
async def servers(
    folder: Path, kind: Callable[[Path], Servers] = Servers
) -> AsyncIterator[Servers]:
    made = kind(folder)
    try:
        yield made
    finally:
        await made.stop()


async def opened(service: Service, caller: Caller = ADMIN, **more: str) -> BoxInfo:
    return await service.perform(op.OpenSession(min_isolation="none", **more), caller)


async def run(service: Service, id: str, command: str, caller: Caller = ADMIN) -> Result:
    return await service.perform(op.RunShell(id, command), caller)


class ServersOverHTTP(Servers):
    """The same, each with a port of its own. A server that is shut is not reached any more."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._listening: dict[str, HTTPServer] = {}

    async def start(self, name: str, rules: Rules | None = None) -> Service:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = ListenAddress("127.0.0.1", free.getsockname()[1])
        service = await super().start(f"127.0.0.1:{address.port}", rules)
        path = self._folder / f"127.0.0.1:{address.port}" / "run/hutch.sock"
        self._listening[name] = await HTTPServer.start(App(service), address, path)
        return service

    def _peer(self, url: str, key: str) -> Peer:
        return HttpPeer(url, key)

    async def shut(self, name: str) -> None:
        await self._listening.pop(name).stop(0)

    async def stop(self, *, kill: bool = True) -> None:
        for name in list(self._listening):
            await self.shut(name)
        await super().stop(kill=kill)
