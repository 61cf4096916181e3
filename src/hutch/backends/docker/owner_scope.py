"""Which process or server owns a container, and the removal of those whose owner is gone.

An engine may hold the boxes of many. An *owner scope* is all boxes of one process, or of one
server. That of a process is named after the process, so that a box shows whether its owner still
runs; that of a server has a name that is kept in the folder of the server.

A guest ends its container when its host is gone for good, so few are left: containers that were
created and never started, or that ended and were not removed. A running one is removed only if
its owner is known to be dead, and any only if its name is one that we would give. The same goes
for helper containers: those that read an image's users or fill a volume.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hutch import pidfile
from hutch.backends.linux.folders import kept_name
from hutch.backends.linux.temporary import new_folder, sweep_folders, world
from hutch.errors import BoxLost, HutchError

from .engine import HELPER, DockerEngine

NAME_FILE = "docker.yard"
PARTS = 5  # of the name of a process's scope
BOXES = "docker"  # in a lasting folder: one folder for each box

# Labels of the container of a box.
BOX, OWNER_SCOPE, IMAGE, DIGEST = "hutch.box", "hutch.yard", "hutch.image", "hutch.digest"
VERSION, CONNECTOR, DEGRADED = "hutch.version", "hutch.way", "hutch.degraded"
FOLDER, RUNTIME = "hutch.folder", "hutch.runtime"
PLACE = "hutch.place"  # the data folder of a server, on its machine

SETTLED = 600  # seconds after which a container that was not started never will be
OLD = 7200  # seconds after which no helper is still in use
_HELPERS = re.compile("/hutch-(users|bundle)-[0-9A-Za-z_.-]+")


@dataclass(frozen=True)
class OwnerScope:
    id: str
    boxes: str  # the folder in which each box has its own
    swept: int = 0  # folders of dead processes that were removed on the way

    def name_of(self, box: str) -> str:
        """What its container is called. Two scopes may have boxes of the same name."""
        return f"hutch-{hashlib.sha256(self.id.encode()).hexdigest()[:8]}-{box}"

    def make(self, box: str) -> str:
        """A new folder for a box, which the box's user may look into."""
        path = os.path.join(self.boxes, f"{box}-{os.urandom(4).hex()}")
        os.mkdir(path)
        os.chmod(path, 0o755)  # regardless of our umask
        return path

    def place(self, name: str) -> str:
        """The folder of a box, by its name. Raises BoxLost if the name is invalid."""
        if not re.fullmatch("[0-9a-z-]{1,80}", name):
            raise BoxLost(f"there is no folder {name!r} of a box")
        return os.path.join(self.boxes, name)

    def places(self) -> list[str]:
        """The folders of boxes that are there."""
        try:
            return [entry.path for entry in os.scandir(self.boxes)]
        except FileNotFoundError:  # removed by something that cleans up
            return []

    def clear(self, path: str) -> None:
        if path:
            shutil.rmtree(path, ignore_errors=True)


def of_process() -> OwnerScope:
    """The scope of this process, which ends with it."""
    swept = len(sweep_folders())
    return OwnerScope(name_of_process(), new_folder(), swept)


def lasting(folder: str) -> OwnerScope:
    """The scope of a folder, which is made if it is missing.

    Raises BackendUnavailable if the folder is not ours alone, or if the name in it is damaged.
    """
    id, boxes = kept_name(folder, NAME_FILE), os.path.join(folder, BOXES)
    with contextlib.suppress(FileExistsError):
        os.mkdir(boxes, 0o700)
    return OwnerScope(id, boxes)


# --- processes --------------------------------------------------------------------------


def name_of_process() -> str:
    pid = os.getpid()
    # Several backends may be in one process, and none knows the boxes of another.
    return f"{pidfile.boot()}/{world()}/{pid}/{pidfile.began(pid) or 0}/{secrets.token_hex(4)}"


def is_dead(scope: str) -> bool:
    """Whether it belongs to a process of this machine that has ended.

    False if we cannot know: for a process of another machine, or of another pid namespace.
    """
    parts = scope.split("/")
    if len(parts) != PARTS or not (parts[2].isdigit() and parts[3].isdigit()):
        return False
    boot, its_world, pid, began, _ = parts
    if (boot, its_world) != (pidfile.boot(), world()):
        return False
    return not pidfile.PidFile(int(pid), int(began), boot).is_alive


