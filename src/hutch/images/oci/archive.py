"""Images in files: an archive of `docker save`, an OCI layout, or a tar of a root file system.

The kind is detected from the content. Layers are read in place. A file that is compressed as a
whole, or comes through a pipe, is first written to an unnamed temporary file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from hutch.backends.namespaces.unpack import Readable
from hutch.errors import InvalidRequest
from hutch.images.store import data_dir, make_folder
from hutch.tar import FILES, HARD_LINK, SYMLINK, InvalidTar, TarReader

from .layers import full_or_broken
from .manifest import (
    MAX_DOCUMENT,
    Blob,
    Config,
    ImageDescription,
    ImageLayer,
    Index,
    Manifest,
    choose,
    describe,
    digest_of,
    machine,
    parse_config,
    parse_document,
    parse_json,
)
from .plain import GZIP, MAX_PLAIN, PIECE, ZSTD, Room, most_of, plain
from .reference import Reference, parse

MAX_INDEXES = 3  # nested
MAX_KNOWN = 10_000  # files of a tar that are remembered
MAX_NAMES = 4096  # characters of a name and a link's target
MAX_LINKS = 8  # followed in a row
BLOBS = "blobs/sha256/"


class Archive:
    """A LayerSource: one image in a file or a folder."""

    stage = "checking"

    def __init__(self, image: ImageDescription, parts: _Parts) -> None:
        self.image = image
        self._parts = parts

    def stop(self) -> None:
        pass  # reading a file does not block, so there is nothing to interrupt

    @contextmanager
    def open(
        self, layer: ImageLayer, folder: Path, tell: Callable[[int], None]
    ) -> Iterator[Readable]:
        # The name of such a blob is its digest: check it before it is unpacked.
        if layer.blob.startswith(BLOBS):
            with self._parts.open(layer.blob) as part:
                if _blob(_hash(part, tell)) != layer.blob:
                    raise InvalidRequest("a layer of this image does not match its digest")
        with self._parts.open(layer.blob) as part:
            yield part


class Region:
    """Part of a file, read without moving the position of the file."""

    def __init__(self, file: BinaryIO, offset: int, size: int) -> None:
        self._fd = file.fileno()
        self.place, self._end = offset, offset + size
        self.size = size

    def read(self, size: int, /) -> bytes:
        data = os.pread(self._fd, min(size, self._end - self.place), self.place)
        self.place += len(data)
        return data

    def skip(self, size: int) -> None:
        """Raises InvalidTar if fewer bytes are left."""
        self.place += size
        if self.place > self._end:
            raise InvalidTar("it ended early")


class _Parts(Protocol):
    """The files of an image, by name, in a folder or in a tar."""

    def open(self, name: str) -> contextlib.AbstractContextManager[Region]:
        """Raises InvalidRequest if there is no such file."""

    def has(self, name: str) -> bool: ...


@contextmanager
def open_archive(path: Path, name: Reference) -> Iterator[Archive]:
    """Open the image in a file or a folder; of several, the one with this name.

    Raises InvalidRequest if it is not there, or malformed.
    """
    if path.is_dir():
        parts = _InFolder(path)
        if not parts.has("oci-layout") or not parts.has("index.json"):
            raise InvalidRequest(f"{path} is not an OCI layout: no oci-layout and index.json")
        yield Archive(_of_layout(parts, name), parts)
        return
    try:
        file = path.open("rb")
    except OSError as exc:
        raise InvalidRequest(f"{path}: {exc.strerror}") from None
    with file, open_stream(file, name) as archive:
        yield archive


@contextmanager
def open_stream(source: BinaryIO, name: Reference) -> Iterator[Archive]:
    """As `open_archive`, for an open file or a pipe. Also raises NoSpace."""
    about = os.fstat(source.fileno())
    if stat.S_ISREG(about.st_mode) and not _is_packed(source):
        yield _of_file(source, name)
        return
    most = most_of(about.st_size) if stat.S_ISREG(about.st_mode) else MAX_PLAIN
    with spooled(most) as spool:
        for piece in plain(source):
            spool.write(piece)
        yield _of_file(spool.finish(), name)


class Spool:
    """An unnamed temporary file of bounded size."""

    def __init__(self, file: BinaryIO, room: Room) -> None:
        self._file, self._room = file, room

    def write(self, piece: bytes) -> int:
        """Append, and return the new size. Raises NoSpace, and InvalidRequest beyond the limit."""
        self._room.take(len(piece))
        self._file.write(piece)
        return self._room.taken

    def finish(self) -> BinaryIO:
        self._file.flush()
        return self._file


@contextmanager
def spooled(most: int = MAX_PLAIN) -> Iterator[Spool]:
    """A file for data that arrives in pieces; it is gone when this process ends, even if killed.

    Raises NoSpace if the disk is full, and BackendUnavailable if it cannot be written.
    """
    folder = data_dir() / "images/layers"
    make_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            yield Spool(file, Room(folder, most))
    except OSError as exc:
        raise full_or_broken(exc, folder) from exc


# --- kinds -------------------------------------------------------------------------------


def _of_file(file: BinaryIO, name: Reference) -> Archive:
    parts = _InTar(file)
    if not parts.entries:
        raise InvalidRequest("there is nothing in this tar")
    if parts.has("oci-layout") and parts.has("index.json"):
        return Archive(_of_layout(parts, name), parts)
    if (saved := _saved(parts)) is not None:
        return Archive(_of_save(parts, saved, name), parts)
    whole = _Whole(file)
    return Archive(_of_root(whole), whole)


def _of_layout(parts: _Parts, name: Reference) -> ImageDescription:
    index = parse_document(_read(parts, "index.json"))
    if not isinstance(index, Index):
        raise InvalidRequest("invalid index.json in this image")
    blob = top = _choose_by_name(index, name)
    for _ in range(MAX_INDEXES):
        document = parse_document(_checked(parts, blob))
        if isinstance(document, Manifest):
            return _layers_of(parts, top.digest, document)
        blob = choose(document)
    raise InvalidRequest("this image is an index of indexes, and too many of them")


def _layers_of(parts: _Parts, digest: str, manifest: Manifest) -> ImageDescription:
    image = describe(digest, manifest, _checked(parts, manifest.config))
    layers = []
    for layer in image.layers:
        where = _blob(layer.blob)
        with parts.open(where) as part:
            if part.size != layer.size:
                raise InvalidRequest("a layer of this image is not as large as it says")
        layers.append(replace(layer, blob=where))
    return replace(image, layers=tuple(layers))


def _choose_by_name(index: Index, name: Reference) -> Blob:
    called = [blob for blob in index.manifests if _is_called(blob.name, name)]
    found = called or list(index.manifests)
    if len({blob.name for blob in found}) > 1:
        raise _several(blob.name for blob in found)
    return found[0] if len(found) == 1 else choose(Index(tuple(found)))


def _saved(parts: _Parts) -> list[dict[str, object]] | None:
    """The manifest.json of `docker save`; None for any other file of that name."""
    if not parts.has("manifest.json"):
        return None
    try:
        document = parse_json(_read(parts, "manifest.json"), "manifest.json")
    except InvalidRequest:
        return None
    entries = document if isinstance(document, list) else []
    if not all(isinstance(entry, dict) and "Layers" in entry for entry in entries):
        return None
    return entries or None


def _of_save(parts: _Parts, saved: list[dict[str, object]], name: Reference) -> ImageDescription:
    by_tag = {tag: item for item in saved for tag in _texts(item.get("RepoTags"))}
    matching = [item for tag, item in by_tag.items() if _is_called(tag, name)]
    if not matching and len(saved) > 1:
        raise _several(by_tag)
    entry = matching[0] if matching else saved[0]
    data = _read(parts, str(entry.get("Config")))
    digest = digest_of(data)
    hex = os.path.basename(str(entry.get("Config"))).removesuffix(".json")
    if len(hex) == 64 and digest != f"sha256:{hex}":
        raise InvalidRequest("the configuration of this image does not match its digest")
    config, diff_ids = parse_config(data)
    names = _texts(entry["Layers"])
    if len(names) != len(diff_ids):
        raise InvalidRequest("the image has another number of layers than its configuration lists")
    layers = []
    for diff_id, where in zip(diff_ids, names, strict=True):
        with parts.open(where) as part:
            layers.append(ImageLayer(diff_id, where, part.size))
    return ImageDescription(digest, tuple(layers), config)


def _of_root(whole: _Parts) -> ImageDescription:
    with whole.open("") as part:
        diff_id = _hash(part)
        layer = ImageLayer(diff_id, "", part.size)
    # As `docker import` would describe it, but without a date: the same files are the same image.
    says = {"architecture": machine(), "os": "linux", "rootfs": {"diff_ids": [diff_id]}}
    digest = digest_of(json.dumps(says, sort_keys=True).encode())
    return ImageDescription(digest, (layer,), Config())


def _several(names: Iterable[str]) -> InvalidRequest:
    listed = ", ".join(sorted(filter(None, names))) or "without names"
    return InvalidRequest(f"there are several images in it; name one of them: {listed[:500]}")


def _is_called(tag: str, name: Reference) -> bool:
    if tag == name.tag:
        return True
    try:
        return parse(tag) == name
    except InvalidRequest:
        return False


def _texts(found: object) -> list[str]:
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InvalidRequest("the manifest of the image is broken")
    return found


# --- parts -------------------------------------------------------------------------------


class _InTar:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.entries = known_entries(file)

    def has(self, name: str) -> bool:
        return _find(self.entries, name) is not None

    @contextmanager
    def open(self, name: str) -> Iterator[Region]:
        entry = _find(self.entries, name)
        if entry is None:
            raise _missing(name)
        yield Region(self._file, entry.offset, entry.size)


class _InFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        return (self._folder / name).is_file()

    @contextmanager
    def open(self, name: str) -> Iterator[Region]:
        try:
            # A FIFO would block forever, and a link could lead out of the folder.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            file = open(os.open(self._folder / name, flags), "rb")
        except OSError:
            raise _missing(name) from None
        with file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise _missing(name)
            yield Region(file, 0, about.st_size)


class _Whole:
    """A tar that is itself the only layer."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        return not name

    @contextmanager
    def open(self, name: str) -> Iterator[Region]:
        yield Region(self._file, 0, os.fstat(self._file.fileno()).st_size)


