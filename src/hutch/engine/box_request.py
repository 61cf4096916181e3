"""Turns the request to open a session into the specification of a box, and starts the box."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hutch import operations as op
from hutch import wire
from hutch.backends.base import Backend, Box, Spec
from hutch.errors import (
    BackendUnavailable,
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
)
from hutch.types import GRADES, RELAXATIONS, Grade, Mount, Packages, Relaxation, Root

from .check import env_of, labels_of, path_of, seconds_of, text_of, whole_of
from .link import Link

HOST = "host"
WORKSPACE = "/workspace"
RUNTIMES: dict[Grade, str] = {"gvisor": "runsc", "vm": "kata"}  # of an engine, by what they give


class ImageSource(Protocol):
    """Where a backend finds images that it does not know itself."""

    async def find(
        self,
        name: str,
        packages: tuple[str, ...],
        preload: tuple[str, ...],
        digest: str | None = None,
    ) -> Packages | Root | None:
        """The image with this name or, if packages are given, the one with those packages.

        `digest`: find what the name stood for, not what it stands for now. A Root is not removed
        while a caller holds the object. None: the backend knows its images itself. Raises NotFound.
        """

    def close(self) -> None: ...


@dataclass(frozen=True)
class BoxRequest:
    spec: Spec
    env: dict[str, str]
    kernel_idle: wire.SetIdle
    min_isolation: Grade
    idle: float | None
    ttl: float | None
    labels: dict[str, str]

    def pinned(self, digest: str | None) -> BoxRequest:
        """The same request, for exactly the image that the first box had."""
        return replace(self, spec=replace(self.spec, digest=digest))


@dataclass(frozen=True)
class StartedBox:
    """A box that is running, and the link to its guest."""

    box: Box
    link: Link
    request: BoxRequest  # what it was made for

    @property
    def alive(self) -> bool:
        return self.link.failure is None

    async def over(self) -> None:
        """Returns when the box is no longer alive."""
        await self.link.over.wait()

    async def close(self) -> None:
        await self.link.close()
        await self.box.kill()


def check_own_mounts(mounts: tuple[Mount, ...], data_folder: str | Path) -> None:
    """Raises InvalidRequest for a mount that would show a box the data folder of a server.

    A box may have the uid of the user who mounts the folder, so it could connect to the sockets
    there; and files there are executed.
    """
    run = os.path.realpath(os.path.join(data_folder, "run"))
    for mount in mounts:
        if "\0" in mount.source:
            continue  # refused by the backend
        source = os.path.realpath(mount.source)
        if os.path.commonpath((source, run)) in (source, run) and os.path.isdir(run):
            raise InvalidRequest(
                f"cannot mount {mount.source}: the data of a Hutch server is in it ({run}). Mount "
                "a folder below it, or set HUTCH_DATA_DIR to a folder elsewhere"
            )


def own_name(image: str, default_image: str) -> str:
    """Our name for an image of Sandkasten's: `python` for `sandbox-runtime:python`.

    A Docker engine may have images with those names, so there they are left as they are.
    """
    family, _, tag = image.partition(":")
    if default_image != HOST or family != "sandbox-runtime" or not tag:
        return image
    return HOST if tag == "base" else tag


async def make_box_request(
    o: op.OpenSession,
    backend: Backend,
    images: ImageSource | None,
    digest: str | None = None,
    workspace: str | None = None,
) -> BoxRequest:
    """Raises InvalidRequest, and NotFound for an unknown image.

    `images`: finds images that the backend does not know itself. `digest`: of the image when the
    session began, whatever its tag stands for now. `workspace`: a folder of the server, by a path
    without links, that is mounted at /workspace.
    """
    if o.min_isolation not in GRADES:
        known = ", ".join(GRADES)
        raise InvalidRequest(f"no isolation grade {o.min_isolation!r}: there are {known}")
    workdir = path_of(o.workdir, "a workdir")
    if not workdir.startswith("/"):
        raise InvalidRequest(f"workdir must be an absolute path, not {workdir!r}")
    if o.on_idle not in ("kill", "hibernate"):
        raise InvalidRequest(f"on_idle is 'kill' or 'hibernate', not {o.on_idle!r}")
    idle = seconds_of(o.idle, "idle")
    if idle is None and o.on_idle != "kill":
        raise InvalidRequest("on_idle needs a time: set idle=SECONDS")
    if o.backend not in ("", backend.name):
        raise InvalidRequest(f"no backend {o.backend!r} here, only {backend.name!r}")
    image = text_of("an image", o.image) or backend.default_image
    image = own_name(image, backend.default_image)
    resolved = None
    if images is not None and (image != HOST or o.packages):
        resolved = await images.find(image, o.packages, o.preload, digest)
    if o.packages and resolved is None:
        raise InvalidRequest(
            f"the {backend.name} backend installs no packages: choose an image that has them"
        )
    give = () if workspace is None else (workspace,)
    spec = Spec(
        image=image,
        limits=o.limits,
        workdir=workdir,
        user=text_of("a user", o.user),
        mounts=(*(Mount(source, WORKSPACE) for source in give), *o.mounts),
        give=give,
        warm=o.warm,
        packages=resolved if isinstance(resolved, Packages) else None,
        root=resolved if isinstance(resolved, Root) else None,
        digest=resolved.digest if isinstance(resolved, Root) else digest,
        runtime=text_of("a runtime", o.runtime),
        relax=relaxations_of(o.relax),
    )
    if (spec.runtime or spec.relax) and not backend.has_runtimes:
        what = f"runtime {spec.runtime!r}" if spec.runtime else f"relax {', '.join(spec.relax)}"
        raise InvalidRequest(f"{what}: only containers have that (backend='docker')")
    ttl = seconds_of(o.ttl_seconds, "ttl_seconds")
    env, labels = env_of(o.env), labels_of(o.labels)
    return BoxRequest(spec, env, kernel_idle_of(o), o.min_isolation, idle, ttl, labels)


def relaxations_of(names: tuple[Relaxation, ...]) -> tuple[Relaxation, ...]:
    """Without doubles, in our order. Raises InvalidRequest for an unknown one."""
    for name in names:
        if name not in RELAXATIONS:
            raise InvalidRequest(f"relax {name!r}: there are {', '.join(RELAXATIONS)}")
    return tuple(name for name in RELAXATIONS if name in names)


def kernel_idle_of(o: op.OpenSession) -> wire.SetIdle:
    """When the data of an idle kernel goes to disk, and how large it must be."""
    return wire.SetIdle(
        seconds_of(o.idle_hibernate, "idle_hibernate"),
        whole_of("hibernate_frame_bytes", o.hibernate_frame_bytes),
        whole_of("hibernate_array_bytes", o.hibernate_array_bytes),
    )


async def start(
    backend: Backend,
    request: BoxRequest,
    id: str | None = None,
    turn: AbstractAsyncContextManager[None] | None = None,
) -> StartedBox:
    """Start a box with this `id`. If that fails, nothing is left of it.

    `turn`: entered once everything is ready for the start, so that no deadline runs before it.
    Raises BackendUnavailable if the isolation is weaker than requested.
    """
    check_grade(backend.name, request.min_isolation, backend.best)
    await backend.prepare(request.spec)
    async with turn or nullcontext():
        return await _start(backend, request, id)


async def _start(backend: Backend, request: BoxRequest, id: str | None) -> StartedBox:
    box = await backend.start(request.spec, id)
    box.root = request.spec.root
    link = None
    try:
        check_grade(backend.name, request.min_isolation, box.isolation)
        link = await Link.open(await box.connect())
        if request.env:
            await link.ask(wire.SetEnv(request.env))
        if request.spec.workdir != Spec.workdir:
            await _make_workdir(link, request.spec.workdir)
    except BaseException:
        if link:
            await link.close()
        await box.kill()
        raise
    return StartedBox(box, link, request)


def check_grade(backend: str, wanted: Grade, given: Grade) -> None:
    """Raises BackendUnavailable if the isolation is weaker than requested."""
    if GRADES.index(given) < GRADES.index(wanted):
        how = "`hutch doctor` says what is missing"
        if backend == "kubernetes":
            how = "with the name of a RuntimeClass as `runtime`, boxes have its grade"
        elif wanted in RUNTIMES:
            how = f"backend docker with runtime {RUNTIMES[wanted]} gives it, if the engine has that"
        raise BackendUnavailable(
            f"isolation {wanted!r} was requested, and the {backend} backend gives {given!r}: {how}"
        )


async def _make_workdir(link: Link, path: str) -> None:
    try:
        await link.ask(wire.Mkdir(path))
    except (NotPermitted, Conflict, NotFound) as exc:
        raise InvalidRequest(
            f"the workdir {path} cannot be made in the box: {exc}. Use one in /workspace, /tmp or "
            "/home/user, or mount a folder there"
        ) from None
