"""Fuzz what images say of themselves: it is read or raises InvalidRequest, nothing else.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/oci.py -max_total_time=60 corpus

The first byte of an input says what the rest is: a manifest or index, a configuration, an image in
a tar, a packed layer, or the name of an image. Layers themselves are tars: see fuzz/tar.py.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from hutch.backends.namespaces import decompressor

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

try:
    import atheris
except ImportError:  # the target itself is still run by tests/test_fuzzing.py
    atheris = None

if atheris:
    with atheris.instrument_imports(include=["hutch.images.oci"]):
        from hutch.errors import InvalidRequest
        from hutch.images.oci.archive import open_stream
        from hutch.images.oci.manifest import (
            MAX_LAYERS,
            Config,
            Index,
            Manifest,
            choose,
            digest_of,
            machine,
            parse_config,
            parse_document,
        )
        from hutch.images.oci.plain import GZIP, PIECE, ZSTD, plain
        from hutch.images.oci.reference import is_digest, parse
else:
    from hutch.errors import InvalidRequest
    from hutch.images.oci.archive import open_stream
    from hutch.images.oci.manifest import (
        MAX_LAYERS,
        Config,
        Index,
        Manifest,
        choose,
        digest_of,
        machine,
        parse_config,
        parse_document,
    )
    from hutch.images.oci.plain import GZIP, PIECE, ZSTD, plain
    from hutch.images.oci.reference import is_digest, parse

MAX_PLAIN = 1 << 24  # bytes of a packed layer that are looked at


def one_input(data: bytes) -> None:
    if not data:
        return
    check = (document, config, archive, packed, reference)[data[0] % 5]
    try:
        check(data[1:])
    except InvalidRequest:
        return


def document(data: bytes) -> None:
    found = parse_document(data)
    if isinstance(found, Index):
        assert is_digest(choose(found).digest)
        return
    assert isinstance(found, Manifest)
    for blob in (found.config, *found.layers):
        assert is_digest(blob.digest) and blob.size >= 0, blob


def config(data: bytes) -> None:
    found, diff_ids = parse_config(data)
    check_config(found)
    assert 0 < len(set(diff_ids)) <= MAX_LAYERS and all(map(is_digest, diff_ids))


def check_config(found: Config) -> None:
    for text in (found.user, *(word for pair in found.env for word in pair)):
        assert "\0" not in text, found
        text.encode()


def archive(data: bytes) -> None:
    if data.startswith((GZIP, *ZSTD)):
        return  # that is `packed`
    with open(os.memfd_create("image"), "w+b") as file:
        file.write(data)
        file.flush()
        with open_stream(file, parse("image:latest")) as found:
            check_config(found.image.config)
            for layer in found.image.layers:
                assert is_digest(layer.diff_id) and 0 <= layer.size <= len(data), layer
                with found.open(layer, Path("/nowhere"), lambda done: None) as blob:
                    while blob.read(PIECE):
                        continue


def packed(data: bytes) -> None:
    if data.startswith(ZSTD):
        decompress(data)
        return
    left = MAX_PLAIN
    for piece in plain(io.BytesIO(data)):
        assert 0 < len(piece) <= max(PIECE, len(data)), len(piece)
        left -= len(piece)
        if left < 0:
            return


def decompress(data: bytes) -> None:
    """What runs in a confined process, without the process."""
    with open(os.memfd_create("packed"), "w+b", 0) as file, open(os.devnull, "wb", 0) as out:
        file.write(data)
        file.seek(0)
        with contextlib.suppress(zstd.ZstdError):
            decompressor.decompress(file.fileno(), out.fileno(), zstd)


def reference(data: bytes) -> None:
    found = parse(data.decode(errors="surrogateescape"))
    assert parse(str(found)) == found, found


def seeds() -> Iterator[bytes]:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    plain_layer = layer.getvalue()
    configuration = json.dumps({
        "os": "linux", "architecture": machine(),
        "config": {"Env": ["PATH=/bin", "A=b"], "User": "1000"},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(plain_layer)]},
    }).encode()  # fmt: skip
    manifest = json.dumps({
        "schemaVersion": 2,
        "config": {"digest": digest_of(configuration), "size": len(configuration)},
        "layers": [{
            "mediaType": "application/vnd.oci.image.layer.v1.tar",
            "digest": digest_of(plain_layer), "size": len(plain_layer),
        }],
    }).encode()  # fmt: skip
    index = json.dumps({
        "schemaVersion": 2,
        "manifests": [{
            "digest": digest_of(manifest), "size": len(manifest),
            "platform": {"os": "linux", "architecture": machine()},
            "annotations": {"org.opencontainers.image.ref.name": "latest"},
        }],
    }).encode()  # fmt: skip
    yield b"\0" + manifest
    yield b"\0" + index
    yield b"\0" + b"[" * 5000  # deeper than the parser of JSON goes
    yield b"\1" + configuration
    for kind, content in ((0, manifest), (0, index), (1, configuration)):
        for other in spoiled(json.loads(content)):
            yield bytes([kind]) + json.dumps(other).encode()
    blobs = {digest_of(each): each for each in (plain_layer, configuration, manifest)}
    layout = {f"blobs/sha256/{digest[7:]}": each for digest, each in blobs.items()}
    yield b"\2" + tar_of({"oci-layout": b"{}", "index.json": index, **layout})
    listed = [{"Config": "c.json", "RepoTags": ["image:latest"], "Layers": ["l/layer.tar"]}]
    saved = {"c.json": configuration, "l/layer.tar": plain_layer}
    yield b"\2" + tar_of({"manifest.json": json.dumps(listed).encode(), **saved})
    yield b"\2" + tar_of({"etc/passwd": b"root"})
    yield b"\3" + gzip.compress(plain_layer, mtime=0) * 2 + bytes(100)
    yield b"\4" + b"registry.example:5000/team/image:1.0@" + digest_of(b"").encode()
    yield b"\4" + b"python"


def spoiled(value: object) -> Iterator[object]:
    """The same value with one of its parts replaced by something of another kind, in turn."""
    yield from (None, [], {}, "x", -1)
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from ({**value, key: other} for other in spoiled(inner))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            for other in spoiled(inner):
                yield [*value[:place], other, *value[place + 1 :]]


def tar_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
