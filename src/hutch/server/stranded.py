"""Sessions that may be healthy but cannot be used by this server.

After an upgrade or a downgrade, a session may have a box whose guest speaks no version of the
protocol that we do, or may have been saved in a format that we do not read. It is kept as it is:
neither its row nor its files change, it counts against quotas (except that of disk), it ends at its
deadline or when it is closed, and a server of a version that can use it finds it again. The same
holds for a session that could not be adopted for a temporary reason (a full disk, a backend that
does not answer): the next start tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from hutch.backends.base import Backend
from hutch.errors import BackendUnavailable, BoxLost, HutchError, IncompatibleBox
from hutch.types import BoxInfo, Limits, State

from .store import SessionRecord, Store
from .workspaces import Workspaces

log = logging.getLogger("hutch")


@dataclass(frozen=True)
class Stranded:
    record: SessionRecord
    why: str
    temporary: bool  # the next start may succeed; otherwise it needs another version

    @property
    def info(self) -> BoxInfo:
        """As it is in the store, and why it cannot be used."""
        return replace(self.record.info, why=self.why)


class StrandedSessions:
    """Those of all owners, by id."""

    def __init__(
        self,
        backend: Backend,
        store: Store,
        workspaces: Workspaces,
        seconds_left: Callable[[SessionRecord], float | None],
        clean_up: Callable[[str, State, str], None],
        ended: Callable[[BoxInfo], object] = lambda info: None,
    ) -> None:
        """`clean_up` is called, in a thread, with the id, status and reason of one that ended.

        `ended` is called with its record.
        """
        self._backend, self._store, self._workspaces = backend, store, workspaces
        self._seconds_left, self._clean_up, self._ended = seconds_left, clean_up, ended
        self.all: dict[str, Stranded] = {}

    def __len__(self) -> int:
        return len(self.all)

    def limits(self, owner: str) -> list[Limits]:
        infos = [stranded.record.info for stranded in self.all.values()]
        return [info.limits for info in infos if info.owner == owner]

    def check(self, id: str) -> None:
        """Raise BackendUnavailable, or IncompatibleBox, if this is one of them."""
        if stranded := self.all.get(id):
            why = stranded.why
            if stranded.temporary:
                raise BackendUnavailable(
                    f"session {id} could not be taken over when this server started: {why}. "
                    "It is kept, and the next start of the server tries again"
                )
            raise IncompatibleBox(
                f"session {id} cannot be used by this version of Hutch: {why}. It lives until "
                "its deadline; a server of the version that started it can use it"
            )

    async def add(self, record: SessionRecord, why: str, *, temporary: bool = False) -> None:
        info, left = record.info, self._seconds_left(record)
        if info.workspace_id is not None:
            exclusive = bool(record.request.get("exclusive"))
            self._workspaces.adopt(info.owner, info.workspace_id, info.id, exclusive=exclusive)
        if record.box is not None:
            # Best effort: the last server has set its deadline, too.
            with contextlib.suppress(HutchError, OSError):
                box = await self._backend.adopt(record.box)
                await box.outlive(math.inf if left is None else left)
        self.all[info.id] = Stranded(record, why, temporary)

    async def close(self, id: str, why: str) -> None:
        """Raises BackendUnavailable if its box cannot be ended from here."""
        if id in self.all:
            await self._kill(self.all[id].record)
            await self._forget(id, "destroyed", why)

    async def close_all(self, why: str) -> None:
        for id in list(self.all):
            with contextlib.suppress(HutchError):
                await self.close(id, why)

    async def expire(self) -> None:
        """End sessions whose deadline has passed. One that cannot be ended is tried again."""
        for id, stranded in list(self.all.items()):
            left = self._seconds_left(stranded.record)
            if left is None or left > 0:
                continue
            try:
                with contextlib.suppress(BackendUnavailable):  # its launcher ends it
                    await self._kill(stranded.record)
                await self._forget(id, "expired", "its deadline passed (ttl)")
            except (HutchError, OSError) as exc:
                log.warning(
                    "session %s, whose deadline has passed, could not be ended: %r", id, exc
                )

    async def _kill(self, record: SessionRecord) -> None:
        if record.box is None:
            return
        try:
            box = await self._backend.adopt(record.box)
        except BoxLost:
            return  # it is gone
        except IncompatibleBox as exc:
            raise BackendUnavailable(f"it cannot be closed from here: {exc}") from exc
        await box.kill()

    async def _forget(self, id: str, status: State, why: str) -> None:
        record = await self._store.update(
            id, status=status, why=why, ended_at=time.time(), box=None, saved=None
        )
        self.all.pop(id, None)
        self._ended(record.info)
        self._workspaces.release(id)
        await asyncio.to_thread(self._clean_up, id, status, why)
