"""Makes backends by name. The modules of a backend are imported on first use."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import BackendUnavailable, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from .backends.base import Backend
    from .engine.box_request import ImageSource
    from .images.bundle import Bundle
    from .server.service import ImageManager

NAMES = ("namespaces", "docker")
# Modules of the optional Docker client. Installing the first installs both.
_CLIENT = ("aiodocker", "aiohttp")


def default() -> str:
    """The name of the default backend: HUTCH_BACKEND, or namespaces."""
    return os.environ.get("HUTCH_BACKEND") or NAMES[0]


def backend(
    name: str = "", *, lasting: str | None = None, launcher: tuple[int, int] | None = None
) -> Backend:
    """Make a new backend; the default one if no name is given.

    `lasting`: a folder for state that lets boxes outlive this process. `launcher`: for
    `namespaces`, a launcher that is already running. Raises InvalidRequest if there is no such
    backend, and BackendUnavailable if it is not installed.
    """
    name = name or default()
    if name not in NAMES:
        raise InvalidRequest(f"no backend {name!r}: there are {', '.join(NAMES)}")
    made: Backend
    if name == "namespaces":
        made = _load(".backends.namespaces").NamespacesBackend(launcher, lasting)
        return made
    made = docker(".backends.docker").DockerBackend(_bundle, lasting=lasting)
    return made


def image_source(name: str = "") -> ImageSource | None:
    """The source of images for a backend; None if it finds images itself."""
    found: ImageSource | None = None
    if (name or default()) == "namespaces":
        found = _load(".lazy_images").LazyImages()
    return found


def images(name: str) -> ImageManager:
    """The images that a server lists, builds and removes for its callers.

    Raises BackendUnavailable if the backend is not installed.
    """
    found: ImageManager
    if name == "namespaces":
        found = _load(".images.held_images").HeldImages()
    else:
        found = docker(".recipes.engine_images").EngineImages()
    return found


def docker(module: str) -> Any:
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
    found: Path = _load(".images.store").data_dir()
    return found


def _bundle() -> Bundle:
    """The bundle with the guest, and the seccomp filter, for containers."""
    into = data_folder() / "runtime"
    calls: bytes = _load(".backends.linux.seccomp").build()
    made: Bundle = _load(".images.bundle").build(into, {"filter": calls})
    return made


def _load(module: str) -> Any:
    return import_module(module, __package__)
