"""The images of a server with the kubernetes backend: those that its cluster can pull."""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator

from hutch.errors import InvalidRequest
from hutch.serving import BuildImage, BuildProgress, ImageInfo, PullImage

ELSEWHERE = "the nodes of a cluster pull images themselves, when a session begins with them"


class ClusterImages:
    """An ImageManager that has no images. What would change them raises InvalidRequest."""

    async def find(
        self,
        name: str,
        packages: tuple[str, ...],
        preload: tuple[str, ...],
        digest: str | None = None,
    ) -> None:
        """None: the cluster finds images. Raises InvalidRequest for packages or preload."""
        if packages or preload:
            raise InvalidRequest(
                "packages and preload are for the namespaces backend; with kubernetes, choose an "
                "image that has them"
            )

    def build(self, o: BuildImage) -> AsyncGenerator[BuildProgress, None]:
        raise InvalidRequest(f"{ELSEWHERE}: build it elsewhere, and push it to a registry")

    def pull(self, o: PullImage) -> AsyncGenerator[BuildProgress, None]:
        raise InvalidRequest(f"{ELSEWHERE}: there is nothing to pull here")

    async def remove(self, name: str) -> None:
        raise InvalidRequest(f"{ELSEWHERE}, and remove those that nothing uses")

    def list(self) -> builtins.list[ImageInfo]:
        return []

    def close(self) -> None:
        return
