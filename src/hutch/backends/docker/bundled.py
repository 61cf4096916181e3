"""The bundle, and volumes with it for engines that cannot mount our folder.

A volume is filled once, through a container that is created and never started. The last file in
it marks it as complete; the name of the container is the lock on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from hutch.backends.contained import BUNDLE, RuntimeBundle
from hutch.errors import Conflict, NotFound

from . import owner_scope
from .engine import HELPER, DockerEngine, moment

WHOLE = ".whole"
LABEL = "hutch.bundle"
STALE = 900  # seconds after which a process that fills a volume must have died
OLD = 86_400  # seconds
LOOK_AGAIN = 0.2
PIECE = 1 << 20


async def volume_of(engine: DockerEngine, bundle: RuntimeBundle, image: str) -> str:
    """The name of the volume with this bundle. `image`: any that the engine has."""
    name = f"hutch-bundle-{bundle.path.name}"
    await engine.make_volume(name, {LABEL: bundle.path.name})
    container = await _lock(engine, name, image)
    try:
        if not await engine.read(container, f"{BUNDLE}/{WHOLE}", 1):
            await engine.write(container, BUNDLE, pack(bundle.path))
    finally:
        await engine.remove(container)
    return name


async def remove_old(engine: DockerEngine, bundle: RuntimeBundle) -> int:
    """Remove old, unused volumes of other bundles. Returns how many.

    If one is needed again, it is filled again.
    """
    removed, now = 0, await engine.clock()
    for volume in await engine.unused_volumes(LABEL):
        age = now - moment(str(volume.get("CreatedAt")), now)
        if volume["Labels"][LABEL] != bundle.path.name and age > OLD:
            await engine.remove_volume(volume["Name"])
            removed += 1
    return removed


async def _lock(engine: DockerEngine, name: str, image: str) -> str:
    """Create the container that fills the volume, once no other process has one of this name."""
    body: dict[str, object] = {
        "Image": image,
        "Entrypoint": ["/"],
        "Cmd": [],
        "Labels": {HELPER: owner_scope.name_of_process()},
        "HostConfig": {
            "NetworkMode": "none",
            "Mounts": [
                {
                    "Type": "volume",
                    "Source": name,
                    "Target": BUNDLE,
                    "VolumeOptions": {"NoCopy": True},
                }
            ],
        },
    }
    seen, since = "", 0.0
    while True:
        try:
            return await engine.create(body, name)
        except Conflict:
            pass  # another process is filling it
        with contextlib.suppress(NotFound):
            holder = await engine.inspect(name)
            # Stale: the same container for too long, by our clock, not by the engine's.
            if holder["Id"] != seen:
                seen, since = holder["Id"], time.monotonic()
            owner = str((holder["Config"]["Labels"] or {}).get(HELPER))
            if owner_scope.is_dead(owner) or time.monotonic() - since > STALE:
                await engine.remove(seen)
        await asyncio.sleep(LOOK_AGAIN)


async def pack(folder: Path) -> AsyncIterator[bytes]:
    """Yield a tar of the folder in pieces. Its last file marks it as complete."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w|", format=tarfile.GNU_FORMAT) as archive:
        for path in sorted(folder.rglob("*")):
            archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_anybodys)
            if made.tell() > PIECE:
                yield made.getvalue()
                made.seek(0)
                made.truncate()
                await asyncio.sleep(0)
        last = tarfile.TarInfo(WHOLE)
        last.size, last.mode = 1, 0o644
        archive.addfile(last, io.BytesIO(b"1"))
    yield made.getvalue()


def _anybodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make root the owner, instead of the user who made the bundle here."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
