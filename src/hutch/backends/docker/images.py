"""Images in an engine: which one a name stands for, and how they are made, moved and removed.

A name is checked against Docker's grammar before any use: nothing but a reference can become part
of a path of the engine's API. Contexts and archives are streamed, never held in memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import aiodocker
import aiohttp
from aiodocker.jsonstream import json_stream_stream

from hutch.docker_logins import DEFAULT_HOST
from hutch.errors import BackendUnavailable, Conflict, InvalidRequest, NotFound, StartFailed

from .config import find, whole
from .container import ContainerImage
from .engine import ARCHITECTURES, PATIENCE, DockerEngine, Facts, in_our_words, translate

CHUNK = 256 * 1024
FOREVER = aiohttp.ClientTimeout(total=None)
OURS = "hutch.image"  # a label
FULL = "no space left on device"

Report = Callable[[str], None]

_STEP = re.compile(r"Step (\d+)/(\d+) : (\S+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")  # added by the engine to what a step writes to stderr
_OWN = re.compile(r" ---> |Removing intermediate container ")  # of the engine, not of a step
_MADE = re.compile(r" ---> ([0-9a-f]{12,64})\n?")

# Our own images. They are built, never pulled: otherwise, the owner of that name at a public
# registry would supply the default image.
NAMES = ("base", "small", "python", "data", "node")
PREFIX = "hutch/"

FRESH = 1.0  # seconds for which a resolved name is cached

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
REFERENCE = re.compile(
    rf"(?P<repository>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)
ID = re.compile(r"sha256:[0-9a-f]{64}")


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
        progress = _Download()
        reported = -1
        async for message in self.engine.pull(name):
            if progress.add(message):
                done, total = progress.size
                if (tenth := done * 10 // total) > reported:
                    reported = tenth
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
        if not ID.fullmatch(id):  # the engine died in the middle of its answer
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

        A build leaves images beside its result: of its stages, and of steps before one that failed.
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
        request = self.engine.docker._query(
            path,
            "POST",
            params=params,
            data=body,
            timeout=FOREVER,
            headers={"Content-Type": "application/x-tar"},
        )
        async with request as response:
            try:
                async for message in json_stream_stream(response):
                    yield message
            finally:
                response.close()  # makes the engine stop, if we did not read to the end


async def chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(file.read, CHUNK):
        yield data


# --- our own images -------------------------------------------------------------------------


def is_own(reference: str) -> bool:
    return whole(reference).startswith(f"{DEFAULT_HOST}/{PREFIX}")


def build_command(name: str) -> str:
    """The command that builds one."""
    return f"hutch image build --backend docker {name}"


def missing(reference: str) -> str:
    """The message for one that the engine does not have."""
    name = whole(reference).removeprefix(f"{DEFAULT_HOST}/{PREFIX}").removesuffix(":latest")
    if name in NAMES:
        return f"the engine has no image {PREFIX}{name}: build it with `{build_command(name)}`"
    return (
        f"the engine has no image {reference!r}, and what begins with {PREFIX} is not pulled: "
        f"`{build_command('NAME')}` makes {', '.join(NAMES)}; give an image of yours another name"
    )


# --- the image that a name stands for -------------------------------------------------------


class Resolver:
    """Resolves names for one engine."""

    def __init__(self, engine: DockerEngine) -> None:
        self._engine = engine
        self._known: dict[tuple[str, str | None], tuple[float, ContainerImage]] = {}

    async def image(self, name: str, digest: str | None) -> ContainerImage:
        """The image with this name, or with this digest, whatever the name stands for now.

        Raises NotFound if the engine neither has it nor can pull it, InvalidRequest if the name or
        digest is invalid or the image is for another architecture, and BackendUnavailable if the
        engine cannot run our guest.
        """
        key = name, digest
        found_at, found = self._known.get(key, (0.0, None))
        if found and time.monotonic() - found_at < FRESH:
            return found
        self._known = {k: v for k, v in self._known.items() if time.monotonic() - v[0] < FRESH}
        found = image_of(name, await self._find(name, digest))
        check_architecture(found, await self._engine.facts())
        self._known[key] = time.monotonic(), found
        return found

    async def _find(self, name: str, digest: str | None) -> dict[str, object]:
        repository = repository_of(name)
        if digest is None:
            return await self._inspect_or_pull(name)
        if not ID.fullmatch(digest):
            raise InvalidRequest(f"invalid digest of an image: {digest!r}")
        # The digest is the engine's own id of the image, or that of a registry.
        try:
            return await self._engine.image(digest)
        except NotFound:
            pass
        for each in await self._engine.images():
            if any(known == digest for _, known in _repo_digests(each)):
                return await self._engine.image(str(each["Id"]))
        if not repository or is_own(repository):
            raise NotFound(f"image {name!r} as it was ({digest[:19]}) is gone from the engine")
        return await self._inspect_or_pull(f"{repository}@{digest}")

    async def _inspect_or_pull(self, reference: str) -> dict[str, object]:
        try:
            return await self._engine.image(reference)
        except NotFound:
            if not repository_of(reference):  # an id of the engine, which no registry knows
                raise
        await self._pull(reference)
        return await self._engine.image(reference)

    async def _pull(self, reference: str) -> None:
        if is_own(reference):
            raise NotFound(missing(reference))
        progress, is_terminal = _Download(), os.isatty(2)
        try:
            async for message in self._engine.pull(reference):
                if is_terminal and progress.add(message):
                    done, total = progress.size
                    _show(f"\r\x1b[Khutch: {reference}: {done >> 20} of {total >> 20} MiB")
        except (NotFound, StartFailed, BackendUnavailable) as exc:
            reason = str(exc).removeprefix("the Docker engine refused: ")
            raise NotFound(
                f"the Docker engine has no image {reference!r} and could not pull it: {reason}. "
                f"{await self._advice(reference)}"
            ) from None
        finally:
            if progress.layers:
                _show("\r\x1b[K")

    async def _advice(self, reference: str) -> str:
        """What to try instead. Other backends call our images by the last part of their name."""
        name = reference.removesuffix(":latest")
        if "/" not in name and "@" not in name:
            try:
                await self._engine.image(PREFIX + name)
                return f"Did you mean {PREFIX}{name}?"
            except NotFound:
                if name in NAMES:
                    return f"Did you mean {PREFIX}{name}? `{build_command(name)}` makes it"
        return "`docker pull` may say more"


def repository_of(name: str) -> str:
    """A reference without its tag and digest; "" if it is the id of an image.

    Raises InvalidRequest if it is neither.
    """
    if ID.fullmatch(name):
        return ""
    found = REFERENCE.fullmatch(name)
    if not found or len(name) > 512:
        raise InvalidRequest(
            f"no image can be called {name!r}: names are like node:22-slim or "
            "registry.example:5000/team/image:tag"
        )
    return found["repository"]


def image_of(name: str, inspected: dict[str, Any]) -> ContainerImage:
    """From the engine's description of an image."""
    config = inspected.get("Config") or {}
    return ContainerImage(
        name=name,
        id=str(inspected["Id"]),
        digest=digest_of(name, inspected),
        env=tuple(map(str, config.get("Env") or ())),
        user=str(config.get("User") or ""),
        volumes=tuple(map(str, config.get("Volumes") or ())),
        architecture=str(inspected.get("Architecture") or ""),
    )


