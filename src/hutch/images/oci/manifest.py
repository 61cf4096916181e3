"""Parses the documents of an image: indexes, manifests and configurations.

They are untrusted JSON. Anything malformed is refused here, so other modules only see the checked
values below.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hutch.errors import InvalidRequest

from .reference import is_digest

MAX_DOCUMENT = 4 * 1024 * 1024  # bytes; the largest that registries accept
MAX_LAYERS = 160  # as many as a box can have

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_LAYERS = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.v1.tar+gzip",
    "application/vnd.oci.image.layer.v1.tar+zstd",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
    "application/vnd.docker.image.rootfs.diff.tar.zstd",
)
_NAMES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm"}


@dataclass(frozen=True)
class Blob:
    """A reference to content, by digest and size (a descriptor, in OCI terms)."""

    digest: str
    size: int
    platform: str = ""  # "linux/arm64/v8", in an index
    name: str = ""  # in the index of an archive


@dataclass(frozen=True)
class Index:
    manifests: tuple[Blob, ...]


@dataclass(frozen=True)
class Manifest:
    config: Blob
    layers: tuple[Blob, ...]


@dataclass(frozen=True)
class Config:
    """What an image sets for its programs."""

    env: tuple[tuple[str, str], ...] = ()
    user: str = ""


@dataclass(frozen=True)
class ImageLayer:
    """A layer to unpack. `blob` identifies it to its source."""

    diff_id: str  # the digest of the uncompressed tar
    blob: str
    size: int  # bytes, as the source has them


@dataclass(frozen=True)
class ImageDescription:
    """An image that a source offers."""

    digest: str
    layers: tuple[ImageLayer, ...]  # the lowest first
    config: Config


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def machine() -> str:
    """The architecture of this machine, by its name in images."""
    return _NAMES.get(platform.machine(), platform.machine())


# --- documents ---------------------------------------------------------------------------


def parse_document(data: bytes) -> Index | Manifest:
    """Parse an index or a manifest. Raises InvalidRequest if it is malformed or unsupported."""
    document = parse_json(data, "the manifest of the image")
    if not isinstance(document, dict):
        raise InvalidRequest("invalid image manifest")
    if document.get("schemaVersion") == 1:
        raise InvalidRequest(
            "this image has a schema 1 manifest, which cannot be verified: push it again with a "
            "current Docker"
        )
    if "manifests" in document:
        return Index(tuple(_listed(item) for item in _list_of(document["manifests"])))
    layers = tuple(_layer(item) for item in _list_of(document.get("layers")))
    return Manifest(_blob(document.get("config")), layers)


def choose(index: Index) -> Blob:
    """The image for this machine in an index. Raises InvalidRequest if none runs here."""
    platform = f"linux/{machine()}"
    for blob in index.manifests:
        if blob.platform == platform or (
            blob.platform.startswith(f"{platform}/") and _runs_here(blob.platform)
        ):
            return blob
    there = sorted({entry.platform for entry in index.manifests} - {"", "unknown/unknown"})
    listed = ", ".join(there)[:500] or "no machine at all"
    raise InvalidRequest(f"this image is not there for {platform}, but for {listed}")


def describe(digest: str, manifest: Manifest, config: bytes) -> ImageDescription:
    """Combine a manifest and its configuration, which has the digests of uncompressed layers.

    Raises InvalidRequest if they do not match, or the configuration is malformed.
    """
    parsed, diff_ids = parse_config(config)
    if len(diff_ids) != len(manifest.layers):
        raise InvalidRequest("the image has another number of layers than its configuration lists")
    both = zip(diff_ids, manifest.layers, strict=True)
    layers = tuple(ImageLayer(diff_id, blob.digest, blob.size) for diff_id, blob in both)
    return ImageDescription(digest, layers, parsed)


def parse_config(data: bytes) -> tuple[Config, tuple[str, ...]]:
    """The configuration, and the digests of the uncompressed layers, the lowest first.

    Raises InvalidRequest if it is malformed, for another platform, or has too many layers.
    """
    document = parse_json(data, "the configuration of the image")
    if not isinstance(document, dict):
        raise InvalidRequest("invalid image configuration")
    system, architecture = _text(document.get("os")), _text(document.get("architecture"))
    if system not in ("", "linux") or architecture not in ("", machine()):
        raise InvalidRequest(
            f"this image is for {system[:80] or 'linux'}/{architecture[:80]}; "
            f"this machine is linux/{machine()}"
        )
    rootfs = document.get("rootfs")
    diff_ids = _texts(rootfs.get("diff_ids") if isinstance(rootfs, dict) else None)
    if not diff_ids or not all(map(is_digest, diff_ids)):
        raise InvalidRequest("the image does not say what its layers are")
    if (count := len(set(diff_ids))) > MAX_LAYERS:
        raise InvalidRequest(
            f"this image has {count} layers, and a box can have {MAX_LAYERS}: export it as one tar "
            "(`docker export` does) and import that"
        )
    settings = document.get("config") or {}
    if not isinstance(settings, dict):
        raise InvalidRequest("invalid image configuration")
    return Config(_env(_texts(settings.get("Env"))), _text(settings.get("User"))), diff_ids


def parse_json(data: bytes, what: str) -> object:
    """Raises InvalidRequest, which starts with `what`, if it is too large or not JSON."""
    if len(data) > MAX_DOCUMENT:
        raise InvalidRequest(f"{what} is larger than {MAX_DOCUMENT >> 20} MiB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{what} is not JSON") from None


# --- their parts -------------------------------------------------------------------------


def _layer(found: Any) -> Blob:
    blob = _blob(found)
    kind = _text(found.get("mediaType"))
    if "foreign" in kind or "nondistributable" in kind or found.get("urls"):
        raise InvalidRequest("this image has layers that are stored elsewhere: not supported")
    if kind not in _LAYERS:
        raise InvalidRequest(f"this image has layers of an unknown kind: {kind[:80]!r}")
    return blob


def _listed(found: Any) -> Blob:
    blob = _blob(found)
    where = found.get("platform") or {}
    notes = found.get("annotations") or {}
    if not isinstance(where, dict) or not isinstance(notes, dict):
        raise InvalidRequest("the index of the image is broken")
    parts = [_text(where.get(key)) for key in ("os", "architecture", "variant")]
    full = _text(notes.get("io.containerd.image.name"))
    name = full or _text(notes.get("org.opencontainers.image.ref.name"))
    return Blob(blob.digest, blob.size, "/".join(filter(None, parts)), name)


def _blob(found: Any) -> Blob:
    if not isinstance(found, dict):
        raise InvalidRequest("the manifest of the image is broken")
    digest, size = found.get("digest"), found.get("size")
    if not isinstance(digest, str) or not is_digest(digest):
        raise InvalidRequest(f"the image names a part by {str(digest)[:80]!r}: not a sha256 digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidRequest("the image does not give the size of its parts")
    return Blob(digest, size)


def _runs_here(where: str) -> bool:
    variant = where.rpartition("/")[2]
    return {"amd64": "v1", "arm64": "v8", "arm": "v7"}.get(machine()) == variant


def _env(entries: Iterable[str]) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for entry in entries:
        name, _, value = entry.partition("=")
        if name:
            found[name] = value
    return tuple(found.items())


def _list_of(found: object) -> list[object]:
    if not isinstance(found, list):
        raise InvalidRequest("the manifest of the image is broken")
    return found


def _texts(found: object) -> tuple[str, ...]:
    return tuple(map(_text, _list_of(found or [])))


def _text(found: object) -> str:
    if found is None:
        return ""
    if not isinstance(found, str) or "\0" in found or not _can_be_said(found):
        raise InvalidRequest("the configuration of the image has invalid text")
    return found


def _can_be_said(text: str) -> bool:
    """False for lone surrogates, which JSON can contain and which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
