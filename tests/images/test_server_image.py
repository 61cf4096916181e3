"""What a server needs in an image. That it runs is seen in a cluster: tests/cli."""

from __future__ import annotations

import hashlib
import io
import tarfile

import pytest

from hutch import factory
from hutch.errors import BackendUnavailable
from hutch.images import server_image


def written() -> bytes:
    layer = io.BytesIO()
    server_image.write_layer(factory.bundle(), layer)
    return layer.getvalue()


def digests(layer: bytes) -> dict[str, str]:
    """Of each file and its header; but of byte code, which depends on what this process has loaded,
    only of the header.
    """
    found = {}
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        for entry in archive:
            is_file = entry.isfile() and not entry.name.endswith(".pyc")
            file = archive.extractfile(entry) if is_file else None
            content = file.read() if file else b""
            found[entry.name] = hashlib.sha256(entry.tobuf() + content).hexdigest()
    return found


def test_the_same_installation_gives_the_same_layer_with_all_that_is_required() -> None:
    layer = written()
    assert digests(layer) == digests(written())
    with tarfile.open(fileobj=io.BytesIO(layer)) as archive:
        names = set(archive.getnames())
        command = archive.getmember("server/bin/hutch")
        assert (command.mode, command.uid, command.mtime) == (0o755, 0, 0)
    for needed in ("ssl.py", "sqlite3/__init__.py", "hutch/cli/serve.py", "msgspec/__init__.py",
                   "httpcore/__init__.py", "anyio/__init__.py"):  # fmt: skip
        assert f"server/site/{needed}" in names
    assert any(name.startswith("server/lib/libssl.so") for name in names)
    # Boxes may have this image: nothing at the root is another than the bundle's.
    assert {name.split("/")[0] for name in names} <= {"server", "lib64"}
    assert "server/site/uv" not in names and not [n for n in names if n.endswith(".pth")]


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise server_image.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(server_image.metadata, "distribution", missing)
    with pytest.raises(BackendUnavailable, match="hutch is not installed: install Hutch again"):
        list(server_image._distributions())
