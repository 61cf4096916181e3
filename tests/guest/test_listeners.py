"""A guest whose hosts come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import wire
from hutch.errors import BoxLost


async def _lost(call: object) -> None:
    with pytest.raises(BoxLost):
        async for _ in call:  # type: ignore[attr-defined]
            pass


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


async def _gone(pid: int) -> None:
    while _runs(pid):
        await asyncio.sleep(0.01)


async def _pid(call: object) -> int:
    note = await anext(call)  # type: ignore[call-overload]
    return int(note.body["pid"])


def test_shells_and_kernels_outlive_a_connection(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.shell("cd /usr; secret=42; f() { echo f-$secret; }")
        await guest.cell("x = [1, 2]")
        before = guest.link
        await before.close()
        await guest.connect()
        assert await guest.shell("pwd; f") == (0, "/usr\nf-42\n")
        assert (await guest.cell("print(x)"))[2] == "[1, 2]\n"

    with_guest(tmp_path, work)


def test_what_a_connection_asked_for_ends_with_it_and_the_next_is_served_at_once(
    tmp_path: Path,
) -> None:
    async def work(guest: Guest) -> None:
        await guest.shell("a=1")
        running = guest.link.call(wire.Exec(["sh", "-c", "sleep 1000 & sleep 1000"]))
        pid = await _pid(running)
        command = guest.link.call(wire.ShellCommand("main", "a=2; echo here; sleep 1000"))
        first = await anext(command)
        assert isinstance(first, wire.Data) and first.data == b"here\n"
        await guest.connect()  # while the old one is up: it is replaced
        assert (await guest.program("echo", "served")) == (0, "served\n")
        await _lost(running)
        await _gone(pid)
        assert await guest.shell("echo $a") == (0, "2\n")  # its turn came

    with_guest(tmp_path, work)


def test_a_hundred_connections_leave_no_descriptor_behind(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        await guest.warm()
        await guest.connect()
        await guest.warm()
        before = len(guest.open_files())
        for n in range(100):
            old = guest.link
            if n % 2:
                await old.close()
            await guest.connect()
            assert await guest.shell("echo $$ > /dev/null; echo x") == (0, "x\n")
            await old.close()
        await guest.warm()
        # How many subreapers wait for their next program varies, so a few may come or go.
        while len(guest.open_files()) > before + 20:
            await asyncio.sleep(0.05)

    with_guest(tmp_path, work)


def test_no_program_of_the_box_can_reach_the_listener(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        count = "ls -l /proc/$$/fd 2>/dev/null | grep -c socket"
        assert (await guest.program("sh", "-c", count))[1] == "0\n"
        code = "import os; print(os.popen(f'ls -l /proc/{os.getpid()}/fd').read().count('socket'))"
        assert (await guest.cell(code))[2] == "1\n"  # its channel

    with_guest(tmp_path, work)


def test_a_closed_listener_is_the_end_of_the_guest_and_of_what_runs(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        pids.append((await guest.link.ask(wire.Start("p1", ["sleep", "1000"])))["pid"])

    pids: list[int] = []
    with_guest(tmp_path, work)  # whose end is that of the listener
    asyncio.run(asyncio.wait_for(_gone(pids[0]), 20))
