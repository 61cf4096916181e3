"""A folder of the host is allowed, and another box puts a link in its place: it is not followed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from must_work import need

from daemon_of_tests import Daemon
from docker_of_tests import BUSYBOX, Client
from hutch import HutchError, InvalidRequest, Mount, Sandbox, factory
from hutch.backends import linux
from hutch.backends.base import Spec
from hutch.backends.docker import DockerBackend, owner_scope, users
from hutch.backends.docker.box import DockerBox
from hutch.backends.docker.config import find
from hutch.backends.docker.engine import DockerEngine
from hutch.backends.linux.folders import open_source
from hutch.backends.linux.mounts import open_mounts

WHO = 4321  # whose the folders are: a container does not run as root


@dataclass
class Place:
    """A folder `x` in one that is shared, and where a link in its place would lead."""

    shared: Path
    outside: Path

    @property
    def x(self) -> Path:
        return self.shared / "x"

    def swap(self) -> None:
        self.x.rename(self.shared / "folder")
        (self.shared / "link").rename(self.x)

    def swap_back(self) -> None:
        self.x.rename(self.shared / "link")
        (self.shared / "folder").rename(self.x)

    def point_to(self, path: Path) -> None:
        (self.shared / "link").unlink()
        (self.shared / "link").symlink_to(path)


@pytest.fixture
def where(tmp_path: Path) -> Place:
    made = Place(tmp_path / "shared", tmp_path / "outside")
    for folder, word in ((made.x, "inside"), (made.outside, "outside")):
        folder.mkdir(parents=True)
        (folder / "word").write_text(word)
    (made.shared / "link").symlink_to(made.outside)
    if not os.geteuid():
        for path in (*made.shared.rglob("*"), *tmp_path.iterdir(), *made.outside.iterdir()):
            os.chown(path, WHO, WHO, follow_symlinks=False)
    return made


@pytest.fixture(params=["namespaces", "docker"])
def daemon(request: pytest.FixtureRequest, tmp_path: Path, where: Place) -> Iterator[Daemon]:
    settings = {"backend": request.param, "mounts": str(where.shared)}
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
        settings["default_image"] = BUSYBOX
    with Daemon(tmp_path / "data", key=None, **settings) as made:
        yield made


@contextlib.contextmanager
def swapping(where: Place) -> Iterator[None]:
    """To and fro, all the time. Afterwards it is as before."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(random.uniform(0, 0.05)):
            where.swap()
            over.wait(random.uniform(0, 0.02))
            where.swap_back()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def words_in(daemon: Daemon, where: Place) -> str:
    with Sandbox.create(url=daemon.url, mounts=[Mount(str(where.x), "/data")]) as box:
        return box.commands.run("cat /data/word").stdout


def test_who_wakes_after_the_swap_is_refused_and_sleeps_on(daemon: Daemon, where: Place) -> None:
    mount = Mount(str(where.x), "/data")
    with Sandbox.create(url=daemon.url, workspace_id="victim") as victim:
        victim.commands.run("echo mine > note")
    workspaces = daemon.folder / "workspaces"
    before = owners(workspaces)
    with Sandbox.create(url=daemon.url, mounts=[mount]) as box:
        box.shell.run("echo kept > note")
        box.hibernate()
        for outside in (where.outside, workspaces, daemon.folder):
            where.point_to(outside)
            where.swap()
            with pytest.raises(InvalidRequest, match="a link is on the way"):
                box.wake()
            with pytest.raises(InvalidRequest, match="a link is on the way"):
                box.shell.run("cat /data/word")
            assert Sandbox.connect(box.id, url=daemon.url).info.status == "asleep"
            where.swap_back()
        assert owners(workspaces) == before
        assert box.shell.run("cat note /data/word").stdout == "kept\ninside"


def test_a_path_through_a_link_is_mounted_as_where_it_led(daemon: Daemon, where: Place) -> None:
    where.point_to(where.x)
    through = Mount(str(where.shared / "link"), "/data")
    with Sandbox.create(url=daemon.url, mounts=[through]) as box:
        box.hibernate()
        where.point_to(where.outside)
        assert box.shell.run("cat /data/word").stdout == "inside"
        with pytest.raises(InvalidRequest, match="the operator of this server allows"):
            Sandbox.create(url=daemon.url, mounts=[through])


def test_however_fast_it_is_swapped_nobody_sees_the_outside(daemon: Daemon, where: Place) -> None:
    seen: list[str] = []
    with swapping(where):
        for _ in range(150):  # while the link is there, they are refused at once
            with contextlib.suppress(HutchError):
                seen.append(words_in(daemon, where))
            if len(seen) == 12:
                break
    assert "outside" not in seen
    assert words_in(daemon, where) == "inside"


