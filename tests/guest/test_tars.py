"""The files of a box as a tar, and back, from any program and with any intent."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import random
import shutil
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import wire
from hutch.errors import InvalidRequest


async def tar(guest: Guest) -> tuple[bytes, list[list[str]]]:
    """The tar, and what could not be kept."""
    made, lost = b"", b""
    async with guest.link.call(wire.Tar()) as call:
        async for event in call:
            if isinstance(event, wire.Data):
                if event.channel == wire.STDOUT:
                    made += event.data
                else:
                    lost += event.data
        assert call.result["exit_code"] == 0
    return made, [json.loads(line) for line in lost.splitlines()]


async def untar(guest: Guest, data: bytes) -> tuple[int, list[list[str]]]:
    lost = b""
    async with guest.link.call(wire.Untar()) as call:
        await call.feed(data)
        async for event in call:
            if isinstance(event, wire.Data):
                lost += event.data
        return call.result["files"], [json.loads(line) for line in lost.splitlines()]


def made(*members: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info, data in members:
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mtime = kind, target, 1_000_000_000
    return info


def in_a_guest(tmp_path: Path, work: Callable[[Guest, Path], object]) -> None:
    """With a working directory that has nothing else in it."""
    folder = tmp_path / "work"
    folder.mkdir()

    async def inner(guest: Guest) -> None:
        await work(guest, folder)  # type: ignore[misc]

    lib = tmp_path / "lib"
    lib.mkdir()
    with_guest(folder, inner, lib=lib)


LONG = "é" * 90 + "/" + "x" * 200


def test_a_tar_of_ours_is_what_others_read(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        (folder / "a").mkdir(mode=0o700)
        (folder / "a" / "file").write_bytes(b"x" * 1000)
        (folder / "a" / "file").chmod(0o4755)
        (folder / "empty").touch()
        os.link(folder / "a" / "file", folder / "same")
        (folder / "link").symlink_to("/etc/passwd")
        (folder / LONG).parent.mkdir()
        (folder / LONG).write_bytes(b"long")
        os.mkfifo(folder / "fifo")
        with open(os.open(bytes(folder) + b"/\xff", os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.write(b"odd")
        data, lost = await tar(guest)
        assert not lost
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            found = {info.name: info for info in archive}
            assert found["a"].isdir() and found["a"].mode == 0o700
            assert found["same"].mode == 0o755 and found["same"].size == 1000
            assert found["a/file"].islnk() and found["a/file"].linkname == "same"
            assert found["link"].issym() and found["link"].linkname == "/etc/passwd"
            assert found["fifo"].isfifo()
            assert archive.extractfile(LONG).read() == b"long"  # type: ignore[union-attr]
            assert archive.extractfile("\udcff").read() == b"odd"  # type: ignore[union-attr]
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        assert (await untar(guest, data))[0] == 7
        assert (folder / "a" / "file").read_bytes() == b"x" * 1000
        assert (folder / "same").samefile(folder / "a" / "file")
        assert os.readlink(folder / "link") == "/etc/passwd"
        assert (folder / LONG).read_bytes() == b"long" and (folder / "fifo").is_fifo()
        assert (folder / os.fsdecode(b"\xff")).read_bytes() == b"odd"

    in_a_guest(tmp_path, work)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_tars_of_others_are_read(tmp_path: Path, format: int, pack: Callable[..., bytes]) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        long = "a" * 80 + "/" + "b" * 90  # with a prefix, in the oldest form
        data = made(
            (member("./d", tarfile.DIRTYPE), b""), (member("d/file"), b"content"),
            (member(long), b"long"), (member("d/link", tarfile.SYMTYPE, "file"), b""),
            (member("/absolute"), b"below the folder all the same"),
            format=format,
        )  # fmt: skip
        assert await untar(guest, pack(data)) == (4, [])
        assert (folder / "d/file").read_bytes() == b"content"
        assert (folder / "d/file").stat().st_mtime == 1_000_000_000
        assert (folder / long).read_bytes() == b"long"
        assert (folder / "absolute").exists()

    in_a_guest(tmp_path, work)


def test_what_leads_out_or_is_no_file_is_skipped_and_told(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        device = member("device", tarfile.CHRTYPE)
        device.devmajor, device.devminor = 1, 3
        special = member("special")
        special.mode = 0o7777
        data = made(
            (member("../out"), b"x"), (member("a/../../out"), b"x"), (device, b""),
            (member("block", tarfile.BLKTYPE), b""), (member("hard", tarfile.LNKTYPE, "../x"), b""),
            (member("hard2", tarfile.LNKTYPE, "not-there"), b""), (member("odd", b"Q"), b"?" * 700),
            (member("."), b"nameless"), (special, b"!"),
        )  # fmt: skip
        files, lost = await untar(guest, data)
        assert (files, {path for path, _ in lost}) == (1, {
            "../out", "a/../../out", "device", "block", "hard", "hard2", "odd", ".",
        })  # fmt: skip
        assert stat.S_IMODE((folder / "special").stat().st_mode) == 0o777
        assert os.listdir(folder) == ["special"] and not (folder.parent / "out").exists()

    in_a_guest(tmp_path, work)


def test_a_link_in_the_way_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        victim = folder.parent / "victim"
        victim.write_text("safe")
        data = made(
            (member("x", tarfile.SYMTYPE, str(victim)), b""), (member("x"), b"mine"),
        )  # fmt: skip
        assert await untar(guest, data) == (2, [])
        assert victim.read_text() == "safe" and (folder / "x").read_text() == "mine"

    in_a_guest(tmp_path, work)


def test_a_link_of_a_tar_leads_none_of_its_files_out(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        link, inner = member("up", tarfile.SYMTYPE, ".."), member("in", tarfile.SYMTYPE, "real")
        away = member("in", tarfile.SYMTYPE, str(folder.parent))
        (folder.parent / "victim").write_text("safe")
        (folder.parent / "closed").mkdir(mode=0o700)
        data = made(
            (link, b""), (member("up/out"), b"x"), (member("up/new/out"), b"x"),
            (member("up/closed", tarfile.DIRTYPE), b""), (member("up/made", tarfile.DIRTYPE), b""),
            (member("stolen", tarfile.LNKTYPE, "up/victim"), b""),
            (member("real", tarfile.DIRTYPE), b""), (inner, b""), (member("in/file"), b"kept"),
            (away, b""), (member("in/out"), b"x"),
        )  # fmt: skip
        files, lost = await untar(guest, data)
        assert {path for path, _ in lost} == {
            "up/out", "up/new/out", "up/closed/", "up/made/", "stolen", "in/out",
        }  # fmt: skip
        assert files == 4 and (folder / "real/file").read_text() == "kept"
        assert not {"out", "new", "made"} & {*os.listdir(folder.parent)}
        assert stat.S_IMODE((folder.parent / "closed").stat().st_mode) == 0o700

    in_a_guest(tmp_path, work)


GOOD = made((member("file"), b"content"), (member("next"), bytes(3000)))
HUGE = tarfile.TarInfo("huge")
HUGE.size = 1 << 50


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x", b"not a tar at all" * 100, GOOD[:300], GOOD[:600], GOOD[:1600],
        gzip.compress(GOOD)[:60], b"\x1f\x8b" + bytes(50), gzip.compress(b"no tar" * 200),
        GOOD[:148] + b"00000000" + GOOD[156:], HUGE.tobuf() + b"x",
        made((member("p", tarfile.XHDTYPE), b"999 path=x\n"), (member("f"), b"")),
        made((member("p", tarfile.XHDTYPE), b"11 size=-5\n"), (member("f"), b"")),
        made((member("p", tarfile.XHDTYPE), b"15 mtime=1e999\n"), (member("f"), b"")),
        made((member("p", tarfile.XHDTYPE), bytes(2 << 20)), (member("f"), b"")),
    ],
    ids=range(15),
)  # fmt: skip
def test_what_is_no_tar_is_refused_with_what_is_wrong(tmp_path: Path, data: bytes) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        with pytest.raises(InvalidRequest, match=r"not a tar, or a broken one: .+"):
            await untar(guest, data)
        assert await guest.shell("echo fine") == (0, "fine\n")

    in_a_guest(tmp_path, work)


def test_a_tar_that_breaks_off_says_how_many_of_its_files_stay(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        with pytest.raises(InvalidRequest, match=r"ended early \(.* and stay: 1\)"):
            await untar(guest, GOOD[:1600])
        assert (folder / "file").read_bytes() == b"content"

    in_a_guest(tmp_path, work)


def test_any_damage_ends_with_an_answer(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        dice = random.Random(7)
        good = made(
            (member("d", tarfile.DIRTYPE), b""), (member(LONG), b"long"),
            (member("l", tarfile.SYMTYPE, "d"), b""), (member("f"), b"x" * 700),
        )  # fmt: skip
        for _ in range(150):
            data = bytearray(good)
            for _ in range(dice.randint(1, 20)):
                data[dice.randrange(len(data))] = dice.randrange(256)
            try:
                await untar(
                    guest, bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
                )
            except InvalidRequest:
                pass

    in_a_guest(tmp_path, work)


def test_a_large_tar_passes_with_the_guest_s_memory_flat(tmp_path: Path) -> None:
    async def work(guest: Guest, folder: Path) -> None:
        with open(folder / "large", "wb") as file:
            file.truncate(64 << 20)
        data, _ = await tar(guest)
        (folder / "large").unlink()
        assert (await untar(guest, gzip.compress(data, 1)))[0] == 1
        assert (folder / "large").stat().st_size == 64 << 20

    in_a_guest(tmp_path, work)


def test_unpacking_that_was_stopped_has_ended_when_that_is_said(tmp_path: Path) -> None:
    data = made((member("one"), bytes(1 << 20)))

    def writes(pid: int) -> bool:
        try:
            files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            return False
        return any(file.endswith("/one") for file in files)

    async def work(guest: Guest, folder: Path) -> None:
        for _ in range(5):
            async with guest.link.call(wire.Untar()) as call:
                await call.send(data[: 1 << 19])
                while not any(map(writes, guest.tree())):
                    await asyncio.sleep(0.01)
                await call.stop()
                assert not any(map(writes, guest.tree()))

    in_a_guest(tmp_path, work)