def is_of_process(scope: str) -> bool:
    return scope.count("/") == PARTS - 1


def is_without_server(scope: str, place: str) -> bool:
    """Whether it belongs to a data folder of this machine that no server uses at the moment."""
    try:
        with open(os.path.join(place, "run", NAME_FILE)) as file:
            is_here = place.startswith("/") and file.read(64).strip() == scope
    except (OSError, ValueError):
        return False
    return is_here and pidfile.server_of(Path(place)) is None


# --- containers -----------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundContainer:
    """A container of ours, of any owner."""

    id: str  # of the box
    container: str
    image: str
    status: str  # "running", "created", "exited"
    created_at: float
    owner: str  # "pid 123", or "server" and its data folder
    is_abandoned: bool
    runtime: str = ""
    is_waiting: bool = False  # for its server, which does not run


async def boxes(engine: DockerEngine) -> list[FoundContainer]:
    """Every box on this engine, the newest first."""
    now = await engine.clock()
    found = [
        container
        for listed in await engine.containers(OWNER_SCOPE)
        if (container := _container_of(listed, now))
    ]
    return sorted(found, key=lambda container: container.created_at, reverse=True)


async def remove_abandoned(engine: DockerEngine) -> list[str]:
    """Remove all that is abandoned. Returns what was removed: boxes by their ids.

    Raises the first error, but only after trying everything.
    """
    now = await engine.clock()
    abandoned = [box for box in await boxes(engine) if box.is_abandoned]
    doomed: list[tuple[str, Callable[[str], Awaitable[None]], str]] = [
        (box.id, engine.remove, box.container) for box in abandoned
    ]
    for listed in await engine.containers(HELPER):
        names = [name for name in listed.get("Names") or () if _HELPERS.fullmatch(name)]
        if names and listed.get("State") == "created" and _is_done_with(listed, now):
            doomed.append((names[0][1:], engine.remove, str(listed["Id"])))
    for image in await engine.helper_images():
        if _is_done_with(image, now):
            doomed.append((str(image["Id"]), engine.remove_image, str(image["Id"])))
    removed, failure = [], None
    for name, remove, id in doomed:
        try:
            await remove(id)
            removed.append(name)
        except HutchError as exc:
            failure = failure or exc
    if failure:
        raise failure
    return removed


def _is_done_with(listed: Mapping[str, Any], now: float) -> bool:
    """Whether a helper is not in use any more."""
    owner = str((listed.get("Labels") or {}).get(HELPER))
    return is_dead(owner) or now - float(listed.get("Created") or 0) > OLD


async def remove_abandoned_quietly(engine: DockerEngine) -> None:
    """Best-effort cleanup; raises none of our errors."""
    try:
        await remove_abandoned(engine)
    except HutchError:
        pass  # the next process that starts a box tries again


def _container_of(listed: Mapping[str, Any], now: float) -> FoundContainer | None:
    labels = listed.get("Labels") or {}
    box, owner = str(labels.get(BOX, "")), str(labels.get(OWNER_SCOPE, ""))
    # An image may set any label, but a container gets such a name only from us.
    if f"/{OwnerScope(owner, '').name_of(box)}" not in (listed.get("Names") or ()):
        return None
    created, place = float(listed.get("Created") or 0), str(labels.get(PLACE, ""))
    status = str(listed.get("State") or "")
    return FoundContainer(
        id=box,
        container=str(listed["Id"]),
        image=str(labels.get(IMAGE, "")),
        status=status,
        created_at=created,
        owner=_owner_text(owner, place),
        runtime=str(labels.get(RUNTIME, "")),
        is_waiting=is_without_server(owner, place),
        is_abandoned=is_dead(owner) or _is_of_no_use(status, now - created),
    )


def _is_of_no_use(status: str, age: float) -> bool:
    """Whether it will never run again: a box is started once, right after it was created."""
    return status in ("exited", "dead") or (status == "created" and age > SETTLED)


def _owner_text(name: str, place: str) -> str:
    if is_of_process(name):
        return f"pid {name.split('/')[2]}"
    return f"server {place or name[:8]}"
