"""The images that a process uses: found, built on first use, and held until it is done.

A server also lists, builds and removes them for its callers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator

from hutch.errors import HutchError, NotFound
from hutch.serving import BuildImage, BuildProgress, ImageInfo
from hutch.types import Packages

from . import store
from .environment import Image
from .install import Progress
from .progress import Display

TELL = 0.25  # seconds between two words on one stage of a build


class Shelf:
    def __init__(self) -> None:
        self._ready: dict[Image, Packages] = {}
        self._held: list[int] = []
        self._building = asyncio.Lock()  # one at a time: there is one line to show how far it is

    async def find(
        self, name: str, packages: tuple[str, ...] = (), preload: tuple[str, ...] = ()
    ) -> Packages:
        """The packages of an image, by name; or of one that is these packages and has none.

        What is not built yet is built now, which takes as long as the packages take to download:
        a terminal shows how far it is. Raises what `store.build` raises.
        """
        unnamed = Image.python(packages, preload) if packages or preload else None
        image = unnamed or store.find(name)
        async with self._building:
            if image not in self._ready:
                self._ready[image] = await self._build(image)
            return self._ready[image]

    async def _build(self, image: Image) -> Packages:
        given_up = False

        def report(progress: Progress) -> None:
            if given_up:
                raise HutchError("nobody waits for this image any more")
            if os.isatty(2):
                display(progress)

        with Display(image.name) as display:
            work = asyncio.ensure_future(asyncio.to_thread(store.build, image, report))
            try:
                ready = await asyncio.shield(work)
            except asyncio.CancelledError:
                given_up = True
                await asyncio.gather(work, return_exceptions=True)
                raise
        self._held.append(store.hold(ready))
        return Packages(
            str(ready.folder), str(ready.prefix), ready.python, ready.version, ready.preload
        )

    def list(self) -> list[ImageInfo]:
        """All that have a name."""
        named = [each for each in store.entries() if each.name is not None]
        return [
            ImageInfo("host", True),
            *(ImageInfo(e.name or "", e.built, e.packages, e.bytes or None) for e in named),
        ]

    async def build(self, o: BuildImage) -> AsyncGenerator[BuildProgress, None]:
        """How far it is, until it is done. Leaving early stops it."""
        image = Image(o.packages, o.preload, o.name) if o.packages else store.find(o.name)
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[BuildProgress | None] = asyncio.Queue()
        left, stage, told = False, "", 0.0

        def report(progress: Progress) -> None:
            if left:
                raise HutchError("nobody waits for this image any more")
            nonlocal stage, told
            if progress.stage == "done" or (
                progress.stage == stage and time.monotonic() < told + TELL
            ):
                return
            stage, told = progress.stage, time.monotonic()
            done = f" {progress.done}/{progress.total}" if progress.total else ""
            step = f"{progress.stage}{done} {progress.package or ''}".rstrip()
            loop.call_soon_threadsafe(steps.put_nowait, BuildProgress(step))

        work = asyncio.ensure_future(asyncio.to_thread(store.build, image, report))
        work.add_done_callback(lambda _: steps.put_nowait(None))
        try:
            while (step := await steps.get()) is not None:
                yield step
            await work
            yield BuildProgress("done", done=True)
        finally:
            left = True
            await asyncio.gather(work, return_exceptions=True)

    async def remove(self, name: str) -> None:
        """Conflict while a box uses it."""
        held = [image for image in self._ready if image.name == name]
        if not await asyncio.to_thread(store.remove, name) and not held:
            raise NotFound(f"image {name} is not built")

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
        self._ready.clear()
