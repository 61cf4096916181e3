"""Workspaces whose quota the kernel enforces: a file system for each."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from must_work import need
from services import ADMIN, opened, run, service

from daemon_of_tests import Daemon, wait_for
from hutch import Sandbox, serving
from hutch import operations as op
from hutch.errors import Conflict, InvalidRequest
from hutch.server import volumes
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.server.volumes import Volume
from hutch.types import MiB

KERNEL = Rules(workspace_quota_mode="kernel")
QUOTA = 16 * MiB
# Writes until it cannot, into a file without a name; then says how much it was, and keeps it open.
HOARD = """
import errno, os, sys, time
fd = os.open("hidden", os.O_RDWR | os.O_CREAT)
os.unlink("hidden")
written = 0
try:
    while written < 1 << 30:
        written += os.write(fd, os.urandom(1 << 20))
    os.fsync(fd)
except OSError as exc:
    print(errno.errorcode[exc.errno], written, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path) -> Iterator[None]:
    if why := volumes.obstacle(tmp_path):
        need("volumes", why)
    yield
    try:
        assert wait_for(lambda: not remains(tmp_path)), remains(tmp_path)
    finally:
        for volume in volumes.volumes_in(tmp_path / "workspaces"):
            volume.remove()


def remains(folder: Path) -> list[str]:
    """Mounts and loop devices of what is below this folder."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    devices = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            devices.append(file.read_text())
        except OSError:
            continue
    return [each for each in (*mounts, *devices) if each.startswith(f"{folder}/")]


def go(folder: Path, work: Any, rules: Rules = KERNEL, **more: Any) -> None:
    async def main() -> None:
        async with service(folder, rules, **more) as made:
            await work(made)

    asyncio.run(main())


def image_of(folder: Path, name: str) -> Path:
    return folder / "workspaces" / ADMIN.owner / f"{name}.img"


def hoard(seconds: float) -> str:
    return f"python3 -c {shlex.quote(HOARD)} {seconds}"


def test_a_box_cannot_write_more_than_its_quota_even_without_a_name(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=QUOTA), ADMIN)
        await made.perform(serving.MakeWorkspace("other", quota=QUOTA), ADMIN)
        info, other = [await opened(made, workspace_id=name) for name in ("small", "other")]
        assert not [why for why in info.degraded if "quota" in why]
        said = await run(
            made, info.id, f"{hoard(99)} > /tmp/out & until grep . /tmp/out; do :; done"
        )
        error, written = said.stdout.split()
        assert (error, int(written) < QUOTA) == ("ENOSPC", True)
        assert image_of(tmp_path, "small").stat().st_blocks * 512 <= QUOTA
        told = await made.perform(serving.GetWorkspace("small"), ADMIN)
        assert told.size >= int(written)
        await made._sessions.end_those_over_quota()
        assert (await run(made, info.id, "head -c 3M /dev/zero > y")).exit_code != 0
        assert (await run(made, other.id, "head -c 5M /dev/urandom > y")).exit_code == 0
        # A full workspace can be opened, and files be removed from it.
        again = await opened(made, workspace_id="small")
        assert (await run(made, again.id, "pwd; ls -A")).stdout == "/workspace\ny\n"
        await run(made, info.id, "kill %1; wait")
        assert (await run(made, again.id, "head -c 3M /dev/zero > y")).exit_code == 0

    go(tmp_path, work)


def test_removed_files_give_their_room_back_to_the_disk(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=QUOTA), ADMIN)
        info = await opened(made, workspace_id="small")
        await run(made, info.id, "head -c 8M /dev/urandom > big; sync big")
        image = image_of(tmp_path, "small")
        assert image.stat().st_blocks * 512 > 8 * MiB
        await run(made, info.id, "rm big")
        os.sync()
        assert wait_for(lambda: image.stat().st_blocks * 512 < 4 * MiB)

    go(tmp_path, work)


def test_volumes_are_removed_whole_and_made_anew(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        for _ in range(2):
            await made.perform(serving.MakeWorkspace("small", quota=QUOTA), ADMIN)
            await made.perform(op.WriteFile("workspace/small", "a", b"x"), ADMIN)
            info = await opened(made, workspace_id="small")
            assert (await run(made, info.id, "ls -A")).stdout == "a\n"
            await made.perform(op.CloseSession(info.id), ADMIN)
            await made.perform(serving.RemoveWorkspace("small"), ADMIN)
            assert not [*(tmp_path / "workspaces" / ADMIN.owner).iterdir()]
            assert await asyncio.to_thread(wait_for, lambda: not remains(tmp_path))

    go(tmp_path, work)


def test_many_at_once_use_one_volume(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        opening = (opened(made, workspace_id="shared") for _ in range(4))
        first, *_ = await asyncio.gather(*opening)
        mounted = [each for each in remains(tmp_path) if each.endswith(".mnt")]
        assert len(mounted) == 1
        tar = [p async for p in await made.stream(serving.ExportWorkspace("shared"), ADMIN)]
        assert await made.perform(serving.ImportWorkspace("copy", b"".join(tar)), ADMIN) >= 0
        assert first.degraded == (await opened(made)).degraded

    go(tmp_path, work, Rules(workspace_quota_mode="kernel", workspace_quota=QUOTA))


def test_a_session_sleeps_and_wakes_in_a_volume(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        info = await opened(made, workspace_id="small")
        await run(made, info.id, "echo kept > file; cd /workspace")
        await made.perform(op.Hibernate(info.id), ADMIN)
        assert Volume(image_of(tmp_path, "small")).unmount()
        assert (await run(made, info.id, "cat file")).stdout == "kept\n"

    go(tmp_path, work, Rules(workspace_quota_mode="kernel", workspace_quota=QUOTA))


def test_the_sum_of_an_owner_and_a_lowered_quota_are_measured_and_say_so(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        for disk, told in ((QUOTA, "sum of workspaces"), (QUOTA // 2, "not enforced")):
            await made.perform(serving.SetQuota(ADMIN.owner, disk=disk), ADMIN)
            info = await opened(made, workspace_id="small")
            (why,) = [why for why in info.degraded if "quota" in why]
            assert told in why

    go(tmp_path, work)


def test_a_volume_does_not_grow_and_says_so(tmp_path: Path) -> None:
    async def work(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("small", quota=QUOTA), ADMIN)
        for more in (QUOTA + 1, None):
            with pytest.raises(Conflict, match="cannot grow"):
                await made.perform(serving.SetWorkspaceQuota("small", more), ADMIN)
        less = await made.perform(serving.SetWorkspaceQuota("small", QUOTA // 2), ADMIN)
        assert less.quota == QUOTA // 2
        info = await opened(made, workspace_id="small")
        assert any("not enforced" in why for why in info.degraded)
        back = await made.perform(serving.SetWorkspaceQuota("small", QUOTA), ADMIN)
        assert back.quota == QUOTA

    go(tmp_path, work)


def test_what_was_there_before_and_what_has_no_quota_stays_a_folder(tmp_path: Path) -> None:
    async def before(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("old", quota=QUOTA), ADMIN)

    async def after(made: Service) -> None:
        old, free = [await opened(made, workspace_id=name) for name in ("old", "free")]
        assert [why for why in old.degraded if "measured" in why]
        assert not [why for why in free.degraded if "quota" in why]
        assert not [*volumes.volumes_in(tmp_path / "workspaces")]
        with pytest.raises(InvalidRequest, match="at least"):
            await made.perform(serving.MakeWorkspace("tiny", quota=MiB), ADMIN)
        assert len(await made.perform(serving.ListWorkspaces(), ADMIN)) == 2

    go(tmp_path, before, Rules())
    go(tmp_path, after)


def test_a_volume_is_found_again_without_its_row_and_half_made_ones_go(tmp_path: Path) -> None:
    async def before(made: Service) -> None:
        await made.perform(serving.MakeWorkspace("lost", quota=QUOTA), ADMIN)
        await made.perform(op.WriteFile("workspace/lost", "a", b"kept"), ADMIN)

    async def after(made: Service) -> None:
        (found,) = await made.perform(serving.ListWorkspaces(), ADMIN)
        assert (found.id, found.quota) == ("lost", QUOTA)
        stream = await made.stream(op.ReadFile("workspace/lost", "a"), ADMIN)
        assert b"".join([piece async for piece in stream]) == b"kept"
        assert not half_made.exists()

    go(tmp_path, before)
    assert wait_for(lambda: not remains(tmp_path))
    for file in tmp_path.glob("hutch.db*"):
        file.unlink()
    half_made = image_of(tmp_path, "half").with_suffix(".img.new")
    half_made.write_bytes(b"x")
    go(tmp_path, after, Rules())  # whatever the mode, what is in a volume is there


def test_a_box_never_gets_the_folder_below_a_missing_mount(tmp_path: Path) -> None:
    volume = Volume(tmp_path / "one.img")
    volume.provide(QUOTA)
    try:
        (volume.folder / "a").touch()
        assert volume.unmount()
        assert not volume.folder.exists()
        volume.provide(QUOTA)
        assert (volume.folder / "a").exists()
        assert not (volume.folder / "lost+found").exists()
        flags = os.statvfs(volume.folder).f_flag
        assert flags & os.ST_NOSUID and flags & os.ST_NODEV
        assert volume.image.stat().st_mode & 0o777 == 0o600
    finally:
        volume.remove()


def test_files_survive_a_killed_server_and_stop_unmounts(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    settings = {"workspace_quota_mode": "kernel", "workspace_quota": "16m"}
    with Daemon(folder, **settings) as daemon:
        with Sandbox.create(url=daemon.url, api_key=daemon.key, workspace_id="mine") as box:
            box.files.write("a", "kept")
            daemon.crash()
            assert remains(folder)
            daemon.start()
            assert box.files.read("a") == "kept"
            assert box.shell.run("head -c 20M /dev/zero > big").exit_code != 0
        daemon.stop()
        assert wait_for(lambda: not remains(folder))
        daemon.start()
        box = Sandbox.create(url=daemon.url, api_key=daemon.key, workspace_id="mine")
        assert box.files.read("a") == "kept"
        daemon.crash()
        daemon.hutch("stop", "--kill")  # there is no server any more, and nothing stays
        assert wait_for(lambda: not remains(folder))


@pytest.mark.parametrize("lacking", ["root", "tools", "loop"])
def test_a_server_that_cannot_enforce_quotas_says_why_and_does_not_start(
    tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {"root": "run the server as root", "tools": "install e2fsprogs", "loop": "modprobe loop"}
    if lacking == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif lacking == "tools":
        monkeypatch.setattr(volumes, "_PATH", "/nonexistent")
    else:
        monkeypatch.setattr(volumes, "LOOP_CONTROL", "/dev/nonexistent")
    why = volumes.obstacle(tmp_path)
    assert why and told[lacking] in why

    async def main() -> None:
        async with service(tmp_path, KERNEL):
            raise AssertionError("it started")

    with pytest.raises(InvalidRequest, match=r'workspace.quota_mode is "kernel", and '):
        asyncio.run(main())
    monkeypatch.undo()
