"""The files of a box as one stream: what goes in comes out, and what cannot is told."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hutch.guest import archive, tar
from hutch.guest.archive import Damaged, Packer, Unpacker


def packed(*folders: Path) -> tuple[bytes, list[tuple[str, str]]]:
    out = io.BytesIO()
    packer = Packer(out)
    for folder in folders:
        packer.add(str(folder))
    lost = packer._lost
    packer._lost = []  # or they would be told on the tests' own stderr
    packer.end()
    return out.getvalue(), lost


def unpacked(data: bytes) -> list[tuple[str, str]]:
    unpacker = Unpacker(io.BytesIO(data))
    unpacker.run()
    return unpacker.lost


def remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    folder.rmdir()


def test_a_tree_comes_back_with_modes_times_and_links(tmp_path: Path) -> None:
    top = tmp_path / "work"
    (top / "inner" / "empty").mkdir(parents=True)
    (top / "run.sh").write_text("echo hi\n")
    (top / "run.sh").chmod(0o750)
    (top / "big").write_bytes(os.urandom(3_000_000))
    (top / "link").symlink_to("inner/nowhere")
    os.link(top / "run.sh", top / "inner" / "same.sh")
    os.mkfifo(top / "pipe", 0o640)
    os.utime(top / "run.sh", ns=(1_600_000_000_123456789,) * 2)
    os.utime(top / "inner", ns=(1_500_000_000_000000000,) * 2)
    big = (top / "big").read_bytes()
    data, lost = packed(top)
    assert not lost
    remove(top)

    assert unpacked(data) == []
    assert (top / "big").read_bytes() == big
    assert (top / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (top / "run.sh").stat().st_mtime_ns == 1_600_000_000_123456789
    assert (top / "inner").stat().st_mtime_ns == 1_500_000_000_000000000
    assert os.readlink(top / "link") == "inner/nowhere"
    assert (top / "inner" / "same.sh").samefile(top / "run.sh")
    assert (top / "inner" / "empty").is_dir() and (top / "pipe").is_fifo()


def test_a_folder_comes_back_without_the_bits_that_a_box_may_not_set(tmp_path: Path) -> None:
    top = tmp_path / "work"
    (top / "shared").mkdir(parents=True)
    (top / "shared").chmod(0o2750)
    os.utime(top / "shared", (5, 5))
    data, _ = packed(top)
    remove(top)
    assert unpacked(data) == []
    there = (top / "shared").stat()
    assert (oct(there.st_mode & 0o7777), there.st_mtime) == ("0o750", 5)


def test_a_sparse_file_takes_no_more_room_than_it_took(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    with open(top / "sparse", "wb") as file:
        file.truncate(300_000_000)
        file.seek(200_000_000)
        file.write(b"here")
    data, lost = packed(top)
    assert not lost and len(data) < 1_000_000
    remove(top)
    assert unpacked(data) == []
    info = (top / "sparse").stat()
    assert info.st_size == 300_000_000 and info.st_blocks * 512 < 1_000_000
    with open(top / "sparse", "rb") as file:
        file.seek(200_000_000)
        assert file.read(5) == b"here\0"


def test_names_that_are_not_text_come_back(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    name = os.path.join(os.fsencode(top), b"caf\xe9\nnew line")
    with open(name, "wb") as file:
        file.write(b"x")
    data, lost = packed(top)
    assert not lost
    remove(top)
    assert unpacked(data) == [] and os.path.exists(name)


def test_what_is_there_already_is_replaced(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_text("saved")
    data, _ = packed(top)
    (top / "a").unlink()
    (top / "a").symlink_to("/etc/passwd")
    assert unpacked(data) == []
    assert not (top / "a").is_symlink() and (top / "a").read_text() == "saved"


def test_a_socket_is_told_and_the_rest_is_kept(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_text("kept")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(top / "sock"))
        data, lost = packed(top)
    assert [path for path, _ in lost] == [str(top / "sock")] and "socket" in lost[0][1]
    remove(top)
    unpacked(data)
    assert (top / "a").read_text() == "kept"


def test_an_archive_that_was_cut_off_says_so(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_bytes(b"x" * 100_000)
    data, _ = packed(top)
    remove(top)
    for size in (0, 1, 50_000, len(data) - 1):
        with pytest.raises(Damaged, match="ended early"):
            unpacked(data[:size])


def test_a_file_that_cannot_be_made_does_not_cost_those_after_it(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_bytes(b"x" * 3_000_000)
    (top / "b").write_text("after")
    data, _ = packed(top)
    remove(top)
    top.mkdir()
    (top / "a").mkdir()  # in its way
    lost = unpacked(data)
    assert [path for path, _ in lost] == [str(top / "a")]
    assert (top / "b").read_text() == "after"


def seek_that_fails(number: int) -> object:
    real = os.lseek

    def seek(fd: int, place: int, whence: int) -> int:
        if whence in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(number, os.strerror(number))
        return real(fd, place, whence)

    return seek


@pytest.mark.parametrize("answer", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENXIO])
def test_a_kernel_that_cannot_tell_holes_costs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """gVisor answers EINVAL to SEEK_DATA; ENXIO for a file full of data is a lie."""
    top = tmp_path / "work"
    top.mkdir()
    full = os.urandom(3_000_001)
    (top / "full").write_bytes(full)
    with open(top / "sparse", "wb") as file:
        file.truncate(50_000_000)
        file.seek(20_000_000)
        file.write(os.urandom(100_000))
    sparse = (top / "sparse").read_bytes()
    monkeypatch.setattr(archive.os, "lseek", seek_that_fails(answer))
    data, lost = packed(top)
    monkeypatch.undo()
    assert not lost and len(data) < 4_000_000, "holes stay holes"
    remove(top)
    assert unpacked(data) == []
    assert (top / "full").read_bytes() == full
    assert (top / "sparse").read_bytes() == sparse


def test_a_kernel_that_can_tell_neither_holes_nor_blocks_costs_no_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(10_000)
    (tmp_path / "full").write_bytes(content)
    monkeypatch.setattr(archive.os, "lseek", seek_that_fails(errno.EINVAL))
    told: Any = SimpleNamespace(st_size=len(content), st_blocks=0)
    with open(tmp_path / "full", "rb") as file:
        assert archive.data_parts(file.fileno(), told) == [(0, len(content))]


class Listing(Unpacker):
    """Checks an archive and makes nothing: a changed path might name any file."""

    def _make(self, entry: dict[str, Any]) -> None:
        for _, size in entry.get("parts", ()):
            self._source.read(size)


def test_every_change_of_an_archive_is_noticed(tmp_path: Path) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_bytes(b"some content")
    (top / "b").symlink_to("a")
    data, _ = packed(top)
    Listing(io.BytesIO(data)).run()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(Damaged):
            Listing(io.BytesIO(changed)).run()


def test_an_archive_of_an_earlier_build_is_still_unpacked(tmp_path: Path) -> None:
    entry = {
        "path": str(tmp_path / "a"), "mode": 0o644, "mtime": 1, "kind": "file", "length": 5,
        "parts": [[0, 5]],
    }  # fmt: skip
    end = {"kind": "end", "path": ""}
    assert (
        unpacked(json.dumps(entry).encode() + b"\nhello" + json.dumps(end).encode() + b"\n") == []
    )
    assert (tmp_path / "a").read_text() == "hello"


def test_a_file_that_shrinks_while_it_is_saved_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_bytes(b"x" * 10_000)
    real = archive.data_parts

    def shrink(fd: int, info: os.stat_result) -> list[tuple[int, int]]:
        parts = real(fd, info)
        os.truncate(top / "a", 10)
        return parts

    monkeypatch.setattr(archive, "data_parts", shrink)
    data, lost = packed(top)
    assert [path for path, _ in lost] == [str(top / "a")]
    assert unpacked(data) == []


def test_a_disk_that_keeps_something_else_keeps_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"some content")
    data, _ = packed(tmp_path / "a")
    write = os.pwrite
    monkeypatch.setattr(
        archive.os, "pwrite", lambda fd, some, place: write(fd, bytes(len(some)), place)
    )
    with pytest.raises(OSError, match="not written as it was saved"):
        unpacked(data)


def test_a_full_disk_keeps_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = tmp_path / "work"
    top.mkdir()
    (top / "a").write_bytes(b"x" * 10_000)
    data, _ = packed(top)

    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(archive.os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        unpacked(data)


def test_a_file_that_shrinks_while_it_goes_into_a_tar_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    monkeypatch.chdir(tmp_path)
    writer = tar.TarWriter(io.BytesIO())
    real = writer._head

    def shrink(*args: Any, **more: Any) -> None:
        real(*args, **more)
        os.truncate("a", 10)

    monkeypatch.setattr(writer, "_head", shrink)
    assert [path for path, _ in writer.run()] == ["a"]
