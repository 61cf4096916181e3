"""The images that a server with the docker backend lists, builds and removes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from hutch.backends.docker.images import NAMES, PREFIX, EngineImage, ImageClient, opened
from hutch.errors import InvalidRequest
from hutch.serving import BuildImage, BuildProgress, ImageInfo, PullImage

from . import short
from .making import make


class EngineImages:
    """Each call opens its own connection, as `list` runs in a thread with its own event loop."""

    def __init__(self, docker_host: str | None = None) -> None:
        self._host = docker_host
        self._turn = asyncio.Lock()  # one build at a time

    async def find(
        self,
        name: str,
        packages: tuple[str, ...],
        preload: tuple[str, ...],
        digest: str | None = None,
    ) -> None:
        """None: the backend finds images itself. Raises InvalidRequest for packages or preload."""
        if packages or preload:
            raise InvalidRequest(
                "packages and preload are for the namespaces backend; with docker, choose an "
                "image that has them"
            )

    async def build(self, o: BuildImage) -> AsyncGenerator[BuildProgress, None]:
        """Build an image, and yield its progress. Closing the generator early stops the build.

        Raises InvalidRequest if there is no such recipe, or with packages or preload.
        """
        if o.packages or o.preload:
            raise InvalidRequest(f"what is in {o.name!r} is fixed: leave packages and preload out")
        name = short(o.name)
        steps: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def report(step: str) -> None:  # from this thread, or from one that installs packages
            loop.call_soon_threadsafe(steps.put_nowait, step)

        async def work() -> None:
            async with self._turn, opened(self._host) as images:
                await make(images, name, report)

        working = asyncio.ensure_future(work())
        working.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield BuildProgress(step)
            await working
            yield BuildProgress("done", done=True)
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    def pull(self, o: PullImage) -> AsyncGenerator[BuildProgress, None]:
        """Raises InvalidRequest: the engine pulls images when a session needs them."""
        raise InvalidRequest(
            "the engine pulls an image when a session begins with it; to have it before, on the "
            f"machine of the engine: docker pull {o.reference!r:.200}"
        )

    async def remove(self, name: str) -> None:
        """Remove an image. Raises InvalidRequest if it has no recipe.

        Raises NotFound if the engine does not have it, and Conflict while a container uses it.
        """
        async with opened(self._host) as images:
            await images.remove(PREFIX + short(name))

    async def _listed(self) -> list[ImageInfo]:
        async with opened(self._host) as images:
            found = await listed(images)
        return [
            ImageInfo(name, bool(each), size=each.size if each else None)
            for name, each in found.items()
        ]

    def list(self) -> list[ImageInfo]:
        """All images that have a recipe, built or not. Call it in a thread of its own."""
        return asyncio.run(self._listed())

    def close(self) -> None:
        """Nothing is held."""


async def listed(images: ImageClient) -> dict[str, EngineImage | None]:
    """All images that have a recipe, by name; None if the engine does not have it."""
    return {PREFIX + name: await images.find(PREFIX + name) for name in NAMES}
