"""Sessions beside each other in one engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from hutch import AsyncSandbox, BoxLost, Sandbox


def test_two_boxes_keep_their_long_outputs_apart() -> None:
    with Sandbox.create() as one, Sandbox.create() as two:
        first = one.commands.run("yes one | head -c 3000000")
        second = two.commands.run("yes two | head -c 3000000")
        assert first.kept and second.kept
        assert one.read_output(first.kept, 1_500_000, 4).text == "one\n"
        assert two.read_output(second.kept, 1_500_000, 4).text == "two\n"


def test_boxes_opened_at_once_share_one_folder_that_goes_with_the_process() -> None:
    async def main() -> list[Path]:
        boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(5)))
        folders = list(Path("/tmp").glob(f"hutch-{os.getpid()}-*"))
        await asyncio.gather(*(box.close() for box in boxes))
        return folders

    before = set(Path("/tmp").glob(f"hutch-{os.getpid()}-*"))
    mine = set(asyncio.run(main())) - before
    assert len(mine) == 1
    deadline = time.monotonic() + 120
    while any(folder.exists() for folder in mine) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(folder.exists() for folder in mine)


def test_a_hundred_boxes_can_be_open_at_once() -> None:
    async def use(box: AsyncSandbox, number: int) -> str:
        return (await box.commands.run(["echo", str(number)])).stdout

    async def main() -> None:
        boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(100)))
        said = await asyncio.gather(*(use(box, n) for n, box in enumerate(boxes)))
        assert said == [f"{n}\n" for n in range(100)]
        assert len(await AsyncSandbox.list()) == 100
        await asyncio.gather(*(box.close() for box in boxes))

    asyncio.run(main())


def test_a_box_that_is_closed_while_a_command_runs_says_that_it_is_lost() -> None:
    async def main() -> str:
        box = await AsyncSandbox.create()
        running = asyncio.create_task(box.shell.run("touch begun; sleep 100"))
        while not await box.files.exists("begun"):
            await asyncio.sleep(0.02)
        await box.close()
        try:
            await running
        except Exception as exc:
            return type(exc).__name__
        return "a result"

    assert asyncio.run(main()) == "BoxLost"


def test_after_its_launcher_was_killed_the_next_box_starts_as_if_nothing_had_been() -> None:
    def launchers() -> list[int]:
        children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        return [int(pid) for file in children for pid in file.read_text().split()]

    with Sandbox.create() as one:
        for pid in launchers():
            if Path(f"/proc/{pid}/comm").read_text() == "hutch-launcher\n":
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 120
        with pytest.raises(BoxLost):
            while time.monotonic() < deadline:  # the zygote has to notice first
                one.shell.run("echo gone")
        with Sandbox.create() as two:
            assert two.shell.run("echo here").stdout == "here\n"


HUNGRY = "python3 -c 'x = bytearray(10**9)'"


def test_a_command_is_told_of_memory_that_a_child_of_its_own_lacked() -> None:
    with Sandbox.create(memory="64m") as box:
        if box.info.degraded:
            pytest.skip("no control group bounds memory here")
        first = box.commands.run(f"{HUNGRY}; echo next $?")
        assert (first.exit_code, first.stdout, first.oom) == (0, "next 137\n", True)
        assert not box.commands.run("exit 1").oom


def test_more_requests_than_the_launcher_s_socket_holds_are_all_answered() -> None:
    async def main() -> None:
        boxes = await asyncio.gather(*(AsyncSandbox.create() for _ in range(8)))
        stats = await asyncio.gather(*(box.stats() for box in boxes for _ in range(200)))
        assert len(stats) == 1600
        await asyncio.gather(*(box.close() for box in boxes))

    asyncio.run(main())


def test_a_mount_inside_another_is_there_in_whatever_order_they_are_given(tmp_path: Path) -> None:
    for name in ("outer", "outer/inner", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "file").write_text("here")
    mounts = [f"{tmp_path}/other:/a/inner", f"{tmp_path}/outer:/a"]
    with Sandbox.create(mounts=mounts) as box:
        assert box.files.read("/a/inner/file") == "here"
