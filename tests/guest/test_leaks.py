"""What a guest holds after much work: what it held before."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import wire
from hutch.errors import HutchError, LimitReached, NotFound


async def _settled(guest: Guest) -> list[str]:
    """What is open once everything that was on its way has arrived."""
    before: list[str] = []
    while (now := guest.open_files()) != before:
        before = now
        await asyncio.sleep(0.2)
    return now


def test_five_hundred_commands_leave_no_descriptor_and_no_process(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files, children = await _settled(guest), guest.children()
        for n in range(400):
            assert await guest.shell(f"(exit {n % 256})") == (n % 256, "")
        for _ in range(100):
            assert await guest.program("echo", "x") == (0, "x\n")
        await guest.warm()
        assert await _settled(guest) == files
        assert guest.children() == children

    with_guest(tmp_path, work, seconds=120)


def test_everything_that_can_go_wrong_leaves_no_descriptor_and_no_process(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files, children = await _settled(guest), guest.children()
        for _ in range(5):
            with pytest.raises(NotFound):
                await guest.program("no-such-program")
            with pytest.raises(NotFound):
                await guest.run(wire.Exec(["true"], cwd="/no/such"))
            with pytest.raises(HutchError):
                await guest.run(wire.Exec(["nul\0"]))
            assert (await guest.program("sh", "-c", "sleep 99 & sleep 99", timeout=0.05))[0] == 124
            assert (await guest.shell("sleep 99", 0.05))[0] == 124
            assert (await guest.shell("exit 3"))[0] == 3
            assert (await guest.shell("kill -9 $$"))[0] == 137
            result, _ = await guest.run(wire.Exec(["sh", "-c", "exit 4"], tty=[80, 24]))
            assert result["exit_code"] == 4
            await guest.link.ask(wire.StartShell("other"))
            await guest.link.ask(wire.EndShell("other"))
        await guest.warm()
        assert await _settled(guest) == files
        assert guest.children() == children

    with_guest(tmp_path, work)


@pytest.mark.parametrize(
    "request_",
    [wire.Exec(["sleep", "99"]), wire.ShellCommand("main", "sleep 99"),
     wire.Exec(["cat"], tty=[80, 24]), wire.StartShell("other")],
    ids=["program", "shell", "terminal", "open"],
)  # fmt: skip
def test_a_cancel_at_any_moment_leaves_nothing(tmp_path: Path, request_: object) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files, children = await _settled(guest), guest.children()
        for n in range(25):
            call = guest.link.call(request_)
            await asyncio.sleep(n * n * 0.00005)  # from at once to well after it runs
            call.close()
            if isinstance(request_, wire.StartShell):
                await asyncio.sleep(0.05)
                try:
                    await guest.link.ask(wire.EndShell("other"))
                except NotFound:
                    pass
        assert await guest.shell("echo fine", 20) == (0, "fine\n")
        assert await guest.program("echo", "fine", timeout=20) == (0, "fine\n")
        await guest.warm()
        assert await _settled(guest) == files
        assert guest.children() == children

    with_guest(tmp_path, work)


def test_a_background_child_costs_two_pipes_until_it_ends(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files = await _settled(guest)
        for n in range(10):
            assert await guest.program("sh", "-c", f"sleep 9{n} & echo $! >>pids") == (0, "")
        assert (await _settled(guest)).count("pipe") == files.count("pipe") + 20
        await guest.program("sh", "-c", "kill $(cat pids)")
        while guest.open_files().count("pipe") != files.count("pipe"):
            await asyncio.sleep(0.05)

    with_guest(tmp_path, work)


def test_a_keeper_that_has_nothing_to_do_for_a_while_goes(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        assert guest.children().count("hutch-subreaper S") == 3  # one is the shell's
        while guest.children() != ["hutch-subreaper S"]:
            await asyncio.sleep(0.1)
        assert await guest.program("echo", "again") == (0, "again\n")

    with_guest(tmp_path, work)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for everyone. Each pytest that starts closes those of all others to other users."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)
        yield folder


# Python that makes the guest give up root, whom RLIMIT_NPROC does not bind.
AS_SOMEBODY_ELSE = (
    "" if os.getuid() else "import os, shutil; os.setgroups([]); os.setgid(54321); os.setuid(54321)"
)


def test_a_guest_that_may_not_fork_says_so_and_goes_on(open_folder: Path) -> None:
    async def work(guest: Guest) -> None:
        limit = ["prlimit", f"--pid={guest.process.pid}"]
        await guest.warm()
        assert (await guest.program(*limit, "--nproc=1:"))[0] == 0
        many = [guest.program("sleep", "0.2") for _ in range(9)]
        refused = [e for e in await asyncio.gather(*many, return_exceptions=True) if e != (0, "")]
        assert refused and all(isinstance(error, LimitReached) for error in refused)
        assert (await guest.program(*limit, "--nproc=4096:"))[0] == 0
        assert await asyncio.gather(*[guest.program("true") for _ in range(9)]) == [(0, "")] * 9

    with_guest(open_folder, work, before=AS_SOMEBODY_ELSE)


def test_a_keeper_that_may_not_fork_says_so_and_is_replaced(open_folder: Path) -> None:
    async def work(guest: Guest) -> None:
        assert (await guest.program("sh", "-c", "prlimit --pid=$PPID --nproc=1:"))[0] == 0
        with pytest.raises(LimitReached):
            await guest.program("true")
        assert await guest.program("echo", "after") == (0, "after\n")

    with_guest(open_folder, work, before=AS_SOMEBODY_ELSE)


def test_a_guest_that_may_open_nothing_more_says_so_and_goes_on(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        files = await _settled(guest)
        for allowed in range(len(files), len(files) + 12):
            limit = ["prlimit", f"--pid={guest.process.pid}", f"--nofile={allowed}:4096"]
            await (await asyncio.create_subprocess_exec(*limit)).wait()
            for attempt in (guest.program("true"), guest.shell("true"), guest.shell("exit")):
                try:
                    await attempt
                except HutchError as exc:
                    assert exc.code in ("limit_reached", "internal"), exc
            assert len(await _settled(guest)) <= max(allowed, len(files) + 8)
        limit[-1] = "--nofile=4096:4096"
        await (await asyncio.create_subprocess_exec(*limit)).wait()
        assert await guest.program("echo", "after") == (0, "after\n")
        assert await guest.shell("echo after") == (0, "after\n")

    with_guest(tmp_path, work)
