"""Images in an engine: builds, pulls, lists, removes, exports and imports them.

Contexts and archives are streamed, never held in memory. `tidy` removes what a build leaves beside
its result: the images of its stages, and of the steps before one that failed.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import aiodocker
import aiohttp
from aiodocker.jsonstream import json_stream_stream

from hutch.errors import BackendUnavailable, Conflict, InvalidRequest, NotFound

from .config import find
from .engine import PATIENCE, DockerEngine, in_our_words, translate
from .resolve import ID, repository_of

CHUNK = 256 * 1024
FOREVER = aiohttp.ClientTimeout(total=None)
OURS = "hutch.image"  # a label
FULL = "no space left on device"

Report = Callable[[str], None]

_STEP = re.compile(r"Step (\d+)/(\d+) : (\S+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # added by the engine to what a step writes to stderr
_OWN = re.compile(r" ---> |Removing intermediate container ")  # of the engine, not of a step
_MADE = re.compile(r" ---> ([0-9a-f]{12,64})\n?")


@dataclass(frozen=True)
class EngineImage:
    """An image that the engine has."""

    id: str
    names: tuple[str, ...]
    size: int  # bytes
    created: float  # seconds since 1970; 0 if it was not asked for
    labels: Mapping[str, str]


@dataclass
class ImageBuild:
    """One build: its inputs, and the images that it has made so far."""

    context: BinaryIO  # a tar, with a Dockerfile
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    network: str = "default"
    made: set[str] = field(default_factory=set)  # ids, or how they begin


@asynccontextmanager
async def opened(docker_host: str | None = None) -> AsyncIterator[ImageClient]:
    """A client for the images of the engine, for the duration of the `with`.

    Raises BackendUnavailable if no engine is found.
    """
    engine = DockerEngine(find(docker_host, os.environ))
    try:
        yield ImageClient(engine)
    finally:
        await engine.close()


class ImageClient:
    def __init__(self, engine: DockerEngine) -> None:
        self.engine = engine

    async def find(self, name: str) -> EngineImage | None:
        """None if the engine does not have it. Raises InvalidRequest if the name is invalid."""
        repository_of(name)
        try:
            inspected = await self.engine.image(name)
        except NotFound:
            return None
        labels = (inspected.get("Config") or {}).get("Labels") or {}
        return EngineImage(
            inspected["Id"], tuple(inspected.get("RepoTags") or ()), inspected["Size"], 0.0, labels
        )

    async def ours(self, *, dangling: bool = False) -> list[EngineImage]:
        """The images built from our recipes: those with a name or, if `dangling`, those without."""
        filters = {"label": [OURS], "dangling": [str(dangling).lower()]}
        with in_our_words(self.engine.address):
            found = await self.engine.docker.images.list(filters=filters)
        return [
            EngineImage(
                id=each["Id"],
                names=tuple(name for name in each.get("RepoTags") or () if "<none>" not in name),
                size=each["Size"],
                created=float(each["Created"]),
                labels=each.get("Labels") or {},
            )
            for each in found
        ]

    async def pull(self, name: str, report: Report) -> None:
        """Pull an image, and report every tenth. Raises InvalidRequest if the name is invalid."""
        repository_of(name)
        layers: dict[str, tuple[int, int]] = {}
        told = -1
        async for message in self.engine.pull(name):
            detail = message.get("progressDetail") or {}
            if message.get("status") == "Downloading" and detail.get("total"):
                layers[str(message.get("id"))] = int(detail.get("current") or 0), detail["total"]
                done, total = (sum(column) for column in zip(*layers.values(), strict=True))
                if (tenth := done * 10 // total) > told:
                    told = tenth
                    report(f"pulling {name}: {tenth}0% of {total >> 20} MiB")

    async def build(self, build: ImageBuild, report: Report) -> str:
        """Build an image. Returns its id.

        Raises InvalidRequest with the last line of output if a step fails, and BackendUnavailable
        if the engine stops before the end.
        """
        params = {
            "t": build.tag,
            "rm": "1",
            "forcerm": "1",
            "networkmode": build.network,
            "buildargs": json.dumps(dict(build.args)),
            "labels": json.dumps(dict(build.labels)),
        }
        step, last, id, is_done = "the build", "", "", False
        try:
            async for message in self._posted("build", params, chunks(build.context)):
                text = _COLOUR.sub("", str(message.get("stream") or ""))
                if found := _STEP.match(text):
                    step = f"step {found[1]} of {found[2]} ({found[3]})"
                    report(step)
                elif found := _MADE.fullmatch(text):
                    build.made.add(found[1])
                elif text.strip() and not _OWN.match(text):
                    last = text.strip().splitlines()[-1]
                is_done |= text.startswith("Successfully built")
                id = str((message.get("aux") or {}).get("ID") or id)
        except aiodocker.DockerError as exc:
            if FULL in last + exc.message or exc.status:
                raise translate(exc.status, exc.message, self.engine.address) from None
            why = last if "non-zero code" in exc.message else exc.message
            raise InvalidRequest(f"{step} failed: {why}") from None
        return self._checked(id if is_done else "", "build an image")

    async def import_root(self, tar: AsyncIterator[bytes], change: str = "") -> str:
        """Make an image without a name from a root file system. Returns its id.

        `change`: an instruction as in a Dockerfile.
        """
        id = ""
        with in_our_words(self.engine.address):
            params = {"fromSrc": "-", "changes": change}
            async for message in self._posted("images/create", params, tar):
                id = str(message.get("status") or "")
        return self._checked(id, "import an image")

    def _checked(self, id: str, what: str) -> str:
        if not ID.fullmatch(id):  # the engine died, and its answer just ended
            raise BackendUnavailable(
                f"the Docker engine at {self.engine.address} did not {what} to the end: see its log"
            )
        return id

    async def load(self, tar: AsyncIterator[bytes]) -> None:
        """Load an archive as `docker save` makes it."""
        with in_our_words(self.engine.address):
            async for _ in self._posted("images/load", {}, tar):
                pass

    async def export(self, name: str) -> AsyncIterator[bytes]:
        """Yield an archive as `docker save` makes it."""
        repository_of(name)
        with in_our_words(self.engine.address):
            async with self.engine.docker.images.export_image(name) as content:
                async for chunk in content.iter_chunked(CHUNK):
                    yield chunk

    async def remove(self, name: str) -> None:
        """Raises NotFound if it does not exist, and Conflict while a container uses it."""
        repository_of(name)
        try:
            with in_our_words(self.engine.address):
                await self.engine.docker.images.delete(name)
        except Conflict as exc:
            if "container" not in str(exc):
                raise
            raise Conflict(f"a box or container uses {name}: close that first") from None

    async def tidy(self, made: Iterable[str]) -> None:
        """Remove these images, given by their ids or how they begin, unless something needs them.

        The engine may still be removing the container of a cancelled step, so this tries again.
        """
        wanted = tuple(id.removeprefix("sha256:") for id in made)
        for _ in range(PATIENCE * 10):
            if not await self._remove_unneeded(wanted):
                return
            await asyncio.sleep(0.1)

    async def _remove_unneeded(self, wanted: tuple[str, ...]) -> bool:
        """Returns whether a container still uses one of them."""
        is_used = False
        for kept in await self.ours(dangling=True):
            if kept.id.removeprefix("sha256:").startswith(wanted):
                try:
                    await self.remove(kept.id)
                except NotFound:
                    pass  # it was removed with another one
                except Conflict:
                    is_used = True
        return is_used

    async def remove_replaced(self, id: str) -> None:
        """Remove an image whose name another one has now. It stays while a box uses it."""
        await self._remove_unneeded((id.removeprefix("sha256:"),))

    async def has_network(self, name: str) -> bool:
        with in_our_words(self.engine.address):
            return any(each["Name"] == name for each in await self.engine.docker.networks.list())

    async def _posted(
        self, path: str, params: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> AsyncIterator[dict[str, Any]]:
        """Send an archive to the engine. Yields its messages."""
        asked = self.engine.docker._query(
            path,
            "POST",
            params=params,
            data=body,
            timeout=FOREVER,
            headers={"Content-Type": "application/x-tar"},
        )
        async with asked as response:
            try:
                async for message in json_stream_stream(response):
                    yield message
            finally:
                response.close()  # makes the engine stop, if we did not read to the end


async def chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, CHUNK):
        yield data
