"""One engine: what it is, the calls that we make, and its errors as ours.

Only this module and `images` talk to the engine. Callers check the names that become part of an
API path: our ids, the engine's ids, and references (see images.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiodocker
import aiohttp
from aiodocker.stream import Stream

from hutch.errors import (
    BackendUnavailable,
    Conflict,
    HutchError,
    NoCapacity,
    NotFound,
    StartFailed,
)
from hutch.types import Grade

from .config import EngineAddress, host_of, login_at, whole

PATIENCE = 60  # seconds for an answer that takes milliseconds, from a machine that may be busy
UNREACHED = 900  # aiodocker's own status if there was no answer at all
HELPER = "hutch.helper"  # a label: the owner of a short-lived container or image, not of a box

# The kernel's names of architectures, and those of Go, which we use.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True)
class Facts:
    """What a box needs to know about its engine."""

    version: str
    architecture: str = "amd64"
    runtimes: Mapping[str, str] = field(default_factory=dict)  # name -> program
    default_runtime: str = "runc"
    cpus: int = 1
    cgroup: str = "2"
    is_local: bool = True  # it shares our file system, processes and kernel
    is_rootless: bool = False  # it runs as an ordinary user of its machine
    maps_users: bool = False  # its containers have 65,536 user ids, mapped to others outside
    is_podman: bool = False
    has_seccomp: bool = True
    live_restore: bool = False
    unlimited: tuple[str, ...] = ()  # what its machine cannot limit

    @property
    def has_few_users(self) -> bool:
        return self.is_rootless or self.maps_users

    @property
    def removes_at_restart(self) -> bool:
        """Whether a restart of the engine removes running containers that have AutoRemove.

        Docker with live-restore did so before version 25.
        """
        major = self.version.partition(".")[0]
        is_old = major.isdigit() and int(major) < 25
        return self.live_restore and is_old and not self.is_podman

    @property
    def names(self) -> list[str]:
        """Its runtimes, without the full names that containerd has for some."""
        return sorted(name for name in self.runtimes if not name.startswith("io.containerd."))

    def runtime(self, wanted: str) -> str:
        return wanted or self.default_runtime

    def grade(self, runtime: str) -> Grade:
        """What separates a box with this runtime from the machine's kernel."""
        names = {self.runtime(runtime), os.path.basename(self.runtimes.get(runtime, ""))}
        for name in names:
            short = name.removeprefix("io.containerd.")
            if short.startswith("runsc"):
                return "gvisor"
            if short.startswith("kata"):
                return "vm"
        return "ns"


def facts_of(info: Mapping[str, Any], version: Mapping[str, Any], *, by_socket: bool) -> Facts:
    """From the answers to `/info` and `/version`. `by_socket`: it was reached by a local socket."""
    own = os.uname()
    options = " ".join(info.get("SecurityOptions") or ())
    machine = str(info.get("Architecture") or version.get("Arch") or own.machine)
    bounds = {
        "memory": "MemoryLimit",
        "swap": "SwapLimit",
        "processes": "PidsLimit",
        "cpu time": "CpuCfsQuota",
    }
    parts = [part.get("Name", "") for part in version.get("Components") or ()]
    return Facts(
        version=str(version.get("Version") or info.get("ServerVersion")),
        architecture=ARCHITECTURES.get(machine, machine),
        runtimes={
            n: str((r or {}).get("path", "")) for n, r in (info.get("Runtimes") or {}).items()
        },
        default_runtime=str(info.get("DefaultRuntime") or "runc"),
        cpus=int(info.get("NCPU") or 1),
        cgroup=str(info.get("CgroupVersion") or "1"),
        # A local socket may be forwarded to another machine, so compare names and kernels.
        is_local=by_socket
        and (info.get("Name"), info.get("KernelVersion")) == (own.nodename, own.release),
        is_rootless="name=rootless" in options,
        maps_users="name=userns" in options,
        is_podman=any("podman" in name.lower() for name in parts),
        has_seccomp="name=seccomp" in options,
        live_restore=bool(info.get("LiveRestoreEnabled")),
        unlimited=tuple(name for name, key in bounds.items() if info.get(key) is False),
    )


