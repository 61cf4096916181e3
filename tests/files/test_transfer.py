"""Files and folders on their way between this machine and a box."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hutch import (
    AsyncSandbox,
    HutchError,
    InvalidRequest,
    LimitReached,
    NotFound,
    NotPermitted,
    Sandbox,
)
from hutch import operations as op
from hutch.client._async_files import AsyncFiles
from hutch.client._sync_files import Files
from hutch.types import Entry

pytest_plugins = ["folders_of_tests"]
pytestmark = pytest.mark.usefixtures("shared_box")  # which skips where there can be none


def sh(box: Sandbox, command: str) -> str:
    return box.commands.run(command, check=True).stdout


def below(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder: files with their content, folders with None."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


# --- there and back ---------------------------------------------------------------------


def test_a_file_comes_back_as_it_went(shared_box, folder, tmp_path):
    data = os.urandom(3_000_000)
    (tmp_path / "f").write_bytes(data)
    (tmp_path / "f").chmod(0o750)
    assert shared_box.files.upload(tmp_path / "f", f"{folder}/sub/g") == 1
    assert shared_box.files.stat(f"{folder}/sub/g").mode == 0o750
    assert shared_box.files.download(f"{folder}/sub/g", str(tmp_path / "new/h")) == 1
    assert (tmp_path / "new/h").read_bytes() == data
    assert stat.S_IMODE((tmp_path / "new/h").stat().st_mode) == 0o750
    shared_box.files.write(f"{folder}/sub/g", "")
    shared_box.files.download(f"{folder}/sub/g", tmp_path / "new/h")
    assert (tmp_path / "new/h").read_bytes() == b""


def test_a_folder_comes_back_as_it_went(shared_box, folder, tmp_path):
    source = tmp_path / "source"
    for name in ("a.txt", "sub/b", "sub/deep/c"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    (source / "empty").mkdir()
    assert shared_box.files.upload(source, folder + "/t") == 3
    assert shared_box.files.download(folder + "/t", tmp_path / "back") == 3
    assert below(tmp_path / "back") == below(source)
    assert shared_box.files.upload(source, folder + "/t/") == 3  # once more, over itself
    assert shared_box.files.download(folder + "/t", tmp_path / "back") == 3
    assert below(tmp_path / "back") == below(source)


def test_links_of_an_uploaded_folder_are_followed_if_they_stay_inside(shared_box, folder, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    (source / "sub/real").write_text("x")
    links = {"inside": "sub/real", "up": "../outside", "abs": "/etc/passwd", "loop": "loop",
             "dir": "sub", "top": ".", "none": "nowhere"}  # fmt: skip
    for name, target in links.items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    assert shared_box.files.upload(source, f"{folder}/t") == 2
    found = [
        entry.path.removeprefix(f"{folder}/t/")
        for entry in shared_box.files.list(f"{folder}/t", depth=9)
    ]
    assert found == ["inside", "sub", "sub/real"]


def test_a_link_that_is_named_itself_is_followed(shared_box, folder, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/f").write_text("x")
    (tmp_path / "link").symlink_to("real")
    assert shared_box.files.upload(tmp_path / "link", f"{folder}/t") == 1
    assert shared_box.files.upload(tmp_path / "link/f", f"{folder}/f") == 1


def test_links_and_special_files_of_a_box_are_left_out(shared_box, folder, tmp_path):
    sh(
        shared_box,
        f"cd {folder} && echo x > f && ln -s f l && ln -s /etc d && mkfifo p && ln f hard",
    )
    assert shared_box.files.download(folder, tmp_path / "out") == 2
    assert below(tmp_path / "out") == {"f": b"x\n", "hard": b"x\n"}
    with pytest.raises(InvalidRequest, match="link to f"):
        shared_box.files.download(f"{folder}/l", tmp_path / "l")
    with pytest.raises(InvalidRequest, match="neither"):
        shared_box.files.download(f"{folder}/p", tmp_path / "p")


def test_no_bit_that_gives_rights_away_is_taken_over(shared_box, folder, tmp_path):
    sh(shared_box, f"cd {folder} && echo x > f && chmod 1777 f && mkdir d && chmod 1777 d")
    shared_box.files.download(folder, tmp_path / "out")
    out = download_lies(tmp_path, {TOP: [(f"{TOP}/f", "file"), (f"{TOP}/d", "dir")]})
    for path in (tmp_path / "out/f", tmp_path / "out/d", out / "f", out / "d"):
        assert stat.S_IMODE(path.stat().st_mode) & ~0o755 == 0


def test_a_download_is_bounded(shared_box, folder, tmp_path):
    shared_box.files.write_files({f"{folder}/a": "x" * 600, f"{folder}/b": "x" * 600})
    with pytest.raises(LimitReached, match="1000"):
        shared_box.files.download(folder, tmp_path / "out", limit=1000)
    assert below(tmp_path / "out").keys() == {"a"}
    assert shared_box.files.download(folder, tmp_path / "out", limit=1200) == 2
    assert shared_box.files.download(folder, tmp_path / "out", limit=None) == 2


def test_what_is_wrong_on_this_machine_is_said_in_our_words(shared_box, folder, tmp_path):
    shared_box.files.write(f"{folder}/f", "x")
    with pytest.raises(NotFound, match="on this machine"):
        shared_box.files.upload(tmp_path / "none", f"{folder}/x")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="regular"):
        shared_box.files.upload(tmp_path / "pipe", f"{folder}/x")
    for local in (tmp_path, "/", "."):
        with pytest.raises(InvalidRequest, match="local folder"):
            shared_box.files.download(f"{folder}/f", local)
    with pytest.raises((NotPermitted, InvalidRequest, NotFound)):
        shared_box.files.download(f"{folder}/f", "/proc/nonsense")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest):
        shared_box.files.download(folder, tmp_path / "file")
    with pytest.raises(NotFound):
        shared_box.files.download(f"{folder}/none", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# --- size and interruption --------------------------------------------------------------


def test_a_large_file_passes_with_memory_flat(tmp_path):
    code = """
