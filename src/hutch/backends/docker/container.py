"""The body of the engine's create call for a box. Pure: nothing here touches a machine.

What a caller names goes into a field of its own (the id of an image, the source and target of a
mount, the value of a label), never into text that is parsed. The container itself gets none of
the image's variables, as they would reach the loader of the guest (LD_PRELOAD). User programs get
them from the guest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from hutch.backends.base import Spec
from hutch.backends.contained import (
    BUNDLE,
    GUEST_MEMORY,
    GVISOR_MEMORY,
    HOME,
    MAX_ORDERS,
    PRIVATE,
    ROOMS,
    program_limits,
    room_sizes,
    run_size,
)
from hutch.backends.linux.folders import MASKED_FILES, MASKED_FOLDERS, READ_ONLY
from hutch.backends.linux.mounts import FoundMount
from hutch.errors import InvalidRequest
from hutch.types import Limits

from .engine import Facts
from .users import BoxUser

MEETING = "/.hutch-host"  # nothing else is mounted there: see `check_mounts`
SOCKET = "sock"

GUEST_PIDS = 64  # for the guest, its helpers and relays
# gVisor's kernel runs in the container's control groups, with many threads for each process.
GVISOR_PIDS, GVISOR_THREADS = 1024, 32
GUEST_FILES = 16_384
MAX_VOLUMES = 16
# An image can have no volume here or below: these paths are ours or the kernel's.
NO_VOLUMES = (BUNDLE, MEETING, PRIVATE, "/etc/passwd", "/etc/group", "/proc", "/sys", "/dev")
SYSTEM = ("/", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")

ConnectorKind = Literal["meeting", "relay"]


@dataclass(frozen=True)
class ContainerImage:
    """What a box needs to know about its image."""

    name: str  # as requested
    id: str
    digest: str
    env: tuple[str, ...] = ()  # "NAME=value"
    user: str = ""
    volumes: tuple[str, ...] = ()
    architecture: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What the container sees of the engine's machine."""

    connector: ConnectorKind
    bundle: str  # a folder there, if absolute; else the name of a volume
    folder: str = ""  # the box's own, there: its socket, passwd and group; "" if it has none
    mounts: tuple[FoundMount, ...] = ()
    is_swept: bool = False  # a server removes the container when it has ended


def connector_for(facts: Facts, runtime: str) -> ConnectorKind:
    """How to connect: a socket can be shared only with a process on our own kernel."""
    is_shared = facts.is_local and facts.grade(runtime) == "ns"
    return "meeting" if is_shared else "relay"


def body(
    spec: Spec,
    image: ContainerImage,
    who: BoxUser,
    facts: Facts,
    around: Surroundings,
    command: Callable[..., list[str]],
    labels: Mapping[str, str],
) -> dict[str, object]:
    """The body of the create call. `command` returns the argv that runs a module of the bundle.

    Raises InvalidRequest if the image has too many variables, or a volume that is not allowed.
    """
    check_volumes(image)
    limits = spec.limits
    taken = {mount.target for mount in around.mounts}
    rooms = {path: mode for path, mode in ROOMS.items() if path not in taken}
    orders = json.dumps(_orders(spec, image, who, facts, around, rooms))
    if len(orders) > MAX_ORDERS:
        raise InvalidRequest(f"image {image.name!r} has too many variables to start a box from")
    return {
        "Image": image.id,
        "User": str(who),
        "WorkingDir": "/",
        "Hostname": "box",
        "Env": _no_env(image, facts),
        "Entrypoint": command("hutch.guest.contained", orders, at=BUNDLE),
        "Cmd": [],
        "Labels": dict(labels),
        "StopSignal": "SIGKILL",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            **_bounds(spec, facts),
            **_hardening(spec),
            "AutoRemove": not (around.is_swept and facts.removes_at_restart),
            "LogConfig": {"Type": "none"},
            "Runtime": facts.runtime(spec.runtime),
            "IpcMode": "private",
            "CgroupnsMode": "private",
            "ShmSize": limits.shared_memory,
            "MaskedPaths": _masked(facts, spec.runtime),
            "ReadonlyPaths": [f"/proc/{name}" for name in READ_ONLY],
            "Tmpfs": _tmpfs(limits, who, rooms, image, taken),
            "Mounts": _mounts(around),
        },
    }


def _orders(
    spec: Spec,
    image: ContainerImage,
    who: BoxUser,
    facts: Facts,
    around: Surroundings,
    rooms: dict[str, int],
) -> dict[str, object]:
    """See guest/contained.py."""
    pairs = (entry.partition("=") for entry in image.env)
    gains = "new-privileges" in spec.relax
    return {
        "workdir": spec.workdir,
        "user": spec.user,
        "env": {**{name: value for name, _, value in pairs if name}, "HOME": HOME},
        "inherit": None,
        "rooms": list(rooms),
        "private": PRIVATE,
        "limits": program_limits(spec.limits, is_own=who.is_own),
        "meeting": f"{MEETING}/{SOCKET}" if around.connector == "meeting" else None,
        "filter": not gains and "seccomp" not in spec.relax,
        "gain": gains,
        "owners": {},  # see check_mounted
        "foreign": facts.grade(spec.runtime) == "gvisor",
    }


def _no_env(image: ContainerImage, facts: Facts) -> list[str]:
    """Unset the image's variables: by a name without a value, or for Podman by an empty value."""
    names = dict.fromkeys(entry.partition("=")[0] for entry in image.env)
    return [f"{name}=" if facts.is_podman else name for name in names if name]


