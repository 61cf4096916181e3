"""Workspaces: named folders of an owner that outlive sessions.

Their rows are in the store, their files in `root/OWNER/ID`. Which sessions use them is kept in
memory here, and adopted sessions are added again. A name is claimed before the first await, so
two concurrent requests never both get exclusive use.

To remove one: its row is marked, its folder is moved to the trash, its row is deleted, and then the
trash is emptied. If a crash interrupts that, `recover` continues.

With `kernel`, a new workspace that has a quota is a file system of its own (`volumes.py`), and its
quota is not measured.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar

from hutch.errors import Conflict, InvalidRequest, NoSpace, NotFound
from hutch.serving import Workspace
from hutch.types import MiB

from . import trees
from .store import Store
from .volumes import IMAGE, MIN_SIZE, Volume, obstacle, remove_half_made, volumes_in

ID = re.compile(r"(?=.{2,64}\Z)[a-z0-9][a-z0-9-]*[a-z0-9]")
OWNER = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
PASSING = 600  # seconds that a user without a session may still write
MOST = 1000  # of one owner
TRASH = ".trash"  # no owner's name
# In the record of a session whose workspace has a quota.
MEASURED = "disk quota of its workspace: measured every few seconds, not enforced by the kernel"
# Likewise, if the kernel limits the workspace and its owner has a quota for all of them.
SUM_MEASURED = "disk quota of its owner: the sum of workspaces is measured every few seconds"

T = TypeVar("T")


class WorkspaceName(NamedTuple):
    owner: str
    id: str


class OverQuota(NamedTuple):
    """A workspace that exceeds a quota, and the sessions that can write to it."""

    owner: str
    id: str
    size: int
    quota: int
    sessions: tuple[str, ...]
    what: str  # the subject and verb of a sentence: "its workspace has"

    @property
    def why(self) -> str:
        return f"{self.what} {self.size} bytes, and may have {self.quota}"


class MeasuredQuota(NamedTuple):
    """A quota that the kernel does not enforce."""

    scope: str  # OWNER/ID for that of a workspace, else OWNER
    what: str  # the subject and verb of a sentence: "workspace x has"
    used: int
    quota: int
    advice: str

    @property
    def left(self) -> int:
        return self.quota - self.used

    def error(self, more: str = "") -> NoSpace:
        return NoSpace(
            f"{self.what} {_shown(self.used)} of {_shown(self.quota)}{more}: {self.advice}, or "
            "ask the operator for a larger quota"
        )


class Workspaces:
    """`disk_quota` says what all workspaces and sleeping sessions of an owner may have together.

    `kernel`: new ones with a quota are file systems of their own.
    """

    def __init__(
        self,
        root: Path,
        store: Store,
        default_quota: int | None = None,
        disk_quota: Callable[[str], int | None] = lambda owner: None,
        *,
        kernel: bool = False,
    ) -> None:
        self._root, self._store, self._kernel = root, store, kernel
        self.default_quota, self._disk_quota = default_quota, disk_quota
        self._uses: dict[WorkspaceName, dict[str, bool]] = {}  # session: exclusive
        # When each was last used without a session, on the monotonic clock.
        self._passed: dict[WorkspaceName, float] = {}
        self._removing: set[WorkspaceName] = set()
        self._stop = Event()
        self._sizes = trees.FolderSizes(self._stop)
        self._sweeping = asyncio.Lock()
        self._sweeps: set[asyncio.Task[object]] = set()
        self.asleep_size: Callable[[str], int] = lambda owner: 0  # set by the sessions
        self._mounting = asyncio.Lock()  # held while a volume is made, mounted or removed

    # --- making and removing ------------------------------------------------------------

    async def recover(self) -> None:
        """Finish what a crash interrupted. Call it once, before everything else.

        A folder or volume without a row belongs to a store that was lost: it gets a row again.
        Raises InvalidRequest if volumes are configured, or exist, and do not work on this machine.
        """
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        await asyncio.to_thread(self._check_volumes)
        for owner, id in await self._store.marked_workspaces():
            await self._finish_removal(WorkspaceName(owner, id))
        known = {(row.owner, row.id) for row in await self._store.list_workspaces()}
        for name in await asyncio.to_thread(self._folders):
            if name not in known:
                quota = self._volume(name).size
                row = Workspace(name.id, name.owner, time.time(), quota=quota)
                await self._store.insert_workspace(row)
        self._sweep_behind()

    async def make(
        self, owner: str, id: str, labels: Mapping[str, str] | None = None, quota: int | None = None
    ) -> Workspace:
        """Make a workspace. Raises Conflict if the name is taken, and InvalidRequest."""
        name = _checked(owner, id)
        if quota is not None and quota <= 0:
            raise InvalidRequest(f"the quota of a workspace must be more than 0, not {quota}")
        if name in self._removing:
            raise _is_being_removed(name)
        row = Workspace(id, owner, time.time(), dict(labels or {}), quota=quota)
        limit = self._limit(row)
        if self._kernel and limit is not None and limit < MIN_SIZE:
            raise InvalidRequest(
                f"the quota of a workspace must be at least {_shown(MIN_SIZE)} on this server, "
                f"not {_shown(limit)}: each one is a file system"
            )
        await self._store.insert_workspace(row, MOST)
        await self._provide(name)
        return self._told(row)

    async def get(self, owner: str, id: str, *, measure: bool = True) -> Workspace:
        """A workspace, with its size unless `measure` is false. Raises NotFound."""
        name = _checked(owner, id)
        row = await self._row(name)
        if not measure:
            return replace(self._told(row), size=None)
        volume = self._volume(name)
        size = volume.used() if volume.exists() else await self._sizes.now(self._folder(name))
        return replace(self._told(row), size=size)

    async def set_quota(self, owner: str, id: str, quota: int | None) -> Workspace:
        """Change a quota; None: the default. A workspace that has more takes nothing more.

        Raises InvalidRequest, NotFound, and Conflict if it is a volume, which cannot grow.
        """
        name = _checked(owner, id)
        if quota is not None and not 0 < quota < 1 << 62:
            raise InvalidRequest(f"the quota of a workspace must be more than 0, not {quota}")
        async with self._mounting:  # so that it is not made a volume at the same time
            size = self._volume(name).size
            wanted = quota or self.default_quota
            if size is not None and (wanted is None or wanted > size):
                raise Conflict(
                    f"workspace {id} is a file system of {_shown(size)}, which cannot grow: "
                    "export it, and import it into a new one"
                )
            if not await self._store.set_workspace_quota(owner, id, quota):
                raise NotFound(f"there is no workspace {id}")
        return await self.get(owner, id)

    async def remove(self, owner: str, id: str) -> None:
        """Remove a workspace with all its files. Raises Conflict while it is used, and NotFound.

        The name is free when this returns; files of a large one are removed in the background.
        """
        name = _checked(owner, id)
        if users := self.in_use(*name):
            raise Conflict(f"workspace {name.id} is used by {_named(users)}: close that first")
        if name in self._removing:
            raise _is_being_removed(name)
        self._removing.add(name)
        try:
            if not await self._store.mark_workspace(*name):
                raise NotFound(f"there is no workspace {name.id}")
            await self._finish_removal(name)
        finally:
            self._removing.discard(name)
        self._sweep_behind()

    async def close(self) -> None:
        """End what runs in threads. Trash that is left is removed at the next start.

        Volumes that no session uses are unmounted.
        """
        self._stop.set()
        await asyncio.gather(*self._sweeps, return_exceptions=True)
        async with self._mounting:
            await asyncio.to_thread(self._unmount_unused)

    # --- users --------------------------------------------------------------------------

    async def use(
        self, owner: str, id: str, session: str, *, exclusive: bool = False, room: bool = True
    ) -> Path:
        """The folder, which the session uses until `release`. It is made if it does not exist.

        Raises Conflict if another session uses it exclusively, or if this one wants to and it is
        in use. Raises NoSpace if it is full; not with `room=False`, for reading and removing.
        """
        name = _checked(owner, id)
        had = session in self._uses.get(name, {})
        self._claim(name, session, exclusive)
        try:
            if await self._store.get_workspace(owner, id) is None:
                with suppress(Conflict):  # another made it just now
                    await self.make(owner, id)
            folder = await self._provide(name)
            if room:
                await self.check_room(owner, id)
        except BaseException:
            if not had:
                self.release(session)
            raise
        return folder

    async def place(self, owner: str, id: str, *, make: bool = False, room: bool = True) -> Path:
        """The folder, for short use without a session. Raises NotFound if it does not exist.

        `make`: for writing. It is made if needed, and NoSpace is raised if it is full; not with
        `room=False`, for callers that check `measured_quotas` themselves.
        """
        name = _checked(owner, id)
        if make:
            if name in self._removing:
                raise _is_being_removed(name)
            if await self._store.get_workspace(owner, id) is None:
                with suppress(Conflict):  # another made it just now
                    await self.make(owner, id)
            await self._row(name)
            if name in self._removing:  # since we asked: its folder must not come back
                raise _is_being_removed(name)
            await self._provide(name)
            if room:
                await self.check_room(owner, id)
        await self._row(name)
        if self._volume(name).exists():
            await self._provide(name)
        # The caller may remove files, and then should not be told that it is still full.
        self._sizes.forget(self._folder(name))
        self._passed[name] = time.monotonic()
        return self._folder(name)

    def written(self, owner: str, id: str) -> None:
        """Note that it was written to without a session: its size is measured again."""
        self._sizes.forget(self._folder(_checked(owner, id)))

    def adopt(self, owner: str, id: str, session: str, *, exclusive: bool = False) -> Path:
        """As `use`, for a session that was started by an earlier server."""
        name = _checked(owner, id)
        self._uses.setdefault(name, {})[session] = exclusive
        return self._folder(name)

    def release(self, session: str) -> None:
        """End the use of a session. Nothing happens if it uses no workspace."""
        for name, users in list(self._uses.items()):
            if session in users:
                del users[session]
                self._sizes.forget(self._folder(name))
                if not users:
                    del self._uses[name]

    def in_use(self, owner: str, id: str) -> tuple[str, ...]:
        """The sessions that use it, also those of other servers."""
        here = self._uses.get(WorkspaceName(owner, id), {})
        return tuple({**here, **self._store.workspace_users(owner, id)})

    # --- sizes and quotas ---------------------------------------------------------------

    async def check_room(self, owner: str, id: str) -> None:
        """Raises NoSpace if nothing more may be written to it."""
        for measured in await self.measured_quotas(owner, id):
            if measured.left <= 0:
                raise measured.error()

    async def measured_quotas(self, owner: str, id: str) -> tuple[MeasuredQuota, ...]:
        """The quotas that apply to it and are not enforced by the kernel."""
        name = _checked(owner, id)
        row = await self._row(name)
        quotas = []
        quota, whole = row.quota or self.default_quota, self._disk_quota(owner)
        # A full volume can be used: the kernel refuses writes to it with ENOSPC.
        if quota is not None and not self._is_enforced(row):
            used = await self._size(name)
            what = f"workspace {id} has"
            quotas.append(MeasuredQuota(f"{owner}/{id}", what, used, quota, "remove files from it"))
        if whole is not None:
            quotas.append(_of_owner(owner, await self.disk_used(owner), whole))
        return tuple(quotas)

    async def check_disk(self, owner: str, more: int) -> None:
        """Raises NoSpace if this many bytes more would exceed the disk quota of the owner."""
        whole = self._disk_quota(owner)
        if whole is not None and (used := await self.disk_used(owner)) + more > whole:
            raise _of_owner(owner, used, whole).error(", which leaves too little")

    async def degraded(self, owner: str, id: str | None) -> tuple[str, ...]:
        """The quotas that the kernel does not enforce, for the record of a session."""
        if id is None:
            return ()
        row = await self._row(_checked(owner, id))
        whole = self._disk_quota(owner)
        if self._is_enforced(row):
            return () if whole is None else (SUM_MEASURED,)
        return () if self._limit(row) is None else (MEASURED,)

    async def disk_used(self, owner: str) -> int:
        """Bytes used by all workspaces and sleeping sessions of an owner."""
        return await self._workspaces_size(owner) + self.asleep_size(owner)

    async def over_quota(self) -> tuple[OverQuota, ...]:
        """Workspaces in use that exceed their quota, or whose owner's workspaces together do.

        Sleeping sessions do not count here: users of a workspace did not make them large. Call it
        from time to time.
        """
        over = []
        for name in list(self._uses):
            row = await self._store.get_workspace(*name)
            quota = (row.quota if row else None) or self.default_quota
            whole = self._disk_quota(name.owner)
            sessions = self.in_use(*name)
            is_measured = quota is not None and not (row and self._is_enforced(row))
            if quota is not None and is_measured and (size := await self._size(name)) > quota:
                over.append(OverQuota(*name, size, quota, sessions, "its workspace has"))
            elif whole is not None and (size := await self._workspaces_size(name.owner)) > whole:
                what = f"the workspaces of {name.owner} together have"
                over.append(OverQuota(*name, size, whole, sessions, what))
        return tuple(over)

    async def _workspaces_size(self, owner: str) -> int:
        rows = await self._store.list_workspaces(owner)
        return sum([await self._size(WorkspaceName(owner, row.id)) for row in rows])

    async def _size(self, name: WorkspaceName) -> int:
        volume = self._volume(name)
        if volume.exists():
            return volume.used()
        folder = self._folder(name)
        passed = self._passed.get(name)
        quiet = name not in self._uses and (passed is None or time.monotonic() > passed + PASSING)
        if quiet and (known := self._sizes.known(folder)) is not None:
            return known  # nothing could have changed it
        return await self._sizes.recent(folder)

    # --- inside -------------------------------------------------------------------------

    def _claim(self, name: WorkspaceName, session: str, exclusive: bool) -> None:
        if name in self._removing:
            raise _is_being_removed(name)
        uses = {**self._store.workspace_users(*name), **self._uses.get(name, {})}
        others = {s: alone for s, alone in uses.items() if s != session}
        if alone := [s for s, alone in others.items() if alone]:
            raise Conflict(
                f"session {alone[0]} has exclusive use of workspace {name.id}: close it first, or "
                "wait until it ends"
            )
        if exclusive and others:
            raise Conflict(
                f"workspace {name.id} is used by {_named(tuple(others))}: for exclusive use, close "
                "that first"
            )
        self._uses.setdefault(name, {})[session] = exclusive

    async def _row(self, name: WorkspaceName) -> Workspace:
        row = await self._store.get_workspace(*name)
        if row is None:
            raise NotFound(f"there is no workspace {name.id}")
        return row

    def _told(self, row: Workspace) -> Workspace:
        name = WorkspaceName(row.owner, row.id)
        volume = self._volume(name)
        return replace(
            row,
            size=volume.used() if volume.exists() else self._sizes.known(self._folder(name)),
            quota=row.quota or self.default_quota,
            sessions=self.in_use(row.owner, row.id),
        )

    def _folder(self, name: WorkspaceName) -> Path:
        volume = self._volume(name)
        return volume.folder if volume.exists() else self._plain(name)

    def _plain(self, name: WorkspaceName) -> Path:
        return self._root / name.owner / name.id

    def _make_folder(self, name: WorkspaceName) -> Path:
        folder = self._plain(name)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise NoSpace(f"no folder for workspace {name.id} on the server: {exc}") from exc
        return folder

    def _folders(self) -> tuple[WorkspaceName, ...]:
        """The workspaces that have a folder or a volume."""
        plain = [
            WorkspaceName(folder.parent.name, folder.name)
            for folder in sorted(self._root.glob("*/*"))
            if folder.is_dir() and not folder.is_symlink()
        ]
        names = dict.fromkeys([*plain, *self._volumes()])
        return tuple(n for n in names if OWNER.fullmatch(n.owner) and ID.fullmatch(n.id))

    async def _finish_removal(self, name: WorkspaceName) -> None:
        volume, folder = self._volume(name), self._plain(name)
        if volume.exists() or volume.mountpoint.exists():
            await self._to_the_end(self._remove_volume(volume))
        trees.discard(folder, self._root / TRASH)
        self._sizes.forget(folder)
        self._passed.pop(name, None)
        await self._store.remove_workspace(*name)

    # --- volumes ------------------------------------------------------------------------

    def _volume(self, name: WorkspaceName) -> Volume:
        return Volume(self._root / name.owner / f"{name.id}{IMAGE}")

    def _volumes(self) -> dict[WorkspaceName, Volume]:
        volumes = volumes_in(self._root)
        return {WorkspaceName(v.image.parent.name, v.image.stem): v for v in volumes}

    def _limit(self, row: Workspace) -> int | None:
        """The most that this workspace can have, by its own quota and by its owner's."""
        limits = (row.quota or self.default_quota, self._disk_quota(row.owner))
        return min((limit for limit in limits if limit is not None), default=None)

    def _is_enforced(self, row: Workspace) -> bool:
        """Whether its volume enforces its quota: not if the quota was set or lowered later."""
        size, limit = self._volume(WorkspaceName(row.owner, row.id)).size, self._limit(row)
        return size is not None and (limit is None or size <= limit)

    def _check_volumes(self) -> None:
        remove_half_made(self._root)
        if (self._kernel or self._volumes()) and (why := obstacle(self._root)):
            wanted = 'workspace.quota_mode is "kernel"'
            raise InvalidRequest(f"{wanted if self._kernel else 'there are volumes'}, and {why}")

    async def _provide(self, name: WorkspaceName) -> Path:
        """The folder, made or mounted if needed. Raises NotFound if there is no such workspace."""
        if not self._kernel and not self._volume(name).exists():
            return self._make_folder(name)
        return await self._to_the_end(self._provide_volume(name))

    async def _provide_volume(self, name: WorkspaceName) -> Path:
        async with self._mounting:
            row = await self._row(name)  # it may have been removed while we waited
            volume, limit = self._volume(name), self._limit(row)
            if not volume.exists() and (limit is None or self._plain(name).exists()):
                return self._make_folder(name)
            try:
                await asyncio.to_thread(volume.provide, limit)
            except OSError as exc:
                raise NoSpace(f"no volume for workspace {name.id} on the server: {exc}") from exc
            return volume.folder

    async def _remove_volume(self, volume: Volume) -> None:
        async with self._mounting:
            await asyncio.to_thread(volume.remove)

    def _unmount_unused(self) -> None:
        for name, volume in self._volumes().items():
            if name not in self._uses:
                volume.unmount()

    async def _to_the_end(self, work: Coroutine[object, object, T]) -> T:
        """Finish the work even if the caller is cancelled: its thread would continue anyway."""
        task = asyncio.ensure_future(work)
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)
        return await asyncio.shield(task)

    # --- the trash ----------------------------------------------------------------------

    def _sweep_behind(self) -> None:
        task = asyncio.create_task(self._sweep())
        self._sweeps.add(task)
        task.add_done_callback(self._sweeps.discard)

    async def _sweep(self) -> None:
        async with self._sweeping:
            # What cannot be removed now is tried again by the next sweep.
            with suppress(OSError, trees.WalkStopped):
                await asyncio.to_thread(trees.sweep, self._root / TRASH, self._stop)

    # Last, because it hides the type `list` from what follows.
    async def list(self, owner: str | None = None) -> list[Workspace]:
        """By owner and name, with the sizes that are known."""
        return [self._told(row) for row in await self._store.list_workspaces(owner)]


