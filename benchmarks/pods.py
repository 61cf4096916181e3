"""Pods beside kubectl, in one namespace of the same cluster.

Both are of an image that is busybox and nothing else. kubectl is a process for each call, as people
and their scripts use it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

from hutch import Sandbox
from hutch.backends.kubernetes.cluster import KubernetesCluster

from .cluster_peer import IMAGE, Namespace
from .measure import Contender, Promise, absent, milliseconds
from .peers import Peers
from .server import KEY, Daemon, daemon

POOL = 2
PATIENCE = 60  # seconds


def _box() -> Sandbox:
    return Sandbox.create(backend="kubernetes", image=IMAGE)


@contextlib.contextmanager
def first_command(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """What ours takes longer than `kubectl run` and `kubectl wait`, turn by turn."""
    n: int = size.slow
    if peers.kubernetes:
        yield [absent("hutch, kubernetes", peers.kubernetes)]
        return
    place = Namespace()
    with _box():  # the first one finds the cluster, and lays out the bundle

        def added() -> float:
            return _create() - _plain(place)

        yield [
            Contender("hutch, kubernetes: what it adds to kubectl run until Ready", added, n),
            Contender("hutch, kubernetes", _create, n),
            Contender("kubectl run, kubectl wait --for=condition=Ready", partial(_plain, place), n),
        ]  # fmt: skip


def _create() -> float:
    """Milliseconds to the end of the first command; the closing is not counted."""
    began = time.perf_counter()
    box = _box()
    box.commands.run(["true"], check=True)
    took = (time.perf_counter() - began) * 1000
    box.close()
    return took


def _plain(place: Namespace) -> float:
    began = time.perf_counter()
    name = place.run_pod()
    took = (time.perf_counter() - began) * 1000
    place.delete_pod(name)
    return took


@contextlib.contextmanager
def warm_shell(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    turns: int = size.turns
    slow: int = size.slow
    promise = Promise(15)
    if peers.kubernetes:
        yield [absent("hutch, kubernetes", peers.kubernetes, promise)]
        return
    place = Namespace()
    with _box() as box, place.pod() as name:
        box.shell.run("true")
        execute = partial(place.kubectl, "exec", name, "--", "sh", "-c", "true")
        yield [
            Contender("hutch, kubernetes", partial(milliseconds, lambda: box.shell.run("true")),
                      turns, promise=promise),
            Contender("kubectl exec", partial(milliseconds, execute), slow,
                      promise=Promise(10, at_most=False)),
        ]  # fmt: skip


@contextlib.contextmanager
def end(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """Until no process of the box is there; not only its Pod's object is gone."""
    n: int = size.slow
    promise = Promise(1500)
    if why := peers.kubernetes or ("only root sees its processes" if os.geteuid() else ""):
        yield [absent("hutch, kubernetes", why, promise)]
        return
    place = Namespace()

    def ours() -> float:
        box = _box()
        box.shell.run("true", check=True)
        return _until_gone(place, box.close)

    def closed() -> float:
        box = _box()
        box.shell.run("true", check=True)
        return milliseconds(box.close)

    def theirs() -> float:
        return _until_gone(place, partial(place.delete_pod, place.run_pod()))

    yield [
        Contender("hutch, kubernetes: until its processes are gone", ours, n, promise=promise),
        Contender("hutch, kubernetes: until `close` returns", closed, n),
        Contender("kubectl delete --grace-period=1: until its processes are gone", theirs, n),
    ]


def _until_gone(place: Namespace, act: Callable[[], object]) -> float:
    pids = place.pids()
    assert pids, "there is no Pod"
    ending = threading.Thread(target=act)
    began = time.perf_counter()
    ending.start()
    while left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]:
        assert time.perf_counter() - began < PATIENCE, f"{left} are still there"
        time.sleep(0.002)
    took = (time.perf_counter() - began) * 1000
    ending.join()
    return took


@contextlib.contextmanager
def from_pool(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    """A Pod that a server keeps ready."""
    n: int = size.slow
    promise = Promise(80)
    if peers.kubernetes:
        yield [absent("hutch, a Pod of the pool", peers.kubernetes, promise)]
        return
    variables = {**Namespace().variables, "HUTCH_BACKEND": "kubernetes"}
    with daemon(variables=variables, image=IMAGE) as server:
        yield [
            Contender("hutch, a Pod of the pool, a shell command first",
                      partial(_pooled, server), n, promise=promise),
        ]  # fmt: skip


def _pooled(server: Daemon) -> float:
    server.fill_pool(POOL)
    began = time.perf_counter()
    box = Sandbox.create(url=server.url, api_key=KEY, image=IMAGE)
    box.shell.run("true", check=True)
    took = (time.perf_counter() - began) * 1000
    assert box.info.acquire_source == "pool", box.info.acquire_source
    box.close()
    return took


@contextlib.contextmanager
def requests(size: Any, peers: Peers) -> Iterator[list[Contender]]:
    n: int = size.bulk
    promise = Promise(4)
    if peers.kubernetes:
        yield [absent("hutch, kubernetes", peers.kubernetes, promise)]
        return
    with _box():  # the first one also lists, watches and looks for policies
        yield [
            Contender("hutch, kubernetes: create and first command", partial(_counted, False), n,
                      promise=promise),
            Contender("hutch, kubernetes: create, first command and close",
                      partial(_counted, True), n),
        ]  # fmt: skip


def _counted(to_its_end: bool) -> float:
    """Requests to the API server; each WebSocket is one."""
    count = 0

    def counting(work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            return work(*args)

        return counted

    calls = {name: counting(getattr(KubernetesCluster, name)) for name in ("_request", "exec")}
    with patch.multiple(KubernetesCluster, **calls):
        box = _box()
        box.commands.run(["true"], check=True)
        if not to_its_end:
            found = count
        box.close()
    return count if to_its_end else found
