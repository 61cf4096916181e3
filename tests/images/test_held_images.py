"""The images that a process uses: no caller waits for another's download, and all is bounded."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from must_work import need
from wheels_of_tests import Index, make_wheel

from hutch.errors import BackendUnavailable, Conflict
from hutch.images import held_images as module
from hutch.images import progress, store
from hutch.images.environment import Image
from hutch.images.held_images import HeldImages

PATIENCE = 60


@pytest.fixture
def wheels(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """An empty store, and a folder where packages are looked for."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HUTCH_DATA_DIR", str(tmp_path / "data"))
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    try:
        store.build("python")
    except BackendUnavailable as exc:
        need("packages", str(exc))
    return folder


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_image_that_downloads_holds_up_no_other(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("slow", "built", "other"):
        make_wheel(wheels, f"hutchtest-{name}")
    store.build(Image.python(["hutchtest-built"]))

    async def work() -> None:
        images = HeldImages()
        try:
            async with asyncio.timeout(PATIENCE):
                slow = [asyncio.create_task(images.find("", ("hutchtest-slow",))) for _ in range(2)]
                await asyncio.to_thread(index.asked.wait, PATIENCE)
                await images.find("", ("hutchtest-built",))  # it is there
                await images.find("python")
                await images.find("", ("hutchtest-other",))  # it downloads, too
                assert not any(task.done() for task in slow)
                index.answer.set()
                one, two = await asyncio.gather(*slow)
                assert one == two
        finally:
            index.answer.set()
            images.close()

    with Index("hutchtest-slow") as index:
        monkeypatch.setenv("UV_INDEX", index.url)
        asyncio.run(work())


def test_who_no_longer_wants_an_image_leaves_it_to_the_next(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_wheel(wheels, "hutchtest-slow")

    async def work() -> None:
        images = HeldImages()
        try:
            async with asyncio.timeout(PATIENCE):
                first = asyncio.create_task(images.find("", ("hutchtest-slow",)))
                await asyncio.to_thread(index.asked.wait, PATIENCE)
                second = asyncio.create_task(images.find("", ("hutchtest-slow",)))
                await asyncio.sleep(0)
                first.cancel()
                index.answer.set()
                with pytest.raises(asyncio.CancelledError):
                    await first
                assert (await second).version
        finally:
            index.answer.set()
            images.close()

    with Index("hutchtest-slow") as index:
        monkeypatch.setenv("UV_INDEX", index.url)
        asyncio.run(work())


def test_of_images_without_a_name_those_that_were_asked_for_last_are_held(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_UNNAMED", 2)
    for name in "abcd":
        make_wheel(wheels, f"hutchtest-{name}")
    store.build(Image.python(["hutchtest-d"], name="named"))

    async def work() -> None:
        images, before = HeldImages(), descriptors()
        await images.find("named")
        for name in "abac":
            await images.find("", (f"hutchtest-{name}",))
        assert descriptors() == before + 3
        with pytest.raises(Conflict):
            store.remove("named")
        removed = [entry.packages for entry in store.prune()]
        assert removed == [("hutchtest-b",)], "a was asked for again"
        again = await images.find("", ("hutchtest-b",))
        assert os.path.isdir(again.folder) and descriptors() == before + 3
        images.close()
        assert descriptors() == before

    asyncio.run(work())


def test_a_program_without_a_terminal_is_told_how_far_a_build_is(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "EVERY", 0)
    make_wheel(wheels, "hutchtest-told")

    async def work() -> None:
        for shows in (False, True):
            images = HeldImages(shows=shows)
            try:
                await images.find("", ("hutchtest-told",))
                assert bool(capfd.readouterr().err) == shows
            finally:
                images.close()
            if not shows:
                store.prune()

    asyncio.run(work())
