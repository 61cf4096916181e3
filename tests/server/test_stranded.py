"""Sessions that cannot be used by this server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hutch.backends.base import Box
from hutch.errors import BoxLost, NoCapacity
from hutch.server.store import SessionRecord, Store
from hutch.server.stranded import Stranded, StrandedSessions
from hutch.server.workspaces import Workspaces
from hutch.testing.fake import FakeBackend
from hutch.types import BoxInfo, Limits


@pytest.mark.parametrize("error", [NoCapacity("no descriptors"), TimeoutError(), OSError(5, "EIO")])
def test_one_that_cannot_be_ended_keeps_no_other_from_it_and_is_tried_again(
    tmp_path: Path, error: Exception
) -> None:
    class Failing(FakeBackend):
        async def adopt(self, id: str) -> Box:
            raise error if id in failing else BoxLost("it is gone")

    failing = {"box-one"}

    async def main() -> None:
        store = await Store.open(tmp_path / "hutch.db")
        workspaces = Workspaces(tmp_path / "workspaces", store)
        ended: list[str] = []

        def clean_up(id: str, *_: Any) -> None:
            ended.append(id)

        backend = Failing(str(tmp_path))
        stranded = StrandedSessions(backend, store, workspaces, lambda record: 0.0, clean_up)
        for id in ("one", "two"):
            info = BoxInfo(id, "fake", "host", "none", Limits(), "/", "user", 0.0)
            record = SessionRecord(info, f"box-{id}")
            await store.insert(record)
            stranded.all[id] = Stranded(record, "", temporary=True)
        await stranded.expire()
        assert ended == ["two"] and set(stranded.all) == {"one"}
        failing.clear()
        await stranded.expire()
        assert ended == ["two", "one"] and not stranded.all
        await store.close()

    asyncio.run(main())
