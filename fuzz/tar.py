"""Fuzz what reads archives: it unpacks them or refuses them, and raises nothing else.

    pip install atheris                                  # has wheels for Python 3.11
    mkdir -p corpus && python fuzz/tar.py -max_total_time=60 corpus

The first byte of an input says what the rest is: a tar for a box, a layer of an image, or the
files of a box that was hibernated. Its highest bit asks for the checksums of tar headers to be
repaired, which a mutation could hardly guess.

Run by root, each archive is also unpacked, by a child in a root folder of its own.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import tarfile
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

try:
    import atheris
except ImportError:  # the target itself is still run by tests/test_fuzzing.py
    atheris = None

if atheris:
    parsers = ["hutch.tar", "hutch.guest", "hutch.backends.namespaces.unpacker"]
    with atheris.instrument_imports(include=parsers):
        from hutch.backends.namespaces.unpacker import LayerUnpacker
        from hutch.guest.archive import Damaged, Packer, Unpacker
        from hutch.guest.tar import TarStream, Unpacking
        from hutch.tar import BLOCK, InvalidTar, TarMember, TarReader
else:
    from hutch.backends.namespaces.unpacker import LayerUnpacker
    from hutch.guest.archive import Damaged, Packer, Unpacker
    from hutch.guest.tar import TarStream, Unpacking
    from hutch.tar import BLOCK, InvalidTar, TarMember, TarReader

REPAIR = 0x80
MAX_MEMBERS = 10_000
NOBODY = 65534


class Listing(Unpacker):
    """Checks an archive, and makes nothing."""

    def _make(self, entry: dict[str, Any]) -> None:
        for _, size in entry.get("parts", ()):
            self._source.read(size)


def one_input(data: bytes) -> None:
    if not data:
        return
    kind, data = data[0], data[1:]
    if kind & REPAIR:
        data = repaired(data)
    which = (kind & ~REPAIR) % 3
    parse, unpack = ((parse_tar, untar), (parse_layer, unpack_layer), (parse_archive, restore))[
        which
    ]
    parse(data)
    if not os.geteuid():
        in_a_folder(lambda: unpack(data))


def parse_tar(data: bytes) -> None:
    try:
        walk(TarReader(io.BufferedReader(TarStream(io.BytesIO(data)))))
    except InvalidTar:
        return


def parse_layer(data: bytes) -> None:
    try:
        walk(TarReader(io.BytesIO(data), needs_end=False))
    except InvalidTar:
        return


def walk(tar: TarReader) -> None:
    for number, member in enumerate(tar):
        check(member)
        tar.read()
        if number > MAX_MEMBERS:
            return


def check(member: TarMember) -> None:
    assert 0 <= member.size < 1 << 62 and 0 <= member.mode <= 0o1777, member
    assert len(member.kind) == 1 and member.mtime == member.mtime, member
    os.fsencode(member.name), os.fsencode(member.target)


def parse_archive(data: bytes) -> None:
    try:
        Listing(io.BytesIO(data)).run()
    except Damaged:
        return


def untar(data: bytes) -> None:
    os.mkdir("/in")
    os.chdir("/in")
    try:
        Unpacking(io.BytesIO(data)).run()
    except (InvalidTar, OSError):
        pass
    assert os.listdir("/") == ["in"], "it led out of the folder"


def unpack_layer(data: bytes) -> None:
    try:
        LayerUnpacker(io.BytesIO(data), False, most_bytes=1 << 24, most_entries=1000).run()
    except (InvalidTar, OSError):
        return


def restore(data: bytes) -> None:
    try:
        Unpacker(io.BytesIO(data)).run()
    except (Damaged, OSError):
        return


def in_a_folder(work: Callable[[], None]) -> None:
    """Do it in a child that sees an empty folder and has no rights; fail if it raises."""
    folder = tempfile.mkdtemp(prefix="hutch-fuzz-")
    os.chown(folder, NOBODY, NOBODY)
    read, write = os.pipe()
    try:
        child = os.fork()
        if not child:
            status = 1
            try:
                os.chroot(folder)
                os.chdir("/")
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                work()
                status = 0
            except BaseException:
                os.write(write, traceback.format_exc().encode()[-4000:])
            finally:
                os._exit(status)
        os.close(write)
        with open(read, "rb", closefd=False) as told:
            message = told.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        assert status == 0, message or f"the child ended with status {status}"
    finally:
        os.close(read)
        shutil.rmtree(folder, ignore_errors=True)


def repaired(data: bytes) -> bytes:
    """With right checksums wherever a header could be."""
    found = bytearray(data)
    for place in range(0, len(found) - BLOCK + 1, BLOCK):
        head = found[place : place + BLOCK]
        if head[257:262] == b"ustar":
            total = sum(head[:148]) + sum(head[156:]) + 8 * 32
            found[place + 148 : place + 156] = b"%06o\0 " % total
    return bytes(found)


def seeds() -> Iterator[bytes]:
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        data = a_tar(format)
        for kind in (0, 1):
            yield bytes([kind | REPAIR]) + data
            yield bytes([kind]) + data
    yield b"\0" + a_tar_that_leads_out()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_bytes(b"some content")
        (Path(folder) / "b").symlink_to("a")
        os.link(Path(folder) / "a", Path(folder) / "c")
        out = io.BytesIO()
        packer = Packer(out)
        packer.add(folder)
        packer.end()
    saved = out.getvalue().replace(folder.encode(), b"/w")  # as if it were of a box
    yield bytes([2]) + saved
    # Without checksums, so that a mutation gets beyond the first line.
    lines = [
        {"path": "/w", "kind": "dir", "mode": 0o755, "mtime": 5},
        {"path": "/w/f", "kind": "fifo", "mode": 0o600, "mtime": 5},
        {"path": "/w/l", "kind": "link", "target": "x\udcff", "mode": 0o777, "mtime": 5},
        {"path": "/w/a", "kind": "file", "mode": 0o644, "mtime": 5, "length": 9, "parts": [[2, 3]]},
    ]
    end = json.dumps({"kind": "end", "path": ""}).encode() + b"\n"
    for wrong in (
        {"mtime": 1 << 80}, {"mode": 1 << 40}, {"path": "/a\0b"}, {"path": "/\ud800"},
        {"kind": "link", "target": "a\0b"}, {"kind": "hard", "target": "\ud800"},
        {"kind": "file", "length": 1 << 62, "parts": []},
    ):  # fmt: skip
        yield bytes([2]) + json.dumps({**lines[0], **wrong}).encode() + b"\n" + end
    for key, value in (("linkpath", "a\0b"), ("path", "a\0b"), ("mtime", "nan"), ("size", "-1")):
        for kind in (0, 1):
            yield bytes([kind]) + a_tar(tarfile.PAX_FORMAT, {key: value})
    yield bytes([2]) + b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b"abc" + end


def a_tar(format: int, wrong: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as tar:
        for name, kind, target in (
            ("folder", tarfile.DIRTYPE, ""),
            ("folder/file", tarfile.REGTYPE, ""),
            ("link", tarfile.SYMTYPE, "folder/file"),
            ("same", tarfile.LNKTYPE, "folder/file"),
            ("pipe", tarfile.FIFOTYPE, ""),
            ("folder/.wh.gone", tarfile.REGTYPE, ""),
            ("folder/.wh..wh..opq", tarfile.REGTYPE, ""),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, target, 0o6755
            member.size = 600 if name == "folder/file" else 0
            if format == tarfile.PAX_FORMAT and name == "link":
                member.pax_headers = wrong or {"comment": "x" * 30, "SCHILY.xattr.user.a": "b"}
            tar.addfile(member, io.BytesIO(b"x" * member.size))
        if format != tarfile.USTAR_FORMAT:
            long = tarfile.TarInfo("n" * 120)
            long.type, long.linkname = tarfile.SYMTYPE, "t" * 120
            tar.addfile(long)
    return out.getvalue()


def a_tar_that_leads_out() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, target in (
            ("../a", ""),
            ("up", ".."),
            ("up/b", ""),
            ("c/up", "../.."),
            ("c/up/d", ""),
        ):
            member = tarfile.TarInfo(name)
            if target:
                member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return out.getvalue()


if __name__ == "__main__":
    from _main import main

    main(one_input, seeds())
