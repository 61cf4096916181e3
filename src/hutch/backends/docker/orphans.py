"""Containers without an owner.

A guest ends its container when its host is gone for good, so few are left: containers that were
created and never started, or that ended and were not removed. A running one is removed only if
its owner is known to be dead, and any only if its name is one that we would give. The same goes
for helper containers: those that read an image's users or fill a volume.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hutch.errors import HutchError

from . import owner_scope
from .config import find
from .engine import HELPER, DockerEngine
from .owner_scope import OwnerScope

BOX, OWNER_SCOPE, IMAGE, DIGEST = "hutch.box", "hutch.yard", "hutch.image", "hutch.digest"
VERSION, WAY, DEGRADED = "hutch.version", "hutch.way", "hutch.degraded"
FOLDER, RUNTIME = "hutch.folder", "hutch.runtime"
PLACE = "hutch.place"  # the data folder of a server, on its machine
SETTLED = 600  # seconds after which a container that was not started never will be
OLD = 7200  # seconds after which no helper is still in use
_HELPERS = re.compile("/hutch-(users|bundle)-[0-9A-Za-z_.-]+")

Removal = tuple[str, Callable[[], Awaitable[None]]]  # what is removed, and how


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
    found = [seen for each in await engine.containers(OWNER_SCOPE) if (seen := _seen(each, now))]
    return sorted(found, key=lambda seen: seen.created_at, reverse=True)


async def remove(engine: DockerEngine) -> list[str]:
    """Remove whatever is abandoned. Returns what was removed: boxes by their ids.

    Raises the first error, but only after trying everything.
    """
    now, failed = await engine.clock(), None
    removed = []
    for name, removal in [*await _containers(engine, now), *await _images(engine, now)]:
        try:
            await removal()
            removed.append(name)
        except HutchError as exc:
            failed = failed or exc
    if failed:
        raise failed
    return removed


async def _containers(engine: DockerEngine, now: float) -> list[Removal]:
    found = [(seen.id, seen.container) for seen in await boxes(engine) if seen.is_abandoned]
    for each in await engine.containers(HELPER):
        names = [name for name in each.get("Names") or () if _HELPERS.fullmatch(name)]
        if names and each.get("State") == "created" and _is_done_with(each, now):
            found.append((names[0][1:], str(each["Id"])))
    return [(name, partial(engine.remove, id)) for name, id in found]


async def _images(engine: DockerEngine, now: float) -> list[Removal]:
    return [
        (str(each["Id"]), partial(engine.remove_image, str(each["Id"])))
        for each in await engine.helper_images()
        if _is_done_with(each, now)
    ]


def _is_done_with(listed: Mapping[str, Any], now: float) -> bool:
    """Whether a helper is not in use any more."""
    owner = str((listed.get("Labels") or {}).get(HELPER))
    return owner_scope.is_dead(owner) or now - float(listed.get("Created") or 0) > OLD


async def remove_quietly(engine: DockerEngine) -> None:
    """Best-effort cleanup; raises none of our errors."""
    try:
        await remove(engine)
    except HutchError:
        pass  # the next process that starts a box tries again


def _seen(listed: Mapping[str, Any], now: float) -> FoundContainer | None:
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
        owner=_owner(owner, place),
        runtime=str(labels.get(RUNTIME, "")),
        is_waiting=owner_scope.is_without_server(owner, place),
        is_abandoned=owner_scope.is_dead(owner) or _is_of_no_use(status, now - created),
    )


def _is_of_no_use(status: str, age: float) -> bool:
    """Whether it will never run again: a box is started once, right after it was created."""
    return status in ("exited", "dead") or (status == "created" and age > SETTLED)


def _owner(name: str, place: str) -> str:
    if owner_scope.is_of_process(name):
        return f"pid {name.split('/')[2]}"
    return f"server {place or name[:8]}"


@asynccontextmanager
async def looking() -> AsyncIterator[DockerEngine]:
    """The engine, for callers without a backend. Raises BackendUnavailable if there is none."""
    engine = DockerEngine(find(None, os.environ))
    try:
        yield engine
    finally:
        await engine.close()
