"""To kill a program takes as much work beside many others as beside few."""

from __future__ import annotations

import asyncio
import mmap
import signal
import struct
from pathlib import Path

import pytest
from direct import Guest, with_guest

from hutch import wire

# Counts what the guest, and no fork of it, opens or lists in /proc.
COUNT = """
import mmap, os, struct, sys
_me, _file = os.getpid(), os.open({path!r}, os.O_RDWR)
_counter = mmap.mmap(_file, 8)
os.close(_file)
def _count(event, args):
    if event in ("open", "os.listdir") and os.getpid() == _me and str(args[0]).startswith("/proc"):
        struct.pack_into("Q", _counter, 0, struct.unpack_from("Q", _counter)[0] + 1)
sys.addaudithook(_count)
"""
KILLED, BESIDE = 5, 40


class Work:
    def __init__(self, guest: Guest, counter: mmap.mmap, tty: list[int] | None) -> None:
        self._guest, self._counter, self._tty = guest, counter, tty
        self._made = 0

    async def start(self) -> str:
        self._made += 1
        name = f"p{self._made}"
        await self._guest.link.ask(wire.Start(name, ["sleep", "1000"], tty=self._tty))
        return name

    async def kill(self, name: str) -> int:
        """How often /proc was looked at."""
        before = struct.unpack_from("Q", self._counter)[0]
        async with self._guest.link.call(wire.Attach(name)) as call:
            call.tell(signal=signal.SIGKILL, tree=True)
            async for _ in call:
                pass
        return int(struct.unpack_from("Q", self._counter)[0] - before)

    async def cheapest(self) -> int:
        """Of some: a kill that takes more than an instant is repeated, and costs more."""
        return min([await self.kill(await self.start()) for _ in range(KILLED)])


@pytest.mark.parametrize("tty", [None, [80, 24]], ids=["programs", "terminals"])
def test_a_kill_does_not_cost_more_beside_many(tmp_path: Path, tty: list[int] | None) -> None:
    path = tmp_path / "counter"
    path.write_bytes(bytes(8))
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as counter:

        async def work(guest: Guest) -> None:
            us = Work(guest, counter, tty)
            alone = await us.cheapest()
            names = [await us.start() for _ in range(BESIDE)]
            beside = await us.cheapest()
            assert 0 < beside < alone + BESIDE / 2
            await asyncio.gather(*map(us.kill, names))
            assert len(guest.tree()) < BESIDE / 2

        with_guest(tmp_path, work, before=COUNT.format(path=str(path)))