def _missing(name: str) -> InvalidRequest:
    return InvalidRequest(f"incomplete image: there is no {name[:100]!r} in it")


def _blob(digest: str) -> str:
    return BLOBS + digest.removeprefix("sha256:")


def _read(parts: _Parts, name: str) -> bytes:
    with parts.open(name) as part:
        if part.size > MAX_DOCUMENT:
            raise InvalidRequest(f"{name[:100]!r} in it is larger than {MAX_DOCUMENT >> 20} MiB")
        return part.read(part.size)


def _checked(parts: _Parts, blob: Blob) -> bytes:
    data = _read(parts, _blob(blob.digest))
    if digest_of(data) != blob.digest:
        raise InvalidRequest(f"the content of {blob.digest[:19]} in it does not match that digest")
    return data


def _hash(part: Readable, tell: Callable[[int], None] = lambda done: None) -> str:
    hashed, done = hashlib.sha256(), 0
    while piece := part.read(PIECE):
        hashed.update(piece)
        done += len(piece)
        tell(done)
    return f"sha256:{hashed.hexdigest()}"


def _is_packed(file: BinaryIO) -> bool:
    return os.pread(file.fileno(), 4, 0).startswith((GZIP, *ZSTD))


# --- the files of a tar, by name and offset, without unpacking it -------------------------


