"""The files of a box as one stream: what goes in comes out, and what cannot is told."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

from hutch.guest.archive import Packer, Unpacker


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
    return Unpacker(io.BytesIO(data)).run()


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
    assert ("/", "the archive ended early") in unpacked(data[:50_000])


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
