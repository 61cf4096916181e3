"""The one place that knows all backends. What belongs to one is loaded when it is asked for."""

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
_CLIENT = ("aiodocker", "aiohttp")  # of engines, which not everybody has; the first brings both


def default() -> str:
    """The backend of whoever does not name one."""
    return os.environ.get("HUTCH_BACKEND") or NAMES[0]


def backend(
    name: str = "", *, lasting: str | None = None, launcher: tuple[int, int] | None = None
) -> Backend:
    """One that was not used yet.

    `lasting`: a folder for what lets boxes outlive this process. `launcher`: for `namespaces`, one
    that is running already. Raises InvalidRequest, and BackendUnavailable if it is not installed.
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
    """Where the images of a backend are, if it does not know them itself."""
    found: ImageSource | None = None
    if (name or default()) == "namespaces":
        found = _load(".lazy_images").LazyImages()
    return found


def images(name: str) -> ImageManager:
    """What a server lists, builds and removes for its callers."""
    found: ImageManager
    if name == "namespaces":
        found = _load(".images.held_images").HeldImages()
    else:
        found = docker(".recipes.engine_images").EngineImages()
    return found


def docker(module: str) -> Any:
    """A module of ours that speaks to Docker engines. Or BackendUnavailable."""
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
    """Where images and the data of servers are: HUTCH_DATA_DIR, or a folder of the user's."""
    found: Path = _load(".images.store").data_dir()
    return found


def _bundle() -> Bundle:
    """What a guest needs in a container."""
    into = data_folder() / "runtime"
    calls: bytes = _load(".backends.linux.seccomp").build()
    made: Bundle = _load(".images.bundle").build(into, {"filter": calls})
    return made


def _load(module: str) -> Any:
    return import_module(module, __package__)
