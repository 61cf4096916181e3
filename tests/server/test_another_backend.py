"""A server that is started with another backend than the one before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from services import ADMIN, opened, run, service

from hutch import operations as op
from hutch.errors import Conflict
from hutch.server.adoption import close_all
from hutch.server.service import Service
from hutch.server.store import Store

SLEEPS, RUNS = "sleeps", "runs"


async def change(folder: Path, **changes: Any) -> None:
    """What is written down of every session that lives."""
    store = await Store.open(folder / "hutch.db")
    try:
        for record in await store.live():
            await store.update(record.info.id, **changes)
    finally:
        await store.close()


async def left_by_another(folder: Path) -> dict[str, str]:
    """Two sessions that seem to be of docker."""
    async with service(folder, kill=False) as made:
        ids = {name: (await opened(made, ttl_seconds=600)).id for name in (SLEEPS, RUNS)}
        await run(made, ids[RUNS], "A=kept")
        await made.perform(op.Hibernate(ids[SLEEPS]), ADMIN)
    await change(folder, backend="docker")
    return ids


async def status(made: Service, id: str) -> str:
    return str((await made.perform(op.GetSession(id), ADMIN)).status)


async def refused(folder: Path) -> None:
    says = "2 sessions of this folder are of docker.*start with --backend docker, or end them first"
    with pytest.raises(Conflict, match=says):
        async with service(folder):
            pass


def test_it_does_not_start_while_sessions_of_the_first_live(tmp_path: Path) -> None:
    async def main() -> None:
        ids = await left_by_another(tmp_path)
        await refused(tmp_path)
        await change(tmp_path, backend="namespaces")
        async with service(tmp_path) as made:
            assert made.adoption.adopted == 2
            assert await status(made, ids[SLEEPS]) == "asleep"
            assert (await run(made, ids[RUNS], "echo $A")).stdout == "kept\n"

    asyncio.run(main())


def test_sessions_that_are_due_do_not_keep_it_from_starting(tmp_path: Path) -> None:
    async def main() -> None:
        ids = await left_by_another(tmp_path)
        await change(tmp_path, deadline=0.0)
        async with service(tmp_path) as made:
            assert (made.adoption.expired, made.adoption.lost) == (2, 0)
            assert [await status(made, id) for id in ids.values()] == ["expired"] * 2

    asyncio.run(main())


def test_sessions_that_were_ended_without_a_server_were_closed_and_did_not_crash(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        ids = await left_by_another(tmp_path)
        store = await Store.open(tmp_path / "hutch.db")
        try:
            assert await close_all(store) == 2
        finally:
            await store.close()
        async with service(tmp_path) as made:
            assert made.adoption == replace(made.adoption, adopted=0, expired=0, lost=0)
            assert [await status(made, id) for id in ids.values()] == ["destroyed"] * 2
            assert not list((tmp_path / "sessions").rglob("asleep-*"))

    asyncio.run(main())
