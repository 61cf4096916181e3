"""The OCI images on this machine, and their names.

    images/oci/<hex>.json        an image: its layers, environment variables and user
    images/oci/<hex>.json.lock   shared by its users, exclusive to remove it
    images/oci-names/<name>.json which image a name stands for now

After a name is pulled again, it may stand for another image. The previous one stays without a name
until `prune`, for the sessions that were started with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from hutch.errors import Conflict, NotFound
from hutch.images.locks import lock, locked
from hutch.images.stopping import WorkStopped
from hutch.images.store import ImageEntry, data_dir, did_you_mean, make_folder, names
from hutch.types import Root

from . import layers
from .layers import LayerSource
from .manifest import Config, ImageDescription, ImageLayer
from .progress import LayerProgress, Report
from .reference import Reference, parse

AT_ONCE = 3  # layers downloaded or read in parallel


@dataclass(frozen=True)
class StoredImage:
    """A complete image on this machine."""

    digest: str
    layers: tuple[str, ...]  # the digests of the uncompressed tars, the lowest first
    config: Config
    bytes: int

    def root(self) -> Root:
        # A layer that occurs twice is mounted only at its highest position.
        once = [each for n, each in enumerate(self.layers) if each not in self.layers[n + 1 :]]
        return Root(
            layers=tuple(str(layers.root_of(diff_id)) for diff_id in once),
            digest=self.digest,
            env=self.config.env,
            user=self.config.user,
        )


def find(name: str, digest: str | None = None) -> StoredImage:
    """Find an image by name, or by `digest`, whatever the name stands for now.

    Raises NotFound if it is not on this machine, and InvalidRequest if it cannot be a name.
    """
    reference = parse(name)
    try:
        return _read(digest or reference.digest or _digest_of(reference))
    except FileNotFoundError:
        if digest:
            raise NotFound(
                f"the image {name!r} that this began with is gone from this machine; to have it "
                f"back, pull or import {digest}"
            ) from None
        # For a mistyped name, suggest the right one rather than a download.
        near = _near(name) or f"; to have it: hutch image pull {name}"
        raise NotFound(f"there is no image {name!r} on this machine{near}") from None


def hold(image: StoredImage) -> int:
    """Keep the image from being removed until the returned descriptor is closed.

    Raises NotFound if it has just been removed.
    """
    record = _image(image.digest)
    with contextlib.suppress(FileNotFoundError):
        held = lock(record, fcntl.LOCK_SH)
        if record.exists():
            return held
        os.close(held)
    raise NotFound("this image has just been removed; pull or import it again")


def bring(source: LayerSource, name: Reference, report: Report) -> StoredImage:
    """Store an image under a name: all of it, or nothing if this fails.

    `report` is called by several threads; an exception that it raises stops the work. Raises
    InvalidRequest if the image is malformed, NoSpace, BackendUnavailable, and what the source
    raises.
    """
    stopped = threading.Event()
    locks: list[int] = []
    wanted = list({layer.diff_id: layer for layer in source.image.layers}.values())

    def tell(step: LayerProgress) -> None:
        if stopped.is_set():
            raise WorkStopped
        report(step)

    def take(layer: ImageLayer) -> None:
        locks.append(layers.take(layer, source, tell))

    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="hutch-layer")
    try:
        work = [pool.submit(take, layer) for layer in wanted]
        for count, layer_done in enumerate(as_completed(work), 1):
            layer_done.result()
            report(LayerProgress("", "layers", count, len(wanted)))
        return keep(name, source.image)
    finally:
        stopped.set()
        source.stop()
        pool.shutdown(cancel_futures=True)
        for fd in locks:
            os.close(fd)
        # Layers that were stored before a failure, and those of processes that were killed.
        layers.sweep(needed)


def keep(reference: Reference, image: ImageDescription) -> StoredImage:
    """Record an image and its name. Its layers must exist, and be held."""
    diff_ids = tuple(layer.diff_id for layer in image.layers)
    size = sum(map(layers.bytes_of, set(diff_ids)))
    stored = StoredImage(image.digest, diff_ids, image.config, size)
    _write(_image(image.digest), asdict(stored))
    _write(_name(reference), {"digest": image.digest, "since": time.time()})
    return stored


def remove(name: str) -> None:
    """Remove a name; if it was the last one, also the image and layers that no other image has.

    Raises NotFound if there is no such image, and Conflict if a box uses it, or if it is named by
    digest and still has a name; then nothing is changed.
    """
    try:
        image = find(name)
    except NotFound:
        raise NotFound(
            f"there is no image {name!r} on this machine{_near(name)}; `hutch image ls` lists them"
        ) from None
    record = _name(parse(name))
    others = [path for path, digest in _names() if digest == image.digest and path != record]
    if others and not record.exists():
        called = ", ".join(map(_spoken, others))
        raise Conflict(f"{name} is called {called}; remove that, and it goes with its last name")
    if not others:
        _forget(image.digest, name)
    record.unlink(missing_ok=True)
    if not others:
        layers.sweep(needed)


def prune() -> list[ImageEntry]:
    """Remove the images without a name that no box uses, and return them."""
    removed = []
    for entry in entries():
        if entry.name is None and entry.digest:
            with contextlib.suppress(Conflict):
                _forget(entry.digest, "it")
                removed.append(entry)
    layers.sweep(needed, keep_partial=0)
    return removed


def entries() -> list[ImageEntry]:
    """All images, by name; then those without a name."""
    images = {image.digest: image for image in _all()}
    named = [(path, digest) for path, digest in _names() if digest in images]
    called = {digest for _, digest in named}
    return [
        *(_entry(_spoken(path), images[digest]) for path, digest in named),
        *(_entry(None, image) for digest, image in images.items() if digest not in called),
    ]


def needed() -> set[str]:
    """The layers of all images."""
    return {layer for image in _all() for layer in image.layers}


def _forget(digest: str, name: str) -> None:
    record = _image(digest)
    with locked(record, fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
        if held is None:
            raise Conflict(f"a box uses {name}; close that first")
        record.unlink(missing_ok=True)


def _entry(name: str | None, image: StoredImage) -> ImageEntry:
    return ImageEntry(name, (), True, image.bytes, "oci", image.digest)


# --- files -------------------------------------------------------------------------------


def _image(digest: str) -> Path:
    return data_dir() / "images/oci" / f"{digest.removeprefix('sha256:')}.json"


def _name(reference: Reference) -> Path:
    # References contain no plus, so `_spoken` can undo this.
    return data_dir() / "images/oci-names" / f"{str(reference).replace('/', '+')}.json"


def _near(name: str) -> str:
    return did_you_mean(name, ["host", *names(), *(_spoken(path) for path, _ in _names())])


def _spoken(path: Path) -> str:
    return parse(path.name.removesuffix(".json").replace("+", "/")).familiar


def _digest_of(reference: Reference) -> str:
    record: dict[str, str] = json.loads(_name(reference).read_text())
    return record["digest"]


def _names() -> list[tuple[Path, str]]:
    found = []
    for path in sorted((data_dir() / "images/oci-names").glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            found.append((path, json.loads(path.read_text())["digest"]))
    return found


def _all() -> Iterator[StoredImage]:
    for path in sorted((data_dir() / "images/oci").glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            yield _read(f"sha256:{path.stem}")


def _read(digest: str) -> StoredImage:
    record = json.loads(_image(digest).read_text())
    config = record["config"]
    return StoredImage(
        record["digest"],
        tuple(record["layers"]),
        Config(
            env=tuple((name, value) for name, value in config["env"]),
            user=config["user"],
        ),
        record["bytes"],
    )


def _write(path: Path, record: dict[str, object]) -> None:
    """Write a record atomically: readers see the old one or the new one."""
    make_folder(path.parent)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(record, file, indent=2)
        os.chmod(file.name, 0o644)
        os.replace(file.name, path)
    except OSError as exc:
        raise layers.full_or_broken(exc, path.parent) from exc
