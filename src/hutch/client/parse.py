"""Parses the arguments of the SDK into the values that operations have."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterable, Iterable, Mapping, Sequence
from typing import Protocol, TypedDict

from hutch.errors import InvalidRequest
from hutch.types import Context, Mount, Relaxation

from .transport import Server

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
MAX_KEY = 512
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(name: str, size: int | str) -> int:
    """Bytes: a number, or text such as "512m" or "1.5 GiB". Raises InvalidRequest."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if not match:
        raise InvalidRequest(f"{name} must be a number of bytes or text like '512m', not {size!r}")
    bytes_ = float(match[1]) * _UNITS[match[2].lower()]
    return int(min(bytes_, 1 << 62))  # refused later: no machine has so much


class ImageLike(Protocol):
    """The part of `hutch.Image` that is used here."""

    @property
    def packages(self) -> tuple[str, ...]: ...
    @property
    def preload(self) -> tuple[str, ...]: ...
    @property
    def name(self) -> str | None: ...


class ImageFields(TypedDict, total=False):
    """The fields of OpenSession that describe its image."""

    image: str
    packages: tuple[str, ...]
    preload: tuple[str, ...]


def parse_image(image: str | ImageLike | None) -> ImageFields:
    """Raises InvalidRequest."""
    if image is None:
        return {}
    if isinstance(image, str):
        if not image:
            raise InvalidRequest("the name of an image cannot be empty")
        return {"image": image}
    if isinstance(image, type):
        raise InvalidRequest("image must be an Image, not the class: Image.python(packages=[...])")
    try:
        packages, preload, name = tuple(image.packages), tuple(image.preload), image.name
    except (AttributeError, TypeError):
        raise InvalidRequest(f"image must be a name or a hutch.Image, not {image!r:.100}") from None
    listed = f"python with {', '.join(packages)}"[:200] if packages else "python"
    return {"image": name or listed, "packages": packages, "preload": preload}


