"""The types of settings.

Each describes what it allows, and reads a value of TOML or YAML, or the text of an environment
variable or option, where lists are separated by commas and tables are `name=value`.
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from hutch.client.parse import check_key, parse_size
from hutch.errors import InvalidRequest
from hutch.server.times import parse_duration, show_duration
from hutch.types import MiB, is_object_name

T = TypeVar("T")
TextT = TypeVar("TextT", bound=str)
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}")


Form = Literal["text", "number", "size", "time", "choice", "truth", "list", "counts"]


@dataclass(frozen=True)
class Kind(Generic[T]):
    allowed: str
    read: Callable[[object], T]  # raises ValueError
    show: Callable[[T], str] = str  # the inverse of `read`
    examples: Mapping[str, str] = field(default_factory=dict)  # by syntax, if they differ
    form: Form = "text"  # how a form asks for it
    choices: tuple[str, ...] = ()


def optional(kind: Kind[T]) -> Kind[T | None]:
    """The same kind, or empty: null or an empty string."""

    def read(value: object) -> T | None:
        return None if value is None or value == "" else kind.read(value)

    def show(value: T | None) -> str:
        return "" if value is None else kind.show(value)

    return Kind(f"{kind.allowed}, or empty", read, show, form=kind.form, choices=kind.choices)


def number(least: float, most: float | None = None) -> Kind[float]:
    def read(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        return _between(float(value), least, most)

    allowed = f"a number{_range(least, most)}"
    return Kind(allowed, read, lambda value: f"{value:.15g}", form="number")


def whole(least: int, most: int | None = None) -> Kind[int]:
    def read(value: object) -> int:
        return int(_between(_whole(value), least, most))

    return Kind(f"a whole number{_range(least, most)}", read, form="number")


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _between(value: float, least: float, most: float | None) -> float:
    if not math.isfinite(value) or value < least or (most is not None and value > most):
        raise ValueError
    return value


def _range(least: float, most: float | None) -> str:
    return f" from {least:g} up" if most is None else f" from {least} to {most}"


def size(*, of_number: int = 1) -> Kind[int]:
    """Bytes. A bare number is in units of `of_number`: some keys have a unit in their name."""

    def read(value: object) -> int:
        if isinstance(value, str) and not value.strip().isdigit():
            try:
                count = parse_size("", value)
            except InvalidRequest:
                raise ValueError from None
        else:
            count = _whole(value) * of_number
        return int(_between(count, 1, 1 << 61))

    unit = "MiB" if of_number == MiB else "bytes"
    return Kind(f'a number of {unit}, or text like "512m" or "2g"', read, _show_size, form="size")


def _show_size(count: int) -> str:
    for unit, letter in ((1 << 30, "g"), (1 << 20, "m"), (1 << 10, "k")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)


def choice(*words: TextT) -> Kind[TextT]:
    def read(value: object) -> TextT:
        for word in words:
            if word == value:
                return word
        raise ValueError

    *most, last = words
    known = " or ".join([", ".join(most), last] if most else words)
    return Kind(known, read, form="choice", choices=words)


def _yes_no(value: object) -> bool:
    word = str(value).strip().lower()
    if word not in YES + NO:
        raise ValueError
    return word in YES


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError
    return value.strip()


def _secret(value: object) -> str:
    secret = _text(value)
    if len(secret) < 8:
        raise ValueError
    try:
        check_key("api_key", secret)  # otherwise no client could send it
    except InvalidRequest:
        raise ValueError from None
    return secret


def _object_name(value: object) -> str:
    if not is_object_name(name := _text(value)):
        raise ValueError
    return name


def _image(value: object) -> str:
    if not isinstance(value, str) or not _IMAGE.fullmatch(value.strip()):
        raise ValueError
    return value.strip()


def _list(value: object) -> list[object]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if value is None:
        return []
    if not isinstance(value, list):
        raise ValueError
    return value


def list_of(kind: Kind[T], many: str) -> Kind[tuple[T, ...]]:
    def read(value: object) -> tuple[T, ...]:
        return tuple(kind.read(item) for item in _list(value))

    def show(values: tuple[T, ...]) -> str:
        return ",".join(map(kind.show, values))

    return Kind(f"a list of {many}", read, show, form="list", choices=kind.choices)


def _folder(value: object) -> Path:
    path = Path(os.path.expanduser(_text(value)))
    if not path.is_absolute():
        raise ValueError
    return Path(os.path.normpath(path))


def _counts(value: object) -> Mapping[str, int]:
    if not isinstance(value, Mapping):
        pairs = [str(item).partition("=") for item in _list(value)]
        if not all(separator for _, separator, _ in pairs):
            raise ValueError
        value = {name.strip(): count.strip() for name, _, count in pairs}
    return {_image(name): POOL_SIZE.read(count) for name, count in value.items()}


def _show_counts(counts: Mapping[str, int]) -> str:
    return ",".join(f"{name}={count}" for name, count in counts.items())


@dataclass(frozen=True)
class ListenAddress:
    """Where to listen. Port 0 means any free port."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._-]*")


def _address(value: object) -> ListenAddress:
    host, colon, port = _text(value).rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535 or not _HOST.fullmatch(host):
        raise ValueError
    if host.startswith("["):
        ipaddress.IPv6Address(host[1:-1])
    return ListenAddress(host.strip("[]") or "0.0.0.0", int(port))


def _duration(value: object) -> float:
    return _between(parse_duration(_text(value)), 1, 1e10)


POOL_SIZE = whole(0, 1000)
SECONDS = number(1)
DURATION = Kind('a time like "12h", "30d" or "52w"', _duration, show_duration, form="time")
COUNT = whole(1)
SIZE = size()
YES_NO = Kind("true or false", _yes_no, lambda value: "true" if value else "false", form="truth")
TEXT = Kind("text in one line", _text)
SECRET = Kind("at least 8 ASCII letters, digits and signs, without spaces", _secret)
IMAGE = Kind("the name of an image, such as host or python", _image)
FOLDER = Kind("the absolute path of a folder", _folder)
FILE = Kind("the absolute path of a file", _folder)
OBJECT_NAME = Kind(
    "the name of an object of a cluster: a-z, 0-9, '-' and '.'",
    _object_name,
)
ADDRESS = Kind("an address and a port, such as 127.0.0.1:8080 or [::1]:8080", _address)
COUNTS = Kind(
    "images, and how many boxes of each",
    _counts,
    _show_counts,
    {"toml": "{ host = 4, python = 2 }", "yaml": "{host: 4, python: 2}", "text": "host=4,python=2"},
    form="counts",
)
