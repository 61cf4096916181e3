"""Arguments in the forms people write them, turned into the forms operations have."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from hutch.errors import InvalidRequest
from hutch.types import Context, Mount, Relaxation

from .transport import Server

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
MAX_KEY = 512
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY}}}")
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}


def parse_size(name: str, size: int | str) -> int:
    """Bytes: a number, or text such as "512m" or "1.5 GiB"."""
    if isinstance(size, int):
        return size
    found = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if not found:
        raise InvalidRequest(f"{name} is a number of bytes or text like '512m', not {size!r}")
    bytes_ = float(found[1]) * _UNITS[found[2].lower()]
    return int(min(bytes_, 1 << 62))  # which is refused: it is more than anything holds


class ImageLike(Protocol):
    """`hutch.Image`, as far as it matters here."""

    @property
    def packages(self) -> tuple[str, ...]: ...
    @property
    def preload(self) -> tuple[str, ...]: ...
    @property
    def name(self) -> str | None: ...


def parse_image(image: str | ImageLike | None) -> dict[str, Any]:
    """What an OpenSession says of its image."""
    if image is None:
        return {}
    if isinstance(image, str):
        if not image:
            raise InvalidRequest("the name of an image cannot be empty")
        return {"image": image}
    if isinstance(image, type):
        raise InvalidRequest("image is an Image, not the class: Image.python(packages=[...])")
    try:
        packages, preload, name = tuple(image.packages), tuple(image.preload), image.name
    except (AttributeError, TypeError):
        raise InvalidRequest(f"image is a name or a hutch.ImageLike, not {image!r:.100}") from None
    listed = f"python with {', '.join(packages)}"[:200] if packages else "python"
    return {"image": name or listed, "packages": packages, "preload": preload}


def parse_relax(names: Sequence[Relaxation]) -> tuple[Relaxation, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InvalidRequest(f"relax is a list of names, not {names!r}")
    return tuple(names)


def parse_server(url: str | None, api_key: str | None, *, needed: bool = False) -> Server | None:
    """The server that was named here or in the environment. None: there is none.

    The key of the environment is for the server of the environment: another one never sees it.
    """
    usual = os.environ.get("HUTCH_URL") or None
    if url is None:
        url = usual
    if url is None:
        if needed or api_key is not None:
            raise InvalidRequest("this needs a server: give url=, or set HUTCH_URL")
        return None
    if not isinstance(url, str):
        raise InvalidRequest(f"url is text, not {type(url).__name__}")
    if api_key is None and usual in (None, url):
        return Server(url, key_of_environment())
    if api_key is not None:
        check_key("api_key", api_key)
    return Server(url, api_key)


def key_of_environment() -> str | None:
    """What HUTCH_API_KEY holds. Raises InvalidRequest if that cannot be a key."""
    key = os.environ.get("HUTCH_API_KEY") or None
    if key is not None:
        check_key("HUTCH_API_KEY", key)
    return key


def check_key(name: str, key: str) -> None:
    """Refuse what cannot be sent in a header. The key itself is never in the message."""
    if not isinstance(key, str):
        raise InvalidRequest(f"{name} is text, not {type(key).__name__}")
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
    """Mounts with sources that have no links in them: what is there now is what is meant.

    With `elsewhere`, they are paths of another machine, as they were given. A bare string is one
    mount, not its letters.
    """
    if isinstance(mounts, str) or not isinstance(mounts, Iterable):
        raise InvalidRequest(f"mounts is a list of 'HOST:BOX', not {mounts!r}")
    found = [parse_mount(mount, elsewhere=elsewhere) for mount in mounts]
    if workspace is not None:
        if not isinstance(workspace, str | os.PathLike) or not (
            elsewhere or os.path.isdir(workspace)
        ):
            raise InvalidRequest(f"the workspace is not a folder: {workspace}")
        if elsewhere and not os.path.isabs(workspace):
            raise InvalidRequest(
                "at a server, workspace is the absolute path of a folder of the server's; for one "
                f"that it keeps for you, workspace_id={os.fspath(workspace)!r}"
            )
        found.insert(0, Mount(_source(os.fspath(workspace), elsewhere), "/workspace"))
    return tuple(found)


def parse_mount(mount: str | Mount, *, elsewhere: bool = False) -> Mount:
    if isinstance(mount, Mount):
        source, target, read_only = mount.source, mount.target, mount.read_only
    else:
        parts = mount.split(":") if isinstance(mount, str) else []
        if len(parts) not in (2, 3) or not all(parts) or parts[2:] not in ([], ["ro"], ["rw"]):
            raise InvalidRequest(f"a mount is HOST:BOX or HOST:BOX:ro, not {mount!r}")
        source, target, read_only = parts[0], parts[1], parts[2:] == ["ro"]
    if not isinstance(source, str) or not (elsewhere or os.path.exists(source)):
        raise InvalidRequest(f"cannot mount {source}: there is no such file or folder")
    return Mount(_source(source, elsewhere), target, read_only)


def _source(path: str, elsewhere: bool) -> str:
    if not elsewhere:
        return os.path.realpath(path)
    if not path.startswith("/"):
        raise InvalidRequest(f"mounts are folders of the server, by absolute paths, not {path!r}")
    return path


def argv_of(command: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(command, str):
        if not command.strip():
            raise InvalidRequest("an empty command")
        return ("/bin/sh", "-c", command)
    if isinstance(command, bytes) or not isinstance(command, Iterable):
        raise InvalidRequest(f"a command is text or a list of texts, not {command!r:.100}")
    return tuple(command)


def context_of(context: str | Context | None) -> str:
    """The name of a context; without one, that of the one that is always there."""
    if isinstance(context, Context):
        return context.id
    return "main" if context is None else context


def data_of(data: str | bytes | bytearray | memoryview) -> bytes:
    if isinstance(data, str):
        return data.encode("utf-8", "surrogateescape")
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"expected text or bytes, not {type(data).__name__}")
    return bytes(data)


def iterable_of(source: Iterable[bytes]) -> Iterable[bytes]:
    """Of what is to be sent. A mapping has no order that anybody meant."""
    if not isinstance(source, Iterable) or isinstance(source, Mapping):
        raise InvalidRequest(f"data must be bytes or give bytes, not {type(source).__name__}")
    return source


def bytes_of(piece: bytes) -> bytes:
    """One piece of what is to be sent."""
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"a piece of data must be bytes, not {type(piece).__name__}")
    return bytes(piece)
