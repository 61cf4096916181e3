"""Images of our own in a Docker engine: the recipes, the builds, and what a failed one leaves."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.docker_engine import Engine

from docker_of_tests import ARCHITECTURE, BUSYBOX, DEBIAN, own_engine
from hutch import BackendUnavailable, InvalidRequest, NotFound
from hutch.backends.docker.images import NAMES, ImageClient, opened
from hutch.recipes import chain, debian, fingerprint, pack, short
from hutch.recipes.engine_images import EngineImages
from hutch.recipes.making import make
from hutch.serving import BuildImage, PullImage

HELLO = "RUN echo hello > /hello"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One that has no images of ours yet, and belongs to this test."""
    with own_engine(debian=True) as made:
        yield made


def recipe(folder: Path, *steps: str, name: str = "base", base: str = BUSYBOX) -> Path:
    """A folder of recipes with one more in it."""
    lines = [f"ARG BASE={base}", "FROM ${BASE}", f'LABEL hutch.image="{name}"', *steps]
    (folder / name).mkdir()
    (folder / name / "Dockerfile").write_text("\n".join(lines) + "\n")
    return folder


async def ids(images: ImageClient) -> set[str]:
    """Every image that there is, those between steps too."""
    return {each["Id"] for each in await images.engine.docker.images.list(all="true")}


async def containers(images: ImageClient) -> set[str]:
    return {each.id for each in await images.engine.docker.containers.list(all="true")}


