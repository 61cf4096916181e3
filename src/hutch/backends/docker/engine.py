"""One engine: what it is, what is asked of it, and what it refuses in our words.

The only module, with `images`, that talks to the engine. Names that go into a path of its API are
checked by who calls: ids of ours, ids of the engine's, and references (see resolve.py).
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

from .address import EngineAddress
from .credentials import host_of, login_at, whole

PATIENCE = 60  # seconds for an answer that takes milliseconds, from a machine that may be busy
UNREACHED = 900  # aiodocker's own status, where there was no answer at all
HELPER = "hutch.helper"  # a label: who made what is there for a moment only, and is no box

# Our names for what Docker, Go and the kernel each call otherwise.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True)
class Facts:
    """What an engine is, as far as it matters for a box."""

    version: str
    architecture: str = "amd64"
    runtimes: Mapping[str, str] = field(default_factory=dict)  # name -> program
    default_runtime: str = "runc"
    cpus: int = 1
    cgroup: str = "2"
    is_local: bool = True  # its file system, its processes and its kernel are ours, too
    is_rootless: bool = False  # its root is an ordinary user of its machine
    maps_users: bool = False  # its containers have 65,536 user ids, which are others outside
    is_podman: bool = False
    has_seccomp: bool = True
    live_restore: bool = False
    unlimited: tuple[str, ...] = ()  # what its machine cannot bound

    @property
    def has_few_users(self) -> bool:
        return self.is_rootless or self.maps_users

    @property
    def removes_at_restart(self) -> bool:
        """Whether it ends running containers that are only to be removed once they have ended.

        With live-restore, Docker did so until its version 25.
        """
        major = self.version.partition(".")[0]
        is_old = major.isdigit() and int(major) < 25
        return self.live_restore and is_old and not self.is_podman

    @property
    def names(self) -> list[str]:
        """Of its runtimes, but for those that are others' full names."""
        return sorted(name for name in self.runtimes if not name.startswith("io.containerd."))

    def runtime(self, wanted: str) -> str:
        return wanted or self.default_runtime

    def grade(self, runtime: str) -> Grade:
        """Who stands between the box and the machine's kernel."""
        names = {self.runtime(runtime), os.path.basename(self.runtimes.get(runtime, ""))}
        for name in names:
            short = name.removeprefix("io.containerd.")
            if short.startswith("runsc"):
                return "gvisor"
            if short.startswith("kata"):
                return "vm"
        return "ns"


