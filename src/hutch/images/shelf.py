"""The images that a process uses: found, built on first use, and held until it is done."""

from __future__ import annotations

import asyncio
import os

from hutch.errors import HutchError
from hutch.types import Packages

from . import store
from .environment import Image
from .install import Progress
from .progress import Display


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

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._held.clear()
        self._ready.clear()
