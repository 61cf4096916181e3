"""Programs at a terminal."""

from __future__ import annotations

import asyncio
from pathlib import Path

from direct import Guest, with_guest

from hutch import wire


def at_terminal(command: str) -> wire.Exec:
    return wire.Exec(["sh", "-c", command], tty=[80, 24])


def test_the_last_words_of_a_program_at_a_terminal_are_not_lost(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        for _ in range(20):
            result, printed = await guest.run(at_terminal("seq 1 3000; exit 3"))
            assert result["exit_code"] == 3
            assert printed.endswith(b"2999\r\n3000\r\n")

    with_guest(tmp_path, work)


def test_a_child_that_keeps_the_terminal_does_not_keep_the_answer(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        held = "trap '' HUP; sleep 90 & echo $! >pid; echo ok"
        async with asyncio.timeout(120):
            assert (await guest.run(at_terminal(held)))[1] == b"ok\r\n"
        await guest.program("sh", "-c", "kill $(cat pid)")

    with_guest(tmp_path, work)


def test_a_terminal_can_be_typed_at_resized_and_left(tmp_path: Path) -> None:
    async def work(guest: Guest) -> None:
        request = at_terminal("echo ready; read x; stty size; cat >/dev/null; echo bye $x")
        printed = b""
        async with guest.link.call(request) as call:
            async for event in call:
                if isinstance(event, wire.Data):
                    printed += event.data
                    if printed.endswith(b"ready\r\n"):
                        call.tell(size=[132, 50])
                        await call.send(b"you\n\x04")
        assert b"50 132\r\n" in printed and printed.endswith(b"bye you\r\n")

    with_guest(tmp_path, work)