def digest_of(name: str, inspected: dict[str, object]) -> str:
    """The digest with which exactly this image is found again.

    It is that of the registry in `name`, if the image is known there; otherwise the engine's own
    id. The image may have been pushed under other names, but their digests do not belong to this
    one.
    """
    repository = repository_of(name)
    for where, digest in _repo_digests(inspected):
        if repository and whole(where) == whole(repository):
            return digest
    return str(inspected["Id"])


def _repo_digests(inspected: dict[str, Any]) -> list[tuple[str, str]]:
    """(repository, digest) for each place in which the engine knows the image to be."""
    listed = [str(each).rpartition("@") for each in inspected.get("RepoDigests") or ()]
    return [(where, digest) for where, _, digest in listed if ID.fullmatch(digest)]


def check_architecture(image: ContainerImage, facts: Facts) -> None:
    """Check that our guest and the image can run on the engine's machine.

    Raises BackendUnavailable if the guest cannot, and InvalidRequest if the image cannot.
    """
    own = ARCHITECTURES.get(os.uname().machine, os.uname().machine)
    if facts.architecture != own:
        raise BackendUnavailable(
            f"the Docker engine is on {facts.architecture} and this machine is {own}: the guest "
            "that would run there cannot"
        )
    if image.architecture not in ("", facts.architecture):
        raise InvalidRequest(
            f"image {image.name!r} is for {image.architecture}, and the Docker engine is on "
            f"{facts.architecture}: pull it for that (docker pull --platform)"
        )


class _Download:
    """How much of an image has been downloaded, from the engine's messages."""

    def __init__(self) -> None:
        self.layers: dict[str, tuple[int, int]] = {}  # id -> bytes so far, and in all

    def add(self, message: dict[str, Any]) -> bool:
        """Returns whether `size` may have changed."""
        detail = message.get("progressDetail") or {}
        if message.get("status") != "Downloading" or not detail.get("total"):
            return False
        self.layers[str(message.get("id"))] = int(detail.get("current") or 0), detail["total"]
        return True

    @property
    def size(self) -> tuple[int, int]:
        """Bytes so far, and in all."""
        done, total = (sum(column) for column in zip(*self.layers.values(), strict=True))
        return done, total


def _show(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass  # the terminal is gone