import resource, sys
from hutch import Sandbox
with open("large", "wb") as file:
    for number in range(200):
        file.write(number.to_bytes(4, "big") * (1 << 18))
with Sandbox.create(memory="1g") as box:
    box.files.write("warm", b"x" * 4_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    box.files.upload("large", "large")
    box.files.download("large", "back")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "large").read_bytes()
    assert int(done.stdout) < 32 * 1024, f"grew by {done.stdout} KiB"


def test_a_large_file_is_never_there_in_part(shared_box, folder, tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(64 << 20)
    uploading = threading.Thread(
        target=shared_box.files.upload, args=(tmp_path / "large", f"{folder}/large")
    )
    uploading.start()
    sizes = set()
    while uploading.is_alive():
        if shared_box.files.exists(f"{folder}/large"):
            sizes.add(shared_box.files.stat(f"{folder}/large").size)
    assert sizes <= {64 << 20}
    assert shared_box.files.stat(f"{folder}/large").size == 64 << 20


def test_an_upload_that_is_cancelled_leaves_nothing(tmp_path):
    async def endless():
        while True:
            yield b"x" * 65536

    async def give_up() -> None:
        async with await AsyncSandbox.create() as box:
            await box.files.write("f", "old")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.files.write("f", endless()), 0.3)
            with open(tmp_path / "large", "wb") as file:
                file.truncate(4 << 40)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.files.upload(tmp_path / "large", "large"), 0.3)
            assert [entry.name for entry in await box.files.list(".")] == ["f"]
            assert await box.files.read("f") == "old"

    asyncio.run(give_up())


def test_a_download_that_is_cancelled_leaves_nothing(tmp_path):
    async def give_up() -> None:
        async with await AsyncSandbox.create() as box:
            await box.commands.run("truncate -s 300M f", check=True)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(box.files.download("f", tmp_path / "f"), 0.05)

    asyncio.run(give_up())
    assert list(tmp_path.iterdir()) == []


# --- H12: a box that lies ---------------------------------------------------------------


class Lies:
    """A guest that has been taken over, as far as a download can tell."""

    def __init__(self, listing: dict[str, list[tuple[str, str]]], content: bytes = b"evil") -> None:
        self._listing, self._content = listing, content

    def perform(self, operation):
        match operation:
            case op.StatFile():
                return self._entry("/workspace/out", "dir")
            case op.ListFiles():
                return [self._entry(*each) for each in self._listing.get(operation.path, ())]
        raise AssertionError(operation)

    def stream(self, operation):
        assert isinstance(operation, op.ReadFile)
        return self._pieces()

    def _pieces(self):
        yield self._content

    def _entry(self, path, kind):
        return Entry(path, kind, 1, 0o7777, 0.0, 0, 0)


class AsyncLies(Lies):
    async def perform(self, operation):
        return super().perform(operation)

    async def stream(self, operation):
        assert isinstance(operation, op.ReadFile)
        return self._async_pieces()

    async def _async_pieces(self):
        yield self._content