def in_engine(engine: Engine, work: Callable[[ImageClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with opened(engine.host) as images:
            await work(images)

    asyncio.run(run())


def silent(step: str) -> None:
    pass


# --- recipes -----------------------------------------------------------------------------


def test_each_image_builds_on_the_one_before() -> None:
    assert [each.name for each in chain("data")] == ["base", "python", "data"]
    assert [each.name for each in chain("hutch/node")] == ["base", "node"]
    assert "git" in chain("base")[0].packages
    assert {chain(name)[0].base for name in NAMES} == {"debian:12-slim"}


@pytest.mark.parametrize(
    "name", ["", "--privileged", ";$(id)", "../base", "base\n", "hutch/", "mine", "base:1"]
)
def test_only_images_of_ours_are_built_and_removed(name: str) -> None:
    with pytest.raises(InvalidRequest, match="base, small, python, data, node"):
        short(name)


def test_a_changed_recipe_is_another_one(tmp_path: Path) -> None:
    recipe(tmp_path, HELLO)
    before = fingerprint(chain("base", tmp_path))
    assert fingerprint(chain("base", tmp_path)) == before
    (tmp_path / "base" / "constraints.txt").write_text("numpy==2\n")
    assert fingerprint(chain("base", tmp_path)) != before


def test_a_context_is_the_same_bytes_whenever_it_is_packed(tmp_path: Path) -> None:
    site = tmp_path / "site"
    packed = []
    for names in (["b", "a"], ["a", "b"]):
        for name in names:
            (site / name).mkdir(parents=True, exist_ok=True)
            (site / name / "x.py").write_text("")
            os.utime(site / name / "x.py", (len(packed), 0))
        pack(chain("base")[0], site, into := io.BytesIO())
        packed.append(into.getvalue())
    assert packed[0] == packed[1]
    with tarfile.open(fileobj=io.BytesIO(packed[0])) as tar:
        assert tar.getnames() == ["Dockerfile", "site/a/x.py", "site/b/x.py"]


# --- builds ------------------------------------------------------------------------------


def test_a_build_tells_its_steps_and_leaves_only_its_result(engine: Engine, tmp_path: Path) -> None:
    recipe(tmp_path, HELLO)
    told: list[str] = []

    async def work(images: ImageClient) -> None:
        before, running = await images.ours(), await containers(images)
        await make(images, "base", told.append, tmp_path)
        try:
            built = await images.find("hutch/base")
            assert built and built.labels["hutch.image"] == "base"
            assert await images.ours(dangling=True) == []
            assert await containers(images) == running
            assert len(await images.ours()) == len(before) + 1
        finally:
            await images.remove("hutch/base")

    in_engine(engine, work)
    assert "base: step 4 of 5 (RUN)" in told


def test_an_image_is_built_once_and_again_when_its_recipe_has_changed(
    engine: Engine, tmp_path: Path
) -> None:
    recipe(tmp_path, HELLO)

    async def work(images: ImageClient) -> None:
        await make(images, "base", silent, tmp_path)
        first = await images.find("hutch/base")
        told: list[str] = []
        await make(images, "base", told.append, tmp_path)
        assert told == []
        (tmp_path / "base" / "more").write_text("anything")
        await make(images, "base", silent, tmp_path)
        second = await images.find("hutch/base")
        await images.remove("hutch/base")
        assert first and second and first.id != second.id
        # Of the one that was replaced, nothing is kept.
        assert await images.find(first.id) is None

    in_engine(engine, work)


def test_a_step_that_fails_is_named_with_its_last_words_and_nothing_is_left(
    engine: Engine, tmp_path: Path
) -> None:
    recipe(tmp_path, HELLO, "RUN echo there is no such thing >&2; exit 3", HELLO)

    async def work(images: ImageClient) -> None:
        before = await ids(images), await containers(images)
        with pytest.raises(InvalidRequest) as caught:
            await make(images, "base", silent, tmp_path)
        assert str(caught.value) == (
            "the image hutch/base was not built: step 5 of 7 (RUN) failed: there is no such thing"
        )
        assert (await ids(images), await containers(images)) == before

    in_engine(engine, work)


def test_a_build_that_is_given_up_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    recipe(tmp_path, HELLO, "RUN sleep 1000")

    async def work(images: ImageClient) -> None:
        before = await ids(images), await containers(images)
        asleep = asyncio.Event()
        told = lambda step: asleep.set() if "step 5" in step else None  # noqa: E731
        building = asyncio.ensure_future(make(images, "base", told, tmp_path))
        await asyncio.wait_for(asleep.wait(), 60)
        while await containers(images) == before[1]:  # the step has begun
            await asyncio.sleep(0.02)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building
        async with asyncio.timeout(60):  # the engine takes its time
            while (await ids(images), await containers(images)) != before:
                await asyncio.sleep(0.05)

    in_engine(engine, work)


def test_an_engine_that_dies_while_it_builds_is_not_available(tmp_path: Path) -> None:
    recipe(tmp_path, "RUN sleep 1000")
    with own_engine() as dying:

        async def build() -> None:
            loop = asyncio.get_running_loop()
            killed: list[asyncio.Future[None]] = []

            def told(step: str) -> None:
                if "step 4" in step:
                    killed.append(loop.run_in_executor(None, dying.kill))

            async with opened(dying.host) as images:
                with pytest.raises(BackendUnavailable, match=r"engine at unix://"):
                    await asyncio.wait_for(make(images, "base", told, tmp_path), 60)
            await asyncio.gather(*killed)

        asyncio.run(build())


def test_a_python_package_that_does_not_exist_is_named(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(tmp_path, "COPY . /context/")
    (tmp_path / "base" / "constraints.txt").write_text("no-such-package-at-all==1.0\n")
    monkeypatch.setenv("UV_NO_INDEX", "1")

    async def work(images: ImageClient) -> None:
        before = await ids(images)
        with pytest.raises(InvalidRequest, match="no-such-package-at-all"):
            await make(images, "base", silent, tmp_path)
        assert await ids(images) == before

    in_engine(engine, work)


def test_without_a_registry_and_mmdebstrap_one_is_told_to_install_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe(tmp_path, HELLO, base="localhost:1/no/such:1")
    monkeypatch.setenv("PATH", str(tmp_path))

    async def work(images: ImageClient) -> None:
        with pytest.raises(BackendUnavailable, match=r"cannot pull .* apt install mmdebstrap"):
            await make(images, "base", silent, tmp_path)

    in_engine(engine, work)


def test_where_no_debian_can_be_pulled_one_is_made(engine: Engine, tmp_path: Path) -> None:
    real = chain("base")[0].folder / "Dockerfile"
    text = re.sub(r"(?m)^ARG BASE=.*$", "ARG BASE=localhost:1/no/such:1", real.read_text())
    text = re.sub(r"(?m)^ARG PACKAGES=.*$", 'ARG PACKAGES="less"', text)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "Dockerfile").write_text(text)
    told: list[str] = []

    async def work(images: ImageClient) -> None:
        before = await ids(images)
        await make(images, "base", told.append, tmp_path)
        assert await images.ours(dangling=True) == []
        # Nothing is in it of this machine's settings, and no lists, logs or caches.
        script = "less --version >&2 && ls -A /etc/apt /var/log /var/cache/apt"
        argv = ["run", "--image", "hutch/base", "--", "sh", "-c", script]
        ran = await asyncio.to_thread(hutch, *argv, host=engine.host)
        assert ran.stdout.split() == [
            "/etc/apt:", "apt.conf.d", "preferences.d", "/var/cache/apt:", "/var/log:",
        ], ran  # fmt: skip
        await images.remove("hutch/base")
        assert await ids(images) == before  # the Debian it was built on went with it

    in_engine(engine, work)
    assert "making a Debian with mmdebstrap" in told


USE_ALL = """
set -eu
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
cd /workspace
git init -q -b main one
cd one
echo one > file
git add file
git commit -q -m first
echo two >> file
git diff | grep '^+two'
git commit -q -a -m second
cd ..
git -c protocol.file.allow=always clone -q file:///workspace/one two
cd two
git log --oneline | wc -l
git -c protocol.file.allow=always submodule --quiet add file:///workspace/one inner
git stash -q
git rebase -q HEAD~1
git show HEAD:file | jq -R -c .
{ echo -e 'HTTP/1.0 200 OK\\n\\nhello' | nc -l -p 8000 > /dev/null & } 2> /dev/null
curl -sS --retry 50 --retry-connrefused --retry-delay 1 http://127.0.0.1:8000/
git ls-remote https://127.0.0.1:1/x 2>&1 | grep -o 'Failed to connect'
echo $BASH_VERSION | grep -o '^5'
"""


def test_the_small_image_has_git_bash_curl_and_jq_in_less_than_37_megabytes(
    engine: Engine, tmp_path: Path
) -> None:
    shutil.copytree(chain("small")[-1].folder, tmp_path / "small")
    file = tmp_path / "small" / "Dockerfile"
    # The same packages, from a Debian that the tests have already.
    file.write_text(re.sub(r"(?m)^ARG BASE=.*$", f"ARG BASE={DEBIAN}", file.read_text()))

    async def work(images: ImageClient) -> None:
        await make(images, "small", silent, tmp_path)
        built = await images.find("hutch/small")
        assert built and built.size < 37_000_000, built
        argv = ["run", "--image", "hutch/small", "--", "bash", "-c", USE_ALL]
        ran = await asyncio.to_thread(hutch, *argv, host=engine.host)
        await images.remove("hutch/small")
        said = ["+two", "2", '"one"', '"two"', "hello", "Failed to connect", "5"]
        assert ran.stdout.splitlines() == said, ran

    in_engine(engine, work)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's mmdebstrap cleans up itself")
def test_a_debian_that_is_given_up_leaves_nothing(tmp_path: Path, engine: Engine) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    give_up = f"""
import asyncio, sys, tempfile
from hutch.recipes import debian

async def main():
    unpacking = asyncio.Event()
    told = lambda step: unpacking.set() if "extracting" in step else None
    with tempfile.TemporaryFile() as into:
        work = asyncio.ensure_future(debian.make(["less"], {ARCHITECTURE!r}, "", into, told))
        done = asyncio.ensure_future(unpacking.wait())
        await asyncio.wait([work, done], return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

asyncio.run(main())
"""
    env = {**os.environ, "TMPDIR": str(temporary)}
    subprocess.run([sys.executable, "-c", give_up], check=True, timeout=300, env=env)
    assert list(temporary.iterdir()) == []
    assert str(temporary) not in Path("/proc/self/mounts").read_text()


# --- taking out and putting in -----------------------------------------------------------


def test_an_image_can_be_taken_out_and_put_in_again(engine: Engine) -> None:
    async def work(images: ImageClient) -> None:
        saved = b"".join([chunk async for chunk in images.export(BUSYBOX)])
        with tarfile.open(fileobj=io.BytesIO(saved)) as tar:
            assert "manifest.json" in tar.getnames()

        async def again() -> AsyncIterator[bytes]:
            yield saved

        await images.load(again())
        assert await images.find(BUSYBOX)
        with pytest.raises(NotFound):
            async for _ in images.export("hutch-test/none"):
                pass

    in_engine(engine, work)


@pytest.mark.parametrize("name", ["--all", "a b", "../info", "x;$(id)", "x\n", "x?force=1"])
def test_what_is_no_name_of_an_image_does_not_reach_the_engine(engine: Engine, name: str) -> None:
    async def work(images: ImageClient) -> None:
        for call in (images.find(name), images.remove(name), images.pull(name, silent)):
            with pytest.raises(InvalidRequest, match="no image can be called"):
                await call

    in_engine(engine, work)


# --- for real ----------------------------------------------------------------------------


def hutch(*words: str, host: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hutch", *words],
        env={**os.environ, "DOCKER_HOST": host, "HUTCH_BACKEND": "docker"},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def python_image(engine: Engine) -> Iterator[str]:
    """hutch/python, as people build it where the engine has a Debian."""
    engine.tag(DEBIAN, "debian:12-slim")
    built = hutch("image", "build", "python", host=engine.host)
    assert built.returncode == 0, built.stderr
    assert "hutch: hutch/python: python: step" in built.stderr
    assert re.fullmatch(r"hutch: hutch/python is built, [\d.]+ MiB", built.stderr.splitlines()[-1])
    yield "hutch/python"
    removed = hutch("image", "rm", "hutch/python", host=engine.host)
    assert (removed.returncode, removed.stderr) == (0, "")


def test_a_box_without_an_image_is_of_hutch_python(engine: Engine, python_image: str) -> None:
    script = "python -m pip --version && git --version && rg --version && python -c 'import ssl'"
    ran = hutch("run", "--", "sh", "-c", script, host=engine.host)
    assert ran.returncode == 0, ran.stderr


def test_what_is_built_is_listed_with_its_size(engine: Engine, python_image: str) -> None:
    listed = json.loads(hutch("image", "ls", "--json", host=engine.host).stdout)
    assert [each["name"] for each in listed] == [f"hutch/{name}" for name in NAMES]
    sizes = {each["name"]: each["size"] for each in listed if each["built"]}
    assert 100e6 < sizes[python_image] < 300e6
    shown = hutch("image", "ls", host=engine.host).stdout
    assert "NAME" in shown and "hutch/data    not built" in shown.replace("  -", "")


def test_what_is_there_already_is_not_built_and_says_how_to_get_newer_versions(
    engine: Engine, python_image: str
) -> None:
    again = hutch("image", "build", "python", host=engine.host)
    assert again.returncode == 0 and again.stderr.count("\n") == 1
    assert "first run `hutch image rm --backend docker python`" in again.stderr


def test_an_image_with_a_name_of_ours_that_hutch_did_not_build_is_listed_as_such(
    engine: Engine, python_image: str
) -> None:
    engine.tag(BUSYBOX, "hutch/node")
    try:
        shown = hutch("image", "ls", host=engine.host).stdout
        row = next(line for line in shown.splitlines() if line.startswith("hutch/node"))
        assert "MiB" in row and row.endswith("(not by hutch)")
        assert shown.count("not by hutch") == 1
        listed = {each.name: each for each in EngineImages(engine.host).list()}
        assert listed["hutch/node"].built
    finally:
        engine.call("DELETE", "/images/hutch/node")


def test_an_image_that_a_container_uses_is_not_removed(engine: Engine) -> None:
    async def work(images: ImageClient) -> None:
        used = await images.engine.create({"Image": "hutch/node", "Cmd": ["x"]}, "hutch-test-user")
        try:
            refused = await asyncio.to_thread(hutch, "image", "rm", "node", host=engine.host)
            assert refused.returncode == 125
            said = "a box or container uses hutch/node: close that first"
            assert refused.stderr.strip() == f"hutch: {said}"
        finally:
            await images.engine.remove(used)

    # With no other name: of one that has two, the engine just takes one away.
    empty = io.BytesIO()
    tarfile.open(fileobj=empty, mode="w").close()
    empty.seek(0)
    engine.import_image("hutch/node", empty)
    try:
        in_engine(engine, work)
    finally:
        engine.call("DELETE", "/images/hutch/node")


def test_a_server_lists_builds_and_removes_them(engine: Engine, python_image: str) -> None:
    store = EngineImages(engine.host)

    async def use() -> None:
        assert await store.find("anything", (), ()) is None
        with pytest.raises(InvalidRequest, match="namespaces"):
            await store.find("", ("numpy",), ())
        with pytest.raises(InvalidRequest, match="docker pull 'alpine'"):
            store.pull(PullImage("alpine"))
        steps = [step async for step in store.build(BuildImage("python"))]
        assert [step.done for step in steps] == [True]  # it is there already
        listed = {each.name: each for each in await asyncio.to_thread(store.list)}
        assert listed[python_image].built and not listed["hutch/data"].built
        with pytest.raises(NotFound):
            await store.remove("data")
        with pytest.raises(InvalidRequest):
            await store.remove("hutch-test/busybox")
        store.close()

    asyncio.run(use())


def test_a_workdir_that_cannot_be_made_says_where_it_can(engine: Engine) -> None:
    words = ("run", "--image", BUSYBOX, "--workdir", "/srv/x", "--", "true")
    refused = hutch(*words, host=engine.host)
    assert refused.returncode == 125
    assert "Use one in /workspace, /tmp or /home/user" in refused.stderr


def test_wrong_words_are_refused_in_one_line(engine: Engine) -> None:
    for words, said in [
        (("build",), "no image given"),
        (("build", "mine"), "not an image that Hutch builds"),
        (("rm", "--json", "base"), "no option --json"),
        (("ls", "base"), "takes no name"),
    ]:
        refused = hutch("image", *words, host=engine.host)
        assert (refused.returncode, refused.stderr.count("\n")) == (125, 1)
        assert said in refused.stderr


def test_without_an_engine_it_says_how_to_start_one(tmp_path: Path) -> None:
    refused = hutch("image", "ls", host=f"unix://{tmp_path}/none")
    assert (refused.returncode, refused.stderr.count("\n")) == (125, 1)
    assert "DOCKER_HOST" in refused.stderr


def test_debian_packages_come_from_where_this_machine_has_its_own() -> None:
    mirrors, settings = debian.apt_settings()
    assert all(each.startswith("deb ") and each.endswith(" main") for each in mirrors)
    assert all(line.startswith("Acquire::") for line in settings.split("\n") if line)
