"""Whether a cluster enforces NetworkPolicy: the object of one has no status, so only trying tells.

There are three Pods: a box that may connect, a box that may not, and a target that no policy of
ours is about. A connection that fails proves something only where one like it succeeds, so that is
tried first.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

from hutch.backends.contained import BUNDLE
from hutch.errors import BackendUnavailable, HutchError
from hutch.types import Layer, Status

from .box import remove, running
from .cluster import KubernetesCluster, Pod, PodWatch
from .pod import (
    BOX_CONTAINER,
    TARGET,
    TARGET_CONTAINER,
    BundleImage,
    python_of_image,
    target_body,
)

PORT = 8377
UP = 10.0  # seconds for what listens
TRIES = (0.0, 3.0, 10.0)  # seconds since the first try: policies may come late
PATIENCE = 30  # seconds for a program in a Pod, on a busy node
PLUGIN = "a network plugin that enforces it, such as Calico or Cilium"

LISTEN = f"""
import os, signal, socket
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
both = socket.has_dualstack_ipv6()
family = socket.AF_INET6 if both else socket.AF_INET
with socket.create_server(("", {PORT}), family=family, dualstack_ipv6=both) as listener:
    while True:
        listener.accept()[0].close()
"""
CONNECT = f"""
import socket, sys
try:
    socket.create_connection((sys.argv[1], {PORT}), 3).close()
    print("open")
except OSError:
    print("closed")
"""
ANSWERS = {b"open\n": True, b"closed\n": False}

Connects = Callable[[], Awaitable[bool]]


class PodPrograms:
    """Runs the bundle's Python in Pods."""

    def __init__(self, cluster: KubernetesCluster, bundle: BundleImage) -> None:
        self._cluster, self._bundle = cluster, bundle

    async def box_connects(self, box: Pod, address: str) -> bool:
        return await self._connects(box, BOX_CONTAINER, self._in_box(CONNECT, address))

    async def target_connects(self, target: Pod, address: str) -> bool:
        argv = [*python_of_image(self._bundle), "-c", CONNECT, address]
        return await self._connects(target, TARGET_CONTAINER, argv)

    async def _connects(self, pod: Pod, container: str, argv: list[str]) -> bool:
        async with asyncio.timeout(PATIENCE):
            printed = await self._cluster.output(pod.name, container, argv)
        if printed not in ANSWERS:
            raise BackendUnavailable(f"a program in Pod {pod.name} printed {printed[:200]!r}")
        return ANSWERS[printed]

    def _in_box(self, code: str, *args: str) -> list[str]:
        # The last two are `-m` and the module.
        return [*self._bundle.command("", at=BUNDLE)[:-2], "-c", code, *args]

    @contextlib.asynccontextmanager
    async def listening(self, box: Pod) -> AsyncGenerator[None, None]:
        """While this is open, a program in a box listens."""
        streams = await self._cluster.exec(box.name, BOX_CONTAINER, self._in_box(LISTEN))
        try:
            yield
        finally:
            streams.close()

    @contextlib.asynccontextmanager
    async def target(self, owner: Pod) -> AsyncGenerator[Pod, None]:
        """A Pod that listens, and that no policy of ours is about. It ends with `owner`."""
        name = f"hutch-target-{secrets.token_hex(8)}"
        body = target_body(name, (owner.name, owner.metadata.uid), self._bundle, LISTEN)
        watch = PodWatch(self._cluster, f"{TARGET}={name}")
        try:
            created = await self._cluster.create_pod(body)
            try:
                yield await running(self._cluster, watch, created)
            finally:
                await remove(self._cluster, watch, created)
        finally:
            await watch.close()


async def layers(
    cluster: KubernetesCluster, bundle: BundleImage, closed: Pod, opened: Pod
) -> list[Layer]:
    """What holds of the network of `closed`, a box without one, and of `opened`, which has one."""
    programs = PodPrograms(cluster, bundle)
    try:
        async with programs.target(closed) as target:
            found = [await _outwards(programs, closed, opened, target)]
            async with programs.listening(opened):
                found.append(await _inwards(programs, opened, target))
            return found
    except (HutchError, TimeoutError) as exc:
        return [_unknown("network", f"not checked: {exc or 'a Pod does not answer'}")]


async def _outwards(programs: PodPrograms, closed: Pod, opened: Pod, target: Pod) -> Layer:
    address = target.status.pod_ip

    def may() -> Awaitable[bool]:
        return programs.box_connects(opened, address)

    def may_not() -> Awaitable[bool]:
        return programs.box_connects(closed, address)

    if not await _comes_true(may):
        return _unknown(
            "network", "not checked: a box that may connect does not reach another Pod either"
        )
    seconds = await _seconds_until_false(may_not)
    if seconds is None:
        why = "a box reaches another Pod: the cluster does not enforce NetworkPolicy"
        return Layer("network", Status.MISSING, why, PLUGIN)
    if not await _comes_true(may):
        return _unknown("network", "not checked: the network of Pods comes and goes")
    if seconds:
        return _unknown(
            "network",
            f"NetworkPolicy is enforced, but late: {seconds:.0f} seconds after this began, a box "
            "that may not connect still could",
        )
    return Layer("network", Status.ACTIVE, "none: NetworkPolicy is enforced")


async def _inwards(programs: PodPrograms, opened: Pod, target: Pod) -> Layer:
    name, address = "network inwards", opened.status.pod_ip
    if not await _comes_true(lambda: programs.box_connects(opened, address)):
        return _unknown(name, "not checked: a box does not reach its own address")
    if await _seconds_until_false(lambda: programs.target_connects(target, address)) is None:
        why = "another Pod reaches what listens in a box: NetworkPolicy is not enforced"
        return Layer(name, Status.MISSING, why, PLUGIN)
    return Layer(name, Status.ACTIVE, "nothing connects to a box: NetworkPolicy is enforced")


async def _comes_true(connects: Connects) -> bool:
    deadline = time.monotonic() + UP
    while not await connects():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.2)
    return True


async def _seconds_until_false(connects: Connects) -> float | None:
    """When it was last seen to be true: 0 if never. None if it stays true."""
    began, seen = time.monotonic(), 0.0
    for at in TRIES:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        if not await connects():
            return seen
        seen = time.monotonic() - began
    return None


def _unknown(name: str, why: str) -> Layer:
    return Layer(name, Status.DEGRADED, why, required=False)
