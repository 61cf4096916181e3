"""Checks a cluster, and real boxes from the inside, and suggests fixes for what is missing.

The boxes have the image with our bundle, as a guest needs nothing from an image. What counts is
what we find, not what we asked the cluster for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from hutch.backends.base import Box, Spec
from hutch.backends.contained import BUNDLE
from hutch.errors import BackendUnavailable, HutchError, NoCapacity, NotFound, StartFailed
from hutch.guest.relay import RELAY
from hutch.types import Grade, Layer, Limits, MiB, Report, Status

from . import enforcement
from .box import PodRecord
from .cluster import KubernetesCluster, Pod, Refused
from .pod import BOX_CONTAINER, CONTAINERS, BundleImage, HowBundle, grade_of, policies

LIMITS = Limits(memory=256 * MiB, pids=64)
PATIENCE = 30  # seconds for the program in a box

# What a Role has to allow. The first are needed, the others make it better.
NEEDED = (
    *((verb, "pods", "") for verb in ("create", "get", "list", "watch", "delete")),
    *((verb, "pods/exec", "") for verb in ("create", "get")),
)
WANTED = (("get", "networkpolicies", "networking.k8s.io"),)
# Where nobody else has made the policies. Whoever may make one may also open the network of boxes.
WANTED_FOR_POLICIES = (("create", "networkpolicies", "networking.k8s.io"),)
# For better errors of workspaces.
WANTED_FOR_ERRORS = (("get", "persistentvolumeclaims", ""), ("list", "events", ""))
# In the whole cluster: which nodes have user namespaces, and what a RuntimeClass is.
WANTED_EVERYWHERE = (
    ("list", "nodes", ""),
    *((verb, "runtimeclasses", "node.k8s.io") for verb in ("get", "list")),
)

# What PodSecurity `restricted` asks of a container.
CONFINED: dict[str, object] = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": RELAY,
    "seccompProfile": {"type": "RuntimeDefault"},
}

# Where several servers share their sessions.
_RECORDS = ("create", "get", "list", "watch", "update", "delete")
SHARING = (
    *((verb, what, "") for what in ("configmaps", "secrets") for verb in _RECORDS),
    *((verb, "leases", "coordination.k8s.io") for verb in ("create", "get", "update")),
)

# Runs in the box, beside the guest, with the bundle's own Python. Every box can see the address of
# the API server among its variables.
LOOK = r"""
import json, os, socket
def text(path):
    try:
        return open(path).read()
    except OSError:
        return ""
def reaches():
    host, port = (os.environ.get("KUBERNETES_SERVICE_" + n, "") for n in ("HOST", "PORT"))
    if not host or not port.isdigit():
        return None
    try:
        socket.create_connection((host, int(port)), 5).close()
        return True
    except OSError:
        return False
