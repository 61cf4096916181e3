"""Operations on workspaces, and on their files without a session.

The content of a workspace was written by boxes and is not trusted, so its files are only accessed
from inside a box, where the kernel enforces every path: a small box has the workspace mounted. It
runs no user code, and ends when it was not used for a minute.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from hutch import operations as op
from hutch import serving
from hutch.backends.base import Backend, Box
from hutch.engine.box_request import make_box_request, start
from hutch.engine.check import labels_of
from hutch.engine.engine import info_of
from hutch.engine.lifecycle import Lifecycle
from hutch.engine.link import pieces_of
from hutch.engine.outputs import Outputs
from hutch.engine.session import Numbers, Session
from hutch.engine.starts import Starts
from hutch.errors import HutchError, NotPermitted, QuotaReached
from hutch.operations import Handlers, Operation
from hutch.serving import Workspace
from hutch.types import BoxInfo, Limits, MiB, State

from .keys import Caller
from .workspaces import Workspaces

T = TypeVar("T")
Data = bytes | Iterable[bytes] | AsyncIterable[bytes]

IDLE = 60  # seconds
MOST, MOST_OF_AN_OWNER = 32, 4
LIMITS = Limits(memory=256 * MiB, cpus=1, pids=64)
# Operations that need free space, and make a workspace that does not exist yet.
WRITING = (op.WriteFile, op.MakeDir, serving.ImportWorkspace)
UPLOADS = (op.WriteFile, serving.ImportWorkspace)
MORE = ", and this is more than fits"
STAYS = " (what was unpacked before that stays)"
MEASURE_EVERY = 1  # seconds, while a tar is unpacked


class WorkspaceFiles:
    def __init__(
        self, backend: Backend, workspaces: Workspaces, folder: Path, starts: Starts
    ) -> None:
        """`folder`: for outputs that do not fit into memory. What is in it is removed."""
        self._backend, self._workspaces, self._folder = backend, workspaces, folder
        self._starts = starts
        # Bytes, since the server was started, to each workspace and to all of each owner: of all
        # uploads, and of those that have ended.
        self._sent: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        shutil.rmtree(folder, ignore_errors=True)
        self._open: dict[str, Lifecycle] = {}
        self._starting: set[str] = set()
        # A lock lives as long as a task holds it or waits for it, so there is never a second one
        # for the same workspace.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def of(self, owner: str, name: str, o: Operation[object]) -> Lifecycle:
        """A box with this workspace. Raises NotFound if it does not exist and `o` only reads.

        Raises NoSpace if it is over its quota and `o` makes folders.
        """
        room = not isinstance(o, UPLOADS)  # `perform` checks their size
        place = await self._workspaces.place(owner, name, make=isinstance(o, WRITING), room=room)
        id = f"{owner}/{name}"
        async with self._turns.setdefault(id, asyncio.Lock()):
            if id not in self._open:
                await self._workspaces.place(owner, name)  # it may have been removed just now
                self._starting.add(id)
                try:
                    await self._make_room(owner)
                    self._open[id] = await self._start(id, place, owner)
                finally:
                    self._starting.discard(id)
            return self._open[id]

    async def perform(
        self,
        owner: str,
        name: str,
        o: Operation[T],
        handler: Callable[[Session, Operation[T]], Awaitable[T]],
    ) -> T:
        """Carry out an operation. Raises NoSpace once an upload exceeds a quota.

        A file is then as it was before; files of a tar that were unpacked stay.
        """
        life = await self.of(owner, name, o)
        if not isinstance(o, UPLOADS):
            return await life.perform(o, handler)
        midway = MORE + STAYS if isinstance(o, serving.ImportWorkspace) else MORE
        upload: Counter[str] = Counter()
        data = await self._limited(owner, name, o.data, midway, upload)
        limited = cast(Operation[T], replace(o, data=data))
        working = asyncio.ensure_future(life.perform(limited, handler))
        try:
            # A tar.gz can unpack to far more than was sent, so the workspace is measured too.
            pause = 0.0
            while isinstance(o, serving.ImportWorkspace) and not working.done():
                await asyncio.wait([working], timeout=max(MEASURE_EVERY, pause))
                began = time.monotonic()
                self._workspaces.written(owner, name)
                for quota in await self._workspaces.measured_quotas(owner, name):
                    if quota.left < 0:
                        raise quota.error(MORE + STAYS)
                pause = 10 * (time.monotonic() - began)  # measuring many files takes time
            return await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
            self._workspaces.written(owner, name)
            self._ended.update(upload)

    async def _limited(
        self, owner: str, name: str, data: Data, midway: str, upload: Counter[str]
    ) -> Data:
        """The same data, which raises NoSpace where it does not fit any more.

        `midway`: the end of the error's message if part of the data was sent. `upload` counts
        what was sent.
        """
        # What an upload sent may not be on the disk until it has ended. So all that was sent by
        # others counts against our bound, unless they had ended before we measure.
        ended = {scope: self._ended[scope] for scope in (f"{owner}/{name}", owner)}
        quotas = await self._workspaces.measured_quotas(owner, name)
        if not quotas:
            return data
        length = len(data) if isinstance(data, bytes) else getattr(data, "length", None)
        for quota in quotas:
            if quota.left <= 0:
                raise quota.error()
            if length is not None and length > quota.left:
                raise quota.error(MORE)
        bounds = [(quota, ended[quota.scope] + quota.left) for quota in quotas]

        async def limited() -> AsyncGenerator[bytes, None]:
            async for piece in pieces_of(data):
                size = {f"{owner}/{name}": len(piece), owner: len(piece)}
                self._sent.update(size)
                upload.update(size)
                for quota, most in bounds:
                    if self._sent[quota.scope] > most:
                        raise quota.error(midway)
                yield piece

        return limited()

    async def _make_room(self, owner: str) -> None:
        """Close the least recently used boxes: these boxes are in no quota, so there are few.

        The box that is about to start is counted already, because others start concurrently.
        Raises QuotaReached if all of them are busy.
        """
        for prefix, most in ((f"{owner}/", MOST_OF_AN_OWNER), ("", MOST)):
            # Counted again after each await: boxes start and end in between.
            while sum(id.startswith(prefix) for id in {*self._open, *self._starting}) > most:
                idle = [
                    id
                    for id, life in self._open.items()
                    if id.startswith(prefix) and not life.is_busy
                ]
                if not idle:
                    raise QuotaReached(
                        f"{most} workspaces are being read or written without a session: wait for "
                        "one, or open a session"
                    )
                await self.end(min(idle, key=lambda id: self._open[id].last_used), "destroyed", "")

    async def _start(self, id: str, place: Path, owner: str) -> Lifecycle:
        image = self._backend.plain_image
        o = op.OpenSession(image, limits=LIMITS, idle=IDLE, idle_hibernate=None)
        workspace = os.path.realpath(place)
        request = await make_box_request(o, self._backend, None, workspace=workspace)
        ready = await start(self._backend, request, turn=self._starts.turn(owner))
        info = info_of(id, self._backend.name, request, o, ready)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        outputs = Outputs(self._folder, LIMITS.output)
        session = Session(info, ready.box, ready.link, outputs, request.kernel_idle, Numbers())
        return Lifecycle(info, _never, outputs, self, session=session)

    async def keep(self, info: BoxInfo, box: Box | None, manifest: Path | None) -> None:
        """Nothing to record: the next operation starts another box."""

    async def end(self, id: str, status: State, why: str) -> None:
        if life := self._open.pop(id, None):
            await life.close()

    async def taken_over(self, id: str) -> HutchError | None:
        return None

    # --- operations on a workspace as a whole -----------------------------------------------

    async def _list(self, o: serving.ListWorkspaces, caller: Caller) -> list[Workspace]:
        workspaces = await self._workspaces.list(_owner_of(o, caller))
        return [w for w in workspaces if not caller.workspaces or w.id in caller.workspaces]

    async def _make(self, o: serving.MakeWorkspace, caller: Caller) -> Workspace:
        caller.check_workspace(o.id)
        most = self._workspaces.default_quota
        if o.quota and most and o.quota > most and not caller.may("admin"):
            raise NotPermitted(f"a quota of more than {most} bytes needs an admin key")
        return await self._workspaces.make(caller.owner, o.id, labels_of(o.labels), o.quota)

    async def _get(self, o: serving.GetWorkspace, caller: Caller) -> Workspace:
        caller.check_workspace(o.workspace)
        return await self._workspaces.get(_owner_of(o, caller), o.workspace)

    async def _set_quota(self, o: serving.SetWorkspaceQuota, caller: Caller) -> Workspace:
        return await self._workspaces.set_quota(o.owner or caller.owner, o.workspace, o.quota)

    async def _remove(self, o: serving.RemoveWorkspace, caller: Caller) -> None:
        caller.check_workspace(o.workspace)
        await self.remove(_owner_of(o, caller), o.workspace)

    async def _export(
        self, o: serving.ExportWorkspace, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        caller.check_workspace(o.workspace)
        life = await self.of(_owner_of(o, caller), o.workspace, o)
        return await life.stream(o, _tar)

    async def _import(self, o: serving.ImportWorkspace, caller: Caller) -> int:
        caller.check_workspace(o.workspace)
        return await self.perform(caller.owner, o.workspace, o, _untar)

    async def remove(self, owner: str, name: str) -> None:
        """Remove a workspace. Raises as `Workspaces.remove`. No box starts before it is gone."""
        id = f"{owner}/{name}"
        async with self._turns.setdefault(id, asyncio.Lock()):
            await self.end(id, "destroyed", "")
            await self._workspaces.remove(owner, name)

    async def close_all(self) -> None:
        for id in list(self._open):
            await self.end(id, "destroyed", "")
        shutil.rmtree(self._folder, ignore_errors=True)


async def _never(info: BoxInfo) -> Session:
    raise AssertionError(f"{info.id} has no sleep to wake from")


def _owner_of(
    o: serving.ListWorkspaces
    | serving.GetWorkspace
    | serving.RemoveWorkspace
    | serving.ExportWorkspace,
    caller: Caller,
) -> str:
    """The owner whose workspaces are meant. Raises NotPermitted if that needs an admin key."""
    caller.check_owner(o.owner, "workspaces need")
    return o.owner or caller.owner


async def _tar(session: Session, o: Operation[object]) -> AsyncGenerator[bytes, None]:
    return session.tar()


async def _untar(session: Session, o: Operation[int]) -> int:
    assert isinstance(o, serving.ImportWorkspace)
    return await session.untar(o.data)


WORKSPACE_HANDLERS = Handlers(
    serving.ListWorkspaces.by(WorkspaceFiles, WorkspaceFiles._list),
    serving.MakeWorkspace.by(WorkspaceFiles, WorkspaceFiles._make),
    serving.GetWorkspace.by(WorkspaceFiles, WorkspaceFiles._get),
    serving.RemoveWorkspace.by(WorkspaceFiles, WorkspaceFiles._remove),
    serving.SetWorkspaceQuota.by(WorkspaceFiles, WorkspaceFiles._set_quota),
    serving.ExportWorkspace.streamed_by(WorkspaceFiles, WorkspaceFiles._export),
    serving.ImportWorkspace.by(WorkspaceFiles, WorkspaceFiles._import),
)
