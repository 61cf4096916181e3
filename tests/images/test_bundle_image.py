"""The runtime as an image, for clusters."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from hutch.errors import InvalidRequest
from hutch.images.bundle import Bundle
from hutch.images.bundle_image import write
from hutch.images.oci.archive import open_archive
from hutch.images.oci.reference import parse

NAME = "registry.example.org/hutch/runtime:1"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Not a real one, which takes seconds: a file that can be executed, and a link."""
    folder = tmp_path / "bundle"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python3").write_bytes(b"\x7fELF")
    (folder / "bin/python3").chmod(0o755)
    (folder / "bin/python").symlink_to("python3")
    return Bundle(folder)


def test_the_root_of_the_image_is_the_bundle(bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "image.tar"
    write(bundle, NAME, file)
    with open_archive(file, parse(NAME)) as archive:  # which checks every digest
        assert len(archive.image.layers) == 1
    with tarfile.open(file) as whole:
        # For programs that read what `docker save` writes.
        saved = whole.extractfile("manifest.json")
        assert saved
        (entry,) = json.load(saved)
        assert entry["RepoTags"] == [NAME]
        (path,) = entry["Layers"]
        found = whole.extractfile(path)
        assert found
        with tarfile.open(fileobj=found) as root:
            python, link = root.getmember("bin/python3"), root.getmember("bin/python")
            assert (python.mode & 0o777, python.uid, python.uname) == (0o755, 0, "")
            assert link.issym() and link.linkname == "python3"


def test_what_cannot_be_written_is_said(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot write .*/missing/x: No such file"):
        write(bundle, NAME, tmp_path / "missing/x")
    with pytest.raises(InvalidRequest):
        write(bundle, "No Name", tmp_path / "x")
    assert not (tmp_path / "x").exists()