@dataclass(frozen=True)
class _Entry:
    """A file or link in a tar."""

    name: str
    offset: int
    size: int
    target: str = ""  # of a link


def known_entries(file: BinaryIO) -> dict[str, _Entry]:
    """The files and links of a tar, by normalized name. Raises InvalidRequest if it is not a tar.

    A tar of an image has few files. A root file system can have millions, but their names are not
    needed, so no more than MAX_KNOWN are remembered, and only those with short paths.
    """
    known: dict[str, _Entry] = {}
    try:
        for entry in _entries(file):
            name = _clean(entry.name)
            is_short = name.count("/") < 4 and len(name) + len(entry.target) <= MAX_NAMES
            if len(known) < MAX_KNOWN and is_short:
                known[name] = entry
    except InvalidTar as exc:
        raise InvalidRequest(f"not a tar, or a broken one: {exc}") from None
    return known


def _find(entries: dict[str, _Entry], name: str) -> _Entry | None:
    """The file of that name. Links are followed, as an archive may store equal layers once."""
    name = _clean(name)
    for _ in range(MAX_LINKS):
        entry = entries.get(name)
        if entry is None or not entry.target:
            return entry
        name = _clean(os.path.join(os.path.dirname(name), entry.target))
    return None


def _clean(name: str) -> str:
    return os.path.normpath(f"/{name}").lstrip("/")


def _entries(file: BinaryIO) -> Iterator[_Entry]:
    region = Region(file, 0, os.fstat(file.fileno()).st_size)
    for member in TarReader(region, needs_end=False, skip=region.skip):
        if member.kind in FILES:
            yield _Entry(member.name, region.place, member.size)
        elif member.kind == SYMLINK:
            yield _Entry(member.name, region.place, 0, member.target)
        elif member.kind == HARD_LINK:
            # The target of a hard link is relative to the root of the tar: hence the slash.
            yield _Entry(member.name, region.place, 0, f"/{member.target}")