class DockerEngine:
    """Belongs to the event loop it was made in. Every method raises errors of ours."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        # No limit: each connection into a box that goes through the engine is one of these.
        if address.path is not None:
            self._connector: aiohttp.BaseConnector = aiohttp.UnixConnector(address.path, limit=0)
            url = "unix://localhost"
        else:
            tls = address.tls.context() if address.tls else False
            self._connector = aiohttp.TCPConnector(ssl=tls, limit=0)
            url = address.url.replace("tcp://", "https://" if address.tls else "http://", 1)
        self.docker = aiodocker.Docker(url, connector=self._connector)
        self._facts: Facts | None = None
        self._is_far = False

    async def close(self) -> None:
        await self.docker.close()
        await self._connector.close()

    async def facts(self, *, fresh: bool = False) -> Facts:
        if self._facts is None or fresh:
            async with self._asking():
                version = await self.docker.version()
                info = await self.docker.system.info()
            is_near = self.address.path is not None and not self._is_far
            self._facts = facts_of(info, version, by_socket=is_near)
        return self._facts

    async def clock(self) -> float:
        """The time of the engine's machine, in seconds since 1970."""
        async with self._asking():
            info = await self.docker.system.info()
        return moment(str(info.get("SystemTime")), time.time())

    def treat_as_remote(self) -> None:
        """Call it when the engine turns out not to share our file system."""
        self._is_far, self._facts = True, None

    @contextlib.asynccontextmanager
    async def _asking(self, patience: int = PATIENCE) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(patience):
                with in_our_words(self.address):
                    yield
        except TimeoutError:
            raise BackendUnavailable(
                f"the Docker engine at {self.address} did not answer in {patience} seconds"
            ) from None

    # --- images -----------------------------------------------------------------------------

    async def image(self, reference: str) -> dict[str, Any]:
        """Inspect an image. Raises NotFound if the engine does not have it."""
        async with self._asking():
            return await self.docker.images.inspect(reference)

    async def images(self) -> list[dict[str, Any]]:
        """All images that can be used by a name or a digest."""
        async with self._asking():
            return list(await self.docker.images.list())

    async def pull(self, reference: str) -> AsyncIterator[dict[str, Any]]:
        """Pull an image. Yields the engine's progress messages."""
        login = login_at(host_of(reference), os.environ)
        # The library takes credentials only with a reference that names the registry.
        name = whole(reference) if login.auth else reference
        try:
            with in_our_words(self.address):
                async for message in self.docker.images.pull(name, auth=login.auth, stream=True):
                    yield message
        except HutchError as exc:
            if login.hint:
                raise type(exc)(f"{exc} ({login.hint})") from None
            raise

    async def empty_image(self, owner: str) -> str:
        """Make an image without files and without a name. Returns its id.

        Raises StartFailed if the engine does not make one.
        """
        params = {"fromSrc": "-", "changes": f"LABEL {HELPER}={owner}"}
        # Zeros alone are the end of a tar, and so an empty one.
        async with (
            self._asking(),
            self.docker._query(
                "images/create",
                "POST",
                params=params,
                data=bytes(1024),
                headers={"Content-Type": "application/x-tar"},
            ) as response,
        ):
            last = json.loads((await response.read()).splitlines()[-1])
        if "status" not in last:
            raise StartFailed(f"the Docker engine made no image: {last.get('error')}")
        return str(last["status"])

    async def helper_images(self) -> list[dict[str, object]]:
        """Our short-lived images, which have no name."""
        filters = json.dumps({"label": [HELPER], "dangling": ["true"]})
        async with self._asking():
            found = await self.docker._query_json("images/json", params={"filters": filters})
        return list(found)

    async def remove_image(self, id: str) -> None:
        """Remove an image by force. Does nothing if it is gone, or if a conflict prevents it."""
        with contextlib.suppress(NotFound, Conflict):
            async with self._asking():
                await self.docker.images.delete(id, force=True)

    # --- containers -------------------------------------------------------------------------

    async def create(self, body: dict[str, Any], name: str) -> str:
        async with self._asking():
            return (await self.docker.containers.create(body, name=name)).id

    async def start(self, container: str) -> None:
        async with self._asking():
            await self.docker.containers.container(container).start()

    async def inspect(self, container: str) -> dict[str, Any]:
        async with self._asking():
            return await self.docker.containers.container(container).show()

    async def containers(self, *labels: str) -> list[dict[str, Any]]:
        """The containers with all these labels, running or not."""
        async with self._asking():
            filters = json.dumps({"label": list(labels)})
            found = await self.docker.containers.list(all="true", filters=filters)
        return [each._container for each in found]

    async def remove(self, container: str) -> None:
        """Remove a container by force, and return when it is gone, even if others remove it too.

        Raises BackendUnavailable if it stays.
        """
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                async with self._asking():
                    await self.docker.containers.container(container).delete(force=True, v=True)
                return
            except NotFound:
                return
            except StartFailed as exc:
                raise BackendUnavailable(f"container {container[:12]} stays: {exc}") from None
            except Conflict as exc:  # it is being removed, perhaps by AutoRemove
                if time.monotonic() > deadline:
                    raise BackendUnavailable(f"container {container[:12]} stays: {exc}") from None
                await asyncio.sleep(0.02)

    async def wait(self, container: str) -> None:
        """Wait until the container, or the engine, has ended."""
        with contextlib.suppress(HutchError), in_our_words(self.address):
            await self.docker.containers.container(container).wait()

    async def stats(self, container: str) -> dict[str, Any] | None:
        async with self._asking():
            path = f"containers/{container}/stats"
            params = {"stream": "false", "one-shot": "true"}
            found: dict[str, object] | None = await self.docker._query_json(path, params=params)
            return found

    async def attach(self, container: str) -> Stream:
        """A stream of what it writes to stderr from now on."""
        async with self._asking():
            return await _opened(self.docker.containers.container(container).attach(stderr=True))

    async def exec(self, container: str, argv: list[str], user: str) -> Stream:
        """Start a program in a container. Returns its standard streams."""
        async with self._asking():
            found = self.docker.containers.container(container)
            program = await found.exec(argv, stdin=True, user=user, workdir="/")
            return await _opened(program.start(detach=False))

    async def output(self, container: str, argv: list[str], user: str) -> bytes:
        """Run a program in a container. Returns all of its output."""
        stream, printed = await self.exec(container, argv, user), b""
        try:
            while message := await stream.read_out():
                printed += message.data
        finally:
            close_stream(stream)
        return printed

    # --- files ------------------------------------------------------------------------------

    async def read(self, container: str, path: str, at_most: int) -> bytes:
        """The beginning of a file in a container, running or not. b"" if there is no such file."""
        try:
            async with (
                self._asking(),
                self.docker._query(
                    f"containers/{container}/archive", params={"path": path}
                ) as response,
            ):
                try:
                    # A tar header (or three, for a long name) comes before the content.
                    head = await _take(response, at_most + 16_384)
                finally:
                    response.close()
        except NotFound:
            return b""
        try:
            with tarfile.open(fileobj=io.BytesIO(head), mode="r|") as archive:
                first = archive.next()
                if first is None or not first.isfile():
                    return b""
                file = archive.extractfile(first)
                return file.read(at_most) if file else b""
        except (tarfile.TarError, OSError, EOFError):
            return b""

    async def write(self, container: str, path: str, tar: AsyncIterator[bytes]) -> None:
        """Unpack an archive into a folder of a container."""
        async with (
            self._asking(10 * PATIENCE),
            self.docker._query(
                f"containers/{container}/archive",
                "PUT",
                params={"path": path},
                data=tar,
                headers={"Content-Type": "application/x-tar"},
            ) as response,
        ):
            await response.read()

    # --- volumes ----------------------------------------------------------------------------

    async def make_volume(self, name: str, labels: dict[str, str]) -> None:
        """Create a volume, unless it exists."""
        async with self._asking():
            body = {"Name": name, "Labels": labels}
            await self.docker._query_json("volumes/create", "POST", data=body)

    async def unused_volumes(self, label: str) -> list[dict[str, Any]]:
        """The volumes with this label that no container uses."""
        filters = json.dumps({"label": [label], "dangling": ["true"]})
        async with self._asking():
            answer = await self.docker._query_json("volumes", params={"filters": filters})
        return list(answer.get("Volumes") or ())

    async def remove_volume(self, name: str) -> None:
        """Remove a volume, unless a container uses it."""
        with contextlib.suppress(NotFound, Conflict):
            async with self._asking(), self.docker._query(f"volumes/{name}", "DELETE"):
                pass


