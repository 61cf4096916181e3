"""Images for the engine. What finds and builds them is loaded when one is asked for.

Most boxes are of image `host`, and whoever starts one of those shall not wait for the rest.
"""

from __future__ import annotations

from importlib import import_module

from .types import Packages, Root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .images.image_store import ImageStore


class LazyImageStore:
    def __init__(self) -> None:
        self._store: ImageStore | None = None

    async def find(
        self,
        name: str,
        packages: tuple[str, ...],
        preload: tuple[str, ...],
        digest: str | None = None,
    ) -> Packages | Root:
        if self._store is None:
            module = import_module(".images.image_store", __package__)
            made: ImageStore = module.ImageStore(shows=True)
            self._store = made
        return await self._store.find(name, packages, preload, digest)

    def close(self) -> None:
        if self._store:
            self._store.close()