TOP = "/workspace/out"


def download_lies(tmp_path: Path, listing: dict[str, list[tuple[str, str]]], **options) -> Path:
    local = tmp_path / "home" / "out"
    local.mkdir(parents=True, exist_ok=True)
    Files("liar", Lies(listing)).download("out", local, **options)
    asyncio.run(AsyncFiles("liar", AsyncLies(listing)).download("out", local, **options))
    return local


@pytest.mark.parametrize(
    "path",
    ["/workspace/out/../.bashrc", "/workspace/out/../../.bashrc", "/etc/cron.d/x", "../x", "x", "",
     "/workspace/out", "/workspace/out/", "/workspace/out/.", "/workspace/out/..",
     "/workspace/out//etc/x", "/workspace/outside", "/workspace/out/a/b", "/workspace/out/a\0b"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["file", "dir"])
def test_h12_a_name_that_leads_out_of_the_folder_is_refused(tmp_path, path, kind):
    with pytest.raises(InvalidRequest, match="outside of the folder"):
        download_lies(tmp_path, {TOP: [(path, kind)]})
    assert below(tmp_path) == {"home": None, "home/out": None}


def test_h12_nothing_is_written_through_a_link_that_lies_there(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("mine")
    local = tmp_path / "home" / "out"
    local.mkdir(parents=True)
    (local / "dir").symlink_to(outside)
    (local / "file").symlink_to(outside / "keep")
    for listing in (
        {TOP: [(f"{TOP}/file", "file")]},
        {TOP: [(f"{TOP}/dir", "dir")], f"{TOP}/dir": [(f"{TOP}/dir/keep", "file")]},
        {TOP: [(f"{TOP}/dir", "file")]},
    ):
        with pytest.raises(HutchError):
            download_lies(tmp_path, listing)
    assert below(outside) == {"keep": b"mine"}


def test_h12_a_name_that_is_a_file_and_a_folder_at_once_is_refused(tmp_path):
    listing = {
        TOP: [(f"{TOP}/a", "file"), (f"{TOP}/a", "dir")],
        f"{TOP}/a": [(f"{TOP}/a/b", "file")],
    }
    with pytest.raises(HutchError):
        download_lies(tmp_path, listing)


def test_h12_special_files_are_not_replaced(tmp_path):
    local = tmp_path / "home" / "out"
    local.mkdir(parents=True)
    os.mkfifo(local / "pipe")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        download_lies(tmp_path, {TOP: [(f"{TOP}/pipe", "file")]})
    assert stat.S_ISFIFO((local / "pipe").stat().st_mode)


def test_h12_an_endless_tree_ends(tmp_path):
    class Endless(Lies):
        def perform(self, operation):
            if isinstance(operation, op.ListFiles):
                return [self._entry(operation.path + "/d", "dir")]
            return super().perform(operation)

    with pytest.raises(HutchError):
        Files("liar", Endless({})).download("out", tmp_path / "out")


def test_h12_an_endless_file_ends_and_leaves_nothing(tmp_path):
    class Endless(Lies):
        def _pieces(self):
            while True:
                yield b"x" * 100_000

    listing = {TOP: [(f"{TOP}/f", "file")]}
    with pytest.raises(LimitReached):
        Files("liar", Endless(listing)).download("out", tmp_path / "out", limit=10_000_000)
    assert below(tmp_path / "out") == {}


def test_a_folder_that_changes_while_it_is_uploaded_leaks_nothing(shared_box, folder, tmp_path):
    """A box can write to a mounted folder while it is being uploaded into another box."""
    source, secret = tmp_path / "source", tmp_path / "secret"
    (source / "d").mkdir(parents=True)
    secret.mkdir()
    (source / "d/f").write_text("mine")
    (secret / "f").write_text("host secret")
    (source / "link").symlink_to(secret)
    stop = threading.Event()

    def flip() -> None:
        while not stop.is_set():
            for one, two in (("d", "x"), ("link", "d"), ("x", "link")):
                try:
                    os.rename(source / one, source / two)
                except OSError:
                    pass

    flipping = threading.Thread(target=flip)
    flipping.start()
    try:
        for number in range(60):
            target = f"{folder}/{number}"
            try:
                shared_box.files.upload(source, target)
            except HutchError:
                pass
    finally:
        stop.set()
        flipping.join()
    assert shared_box.files.search("secret", folder) == []
