"""File operations, run inside the box as its user, so that the kernel checks every path.

Short operations run in the agent. Long ones (walking, removing or searching a tree) run in a child,
so that the agent keeps answering, and cancelling one is a kill. Only regular files are opened for
reading: a FIFO would block the agent. Changes are watched with inotify(7).
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import hashlib
import json
import os
import signal
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from hutch import wire

from . import compare, folders, search
from .agent import READ_SIZE, GuestConfig, RequestError, Responder, code_of, text_of
from .folders import TEMPORARY, entry, must_be_regular, open_regular, temporary
from .pipes import OutputPipe
from .procfs import helpers, send
from .spawn import ChildWatcher

EDIT_LIMIT = 16 * 1024 * 1024  # bytes; an edit holds the file twice in the memory of the agent
UNSIZED_LIMIT = 64 * 1024 * 1024  # bytes read of a file that reports size 0, as in /proc
# Bytes of entries that are sent together: one by one takes ten times as long. A full batch and the
# longest entry fit into a frame.
BATCH = 32 * 1024


class FileHandlers:
    """The handlers of file requests. All raise RequestError or OSError if the request fails."""

    def __init__(self, config: GuestConfig, children: ChildWatcher) -> None:
        self._workdir, self._children = config.workdir, children

    async def read(self, request: wire.Read, responder: Responder) -> dict[str, object]:
        """Read up to the size at the time of opening, so that reading a growing file ends."""
        fd, info = open_regular(self._path(request.path))
        try:
            left = max(0, (info.st_size or UNSIZED_LIMIT) - request.offset)
            if request.length is not None:
                left = min(left, request.length)
            if info.st_size and request.limit is not None and left > request.limit:
                raise RequestError(
                    "invalid_request",
                    f"{left} bytes of {request.path} are too much at once: "
                    'give a length, or read it with format="stream"',
                )
            if request.offset:
                os.lseek(fd, request.offset, os.SEEK_SET)
            while left and (data := os.read(fd, min(READ_SIZE, left))):
                left -= len(data)
                await responder.send(data)
        finally:
            os.close(fd)
        return {"size": info.st_size}

    async def write(self, request: wire.Write, responder: Responder) -> dict[str, object]:
        if request.path.endswith("/"):
            raise RequestError(
                "invalid_request", f"a file name cannot end in a slash: {request.path}"
            )
        path = self._path(request.path)
        if request.expect is not None:
            must_still_be(path, request.expect)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if not request.append:
            with Replacement(path, request.mode) as new:
                written = await _take(new.fd, responder)
                if request.expect is not None:
                    must_still_be(path, request.expect)
                new.commit()
            return {"written": written}
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        try:
            must_be_writable(os.fstat(fd), path)
            if request.mode is not None:
                os.fchmod(fd, request.mode)
            return {"written": await _take(fd, responder)}
        finally:
            os.close(fd)

    async def edit(self, request: wire.Edit, responder: Responder) -> dict[str, object]:
        path = self._path(request.path)
        if not request.old:
            raise RequestError("invalid_request", "nothing to replace: `old` is empty")
        fd, info = open_regular(path)
        with os.fdopen(fd, "rb") as file:
            before = b"" if info.st_size > EDIT_LIMIT else file.read(EDIT_LIMIT + 1)
        old, new = os.fsencode(request.old), os.fsencode(request.new)
        if before.count(b"\n") == before.count(b"\r\n") > 0:
            # A file with CRLF line ends keeps them, although the request has \n.
            old, new = _crlf(old), _crlf(new)
        count = before.count(old)
        after = len(before) + count * (len(new) - len(old))
        if max(info.st_size, len(before), after) > EDIT_LIMIT:
            raise RequestError(
                "invalid_request", f"too large to edit: more than {EDIT_LIMIT} bytes"
            )
        if not count:
            raise RequestError("not_found", f"the text to replace is not in {request.path}")
        if count > 1 and not request.replace_all:
            message = (
                f"the text to replace is {count} times in {request.path}: give more of "
                "its surroundings, or replace_all"
            )
            raise RequestError("conflict", message)
        with Replacement(path, None) as target:
            _write_all(target.fd, before.replace(old, new))
            target.commit()
        return {"replaced": count}

    async def stat(self, request: wire.Stat, responder: Responder) -> dict[str, object]:
        path = self._path(request.path)
        return {**entry(path, os.lstat(path))}

    async def make_dir(self, request: wire.Mkdir, responder: Responder) -> dict[str, object]:
        path = self._path(request.path)
        existed = os.path.isdir(path)
        os.makedirs(path, exist_ok=True)
        return {"created": not existed}

    async def move(self, request: wire.Move, responder: Responder) -> dict[str, object]:
        source, target = self._path(request.path), self._path(request.to)
        info = os.lstat(source)
        if os.path.lexists(target):
            if not request.overwrite:
                raise RequestError("conflict", f"there is something at {request.to} already")
            if stat.S_ISDIR(info.st_mode) != stat.S_ISDIR(os.lstat(target).st_mode):
                raise RequestError(
                    "conflict", "a file cannot replace a folder, nor a folder a file"
                )
        os.makedirs(os.path.dirname(target), exist_ok=True)
        try:
            os.rename(source, target)
        except OSError as exc:
            if exc.errno != errno.EXDEV:
                raise
            await self._move_across(source, target, responder)
        return {}

    async def _move_across(self, source: str, target: str, responder: Responder) -> None:
        """Move to another file system (/workspace may be one): copy, rename, remove."""
        staging = temporary(target, new=True)
        try:
            await self._work(lambda: folders.copy(source, staging), responder)
            os.rename(staging, target)
        except BaseException:
            if os.path.lexists(staging):
                # Shielded: a cancel must not leave half a copy.
                await asyncio.shield(asyncio.ensure_future(self._remove(staging, responder)))
            raise
        await self._remove(source, responder)

    async def remove(self, request: wire.Remove, responder: Responder) -> dict[str, object]:
        path = self._path(request.path)
        if path == "/":
            raise RequestError(
                "invalid_request", "cannot remove the root of a box: close the box instead"
            )
        if stat.S_ISDIR(os.lstat(path).st_mode) and not request.recursive:
            os.rmdir(path)
        else:
            await self._remove(path, responder)
        return {}

    async def _remove(self, path: str, responder: Responder) -> None:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            await self._work(lambda: folders.remove_tree(path), responder)
        else:
            os.unlink(path)

    async def list(self, request: wire.List, responder: Responder) -> dict[str, object]:
        path = self._folder(request.path)
        await self._work(lambda: folders.walk(path, request.depth), responder)
        return {}

    async def glob(self, request: wire.Glob, responder: Responder) -> dict[str, object]:
        if not request.pattern.strip("/"):
            raise RequestError("invalid_request", "an empty pattern")
        # The components before the first special character are a plain path.
        parts = request.pattern.split("/")
        plain = 0
        while plain < len(parts) - 1 and not search.is_magic(parts[plain]):
            plain += 1
        if ".." in parts[plain:]:
            raise RequestError("invalid_request", "`..` can only be at the beginning of a pattern")
        start = "/".join(parts[:plain]) + "/" if plain else ""
        base = self._folder(os.path.join(request.path, start))
        pattern = "/".join(parts[plain:])
        await self._work(lambda: search.glob(base, pattern, request), responder)
        return {}

    async def search(self, request: wire.Search, responder: Responder) -> dict[str, object]:
        base = self._path(request.path)
        os.stat(base)
        try:
            async with asyncio.timeout(request.timeout):
                await self._work(lambda: search.search(base, request), responder)
        except TimeoutError:
            message = f"the search was not done after {request.timeout:g} seconds, and was stopped"
            raise RequestError("timed_out", message) from None
        return {}

    async def diff(self, request: wire.Diff, responder: Responder) -> dict[str, object]:
        a, b = self._path(request.a), self._path(request.b)
        await self._work(lambda: compare.diff(a, b, request), responder)
        return {}

    async def watch(self, request: wire.Watch, responder: Responder) -> dict[str, object]:
        """Send changes until it is cancelled or the folder is gone."""
        watcher = InotifyWatcher(self._folder(request.path), request.recursive)
        try:
            await responder.note(ready=True)
            while not watcher.over:
                await watcher.changed()
                for path, kind in watcher.changes():
                    await responder.note(path=path, kind=kind)
            return {}
        finally:
            watcher.close()

    def _path(self, path: str) -> str:
        return absolute(self._workdir, path)

    def _folder(self, path: str) -> str:
        folder = self._path(path)
        if not stat.S_ISDIR(os.stat(folder).st_mode):
            raise RequestError("not_folder", f"not a folder: {path}")
        return folder

    async def _work(
        self, work: Callable[[], Iterator[Mapping[str, object]]], responder: Responder
    ) -> None:
        """Run `work` in a forked child, and send what it yields as Notes.

        Raises RequestError if it fails.
        """
        pipe = OutputPipe()
        try:
            pid = os.fork()
        except OSError:
            pipe.close()
            raise
        if not pid:
            _run_child(pipe.writer, work)
        helpers.add(pid)  # so that the memory watchdog does not take it for a program
        ended = asyncio.Event()
        self._children.watch(pid, lambda status: ended.set())
        pipe.started()
        buffer, finished = b"", False
        try:
            while not pipe.at_end:
                data = pipe.read()
                if data is None:
                    await pipe.readable()
                    continue
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    body = json.loads(line)
                    if "failed" in body:
                        raise RequestError(body["failed"], body["message"])
                    if body.get("found"):
                        await responder.note(found=body["found"])
                    finished = "finished" in body
            if not finished:
                # In a box with one uid, user code can kill this child.
                raise RequestError("internal", "the operation was killed before it was done")
        finally:
            if not ended.is_set():
                send(pid, signal.SIGKILL)
            pipe.close()
            await ended.wait()
            helpers.discard(pid)


def _run_child(fd: int, work: Callable[[], Iterator[Mapping[str, object]]]) -> None:
    """Run the child. It writes lines of JSON; the last one is the outcome."""
    try:
        signal.set_wakeup_fd(-1)
        os.closerange(3, fd)  # copies of pipes: a program would not see the end of its stdin
        os.closerange(fd + 1, 1 << 20)
        with os.fdopen(fd, "w", closefd=False) as out:
            try:
                batch, size = [], 0
                for item in work():
                    batch.append(json.dumps(item))
                    size += len(batch[-1])
                    if size > BATCH:
                        out.write(f'{{"found":[{",".join(batch)}]}}\n')
                        batch, size = [], 0
                out.write(f'{{"found":[{",".join(batch)}]}}\n')
                last = {"finished": ""}
            except RequestError as exc:
                last = {"failed": exc.code, "message": str(exc)}
            except OSError as exc:
                last = {"failed": code_of(exc), "message": text_of(exc)}
            except Exception as exc:
                last = {"failed": "internal", "message": f"the guest failed: {exc!r}"}
            out.write(json.dumps(last) + "\n")
    finally:
        os._exit(0)


def absolute(workdir: str, path: str) -> str:
    """A normal absolute path, without `.`, `..` and doubled slashes. Raises RequestError.

    As in the kernel, `..` after a link is the parent of the link's target. A link at the end is not
    resolved.
    """
    if not path:
        raise RequestError("invalid_request", "an empty path")
    if "\0" in path:
        raise RequestError("invalid_request", "a path cannot contain a NUL character")
    parts = [part for part in os.path.join(workdir, path).split("/") if part not in ("", ".")]
    if ".." not in parts:
        return "/" + "/".join(parts)
    last = parts.pop()
    folder = os.path.realpath("/" + "/".join(parts))
    return os.path.dirname(folder) if last == ".." else os.path.join(folder, last)


def must_be_writable(info: os.stat_result, path: str) -> None:
    """Raises RequestError unless it is a regular file outside /proc."""
    must_be_regular(info, path)
    if info.st_dev == os.stat("/proc").st_dev:
        # Through a link to /proc/self, we would write to our own process.
        raise RequestError("not_permitted", f"files of /proc cannot be written: {path}")


def must_still_be(path: str, expected: str) -> None:
    """Check the SHA-256 of a file; "": the file must not exist. Raises RequestError."""
    try:
        fd, info = open_regular(path)
    except FileNotFoundError:
        if expected:
            raise RequestError("conflict", f"there is no such file any more: {path}") from None
        return
    with os.fdopen(fd, "rb") as file:
        if not expected:
            raise RequestError("conflict", f"there is a file already: {path}")
        if info.st_size > EDIT_LIMIT:
            raise RequestError(
                "invalid_request", f"too large to edit: more than {EDIT_LIMIT} bytes"
            )
        if hashlib.sha256(file.read(EDIT_LIMIT)).hexdigest() != expected:
            raise RequestError("conflict", f"the file has changed: {path}")


class Replacement:
    """New content for a file: written to `fd`, and put in place at once by `commit`."""

    def __init__(self, path: str, mode: int | None) -> None:
        # A link is followed: its target is replaced.
        self._path, self._given = os.path.realpath(path), path
        self._done = False
        try:
            info = os.stat(self._path)
            must_be_writable(info, path)
            # Raises if the file is not writable: then it may not be replaced either.
            os.close(os.open(self._path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            self._exists, kept = True, stat.S_IMODE(info.st_mode) & 0o1777
        except FileNotFoundError:
            self._exists, kept = False, 0o644
        self._mode = kept if mode is None else mode
        self._new = temporary(self._path, new=not self._exists)

    def __enter__(self) -> Replacement:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self.fd = os.open(self._new, flags, 0o600)
        except OSError as exc:
            if not self._exists or exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                exc.filename = self._given  # not our temporary name
                raise
            # The file is writable and its folder is not, as with a file that is mounted. Then the
            # content is collected in a nameless file and copied. Not all systems have O_TMPFILE.
            self._new = ""
            nameless = temporary("/tmp/new", new=True)
            self.fd = os.open(nameless, flags, 0o600)
            os.unlink(nameless)
        return self

    def commit(self) -> None:
        os.fchmod(self.fd, self._mode)
        if self._new:
            try:
                os.replace(self._new, self._path)
                self._done = True
                return
            except OSError as exc:
                # A mounted file cannot be replaced, only written: EBUSY, and EISDIR in gVisor.
                if exc.errno not in (errno.EBUSY, errno.EISDIR):
                    raise
        target = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            must_be_writable(os.fstat(target), self._path)
            os.ftruncate(target, 0)
            folders.copy_content(self.fd, target, os.fstat(self.fd).st_size)
            os.fchmod(target, self._mode)
        finally:
            os.close(target)

    def __exit__(self, *exc: object) -> None:
        os.close(self.fd)
        if self._new and not self._done:
            try:
                os.unlink(self._new)
            except OSError:
                pass


async def _take(fd: int, responder: Responder) -> int:
    written = 0
    async for data in responder.incoming():
        _write_all(fd, data)
        written += len(data)
    return written


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _crlf(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n")


# --- watching ---------------------------------------------------------------------------


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
