"""Layers of images, unpacked once and shared by all images that have them.

    images/layers/<hex>/root        the tree; it never changes
    images/layers/<hex>/hutch.json  its size
    images/layers/<hex>.lock        shared by its users, exclusive to make or remove it
    images/layers/<hex>.building-*  a layer that is being made or removed
    images/layers/<hex>.*.partial   what was downloaded of it before a pull broke off

The name is the digest of the uncompressed tar, which is verified before the layer gets its name. An
unprivileged process unpacks it (`backends/namespaces/unpacker.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from hutch import tree
from hutch.backends.namespaces.unpack import Readable, unpack
from hutch.errors import BackendUnavailable, InvalidRequest, NoSpace
from hutch.images.locks import lock, locked
from hutch.images.store import BUILDING, data_dir, make_folder

from .manifest import ImageDescription, ImageLayer
from .plain import Room, most_of, no_room, plain
from .progress import LayerProgress

RECORD = "hutch.json"
KEEP_PARTIAL = 7 * 24 * 3600  # seconds
_WAIT = 0.1  # seconds between two checks of a layer that another thread or process makes
_one_at_a_time = threading.Lock()


class LayerSource(Protocol):
    """Where an image comes from: a registry or an archive."""

    image: ImageDescription
    stage: str  # what it does while it opens a layer: "downloading"

    def open(
        self, layer: ImageLayer, folder: Path, tell: Callable[[int], None]
    ) -> AbstractContextManager[Readable]:
        """Open the bytes of a layer, once they are verified. `folder`: for temporary files.

        `tell` is called with the number of bytes so far; an exception that it raises stops the
        work.
        """

    def stop(self) -> None:
        """Interrupt the threads that wait for data."""


Tell = Callable[[LayerProgress], None]


def root_of(diff_id: str) -> Path:
    return _place_of(diff_id) / "root"


def partial_of(layer: ImageLayer) -> Path:
    """The file for a partial download; to be used only with the lock of the layer held."""
    blob = layer.blob.removeprefix("sha256:")
    return _folder() / f"{layer.diff_id.removeprefix('sha256:')}.{blob}.partial"


def bytes_of(diff_id: str) -> int:
    record = json.loads((_place_of(diff_id) / RECORD).read_text())
    return int(record["bytes"])


def take(layer: ImageLayer, source: LayerSource, tell: Tell) -> int:
    """Make a layer unless it exists, and keep it until the returned descriptor is closed.

    Several threads and processes may call this at once: one makes the layer, the others wait. If
    that fails, no partial layer is left. Raises InvalidRequest if the layer is malformed, NoSpace,
    BackendUnavailable, and what the source or `tell` raises.
    """
    place = _place_of(layer.diff_id)
    make_folder(place.parent)
    while True:
        if place.is_dir():
            held = lock(place, fcntl.LOCK_SH)
            if place.is_dir():
                return held
            os.close(held)
        with locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as making:
            if making is not None and not place.is_dir():
                _make(place, layer, source, tell)
        if making is None:
            tell(LayerProgress(layer.diff_id, "waiting"))
            time.sleep(_WAIT)


def sweep(needed: Callable[[], Collection[str]], keep_partial: float = KEEP_PARTIAL) -> None:
    """Remove layers that no image needs and that no one holds, and old partial downloads.

    `needed`: returns the layers that images have at that moment. `keep_partial`: how many seconds
    partial downloads are kept.
    """
    for part in _folder().glob("*.partial"):
        place = _folder() / part.name.partition(".")[0]
        with (
            contextlib.suppress(FileNotFoundError),
            locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB) as held,
        ):
            if held is not None and part.stat().st_mtime <= time.time() - keep_partial:
                part.unlink()
    known = needed()
    for path in sorted(_folder().glob("*/")):
        key, half_done, _ = path.name.partition(BUILDING)
        if not half_done and f"sha256:{key}" in known:
            continue
        with locked(_folder() / key, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            # Asked again under the lock: an image may have been stored since.
            if held is None or (not half_done and f"sha256:{key}" in needed()):
                continue
            with contextlib.suppress(OSError):  # what cannot be removed now is removed next time
                if not half_done:
                    # Rename it first: a folder named by its digest is always complete.
                    path = path.rename(path.with_name(f"{key}{BUILDING}removed"))
                tree.remove(path)


def _folder() -> Path:
    return data_dir() / "images/layers"


def _place_of(diff_id: str) -> Path:
    return _folder() / diff_id.removeprefix("sha256:")


def _make(place: Path, layer: ImageLayer, source: LayerSource, tell: Tell) -> None:
    work = Path(tempfile.mkdtemp(prefix=place.name + BUILDING, dir=place.parent))
    try:
        work.chmod(0o755)
        (work / "root").mkdir()
        opened = source.open(layer, work, lambda n: tell(_step(layer, source.stage, n)))
        # One at a time: in parallel they would only compete for the disk and the processor.
        with opened as blob, _turn_to_unpack(lambda: tell(_step(layer, source.stage, layer.size))):
            size = _unpack(blob, work / "root", layer, tell)
        (work / RECORD).write_text(json.dumps({"bytes": size}))
        work.rename(place)
    except BaseException as exc:
        tree.remove(work)
        if isinstance(exc, OSError):
            raise full_or_broken(exc, place.parent) from exc
        raise
    tell(_step(layer, "done", layer.size))


@contextlib.contextmanager
def _turn_to_unpack(tell: Callable[[], None]) -> Iterator[None]:
    # Asks again and again, so that a pull which is stopped does not wait for another one's layer.
    while not _one_at_a_time.acquire(timeout=_WAIT):
        tell()
    try:
        yield
    finally:
        _one_at_a_time.release()


def full_or_broken(exc: OSError, folder: Path) -> Exception:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_room()
    return BackendUnavailable(f"images cannot be kept in {folder} ({exc.strerror})")


def _step(layer: ImageLayer, stage: str, done: int) -> LayerProgress:
    return LayerProgress(layer.diff_id, stage, done, layer.size)


def _unpack(blob: Readable, root: Path, layer: ImageLayer, tell: Tell) -> int:
    """Unpack a layer, verify its digest, and return the size of the uncompressed tar."""
    read, write = os.pipe()
    room = Room(root, most_of(layer.size))
    feeder = _Feeder(
        blob, write, room, lambda: tell(LayerProgress(layer.diff_id, "unpacking", room.taken))
    )
    feeder.start()
    failure: Exception | None = None
    try:
        unpack(read, str(root))
    except Exception as exc:
        failure = no_room() if isinstance(exc, NoSpace) else exc
        feeder.given_up = True
    finally:
        os.close(read)
        feeder.join()
    if feeder.failure:  # the cause: the unpacker only knows that the tar broke off
        raise feeder.failure from failure
    if failure:
        raise failure
    if feeder.digest != layer.diff_id:
        raise InvalidRequest(
            f"a layer of this image is not {layer.diff_id[:19]}, as it says; nothing was kept"
        )
    return feeder.room.taken


class _Feeder(threading.Thread):
    """Decompresses a layer into a pipe, and counts and hashes it."""

    def __init__(self, blob: Readable, write: int, room: Room, tell: Callable[[], None]) -> None:
        super().__init__(name="hutch-layer", daemon=True)
        self._blob, self._write, self._tell = blob, write, tell
        self.room = room
        self.digest = ""
        self.given_up = False
        self.failure: Exception | None = None

    def run(self) -> None:
        hashed = hashlib.sha256()
        listening = True
        try:
            for piece in plain(self._blob):
                if self.given_up:
                    return
                self._tell()
                self.room.take(len(piece))
                hashed.update(piece)
                listening = listening and _write_all(self._write, piece)
            self.digest = f"sha256:{hashed.hexdigest()}"
        except Exception as exc:
            self.failure = exc
        finally:
            os.close(self._write)


def _write_all(fd: int, data: bytes) -> bool:
    """Write all. False if the pipe is closed: an unpacker may stop reading at the end of the tar.

    What follows still counts for the digest.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        return False
    return True
