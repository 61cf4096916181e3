"""A box that is a Pod: how it is started, reached, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from hutch.backends.base import ByteStream
from hutch.backends.contained import BUNDLE, ContainedBox, GuestConnector, Relays, now
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    Conflict,
    HutchError,
    NoCapacity,
    NotFound,
    StartFailed,
)
from hutch.types import GRADES, Grade, Stats

from .cluster import (
    PATIENCE,
    KubernetesCluster,
    NoAnswer,
    Pod,
    PodWatch,
    StateDetail,
)
from .exec import PodStreams
from .pod import (
    BOX,
    BOX_CONTAINER,
    DEGRADED,
    DOOR_CONTAINER,
    ISOLATION,
    BundleImage,
    digest_of,
    name_of,
)

START_TIMEOUT = 300.0  # seconds; the node may have to pull the image
NO_ROOM = 120.0  # seconds for a node with room; some clusters start machines
# Seconds between two attempts to reach a cluster that is away, growing: each box makes them.
PAUSE, LONGEST_PAUSE = 0.25, 2.0
# A connection ends with the API server that carries it, and the next one takes seconds. So a guest
# is told, again and again, that it may do without for so long.
ALONE = 120.0
TELL = 40.0
T = TypeVar("T")

NO_IMAGE = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
STUCK = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


@dataclass(frozen=True)
class PodRecord:
    """What we know about a box from its Pod, whether we started it or adopted it."""

    pod: Pod
    isolation: Grade
    runtime: str
    digest: str | None
    degraded: tuple[str, ...]

    @classmethod
    def of(cls, pod: Pod) -> PodRecord:
        """Raises BoxLost if the Pod is not one of ours, or was changed."""
        isolation = pod.annotation(ISOLATION)
        try:
            degraded = json.loads(pod.annotation(DEGRADED))
        except ValueError:
            degraded = None
        if isolation not in GRADES or not isinstance(degraded, list):
            raise BoxLost(f"Pod {pod.name} is not one of ours")
        own = next((c for c in pod.containers if c.name == BOX_CONTAINER), None)
        return cls(
            pod,
            isolation,
            pod.spec.runtime_class_name,
            digest_of(own.image_id) if own else None,
            tuple(map(str, degraded)),
        )


class PodRelays:
    """What starts the relays of one Pod. A RelayEngine."""

    def __init__(
        self, cluster: KubernetesCluster, watch: PodWatch, pod: Pod, box: str, argv: list[str]
    ) -> None:
        self._cluster, self._watch, self._pod = cluster, watch, pod
        self._box, self._argv = box, argv

    async def start_relay(self) -> PodStreams:
        """Raises BoxLost, or NoAnswer if the box runs and cannot be reached."""
        try:
            return await patiently(
                lambda: self._cluster.exec(self._pod.name, DOOR_CONTAINER, self._argv)
            )
        except (NotFound, Conflict, StartFailed) as exc:
            if isinstance(exc, Conflict) and await self.is_running():
                raise NoAnswer(f"box {self._box} cannot be reached: {exc}") from None
            raise BoxLost(f"box {self._box} is gone: {exc}") from None

    async def is_running(self) -> bool:
        try:
            pod = await patiently(lambda: self._cluster.pod(self._pod.name))
        except NotFound:
            return False
        return pod.metadata.uid == self._pod.metadata.uid and pod.is_running

    async def wait(self) -> None:
        try:
            await self._watch.until(self._pod, lambda pod: not pod.is_running)
        except HutchError:
            # It cannot be known, which must not end a connection: that ends with its Pod.
            await asyncio.get_running_loop().create_future()


async def patiently(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` returns, once the cluster answers. Raises NoAnswer if it does not in time."""
    deadline, pause = time.monotonic() + PATIENCE, PAUSE
    while True:
        try:
            return await attempt()
        except NoAnswer:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def connector(
    cluster: KubernetesCluster, watch: PodWatch, pod: Pod, box: str, bundle: BundleImage
) -> Relays:
    argv = bundle.command("hutch.guest.relay", at=BUNDLE)
    return Relays(PodRelays(cluster, watch, pod, box, argv), box, patience=1.5 * PATIENCE)


