"""What the boxes of a session are like, worked out from what was asked for; and making one."""

from __future__ import annotations

from dataclasses import dataclass
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
from hutch.types import GRADES, Grade, Packages

from .check import env_of, labels_of, path_of, seconds_of, text_of, whole_of
from .link import Link

HOST = "host"


class Shelf(Protocol):
    """Images that are made of Python packages."""

    async def find(
        self, name: str, packages: tuple[str, ...], preload: tuple[str, ...]
    ) -> Packages:
        """By name; or, if packages are given, the one that is made of those. Raises NotFound."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Order:
    spec: Spec
    env: dict[str, str]
    gentle: wire.SetIdle
    min_isolation: Grade
    idle: float | None
    ttl: float | None
    labels: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """A box that can be talked to."""

    box: Box
    link: Link
    order: Order  # what it was made for

    @property
    def alive(self) -> bool:
        return self.link.failure is None

    async def over(self) -> None:
        """Returns when it is not alive any more."""
        await self.link.over.wait()

    async def close(self) -> None:
        await self.link.close()
        await self.box.kill()


async def order_of(o: op.OpenSession, shelf: Shelf | None) -> Order:
    """Raises InvalidRequest, and NotFound for an image that nobody knows."""
    if o.min_isolation not in GRADES:
        known = ", ".join(GRADES)
        raise InvalidRequest(f"no isolation grade {o.min_isolation!r}: there are {known}")
    if not text_of("a workdir", o.workdir).startswith("/"):
        raise InvalidRequest(f"workdir must be an absolute path, not {o.workdir!r}")
    if o.on_idle not in ("kill", "hibernate"):
        raise InvalidRequest(f"on_idle is 'kill' or 'hibernate', not {o.on_idle!r}")
    idle = seconds_of(o.idle, "idle")
    if idle is None and o.on_idle != "kill":
        raise InvalidRequest("on_idle needs to know when: idle=SECONDS")
    image = text_of("an image", o.image) or HOST
    packages = None
    if shelf is not None and (image != HOST or o.packages):
        packages = await shelf.find(image, o.packages, o.preload)
    spec = Spec(
        image=image, limits=o.limits, workdir=path_of(o.workdir), user=text_of("a user", o.user),
        mounts=o.mounts, warm=o.warm, packages=packages,
    )  # fmt: skip
    ttl = seconds_of(o.ttl_seconds, "ttl_seconds")
    env, labels = env_of(o.env), labels_of(o.labels)
    return Order(spec, env, gentle_of(o), o.min_isolation, idle, ttl, labels)


def gentle_of(o: op.OpenSession) -> wire.SetIdle:
    """When a kernel's data goes to disk, and how large it must be."""
    return wire.SetIdle(
        seconds_of(o.idle_hibernate, "idle_hibernate"),
        whole_of("hibernate_frame_bytes", o.hibernate_frame_bytes),
        whole_of("hibernate_array_bytes", o.hibernate_array_bytes),
    )


async def start(backend: Backend, order: Order, id: str | None = None) -> Ready:
    """A box that can be talked to, and is called `id`. If it fails, nothing is left of it."""
    check_grade(backend.name, order.min_isolation, "ns")
    box = await backend.start(order.spec, id)
    link = None
    try:
        check_grade(backend.name, order.min_isolation, box.isolation)
        link = await Link.open(await box.connect())
        if order.env:
            await link.ask(wire.SetEnv(order.env))
        if order.spec.workdir != Spec.workdir:
            await _make_workdir(link, order.spec.workdir)
    except BaseException:
        if link:
            await link.close()
        await box.kill()
        raise
    return Ready(box, link, order)


def check_grade(backend: str, wanted: Grade, given: Grade) -> None:
    if GRADES.index(given) < GRADES.index(wanted):
        raise BackendUnavailable(
            f"isolation {wanted!r} was asked for, and the {backend} backend gives {given!r}"
        )


async def _make_workdir(link: Link, path: str) -> None:
    try:
        await link.ask(wire.MakeDir(path))
    except (NotPermitted, Conflict, NotFound) as exc:
        message = f"{path} is no folder in the box, and cannot be made there: {exc}"
        raise InvalidRequest(message) from None
