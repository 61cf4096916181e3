"""The few calls to a cluster that boxes need, what it answers, and its errors as ours.

Callers check the names that become part of a path: our Pods are named by us (see pod.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlencode

import msgspec

from hutch.backends.contained import now as since_boot
from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    InvalidRequest,
    NoCapacity,
    NotFound,
    StartFailed,
)

from .address import ClusterAddress
from .exec import HandshakeRefused, PodStreams, open_exec

if TYPE_CHECKING:
    # Loaded with the first request: with the library of WebSockets, it takes longer to load than
    # all of this package.
    import httpcore

PATIENCE = 60.0  # seconds for a cluster that is away, for what must not be given up at once
ANSWER = 30.0  # seconds for one answer
QUIET = 90.0  # seconds without a word from a watch; a cluster sends bookmarks once a minute
PAUSE, LONG_PAUSE = 0.2, 5.0  # seconds between two attempts, growing
PAGE = 500
GONE_KEPT = 1000
CANNOT = re.compile(r"\bcannot ([a-z]+) resource\b")
T = TypeVar("T")


class Metadata(msgspec.Struct, rename="camel"):
    name: str
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: str | None = None


class StateDetail(msgspec.Struct, rename="camel"):
    reason: str = ""
    message: str = ""
    exit_code: int = 0
    finished_at: str | None = None


class ContainerState(msgspec.Struct):
    waiting: StateDetail | None = None
    terminated: StateDetail | None = None


class ContainerStatus(msgspec.Struct):
    name: str
    state: ContainerState = msgspec.field(default_factory=ContainerState)
    image_id: str = msgspec.field(default="", name="imageID")


class Condition(msgspec.Struct):
    type: str
    status: str = ""
    reason: str = ""
    message: str = ""


class PodStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: list[Condition] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    container_statuses: list[ContainerStatus] | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")


class EmptyDir(msgspec.Struct, rename="camel"):
    size_limit: str = ""


class PodVolume(msgspec.Struct, rename="camel"):
    name: str
    image: dict[str, object] | None = None
    empty_dir: EmptyDir | None = None


class Resources(msgspec.Struct):
    limits: dict[str, str] | None = None


class PodContainer(msgspec.Struct):
    name: str
    resources: Resources = msgspec.field(default_factory=Resources)


class PodSpec(msgspec.Struct, rename="camel"):
    runtime_class_name: str = ""
    host_users: bool | None = None
    volumes: list[PodVolume] | None = None
    init_containers: list[PodContainer] | None = None
    containers: list[PodContainer] | None = None


class Pod(msgspec.Struct):
    metadata: Metadata
    spec: PodSpec = msgspec.field(default_factory=PodSpec)
    status: PodStatus = msgspec.field(default_factory=PodStatus)

    @property
    def name(self) -> str:
        return self.metadata.name

    @property
    def version(self) -> int:
        """Its place in the order of all changes."""
        text = self.metadata.resource_version
        return int(text) if text.isdigit() else 0

    @property
    def is_running(self) -> bool:
        """Whether its main container runs, and is not about to end."""
        ended = any(c.state.terminated for c in self.status.container_statuses or ())
        is_up = self.status.phase == "Running" and not ended
        return is_up and not self.metadata.deletion_timestamp

    @property
    def has_ended(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def containers(self) -> list[ContainerStatus]:
        status = self.status
        return [*(status.init_container_statuses or ()), *(status.container_statuses or ())]

    def annotation(self, name: str) -> str:
        return (self.metadata.annotations or {}).get(name, "")


class ListMetadata(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class PodList(msgspec.Struct):
    metadata: ListMetadata
    items: list[Pod]


class WatchEvent(msgspec.Struct):
    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct):
    """How the cluster says what is wrong."""

    message: str = ""
    reason: str = ""


class ClusterVersion(msgspec.Struct, rename="camel"):
    git_version: str
    major: str = ""
    minor: str = ""

    @property
    def number(self) -> tuple[int, int]:
        """Such as (1, 36); some clouds write the minor number as "36+"."""
        parts = [re.match("[0-9]*", text) for text in (self.major, self.minor)]
        major, minor = (int(part[0] or 0) if part else 0 for part in parts)
        return major, minor


class RuntimeClass(msgspec.Struct):
    handler: str
    metadata: Metadata


class RuntimeClassList(msgspec.Struct):
    items: list[RuntimeClass]


class ClaimStatus(msgspec.Struct, rename="camel"):
    phase: str = ""
    access_modes: list[str] | None = None


class Claim(msgspec.Struct):
    """A PersistentVolumeClaim."""

    metadata: Metadata
    status: ClaimStatus = msgspec.field(default_factory=ClaimStatus)


class EventList(msgspec.Struct):
    items: list[StateDetail]


class HandlerFeatures(msgspec.Struct, rename="camel"):
    user_namespaces: bool = False


class RuntimeHandler(msgspec.Struct):
    name: str = ""
    features: HandlerFeatures | None = None


class NodeStatus(msgspec.Struct, rename="camel"):
    runtime_handlers: list[RuntimeHandler] | None = None


class ClusterNode(msgspec.Struct):
    metadata: Metadata
    status: NodeStatus

    def has_user_namespaces(self, handler: str) -> bool:
        return any(
            known.name == handler and known.features and known.features.user_namespaces
            for known in self.status.runtime_handlers or ()
        )


class NodeList(msgspec.Struct):
    metadata: ListMetadata
    items: list[ClusterNode]


class ReviewStatus(msgspec.Struct):
    allowed: bool


class AccessReview(msgspec.Struct):
    status: ReviewStatus


class NoAnswer(BackendUnavailable):
    """The cluster cannot be reached now: another attempt may help."""


class Refused(BackendUnavailable):
    """The cluster does not know us, or forbids this."""


@dataclass(frozen=True)
class ApiAnswer:
    status: int
    content: bytes

    def decode(self, kind: type[T]) -> T:
        """Raises BackendUnavailable if it is something else."""
        try:
            return msgspec.json.decode(self.content, type=kind)
        except (msgspec.DecodeError, ValueError) as exc:
            raise BackendUnavailable(f"malformed {kind.__name__} from cluster: {exc}") from None


class KubernetesCluster:
    """Belongs to the event loop it was made in. Every method raises errors of ours."""

    def __init__(self, address: ClusterAddress) -> None:
        self.address, self.namespace = address, address.namespace
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._pool_tls: object = None
        self._old: list[httpcore.AsyncConnectionPool] = []  # with connections in use
        self._is_closed = False
        self._ahead: float | None = None  # the cluster's time, less that of CLOCK_BOOTTIME

    def now(self) -> float:
        """The time of day by the clock of the cluster, give or take a second."""
        return time.time() if self._ahead is None else since_boot() + self._ahead

    def _note_time(self, headers: list[tuple[bytes, bytes]]) -> None:
        for name, value in headers:
            if name.lower() == b"date":
                with contextlib.suppress(ValueError):
                    date = parsedate_to_datetime(value.decode("latin-1"))
                    self._ahead = date.timestamp() + 0.5 - since_boot()  # it has whole seconds

    async def close(self) -> None:
        self._is_closed = True
        pools, self._pool, self._old = [*self._old, self._pool], None, []
        for pool in pools:
            if pool:
                await pool.aclose()

    # --- calls ------------------------------------------------------------------------------

    async def version(self) -> ClusterVersion:
        return (await self.call("GET", "/version", verb="get", what="version")).decode(
            ClusterVersion
        )

    async def create_pod(self, body: dict[str, object], *, is_trial: bool = False) -> Pod:
        """`is_trial`: the cluster decides as always, and makes none."""
        query = "fieldValidation=Strict" + ("&dryRun=All" if is_trial else "")
        answer = await self.call(
            "POST", f"{self.pods_path}?{query}", body, verb="create", what="pods"
        )
        return answer.decode(Pod)

    async def pod(self, name: str) -> Pod:
        answer = await self.call("GET", f"{self.pods_path}/{name}", verb="get", what="pods")
        return answer.decode(Pod)

    async def nodes(self, selector: str) -> list[ClusterNode]:
        """All nodes with these labels. Raises Refused without a ClusterRole for that."""
        found: list[ClusterNode] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            path = f"/api/v1/nodes?{urlencode(query)}"
            page = (await self.call("GET", path, verb="list", what="nodes")).decode(NodeList)
            found += page.items
            if not page.metadata.continue_:
                return found
            query["continue"] = page.metadata.continue_

    async def pods(self, selector: str, fields: str = "") -> tuple[list[Pod], str]:
        """All Pods with these labels, and the version to watch from."""
        found: list[Pod] = []
        query = {"labelSelector": selector, "fieldSelector": fields, "limit": str(PAGE)}
        while True:
            path = f"{self.pods_path}?{urlencode(query)}"
            page = (await self.call("GET", path, verb="list", what="pods")).decode(PodList)
            found += page.items
            if not page.metadata.continue_:
                return found, page.metadata.resource_version
            query["continue"] = page.metadata.continue_

    async def delete_pod(self, name: str, uid: str = "") -> None:
        """Begin to end a Pod. Does nothing if it is gone, or if it is another one by now."""
        body: dict[str, object] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            body["preconditions"] = {"uid": uid}
        with contextlib.suppress(NotFound, Conflict):
            await self.call("DELETE", f"{self.pods_path}/{name}", body, verb="delete", what="pods")

    async def watch(
        self, path: str, selector: str, since: str, what: str
    ) -> AsyncGenerator[WatchEvent, None]:
        """What changes from a version on. It ends now and then: list again."""
        query = {
            "watch": "1",
            "labelSelector": selector,
            "resourceVersion": since,
            "allowWatchBookmarks": "true",
        }
        request = await self._request("GET", f"{path}?{urlencode(query)}", None)
        request.extensions["timeout"] = {"connect": ANSWER, "pool": ANSWER, "read": QUIET}
        with self._in_our_words():
            response = await (await self._connections()).handle_async_request(request)
            try:
                if response.status != 200:
                    await response.aread()
                    raise self._error(response.status, response.content, "watch", what)
                left = b""
                async for piece in response.aiter_stream():
                    *lines, left = (left + piece).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield ApiAnswer(200, line).decode(WatchEvent)
            finally:
                await response.aclose()

    async def exec(self, pod: str, container: str, argv: list[str]) -> PodStreams:
        """Start a program in a container, and carry its standard streams.

        Raises NotFound if the Pod is gone, and Conflict if the container does not run.
        """
        query = [("container", container), *((name, "true") for name in ("stdin", "stdout"))]
        query += [("stderr", "true"), *(("command", word) for word in argv)]
        path = f"{self.pods_path}/{pod}/exec?{urlencode(query)}"
        for attempt in range(2):
            access = await self.address.access()
            try:
                async with asyncio.timeout(ANSWER):
                    return await open_exec(self.address, access, path)
            except HandshakeRefused as exc:
                if exc.status == 401 and self.address.renews and not attempt:
                    self.address.expire()
                    continue
                error = self._error(exc.status, exc.content, "create", "pods/exec")
                if isinstance(error, (InvalidRequest, StartFailed)):
                    # 400: the container does not run; 500: its node does not answer.
                    raise Conflict(str(error)) from None
                raise error from None
            except (OSError, TimeoutError) as exc:
                raise self._no_answer(exc) from None
        raise AssertionError("the second attempt ended")

    async def output(self, pod: str, container: str, argv: list[str]) -> bytes:
        """Run a program in a container. Returns all that it printed."""
        streams, printed = await self.exec(pod, container, argv), b""
        try:
            while (received := await streams.receive()) is not None:
                printed += received[0]
        finally:
            streams.close()
        return printed

    async def may(self, verb: str, resource: str, group: str = "") -> bool:
        """Whether we may do this in our namespace. `resource`: such as "pods/exec"."""
        name, _, subresource = resource.partition("/")
        asked = {"verb": verb, "resource": name, "subresource": subresource, "group": group}
        body: dict[str, object] = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {**asked, "namespace": self.namespace}},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        answer = await self.call("POST", path, body, verb="create", what="selfsubjectaccessreviews")
        return answer.decode(AccessReview).status.allowed

    async def claim(self, name: str) -> Claim:
        path = f"/api/v1/namespaces/{self.namespace}/persistentvolumeclaims/{name}"
        answer = await self.call("GET", path, verb="get", what="persistentvolumeclaims")
        return answer.decode(Claim)

    async def warnings(self, pod: Pod) -> list[StateDetail]:
        """What else the cluster has to say about a Pod, oldest first."""
        fields = f"involvedObject.uid={pod.metadata.uid},type=Warning"
        query = urlencode({"fieldSelector": fields, "limit": str(PAGE)})
        path = f"/api/v1/namespaces/{self.namespace}/events?{query}"
        answer = await self.call("GET", path, verb="list", what="events")
        return answer.decode(EventList).items

    async def runtime_class(self, name: str) -> RuntimeClass:
        path = f"/apis/node.k8s.io/v1/runtimeclasses/{name}"
        answer = await self.call("GET", path, verb="get", what="runtimeclasses")
        return answer.decode(RuntimeClass)

    async def has_policy(self, name: str) -> bool:
        """Whether there is a NetworkPolicy of that name."""
        path = f"{self._policies}/{name}"
        try:
            await self.call("GET", path, verb="get", what="networkpolicies")
        except NotFound:
            return False
        return True

    async def runtime_classes(self) -> list[RuntimeClass]:
        path = "/apis/node.k8s.io/v1/runtimeclasses"
        answer = await self.call("GET", path, verb="list", what="runtimeclasses")
        return answer.decode(RuntimeClassList).items

    async def ensure_policy(self, body: dict[str, object], name: str) -> None:
        """Make a NetworkPolicy, unless there is one of that name."""
        if not await self.has_policy(name):
            with contextlib.suppress(Conflict):
                await self.call("POST", self._policies, body, verb="create", what="networkpolicies")

    # --- how --------------------------------------------------------------------------------

    @property
    def pods_path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    @property
    def _policies(self) -> str:
        return f"/apis/networking.k8s.io/v1/namespaces/{self.namespace}/networkpolicies"

    async def call(
        self,
        method: str,
        path: str,
        body: dict[str, object] | None = None,
        *,
        verb: str,
        what: str,
    ) -> ApiAnswer:
        """Send one request. `verb` and `what`: what a Role has to allow, for errors."""
        for attempt in range(3):
            request = await self._request(method, path, body)
            try:
                with self._in_our_words():
                    response = await (await self._connections()).handle_async_request(request)
                    try:
                        content = await response.aread()
                    finally:
                        await response.aclose()
            except NoAnswer:
                # An idle connection may have ended just now. Not again if it may have been done.
                if attempt or method == "POST":
                    raise
                continue
            self._note_time(response.headers)
            if response.status < 400:
                return ApiAnswer(response.status, content)
            if response.status == 401 and self.address.renews and not attempt:
                self.address.expire()
                continue
            raise self._error(response.status, content, verb, what)
        raise AssertionError("the last attempt ended")

    async def _request(
        self, method: str, path: str, body: dict[str, object] | None
    ) -> httpcore.Request:
        import httpcore

        access = await self.address.access()
        headers = [*access.headers, ("Accept", "application/json"), ("Host", self.address.netloc)]
        content = msgspec.json.encode(body) if body is not None else b""
        if content:
            headers.append(("Content-Type", "application/json"))
        if method != "GET":
            headers.append(("Content-Length", str(len(content))))
        times = dict.fromkeys(("connect", "read", "write", "pool"), ANSWER)
        return httpcore.Request(
            method,
            f"{self.address.server}{path}",
            headers=headers,
            content=content,
            extensions={"timeout": times, "sni_hostname": self.address.server_name},
        )

    async def _connections(self) -> httpcore.AsyncConnectionPool:
        import httpcore

        if self._is_closed:
            raise BackendUnavailable("the backend was closed")
        tls = (await self.address.access()).tls
        if self._pool is None or self._pool_tls is not tls:
            if self._pool:  # our certificate is another one now
                self._old.append(self._pool)
            # No limit: each watch is one of these.
            self._pool = httpcore.AsyncConnectionPool(
                ssl_context=tls, max_connections=None, keepalive_expiry=60
            )
            self._pool_tls = tls
        return self._pool

    @contextlib.contextmanager
    def _in_our_words(self) -> Iterator[None]:
        import httpcore

        try:
            yield
        except (
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            OSError,
            RuntimeError,  # after `close`
        ) as exc:
            raise self._no_answer(exc) from None

    def _no_answer(self, exc: BaseException) -> NoAnswer:
        reason = str(exc) or ("no answer in time" if "Timeout" in type(exc).__name__ else repr(exc))
        return NoAnswer(f"the cluster at {self.address} does not answer ({reason[:300]})")

    def _error(self, status: int, content: bytes, verb: str, what: str) -> HutchError:
        """The error for an answer. It tells the reader what to do, if we know that."""
        try:
            message = msgspec.json.decode(content, type=ApiStatus).message
        except (msgspec.DecodeError, ValueError):
            message = content.decode(errors="replace")
        message = message.strip()[:1000] or f"status {status}"
        match status:
            case 401:
                return Refused(
                    f"the cluster at {self.address} does not know us ({message}): the token or "
                    "certificate is wrong or has expired"
                )
            case 403 if "exceeded quota" in message:
                return NoCapacity(f"the quota of namespace {self.namespace} is used up: {message}")
            case 403 if what == "pods" and "cannot" not in message:
                return StartFailed(f"the cluster refused the Pod: {message}")
            case 403:
                # An exec may lack either of two verbs, and only the cluster knows which.
                verb = said[1] if (said := CANNOT.search(message)) else verb
                return Refused(
                    f"the cluster forbids us to {verb} {what} in namespace {self.namespace}: a "
                    f"Role has to allow the verb {verb!r} for {what} ({message})"
                )
            case 404:
                return NotFound(message)
            case 409:
                return Conflict(message)
            case 400 | 413 | 422:
                return InvalidRequest(f"the cluster refused: {message}")
            case 429 | 502 | 503 | 504:
                return NoAnswer(f"the cluster at {self.address} is busy or starting ({message})")
        return StartFailed(f"the cluster failed with status {status}: {message}")


# --- what happens to Pods -------------------------------------------------------------------


@dataclass(eq=False)
class _Waiter:
    pod: Pod
    test: Callable[[Pod], bool]
    done: asyncio.Future[Pod | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class PodWatch:
    """What happens to the Pods with some labels: listed once, and watched from there."""

    def __init__(self, cluster: KubernetesCluster, selector: str) -> None:
        self._cluster, self._selector = cluster, selector
        self._pods: dict[str, Pod] = {}  # by uid
        self._gone: deque[str] = deque(maxlen=GONE_KEPT)
        self._waiters: set[_Waiter] = set()
        self._task: asyncio.Task[None] | None = None

    async def until(self, pod: Pod, test: Callable[[Pod], bool]) -> Pod | None:
        """Return a Pod once `test` holds for it, or None once it is gone.

        While the cluster is away, this waits for it. Raises Refused if we may not watch.
        """
        latest = self._pods.get(pod.metadata.uid, pod)
        if latest.version < pod.version:
            latest = pod
        if pod.metadata.uid in self._gone:
            return None
        if test(latest):
            return latest
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        waiter = _Waiter(pod, test)
        self._waiters.add(waiter)
        try:
            return await waiter.done
        finally:
            self._waiters.discard(waiter)

    async def close(self) -> None:
        """Returns when its connection is closed, too: the loop may end right after this."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=LONG_PAUSE)

    async def _follow(self) -> None:
        pause = PAUSE
        while True:
            try:
                began = time.monotonic()
                await self._follow_once()
                pause = PAUSE if time.monotonic() - began > LONG_PAUSE else pause
            except Refused as exc:
                for waiter in list(self._waiters):
                    if not waiter.done.done():
                        waiter.done.set_exception(exc)
                return
            except HutchError:  # it is away, or fails for now
                pause = min(2 * pause, LONG_PAUSE)
            await asyncio.sleep(pause)

    async def _follow_once(self) -> None:
        pods, version = await self._cluster.pods(self._selector)
        self._replace(pods, int(version) if version.isdigit() else 0)
        watch = self._cluster.watch(self._cluster.pods_path, self._selector, version, "pods")
        async with contextlib.aclosing(watch) as events:
            async for event in events:
                if event.type in ("ADDED", "MODIFIED", "DELETED"):
                    pod = ApiAnswer(200, bytes(event.object)).decode(Pod)
                    self._note(pod, is_gone=event.type == "DELETED")
                elif event.type == "ERROR":  # our version is too old: list again
                    return

    def _replace(self, pods: list[Pod], version: int) -> None:
        listed = {pod.metadata.uid for pod in pods}
        known = [*self._pods.values(), *(waiter.pod for waiter in self._waiters)]
        for pod in known:
            # One that was made after the list is not in it.
            if pod.metadata.uid not in listed and pod.version <= version:
                self._note(pod, is_gone=True)
        for pod in pods:
            self._note(pod, is_gone=False)

    def _note(self, pod: Pod, *, is_gone: bool) -> None:
        uid = pod.metadata.uid
        if is_gone:
            self._pods.pop(uid, None)
            self._gone.append(uid)
        else:
            self._pods[uid] = pod
        for waiter in list(self._waiters):
            if waiter.pod.metadata.uid != uid or waiter.done.done():
                continue
            if is_gone:
                waiter.done.set_result(None)
            elif waiter.test(pod):
                waiter.done.set_result(pod)
