"""The files of a workspace without a session: a small box has it open for a while.

What a workspace holds was written by boxes and is not to be trusted; so it is only ever looked
at from inside one, where the kernel enforces every path. The box runs nothing of the user's, and
goes when nobody has used it for a minute.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hutch import operations as op
from hutch import serving
from hutch.backends.base import Backend, Box
from hutch.types import BoxInfo, Limits, MiB, Mount, State

from .engine import info_of
from .lifecycle import Lifecycle
from .order import order_of, start
from .outputs import Outputs
from .session import Numbers, Session
from .workspaces import Workspaces

IDLE = 60  # seconds
LIMITS = Limits(memory=256 * MiB, cpus=1, pids=64)
# What needs room in a workspace, and makes one that is not there yet.
WRITING = (op.WriteFile, op.MakeDir, serving.ImportWorkspace)


class WorkspaceFiles:
    def __init__(self, backend: Backend, workspaces: Workspaces) -> None:
        self._backend, self._workspaces = backend, workspaces
        self._open: dict[str, Lifecycle] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hutch-files-")

    async def of(self, owner: str, name: str, o: op.Operation) -> Lifecycle:
        """A box on this workspace. NotFound if there is none, and `o` only looks at it.

        NoSpace if it is over its quota, and `o` writes.
        """
        place = await self._workspaces.place(owner, name, make=isinstance(o, WRITING))
        id = f"{owner}/{name}"
        async with self._turns.setdefault(id, asyncio.Lock()):
            if id not in self._open:
                self._open[id] = await self._start(id, place)
            return self._open[id]

    async def _start(self, id: str, place: Path) -> Lifecycle:
        o = op.OpenSession(
            limits=LIMITS, mounts=(Mount(str(place), "/workspace"),), idle=IDLE, idle_hibernate=None
        )
        order = await order_of(o, None)
        ready = await start(self._backend, order)
        info = info_of(id, self._backend.name, order, o, ready)
        outputs = Outputs(Path(self._folder.name), LIMITS.output)
        session = Session(
            info, ready.box, ready.link, outputs, order.gentle, Numbers()
        )  # fmt: skip
        return Lifecycle(info, _never, outputs, self, session=session)

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """There is nothing to keep: the next one who asks gets another box."""

    async def end(self, id: str, status: State, why: str) -> None:
        if life := self._open.pop(id, None):
            await life.close()

    async def close(self, owner: str, name: str) -> None:
        await self.end(f"{owner}/{name}", "destroyed", "")

    async def close_all(self) -> None:
        for id in list(self._open):
            await self.end(id, "destroyed", "")
        self._folder.cleanup()


async def _never(info: BoxInfo) -> Session:
    raise AssertionError(f"{info.id} has no sleep to wake from")
