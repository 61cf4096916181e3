"""A server whose connection to a box breaks, and what is written down of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from services import ADMIN, opened, place, run

from hutch import factory
from hutch import operations as op
from hutch.errors import BackendUnavailable, BoxLost, SessionEnded
from hutch.server.rules import Rules
from hutch.server.service import Service
from hutch.serving import JournalEntry
from hutch.testing.fake import FakeBackend
from hutch.types import BoxInfo

SECONDS = 120


def with_service(
    folder: Path, work: Callable[[Service, FakeBackend, BoxInfo], Awaitable[None]]
) -> None:
    async def main() -> None:
        backend = FakeBackend(lasting=str(place(folder) / "run"))
        made = await Service.open(folder, backend, factory.images("fake"), Rules(), None)
        try:
            async with asyncio.timeout(SECONDS):
                await work(made, backend, await opened(made, min_isolation="none"))
        finally:
            await made.close(kill=True)

    asyncio.run(main())


def written(made: Service, id: str) -> list[JournalEntry]:
    return made._sessions.journal(id).read()


async def begun(made: Service, id: str) -> asyncio.Task[None]:
    began = asyncio.Event()

    async def run() -> None:
        o = op.RunProgram(id, ("sh", "-c", "echo begun; sleep 1000"))
        async for _ in await made.stream(o, ADMIN):
            began.set()

    task = asyncio.create_task(run())
    await began.wait()
    return task


def test_the_journal_says_why_and_for_how_long_a_session_had_no_link(tmp_path: Path) -> None:
    async def work(made: Service, backend: FakeBackend, info: BoxInfo) -> None:
        await run(made, info.id, "WORD=kept")
        running = await begun(made, info.id)
        backend.go_away()
        await asyncio.sleep(0.3)
        backend.come_back()
        with pytest.raises(BackendUnavailable, match="was made again"):
            await running
        assert (await run(made, info.id, "echo $WORD")).stdout == "kept\n"
        start, command, reconnected, stopped, last = written(made, info.id)
        assert (start.kind, command.kind, last.kind) == ("start", "command", "command")
        assert reconnected.kind == "reconnected" and stopped.kind == "broken_off"
        assert "hung up" in reconnected.body["why"] and reconnected.body["seconds"] >= 0.3

    with_service(tmp_path, work)


def test_a_box_that_is_gone_when_it_could_be_reached_again_has_crashed(tmp_path: Path) -> None:
    async def work(made: Service, backend: FakeBackend, info: BoxInfo) -> None:
        running = await begun(made, info.id)
        backend.go_away()
        (box,) = backend._boxes.values()
        await box.outlive(0)
        box._host.close()
        while await backend.list():
            await asyncio.sleep(0.02)
        backend.come_back()
        with pytest.raises(BoxLost, match="gone"):
            await running
        with pytest.raises(SessionEnded, match=r"its box died: .* gone"):
            await run(made, info.id, "true")
        await made.perform(op.CloseSession(info.id), ADMIN)  # waits for its end
        assert (await made.perform(op.GetSession(info.id), ADMIN)).status == "crashed"
        kinds = [entry.kind for entry in written(made, info.id)]
        assert "reconnected" not in kinds and kinds[-1] == "end"

    with_service(tmp_path, work)


def test_a_server_that_stops_while_a_box_is_away_leaves_it_to_the_next(tmp_path: Path) -> None:
    async def main() -> None:
        folder = place(tmp_path)
        backend = FakeBackend(lasting=str(folder / "run"))
        made = await Service.open(folder, backend, factory.images("fake"), Rules(), None)
        info = await opened(made, min_isolation="none")
        await run(made, info.id, "WORD=kept")
        backend.go_away()
        await asyncio.sleep(0.1)
        async with asyncio.timeout(SECONDS):
            await made.close(kill=False)
        after = FakeBackend(lasting=str(folder / "run"))
        made = await Service.open(folder, after, factory.images("fake"), Rules(), None)
        assert (await run(made, info.id, "echo $WORD")).stdout == "kept\n"
        await made.close(kill=True)

    asyncio.run(main())
