"""Images that are stored: shared layers, names that move, and removal while they are in use."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from hutch.errors import Conflict, InvalidRequest, NotFound
from hutch.images import store
from hutch.images.environment import Image
from hutch.images.held_images import HeldImages
from hutch.images.oci import archive
from hutch.images.oci import store as oci
from hutch.images.oci.reference import parse
from hutch.images.oci.store import StoredImage, bring
from hutch.types import Root
from oci_of_tests import PATIENCE, Made, data, digest_of, left_in, make_image, saved, unpacks

__all__ = ["data", "unpacks"]  # fixtures
pytestmark = pytest.mark.usefixtures("data", "unpacks")


def keep(name: str, image: Made) -> StoredImage:
    with open(os.memfd_create("archive"), "wb+") as file:
        file.write(saved({name: image}))
        file.flush()
        with archive.open_stream(file, parse(name)) as source:
            return bring(source, parse(name), lambda step: None)


def remove(name: str) -> None:
    oci.remove(name)


def layers(data: Path) -> set[str]:
    return {f"sha256:{path.name}" for path in data.glob("images/layers/*/")}


BASE = {"base": b"1"}


def test_layers_that_another_image_has_stay(data: Path) -> None:
    one, two = make_image(BASE, {"one": b""}), make_image(BASE, {"two": b""})
    keep("one", one), keep("two", two)
    assert len(layers(data)) == 3
    remove("one")
    assert layers(data) == {digest_of(each) for each in two.layers}
    remove("two")
    assert left_in(data) == [] and not list(data.glob("images/layers/*"))


def test_an_image_goes_with_its_last_name(data: Path) -> None:
    image = make_image(BASE)
    digest = keep("one", image).digest
    keep("two", image)
    with pytest.raises(Conflict, match="is called one:latest, two:latest"):
        remove(f"one@{digest}")
    remove("one")
    assert oci.find("two").digest == digest
    with pytest.raises(NotFound, match="hutch image pull one"):
        oci.find("one")
    remove("two")
    assert left_in(data) == []
    with pytest.raises(NotFound):
        remove("two")


def test_an_image_that_a_box_uses_is_not_removed(data: Path) -> None:
    found = keep("one", make_image(BASE))
    held = oci.hold(found)
    before = left_in(data)
    with pytest.raises(Conflict, match="a box uses one"):
        remove("one")
    assert left_in(data) == before
    keep("one", make_image({"other": b""}))
    assert oci.prune() == [], "it has no name any more, but is in use"
    assert os.path.exists(os.path.join(found.root().layers[0], "base"))
    os.close(held)
    assert [entry.digest for entry in oci.prune()] == [found.digest]
    assert len(layers(data)) == 1
    with pytest.raises(NotFound, match="just been removed"):
        oci.hold(found)


def test_a_layer_that_is_there_twice_counts_once_where_it_is_highest() -> None:
    found = keep("twice", make_image({"a": b"1"}, {"a": b"2"}, {"a": b"1"}))
    assert len(found.layers) == 3
    contents = [Path(folder, "a").read_bytes() for folder in found.root().layers]
    assert contents == [b"2", b"1"]


def test_who_waits_for_a_layer_keeps_nobody_else_waiting(data: Path) -> None:
    files: list[dict[str, bytes]] = [{name: name.encode()} for name in "abcd"]
    up, down = make_image(*files), make_image(*reversed(files))
    found: list[StoredImage] = []
    threads = [
        threading.Thread(target=lambda name=name, image=image: found.append(keep(name, image)))
        for name, image in (("up", up), ("down", down), ("up-again", up))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 3 and len(layers(data)) == 4


def test_images_are_listed_by_the_names_that_people_use(data: Path) -> None:
    keep("b:2", make_image(BASE)), keep("host:5000/a", make_image(BASE))
    digest = keep("moves", make_image({"old": b""})).digest
    keep("moves", make_image({"new": b""}))
    assert [entry.name for entry in oci.entries()] == [
        "b:2", "moves:latest", "host:5000/a:latest", None
    ]  # fmt: skip
    last = oci.entries()[-1]
    assert (last.digest, last.kind, last.built) == (digest, "oci", True) and last.bytes > 0


def test_what_nobody_finished_is_swept(data: Path) -> None:
    keep("one", make_image(BASE))
    half_done = data / "images/layers" / ("0" * 64 + ".building-abc")
    orphan = data / "images/layers" / ("1" * 64)
    for folder in (half_done, orphan):
        (folder / "root").mkdir(parents=True)
    keep("two", make_image({"two": b""}))
    assert not half_done.exists() and not orphan.exists() and len(layers(data)) == 2


# --- images held ------------------------------------------------------------------------


def test_the_shelf_finds_packages_by_name_before_anything_else() -> None:
    store._keep_name(Image(("iniconfig",), (), "mine"))
    image = make_image(BASE)
    found = keep("mine", image)
    keep("python", image)

    async def work() -> None:
        images = HeldImages()
        try:
            assert await images.find("mine:latest") == found.root()
            assert await images.find("python:latest") == found.root()
            assert await images.find(f"any@{found.digest}") == found.root()
            assert store.look_up("mine") and store.look_up("python")
            assert not store.look_up("mine:latest")
        finally:
            images.close()

    asyncio.run(work())


def test_the_shelf_never_pulls(data: Path) -> None:
    async def work() -> None:
        images = HeldImages()
        with pytest.raises(NotFound, match="hutch image pull node:22-slim"):
            await images.find("node:22-slim")
        with pytest.raises(InvalidRequest, match="cannot be the name"):
            await images.find("--x")
        images.close()

    asyncio.run(work())


def test_the_shelf_finds_by_digest_what_a_long_name_stood_for(data: Path) -> None:
    name = "a" * 170
    before = keep(name, make_image(BASE))
    now = keep(name, make_image({"new": b""}))

    async def work() -> None:
        images = HeldImages()
        assert await images.find(name) == now.root()
        assert await images.find(name, (), (), before.digest) == before.root()
        oci.prune()
        with pytest.raises(NotFound, match=f"began with is gone.*{before.digest}"):
            await images.find(name, (), (), before.digest)
        images.close()

    asyncio.run(work())


def test_the_shelf_holds_what_it_gave_for_as_long_as_somebody_has_it(data: Path) -> None:
    keep("one", make_image(BASE, config={"Env": ["A=1"]}))

    async def work() -> None:
        before = len(os.listdir("/proc/self/fd"))
        images = HeldImages()
        first = await images.find("one")
        assert isinstance(first, Root) and first.env == (("A", "1"),)
        assert await images.find("one") is first
        assert len(os.listdir("/proc/self/fd")) == before + 1
        with pytest.raises(Conflict):
            await images.remove("one")
        del first
        assert len(os.listdir("/proc/self/fd")) == before
        await images.remove("one")
        images.close()
        with pytest.raises(NotFound):
            await images.remove("one")

    asyncio.run(work())
    assert left_in(data) == []


def test_the_shelf_lists_both_kinds() -> None:
    keep("one", make_image(BASE))
    listed = {info.name: info for info in HeldImages().list()}
    assert set(listed) == {"host", "python", "data", "chem", "one:latest"}
    assert listed["one:latest"].built and listed["one:latest"].size
