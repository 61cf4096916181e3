"""Containers beside the plain Docker client, and boxes of an image that was imported.

Both are of the busybox image of docker_peer, in the same engine; kernels need `hutch/python`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from hutch import Sandbox

from . import docker_engine, docker_peer
from .measure import Contender, Promise, absent, milliseconds
from .peers import DOCKER_RUN, Container, Peers, run

ADDED = 60  # ms that we may take longer than `docker run`, which starts nothing to talk to
PYTHON = "hutch/python"
MB = 1_000_000


@contextlib.contextmanager
def first_command(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """What ours takes longer than `docker run --rm IMAGE true`, turn by turn."""
    n: int = size.slow
    if peers.docker:
        yield [absent("hutch, docker", peers.docker, Promise(ADDED))]
        return
    theirs: list[float] = []

    def plain() -> float:
        theirs.append(milliseconds(partial(run, (*DOCKER_RUN, "true"))))
        return theirs[-1]

    def ours() -> float:
        took = _create()
        return took - plain()

    with _box():  # the first one finds the engine and lays the bundle out
        yield [
            Contender("hutch, docker: what it adds to docker run --rm", ours, n,
                      promise=Promise(ADDED)),
            Contender("hutch, docker", _create, n),
            Contender("docker run --rm", plain, n),
        ]  # fmt: skip


def _create() -> float:
    """Milliseconds to the end of the first command; the closing is not counted, as `--rm` is."""
    began = time.perf_counter()
    box = _box()
    box.commands.run(["true"], check=True)
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


def _box(image: str = docker_peer.IMAGE) -> Sandbox:
    return Sandbox.create(backend="docker", image=image)


@contextlib.contextmanager
def warm_shell(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    turns: int = size.turns
    slow: int = size.slow
    if peers.docker:
        yield [absent("hutch, docker", peers.docker, Promise(20, at_most=False))]
        return
    with _box() as box, contextlib.closing(Container()) as theirs:
        box.shell.run("true")
        argv = ("docker", "exec", theirs.id, "true")
        yield [
            Contender("hutch, docker", partial(milliseconds, lambda: box.shell.run("true")), turns),
            Contender("docker exec", partial(milliseconds, partial(run, argv)), slow,
                      promise=Promise(20, at_most=False)),
        ]  # fmt: skip


@contextlib.contextmanager
def warm_cell(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    turns: int = size.turns
    if why := peers.docker or _build_python():
        yield [absent("hutch, docker", why, Promise(3))]
        return
    with _box(PYTHON) as box:
        box.run_code("1+1")
        yield [
            Contender("hutch, docker", partial(milliseconds, lambda: box.run_code("1+1")), turns,
                      promise=Promise(3)),
        ]  # fmt: skip


def _build_python() -> str:
    """Make sure that the engine has the image: nothing, or why not."""
    argv = [sys.executable, "-m", "hutch", "image", "build", "--backend", "docker", "python"]
    if not subprocess.run(["docker", "inspect", PYTHON], capture_output=True).returncode:
        return ""
    made = subprocess.run(argv, capture_output=True, text=True)
    return made.stderr.strip()[-300:] if made.returncode else ""


@contextlib.contextmanager
def imported(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """An embedded box of an image that is nothing but busybox, as small as alpine's is."""
    turns: int = size.turns
    promise = Promise(25)
    busybox = shutil.which("busybox")
    if not busybox or not docker_engine.is_static(busybox):
        why = "a static busybox is needed for the image (Debian: busybox-static)"
        yield [absent("hutch, an imported image", why, promise)]
        return
    had = os.environ.get("HUTCH_DATA_DIR")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        os.environ["HUTCH_DATA_DIR"] = folder
        tar = Path(folder, "root.tar")
        tar.write_bytes(docker_engine.busybox_root(busybox, docker_peer.APPLETS))
        argv = [sys.executable, "-m", "hutch", "image", "import", str(tar), "small"]
        subprocess.run(argv, check=True, capture_output=True)
        try:
            with Sandbox.create(image="small"):
                yield [
                    Contender("hutch, an imported image", partial(_start, "small"), turns,
                              promise=promise),
                    Contender("hutch, image host", partial(_start, "host"), turns),
                ]  # fmt: skip
        finally:
            os.environ.pop("HUTCH_DATA_DIR")
            if had is not None:
                os.environ["HUTCH_DATA_DIR"] = had


def _start(image: str) -> float:
    began = time.perf_counter()
    box = Sandbox.create(image=image)
    box.commands.run(["true"], check=True)
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


@contextlib.contextmanager
def file_in(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    yield from _files(size, peers, "in")


@contextlib.contextmanager
def file_out(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    yield from _files(size, peers, "out")


def _files(size: Any, peers: Peers, way: str) -> Iterator[list[Contender]]:
    """From a file of the host's to one of the box, or back, as a stream: never whole in memory."""
    count: int = size.file
    n: int = size.bulk
    promise = Promise(100, at_most=False)
    if peers.docker:
        yield [absent("hutch, docker", peers.docker, promise)]
        return
    with _box() as box, contextlib.closing(Container()) as theirs, \
            tempfile.TemporaryDirectory(prefix="benchmark-") as folder:  # fmt: skip
        ours, copy = Path(folder, "ours"), Path(folder, "copy")
        ours.write_bytes(os.urandom(count))
        inside = f"{theirs.id}:/tmp/file"
        box.files.upload(ours, "file")
        run(("docker", "cp", str(ours), inside))
        work: dict[str, Callable[[], object]] = {
            "in": lambda: box.files.upload(ours, "file"),
            "out": lambda: box.files.download("file", copy),
        }
        argv = ("docker", "cp", *((str(ours), inside) if way == "in" else (inside, str(copy))))

        def speed(work: Callable[[], object]) -> float:
            return count / MB / (milliseconds(work) / 1000)

        yield [
            Contender("hutch, docker", partial(speed, work[way]), n, promise=promise),
            Contender("docker cp", partial(speed, partial(run, argv)), n),
        ]
        if copy.exists():
            assert copy.read_bytes() == ours.read_bytes()
