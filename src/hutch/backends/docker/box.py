"""A box that is a container, once it is running (see launch.py)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hutch.backends.base import ByteStream
from hutch.backends.contained import ContainedBox, GuestConnector, failed
from hutch.backends.linux.cgroup import count_kills, parse
from hutch.errors import BoxLost, HutchError, NotFound
from hutch.types import Grade, Stats

from .engine import DockerEngine
from .owner_scope import DEGRADED, DIGEST

ENGINE_PATIENCE = 5  # seconds for the engine to remove a container
END_PATIENCE = 10  # seconds for a guest to exit, if the engine does not kill it


@dataclass(frozen=True)
class ContainerRecord:
    """What we know about a box from its container, whether we started it or adopted it."""

    container: str
    isolation: Grade
    runtime: str
    digest: str | None
    degraded: tuple[str, ...]
    guest: int = 0  # pid of its first process if that is on this machine, else 0

    @classmethod
    def of(
        cls, inspected: Mapping[str, Any], isolation: Grade, *, is_local: bool
    ) -> ContainerRecord:
        labels = inspected["Config"]["Labels"]
        return cls(
            container=inspected["Id"],
            isolation=isolation,
            runtime=inspected["HostConfig"]["Runtime"],
            digest=labels[DIGEST] or None,
            degraded=tuple(json.loads(labels[DEGRADED])),
            guest=inspected["State"]["Pid"] if is_local else 0,
        )


class DockerBox(ContainedBox):
    def __init__(
        self,
        id: str,
        record: ContainerRecord,
        engine: DockerEngine,
        connector: GuestConnector,
        *,
        lasts: bool,
        gone: Callable[[], None],
        first: ByteStream | None = None,
    ) -> None:
        super().__init__(
            id, connector, isolation=record.isolation, lasts=lasts, gone=gone, first=first
        )
        self.degraded = record.degraded
        self.digest, self.runtime = record.digest, record.runtime
        self._record, self._engine = record, engine
        self._kills = open_kills(record.guest) if record.guest else -1
        self._guest = open_guest(record.guest) if record.guest else -1

    @property
    def container(self) -> str:
        """The engine's id of its container."""
        return self._record.container

    async def _remove(self) -> None:
        removing = asyncio.ensure_future(self._engine.remove(self._record.container))
        try:
            # Wait only briefly if we can end the guest ourselves: the engine may be stopped.
            patience = ENGINE_PATIENCE if self._guest >= 0 else None
            await asyncio.wait([removing], timeout=patience)
            if not removing.done() or failed(removing):
                if await self._end_guest():
                    # The engine removes the container when it recovers: now, or later without us.
                    await asyncio.wait([removing], timeout=ENGINE_PATIENCE)
                elif not self._is_forgotten:
                    await removing
        finally:
            self._cut_off()
            removing.cancel()
            await asyncio.gather(removing, return_exceptions=True)

    async def _end_guest(self) -> bool:
        with contextlib.suppress(HutchError, TimeoutError):
            await asyncio.wait_for(self._connector.outlive(0), 1)
        self._cut_off()
        return await _ended(self._guest)

    def oom_kills(self) -> int | None:
        return count_kills(self._kills) if self._kills >= 0 else None

    async def stats(self) -> Stats:
        self._check()
        try:
            answer = await self._engine.stats(self._record.container)
        except NotFound:
            answer = None
        if not answer:  # a container that is being removed has none either
            raise BoxLost(f"box {self.id} is gone")
        return stats_of(answer, self.oom_kills())

    def forget(self) -> None:
        super().forget()
        if self._guest >= 0:
            os.close(self._guest)
            self._guest = -1

    def _cut_off(self) -> None:
        if self._kills >= 0:
            os.close(self._kills)
            self._kills = -1
        super()._cut_off()


def stats_of(answer: Mapping[str, Any], kills: int | None) -> Stats:
    spent = ((answer.get("cpu_stats") or {}).get("cpu_usage") or {}).get("total_usage")
    return Stats(
        memory=(answer.get("memory_stats") or {}).get("usage"),
        pids=(answer.get("pids_stats") or {}).get("current"),
        cpu_seconds=None if spent is None else spent / 1e9,
        oom_kills=kills,
    )


def open_kills(guest: int) -> int:
    """Open the file of its control group that counts OOM kills; -1 if it has no such file."""
    try:
        with open("/proc/self/mountinfo") as info, open(f"/proc/{guest}/cgroup") as own:
            found = parse(info.read(), own.read())
        if "memory" in found.v1:
            path = f"{found.v1['memory']}{found.own_v1['memory']}/memory.oom_control"
        else:
            path = f"{found.v2}{found.own_v2}/memory.events"
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, KeyError):
        return -1


def open_guest(guest: int) -> int:
    """A pidfd of the guest, as its pid may be reused after it exits. -1 if it has exited."""
    try:
        return os.pidfd_open(guest)
    except OSError:
        return -1


async def _ended(guest: int) -> bool:
    """Kill the guest if we may, and wait for its exit. False if it does not exit in time.

    For a guest without connections, which also exits by itself.
    """
    if guest < 0:
        return False
    handle = os.dup(guest)  # `forget` may close ours while we wait
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, over.set)
    try:
        with contextlib.suppress(OSError):  # an ordinary user may not
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        async with asyncio.timeout(END_PATIENCE):
            await over.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(handle)
        os.close(handle)
