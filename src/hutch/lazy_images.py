"""Images for the engine, loaded on first use.

Most boxes use the image `host`, which does not need `hutch.images`.
"""

from __future__ import annotations

from importlib import import_module

from .types import Packages, Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .images.held_images import HeldImages


class LazyImages:
    def __init__(self) -> None:
        self._images: HeldImages | None = None

    async def find(
        self,
        name: str,
        packages: tuple[str, ...],
        preload: tuple[str, ...],
        digest: str | None = None,
    ) -> Packages | Root:
        if self._images is None:
            module = import_module(".images.held_images", __package__)
            images: HeldImages = module.HeldImages(shows=True)
            self._images = images
        return await self._images.find(name, packages, preload, digest)

    def close(self) -> None:
        if self._images:
            self._images.close()