def facts_of(info: Mapping[str, Any], version: Mapping[str, Any], *, by_socket: bool) -> Facts:
    """From what `/info` and `/version` say; `by_socket`: it was reached by one of this machine."""
    own = os.uname()
    options = " ".join(info.get("SecurityOptions") or ())
    machine = str(info.get("Architecture") or version.get("Arch") or own.machine)
    bounds = {"memory": "MemoryLimit", "swap": "SwapLimit", "processes": "PidsLimit",
              "cpu time": "CpuCfsQuota"}  # fmt: skip
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
        """What time it is there, in seconds since 1970."""
        async with self._asking():
            info = await self.docker.system.info()
        return moment(str(info.get("SystemTime")), time.time())

    def treat_as_remote(self) -> None:
        """Its file system turned out to be another one."""
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
        """NotFound if the engine does not have it."""
        async with self._asking():
            return await self.docker.images.inspect(reference)

    async def images(self) -> list[dict[str, Any]]:
        """All that can be used by a name or a digest."""
        async with self._asking():
            return list(await self.docker.images.list())

    async def pull(self, reference: str) -> AsyncIterator[dict[str, Any]]:
        """What the engine says while it pulls."""
        login = login_at(host_of(reference), os.environ)
        name = whole(reference) if login.auth else reference
        try:
            with in_our_words(self.address):
                async for said in self.docker.images.pull(name, auth=login.auth, stream=True):
                    yield said
        except HutchError as exc:
            if login.hint:
                raise type(exc)(f"{exc} ({login.hint})") from None
            raise

    async def empty_image(self, owner: str) -> str:
        """An image without a single file, and without a name: by its id."""
        params = {"fromSrc": "-", "changes": f"LABEL {HELPER}={owner}"}
        async with self._asking(), self.docker._query(
            "images/create", "POST", params=params, data=bytes(1024),
            headers={"Content-Type": "application/x-tar"},
        ) as response:  # fmt: skip
            said = json.loads((await response.read()).splitlines()[-1])
        if "status" not in said:
            raise StartFailed(f"the Docker engine made no image: {said.get('error')}")
        return str(said["status"])

    async def helper_images(self) -> list[dict[str, Any]]:
        """Those without a name that were made for a moment."""
        filters = json.dumps({"label": [HELPER], "dangling": ["true"]})
        async with self._asking():
            found = await self.docker._query_json("images/json", params={"filters": filters})
        return list(found)

    async def remove_image(self, id: str) -> None:
        """By force, and if it is there."""
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
        """Those with all these labels, running or not."""
        async with self._asking():
            filters = json.dumps({"label": list(labels)})
            found = await self.docker.containers.list(all="true", filters=filters)
        return [each._container for each in found]

    async def remove(self, container: str) -> None:
        """When this returns, it is gone, whoever else was at it."""
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
            except Conflict as exc:  # it is being removed: the engine does that when it has ended
                if time.monotonic() > deadline:
                    raise BackendUnavailable(f"container {container[:12]} stays: {exc}") from None
                await asyncio.sleep(0.02)

    async def wait(self, container: str) -> None:
        """Returns when it has ended, or when the engine has."""
        with contextlib.suppress(HutchError), in_our_words(self.address):
            await self.docker.containers.container(container).wait()

    async def stats(self, container: str) -> dict[str, Any] | None:
        async with self._asking():
            path = f"containers/{container}/stats"
            params = {"stream": "false", "one-shot": "true"}
            found: dict[str, Any] | None = await self.docker._query_json(path, params=params)
            return found

    async def attach(self, container: str) -> Stream:
        """What it says on stderr, from now on."""
        async with self._asking():
            return await _opened(self.docker.containers.container(container).attach(stderr=True))

    async def exec(self, container: str, argv: list[str], user: str) -> Stream:
        """A program in a container, with its standard streams."""
        async with self._asking():
            found = self.docker.containers.container(container)
            program = await found.exec(argv, stdin=True, user=user, workdir="/")
            return await _opened(program.start(detach=False))

    async def output(self, container: str, argv: list[str], user: str) -> bytes:
        """What a program in a container says, to its end."""
        stream, said = await self.exec(container, argv, user), b""
        try:
            while message := await stream.read_out():
                said += message.data
        finally:
            close_stream(stream)
        return said

    # --- files ------------------------------------------------------------------------------

    async def read(self, container: str, path: str, at_most: int) -> bytes:
        """The beginning of a file in a container, which need not run. b"" if there is none."""
        try:
            async with (
                self._asking(),
                self.docker._query(
                    f"containers/{container}/archive", params={"path": path}
                ) as response,
            ):
                try:
                    # Blocks of a header (or three, of a long name) come before the content.
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
        async with self._asking(10 * PATIENCE), self.docker._query(
            f"containers/{container}/archive", "PUT", params={"path": path}, data=tar,
            headers={"Content-Type": "application/x-tar"},
        ) as response:  # fmt: skip
            await response.read()

    # --- volumes ----------------------------------------------------------------------------

    async def make_volume(self, name: str, labels: dict[str, str]) -> None:
        """Nothing happens if it is there."""
        async with self._asking():
            body = {"Name": name, "Labels": labels}
            await self.docker._query_json("volumes/create", "POST", data=body)

    async def unused_volumes(self, label: str) -> list[dict[str, Any]]:
        """Those with this label that no container has."""
        filters = json.dumps({"label": [label], "dangling": ["true"]})
        async with self._asking():
            said = await self.docker._query_json("volumes", params={"filters": filters})
        return list(said.get("Volumes") or ())

    async def remove_volume(self, name: str) -> None:
        """Unless a container has it."""
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
    """At once: the library's own way is a coroutine that waits for nothing."""
    closing = stream.close()
    with contextlib.suppress(StopIteration, AssertionError):  # the latter, if it had ended
        closing.send(None)


async def _take(response: aiohttp.ClientResponse, at_most: int) -> bytes:
    taken = b""
    while len(taken) < at_most and (data := await response.content.read(at_most - len(taken))):
        taken += data
    return taken


@contextlib.contextmanager
def in_our_words(address: EngineAddress) -> Iterator[None]:
    try:
        yield
    except aiodocker.DockerError as exc:
        raise translate(exc.status, exc.message, address) from None
    except (aiohttp.ClientError, OSError, RuntimeError) as exc:  # the last, once we are closed
        raise translate(UNREACHED, str(exc) or "no answer in time", address) from None


def moment(text: str, otherwise: float) -> float:
    """What the engine calls a moment, in seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return otherwise


def translate(status: int, message: str, address: EngineAddress) -> HutchError:
    """What the engine answered, as an error that says who has to act."""
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
                f"the Docker engine at {address} lets us do nothing: {message}"
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