async def _opened(stream: Stream) -> Stream:
    try:
        return await stream.__aenter__()
    except BaseException:
        close_stream(stream)
        raise


def close_stream(stream: Stream) -> None:
    """Close it at once. The library's `close` is a coroutine, but never waits: one step runs it."""
    closing = stream.close()
    # AssertionError: the connection has ended.
    with contextlib.suppress(StopIteration, AssertionError):
        closing.send(None)


async def _take(response: aiohttp.ClientResponse, at_most: int) -> bytes:
    taken = b""
    while len(taken) < at_most and (data := await response.content.read(at_most - len(taken))):
        taken += data
    return taken


@contextlib.contextmanager
def in_our_words(address: EngineAddress) -> Iterator[None]:
    """Raise errors of the library as errors of ours."""
    try:
        yield
    except aiodocker.DockerError as exc:
        raise translate(exc.status, exc.message, address) from None
    except (aiohttp.ClientError, OSError, RuntimeError) as exc:  # the last after `close`
        raise translate(UNREACHED, str(exc) or "no answer in time", address) from None


def moment(text: str, otherwise: float) -> float:
    """A timestamp of the engine, in seconds since 1970; `otherwise` if it is invalid."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise


def translate(status: int, message: str, address: EngineAddress) -> HutchError:
    """The error for an answer of the engine. It tells the reader what to do, if we know that."""
    message = message.strip() or f"status {status}"
    if "no space left on device" in message:
        return NoCapacity(f"the disk of the Docker engine is full: {message}")
    match status:
        case 404:
            return NotFound(message)
        case 409 | 304:
            return Conflict(message)
        case 401 | 403:
            return BackendUnavailable(
                f"the Docker engine at {address} refuses this user: {message}"
            )
        case _ if status == UNREACHED:
            if "Permission denied" in message:
                return BackendUnavailable(
                    f"the Docker engine at {address} is not open to this user: "
                    "join the group of its socket (usermod -aG docker USER, and log in again)"
                )
            # The library wraps the reason in brackets, twice.
            reason = message.rpartition("[")[2].rstrip("]") or message
            return BackendUnavailable(
                f"the Docker engine at {address} does not answer ({reason}): {address.advice}"
            )
    return StartFailed(f"the Docker engine refused: {message}")
