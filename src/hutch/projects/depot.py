"""Folders that were installed once, by what they hold, and are shown to any number of boxes.

    projects/installed/<name>           finished; it never changes
    projects/installed/<name>.lock      who uses it, and who is about to make or remove it
    projects/installed/<name>.building  one in the making; if nobody has the lock, it is rubbish

What nobody used for a month goes when the next one is made.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from hutch.errors import BackendUnavailable, HutchError
from hutch.images.installer import remove_tree
from hutch.images.locks import lock, locked
from hutch.images.progress import Display
from hutch.images.store import data_dir
from hutch.images.uv import Progress, Report

BUILDING = ".building"
KEPT = 30 * 24 * 3600  # seconds that one is kept after it was last used

# Fills a folder that is there and empty; answers notes. The descriptor is for whom it starts.
Fill = Callable[[Path, int, Report], list[str]]


class Depot:
    """What a process uses of it, held until `close`."""

    def __init__(self) -> None:
        self._held: list[int] = []

    async def have(self, name: str, fill: Fill) -> tuple[Path, list[str]]:
        """The folder of this name, filled now if it is not there; and notes of the filling.

        Many processes may ask together: one fills it, the others wait. However that ends, there
        is the whole folder or none.
        """
        given_up = False

        def report(progress: Progress) -> None:
            if given_up:
                raise HutchError("nobody waits for this any more")
            if display:
                display(progress)

        with Display("project") if os.isatty(2) else nullcontext() as display:
            work = asyncio.ensure_future(asyncio.to_thread(self._have, name, fill, report))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                given_up = True
                await asyncio.gather(work, return_exceptions=True)
                raise

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _have(self, name: str, fill: Fill, report: Report) -> tuple[Path, list[str]]:
        folder, notes = data_dir() / "projects/installed" / name, list[str]()
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            while True:
                shared = lock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB) if folder.is_dir() else None
                if shared is not None and folder.is_dir():
                    os.utime(shared)  # when it was last used
                    self._held.append(shared)
                    return folder, notes
                if shared is not None:
                    os.close(shared)
                notes = self._make(folder, fill, report)
        except BlockingIOError:
            return self._have(name, fill, report)  # it is just being removed
        except OSError as exc:
            raise BackendUnavailable(
                f"{folder.parent} cannot be used ({exc.strerror}); set HUTCH_DATA_DIR"
            ) from exc

    def _make(self, folder: Path, fill: Fill, report: Report) -> list[str]:
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held is None:
                report(Progress("waiting"))
                time.sleep(0.1)  # and not for the lock itself: nobody could break that off
                return []
            if folder.is_dir():
                return []
            _sweep(folder.parent, folder.name)
            work = folder.with_name(folder.name + BUILDING)
            try:
                remove_tree(work)
                work.mkdir()
                notes = fill(work, held, report)
                work.rename(folder)
            finally:
                remove_tree(work)
            return notes


def _sweep(place: Path, mine: str) -> None:
    """Remove what was not used for long, and what was left by those who were killed.

    Best-effort: what cannot be removed is none of the caller's business.
    """
    for found in place.iterdir():
        name = found.name.partition(BUILDING)[0]
        if not found.is_dir() or name == mine:
            continue
        with suppress(OSError):
            _remove_unused(place, found, name)


def _remove_unused(place: Path, found: Path, name: str) -> None:
    folder = place / name
    used = place / f"{name}.lock"
    fresh = used.exists() and time.time() - used.stat().st_mtime < KEPT
    if found == folder and fresh:
        return
    with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        if held is not None:
            doomed = folder.with_name(name + BUILDING)
            if found == folder:  # first under another name: one with its own is always whole
                remove_tree(doomed)
                folder.rename(doomed)
            remove_tree(doomed)