class KubernetesBox(ContainedBox):
    def __init__(
        self,
        id: str,
        record: PodRecord,
        cluster: KubernetesCluster,
        watch: PodWatch,
        connector: GuestConnector,
        *,
        lasts: bool,
        gone: Callable[[], None],
        first: ByteStream | None = None,
    ) -> None:
        super().__init__(
            id, connector, isolation=record.isolation, lasts=lasts, gone=gone, first=first
        )
        self.degraded, self.digest, self.runtime = record.degraded, record.digest, record.runtime
        self._cluster, self._watch, self._pod = cluster, watch, record.pod
        self._telling = asyncio.create_task(self._keep_telling()) if first else None

    async def connect(self) -> ByteStream:
        link = await super().connect()
        if self._telling is None:
            self._telling = asyncio.create_task(self._keep_telling())
        return link

    async def _keep_telling(self) -> None:
        while True:
            left = self._until - now() if self._until != float("inf") else 0.0
            with contextlib.suppress(HutchError):
                await self._connector.outlive(max(ALONE, left))
            await asyncio.sleep(TELL)

    async def outlive(self, seconds: float) -> None:
        self._check()
        if self._lasts:
            await self._connector.outlive(max(ALONE, seconds))
            self._until = now() + seconds

    async def _remove(self) -> None:
        await remove(self._cluster, self._watch, self._pod)

    def oom_kills(self) -> None:
        return None

    async def stats(self) -> Stats:
        """Whether it is alive; a cluster measures no Pods by itself. Raises BoxLost."""
        self._check()
        try:
            pod = await self._cluster.pod(self._pod.name)
        except NotFound:
            pod = None
        if pod is None or not pod.is_running or pod.metadata.uid != self._pod.metadata.uid:
            raise BoxLost(f"box {self.id} is gone")
        return Stats(memory=None, pids=None, cpu_seconds=None, oom_kills=None)

    def forget(self) -> None:
        super().forget()
        self._gone()

    def _cut_off(self) -> None:
        if self._telling:
            self._telling.cancel()
        super()._cut_off()


async def remove(cluster: KubernetesCluster, watch: PodWatch, pod: Pod) -> None:
    """End a Pod, and return when it is gone. Raises BackendUnavailable if it stays."""
    await patiently(lambda: cluster.delete_pod(pod.name, pod.metadata.uid))
    try:
        async with asyncio.timeout(PATIENCE):
            await watch.until(pod, lambda pod: False)
    except TimeoutError:
        raise BackendUnavailable(
            f"Pod {pod.name} in namespace {cluster.namespace} was told to end, and is still there "
            f"after {PATIENCE:g} seconds: its node may be away"
        ) from None


# --- starts ---------------------------------------------------------------------------------


async def start_pod(
    cluster: KubernetesCluster, watch: PodWatch, body: dict[str, object], box: str, scope: str
) -> Pod:
    """Create a Pod, and return it once it runs. If that fails, nothing is left of it.

    Raises Conflict if a box of that name exists, NotFound if there is no such image, NoCapacity
    if no node has room, and StartFailed if it does not come up.
    """
    try:
        created = await cluster.create_pod(body)
    except Conflict:
        created = await _create_again(cluster, watch, body, box, scope)
    try:
        _check_kept(body, created)
        return await running(cluster, watch, created)
    except BaseException:
        await asyncio.shield(remove(cluster, watch, created))
        raise


async def _create_again(
    cluster: KubernetesCluster, watch: PodWatch, body: dict[str, object], box: str, scope: str
) -> Pod:
    """After a conflict: a box of this name may have ended, and its Pod be still there."""
    with contextlib.suppress(NotFound):
        there = await cluster.pod(name_of(scope, box))
        if not there.has_ended and not there.metadata.deletion_timestamp:
            raise Conflict(f"box {box} already exists") from None
        await remove(cluster, watch, there)
    return await cluster.create_pod(body)


def _check_kept(sent: dict[str, object], created: Pod) -> None:
    """A cluster drops in silence what it does not know or has switched off."""
    wanted = json.dumps(sent).count('"reference":')
    kept = sum(volume.image is not None for volume in created.spec.volumes or ())
    if kept != wanted:
        raise NoImageVolumes("the cluster has no image volumes")
    if '"hostUsers": false' in json.dumps(sent) and created.spec.host_users is not False:
        raise NoUserNamespaces("the cluster has no user namespaces")


