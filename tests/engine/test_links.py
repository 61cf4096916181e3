"""Links that break while the box lives, as those through a cluster do."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hutch import operations as op
from hutch import wire
from hutch.engine import link as link_module
from hutch.engine import links
from hutch.engine.clock import since_boot
from hutch.engine.engine import Engine
from hutch.engine.link import Link
from hutch.engine.session import Session
from hutch.engine.survey import BoxSurvey, survey
from hutch.errors import BackendUnavailable, BoxLost, HutchError, ServerUnavailable
from hutch.operations import Operation, T
from hutch.testing.fake import FakeBackend, FakeBox
from hutch.types import Chunk, Execution, Process, Result

SECONDS = 120
LINES = 60_000


class Away:
    """A session on a backend that goes away, and comes back."""

    def __init__(self, engine: Engine, backend: FakeBackend, id: str) -> None:
        self.engine, self.backend, self.id = engine, backend, id

    @property
    def session(self) -> Session:
        session = self.engine._sessions[self.id]._session
        assert session
        return session

    async def do(self, operation: Operation[T]) -> T:
        return await self.engine.perform(operation)

    async def shell(self, command: str, timeout: float | None = None) -> str:
        return (await self.do(op.RunShell(self.id, command, timeout=timeout))).stdout

    async def code(self, code: str) -> Execution:
        return await self.do(op.RunCode(self.id, code))

    async def start(self, script: str) -> Process:
        return await self.do(op.StartProgram(self.id, ("sh", "-c", script)))

    async def wait(self, program: str) -> Result:
        return await self.do(op.WaitProgram(self.id, program, ended=True))

    async def under_way(self, script: str) -> asyncio.Task[None]:
        """A command in another shell, once it has begun."""
        shell = await self.do(op.OpenShell(self.id))
        began = asyncio.Event()

        async def run() -> None:
            o = op.RunShell(self.id, f"echo begun; {script}", shell=shell)
            async for _ in await self.engine.stream(o):
                began.set()

        task = asyncio.create_task(run())
        await began.wait()
        return task

    async def broken(self) -> None:
        """Returns when the link has broken, and the engine has noticed."""
        self.backend.go_away()
        while not self.session.links.is_broken:
            await asyncio.sleep(0)


SIMPLE = op.OpenSession(min_isolation="none")


def with_session(work: Callable[[Away], Awaitable[None]], opened: op.OpenSession = SIMPLE) -> None:
    async def main() -> None:
        async with asyncio.timeout(SECONDS), _session(opened) as away:
            await work(away)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def _session(opened: op.OpenSession) -> AsyncIterator[Away]:
    backend = FakeBackend()
    engine = Engine(backend)
    try:
        yield Away(engine, backend, (await engine.perform(opened)).id)
    finally:
        await engine.close()


def test_what_the_guest_keeps_is_there_again_and_what_ran_says_that_it_was_stopped() -> None:
    async def work(away: Away) -> None:
        await away.shell("WORD=kept; cd /tmp")
        await away.code("x = 6")
        program = await away.start("read line; echo got $line; exit 7")
        waiting = asyncio.create_task(away.wait(program.id))
        running = await away.under_way("sleep 1000; touch never")
        await away.broken()
        come = asyncio.create_task(away.shell("echo $WORD $PWD"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(come), 0.3)
        assert not come.done() and not running.done()
        away.backend.come_back()
        with pytest.raises(BackendUnavailable, match=r"broke .* and was made again. It is stopped"):
            await running
        assert await come == "kept /tmp\n"
        assert (await away.code("x * 7")).text == "42"
        await away.do(op.SendInput(away.id, program.id, b"it\n"))
        result = await waiting
        assert (result.exit_code, result.stdout) == (7, "got it\n")
        assert "never" not in await away.shell("ls")

    with_session(work)


async def followed(
    away: Away, program: Process
) -> tuple[AsyncGenerator[Chunk | Result, None], Chunk]:
    """The output of a program that waits for a line, from its beginning."""
    stream = await away.engine.stream(op.FollowProgram(away.id, program.id))
    first = asyncio.ensure_future(anext(stream))
    while not away.session.job(program.id)._followers:
        await asyncio.sleep(0)
    await away.do(op.SendInput(away.id, program.id, b"go\n"))
    chunk = await first
    assert isinstance(chunk, Chunk)
    return stream, chunk


def test_output_of_a_program_is_read_once_however_often_the_link_breaks() -> None:
    async def work(away: Away) -> None:
        program = await away.start(f"read go; seq {LINES}; sleep 0.5; echo end")
        stream, first = await followed(away, program)
        seen, breaks = first.data, 0
        async for chunk in stream:
            if breaks < 5:
                breaks += 1
                away.backend.go_away()
                away.backend.come_back()
                await asyncio.sleep(0.05)
            if isinstance(chunk, Chunk):
                seen += chunk.data
        expected = b"".join(b"%d\n" % n for n in range(1, LINES + 1)) + b"end\n"
        assert seen == expected and breaks

    with_session(work)


def test_a_reader_that_waits_neither_holds_up_others_nor_gets_output_twice() -> None:
    async def work(away: Away) -> None:
        program = await away.start(f"read go; seq {20 * LINES}; read line; echo got $line")
        stream, first = await followed(away, program)
        seen = [first.data]
        job = away.session.job(program.id)
        (follower,) = job._followers
        while not (follower.is_full and job._call and job._call._inbox):  # sent, and not read yet
            await asyncio.sleep(0.01)
        await away.broken()
        away.backend.come_back()
        await away.shell("true")
        await away.do(op.SendInput(away.id, program.id, b"it\n"))
        seen += [chunk.data async for chunk in stream if isinstance(chunk, Chunk)]
        expected = b"".join(b"%d\n" % n for n in range(1, 20 * LINES + 1)) + b"got it\n"
        assert b"".join(seen) == expected

    with_session(work)


def test_a_request_that_comes_while_it_reconnects_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "PATIENCE", 0.2)

    async def work(away: Away) -> None:
        running = await away.under_way("sleep 1000")
        await away.broken()
        for late in (away.shell("touch late"), away.do(op.Hibernate(away.id))):
            with pytest.raises(BackendUnavailable, match="nothing was done for this request"):
                await late
        with pytest.raises(BackendUnavailable, match="cannot be made again yet"):
            await running
        away.backend.come_back()
        monkeypatch.setattr(links, "PATIENCE", SECONDS)
        assert "late" not in await away.shell("ls")

    with_session(work)


def test_a_link_that_breaks_again_while_it_is_made_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = itertools.count()

    async def work(away: Away) -> None:
        async def breaking(link: Link) -> BoxSurvey:
            if next(times) < 3:
                away.backend.go_away()
                away.backend.come_back()
            return await survey(link)

        monkeypatch.setattr(links, "survey", breaking)
        await away.shell("WORD=kept")
        running = await away.under_way("sleep 1000")
        away.backend.go_away()
        away.backend.come_back()
        with pytest.raises(BackendUnavailable, match="was made again"):
            await running
        assert await away.shell("echo $WORD") == "kept\n" and next(times) == 4

    with_session(work)


def test_a_box_that_dies_meanwhile_is_lost_for_all_who_wait() -> None:
    async def work(away: Away) -> None:
        program = await away.start("sleep 1000")
        waiting = asyncio.create_task(away.wait(program.id))
        running = await away.under_way("sleep 1000")
        await away.broken()
        come = asyncio.create_task(away.shell("true"))
        (box,) = away.backend._boxes.values()
        box._host.close()  # its keeper ends it, as it has no other host
        while await away.backend.list():
            await asyncio.sleep(0.02)
        away.backend.come_back()
        for one in (running, waiting, come, asyncio.create_task(away.shell("true"))):
            with pytest.raises(BoxLost, match="gone"):
                await one

    with_session(work)


def test_a_box_that_ends_with_its_link_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeBox, "outlives_links", False)

    async def work(away: Away) -> None:
        program = await away.start("sleep 1000")
        running = await away.under_way("sleep 1000")
        away.backend.go_away()
        for one in (running, away.wait(program.id), away.shell("true")):
            with pytest.raises(BoxLost, match="hung up") as lost:
                await one
            assert lost.value.__cause__ is None
        while await away.backend.list():
            await asyncio.sleep(0.02)

    with_session(work)


def test_a_session_that_is_closed_meanwhile_is_closed_at_once() -> None:
    async def work(away: Away) -> None:
        running = await away.under_way("sleep 1000")
        await away.broken()
        come = asyncio.create_task(away.shell("true"))
        sleep = asyncio.create_task(away.do(op.Hibernate(away.id)))
        await asyncio.sleep(0.05)
        await away.do(op.CloseSession(away.id))
        for one in (running, come, sleep):
            with pytest.raises(BoxLost, match="closed"):
                await one
        assert not await away.backend.list()

    with_session(work)


def test_a_caller_that_goes_away_while_it_waits_stops_nothing() -> None:
    async def work(away: Away) -> None:
        await away.shell("WORD=kept")
        running = await away.under_way("sleep 1000")
        await away.broken()
        come = asyncio.create_task(away.shell("true"))
        await asyncio.sleep(0.05)
        for one in (running, come):
            one.cancel()
            with pytest.raises(asyncio.CancelledError):
                await one
        away.backend.come_back()
        assert await away.shell("echo $WORD") == "kept\n"

    with_session(work)


def test_hibernation_waits_for_the_link_and_fails_without_harm_if_it_breaks_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(away: Away) -> None:
        await away.shell("WORD=kept")
        await away.broken()
        sleep = asyncio.create_task(away.do(op.Hibernate(away.id)))
        await asyncio.sleep(0.05)
        assert not sleep.done()
        away.backend.come_back()
        await sleep
        assert await away.shell("echo $WORD") == "kept\n"

        real = Link.ask

        async def ask(link: Link, request: wire.GuestRequest) -> dict[str, object]:
            monkeypatch.undo()
            away.backend.go_away()
            away.backend.come_back()
            return await real(link, request)

        monkeypatch.setattr(Link, "ask", ask)
        with pytest.raises(BackendUnavailable, match="was made again"):
            await away.do(op.Hibernate(away.id))
        assert (await away.do(op.GetSession(away.id))).status == "running"
        assert await away.shell("echo $WORD") == "kept\n"
        await away.do(op.Hibernate(away.id))
        assert await away.shell("echo $WORD") == "kept\n"

    with_session(work)


def test_the_deadline_passes_while_the_box_cannot_be_reached() -> None:
    async def work(away: Away) -> None:
        running = await away.under_way("sleep 1000")
        await away.broken()
        life = away.engine._sessions[away.id]
        life._expires = since_boot()
        life._moved.set()
        with pytest.raises(BoxLost, match="closed"):
            await running
        with pytest.raises(BoxLost, match="its deadline passed"):
            await away.shell("true")

    with_session(work, replace(SIMPLE, ttl_seconds=3600))


def test_a_box_that_works_is_not_taken_for_idle_while_nobody_can_ask_it() -> None:
    async def work(away: Away) -> None:
        await away.shell("WORD=kept; sleep 1000 & true")
        await away.broken()
        await asyncio.sleep(1.5)
        away.backend.come_back()
        assert await away.shell("echo $WORD; kill $!") == "kept\n"

    with_session(work, replace(SIMPLE, idle=0.5))


async def _when(is_true: Callable[[], bool], then: Callable[[], None]) -> None:
    while not is_true():
        await asyncio.sleep(0.01)
    then()


def test_a_program_whose_start_was_not_answered_is_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def work(away: Away) -> None:
        link = away.session.link
        # It is sent, and what comes back is not read any more.
        monkeypatch.setattr(link._connection, "receive", lambda data: ())
        mark = tmp_path / "started"
        hang_up = asyncio.create_task(_when(mark.exists, lambda: link.hang_up("the guest hung up")))
        with pytest.raises(BackendUnavailable, match="was made again"):
            await away.start(f"echo hello; touch {mark}; read line; exit 3")
        await hang_up
        (program,) = await away.do(op.ListPrograms(away.id))
        assert program.exit_code is None
        await away.do(op.CloseInput(away.id, program.id))
        result = await away.wait(program.id)
        assert (result.exit_code, result.stdout) == (3, "hello\n")

    with_session(work)


def guest_above(pid: int) -> int:
    """The guest that a process descends from: the process below the keeper."""
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    if b"hutch.testing.keeper" in Path(f"/proc/{parent}/cmdline").read_bytes():
        return pid
    return guest_above(parent)


def test_a_guest_that_says_nothing_after_a_deadline_is_asked_on_another_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_module, "GRACE", 0.2)

    async def work(away: Away) -> None:
        await away.shell("WORD=kept")
        guest = guest_above(int(await away.shell("echo $PPID")))
        os.kill(guest, signal.SIGSTOP)
        running = asyncio.create_task(away.shell("sleep 1000", timeout=0.1))
        await asyncio.sleep(0.6)
        os.kill(guest, signal.SIGCONT)
        with pytest.raises(BackendUnavailable, match=r"long after a deadline.*was made again"):
            await running
        assert await away.shell("echo $WORD") == "kept\n"

        monkeypatch.setattr(link_module, "HELLO_TIMEOUT", 0.2)
        monkeypatch.setattr(links, "SILENT", 3)
        os.kill(guest, signal.SIGSTOP)  # for good
        with pytest.raises(BoxLost, match="did not answer"):
            await away.shell("sleep 1000", timeout=0.1)

    with_session(work)


def test_a_session_that_has_another_owner_is_left_to_it_with_its_box(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def taken_over(self: Engine, id: str) -> HutchError | None:
        del self._sessions[id]
        return ServerUnavailable("it is at another server")

    async def work(away: Away) -> None:
        running = await away.under_way("sleep 1000")
        life = away.engine._sessions[away.id]
        monkeypatch.setattr(Engine, "taken_over", taken_over)
        (box,) = away.backend._boxes.values()
        await box.outlive(SECONDS)
        await away.broken()
        with pytest.raises(ServerUnavailable, match="another server"):
            await running
        with pytest.raises(ServerUnavailable, match="another server"):
            await life.use(lambda session: session.list_ports())
        await life.close()
        away.backend.come_back()
        assert await away.backend.list() == [box.id]
        next_owner = await away.backend.adopt(box.id)
        link = await Link.open(await next_owner.connect())
        assert (await survey(link)).shells
        await link.close()

    with_session(work)
