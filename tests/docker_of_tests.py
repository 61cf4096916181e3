"""A Docker engine for tests, with two images that need no registry.

`docker_engine` is one engine for all tests of a run; a test that stops, kills or restarts an
engine takes one of its own: `own_engine`. HUTCH_TEST_DOCKER_HOST names an engine to use instead;
HUTCH_TEST_RUNTIME, what runs a container that names no runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.docker_engine import (
    Client,
    Engine,
    EngineFailed,
    busybox_root,
    engine,
    is_static,
    why_not,
)
from must_work import need

from hutch import BackendUnavailable, factory, local
from hutch.backends.docker.bundled import LABEL
from hutch.backends.docker.owner_scope import OWNER_SCOPE
from hutch.recipes import chain
from hutch.recipes import debian as debian_of_recipes

RUNTIME = os.environ.get("HUTCH_TEST_RUNTIME", "runc")
GRADE = "gvisor" if RUNTIME == "runsc" else "ns"
DEBIAN, BUSYBOX = "hutch-test/debian", "hutch-test/busybox"
MORE = ["vim", "busybox-static"]  # what tests need beside what is in hutch/python
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, "")
ENV = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Client]:
    """An engine with both images; DOCKER_HOST leads to it."""
    had = os.environ.get("DOCKER_HOST")
    with contextlib.ExitStack() as stack:
        made = _engine_of_the_run(stack)
        with _or_need():
            give_images(made)
        os.environ["DOCKER_HOST"] = made.host
        yield made
        if local._embedded:
            local._embedded.close()  # before its engine ends, for its boxes are in there
        left = _left_in(made) if isinstance(made, Engine) else set()
        os.environ.pop("DOCKER_HOST")
        if had:
            os.environ["DOCKER_HOST"] = had
    assert not left, left


def _left_in(own: Client) -> set[str]:
    """What tests left in an engine that had nothing before them. The bundle is there to stay."""
    deadline = time.monotonic() + 60  # a guest whose host was killed takes five seconds
    while True:
        containers = json.loads(own.call("GET", "/containers/json?all=1"))
        volumes = json.loads(own.call("GET", "/volumes"))["Volumes"] or []
        left = {f"container {each['Names']}" for each in containers}
        left |= {f"volume {v['Name']}" for v in volumes if LABEL not in (v["Labels"] or {})}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _engine_of_the_run(stack: contextlib.ExitStack) -> Client:
    if named := os.environ.get("HUTCH_TEST_DOCKER_HOST"):
        return Client(named)
    if why := why_not():
        need("docker", why)
    if RUNTIME == "runsc" and not shutil.which("runsc"):
        need("runsc", "gVisor is not installed (Debian: runsc)")
    with _or_need():
        return stack.enter_context(engine(runtime=RUNTIME))


@contextlib.contextmanager
def own_engine(*, live_restore: bool = False, debian: bool = False) -> Iterator[Engine]:
    """An engine that a test may stop, kill and start again. DOCKER_HOST does not lead to it."""
    if why := why_not():
        need("docker", why)
    with contextlib.ExitStack() as stack:
        with _or_need():
            made = stack.enter_context(engine(live_restore=live_restore))
            give_images(made, debian=debian)
        yield made


def for_a_box(path: Path) -> Path:
    """Give a folder that a box may write to to a user: a container does not run as root."""
    if factory.default() == "docker" and not os.geteuid():
        for each in (path, *path.rglob("*")):
            os.chown(each, 1000, 1000)
    return path


def containers_of(host: str, owner: int) -> list[int]:
    """The first processes of the boxes that a process has there, the oldest box first."""
    engine, found = Client(host), []
    for listed in json.loads(engine.call("GET", "/containers/json")):
        if f"/{owner}/" in listed["Labels"].get(OWNER_SCOPE, ""):
            with contextlib.suppress(EngineFailed):  # it has just gone
                said = json.loads(engine.call("GET", f"/containers/{listed['Id']}/json"))
                found.append((said["Created"], said["State"]["Pid"]))
    return [pid for _, pid in sorted(found)]


def give_images(to: Client, *, debian: bool = True) -> None:
    if not to.has_image(BUSYBOX):
        to.import_image(BUSYBOX, io.BytesIO(busybox_of_image()), [ENV])
    if debian and not to.has_image(DEBIAN):
        with open(debian_root(), "rb") as tar:
            to.import_image(DEBIAN, tar, [ENV, "ENV LANG=C.UTF-8"])


@contextlib.contextmanager
def _or_need() -> Iterator[None]:
    try:
        yield
    except (EngineFailed, BackendUnavailable) as exc:
        need("docker", str(exc))


def busybox_of_image() -> bytes:
    busybox = shutil.which("busybox")
    if not busybox or not is_static(busybox):
        raise EngineFailed("a static busybox is needed for the image (Debian: busybox-static)")
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    return busybox_root(busybox, [name for name in listed.stdout.split() if name != "busybox"])


def debian_root() -> Path:
    """What hutch/python is built on, and a little more, as a tar: made once, and kept."""
    recipes = chain("python")
    packages = [*(package for recipe in recipes for package in recipe.packages), *MORE]
    name = hashlib.sha256(" ".join([debian_of_recipes.SUITE, *packages]).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("HUTCH_TEST_CACHE", Path.home() / ".cache" / "hutch-tests"))
    cache.mkdir(parents=True, exist_ok=True)
    kept = cache / f"debian-{name}.tar"
    with open(cache / f"debian-{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        if not kept.exists():
            part = kept.with_suffix(".part")
            with open(part, "w+b") as into:
                asyncio.run(
                    debian_of_recipes.make(packages, ARCHITECTURE, "", into, lambda step: None)
                )
            part.rename(kept)
    return kept