class NoImageVolumes(StartFailed):
    """The bundle has to be copied."""


class NoUserNamespaces(StartFailed):
    """User ids have to be those of the node."""


async def running(cluster: KubernetesCluster, watch: PodWatch, pod: Pod) -> Pod:
    """A Pod that was created, once it runs. Raises what `start_pod` raises."""
    began = time.monotonic()
    seen = pod

    def is_decided(latest: Pod) -> bool:
        nonlocal seen
        seen = latest
        return latest.is_running or failure(latest) is not None

    while True:
        left = START_TIMEOUT - (time.monotonic() - began)
        try:
            async with asyncio.timeout(min(left, NO_ROOM)):
                found = await watch.until(seen, is_decided)
        except TimeoutError:
            if why := _unschedulable(seen):
                raise NoCapacity(f"no node of the cluster can take the box: {why}") from None
            if seen.spec.host_users is False and _lacks_sandbox(seen):
                # A node that cannot says so in an event only, which we need not be allowed to read.
                raise NoUserNamespaces(
                    f"its node did not begin it in {NO_ROOM:g} seconds, as one whose runtime has "
                    "no user namespaces: kubernetes.user_namespaces can be off"
                    + await _warning(cluster, seen)
                ) from None
            if time.monotonic() - began > START_TIMEOUT - 1:
                state = _state(seen) + await _warning(cluster, seen)
                raise StartFailed(
                    f"the box was not up after {START_TIMEOUT:g} seconds: {state}"
                ) from None
            continue
        if found is None:
            raise StartFailed("the Pod was deleted while it started")
        if error := failure(found):
            raise error
        return found


def failure(pod: Pod) -> HutchError | None:
    """Why a Pod will never run, if that is decided."""
    for container in pod.containers:
        if (waiting := container.state.waiting) and waiting.reason in (*NO_IMAGE, *STUCK):
            return _stuck(container.name, waiting)
        if (ended := container.state.terminated) and (ended.exit_code or ended.reason == "Error"):
            words = ended.message.strip() or f"exit code {ended.exit_code}"
            return StartFailed(f"container {container.name} ended: {ended.reason}: {words}"[:1000])
    if pod.metadata.deletion_timestamp:
        return StartFailed("the Pod was deleted while it started")
    if pod.has_ended:
        return StartFailed(f"the Pod ended: {pod.status.reason} {pod.status.message}"[:1000])
    return None


def _stuck(container: str, waiting: StateDetail) -> HutchError:
    text = f"{waiting.reason}: {waiting.message}"[:1000]
    if waiting.reason in NO_IMAGE:
        if container == BOX_CONTAINER:
            return NotFound(f"the node cannot get the image: {text}")
        return BackendUnavailable(
            f"the node cannot get the image with Hutch's runtime ({container}): {text}. "
            "HUTCH_KUBERNETES_RUNTIME_IMAGE has to name one that nodes can pull"
        )
    return StartFailed(f"container {container} cannot start: {text}")


def _unschedulable(pod: Pod) -> str:
    for condition in pod.status.conditions or ():
        if (condition.type, condition.status) == ("PodScheduled", "False"):
            return condition.message or condition.reason
    return ""


def _lacks_sandbox(pod: Pod) -> bool:
    """Whether its node has not even made what its containers would share."""
    return any(
        (condition.type, condition.status) == ("PodReadyToStartContainers", "False")
        for condition in pod.status.conditions or ()
    )


def _state(pod: Pod) -> str:
    waiting = [
        f"{container.name}: {detail.reason} {detail.message}".strip()
        for container in pod.containers
        if (detail := container.state.waiting)
    ]
    return "; ".join(waiting)[:1000] or pod.status.phase or "its node says nothing"


async def _warning(cluster: KubernetesCluster, pod: Pod) -> str:
    """What the cluster last warned of: a volume that cannot be mounted is in no state of a Pod."""
    with contextlib.suppress(HutchError):  # we may not see it, and have something to say without
        if warnings := await cluster.warnings(pod):
            return f" ({warnings[-1].reason}: {warnings[-1].message})"[:1000]
    return ""


def box_of(pod: Pod, scope: str) -> str | None:
    """The id of the box that a Pod is. None if it is not a box of this scope."""
    box = pod.annotation(BOX)
    return box if box and pod.name == name_of(scope, box) else None
