"""Layers of images, unpacked into folders by a confined process.

Run by root, their files belong to a range of user ids that nothing else uses; run by an ordinary
user, to that user. unpacker.py is what runs in the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import subprocess
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Protocol

from hutch import tree
from hutch.backends.spawn import boot
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace

from . import rights
from .decompressor import BROKEN, CUT, PIECE
from .plan import STORE_BASE

MAX_ENTRIES = 2_000_000
RESERVE = 256 << 20  # bytes of a disk that a layer may not take
RESERVED_ENTRIES = 10_000  # and files
ERRORS: tuple[type[HutchError], ...] = (InvalidRequest, NoSpace, BackendUnavailable)


def unpack(tar_fd: int, folder: str, max_bytes: int | None = None) -> None:
    """Unpack a plain tar into an empty folder of ours. On failure, it is empty again.

    Reads the descriptor to its end. Raises InvalidRequest for a broken or hostile layer, NoSpace
    for one that is too large, and BackendUnavailable where none can be unpacked.
    """
    fd = os.open(folder, tree.FOLDER)
    tar = fcntl.fcntl(tar_fd, fcntl.F_DUPFD_CLOEXEC, 3)  # not a standard stream
    try:
        os.fchmod(fd, 0o755)
        if rights.find().ranged:
            os.fchown(fd, STORE_BASE, STORE_BASE)
        disk = os.fstatvfs(fd)
        free = max(0, disk.f_bavail * disk.f_frsize - RESERVE)
        entries = max(0, disk.f_favail - RESERVED_ENTRIES) if disk.f_files else MAX_ENTRIES
        most = free if max_bytes is None else min(free, max_bytes)
        try:
            _run(tar, fd, most, min(entries, MAX_ENTRIES))
        except BaseException:
            tree.empty(fd)
            raise
    finally:
        os.close(tar)
        os.close(fd)


def _run(tar: int, folder: int, most_bytes: int, most_entries: int) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb") as result:
        try:
            module = "hutch.backends.namespaces.unpacker"
            process = subprocess.Popen(
                boot(module, tar, folder, writer, most_bytes, most_entries),
                pass_fds=(tar, folder, writer),
                env={},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        finally:
            os.close(writer)
        with process:
            try:
                answer = result.read(65536)
                complaint = process.stderr.read(65536) if process.stderr else b""
            except BaseException:
                process.kill()  # and the kernel kills what it started
                result.read()  # until that is gone
                raise
    if not answer:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise BackendUnavailable(f"no layer can be unpacked here: {last or 'it was killed'}")
    body = json.loads(answer)
    for kind in ERRORS:
        if body.get("code") == kind.code:
            raise kind(str(body.get("message")))
    if body:
        raise HutchError(str(body.get("message")))


# Plain bytes from zstd, which a confined process decompresses: see decompressor.py.


PATIENCE = 300  # seconds for a process that neither reads nor writes, nor ends
MODULE = "hutch.backends.namespaces.decompressor"


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unzstd(first: bytes, source: Readable) -> Iterator[bytes]:
    """The decompressed bytes, in pieces. `first`: what was read already. Leaving early ends it.

    Raises InvalidRequest for what is not zstd, ends too early or needs a window above 128 MiB, and
    BackendUnavailable where no process can be confined.
    """
    process = subprocess.Popen(
        boot(MODULE, _library()),
        env={},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    with process.stdin, process.stdout, process.stderr:
        try:
            yield from _exchange(first, source, process.stdin, process.stdout)
            process.wait(PATIENCE)
            complaint = process.stderr.read(65536)
        except subprocess.TimeoutExpired:
            process.kill()
            raise BackendUnavailable("no layer can be decompressed here: it hangs") from None
        except BaseException:
            process.kill()  # and the kernel kills what it started
            raise
        finally:
            process.wait()
    if process.returncode == BROKEN:
        raise InvalidRequest(
            "this image has a broken layer: what is in it is not zstd, or needs more memory than "
            "it may have"
        )
    if process.returncode == CUT:
        raise InvalidRequest("this image has a broken layer: it is truncated")
    if process.returncode:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise BackendUnavailable(f"no layer can be decompressed here: {last or 'it was killed'}")


def _exchange(data: bytes, source: Readable, feed: IO[bytes], output: IO[bytes]) -> Iterator[bytes]:
    """Feed and read in one thread, so that no thread can be left behind."""
    os.set_blocking(feed.fileno(), False)
    with selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        ready.register(feed, selectors.EVENT_WRITE)
        while True:
            streams = [key.fileobj for key, _ in ready.select(PATIENCE)]
            if not streams:
                raise BackendUnavailable("no layer can be decompressed here: it hangs")
            if output in streams:
                piece = os.read(output.fileno(), PIECE)
                if not piece:
                    return
                yield piece
                continue
            try:
                data = data[os.write(feed.fileno(), data) :]
            except BrokenPipeError:
                data = b""  # it has ended, and its exit code says why
            if not data and not (data := source.read(PIECE)):
                ready.unregister(feed)
                feed.close()


def _library() -> str:
    """The folder of the module, for a Python that has none in its standard library."""
    if _spec("compression.zstd"):
        return ""
    found = _spec("backports.zstd")
    if not found or not found.origin:
        raise BackendUnavailable(
            "zstd layers need a package that is not installed: pip install backports.zstd"
        )
    return str(Path(found.origin).parents[2])


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError:
        return None
