"""Tars and trees of untrusted origin cost no more than their size."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from hutch import tree
from hutch.tar import MAX_EXTRA, MAX_GLOBAL, InvalidTar, TarReader


def walked(top: Path, **bounds: Any) -> list[str]:
    fd = os.open(top, tree.FOLDER)
    try:
        return [entry.path for entry in tree.walk(fd, **bounds)]
    finally:
        os.close(fd)


def test_a_walk_opens_each_folder_once_however_deep_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepest = tmp_path.joinpath(*["d"] * 60)
    for number in range(50):
        (deepest / str(number)).mkdir(parents=True)
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args, **more: opened.append(1) or real(*args, **more))
    paths = walked(tmp_path)
    assert len(paths) == 60 + 50
    assert len(opened) <= 60 + 50 + 2


def test_a_walk_is_in_order_and_holds_few_descriptors(tmp_path: Path) -> None:
    depth = tree.MAX_HELD + 40
    folder = tmp_path
    for _ in range(depth):
        folder = folder / "d"
        folder.mkdir()
        (folder / "a").touch()
        (folder / "e").mkdir()
        (folder / "e" / "f").touch()
    (tmp_path / "z").touch()
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(tmp_path, tree.FOLDER)
    most, paths = 0, []
    for entry in tree.walk(fd):
        most = max(most, len(os.listdir("/proc/self/fd")))
        assert os.stat(entry.name, dir_fd=entry.folder).st_ino == entry.status.st_ino
        paths.append(entry.path)
    os.close(fd)
    assert most <= before + tree.MAX_HELD + 5
    assert len(os.listdir("/proc/self/fd")) == before
    assert paths[:4] == ["d", "z", "d/a", "d/d"]
    expected = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert set(paths) == expected and len(paths) == len(expected)


def test_a_walk_that_is_left_early_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    before = len(os.listdir("/proc/self/fd"))
    fd = os.open(tmp_path, tree.FOLDER)
    entries = tree.walk(fd)
    assert [next(entries).path for _ in range(3)] == ["a", "a/b", "a/b/c"]
    entries.close()
    os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(tree.TreeTooLarge):
        walked(tmp_path, max_depth=2)
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_file_that_cannot_go_keeps_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    (top / "a" / "sub" / "deep").mkdir(parents=True)
    (top / "a" / "keep").touch()
    (top / "a" / "sub" / "secret").touch()
    real = os.unlink

    def unlink(path: Any, **more: Any) -> None:
        if path == "keep":
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        real(path, **more)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(OSError):
        tree.remove(top)
    assert [path.name for path in top.rglob("*") if path.is_file()] == ["keep"]


def headers(kind: bytes, size: int, count: int) -> bytes:
    """A tar of pax headers of this kind, each of different keys, and one file."""
    packed = io.BytesIO()
    for number in range(count):
        record = b" k%d=" % number
        length = size - len(record) - len(str(size)) - 1
        body = b"%d%s%s\n" % (size, record, b"x" * length)
        info = tarfile.TarInfo("headers")
        info.type, info.size = kind, len(body)
        packed.write(info.tobuf(tarfile.USTAR_FORMAT) + body + bytes(-len(body) % 512))
    packed.write(tarfile.TarInfo("file").tobuf() + bytes(1024))
    packed.seek(0)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("kind", "most"), [(tarfile.XHDTYPE, MAX_EXTRA), (tarfile.XGLTYPE, MAX_GLOBAL)]
)
def test_headers_in_a_row_are_bounded_together(kind: bytes, most: int) -> None:
    size = 16_384
    few, many = most // size, most // size + 1
    assert [member.name for member in TarReader(io.BytesIO(headers(kind, size, few)))] == ["file"]
    with pytest.raises(InvalidTar, match="headers"):
        list(TarReader(io.BytesIO(headers(kind, size, many))))
