"""Fixtures that every test may use, and the watch over what tests leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import gettempdir

import pytest
from must_work import need

import guard_of_tests
from cluster_of_tests import cluster as cluster
from docker_of_tests import DEBIAN, RUNTIME
from docker_of_tests import docker_engine as docker_engine
from guard_of_tests import MARK
from gvisor_of_tests import why_not_on_gvisor
from hutch import BackendUnavailable, Sandbox, factory, local
from kubernetes_of_tests import as_default
from kubernetes_of_tests import with_runtime as with_runtime
from pods_of_tests import why_not_in_a_pod

# The default image of containers, and what tests call images of the namespaces backend.
IMAGES = ("hutch/python", "host", "python", "data")


def pytest_configure(config: pytest.Config) -> None:
    # A shell lets what it starts with & ignore these, and so would what the tests start and stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.setdefault("HUTCH_GAIN", "off")  # what tests save is not what their user saved
    os.environ[MARK] = uuid.uuid4().hex
    config.addinivalue_line("markers", "namespaces(why): of that backend, and of no other")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With HUTCH_BACKEND, all but what is about another backend runs on containers, or Pods."""
    if factory.default() == "namespaces":
        return
    for item in items:
        why = next((mark.args[0] for mark in item.iter_markers("namespaces")), "")
        if factory.default() == "kubernetes":
            why = why or why_not_in_a_pod(item.nodeid)
        elif RUNTIME == "runsc":
            why = why or why_not_on_gvisor(item.nodeid)
        if why:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def _where_boxes_are(request: pytest.FixtureRequest) -> Iterator[None]:
    """With HUTCH_BACKEND, boxes that are not asked for otherwise are containers, or Pods."""
    with contextlib.ExitStack() as stack:
        if factory.default() == "docker":
            engine = request.getfixturevalue("docker_engine")
            for name in IMAGES:
                engine.tag(DEBIAN, name)
        elif factory.default() == "kubernetes":
            cluster = request.getfixturevalue("with_runtime")
            stack.enter_context(as_default(cluster, IMAGES))
        yield


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A fresh box."""
    try:
        made = Sandbox.create()
    except BackendUnavailable as exc:
        need(factory.default(), str(exc))
    with made:
        yield made


@pytest.fixture(scope="module")
def shared_box() -> Iterator[Sandbox]:
    """One box for all tests of a module that leave it as they found it."""
    try:
        made = Sandbox.create()
    except BackendUnavailable as exc:
        need(factory.default(), str(exc))
    with made:
        yield made


def left_over() -> set[str]:
    """What Hutch left on this machine: our folders; groups and mounts whose owner is dead."""
    found = {str(path) for path in Path(gettempdir()).glob(f"hutch-{os.getpid()}-*")}
    found |= {f"mount {m}" for m in Path("/proc/mounts").read_text().splitlines() if "hutch" in m}
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        for name in names:
            owner = name.removeprefix("hutch-").partition("-")[0]
            if name.startswith("hutch-") and owner.isdigit() and not Path("/proc", owner).exists():
                found.add(f"cgroup {folder}/{name}")
    return found


@pytest.fixture(scope="session", autouse=True)
def _guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process that outlives us, and ends what we started if we cannot."""
    folders = [f"{tmp_path_factory.getbasetemp()}/", f"{gettempdir()}/lasting-{os.getpid()}-"]
    argv = [sys.executable, "-I", guard_of_tests.__file__, os.environ[MARK], *folders]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, start_new_session=True):
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_behind(_guard: None) -> Iterator[None]:
    before = left_over()
    yield
    if local._embedded:
        local._embedded.close()
    deadline = time.monotonic() + 60
    while (left := left_over() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, left
