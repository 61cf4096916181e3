"""The runtime bundle as an image, for clusters: its root file system is the bundle.

The archive is an OCI layout and what `docker save` writes at once, so `docker load`, `podman load`,
`ctr images import`, `skopeo copy oci-archive:` and `crane push` take it.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hutch.errors import InvalidRequest

from . import server_image
from .bundle import Bundle
from .oci.manifest import machine
from .oci.reference import Reference, parse

OCI = "application/vnd.oci.image"
BinaryFile = io.BufferedRandom | io.BytesIO


def write(bundle: Bundle, name: str, into: Path, *, server: bool = False) -> None:
    """Write the archive, for machines like this one. `name`: of the image, as a registry has it.

    `server`: with what `hutch serve` needs, as another layer. Raises InvalidRequest if the name is
    invalid, or the file cannot be written, and BackendUnavailable if something is not installed.
    """
    image = parse(name)
    try:
        with (
            tempfile.TemporaryFile("w+b") as layer,
            tempfile.TemporaryFile("w+b") as second,
            tarfile.open(into, "w") as archive,
        ):
            _write_layer(bundle.path, layer)
            if server:
                server_image.write_layer(bundle, second)
                _write(archive, [layer, second], server_image.config(), image)
            else:
                _write(archive, [layer], {}, image)
    except OSError as exc:
        raise InvalidRequest(f"cannot write {into}: {exc.strerror}") from None


def _write_layer(folder: Path, layer: BinaryFile) -> None:
    with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_of_root)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make root the owner, instead of the user who made the bundle here."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _write(
    archive: tarfile.TarFile,
    layers: Sequence[BinaryFile],
    config: Mapping[str, object],
    image: Reference,
) -> None:
    def add(path: str, size: int, content: BinaryFile) -> None:
        member = tarfile.TarInfo(path)
        member.size, member.mode = size, 0o644
        content.seek(0)
        archive.addfile(member, content)

    def add_text(path: str, content: object) -> None:
        text = json.dumps(content).encode()
        add(path, len(text), io.BytesIO(text))

    def add_blob(kind: str, content: BinaryFile) -> dict[str, object]:
        content.seek(0)
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        size = content.seek(0, io.SEEK_END)
        add(f"blobs/sha256/{digest}", size, content)
        return {"mediaType": f"{OCI}.{kind}", "digest": f"sha256:{digest}", "size": size}

    def blob_of(kind: str, content: object) -> dict[str, object]:
        return add_blob(kind, io.BytesIO(json.dumps(content).encode()))

    roots = [add_blob("layer.v1.tar", layer) for layer in layers]
    described = blob_of(
        "config.v1+json",
        {
            "architecture": machine(),
            "os": "linux",
            "config": config,
            "rootfs": {"type": "layers", "diff_ids": [root["digest"] for root in roots]},
        },
    )
    kind = f"{OCI}.manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": described, "layers": roots}
    listed = blob_of("manifest.v1+json", manifest)
    listed["annotations"] = {
        "io.containerd.image.name": str(image),
        "org.opencontainers.image.ref.name": image.tag,
    }
    add_text("oci-layout", {"imageLayoutVersion": "1.0.0"})
    add_text("index.json", {"schemaVersion": 2, "manifests": [listed]})
    saved = {
        "Config": _path(described),
        "RepoTags": [image.familiar],
        "Layers": [_path(root) for root in roots],
    }
    add_text("manifest.json", [saved])


def _path(blob: dict[str, object]) -> str:
    return f"blobs/sha256/{str(blob['digest']).removeprefix('sha256:')}"
