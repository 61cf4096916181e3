"""Images from elsewhere at a server: used, held while a session needs them, and removed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from services import ADMIN, opened, run, service

from hutch import operations as op
from hutch import serving
from hutch.errors import Conflict, NoImage
from hutch.images.oci import archive
from hutch.images.oci import store as oci
from hutch.images.oci.reference import parse
from hutch.images.oci.store import StoredImage, bring
from hutch.server.rules import Rules
from hutch.server.service import Service
from layers_of_tests import busybox, file, tar_of

pytestmark = pytest.mark.namespaces("images are kept here, and not in an engine")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path))
    return tmp_path


def keep(name: str, content: str = "") -> StoredImage:
    """An image with a shell, and a file that tells it from others."""
    with open(os.memfd_create("tar"), "w+b") as tar:
        tar.write(tar_of(*busybox(), file("which", content)))
        tar.flush()
        with archive.open_stream(tar, parse(name)) as source:
            return bring(source, parse(name), lambda step: None)


def go(folder: Path, work: Any, rules: Rules | None = None, *, kill: bool = True) -> None:
    async def main() -> None:
        async with service(folder, rules, kill=kill) as made, asyncio.timeout(100):
            await work(made)

    asyncio.run(main())


async def remove(made: Service, name: str) -> None:
    await made.perform(serving.RemoveImage(name), ADMIN)


async def close(made: Service, id: str) -> None:
    await made.perform(op.CloseSession(id), ADMIN)


def test_an_image_is_removed_when_its_last_session_has_ended(folder: Path) -> None:
    keep("mine")

    async def work(made: Service) -> None:
        one, two = [await opened(made, image="mine") for _ in range(2)]
        await close(made, one.id)
        with pytest.raises(Conflict, match="a box uses mine"):
            await remove(made, "mine")
        assert (await run(made, two.id, "ls /which")).stdout == "/which\n"
        await close(made, two.id)
        await remove(made, "mine")
        with pytest.raises(NoImage):
            await opened(made, image="mine")
        assert not list(folder.glob("images/layers/*"))

    go(folder, work)


def test_a_warm_box_of_an_image_is_a_use_of_it(folder: Path) -> None:
    keep("mine")

    async def work(made: Service) -> None:
        while not (await made.perform(serving.GetPool(), ADMIN))[0].ready:
            await asyncio.sleep(0.02)
        with pytest.raises(Conflict):
            await remove(made, "mine")
        await made.perform(serving.SizePool("mine", 0), ADMIN)
        while await made.perform(serving.GetPool(), ADMIN):
            await asyncio.sleep(0.02)
        await _until_removed(made)

    go(folder, work, Rules(pool={"mine": 1}))


async def _until_removed(made: Service) -> None:
    """A box that is dropped is gone a little later."""
    while True:
        try:
            return await remove(made, "mine")
        except Conflict:
            await asyncio.sleep(0.02)


def test_the_image_of_an_adopted_session_is_held(folder: Path) -> None:
    keep("mine", "before")
    ids: list[str] = []

    async def leave(made: Service) -> None:
        ids.append((await opened(made, image="mine")).id)

    async def adopt(made: Service) -> None:
        keep("mine", "after")  # the name stands for another one, and the box does not
        assert oci.prune() == []
        assert (await run(made, ids[0], "cat /which")).stdout == "before"
        await remove(made, "mine")
        await close(made, ids[0])
        assert len(oci.prune()) == 1

    go(folder, leave, kill=False)
    go(folder, adopt)


def test_a_session_whose_image_is_gone_sleeps_on_and_its_journal_says_why(folder: Path) -> None:
    keep("mine")

    async def work(made: Service) -> None:
        info = await opened(made, image="mine")
        await made.perform(op.Hibernate(info.id), ADMIN)
        await remove(made, "mine")
        with pytest.raises(NoImage):
            await run(made, info.id, "true")
        last = (await made.perform(serving.ReadJournal(info.id), ADMIN))[-1]
        assert last.kind == "not_woken" and "mine" in last.body["why"]
        keep("mine")
        assert (await run(made, info.id, "ls /which")).stdout == "/which\n"

    go(folder, work)


def test_an_image_with_a_long_name_wakes_as_it_was(folder: Path) -> None:
    name = "a" * 170
    keep(name, "before")

    async def work(made: Service) -> None:
        info = await opened(made, image=name)
        await made.perform(op.Hibernate(info.id), ADMIN)
        keep(name, "after")
        assert (await run(made, info.id, "cat /which")).stdout == "before"
        again = await opened(made, image=name)
        assert (await run(made, again.id, "cat /which")).stdout == "after"

    go(folder, work)
