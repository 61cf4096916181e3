"""What happens when two do something at once: held at the one place where it matters."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hutch import NotFound, QuotaReached, Sandbox
from hutch import operations as op
from hutch.engine.engine import Engine, Engines
from hutch.engine.starts import Starts
from hutch.mcp.boxes import McpBoxes
from hutch.mcp.clients import McpClient
from hutch.server import workspaces as workspaces_module
from hutch.server.store import Store
from hutch.server.workspace_files import WorkspaceFiles
from hutch.server.workspaces import Workspaces
from hutch.testing.fake import FakeBackend
from hutch.types import BoxInfo, Limits


class Gate:
    """A call that says when it has been made, and goes on when it is told to."""

    def __init__(self, real: Callable[..., Awaitable[Any]]) -> None:
        self._real = real
        self.reached, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self, *args: Any, **more: Any) -> Any:
        answer = await self._real(*args, **more)
        self.reached.set()
        await self.open.wait()
        return answer


def with_workspaces(home: Path, test: Callable[[Workspaces, Store], Awaitable[None]]) -> None:
    async def main() -> None:
        store = await Store.open(home / "store")
        try:
            workspaces = Workspaces(home / "workspaces", store)
            await workspaces.recover()
            async with asyncio.timeout(60):
                await test(workspaces, store)
            await workspaces.close()
        finally:
            await store.close()

    asyncio.run(main())


def test_no_more_workspaces_are_made_at_once_than_an_owner_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspaces_module, "MOST", 2)

    async def test(workspaces: Workspaces, store: Store) -> None:
        making = (workspaces.make("ada", f"ws-{n}") for n in range(6))
        answers = await asyncio.gather(*making, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QuotaReached)]
        assert len(refused) == 4 and len(await workspaces.list("ada")) == 2

    with_workspaces(tmp_path, test)


def test_a_workspace_that_is_removed_while_one_is_about_to_write_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(workspaces: Workspaces, store: Store) -> None:
        await workspaces.make("ada", "data")
        gate = Gate(store.get_workspace)
        monkeypatch.setattr(store, "get_workspace", gate)
        writing = asyncio.create_task(workspaces.place("ada", "data", make=True))
        await gate.reached.wait()
        await workspaces.remove("ada", "data")
        gate.open.set()
        with pytest.raises(NotFound):
            await writing
        assert not (tmp_path / "workspaces" / "ada" / "data").exists()

    with_workspaces(tmp_path, test)


def with_files(home: Path, test: Callable[[WorkspaceFiles], Awaitable[None]]) -> None:
    async def work(workspaces: Workspaces, store: Store) -> None:
        backend = FakeBackend()
        files = WorkspaceFiles(backend, workspaces, home / "files", Starts())
        try:
            await test(files)
        finally:
            await files.close_all()
            await backend.close()
            await backend.close()

    with_workspaces(home, work)


MAKE = op.MakeDir("x", "/workspace/a")


def test_no_box_is_started_on_a_workspace_that_was_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.engine.box_request.check_grade", lambda *grades: None)

    async def test(files: WorkspaceFiles) -> None:
        workspaces = files._workspaces
        await workspaces.make("ada", "data")
        real, go_on = workspaces.remove, asyncio.Event()

        async def remove(owner: str, id: str) -> None:
            await go_on.wait()
            await real(owner, id)

        monkeypatch.setattr(workspaces, "remove", remove)
        gate = Gate(workspaces.place)
        removing = asyncio.create_task(files.remove("ada", "data"))
        monkeypatch.setattr(workspaces, "place", gate)
        writing = asyncio.create_task(files.of("ada", "data", MAKE))
        await gate.reached.wait()
        gate.open.set()
        go_on.set()
        await removing
        with pytest.raises(NotFound):
            await writing
        assert not files._open and not await files._backend.list()

    with_files(tmp_path, test)


def test_the_box_of_another_workspace_goes_when_both_bounds_are_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.workspace_files.MOST", 1)
    monkeypatch.setattr("hutch.server.workspace_files.MOST_OF_AN_OWNER", 1)
    monkeypatch.setattr("hutch.engine.box_request.check_grade", lambda *grades: None)

    async def test(files: WorkspaceFiles) -> None:
        for name in ("one", "two"):
            await files.of("ada", name, MAKE)
        assert list(files._open) == ["ada/two"]

    with_files(tmp_path, test)


def test_no_more_boxes_of_workspaces_are_opened_at_once_than_an_owner_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hutch.server.workspace_files.MOST_OF_AN_OWNER", 2)
    monkeypatch.setattr("hutch.engine.box_request.check_grade", lambda *grades: None)

    async def test(files: WorkspaceFiles) -> None:
        opening = (files.of("ada", f"ws-{n}", MAKE) for n in range(5))
        answers = await asyncio.gather(*opening, return_exceptions=True)
        assert {type(a) for a in answers if isinstance(a, Exception)} <= {QuotaReached}
        assert 1 <= len(files._open) <= 2
        assert len(await files._backend.list()) == len(files._open)

    with_files(tmp_path, test)


def test_engines_that_are_made_while_others_close_are_closed_too(tmp_path: Path) -> None:
    async def main() -> list[str]:
        closed: list[str] = []

        def make(name: str) -> Engine:
            engine = Engine(FakeBackend(str(tmp_path)))

            async def close() -> None:
                if name == "one":
                    engines._made["two"] = make("two")
                await asyncio.sleep(0)
                closed.append(name)

            engine.close = close  # type: ignore[method-assign]
            return engine

        engines = Engines(make, "one")
        assert await engines.perform(op.GetReport())
        await engines.close()
        return closed

    assert asyncio.run(main()) == ["one", "two"]


def test_two_threads_may_read_one_stream_and_a_third_may_close_it() -> None:
    with Sandbox.create() as box:
        stream = box.shell.stream("echo a; sleep 1000")
        read: list[Any] = []

        def all_of_it() -> None:
            read.extend(stream)

        threads = [threading.Thread(target=all_of_it) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not read:
            threads[0].join(0.01)
        stream.close()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        assert [item.text for item in read] == ["a\n"]


def test_a_client_that_leaves_while_its_box_is_opened_leaves_no_box() -> None:
    async def main() -> list[str]:
        opening, closed = asyncio.Event(), []
        info = BoxInfo("b1", "fake", "host", "none", Limits(), "/", "user", 0.0, owner="ada")

        async def perform(operation: op.Operation[Any]) -> Any:
            if isinstance(operation, op.ListSessions):
                return []
            if isinstance(operation, op.OpenSession):
                await opening.wait()
                return info
            assert isinstance(operation, op.CloseSession)
            closed.append(operation.session)
            return None

        transport: Any = SimpleNamespace(perform=perform)
        boxes, visitor = (
            McpBoxes(),
            McpClient(lambda: transport, name="k", owner="ada", session_id="t"),
        )
        finding = asyncio.create_task(boxes.find(visitor, None))
        await asyncio.sleep(0)
        leaving = asyncio.create_task(boxes.leave(visitor))
        await asyncio.sleep(0)
        opening.set()
        await asyncio.gather(finding, leaving)
        return closed

    assert asyncio.run(main()) == ["b1"]