def test_only_the_workspace_is_given_to_the_box(daemon: Daemon, where: Place) -> None:
    before = owners(where.shared), owners(where.outside)
    others = {path: os.lstat(path).st_uid for path in daemon.folder.iterdir()}
    with Sandbox.create(
        url=daemon.url, workspace_id="mine", mounts=[Mount(str(where.x), "/data", read_only=True)]
    ) as box:
        assert box.commands.run("ls -d /data/word && echo hi > note").exit_code == 0
    assert (owners(where.shared), owners(where.outside)) == before
    assert {path: os.lstat(path).st_uid for path in others} == others


def owners(top: Path) -> dict[Path, int]:
    return {path: os.lstat(path).st_uid for path in (top, *top.rglob("*"))}


def test_what_was_looked_at_is_what_is_mounted(where: Place) -> None:
    if os.geteuid():
        need("root", "only root can copy a mount")
    looked_at = os.stat(where.x)
    source = open_source(str(where.x))
    where.swap()
    copy = linux.copy_mount(source)
    try:
        assert os.path.samestat(os.fstat(copy), looked_at)
    finally:
        os.close(copy)
        os.close(source)
    with pytest.raises(InvalidRequest, match="a link is on the way"):
        open_source(str(where.x))


# --- between us and the engine ------------------------------------------------------------


class Late(DockerEngine):
    """An engine that comes too late: something has happened before it makes a container."""

    happens: Callable[[], object] | None = None
    at_start = False

    async def create(self, body: dict[str, Any], name: str) -> str:
        if not self.at_start and owner_scope.BOX in body["Labels"]:
            self._let_it_happen()
        return await super().create(body, name)

    async def start(self, id: str) -> None:
        if self.at_start:
            self._let_it_happen()
        await super().start(id)

    def _let_it_happen(self) -> None:
        happens, self.happens = self.happens, None
        if happens:
            happens()


class LateBackend(DockerBackend):
    def _engine(self) -> Late:
        self.late = Late(find(self._docker_host, os.environ))
        return self.late


@contextlib.asynccontextmanager
async def late_backend(host: str, folder: Path) -> AsyncIterator[LateBackend]:
    folder.mkdir()
    made = LateBackend(factory.bundle, docker_host=host, lasting=str(folder / "run"))
    try:
        async with asyncio.timeout(100):
            await made.list()  # so that there is an engine
            yield made
    finally:
        await made.close()


@pytest.mark.parametrize("at_start", [False, True])
def test_a_container_that_got_another_folder_is_ended_before_anybody_talks_to_it(
    docker_engine: Client, tmp_path: Path, where: Place, at_start: bool
) -> None:
    spec = Spec(image=BUSYBOX, mounts=(Mount(str(where.x), "/data"),))

    async def main() -> None:
        async with late_backend(docker_engine.host, tmp_path / "data") as made:
            made.late.happens, made.late.at_start = where.swap, at_start
            with pytest.raises(InvalidRequest, match="it was another one a moment ago"):
                await made.start(spec)
            where.swap_back()
            assert await made.list() == []
            await (await made.start(spec)).kill()

    asyncio.run(main())


def test_a_folder_that_goes_at_the_wrong_moment_does_not_make_an_engine_a_far_one(
    docker_engine: Client, tmp_path: Path, where: Place
) -> None:
    spec = Spec(image=BUSYBOX, mounts=(Mount(str(where.x), "/data"),))

    async def main() -> None:
        async with late_backend(docker_engine.host, tmp_path / "data") as made:
            made.late.happens = lambda: where.x.rename(where.shared / "away")
            with pytest.raises(InvalidRequest, match=r"/x: it is not there any more"):
                await made.start(spec)
            (where.shared / "away").rename(where.x)
            await (await made.start(spec)).kill()

    asyncio.run(main())


def test_a_place_that_a_link_of_the_image_leads_to_is_not_taken_on_trust(
    docker_engine: Client, tmp_path: Path, where: Place
) -> None:
    async def main() -> None:
        async with late_backend(docker_engine.host, tmp_path / "data") as made:
            box = await made.start(Spec(image=BUSYBOX, mounts=(Mount(str(where.x), "/data"),)))
            assert isinstance(box, DockerBox)
            guest = box._record.guest
            with open_mounts((Mount(str(where.x), "/data"),)) as found:
                users.check_mounted(found, guest)
            for place in ("/proc/self/cwd", "/nowhere", "/tmp"):
                with (
                    open_mounts((Mount(str(where.x), "/a"),)) as (found,),
                    pytest.raises(InvalidRequest, match="may not be mounted"),
                ):
                    users.check_mounted((replace(found, target=place),), guest)
            await box.kill()

    asyncio.run(main())