def _bounds(spec: Spec, facts: Facts) -> dict[str, object]:
    limits = spec.limits
    if facts.grade(spec.runtime) == "gvisor":
        memory = limits.memory + GVISOR_MEMORY
        pids = limits.pids * GVISOR_THREADS + GVISOR_PIDS
    else:
        memory, pids = limits.memory + GUEST_MEMORY, limits.pids + GUEST_PIDS
    files = max(limits.open_files, GUEST_FILES)
    return {
        "Memory": memory,
        "MemorySwap": memory,  # memory and swap together, so no swap
        "NanoCpus": int(min(limits.cpus, facts.cpus) * 1e9),
        "PidsLimit": pids,
        "Ulimits": [
            {"Name": "nofile", "Soft": files, "Hard": files},
            # Not 0: the kernel would still run a program that the machine has set for dumps.
            {"Name": "core", "Soft": 1, "Hard": 1},
        ],
    }


def _hardening(spec: Spec) -> dict[str, object]:
    """Hardening, of which each part is off only if the caller relaxed it."""
    relaxed = set(spec.relax)
    return {
        "Privileged": False,
        "ReadonlyRootfs": "writable-root" not in relaxed,
        "CapDrop": [] if "capabilities" in relaxed else ["ALL"],
        "SecurityOpt": [] if "new-privileges" in relaxed else ["no-new-privileges"],
        "NetworkMode": "default" if "network" in relaxed else "none",
    }


def degraded(spec: Spec, facts: Facts, who: BoxUser) -> tuple[str, ...]:
    """What is weaker on this engine, apart from what the caller relaxed."""
    found = [f"limits: {name} cannot be bounded by this engine" for name in facts.unlimited]
    if not facts.has_seccomp and facts.grade(spec.runtime) == "ns":
        found.append("system calls: the engine has no filter of its own")
    if "new-privileges" in spec.relax and "seccomp" not in spec.relax:
        found.append("system calls: the engine's filter only, for ours needs no new privileges")
    if not who.is_own and who.uid:
        found.append(f"user ids: uid {who.uid} is not the box's own")
    if not who.is_own:  # see _orders
        found.append("limits: processes are bounded for the whole box, its guest included")
    if not who.uid and "user" not in spec.relax:  # with a rootless engine: see `_who` in launch.py
        found.append("user ids: the box's user is who runs the engine, outside of it")
    return tuple(found)


def _masked(facts: Facts, runtime: str) -> list[str]:
    # The /sys of gVisor describes its own kernel, not the machine.
    more = () if facts.grade(runtime) == "gvisor" else ("/sys",)
    return [*(f"/proc/{name}" for name in (*MASKED_FILES, *MASKED_FOLDERS)), *more]


def _tmpfs(
    limits: Limits, who: BoxUser, rooms: dict[str, int], image: ContainerImage, taken: set[str]
) -> dict[str, str]:
    """Folders that programs expect to be writable. They count as memory of the box."""
    common = f"rw,nosuid,nodev,uid={who.uid},gid={who.gid}"
    # Otherwise the engine would make a volume for each, on its disk and without a limit.
    volumes = {path: 0o755 for path in image.volumes if path not in taken | {"/run"}}
    wanted = {**volumes, **rooms}
    found = {}
    for path, size in room_sizes(limits, wanted).items():
        inodes = max(16_384, size // 4096)
        mode = wanted[path]
        found[path] = f"{common},exec,size={size},nr_inodes={inodes},mode={mode:o}"
    if "/run" not in taken:
        found["/run"] = f"{common},size={run_size(limits)},nr_inodes=4096,mode=755"
    return found


def check_volumes(image: ContainerImage) -> None:
    """Raises InvalidRequest if the image has a volume that is not allowed, or too many.

    Call it before creating any container of the image. The engine mounts each volume that we do
    not mount ourselves, with the image's files in it: over ours, if it has the same path.
    """
    if len(image.volumes) > MAX_VOLUMES:
        raise InvalidRequest(
            f"image {image.name!r} has {len(image.volumes)} volumes, and a box at most "
            f"{MAX_VOLUMES}: build it without"
        )
    for path in image.volumes:
        if not _is_plain(path) or path in SYSTEM or _is_below(path, NO_VOLUMES):
            raise InvalidRequest(
                f"image {image.name!r} has a volume at {path!r:.200}, which would hide what a box "
                "needs there: build it without"
            )


def _is_plain(path: str) -> bool:
    # Colons, commas and backslashes have a meaning where mount options are parsed.
    is_name = os.path.normpath(path) == path and path.startswith("/") and path[:2] != "//"
    return is_name and path.isprintable() and not set(path) & set(":,\\")


def _is_below(path: str, places: tuple[str, ...]) -> bool:
    return any(f"{path}/".startswith(f"{place}/") for place in places)


def _mounts(around: Surroundings) -> list[dict[str, object]]:
    if around.bundle.startswith("/"):
        found = [_bind(around.bundle, BUNDLE)]
    else:
        found = [
            {
                "Type": "volume",
                "Source": around.bundle,
                "Target": BUNDLE,
                "ReadOnly": True,
                "VolumeOptions": {"NoCopy": True},
            }
        ]
    if around.folder:
        found += [_bind(f"{around.folder}/{name}", f"/etc/{name}") for name in ("passwd", "group")]
        if around.connector == "meeting":
            found.append(_bind(around.folder, MEETING))
    return found + [_bind(m.source, m.target, m.read_only) for m in around.mounts]


def _bind(source: str, target: str, read_only: bool = True) -> dict[str, object]:
    # Not recursive if read-only: other mounts below the source would stay writable.
    options = {"Propagation": "rprivate", "NonRecursive": read_only}
    return {
        "Type": "bind",
        "Source": source,
        "Target": target,
        "ReadOnly": read_only,
        "BindOptions": options,
    }