def parse_relax(names: Sequence[Relaxation]) -> tuple[Relaxation, ...]:
    """Raises InvalidRequest if it is not a list. The engine checks the names."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidRequest(f"relax must be a list of names, not {names!r}")
    return tuple(names)


def parse_server(url: str | None, api_key: str | None, *, needed: bool = False) -> Server | None:
    """The server that the arguments or the environment name; None if neither names one.

    The key in the environment is for the server in the environment: no other server gets it.
    Raises InvalidRequest for a wrong one, or if there is none and one is `needed`.
    """
    usual = os.environ.get("HUTCH_URL") or None
    if url is None:
        url = usual
    if url is None:
        if needed or api_key is not None:
            raise InvalidRequest("this needs a server: give url=, or set HUTCH_URL")
        return None
    if not isinstance(url, str):
        raise InvalidRequest(f"url must be text, not {type(url).__name__}")
    if api_key is None and usual in (None, url):
        return Server(url, key_of_environment())
    if api_key is not None:
        check_key("api_key", api_key)
    return Server(url, api_key)


def key_of_environment() -> str | None:
    """The key in HUTCH_API_KEY. Raises InvalidRequest if it cannot be a key."""
    key = os.environ.get("HUTCH_API_KEY") or None
    if key is not None:
        check_key("HUTCH_API_KEY", key)
    return key


def check_key(name: str, key: str) -> None:
    """Raises InvalidRequest, without the key in the message, if it cannot be sent in a header."""
    if not isinstance(key, str):
        raise InvalidRequest(f"{name} must be text, not {type(key).__name__}")
    if _KEY.fullmatch(key):
        return
    if len(key) > MAX_KEY:
        wrong = f"it has more than {MAX_KEY} characters"
    elif found := re.search(r"[\r\n]", key):
        place = "at its end" if not key[found.start() :].strip() else "in it"
        wrong = f"there is a line break {place}"
    elif re.search(r"[^!-~]", key.replace(" ", "")):
        wrong = "it has characters that are not ASCII letters, digits or signs"
    else:
        wrong = "there is a space in it" if key else "it is empty"
    raise InvalidRequest(f"{name} is not a key: {wrong}")


def parse_mounts(
    mounts: Sequence[str | Mount],
    workspace: str | os.PathLike[str] | None,
    *,
    elsewhere: bool = False,
) -> tuple[Mount, ...]:
    """The mounts, with links in their sources resolved now, so that they cannot change later.

    With `elsewhere`, sources are paths on another machine and stay as they are. Raises
    InvalidRequest.
    """
    if isinstance(mounts, str) or not isinstance(mounts, Iterable):
        raise InvalidRequest(f"mounts must be a list of 'HOST:BOX', not {mounts!r}")
    parsed = [parse_mount(mount, elsewhere=elsewhere) for mount in mounts]
    if workspace is not None:
        if not isinstance(workspace, str | os.PathLike) or not (
            elsewhere or os.path.isdir(workspace)
        ):
            raise InvalidRequest(f"the workspace is not a folder: {workspace}")
        if elsewhere and not os.path.isabs(workspace):
            raise InvalidRequest(
                "workspace must be an absolute path on the server; for a folder that the server "
                f"keeps, use workspace_id={os.fspath(workspace)!r}"
            )
        parsed.insert(0, Mount(_source(os.fspath(workspace), elsewhere), "/workspace"))
    return tuple(parsed)


def parse_mount(mount: str | Mount, *, elsewhere: bool = False) -> Mount:
    """Raises InvalidRequest if it is malformed, or its source does not exist here."""
    if isinstance(mount, Mount):
        source, target, read_only = mount.source, mount.target, mount.read_only
    else:
        parts = mount.split(":") if isinstance(mount, str) else []
        if len(parts) not in (2, 3) or not all(parts) or parts[2:] not in ([], ["ro"], ["rw"]):
            raise InvalidRequest(f"a mount must be HOST:BOX or HOST:BOX:ro, not {mount!r}")
        source, target, read_only = parts[0], parts[1], parts[2:] == ["ro"]
    if not isinstance(source, str) or not (elsewhere or os.path.exists(source)):
        raise InvalidRequest(f"cannot mount {source}: no such file or folder")
    return Mount(_source(source, elsewhere), target, read_only)


def _source(path: str, elsewhere: bool) -> str:
    if not elsewhere:
        return os.path.realpath(path)
    if not path.startswith("/"):
        raise InvalidRequest(f"a mount must be an absolute path on the server, not {path!r}")
    return path


def argv_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """The argv of a command; text is run by `sh -c`. Raises InvalidRequest."""
    if isinstance(command, str):
        if not command.strip():
            raise InvalidRequest("an empty command")
        return ("/bin/sh", "-c", command)
    if isinstance(command, bytes) or not isinstance(command, Iterable):
        raise InvalidRequest(f"a command is text or a list of texts, not {command!r:.100}")
    return tuple(command)


def context_of(context: str | Context | None) -> str:
    """The name of a context; without one, "main", which always exists."""
    if isinstance(context, Context):
        return context.id
    return "main" if context is None else context


def data_of(data: str | bytes | bytearray | memoryview) -> bytes:
    """Raises InvalidRequest if it is neither text nor bytes."""
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"expected text or bytes, not {type(data).__name__}")
    return bytes(data)


def iterable_of(source: Iterable[bytes] | AsyncIterable[bytes]) -> Iterable[bytes]:
    """Raises InvalidRequest if it is not an iterable. A mapping is refused: likely a mistake."""
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise InvalidRequest(
            f"data must be bytes or an iterable of bytes, not {type(source).__name__}"
        )
    return source


def bytes_of(piece: bytes) -> bytes:
    """Raises InvalidRequest if a piece is not bytes."""
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"a piece of data must be bytes, not {type(piece).__name__}")
    return bytes(piece)
