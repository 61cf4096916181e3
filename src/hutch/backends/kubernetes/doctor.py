"""Checks a cluster, and a real box from the inside, and suggests fixes for what is missing.

The box has the image with our bundle, as a guest needs nothing from an image. What counts is what
we find, not what we asked the cluster for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from hutch.backends.base import Box, Spec
from hutch.backends.contained import BUNDLE
from hutch.errors import BackendUnavailable, HutchError, NotFound
from hutch.types import Grade, Layer, Limits, MiB, Report, Status

from .cluster import KubernetesCluster
from .pod import BOX_CONTAINER, BundleImage, HowBundle, policies

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


Start = Callable[[Spec], Awaitable[Box]]


def unreachable(name: str, error: BackendUnavailable) -> Report:
    return Report(name, "none", (Layer("cluster", Status.MISSING, str(error)),))


async def report(
    name: str,
    cluster: KubernetesCluster,
    version: str,
    bundle: BundleImage,
    start: Start,
    pod_of: Callable[[Box], str],
    claim: str = "",
) -> Report:
    """Check the cluster. `start` starts a box, and `pod_of` names its Pod.

    `claim`: the PersistentVolumeClaim with the workspaces, if there is one.
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
    ]
    if claim:
        layers.append(await _workspaces(cluster, claim))

    async def look(spec: Spec) -> Look:
        box = await start(spec)
        try:
            # The last two are `-m` and the module.
            argv = [*bundle.command("", at=BUNDLE)[:-2], "-c", LOOK]
            async with asyncio.timeout(PATIENCE):
                printed = await cluster.output(pod_of(box), BOX_CONTAINER, argv)
            return msgspec.json.decode(printed, type=Look)
        except (msgspec.DecodeError, ValueError):
            raise BackendUnavailable(f"the box printed {printed[:200]!r}") from None
        except TimeoutError:
            raise BackendUnavailable(f"the box did not answer in {PATIENCE} seconds") from None
        finally:
            await box.kill()

    spec = Spec(image=bundle.name, limits=LIMITS)
    try:
        closed = await look(spec)
        layers += judge(closed, bundle.how)
        layers.append(await _network(look, closed, bundle.name))
    except HutchError as exc:
        layers.append(Layer("box", Status.MISSING, str(exc)))
    layers.append(
        Layer(
            "user namespaces",
            Status.DEGRADED,
            "not used yet: a user id in a box is the same one on the node",
            required=False,
        )
    )
    whole = all(layer.status is not Status.MISSING for layer in layers if layer.required)
    grade: Grade = "ns" if whole else "none"
    return Report(name, grade, tuple(layers))


async def _has_policies(cluster: KubernetesCluster) -> bool:
    try:
        return all([await cluster.has_policy(name) for name in policies()])
    except HutchError:  # we may not see them
        return False


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
        _layer("service account", not found.has_token, "no token", "a token"),
    ]


def _layer(name: str, holds: bool, text: str, otherwise: str = "") -> Layer:
    """`otherwise`: what was found if the layer does not hold; the same text by default."""
    if holds:
        return Layer(name, Status.ACTIVE, text)
    return Layer(name, Status.MISSING, f"the box finds: {otherwise or text}")


async def _network(look: Callable[[Spec], Awaitable[Look]], closed: Look, image: str) -> Layer:
    """Whether the cluster enforces NetworkPolicy: a box that may connect does, and others do not.

    The object of a policy has no status, so only trying it tells.
    """
    if closed.reaches:
        return Layer(
            "network",
            Status.MISSING,
            "a box reaches the API server: the cluster does not enforce NetworkPolicy",
            "a network plugin that enforces it, such as Calico or Cilium",
        )
    try:
        opened = await look(Spec(image=image, limits=LIMITS, relax=("network",)))
    except HutchError as exc:
        return Layer("network", Status.DEGRADED, f"not checked: {exc}", required=False)
    if opened.reaches:
        return Layer("network", Status.ACTIVE, "none: NetworkPolicy is enforced")
    return Layer(
        "network",
        Status.DEGRADED,
        "not checked: a box that may connect reaches nothing either, so this tells nothing",
        required=False,
    )
