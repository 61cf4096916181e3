"""Watch files for changes, with inotify(7)."""

from __future__ import annotations

import asyncio
import ctypes
import os
import stat
import struct
from typing import NoReturn

from hutch import wire

from .agent import GuestConfig, RequestError, Responder
from .files import absolute
from .folders import TEMPORARY

_libc = ctypes.CDLL(None, use_errno=True)
_HEADER = struct.Struct("iIII")

MODIFY, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, MOVE_SELF, OVERFLOW, IGNORED = 0x400, 0x800, 0x4000, 0x8000
ONLYDIR, ISDIR = 0x01000000, 0x40000000
MASK = MODIFY | MOVED_FROM | MOVED_TO | CREATE | DELETE | DELETE_SELF | MOVE_SELF
KINDS = {
    MODIFY: "modified",
    MOVED_FROM: "moved_from",
    MOVED_TO: "moved_to",
    CREATE: "created",
    DELETE: "removed",
}
MAX_FOLDERS = 4096

Changes = list[tuple[str, str]]


class InotifyWatcher:
    """Watches a folder, or a folder and all below it, including those created later."""

    def __init__(self, top: str, recursive: bool) -> None:
        self._top, self._recursive = top, recursive
        self._folders: dict[int, str] = {}
        self._arriving: dict[int, str] = {}  # by cookie: how to report the rename of our own file
        self.over = False  # the folder itself is gone, so nothing more will happen
        self.fd = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            _fail()
        try:
            self._add(top)
        except BaseException:
            self.close()
            raise

    def changes(self) -> Changes:
        """The changes since the last call: (path, kind)."""
        try:
            data = os.read(self.fd, 256 * 1024)
        except BlockingIOError:
            return []
        out: Changes = []
        at = 0
        while at < len(data):
            number, mask, cookie, size = _HEADER.unpack_from(data, at)
            name = data[at + _HEADER.size : at + _HEADER.size + size].rstrip(b"\0")
            at += _HEADER.size + size
            if mask & OVERFLOW:
                out.append((self._top, "overflow"))
            elif mask & IGNORED:
                self._folders.pop(number, None)
            elif number in self._folders:
                out += self._changes_in(self._folders[number], os.fsdecode(name), mask, cookie)
        return out

    def _changes_in(self, folder: str, name: str, mask: int, cookie: int) -> Changes:
        if mask & (DELETE_SELF | MOVE_SELF):
            if folder != self._top:
                return []  # reported by the folder it was in
            self.over = True
            return [(folder, "removed" if mask & DELETE_SELF else "moved_from")]
        if temporary := TEMPORARY.fullmatch(name):
            if mask & MOVED_FROM:
                # Our own temporary file, being renamed: report the effect on the final name.
                self._arriving[cookie] = "created" if temporary[1] else "modified"
            return []
        path = os.path.join(folder, name)
        kinds = [kind for bit, kind in KINDS.items() if mask & bit]
        if mask & MOVED_TO and cookie in self._arriving:
            kinds = [self._arriving.pop(cookie)]
        changes = [(path, kind) for kind in kinds]
        if self._recursive and mask & ISDIR:
            if mask & MOVED_FROM:
                self._forget(path)
            if mask & (CREATE | MOVED_TO):
                # What was created in it before the watch was in place would be missed.
                changes += [(inner, "created") for inner in self._add(path)]
        return changes

    def _add(self, top: str) -> list[str]:
        """Watch a folder. If recursive, all folders below too; returns what is in them."""
        paths, todo = [], [top]
        while todo:
            path = todo.pop()
            number = _libc.inotify_add_watch(self.fd, os.fsencode(path), MASK | ONLYDIR)
            if number < 0:
                if not self._folders:
                    _fail(path)
                continue  # it was removed, or we may not see it
            self._folders[number] = path
            if len(self._folders) > MAX_FOLDERS:
                raise RequestError("limit_reached", f"more than {MAX_FOLDERS} folders to watch")
            if self._recursive:
                for item in _items(path):
                    if not TEMPORARY.fullmatch(item.name):
                        paths.append(item.path)
                    if item.is_dir(follow_symlinks=False):
                        todo.append(item.path)
        return paths

    def _forget(self, top: str) -> None:
        """Stop watching a folder that was moved away. If it moved within, it is added again."""
        for number, path in list(self._folders.items()):
            if path == top or path.startswith(top + "/"):
                del self._folders[number]
                _libc.inotify_rm_watch(self.fd, number)

    async def changed(self) -> None:
        """Returns when there is something to read."""
        # The reader is removed then: it would be called again and again while we wait for the host.
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self.fd, lambda: None if ready.done() else ready.set_result(None))
        try:
            await ready
        finally:
            loop.remove_reader(self.fd)

    def close(self) -> None:
        os.close(self.fd)


def _items(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as listing:
            return list(listing)
    except OSError:
        return []


def _fail(path: str | None = None) -> NoReturn:
    code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), path)


async def run_watch(
    request: wire.Watch, responder: Responder, config: GuestConfig
) -> dict[str, object]:
    """Answer a Watch, until it is cancelled or the folder is gone."""
    path = absolute(config.workdir, request.path)
    if not stat.S_ISDIR(os.stat(path).st_mode):
        raise RequestError("not_folder", f"not a folder: {request.path}")
    watcher = InotifyWatcher(path, request.recursive)
    try:
        await responder.note(ready=True)
        while not watcher.over:
            await watcher.changed()
            for path, kind in watcher.changes():
                await responder.note(path=path, kind=kind)
        return {}
    finally:
        watcher.close()
