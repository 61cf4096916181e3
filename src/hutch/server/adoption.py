"""Adoption: what a server does at its start with the sessions of the last run.

- A box that a row names is taken over.
- A session whose deadline has passed is ended; one whose box is gone has crashed.
- A session that cannot be taken over now (only another version of Hutch can use it, the disk is
  full, the backend does not answer) is kept as it is (`stranded.py`).
- Boxes, folders and files that no row names are removed.

What a crash interrupted is finished or undone. While there are sessions of another backend, the
server does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    IncompatibleBox,
    LimitReached,
    ServerUnavailable,
)
from hutch.types import State

from .sessions import Sessions
from .store import SessionRecord, Store

log = logging.getLogger("hutch")
AT_ONCE = 16
STOPPED = "the server was stopped"
# After these errors, the box or its saved state may still be there.
TEMPORARY = (BackendUnavailable, LimitReached, ServerUnavailable, TimeoutError, OSError)


@dataclass
class AdoptionReport:
    """How many sessions were adopted, and what became of the others."""

    adopted: int = 0
    expired: int = 0
    lost: int = 0
    stranded: int = 0  # kept for another version of Hutch, or another start
    swept: int = 0  # boxes without a session


async def adopt_all(sessions: Sessions, folder: Path) -> AdoptionReport:
    """`folder`: of all sessions. Raises Conflict if some of them are of another backend."""
    report = AdoptionReport()
    records = await sessions.store.live()
    _refuse_strangers(sessions, records)
    alive = set(await sessions.backend.list())
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(record: SessionRecord) -> None:
        async with turns:
            await _take_over(sessions, record, alive, report)

    await asyncio.gather(*(one(record) for record in records))
    owned = {record.box for record in records}
    for stray in alive - owned:
        await _kill(sessions, stray)
        report.swept += 1
    unknown = await sessions.store.unknown([place.name for place in folder.iterdir()])
    await asyncio.to_thread(_sweep_folders, folder, sessions, unknown)
    return report


def _refuse_strangers(sessions: Sessions, records: list[SessionRecord]) -> None:
    ours = sessions.backend.name
    strangers = [
        record.info.backend
        for record in records
        if record.info.backend != ours and not _is_due(sessions, record)
    ]
    if strangers:
        count = len(strangers)
        names = " and ".join(sorted(set(strangers)))
        raise Conflict(
            f"{count} {'sessions' if count > 1 else 'session'} of this folder "
            f"{'are' if count > 1 else 'is'} of {names}, not of {ours}: start with --backend "
            f"{strangers[0]}, or end {'them' if count > 1 else 'it'} first: hutch stop --kill"
        )


def _is_due(sessions: Sessions, record: SessionRecord) -> bool:
    left = sessions.seconds_left(record)
    return left is not None and left <= 0


async def _take_over(
    sessions: Sessions, record: SessionRecord, alive: set[str], report: AdoptionReport
) -> None:
    info = record.info
    if info.status == "destroying":
        await _end(sessions, record, alive, "destroyed", info.why or "it was closed")
        return
    if _is_due(sessions, record):
        report.expired += 1
        await _end(sessions, record, alive, "expired", "its deadline passed (ttl)")
        return
    if record.saved is None and record.box not in alive:
        report.lost += 1
        await _end(sessions, record, alive, "crashed", "its box died while no server was running")
        return
    try:
        await sessions.adopt(record)
        report.adopted += 1
    except TEMPORARY as exc:
        why = str(exc) or "its box did not answer in time"
        log.warning("session %s is kept, and cannot be used: %s", info.id, why)
        report.stranded += 1
        await sessions.stranded.add(record, why, temporary=not isinstance(exc, IncompatibleBox))
    except Exception as exc:  # a problem with one must not affect the others
        log.warning("session %s could not be adopted", info.id, exc_info=exc)
        report.lost += 1
        why = str(exc) or "its box did not answer"
        await _end(sessions, record, alive, "crashed", f"it could not be adopted: {why}")


async def take_over(sessions: Sessions, record: SessionRecord, why_closed: str = "") -> None:
    """Adopt a session whose server is gone, or end it if it is over.

    `why_closed`: end it whatever it is. Raises BackendUnavailable if that cannot be done now, and
    HeldElsewhere if another server was faster.
    """
    info, alive = record.info, {record.box} if record.box else set()
    if why_closed or info.status == "destroying":
        await _end(sessions, record, alive, "destroyed", why_closed or info.why or "it was closed")
        return
    if _is_due(sessions, record):
        await _end(sessions, record, alive, "expired", "its deadline passed (ttl)")
        return
    try:
        await sessions.adopt(record)
    except TEMPORARY as exc:
        sessions.discard(info.id)
        why = str(exc) or "its box did not answer in time"
        raise BackendUnavailable(f"session {info.id} cannot be taken over now: {why}") from None
    except HutchError as exc:
        await _end(sessions, record, alive, "crashed", f"it could not be taken over: {exc}")


async def close_all(store: Store) -> int:
    """Mark every session as ended, before all boxes are killed. Returns how many there were."""
    records = await store.live()
    for record in records:
        await store.update(record.info.id, status="destroyed", why=STOPPED, box=None, saved=None)
    return len(records)


async def _end(
    sessions: Sessions, record: SessionRecord, alive: set[str], status: State, why: str
) -> None:
    sessions.discard(record.info.id)
    ended_at = time.time()
    # Before its box is killed: otherwise a crash in between would look like a crash of the box.
    await sessions.store.update(
        record.info.id, status=status, why=why, ended_at=ended_at, box=None, saved=None
    )
    if record.box in alive:
        await _kill(sessions, record.box)


async def _kill(sessions: Sessions, box: str) -> None:
    try:
        await (await sessions.backend.adopt(box)).kill()
    except HutchError:
        pass  # it died just now


def _sweep_folders(folder: Path, sessions: Sessions, unknown: set[str]) -> None:
    """Remove folders of sessions that were never stored, and saved state that is not used."""
    for place in (path for path in folder.iterdir() if path.is_dir()):
        life = sessions.lives.get(place.name)
        if place.name in unknown:
            shutil.rmtree(place, ignore_errors=True)
            continue
        if place.name in sessions.stranded.all:
            continue
        kept = life.saved_files if life else set()
        for file in place.iterdir():
            is_left = file.name.startswith("asleep-") and file not in kept
            if is_left or (life is None and file.name != "journal.jsonl"):
                with contextlib.suppress(OSError):  # for example, a folder
                    file.unlink()
