"""The host's end of a guest: many requests at once, none of which can hold up another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from hutch import BoxLost, Result, Sandbox, wire
from hutch.backends.base import Box, Spec
from hutch.backends.namespaces import NamespacesBackend
from hutch.engine.link import Link


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Box, Link]]:
    backend = NamespacesBackend()
    try:
        box = await backend.start(Spec())
        link = await Link.open(await box.connect())
        try:
            yield box, link
        finally:
            await link.close()
            await box.kill()
    finally:
        await backend.close()


def with_link(work: Callable[[Box, Link], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), linked() as (box, link):
            await work(box, link)

    asyncio.run(main())


async def _output(link: Link, request: object) -> bytes:
    async with link.call(request) as call:
        return b"".join([event.data async for event in call if isinstance(event, wire.Data)])


# More than a window, a pipe and the socket between them hold: it ends while much is on its way.
SIZE = 3_000_000


def test_a_reader_that_is_slow_loses_nothing(box: Sandbox) -> None:
    command = f"head -c {SIZE} /dev/zero; head -c {SIZE} /dev/zero >&2"
    for stream in (box.shell.stream(command), box.commands.stream(command)):
        items = []
        for item in stream:
            items.append(item)
            time.sleep(0.01)
        *chunks, result = items
        assert isinstance(result, Result) and result.total_bytes == 2 * SIZE
        assert sum(len(chunk.data) for chunk in chunks) == 2 * SIZE


def test_a_reader_that_does_not_read_does_not_put_off_a_timeout(box: Sandbox) -> None:
    for run in (box.shell.stream, box.commands.stream):
        stream = run("yes", timeout=3)
        next(stream)
        time.sleep(5)
        *_, result = stream
        assert isinstance(result, Result)
        assert result.timed_out and result.total_bytes < 16_000_000


def test_a_reader_that_pauses_after_the_end_keeps_its_shell(box: Sandbox) -> None:
    stream = box.shell.stream("kept=1; head -c 2000000 /dev/zero")
    next(stream)
    time.sleep(2.5)
    *_, result = stream
    assert isinstance(result, Result) and result.total_bytes == 2_000_000
    after = box.shell.run("echo $kept")
    assert (after.stdout, after.restarted) == ("1\n", False)


def test_a_call_that_nobody_reads_does_not_hold_up_another() -> None:
    async def work(box: Box, link: Link) -> None:
        async with link.call(wire.Exec(["yes"])) as unread:
            await anext(unread)
            assert await _output(link, wire.Exec(["echo", "hi"])) == b"hi\n"
            assert await _output(link, wire.ShellCommand("main", "echo hi")) == b"hi\n"

    with_link(work)


def test_many_calls_at_once_are_all_answered() -> None:
    async def work(box: Box, link: Link) -> None:
        calls = [_output(link, wire.Exec(["echo", str(n)])) for n in range(40)]
        calls += [_output(link, wire.ShellCommand("main", f"echo {n}")) for n in range(40)]
        assert await asyncio.gather(*calls) == [b"%d\n" % n for n in range(40)] * 2
        assert repr(link) == "<Link up, 0 calls>"

    with_link(work)


def test_input_waits_until_the_program_has_room_for_it() -> None:
    async def work(box: Box, link: Link) -> None:
        request = wire.Exec(["sh", "-c", "read go < fifo; wc -c"], stdin=True)
        await _output(link, wire.Exec(["mkfifo", "fifo"]))
        async with link.call(request) as call:
            feeding = asyncio.create_task(call.send(b"x" * 8_000_000))
            await asyncio.sleep(0.3)
            assert not feeding.done()
            await _output(link, wire.Exec(["sh", "-c", "echo go > fifo"]))
            await feeding
            call.end_input()
            said = [event.data async for event in call if isinstance(event, wire.Data)]
        assert said == [b"8000000\n"]

    with_link(work)


def test_the_end_of_a_box_ends_every_call() -> None:
    async def work(box: Box, link: Link) -> None:
        calls = [
            link.call(wire.Exec(["sleep", "99"])),
            link.call(wire.ShellCommand("main", "sleep 99")),
        ]
        await anext(calls[0])
        await box.kill()
        for call in calls:
            with pytest.raises(BoxLost):
                await anext(call)
        with pytest.raises(BoxLost):
            link.call(wire.Exec(["true"]))

    with_link(work)


class Silence:
    """A guest that never says a word."""

    closed = False

    async def read(self, at_most: int) -> bytes:
        await asyncio.sleep(3600)
        return b""

    async def write(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.closed = True


def test_giving_up_on_a_guest_that_says_nothing_leaves_nothing_behind() -> None:
    async def main() -> None:
        silence = Silence()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await Link.open(silence)
        assert silence.closed
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
