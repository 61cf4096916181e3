"""The relays into one box, of an engine that is this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from hutch.backends.contained import FRAME, Relays
from hutch.errors import BoxLost

PATIENCE = 30


class Program:
    """The standard streams of a relay. What it is sent fails once `broken` is set."""

    def __init__(self) -> None:
        self.output: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.sent = b""
        self.changed = asyncio.Event()
        self.broken = asyncio.Event()
        self.is_stuck = self.is_closed = False

    async def receive(self) -> tuple[bytes, bool] | None:
        return await self.output.get()

    async def send(self, data: bytes) -> None:
        self.sent += data
        self.changed.set()
        if self.is_stuck:
            await self.broken.wait()
            raise ConnectionResetError

    def close(self) -> None:
        self.is_closed = True


class Engine:
    def __init__(self) -> None:
        self.programs: list[Program] = []
        self.is_stuck = False  # the next one

    async def start_relay(self) -> Program:
        program = Program()
        program.is_stuck = self.is_stuck
        self.programs.append(program)
        return program

    async def is_running(self) -> bool:
        return True

    async def wait(self) -> None:
        await asyncio.get_running_loop().create_future()


def run(test: Callable[[Engine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE):
            await test(Engine())

    asyncio.run(main())


async def started(engine: Engine, count: int) -> Program:
    while len(engine.programs) < count:
        await asyncio.sleep(0.01)
    return engine.programs[count - 1]


def test_a_relay_whose_guest_does_not_answer_in_time_is_closed() -> None:
    async def test(engine: Engine) -> None:
        relays = Relays(engine, "a", patience=0.1)
        with pytest.raises(BoxLost, match="did not answer"):
            await relays.connect()
        assert all(program.is_closed for program in engine.programs)
        relays.close()

    run(test)


def test_a_relay_is_closed_when_its_caller_leaves() -> None:
    async def test(engine: Engine) -> None:
        relays = Relays(engine, "a")
        connecting = asyncio.create_task(relays.connect())
        program = await started(engine, 1)
        await program.changed.wait()
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await connecting
        assert program.is_closed
        relays.close()

    run(test)


def test_a_spare_that_fails_late_does_not_take_the_next_one_along() -> None:
    async def test(engine: Engine) -> None:
        engine.is_stuck = True
        relays = Relays(engine, "a")
        outliving = asyncio.create_task(relays.outlive(5))
        first = await started(engine, 1)
        await first.changed.wait()
        engine.is_stuck = False
        # While that is being written, the spare becomes the link, and another the spare.
        first.is_stuck = False
        first.output.put_nowait((FRAME, False))
        link = await relays.connect()
        assert await link.read(1) == FRAME
        second = await started(engine, 2)
        first.broken.set()
        await outliving
        assert second.sent == b"f5.000\n" and len(engine.programs) == 2
        relays.close()
        await asyncio.sleep(0)  # what `close` has cancelled ends
        assert second.is_closed

    run(test)
