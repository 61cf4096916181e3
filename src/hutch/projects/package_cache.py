"""A cache of installed packages, keyed by content and shared by any number of boxes.

    projects/installed/<name>           finished; it never changes
    projects/installed/<name>.lock      held by its users, and while it is made or removed
    projects/installed/<name>.notes     notes of its installation, repeated at each use
    projects/installed/<name>.building  unfinished; stale if the lock is free

Folders that were not used for a month are removed when the next one is made.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hutch.errors import BackendUnavailable
from hutch.images.installer import remove_in_background, remove_tree
from hutch.images.locks import lock, locked
from hutch.images.progress import Display
from hutch.images.stopping import WorkStopped, in_thread
from hutch.images.store import data_dir
from hutch.images.uv import Progress, Report

from .reading import InstallNote

BUILDING = ".building"
KEPT = 30 * 24 * 3600  # seconds that one is kept after it was last used

# Fills an empty folder, and returns notes. The descriptor is inherited by the processes it starts.
Fill = Callable[[Path, int, Report], list[InstallNote]]


class PackageCache:
    """The folders that this process uses, locked until `close`."""

    def __init__(self) -> None:
        self._held: list[int] = []

    async def have(self, name: str, fill: Fill) -> tuple[Path, list[InstallNote]]:
        """The folder of this name, filled if it does not exist; and notes on its content.

        If several processes need it, one fills it and the others wait. However that ends, the
        folder is complete or absent.
        """

        def work(report: Report) -> tuple[Path, list[InstallNote]]:
            return self._have(name, fill, report)

        with Display("project", is_patient=True) as display:
            return await in_thread(work, display)

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _have(self, name: str, fill: Fill, report: Report) -> tuple[Path, list[InstallNote]]:
        folder = data_dir() / "projects/installed" / name
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            while True:
                shared = lock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB) if folder.is_dir() else None
                if shared is not None and folder.is_dir():
                    os.utime(shared)  # when it was last used
                    self._held.append(shared)
                    return folder, _read_notes(folder)
                if shared is not None:
                    os.close(shared)
                self._make(folder, fill, report)
        except BlockingIOError:
            return self._have(name, fill, report)  # it is being removed
        except OSError as exc:
            raise BackendUnavailable(
                f"{folder.parent} cannot be used ({exc.strerror}); set HUTCH_DATA_DIR"
            ) from exc

    def _make(self, folder: Path, fill: Fill, report: Report) -> None:
        with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            if held is None:
                report(Progress("waiting"))
                time.sleep(0.1)  # polled, because waiting for the lock could not be interrupted
                return
            if folder.is_dir():
                return
            _sweep(folder.parent, folder.name)
            work = folder.with_name(folder.name + BUILDING)
            try:
                remove_tree(work)
                work.mkdir()
                _write_notes(folder, fill(work, held, report))
                work.rename(folder)
            except BaseException as exc:
                if isinstance(exc, WorkStopped) or not isinstance(exc, Exception):  # Ctrl-C
                    # Renamed first, because the next attempt uses this name.
                    with suppress(OSError):
                        remove_in_background(work.rename(f"{work}-{secrets.token_hex(8)}"))
                else:
                    remove_tree(work)
                raise


def _notes_file(folder: Path) -> Path:
    """Beside the folder: inside, a package could overwrite it."""
    return folder.with_name(f"{folder.name}.notes")


def _write_notes(folder: Path, notes: list[InstallNote]) -> None:
    file = _notes_file(folder)
    if notes:
        new = file.with_name(f"{file.name}{BUILDING}")
        new.write_text(json.dumps([[note.reason, note.package] for note in notes]))
        new.replace(file)  # atomic
    else:
        file.unlink(missing_ok=True)


def _read_notes(folder: Path) -> list[InstallNote]:
    try:
        return [InstallNote(*each) for each in json.loads(_notes_file(folder).read_text())]
    except (FileNotFoundError, ValueError, TypeError):  # a power cut may leave an empty file
        return []


def _sweep(place: Path, mine: str) -> None:
    """Remove folders that were not used for long, and leftovers of killed processes.

    Best-effort; never raises OSError.
    """
    for path in place.iterdir():
        name = path.name.partition(BUILDING)[0]
        if not path.is_dir() or name == mine:
            continue
        with suppress(OSError):
            _remove_unused(place, path, name)


def _remove_unused(place: Path, path: Path, name: str) -> None:
    folder = place / name
    used = place / f"{name}.lock"
    fresh = used.exists() and time.time() - used.stat().st_mtime < KEPT
    if path == folder and fresh:
        return
    with locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        if held is not None:
            if path == folder:  # renamed first: a folder with its own name is always complete
                path = folder.rename(folder.with_name(f"{name}{BUILDING}-{secrets.token_hex(8)}"))
                _notes_file(folder).unlink(missing_ok=True)
            remove_tree(path)
