"""Images in an engine: built, pulled, listed, removed, taken out and put in.

Contexts and archives are streamed, never held in memory. What a build leaves beside its result
(the images of its stages, and of steps before the one that failed) is removed by `tidy`.
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

from .address import find
from .engine import PATIENCE, DockerEngine, in_our_words, translate
from .resolve import ID, repository_of

CHUNK = 256 * 1024
FOREVER = aiohttp.ClientTimeout(total=None)
OURS = "hutch.image"  # a label
FULL = "no space left on device"

Report = Callable[[str], None]

_STEP = re.compile(r"Step (\d+)/(\d+) : (\S+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # the engine's, of what a step says on stderr
_OWN = re.compile(r" ---> |Removing intermediate container ")  # the engine's words, not a step's
_MADE = re.compile(r" ---> ([0-9a-f]{12,64})\n?")


@dataclass(frozen=True)
class EngineImage:
    """An image that the engine has."""

    id: str
    names: tuple[str, ...]
    size: int  # bytes
    created: float  # since 1970
    labels: Mapping[str, str]


@dataclass
class ImageBuild:
    """One build: what it is made of, and what it has made so far."""

    context: BinaryIO  # a tar, with a Dockerfile
    args: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    network: str = "default"
    made: set[str] = field(default_factory=set)


@asynccontextmanager
async def opened(docker_host: str | None = None) -> AsyncIterator[ImageClient]:
    """The images of the engine that is found, for as long as the `with` lasts."""
    engine = DockerEngine(find(docker_host, os.environ))
    try:
        yield ImageClient(engine)
    finally:
        await engine.close()


class ImageClient:
    def __init__(self, engine: DockerEngine) -> None:
        self.engine = engine

    async def find(self, name: str) -> EngineImage | None:
        repository_of(name)
        try:
            said = await self.engine.image(name)
        except NotFound:
            return None
        labels = (said.get("Config") or {}).get("Labels") or {}
        return EngineImage(said["Id"], tuple(said.get("RepoTags") or ()), said["Size"], 0.0, labels)

    async def ours(self, *, dangling: bool = False) -> list[EngineImage]:
        """Those made of recipes of ours that have a name, or those that have none."""
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
        repository_of(name)
        layers: dict[str, tuple[int, int]] = {}
        told = -1
        async for said in self.engine.pull(name):
            detail = said.get("progressDetail") or {}
            if said.get("status") == "Downloading" and detail.get("total"):
                layers[str(said.get("id"))] = int(detail.get("current") or 0), detail["total"]
                done, total = (sum(column) for column in zip(*layers.values(), strict=True))
                if (tenth := done * 10 // total) > told:
                    told = tenth
                    report(f"pulling {name}: {tenth}0% of {total >> 20} MiB")

    async def build(self, build: ImageBuild, report: Report) -> str:
        """The id of the image. InvalidRequest says which step failed, and its last words."""
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
            async for said in self._posted("build", params, chunks(build.context)):
                text = _COLOUR.sub("", str(said.get("stream") or ""))
                if found := _STEP.match(text):
                    step = f"step {found[1]} of {found[2]} ({found[3]})"
                    report(step)
                elif found := _MADE.fullmatch(text):
                    build.made.add(found[1])
                elif text.strip() and not _OWN.match(text):
                    last = text.strip().splitlines()[-1]
                is_done |= text.startswith("Successfully built")
                id = str((said.get("aux") or {}).get("ID") or id)
        except aiodocker.DockerError as exc:
            if FULL in last + exc.message or exc.status:
                raise translate(exc.status, exc.message, self.engine.address) from None
            why = last if "non-zero code" in exc.message else exc.message
            raise InvalidRequest(f"{step} failed: {why}") from None
        return self._checked(id if is_done else "", "build an image")

    async def import_root(self, tar: AsyncIterator[bytes], change: str = "") -> str:
        """An image, without a name, of a root file system. Its id."""
        id = ""
        with in_our_words(self.engine.address):
            params = {"fromSrc": "-", "changes": change}
            async for said in self._posted("images/create", params, tar):
                id = str(said.get("status") or "")
        return self._checked(id, "import an image")

    def _checked(self, id: str, what: str) -> str:
        if not ID.fullmatch(id):  # it died: what it says just ends
            raise BackendUnavailable(
                f"the Docker engine at {self.engine.address} did not {what} to the end: see its log"
            )
        return id

    async def load(self, tar: AsyncIterator[bytes]) -> None:
        """What `docker save` made."""
        with in_our_words(self.engine.address):
            async for _ in self._posted("images/load", {}, tar):
                pass

    async def export(self, name: str) -> AsyncIterator[bytes]:
        """What `docker save` would make."""
        repository_of(name)
        with in_our_words(self.engine.address):
            async with self.engine.docker.images.export_image(name) as content:
                async for chunk in content.iter_chunked(CHUNK):
                    yield chunk

    async def remove(self, name: str) -> None:
        """NotFound, and Conflict while a container uses it."""
        repository_of(name)
        try:
            with in_our_words(self.engine.address):
                await self.engine.docker.images.delete(name)
        except Conflict as exc:
            if "container" not in str(exc):
                raise
            raise Conflict(f"a box or container uses {name}: close that first") from None

    async def tidy(self, made: Iterable[str]) -> None:
        """Remove those of these images, by their ids or how they begin, that nothing needs.

        The engine may still be at the container of a step that was given up: we wait for that.
        """
        wanted = tuple(id.removeprefix("sha256:") for id in made)
        for _ in range(PATIENCE * 10):
            if not await self._remove_unneeded(wanted):
                return
            await asyncio.sleep(0.1)

    async def _remove_unneeded(self, wanted: tuple[str, ...]) -> bool:
        """Whether a container uses one of them."""
        is_used = False
        for kept in await self.ours(dangling=True):
            if kept.id.removeprefix("sha256:").startswith(wanted):
                try:
                    await self.remove(kept.id)
                except NotFound:
                    pass  # it went with another one
                except Conflict:
                    is_used = True
        return is_used

    async def remove_replaced(self, id: str) -> None:
        """An image whose name now stands for another one. It stays while a box uses it."""
        await self._remove_unneeded((id.removeprefix("sha256:"),))

    async def has_network(self, name: str) -> bool:
        with in_our_words(self.engine.address):
            return any(each["Name"] == name for each in await self.engine.docker.networks.list())

    async def _posted(
        self, path: str, params: Mapping[str, str], body: AsyncIterator[bytes]
    ) -> AsyncIterator[dict[str, Any]]:
        """What the engine says while it takes an archive."""
        asked = self.engine.docker._query(
            path, "POST", params=params, data=body, timeout=FOREVER,
            headers={"Content-Type": "application/x-tar"},
        )  # fmt: skip
        async with asked as response:
            try:
                async for said in json_stream_stream(response):
                    yield said
            finally:
                response.close()  # it stops what nobody waits for


async def chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, CHUNK):
        yield data
