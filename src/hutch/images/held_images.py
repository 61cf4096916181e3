"""The images that a process uses: looked up, built on first use, and locked while in use.

A server also lists, builds, pulls and removes images for its callers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakValueDictionary, finalize

from hutch.errors import NotFound
from hutch.serving import BuildImage, BuildProgress, ImageInfo, PullImage
from hutch.types import Packages, Root

from . import store
from .environment import BuiltImage, Image
from .install import Progress, Report
from .oci import store as oci
from .oci.reference import Reference, parse
from .progress import Display, amount
from .stopping import in_thread

if TYPE_CHECKING:
    from .oci.pull import ImagePull

P = TypeVar("P")
TELL = 0.25  # seconds between two reports on the same stage of a build
# Callers may request any number of lists of packages. Beyond this many, the least recently used one
# is released: boxes that use it go on, but `prune` can remove it.
MAX_UNNAMED = 64
MAX_BUILDS = 2  # at once: each takes one of the few threads that the whole process shares
MAX_PULLS = 2  # likewise


class HeldPackages(NamedTuple):
    packages: Packages
    hold: int  # a descriptor


class HeldImages:
    def __init__(self, *, shows: bool = False) -> None:
        """`shows`: show the progress of builds on stderr."""
        self._shows = shows
        self._held: dict[Image, HeldPackages] = {}  # the most recently used one is the last
        # By digest. Each is held as long as the returned object is referenced.
        self._roots: WeakValueDictionary[str, Root] = WeakValueDictionary()
        self._turns: WeakValueDictionary[Image, asyncio.Lock] = WeakValueDictionary()
        self._builds = asyncio.Semaphore(MAX_BUILDS)
        self._pulled: WeakValueDictionary[Reference, asyncio.Lock] = WeakValueDictionary()
        self._pulls = asyncio.Semaphore(MAX_PULLS)

    async def find(
        self,
        name: str,
        packages: tuple[str, ...] = (),
        preload: tuple[str, ...] = (),
        digest: str | None = None,
    ) -> Packages | Root:
        """Find an image by name, or, if `packages` or `preload` are given, an unnamed one.

        Packages that are not installed yet are installed now, which takes as long as they take to
        download; calls for images that are built do not wait for that. If no image of packages
        has this name, it is the name of an OCI image; `digest` selects one of those, whatever the
        name stands for now. Raises NotFound if that is not on this machine, as nothing is pulled
        implicitly, and what `store.build` raises.
        """
        if digest:
            return self._find_root(name, digest)
        unnamed = Image.python(packages, preload) if packages or preload else None
        image = unnamed or store.look_up(name)
        if image is None:
            return self._find_root(name)
        if image not in self._held:
            async with self._turns.setdefault(image, asyncio.Lock()):
                if image not in self._held:
                    self._held[image] = await self._take(image)
        held = self._held[image] = self._held.pop(image)
        self._let_go_of_the_oldest()
        return held.packages

    def _find_root(self, name: str, digest: str | None = None) -> Root:
        found = oci.find(name, digest)
        root = self._roots.get(found.digest)
        if root is None:
            hold, root = oci.hold(found), found.root()
            self._roots[found.digest] = root
            # At exit, the kernel closes it.
            finalize(root, os.close, hold).atexit = False
        return root

    def _let_go_of_the_oldest(self) -> None:
        unnamed = [image for image in self._held if image.name is None]
        for image in unnamed[:-MAX_UNNAMED]:
            os.close(self._held.pop(image).hold)

    async def _take(self, image: Image) -> HeldPackages:
        try:
            return _hold(await asyncio.to_thread(store.resolve, image))
        except NotFound:
            async with self._builds:
                return _hold(await self._build(image))

    async def _build(self, image: Image) -> BuiltImage:
        def build(report: Report) -> BuiltImage:
            return store.build(image, report)

        shown = Display(image.name, is_patient=True) if self._shows else nullcontext(_ignore)
        with shown as display:
            return await in_thread(build, display)

    def list(self) -> list[ImageInfo]:
        """All images that have a name."""
        entries = [*store.entries(), *oci.entries()]
        named = [each for each in entries if each.name is not None]
        return [
            ImageInfo("host", True),
            *(ImageInfo(e.name or "", e.built, e.packages, e.bytes or None) for e in named),
        ]

    async def build(self, o: BuildImage) -> AsyncGenerator[BuildProgress, None]:
        """Build an image, and yield its progress. Closing the generator early stops the build.

        Raises what `store.build` raises.
        """
        image = Image.python(o.packages, o.preload, o.name) if o.packages else store.find(o.name)
        stage, told = "", 0.0

        def step_of(progress: Progress) -> BuildProgress | None:
            nonlocal stage, told
            if progress.stage == "done" or (
                progress.stage == stage and time.monotonic() < told + TELL
            ):
                return None
            stage, told = progress.stage, time.monotonic()
            done = f" {progress.done}/{progress.total}" if progress.total else ""
            return BuildProgress(f"{progress.stage}{done} {progress.package or ''}".rstrip())

        def build(report: Report) -> None:
            store.build(image, report)

        async with aclosing(_steps(build, step_of)) as steps:
            async for step in steps:
                yield step
        yield BuildProgress("done", done=True)

    async def pull(self, o: PullImage) -> AsyncGenerator[BuildProgress, None]:
        """Pull an image, and yield its progress. Closing the generator early stops the pull.

        Then no image and no layer is left of it, but what was downloaded is kept for the next pull.
        Of several pulls of one image, the first one downloads it, while the others wait. Raises
        what `ImagePull.run` raises, and InvalidRequest if the reference is malformed.
        """
        name = parse(o.reference)
        # It speaks HTTP, which is slow to import, and only servers need it.
        pull: ImagePull = import_module(".oci.pull", __package__).ImagePull(name)
        turn = self._pulled.setdefault(name, asyncio.Lock())
        if turn.locked() or self._pulls.locked():
            yield BuildProgress("waiting for another pull")
        async with turn, self._pulls, aclosing(_steps(pull.run, pull.progress, pull.stop)) as steps:
            async for step in steps:
                yield step
        if image := pull.stored:
            yield BuildProgress(f"{name.familiar} is {image.digest}, {amount(image.bytes)}")
        if o.reference == "host" or store.look_up(o.reference):
            yield BuildProgress(f"{o.reference} alone means another image here: {name.familiar}")
        yield BuildProgress("done", done=True)

    async def remove(self, name: str) -> None:
        """Remove an image. Raises NotFound, and Conflict while a box uses it."""
        if store.look_up(name) is None:
            await asyncio.to_thread(oci.remove, name)
            return
        held = [image for image in self._held if image.name == name]
        if not await asyncio.to_thread(store.remove, name) and not held:
            raise NotFound(f"image {name} is not built")

    def close(self) -> None:
        for held in self._held.values():
            os.close(held.hold)
        self._held.clear()


def _ignore(progress: Progress) -> None:
    pass


async def _steps(
    work: Callable[[Callable[[P], None]], None],
    step_of: Callable[[P], BuildProgress | None],
    stop: Callable[[], None] | None = None,
) -> AsyncGenerator[BuildProgress, None]:
    """Do `work` in a thread, and yield what `step_of` makes of what it reports.

    Closing the generator early ends the work by calling `stop`, if there is one, and by its next
    report; it waits for that end. Raises what `work` raises.
    """
    loop = asyncio.get_running_loop()
    steps: asyncio.Queue[BuildProgress | None] = asyncio.Queue()

    def report(progress: P) -> None:
        if step := step_of(progress):
            loop.call_soon_threadsafe(steps.put_nowait, step)

    working = asyncio.ensure_future(in_thread(work, report))
    working.add_done_callback(lambda _: steps.put_nowait(None))
    try:
        while (step := await steps.get()) is not None:
            yield step
        await working
    finally:
        if stop:
            stop()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _hold(ready: BuiltImage) -> HeldPackages:
    packages = Packages(
        str(ready.folder), str(ready.prefix), ready.python, ready.version, ready.preload
    )
    return HeldPackages(packages, store.hold(ready))
