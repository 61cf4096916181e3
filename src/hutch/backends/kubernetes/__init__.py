"""The kubernetes backend: boxes that are Pods of a cluster.

The cluster makes and places them, and keeps what there is to know about a box with its Pod. Our
guest ends its box when it has had no host for too long, so no box outlives us forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime

from hutch.backends.base import Backend, Box, ByteStream, SharedRecords, Spec, named
from hutch.backends.contained import GuestConnector, RuntimeBundle, make_bundle
from hutch.backends.linux import temporary
from hutch.backends.linux.folders import kept_name
from hutch.errors import (
    BackendUnavailable,
    BoxLost,
    HutchError,
    InvalidRequest,
    NotFound,
    StartFailed,
)
from hutch.types import ClusterSettings, Grade, Report

from . import address, doctor
from .box import (
    KubernetesBox,
    NoImageVolumes,
    NoUserNamespaces,
    PodRecord,
    box_of,
    connector,
    failure,
    remove,
    start_pod,
)
from .claim import ClaimMounts, find_mounts
from .cluster import KubernetesCluster, Pod, PodWatch, Refused
from .pod import (
    MANAGED,
    OURS,
    SCOPE,
    BundleImage,
    HowBundle,
    body,
    grade_of,
    name_of,
    policies,
    scope_label,
    user_of,
    weaker_user,
)
from .records import ClusterRecords

CLOSE_TIMEOUT = 60  # seconds; a cluster that takes longer hangs
NAME_FILE = "kubernetes.scope"
SHARED_SCOPE = "shared"  # of all servers of a namespace that share their boxes
CLOSED = "the backend was closed"
IMAGE_VOLUMES = (1, 35)  # the version that has them without being asked
LEFT = 60.0  # seconds after its end, nothing needs a Pod any more
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
NETWORK_UNKNOWN = "network: closed only where the cluster enforces NetworkPolicy (see hutch doctor)"
SAME_USERS = "user namespaces: not used, so a user id in the box is the same one on its node"
UNSEEN = "?"  # no handler has this name
NETWORK_UNSEEN = "network: we may not see or make a NetworkPolicy, so it may be open"


@dataclass(frozen=True)
class UserNamespaces:
    """Which Pods get user ids of their own."""

    handlers: frozenset[str] | None  # of runtimes that give some on every node; None: all
    why_no_others: str = ""

    def why_not(self, handler: str) -> str:
        """Why a Pod with a runtime of this handler gets none. "" if it does."""
        gives = self.handlers is None or handler in self.handlers
        return "" if gives else self.why_no_others


@dataclass
class ReachedCluster:
    """A cluster that we have reached, and what we keep for it."""

    cluster: KubernetesCluster
    watch: PodWatch
    scope: str
    bundle: BundleImage
    version: str
    users: UserNamespaces
    degraded: tuple[str, ...] = ()


@dataclass(frozen=True)
class StartedPod:
    record: PodRecord
    connector: GuestConnector
    first: ByteStream


class KubernetesBackend(Backend):
    """Boxes that end with this process; lasting ones, at their deadlines."""

    name = "kubernetes"
    default_image = "python:3.13-slim"
    best = "vm"  # with a RuntimeClass such as Kata
    has_runtimes = True

    def __init__(
        self,
        bundle: Callable[[], RuntimeBundle],
        *,
        settings: ClusterSettings | None = None,
        lasting: str | None = None,
    ) -> None:
        """`bundle` makes what the guest runs from. The cluster is not contacted before first use.

        `lasting`: a folder of ours, through which the next process finds our boxes.
        """
        self.lasts = lasting is not None
        self._settings = settings or ClusterSettings()
        self._is_shared = self.lasts and bool(self._settings.replica_url)
        self._bundle, self._lasting = bundle, lasting
        self._here: ReachedCluster | None = None
        self._reaching, self._giving = asyncio.Lock(), asyncio.Lock()
        self._boxes: dict[str, KubernetesBox] = {}
        self._folders: list[str] = []
        self._launching: set[asyncio.Future[StartedPod]] = set()
        self._errands: set[asyncio.Task[None]] = set()
        self._owner = os.getpid()  # a forked child must not end our boxes
        self._closed = self._swept = False

    @property
    def plain_image(self) -> str:
        """That with our runtime, which every node has that has a box."""
        return self._settings.runtime_image or self.default_image

    async def start(self, spec: Spec, id: str | None = None) -> Box:
        name = named(id)
        here = await self._reach()
        launching = asyncio.ensure_future(self._launch(here, spec, name))
        self._launching.add(launching)
        launching.add_done_callback(self._launching.discard)
        try:
            started = await asyncio.shield(launching)
        except BaseException:
            # Cancelled: a box may still come up, and must not stay.
            launching.add_done_callback(self._discard)
            raise
        if self._closed:
            self._discard(launching)
            raise BackendUnavailable(CLOSED)
        if not self._swept:
            self._swept = True
            self._run_errand(_remove_ended(here))
        box = self._box(here, name, started.record, started.connector, started.first)
        box.expect_end()
        return box

    async def _launch(self, here: ReachedCluster, spec: Spec, name: str) -> StartedPod:
        claimed = await self._claimed(here, spec)
        isolation, handler = await self._runtime(here, spec.runtime)
        while True:
            wanted = self._body(here, spec, name, isolation, handler, claimed)
            try:
                pod = await start_pod(here.cluster, here.watch, wanted, name, here.scope)
                break
            except NoImageVolumes:
                if self._settings.bundle != "auto" or here.bundle.how == "copy":
                    raise
                here.bundle = _by_copy(here.bundle)
            except NoUserNamespaces as exc:
                if self._settings.user_namespaces != "auto":
                    raise
                here.users = UserNamespaces(frozenset(), str(exc))
        relays = connector(here.cluster, here.watch, pod, name, here.bundle)
        try:
            return StartedPod(PodRecord.of(pod), relays, await relays.connect())
        except BaseException as exc:
            relays.close()
            why = await _last_words(here, pod) if isinstance(exc, HutchError) else ""
            await asyncio.shield(remove(here.cluster, here.watch, pod))
            if why or isinstance(exc, BoxLost):
                raise StartFailed(f"the box did not come up: {why or exc}") from None
            raise

    async def _claimed(self, here: ReachedCluster, spec: Spec) -> ClaimMounts:
        if not spec.mounts:
            return ClaimMounts()
        async with self._giving:  # of two starts with the same folder, one gives it away
            claimed = await asyncio.to_thread(find_mounts, spec, self._settings)
        await _check_claim(here.cluster, claimed.claim)
        return claimed

    def _body(
        self,
        here: ReachedCluster,
        spec: Spec,
        name: str,
        isolation: Grade,
        handler: str,
        claimed: ClaimMounts,
    ) -> dict[str, object]:
        why = here.users.why_not(handler)
        if claimed.mounts:
            why = "a workspace has the user ids of its volume"
        user = user_of(spec, claimed.owner, may_map=isolation == "ns" and not why)
        degraded = [*weaker_user(user)]
        if "network" not in spec.relax:
            degraded = [*here.degraded, *degraded]
        # Another kernel than that of the node has its own users.
        if isolation == "ns" and not user.has_namespace:
            degraded.append(f"{SAME_USERS} ({why or f'they have no uid {user.uid}'})")
        return body(spec, name, here.scope, user, here.bundle, isolation, tuple(degraded), claimed)

    async def _runtime(self, here: ReachedCluster, runtime: str) -> tuple[Grade, str]:
        """What a RuntimeClass gives, and its handler."""
        if not runtime:
            return "ns", ""
        try:
            handler = (await here.cluster.runtime_class(runtime)).handler
        except NotFound:
            raise InvalidRequest(f"the cluster has no RuntimeClass {runtime!r:.100}") from None
        except Refused:
            return "ns", UNSEEN  # we may not see what it is, so nothing can be promised
        return grade_of(handler), handler

    async def adopt(self, id: str) -> Box:
        here = await self._reach()
        try:
            pod = await here.cluster.pod(name_of(here.scope, named(id)))
        except NotFound:
            raise BoxLost(f"box {id} is gone") from None
        self._check()
        if not pod.is_running or box_of(pod, here.scope) != id:
            raise BoxLost(f"box {id} is gone")
        before = self._boxes.pop(id, None)
        if before and not before.is_forgotten:
            # We have it already: the new object takes over its connection.
            relays = before.hand_over()
        else:
            relays = connector(here.cluster, here.watch, pod, id, here.bundle)
        return self._box(here, id, PodRecord.of(pod), relays, None)

    def _box(
        self,
        here: ReachedCluster,
        id: str,
        record: PodRecord,
        connector: GuestConnector,
        first: ByteStream | None,
    ) -> KubernetesBox:
        def gone() -> None:
            if self._boxes.get(id) is box:
                del self._boxes[id]

        box = KubernetesBox(
            id,
            record,
            here.cluster,
            here.watch,
            connector,
            lasts=self.lasts,
            gone=gone,
            first=first,
        )
        self._boxes[id] = box
        return box

    async def list(self) -> list[str]:
        if self._here is None and not self.lasts:
            return []
        here = await self._reach()
        return [box for pod in await _pods(here) if pod.is_running and (box := _id(here, pod))]

    async def folder(self) -> str:
        await asyncio.to_thread(temporary.sweep_folders)
        path = temporary.new_folder()
        self._folders.append(path)
        return path

    async def report(self) -> Report:
        try:
            here = await self._reach()
        except BackendUnavailable as exc:
            return doctor.unreachable(self.name, exc)
        return await doctor.report(
            self.name,
            here.cluster,
            here.version,
            lambda: here.bundle,
            self.start,
            lambda box: name_of(here.scope, box.id),
            self._settings.volume_claim,
            shares=bool(self._settings.replica_url),
        )

    async def shared_records(self) -> SharedRecords | None:
        if not self._is_shared:
            return None
        return ClusterRecords((await self._reach()).cluster)

    async def leave(self) -> None:
        if not self.lasts:
            await self.close()
            return
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        try:
            await self._settle()
            short = [box for box in self._boxes.values() if not box.may_stay]
            await asyncio.gather(*(box.kill() for box in short), return_exceptions=True)
        finally:
            await self._hang_up()

    async def close(self) -> None:
        if self._is_shared:  # boxes of our scope are other servers', too
            await self.leave()
            return
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        try:
            # A box that this does not reach ends by itself, as it has no host any more.
            with contextlib.suppress(HutchError, TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._end_all()
        finally:
            await self._hang_up()

    async def _end_all(self) -> None:
        await self._settle()
        if self.lasts:
            async with self._reaching:
                self._here = self._here or await self._find()
        if here := self._here:
            pods = await _pods(here)
            await asyncio.gather(
                *(remove(here.cluster, here.watch, pod) for pod in pods), return_exceptions=True
            )

    async def _settle(self) -> None:
        """Wait for all starts and errands, including those that they cause."""
        while self._launching or self._errands:
            under_way: list[asyncio.Future[StartedPod] | asyncio.Task[None]] = [
                *self._launching,
                *self._errands,
            ]
            await asyncio.wait(under_way)
            await asyncio.sleep(0)  # let their callbacks start more

    async def _hang_up(self) -> None:
        for box in list(self._boxes.values()):
            box.forget()
        self._boxes.clear()
        async with self._reaching:  # a `_reach` may be under way
            here, self._here = self._here, None
        if here:
            await here.watch.close()
            await here.cluster.close()
        for path in self._folders:
            shutil.rmtree(path, ignore_errors=True)

    # --- the cluster ------------------------------------------------------------------------

    async def _reach(self) -> ReachedCluster:
        self._check()
        if self._here:
            return self._here
        async with self._reaching:
            self._check()
            self._here = here = self._here or await self._find()
        self._check()
        return here

    def _check(self) -> None:
        if self._closed:
            raise BackendUnavailable(CLOSED)

    async def _find(self) -> ReachedCluster:
        settings = self._settings
        if not settings.runtime_image:
            raise BackendUnavailable(
                "HUTCH_KUBERNETES_RUNTIME_IMAGE names no image: write one to a file with "
                "`hutch kubernetes image FILE`, push it to a registry that the cluster pulls from, "
                "and name it there"
            )
        where = address.find(os.environ, context=settings.context, namespace=settings.namespace)
        cluster = KubernetesCluster(where)
        try:
            bundle, version = await asyncio.gather(make_bundle(self._bundle), cluster.version())
            scope = secrets.token_hex(16)
            if self._is_shared:
                scope = SHARED_SCOPE
            elif self._lasting:
                scope = kept_name(self._lasting, NAME_FILE)
            machine = os.uname().machine
            how: HowBundle = "image" if version.number >= IMAGE_VOLUMES else "copy"
            if settings.bundle != "auto":
                how = "image" if settings.bundle == "image" else "copy"
            image = BundleImage(
                settings.runtime_image, how, ARCHITECTURES.get(machine, machine), bundle.command
            )
            watch = PodWatch(cluster, f"{MANAGED}={OURS},{SCOPE}={scope_label(scope)}")
            degraded = await _close_network(cluster)
            users = await _user_namespaces(cluster, settings.user_namespaces, image.architecture)
            here = ReachedCluster(
                cluster, watch, scope, image, version.git_version, users, degraded
            )
            if self.lasts:
                await _tidy(here)
            return here
        except BaseException:
            await cluster.close()
            raise

    def _discard(self, launching: asyncio.Future[StartedPod]) -> None:
        if launching.cancelled() or launching.exception() is not None:
            return
        started = launching.result()
        started.first.close()
        started.connector.close()
        if self._here:  # otherwise it was removed with all the others
            self._run_errand(_discarded(self._here, started))

    def _run_errand(self, work: Coroutine[object, object, None]) -> None:
        errand = asyncio.ensure_future(work)
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)


def _by_copy(bundle: BundleImage) -> BundleImage:
    return BundleImage(bundle.name, "copy", bundle.architecture, bundle.command)


async def _close_network(cluster: KubernetesCluster) -> tuple[str, ...]:
    """Make the policies that boxes need. Returns what cannot be promised about the network."""
    try:
        for name, policy in policies().items():
            await cluster.ensure_policy(policy, name)
    except Refused:
        return (NETWORK_UNSEEN,)
    return (NETWORK_UNKNOWN,)


async def _check_claim(cluster: KubernetesCluster, name: str) -> None:
    """Raises BackendUnavailable if no Pod can have this claim.

    One that waits for its volume may get it when a Pod asks for it.
    """
    try:
        claim = await cluster.claim(name)
    except Refused:
        return  # then the cluster says it later, of the Pod
    except NotFound:
        raise BackendUnavailable(
            f"namespace {cluster.namespace} has no PersistentVolumeClaim {name!r}: "
            "kubernetes.volume_claim has to name one there"
        ) from None
    if claim.status.phase == "Lost" or claim.metadata.deletion_timestamp:
        raise BackendUnavailable(
            f"PersistentVolumeClaim {name!r} in namespace {cluster.namespace} "
            + ("is being deleted" if claim.metadata.deletion_timestamp else "has lost its volume")
        )


async def _user_namespaces(
    cluster: KubernetesCluster, setting: str, architecture: str
) -> UserNamespaces:
    """A cluster takes a Pod that wants one, and its node may then never start it: so we ask."""
    if setting == "off":
        return UserNamespaces(frozenset(), "kubernetes.user_namespaces is off")
    if setting == "on":
        return UserNamespaces(None)
    try:
        nodes = await cluster.nodes(f"kubernetes.io/os=linux,kubernetes.io/arch={architecture}")
    except Refused:
        return UserNamespaces(frozenset(), "we may not list nodes, which tell whether they can")
    known = {handler.name for node in nodes for handler in node.status.runtime_handlers or ()}
    can = {name for name in known if all(node.has_user_namespaces(name) for node in nodes)}
    return UserNamespaces(frozenset(can), "not every node can, with this runtime")


async def _last_words(here: ReachedCluster, pod: Pod) -> str:
    """Why its guest has ended. "" if it has not."""
    with contextlib.suppress(HutchError):
        return str(failure(await here.cluster.pod(pod.name)) or "")
    return ""


async def _discarded(here: ReachedCluster, started: StartedPod) -> None:
    with contextlib.suppress(HutchError):  # without a host, it ends by itself
        await remove(here.cluster, here.watch, started.record.pod)


async def _pods(here: ReachedCluster) -> list[Pod]:
    """All Pods of our scope, running or not."""
    pods, _ = await here.cluster.pods(f"{MANAGED}={OURS},{SCOPE}={scope_label(here.scope)}")
    return [pod for pod in pods if _id(here, pod)]


def _id(here: ReachedCluster, pod: Pod) -> str | None:
    return box_of(pod, here.scope)


async def _tidy(here: ReachedCluster) -> None:
    """Remove the Pods of our scope that have ended while no process looked after them."""
    for pod in await _pods(here):
        if pod.has_ended:
            await here.cluster.delete_pod(pod.name, pod.metadata.uid)


async def _remove_ended(here: ReachedCluster) -> None:
    """Remove Pods of others that have ended: their owners died before they could.

    Best-effort cleanup; raises none of our errors.
    """
    ended = "status.phase!=Running,status.phase!=Pending"
    with contextlib.suppress(HutchError):
        pods, _ = await here.cluster.pods(f"{MANAGED}={OURS}", ended)
        for pod in pods:
            if pod.has_ended and time.time() - _end_of(pod) > LEFT:
                await here.cluster.delete_pod(pod.name, pod.metadata.uid)


def _end_of(pod: Pod) -> float:
    """When its last container ended, by the clock of its node."""
    ends = [c.state.terminated.finished_at for c in pod.containers if c.state.terminated]
    try:
        return max((datetime.fromisoformat(end).timestamp() for end in ends if end), default=0.0)
    except ValueError:
        return 0.0


__all__ = ["KubernetesBackend"]
