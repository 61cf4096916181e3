"""The body of the create call for a box. Pure: nothing here touches a cluster.

A Pod has two containers. `box` runs the guest in the image of the caller. In `door`, which has
nothing but our bundle, the cluster starts relays: a cluster starts a program under the user of its
container, and a guest knows relays by a user that nothing in its box can have. The containers of a
Pod have one network namespace, which is where they meet, and separate processes.

What a caller names is checked, and goes into a field of its own or into the orders of the guest.
It never becomes the name of an object, or a label.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import hutch
from hutch.backends.base import Spec
from hutch.backends.contained import (
    BUNDLE,
    GUEST_MEMORY,
    GVISOR_MEMORY,
    HOME,
    MAX_ORDERS,
    OWN,
    PRIVATE,
    ROOMS,
    program_limits,
    room_sizes,
    run_size,
)
from hutch.errors import InvalidRequest
from hutch.guest.relay import RELAY
from hutch.types import Grade, MiB

from .claim import ClaimMount, ClaimMounts

BOX_CONTAINER, DOOR_CONTAINER, COPYING_CONTAINER = "box", "door", "bundle"
CONTAINERS = (BOX_CONTAINER, DOOR_CONTAINER, COPYING_CONTAINER)
MANAGED, SCOPE, NETWORK = "app.kubernetes.io/managed-by", "hutch.dev/scope", "hutch.dev/network"
OURS = "hutch"  # what manages our Pods
BOX, DEGRADED, ISOLATION = "hutch.dev/box", "hutch.dev/degraded", "hutch.dev/isolation"
VERSION = "hutch.dev/version"
TARGET, TARGET_CONTAINER = "hutch.dev/target", "target"  # of doctor
CLOSED, OPEN = "none", "open"  # values of the label NETWORK

BUNDLE_SIZE = 512 * MiB  # at most, where it is copied
DOOR_MEMORY = 128 * MiB  # each program that the cluster starts there begins with one of its own
SCRATCH = 64 * MiB  # of a node's disk, for what a box cannot write to
TARGET_MEMORY = 64 * MiB
TARGET_DEADLINE = 600
MAPPED, MAPPED_IDS = 1000, 65_536  # the user in a namespace of user ids, and how many that has
LAST_RESORT = 31 * 86_400  # seconds after which the cluster ends a Pod that nothing else has ended
GRACE = 1  # seconds between SIGTERM, on which guest and door exit, and SIGKILL

# What an image may not tell the loader and the C library of our programs. An image's variables
# cannot be taken away, but each can be made empty.
FOR_LOADER = (
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
    "LD_AUDIT",
    "LD_DEBUG",
    "LD_PROFILE",
    "GLIBC_TUNABLES",
    "LOCPATH",
)
# Variables that a guest was started with, and that are not of the image: beginnings of names.
NOT_OF_IMAGE = (*FOR_LOADER, "HOSTNAME", "KUBERNETES_SERVICE_", "KUBERNETES_PORT")

IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
RUNTIME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_USER = re.compile(r"([0-9]{1,10})(?::([0-9]{1,10}))?", re.ASCII)
_DIGEST = re.compile("sha256:[0-9a-f]{64}")

HowBundle = Literal["image", "copy"]


@dataclass(frozen=True)
class BundleImage:
    """The image with the bundle, and how a Pod gets it: as a volume, or by a copy."""

    name: str
    how: HowBundle
    architecture: str  # of the machine, in Go's words
    command: Callable[..., list[str]]  # the argv that runs a module of the bundle


@dataclass(frozen=True)
class PodUser:
    uid: int
    gid: int
    is_own: bool = False  # no other Pod has this uid
    has_namespace: bool = False  # of user ids: on the node, this is another uid


def scope_label(scope: str) -> str:
    """The value of the label that all boxes of one owner scope have."""
    return hashlib.sha256(scope.encode()).hexdigest()[:32]


def name_of(scope: str, box: str) -> str:
    """The name of the Pod of a box. Two scopes may have boxes of the same name."""
    return "hutch-" + hashlib.sha256(f"{scope}\0{box}".encode()).hexdigest()[:40]


def user_of(spec: Spec, owner: tuple[int, int] | None = None, *, may_map: bool = False) -> PodUser:
    """The user that a box runs as. `owner`: of what is mounted writable.

    `may_map`: whether its Pod can have a namespace of user ids.

    Raises InvalidRequest for a name but `root`, as a cluster does not tell which users an image
    has, and for a user that a box may not be.
    """
    if spec.user == "user":
        if owner and RELAY in owner:
            raise InvalidRequest(f"id {RELAY} is reserved: give the folder to another user")
        if owner:
            return PodUser(owner[0], owner[1] or owner[0])
        if "user" in spec.relax:
            return PodUser(0, 0, has_namespace=may_map)
        uid = MAPPED if may_map else secrets.choice(OWN)
        return PodUser(uid, uid, is_own=True, has_namespace=may_map)
    given = _USER.fullmatch("0" if spec.user == "root" else spec.user)
    if not given:
        raise InvalidRequest(
            f"user {spec.user!r:.100}: a cluster does not tell which users an image has: give a "
            "number, or two as UID:GID"
        )
    uid, gid = int(given[1]), int(given[2] or given[1])
    if max(uid, gid) >= 1 << 31:
        raise InvalidRequest(f"user {spec.user!r}: the largest number is {(1 << 31) - 1}")
    if not uid and "user" not in spec.relax:
        raise InvalidRequest("a box runs as root only with relax user")
    if uid == RELAY:
        raise InvalidRequest(f"uid {RELAY} is reserved: choose another user")
    maps = may_map and max(uid, gid) < MAPPED_IDS
    return PodUser(uid, gid, is_own=maps and uid != 0, has_namespace=maps)


def weaker_user(user: PodUser) -> tuple[str, ...]:
    """What is weaker for a user that other Pods may have, too."""
    if user.is_own:
        return ()
    return (
        *((f"user ids: uid {user.uid} is not the box's own",) if user.uid else ()),
        "limits: processes are not counted, as other boxes may have their user",  # see _orders
    )


def body(
    spec: Spec,
    box: str,
    scope: str,
    user: PodUser,
    bundle: BundleImage,
    isolation: Grade,
    degraded: tuple[str, ...] = (),
    claimed: ClaimMounts | None = None,
) -> dict[str, object]:
    """The body of the create call. `isolation`: what the runtime of the spec gives.

    `claimed`: the mounts of the spec, as `find_mounts` found them. Raises InvalidRequest if a Pod
    cannot do what the spec says.
    """
    claimed = claimed or ClaimMounts()
    mounts = claimed.mounts
    _check(spec, claimed)
    relaxed: set[str] = set(spec.relax)
    orders = json.dumps(_orders(spec, user, isolation, claimed))
    if len(orders) > MAX_ORDERS:
        raise InvalidRequest("the workdir of the box is too long")
    guest = bundle.command("hutch.guest.contained", orders, at=BUNDLE)
    memory = spec.limits.memory + (GUEST_MEMORY if isolation == "ns" else GVISOR_MEMORY)
    disk = SCRATCH + (spec.limits.disk_size if "writable-root" in relaxed else 0)
    rooms = _rooms(spec, {mount.target for mount in mounts})
    is_open = "network" in relaxed
    pod_spec: dict[str, object] = {
        **_placed(bundle),
        "hostname": "box",
        "activeDeadlineSeconds": LAST_RESORT,
        "dnsPolicy": "ClusterFirst" if is_open else "None",
        "securityContext": {
            "runAsNonRoot": bool(user.uid),
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            # No fsGroup: a kubelet would give it all files of a claim, whatever is mounted of it,
            # and folders in the rooms a set-group-id bit, which nobody may set when they come back.
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "initContainers": [*_copying(bundle, user), _door(bundle)],
        "containers": [
            {
                "name": BOX_CONTAINER,
                **_LAST_WORDS,
                "image": _image(spec),
                "imagePullPolicy": "IfNotPresent",
                "workingDir": "/",
                "command": [literal(word) for word in guest],
                "env": _no_loader_variables(),
                "securityContext": _hardening(relaxed),
                "resources": {
                    "requests": _amounts(0.01, 64 * MiB, 0),
                    "limits": _amounts(spec.limits.cpus, memory, disk),
                },
                "volumeMounts": [
                    _bundle_mount(),
                    *({"name": name, "mountPath": path} for name, path, _ in rooms),
                    *(
                        {"name": "etc", "mountPath": f"/etc/{n}", "subPath": n, "readOnly": True}
                        for n in ("passwd", "group")
                    ),
                    *map(_claim_mount, mounts),
                ],
            }
        ],
        "volumes": [
            _bundle_volume(bundle),
            *(
                {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}
                for name, _, size in rooms
            ),
            {"name": "etc", "downwardAPI": {"items": [_item("passwd"), _item("group")]}},
            *([_claim_volume(claimed.claim)] if mounts else ()),
        ],
    }
    if not is_open:
        pod_spec["dnsConfig"] = {"nameservers": ["127.0.0.1"]}
    if spec.runtime:
        pod_spec["runtimeClassName"] = spec.runtime
    if user.has_namespace:
        pod_spec["hostUsers"] = False
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name_of(scope, box),
            "labels": {
                MANAGED: OURS,
                SCOPE: scope_label(scope),
                NETWORK: OPEN if is_open else CLOSED,
            },
            "annotations": {
                BOX: box,
                VERSION: hutch.__version__,
                ISOLATION: isolation,
                DEGRADED: json.dumps(degraded),
                "hutch.dev/passwd": _passwd(user),
                "hutch.dev/group": f"root:x:0:\nuser:x:{user.gid}:\n",
            },
        },
        "spec": pod_spec,
    }


def policies() -> Mapping[str, dict[str, object]]:
    """The NetworkPolicies that boxes need, by name. Nothing ever connects to a box; a box with
    the label says where it may connect to: nowhere.
    """
    closed = {"matchLabels": {MANAGED: OURS, NETWORK: CLOSED}}
    return {
        name: {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": name, "labels": {MANAGED: OURS}},
            "spec": {"podSelector": selector, "policyTypes": [direction]},
        }
        for name, selector, direction in (
            ("hutch-no-ingress", {"matchLabels": {MANAGED: OURS}}, "Ingress"),
            ("hutch-no-egress", closed, "Egress"),
        )
    }


def target_body(
    name: str, owner: tuple[str, str], bundle: BundleImage, code: str
) -> dict[str, object]:
    """The body of the create call for a Pod that runs `code`, and that no policy of ours is about.

    `owner`: name and uid of the Pod with which it ends, if not at its deadline.
    """
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {TARGET: name},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": owner[0], "uid": owner[1]}
            ],
        },
        "spec": {
            **_placed(bundle),
            "activeDeadlineSeconds": TARGET_DEADLINE,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": RELAY,
                "runAsGroup": RELAY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": TARGET_CONTAINER,
                    **_LAST_WORDS,
                    "image": bundle.name,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [literal(word) for word in (*python_of_image(bundle), "-c", code)],
                    "env": [_HOME_OF_PYTHON],
                    "securityContext": _hardening(set()),
                    "resources": {
                        "requests": _amounts(0.01, TARGET_MEMORY, 0),
                        "limits": _amounts(1, TARGET_MEMORY, SCRATCH),
                    },
                }
            ],
        },
    }


def grade_of(handler: str) -> Grade:
    """What separates a box from the kernel of its node, by the handler of its RuntimeClass."""
    if handler.startswith(("runsc", "gvisor")):
        return "gvisor"
    return "vm" if handler.startswith("kata") else "ns"


def digest_of(image_id: str) -> str | None:
    """The digest of an image that a registry has, from what a node says about a container.

    None for an image that was never in a registry: it cannot be pulled by a digest.
    """
    _, is_of_registry, digest = image_id.partition("@")
    return digest if is_of_registry and _DIGEST.fullmatch(digest) else None


def _check(spec: Spec, claimed: ClaimMounts) -> None:
    if [mount.target for mount in spec.mounts] != [mount.target for mount in claimed.mounts]:
        raise InvalidRequest("only folders of a claim can be mounted in a Pod")
    if not IMAGE.fullmatch(spec.image):
        raise InvalidRequest(f"{spec.image!r:.200} is not the name of an image")
    if spec.runtime and not RUNTIME.fullmatch(spec.runtime):
        raise InvalidRequest(f"{spec.runtime!r:.200} is not the name of a RuntimeClass")


def _image(spec: Spec) -> str:
    """The image, by its digest if that was found out before."""
    name, _, digest = spec.image.partition("@")
    if not digest and spec.digest and _DIGEST.fullmatch(spec.digest):
        host, slash, rest = name.rpartition("/")
        return f"{host}{slash}{rest.partition(':')[0]}@{spec.digest}"
    return spec.image


def _orders(spec: Spec, user: PodUser, isolation: Grade, claimed: ClaimMounts) -> dict[str, object]:
    """See guest/contained.py."""
    owners = {mount.target: mount.owner for mount in claimed.mounts}
    gains = "new-privileges" in spec.relax
    return {
        "workdir": spec.workdir,
        "user": spec.user,
        "env": {"HOME": HOME},
        "inherit": list(NOT_OF_IMAGE),
        "rooms": [path for path in ROOMS if path not in owners],
        "owners": owners,
        "private": PRIVATE,
        "limits": program_limits(spec.limits, is_own=user.is_own),
        "meeting": None,
        "filter": not gains and "seccomp" not in spec.relax,
        "gain": gains,
        "foreign": isolation == "gvisor",
    }


def literal(word: str) -> str:
    """A word of a command. A cluster replaces $(NAME), and takes two dollars for one."""
    return word.replace("$", "$$")


# What a container that failed wrote last is part of its state.
_LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}


def _hardening(relaxed: set[str]) -> dict[str, object]:
    """Hardening, of which each part is off only if the caller relaxed it."""
    return {
        "allowPrivilegeEscalation": "new-privileges" in relaxed,
        "readOnlyRootFilesystem": "writable-root" not in relaxed,
        **({} if "capabilities" in relaxed else {"capabilities": {"drop": ["ALL"]}}),
    }


def _placed(bundle: BundleImage) -> dict[str, object]:
    """Where a Pod of ours runs, how it ends, and what it is not given."""
    return {
        "os": {"name": "linux"},
        "nodeSelector": {"kubernetes.io/os": "linux", "kubernetes.io/arch": bundle.architecture},
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
    }


# Python does not look for itself in "/", and only without -I it can be told.
_HOME_OF_PYTHON = {"name": "PYTHONHOME", "value": "/"}


def python_of_image(bundle: BundleImage) -> list[str]:
    """The argv of the Python in the root of the image with the bundle."""
    return [word for word in bundle.command("", at="")[:-2] if word != "-I"]


def _copying(bundle: BundleImage, user: PodUser) -> list[dict[str, object]]:
    """What copies the bundle, where it cannot be a volume: its own Python, from its own root."""
    if bundle.how == "image":
        return []
    # The root of the image is the bundle. It has nothing else, but for what a runtime puts there.
    copy = (
        "import os, shutil\n"
        "for name in ('aliases', 'bin', 'kernel', 'lib', 'site'):\n"
        f"    shutil.copytree(f'/{{name}}', f'{BUNDLE}/{{name}}', symlinks=True)\n"
        "for name in ('filter', 'methods'):\n"
        f"    shutil.copy(f'/{{name}}', f'{BUNDLE}/{{name}}')\n"
    )
    return [
        {
            "name": COPYING_CONTAINER,
            **_LAST_WORDS,
            "image": bundle.name,
            "imagePullPolicy": "IfNotPresent",
            "command": [literal(word) for word in (*python_of_image(bundle), "-c", copy)],
            "env": [_HOME_OF_PYTHON],
            "securityContext": _hardening(set()),
            "resources": {
                "requests": _amounts(0.01, 64 * MiB, 0),
                "limits": _amounts(1, DOOR_MEMORY, BUNDLE_SIZE),
            },
            "volumeMounts": [{"name": "bundle", "mountPath": BUNDLE}],
        }
    ]


def _door(bundle: BundleImage) -> dict[str, object]:
    return {
        "name": DOOR_CONTAINER,
        **_LAST_WORDS,
        "image": bundle.name,
        "imagePullPolicy": "IfNotPresent",
        "restartPolicy": "Always",  # so that it runs beside the box, and ends after it
        "command": bundle.command("hutch.guest.door", at=BUNDLE),
        "env": _no_loader_variables(),
        "securityContext": {
            **_hardening(set()),
            "runAsUser": RELAY,
            "runAsGroup": RELAY,
            "runAsNonRoot": True,
        },
        "resources": {
            "requests": _amounts(0.01, 32 * MiB, 0),
            "limits": _amounts(1, DOOR_MEMORY, SCRATCH),
        },
        "volumeMounts": [_bundle_mount()],
    }


def _bundle_mount() -> dict[str, object]:
    return {"name": "bundle", "mountPath": BUNDLE, "readOnly": True}


def _bundle_volume(bundle: BundleImage) -> dict[str, object]:
    if bundle.how == "image":
        return {
            "name": "bundle",
            "image": {"reference": bundle.name, "pullPolicy": "IfNotPresent"},
        }
    return {"name": "bundle", "emptyDir": {"sizeLimit": str(BUNDLE_SIZE)}}


def _claim_mount(mount: ClaimMount) -> dict[str, object]:
    return {
        "name": "claim",
        "mountPath": mount.target,
        "subPath": mount.sub_path,
        "readOnly": mount.read_only,
    }


def _claim_volume(claim: str) -> dict[str, object]:
    return {"name": "claim", "persistentVolumeClaim": {"claimName": claim}}


def _rooms(spec: Spec, taken: set[str]) -> list[tuple[str, str, int]]:
    """Name, path and size of each folder in memory. They count as memory of the box."""
    sizes = {
        **room_sizes(spec.limits, [path for path in ROOMS if path not in taken]),
        "/run": run_size(spec.limits),
        "/dev/shm": spec.limits.shared_memory,
    }
    return [(f"room-{n}", path, size) for n, (path, size) in enumerate(sizes.items())]


def _amounts(cpus: float, memory: int, disk: int) -> dict[str, str]:
    return {
        "cpu": f"{max(1, round(cpus * 1000))}m",
        "memory": str(memory),
        "ephemeral-storage": str(disk),
    }


def _no_loader_variables() -> list[dict[str, str]]:
    return [{"name": name, "value": ""} for name in FOR_LOADER]


def _passwd(user: PodUser) -> str:
    own = f"user:x:{user.uid}:{user.gid}::{HOME}:/bin/sh\n"
    return own + ("root:x:0:0::/root:/bin/sh\n" if user.uid else "")


def _item(name: str) -> dict[str, object]:
    return {"path": name, "fieldRef": {"fieldPath": f"metadata.annotations['hutch.dev/{name}']"}}
