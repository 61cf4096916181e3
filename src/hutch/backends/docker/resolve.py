"""Resolves the name of an image to the image it has now, and pulls it if the engine lacks it.

A name is checked against Docker's grammar before any use: nothing but a reference can become part
of a path of the engine's API.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

from hutch.errors import BackendUnavailable, InvalidRequest, NotFound, StartFailed

from . import own
from .config import whole
from .container import ContainerImage
from .engine import ARCHITECTURES, DockerEngine, Facts

FRESH = 1.0  # seconds for which a resolved name is cached

_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
REFERENCE = re.compile(
    rf"(?P<repository>(?:{_HOST}/)?{_PART}(?:/{_PART})*)"
    r"(?P<tag>:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?P<digest>@sha256:[0-9a-f]{64})?"
)
ID = re.compile(r"sha256:[0-9a-f]{64}")


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
            raise InvalidRequest(f"no digest of an image: {digest!r}")
        # The digest is the engine's own id of the image, or that of a registry.
        try:
            return await self._engine.image(digest)
        except NotFound:
            pass
        for each in await self._engine.images():
            if any(known == digest for _, known in _repo_digests(each)):
                return await self._engine.image(str(each["Id"]))
        if not repository or own.is_own(repository):
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
        if own.is_own(reference):
            raise NotFound(own.missing(reference))
        display = PullDisplay(reference)
        try:
            async for message in self._engine.pull(reference):
                display.show(message)
        except (NotFound, StartFailed, BackendUnavailable) as exc:
            reason = str(exc).removeprefix("the Docker engine refused: ")
            raise NotFound(
                f"the Docker engine has no image {reference!r} and could not pull it: {reason}. "
                f"{await self._advice(reference)}"
            ) from None
        finally:
            display.end()

    async def _advice(self, reference: str) -> str:
        """What to try instead. Other backends call our images by the last part of their name."""
        name = reference.removesuffix(":latest")
        if "/" not in name and "@" not in name:
            try:
                await self._engine.image(own.PREFIX + name)
                return f"Did you mean {own.PREFIX}{name}?"
            except NotFound:
                if name in own.NAMES:
                    return f"Did you mean {own.PREFIX}{name}? `{own.build(name)}` makes it"
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


class PullDisplay:
    """The progress of a pull on a terminal: one line, which is erased at the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._layers: dict[str, tuple[int, int]] = {}
        self._is_shown = os.isatty(2)

    def show(self, message: dict[str, Any]) -> None:
        detail = message.get("progressDetail") or {}
        if self._is_shown and message.get("status") == "Downloading" and detail.get("total"):
            self._layers[str(message.get("id"))] = int(detail.get("current") or 0), detail["total"]
            done, total = (sum(column) for column in zip(*self._layers.values(), strict=True))
            self._write(f"\r\x1b[Khutch: {self._name}: {done >> 20} of {total >> 20} MiB")

    def end(self) -> None:
        if self._layers:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        try:
            os.write(2, text.encode())
        except OSError:
            pass  # the terminal is gone
