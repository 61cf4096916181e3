"""Reads files of a project without trusting them, and notes what was not used."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hutch.client.disk import Item, Tree
from hutch.errors import InvalidRequest
from hutch.lines import single_line

LARGEST = 64 << 20  # bytes of a file that declares dependencies
LARGEST_LOCK = 16 << 20
LARGEST_SCRIPT = 1 << 20
LARGEST_YAML = 256 << 10  # its parser is slow
DEEPEST_YAML = 20
LONGEST_NOTE = 200  # characters of foreign text in a note

_USER = re.compile(r"(:/*)[^/@\s]+@")
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,200}[A-Za-z0-9])?")


@dataclass(frozen=True)
class InstallNote:
    """A package that is not installed, with the reason, or another remark for the user."""

    reason: str
    package: str = ""  # empty for a remark

    def __str__(self) -> str:
        if not self.package:
            return self.reason
        return f"{shortened(self.package)} is not installed: {self.reason}"


class ProjectFiles:
    """The files of a project by name. Links are not followed."""

    def __init__(self, tree: Tree, top: Path) -> None:
        self._tree, self.top = tree, top

    def read(self, name: str, largest: int = LARGEST) -> bytes | None:
        parts = tuple(name.split("/"))
        try:
            source = self._tree.open(Item(parts, parts, False))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise InvalidRequest(f"cannot read {name}: {exc.strerror} (is it a link?)") from None
        with source:
            data = bytearray()
            for piece in source.pieces():
                data += piece
                if len(data) > largest:
                    raise InvalidRequest(f"{name} is too large: the limit is {largest >> 10} KiB")
        return bytes(data)

    def text(self, name: str, largest: int = LARGEST) -> str | None:
        data = self.read(name, largest)
        try:
            return None if data is None else data.decode("utf-8-sig")
        except UnicodeDecodeError as exc:
            raise InvalidRequest(f"{name} is not UTF-8: {exc.reason}") from None

    def toml(self, name: str) -> dict[str, object] | None:
        text = self.text(name, LARGEST_LOCK)
        try:
            return None if text is None else tomllib.loads(text)
        except (ValueError, RecursionError) as exc:  # ValueError also for a number that is too long
            raise InvalidRequest(f"{name} cannot be read: {exc}") from None

    def json(self, name: str) -> dict[str, object] | None:
        text = self.text(name, LARGEST_LOCK)
        try:
            return None if text is None else table(json.loads(text), name)
        except (ValueError, RecursionError) as exc:
            raise InvalidRequest(f"{name} cannot be read: {exc}") from None

    def yaml(self, name: str) -> object:
        """The content of a YAML file. Aliases are refused: a few make millions of values."""
        import yaml  # slow to import (20 ms), and rarely needed

        class Loader(yaml.SafeLoader):
            depth = 0

            def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
                if self.check_event(yaml.AliasEvent):
                    raise yaml.YAMLError("aliases are not supported")
                self.depth += 1
                if self.depth > DEEPEST_YAML:
                    raise yaml.YAMLError("it is nested too deeply")
                node = super().compose_node(parent, index)
                self.depth -= 1
                return node

        text = self.text(name, LARGEST_YAML)
        try:
            return yaml.load(text or "", Loader=Loader)
        # The others: dates, numbers and tags that are malformed.
        except (
            yaml.YAMLError,
            ValueError,
            LookupError,
            AttributeError,
            TypeError,
            RecursionError,
        ) as exc:
            raise InvalidRequest(f"{name} cannot be read: {' '.join(str(exc).split())}") from None

    def has(self, name: str) -> bool:
        return (self.top / name).is_file()

    def names(self, folder: str = ".") -> list[str]:
        """The files in a folder, sorted; none if there is no folder, or a link to one."""
        path = self.top / folder
        if not path.is_dir() or path.is_symlink():
            return []
        with os.scandir(path) as entries:
            return sorted(each.name for each in entries if each.is_file(follow_symlinks=False))

    def modules(self, folder: str) -> list[str]:
        """Where Python finds the modules of a package whose source is in this folder."""
        inner = (f"{folder}/src", folder) if folder != "." else ("src", ".")
        return [path for path in inner if (self.top / path).is_dir() and ":" not in path]


def plain_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def package_name(value: object, where: str) -> str:
    """The normalized name of a package. Raises InvalidRequest."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidRequest(f"{where}: invalid package name {value!r:.200}")
    return plain_name(value)


def shortened(text: str) -> str:
    """Untrusted text for a message: shortened, and without a password."""
    text = _USER.sub(r"\1***@", text[: 10 * LONGEST_NOTE])  # cut first: the pattern is quadratic
    return text if len(text) <= LONGEST_NOTE else text[:LONGEST_NOTE] + "…"


def table(value: object, where: str) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} must be a table, not {value!r:.60}")
    return value


def tables(value: object, where: str) -> Iterator[dict[str, object]]:
    for each in items(value, where):
        yield table(each, where)


def items(value: object, where: str) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a list, not {value!r:.60}")
    return value


def texts(value: object, where: str) -> list[str]:
    found = items(value, where)
    if not all(isinstance(each, str) for each in found):
        raise InvalidRequest(f"{where} must be a list of strings, not {value!r:.60}")
    return [each for each in found if isinstance(each, str)]


def line(value: object, where: str) -> str:
    """A single-line string; empty if missing. Raises InvalidRequest."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string, not {value!r:.60}")
    return single_line(value, where)