def _checked(owner: str, id: str) -> WorkspaceName:
    return WorkspaceName(check_owner(owner), checked_id(id))


def check_owner(owner: str) -> str:
    """Raises InvalidRequest if it is not a name for an owner."""
    if not OWNER.fullmatch(owner):
        raise InvalidRequest(
            "an owner is 1 to 63 of a-z, 0-9, '_', '.' and '-', and begins with a letter or "
            f"digit, not {owner[:80]!r}"
        )
    return owner


def checked_id(id: str) -> str:
    """Raises InvalidRequest if it is not a name for a workspace."""
    if not ID.fullmatch(id):
        raise InvalidRequest(
            "the name of a workspace has 2 to 64 of a-z, 0-9 and '-', and begins and ends with a "
            f"letter or digit: {id[:80]!r} does not"
        )
    return id


def _of_owner(owner: str, used: int, quota: int) -> MeasuredQuota:
    what = f"the workspaces and sleeping sessions of {owner} have"
    return MeasuredQuota(owner, what, used, quota, "remove one, or files of one")


def _is_being_removed(name: WorkspaceName) -> Conflict:
    return Conflict(f"workspace {name.id} is being removed: try again in a moment")


def _named(sessions: tuple[str, ...]) -> str:
    more = f" and {len(sessions) - 3} more" if len(sessions) > 3 else ""
    return f"session {', '.join(sessions[:3])}{more}"


def _shown(size: int) -> str:
    return f"{size / MiB:,.1f} MiB"
