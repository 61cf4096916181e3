"""A Docker engine to compare with, and a busybox image that needs no registry.

`python -m benchmarks.docker_peer` makes the image in the engine that runs here, and says so.
`benchmarks/run --start-engine` starts an engine of its own for the length of the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

from . import docker_engine

IMAGE = "hutch-benchmark/busybox"
APPLETS = ("sh", "true", "sleep", "head", "cat")


def prepare() -> str:
    """Make sure that the engine has the image. "", or why Docker cannot be measured."""
    if not shutil.which("docker"):
        return "docker is not installed"
    try:
        tried = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "the Docker engine does not answer"
    if tried.returncode:
        return "no Docker engine runs here"
    busybox = shutil.which("busybox")
    if not busybox or not docker_engine.is_static(busybox):
        return "a static busybox is needed for the image (Debian: busybox-static)"
    root = docker_engine.busybox_root(busybox, APPLETS)
    made = subprocess.run(["docker", "import", "-", IMAGE], input=root, capture_output=True)
    if made.returncode:
        return f"docker import failed: {made.stderr.decode(errors='replace').strip()}"
    tried = subprocess.run(["docker", "run", "--rm", IMAGE, "true"], capture_output=True, text=True)
    return f"docker run failed: {tried.stderr.strip()}" if tried.returncode else ""


@contextlib.contextmanager
def engine() -> Iterator[str]:
    """Run an engine during the `with`. Gives "", or why it cannot run.

    DOCKER_HOST leads to it.
    """
    if why := docker_engine.why_not():
        yield why
        return
    with contextlib.ExitStack() as stack:
        why = ""
        try:
            made = stack.enter_context(_engine())
            os.environ["DOCKER_HOST"] = made.host
            stack.callback(os.environ.pop, "DOCKER_HOST")
        except docker_engine.EngineFailed as exc:
            why = str(exc)
        yield why


@contextlib.contextmanager
def _engine() -> Iterator[docker_engine.Engine]:
    # With the bridge, which every ordinary engine has and which `docker run` spends time on,
    # if the kernel has one.
    made = docker_engine.Engine(bridge=True)
    try:
        try:
            made.start()
        except docker_engine.EngineFailed:
            made.configure(live_restore=False, bridge=False)
            made.start()
        yield made
    finally:
        made.close()


if __name__ == "__main__":
    print(prepare() or f"the image {IMAGE} is there")
