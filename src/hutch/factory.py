"""Makes backends by name. The modules of a backend are imported on first use."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .errors import BackendUnavailable, InvalidRequest
from .types import ClusterSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .backends.base import Backend
    from .engine.box_request import ImageSource
    from .images.bundle import Bundle
    from .images.held_images import HeldImages
    from .server.service import ImageManager
    from .types import Packages, Root

NAMES = ("namespaces", "docker", "kubernetes")
# Modules of the optional Docker client. Installing the first installs both.
_CLIENT = ("aiodocker", "aiohttp")


def default() -> str:
    """The name of the default backend: HUTCH_BACKEND, or namespaces."""
    return os.environ.get("HUTCH_BACKEND") or NAMES[0]


def backend(
    name: str = "",
    *,
    lasting: str | None = None,
    launcher: tuple[int, int] | None = None,
    cluster: ClusterSettings | None = None,
) -> Backend:
    """Make a new backend; the default one if no name is given.

    `lasting`: a folder for state that lets boxes outlive this process. `launcher`: for
    `namespaces`, a launcher that is already running. `cluster`: for `kubernetes`, where boxes are
    made; by default, what variables say, or in NAMESPACE for "kubernetes/NAMESPACE". Raises
    InvalidRequest if there is no such backend, and BackendUnavailable if it is not installed.
    """
    name = name or default()
    kind, _, namespace = name.partition("/")
    if kind not in NAMES or (kind != "kubernetes" and name != kind):
        raise InvalidRequest(f"no backend {name!r}: there are {', '.join(NAMES)}")
    backend: Backend
    if name == "namespaces":
        backend = _load(".backends.namespaces").NamespacesBackend(launcher, lasting)
    elif kind == "kubernetes":
        module = _load(".backends.kubernetes")
        settings = cluster or _cluster_settings(os.environ)
        if namespace:
            settings = replace(settings, namespace=namespace)
        backend = module.KubernetesBackend(bundle, settings=settings, lasting=lasting)
        backend.name = name
    else:
        backend = docker(".backends.docker").DockerBackend(bundle, lasting=lasting)
    return backend


def _cluster_settings(env: Mapping[str, str]) -> ClusterSettings:
    """From the variables that are settings of a server, too."""
    known = (field.name for field in fields(ClusterSettings))
    found = {name: env.get(f"HUTCH_KUBERNETES_{name.upper()}") for name in known}
    return ClusterSettings(**{name: value for name, value in found.items() if value})


def image_source(name: str = "") -> ImageSource | None:
    """The source of images for a backend; None if it finds images itself."""
    return _LazyImages() if (name or default()) == "namespaces" else None


def images(name: str) -> ImageManager:
    """The images that a server lists, builds and removes for its callers.

    Raises BackendUnavailable if the backend is not installed.
    """
    manager: ImageManager
    if name == "namespaces":
        manager = _load(".images.held_images").HeldImages()
    elif name == "kubernetes":
        manager = _load(".images.cluster_images").ClusterImages()
    else:
        manager = docker(".recipes.engine_images").EngineImages()
    return manager


def docker(module: str) -> ModuleType:
    """Import a module of Hutch that uses the Docker client.

    Raises BackendUnavailable if the client is not installed.
    """
    try:
        return _load(module)
    except ModuleNotFoundError as exc:
        if exc.name not in _CLIENT:
            raise
        command = _load(".extras").install_command("docker")
        raise BackendUnavailable(
            f"to speak to a Docker engine, {_CLIENT[0]} is needed: {command}"
        ) from None


def data_folder() -> Path:
    """The folder of images and server data: HUTCH_DATA_DIR, or one in the user's home."""
    folder: Path = _load(".images.store").data_dir()
    return folder


def bundle() -> Bundle:
    """The bundle with the guest, and the seccomp filter, for containers.

    HUTCH_BUNDLE names one that is finished: an image for servers has one.
    """
    if finished := os.environ.get("HUTCH_BUNDLE"):
        found: Bundle = _load(".images.bundle").Bundle(Path(finished))
        return found
    seccomp_filter: bytes = _load(".backends.linux.seccomp").build()
    build: Callable[[Path, dict[str, bytes]], Bundle] = _load(".images.bundle").build
    return build(data_folder() / "runtime", {"filter": seccomp_filter})


def _load(module: str) -> ModuleType:
    return import_module(module, __package__)


class _LazyImages:
    """The images of this machine, loaded on first use: most boxes use `host`, which needs none."""

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
            self._images = _load(".images.held_images").HeldImages(shows=True)
        return await self._images.find(name, packages, preload, digest)

    def close(self) -> None:
        if self._images:
            self._images.close()