fields = (line.partition(":") for line in text("/proc/1/status").splitlines())
status = {name: value.strip() for name, _, value in fields}
print(json.dumps({
    "uid": status.get("Uid", "0").split()[0],
    "capabilities": status.get("CapBnd", "?"),
    "no_new_privileges": status.get("NoNewPrivs", "0"),
    "seccomp": status.get("Seccomp", "0"),
    "read_only": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
    "memory": (text("/sys/fs/cgroup/memory.max")
        or text("/sys/fs/cgroup/memory/memory.limit_in_bytes")).strip(),
    "has_token": os.path.exists("/var/run/secrets/kubernetes.io/serviceaccount/token"),
    "reaches": reaches(),
    "users": text("/proc/self/uid_map").split(),
    "dies_whole": text("/sys/fs/cgroup/memory.oom.group").strip() == "1",
}))
"""


class Look(msgspec.Struct):
    """What a box finds out about itself."""

    uid: str
    capabilities: str
    no_new_privileges: str
    seccomp: str
    read_only: bool
    memory: str
    has_token: bool
    reaches: bool | None  # the API server; None: it has no address for it
    users: list[str]  # of its user namespace
    dies_whole: bool  # when one of its programs lacks memory


Start = Callable[[Spec], Awaitable[Box]]


def unreachable(name: str, error: BackendUnavailable) -> Report:
    return Report(name, "none", (Layer("cluster", Status.MISSING, str(error)),))


async def report(
    name: str,
    cluster: KubernetesCluster,
    version: str,
    bundle: Callable[[], BundleImage],
    start: Start,
    pod_of: Callable[[Box], str],
    claim: str = "",
    *,
    shares: bool = False,
) -> Report:
    """Check the cluster. `start` starts a box, and `pod_of` names its Pod.

    `bundle`: how the last box got it, which a start may find out.

    `claim`: the PersistentVolumeClaim with the workspaces, if there is one. `shares`: several
    servers share their sessions.
    """
    layers = [
        Layer(
            "cluster",
            Status.ACTIVE,
            f"{version} at {cluster.address}, namespace {cluster.namespace}",
        ),
        await _rights(cluster, "rights", NEEDED, required=True),
        await _rights(
            cluster,
            "rights on network",
            WANTED if await _has_policies(cluster) else (*WANTED, *WANTED_FOR_POLICIES),
            required=False,
        ),
        await _pod_security(cluster, bundle().name),
        await _runtimes(cluster),
    ]
    if claim:
        layers.append(await _workspaces(cluster, claim))
    if shares:
        layers.append(await _rights(cluster, "rights to share", SHARING, required=True))

    @contextlib.asynccontextmanager
    async def started(spec: Spec) -> AsyncGenerator[Pod, None]:
        box = await start(spec)
        try:
            yield await cluster.pod(pod_of(box))
        finally:
            await box.kill()

    spec = Spec(image=bundle().name, limits=LIMITS)
    try:
        async with started(spec) as closed:
            look = await _look(cluster, bundle(), closed)
            layers += judge(look, bundle().how)
            layers += [_users(look, closed), sizes(closed)]
            layers += await _network(cluster, bundle(), closed, look, started)
    except HutchError as exc:
        layers.append(Layer("box", Status.MISSING, str(exc)))
    whole = all(layer.status is not Status.MISSING for layer in layers if layer.required)
    grade: Grade = "ns" if whole else "none"
    return Report(name, grade, tuple(layers))


async def _has_policies(cluster: KubernetesCluster) -> bool:
    try:
        return all([await cluster.has_policy(name) for name in policies()])
    except HutchError:  # we may not see them
        return False


async def _look(cluster: KubernetesCluster, bundle: BundleImage, pod: Pod) -> Look:
    # The last two are `-m` and the module.
    argv = [*bundle.command("", at=BUNDLE)[:-2], "-c", LOOK]
    try:
        async with asyncio.timeout(PATIENCE):
            printed = await cluster.output(pod.name, BOX_CONTAINER, argv)
    except TimeoutError:
        raise BackendUnavailable(f"the box did not answer in {PATIENCE} seconds") from None
    try:
        return msgspec.json.decode(printed, type=Look)
    except (msgspec.DecodeError, ValueError):
        raise BackendUnavailable(f"the box printed {printed[:200]!r}") from None


async def _rights(
    cluster: KubernetesCluster,
    name: str,
    wanted: tuple[tuple[str, str, str], ...],
    *,
    required: bool,
) -> Layer:
    try:
        missing = [
            f"{verb} {resource}"
            for verb, resource, group in wanted
            if not await cluster.may(verb, resource, group)
        ]
    except HutchError as exc:
        return Layer(name, Status.DEGRADED, str(exc), required=False)
    listed = ", ".join(f"{verb} {resource}" for verb, resource, _ in wanted)
    if not missing:
        return Layer(name, Status.ACTIVE, f"may {listed}", required=required)
    fix = f"a Role in namespace {cluster.namespace} that allows this"
    return Layer(name, Status.MISSING, f"may not {', '.join(missing)}", fix, required)


async def _workspaces(cluster: KubernetesCluster, name: str) -> Layer:
    try:
        claim = await cluster.claim(name)
    except NotFound:
        fix = f"a claim in namespace {cluster.namespace}, or another kubernetes.volume_claim"
        return Layer("workspaces", Status.MISSING, f"no claim {name}", fix, required=False)
    except HutchError as exc:
        return Layer("workspaces", Status.DEGRADED, str(exc), required=False)
    modes = ", ".join(claim.status.access_modes or ())
    text = f"claim {name}: {claim.status.phase} {modes}".rstrip()
    if claim.status.phase == "Bound":
        return Layer("workspaces", Status.ACTIVE, text, required=False)
    return Layer("workspaces", Status.DEGRADED, text, "a volume for it", required=False)


async def _pod_security(cluster: KubernetesCluster, image: str) -> Layer:
    """Whether the namespace refuses Pods that are less confined than ours, by asking for some."""

    async def is_refused(confinement: dict[str, object]) -> bool:
        container = {
            "name": "trial",
            "image": image,
            "securityContext": confinement,
            "resources": {"limits": {"cpu": "10m", "memory": "16Mi", "ephemeral-storage": "1Mi"}},
        }
        body: dict[str, object] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "hutch-trial-"},
            "spec": {"automountServiceAccountToken": False, "containers": [container]},
        }
        try:
            await cluster.create_pod(body, is_trial=True)
        except StartFailed:
            return True
        return False

    name, level = "PodSecurity", "pod-security.kubernetes.io/enforce=restricted"
    try:
        if await is_refused(CONFINED):
            return Layer(name, Status.DEGRADED, "not checked: no Pod is admitted", required=False)
        if await is_refused({}):
            return Layer(name, Status.ACTIVE, "the namespace refuses a Pod that is not confined")
        needs_little = await is_refused({"privileged": True})
    except (BackendUnavailable, NoCapacity) as exc:
        return Layer(name, Status.DEGRADED, f"not checked: {exc}", required=False)
    what = "that is not confined" if needs_little else "that has all rights on its node"
    return Layer(
        name,
        Status.DEGRADED,
        f"the namespace admits a Pod {what}, from all who may create Pods there",
        f"kubectl label namespace {cluster.namespace} {level}",
        required=False,
    )


async def _runtimes(cluster: KubernetesCluster) -> Layer:
    name = "runtimes"
    try:
        found = await cluster.runtime_classes()
    except Refused:
        return Layer(
            name,
            Status.DEGRADED,
            "we may not see RuntimeClasses, so a box with a `runtime` has grade ns, whatever it is",
            "a ClusterRole that allows get and list of runtimeclasses",
            required=False,
        )
    except HutchError as exc:
        return Layer(name, Status.DEGRADED, f"not checked: {exc}", required=False)
    listed = [
        f"{each.metadata.name} (handler {each.handler}): grade {grade_of(each.handler)}"
        for each in sorted(found, key=lambda each: each.metadata.name)
    ]
    text = ", ".join(listed) or "no RuntimeClass: all boxes have grade ns"
    return Layer(name, Status.ACTIVE, text, required=False)


def judge(found: Look, how: HowBundle) -> list[Layer]:
    """Which layers a box found. A layer that is missing says what was found instead."""
    memory = found.memory
    is_bounded = memory.isdigit() and int(memory) < 4 * LIMITS.memory
    size = f"{int(memory) // MiB} MiB, with the guest's" if is_bounded else "no bound"
    holds_none = set(found.capabilities) == {"0"}
    by = "an image volume" if how == "image" else "an init container that copies it"
    return [
        _layer("box", True, f"it starts, from an image without a program; bundle by {by}"),
        _layer("user", found.uid != "0", f"uid {found.uid}"),
        _layer("capabilities", holds_none, "none" if holds_none else found.capabilities),
        _layer(
            "no new privileges",
            found.no_new_privileges == "1",
            "set-uid programs gain nothing",
            "set-uid programs gain the rights of their owner",
        ),
        _layer("system calls", found.seccomp == "2", "filtered", "not filtered"),
        _layer("root file system", found.read_only, "read-only", "writable"),
        _layer("memory", is_bounded, size),
        _lack_of_memory(found),
        _layer("service account", not found.has_token, "no token", "a token"),
    ]


def _lack_of_memory(found: Look) -> Layer:
    name = "lack of memory"
    if not found.dies_whole:
        return Layer(name, Status.ACTIVE, "ends a program, and the box goes on", required=False)
    return Layer(
        name,
        Status.DEGRADED,
        "ends the whole box, as the kubelet sets memory.oom.group",
        "singleProcessOOMKill: true in the configuration of the kubelets",
        required=False,
    )


def _users(found: Look, pod: Pod) -> Layer:
    name = "user namespaces"
    if found.users[:2] != ["0", "0"]:
        return Layer(name, Status.ACTIVE, "no user id of a box is one of its node", required=False)
    said = (text for text in PodRecord.of(pod).degraded if text.startswith(name))
    why = next(said, "").partition(": ")[2] or "not used: the cluster has changed what we asked for"
    return Layer(
        name,
        Status.DEGRADED,
        why,
        "runc 1.2, containerd 2.0 and Linux 6.3, or later, on each node; and a ClusterRole that "
        "allows to list nodes, or kubernetes.user_namespaces = on",
        required=False,
    )


def sizes(pod: Pod) -> Layer:
    """Whether all of a Pod is bounded, as the cluster keeps it: it may change what we asked for."""
    containers = [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]
    missing = [
        f"container {container.name} has no limit of {what}"
        for container in containers
        for what in ("cpu", "memory", "ephemeral-storage")
        if what not in (container.resources.limits or {})
    ]
    missing += [
        f"volume {volume.name} has no size"
        for volume in pod.spec.volumes or ()
        if volume.empty_dir and not volume.empty_dir.size_limit
    ]
    missing += [
        f"container {container.name} is not ours: something in the cluster adds it to Pods"
        for container in containers
        if container.name not in CONTAINERS
    ]
    if missing:
        return Layer("sizes", Status.DEGRADED, "; ".join(missing), required=False)
    text = "each container and volume has a limit, of the node's disk, too"
    return Layer("sizes", Status.ACTIVE, text)


def _layer(name: str, holds: bool, text: str, otherwise: str = "") -> Layer:
    """`otherwise`: what was found if the layer does not hold; the same text by default."""
    if holds:
        return Layer(name, Status.ACTIVE, text)
    return Layer(name, Status.MISSING, f"the box finds: {otherwise or text}")


async def _network(
    cluster: KubernetesCluster,
    bundle: BundleImage,
    closed: Pod,
    look: Look,
    started: Callable[[Spec], contextlib.AbstractAsyncContextManager[Pod]],
) -> list[Layer]:
    try:
        async with started(Spec(image=bundle.name, limits=LIMITS, relax=("network",))) as opened:
            layers = await enforcement.layers(cluster, bundle, closed, opened)
    except HutchError as exc:
        return [Layer("network", Status.DEGRADED, f"not checked: {exc}", required=False)]
    if look.reaches and layers[0].status is Status.ACTIVE:
        # A cluster may let a Pod reach its own node, whatever a policy says.
        why = "a box reaches the API server, although it reaches no Pod"
        layers.append(Layer("network to nodes", Status.DEGRADED, why, required=False))
    return layers
