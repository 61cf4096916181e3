"""Plain bytes from zstd, which a confined process decompresses: see decompressor.py."""

from __future__ import annotations

import os
import selectors
import subprocess
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Protocol

from hutch.backends.spawn import boot
from hutch.errors import BackendUnavailable, InvalidRequest

from .decompressor import BROKEN, CUT, PIECE

PATIENCE = 300  # seconds for a process that neither reads nor writes, nor ends
MODULE = "hutch.backends.namespaces.decompressor"


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def unzstd(first: bytes, source: Readable) -> Iterator[bytes]:
    """What is in it, in pieces; `first` was read already. Leaving early ends the process.

    Raises InvalidRequest for what is not zstd, ends too early or needs a window above 128 MiB, and
    BackendUnavailable where no process can be confined.
    """
    process = subprocess.Popen(
        boot(MODULE, _library()), env={}, cwd="/", stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
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
        raise InvalidRequest("this image has a broken layer: its end is missing")
    if process.returncode:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
        raise BackendUnavailable(f"no layer can be decompressed here: {last or 'it was killed'}")


def _exchange(data: bytes, source: Readable, feed: IO[bytes], output: IO[bytes]) -> Iterator[bytes]:
    """Feeds and reads in one thread, so that none can be left behind."""
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
