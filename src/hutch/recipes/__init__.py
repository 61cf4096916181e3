"""Recipes of Hutch's own images for Docker engines: base, small, python, data and node.

A recipe is a folder in `images/` with a Dockerfile and the files that it uses. Each builds on
another one, the first on a plain Debian. `ARG PACKAGES` lists the Debian packages that it adds.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn

from hutch.backends.docker.images import NAMES, PREFIX
from hutch.errors import InvalidRequest

FOLDER = Path(__file__).parent / "images"
EPOCH = 1735689600  # the date of all files, so that builds are reproducible

_ARG = re.compile(r'^ARG (BASE|PACKAGES)="?([^"\n]+)"?$', re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    name: str
    folder: Path
    base: str  # the default of the image that it builds on
    packages: tuple[str, ...]  # of Debian

    @property
    def tag(self) -> str:
        return PREFIX + self.name

    @property
    def requirements(self) -> Path | None:
        """The file that lists its Python packages, if it has any."""
        file = self.folder / "constraints.txt"
        return file if file.exists() else None


def short(name: str) -> str:
    """The name of a recipe: `python`, for `python` and for `hutch/python`.

    Raises InvalidRequest if there is no such recipe.
    """
    found = name.removeprefix(PREFIX).removesuffix(":latest")
    if found not in NAMES:
        raise InvalidRequest(
            f"{name!r} is not an image that Hutch builds: choose one of {', '.join(NAMES)}"
        )
    return found


def chain(name: str, folder: Path = FOLDER) -> list[Recipe]:
    """The recipes to build for an image, in order. Raises InvalidRequest if one is missing."""
    recipe = _read(folder / short(name))
    before = chain(recipe.base, folder) if recipe.base.startswith(PREFIX) else []
    return [*before, recipe]


def _read(folder: Path) -> Recipe:
    said = dict(_ARG.findall((folder / "Dockerfile").read_text()))
    return Recipe(folder.name, folder, said["BASE"], tuple(said.get("PACKAGES", "").split()))


def fingerprint(recipes: list[Recipe]) -> str:
    """A hash of all files of these recipes. An image is labelled with that of its chain."""
    found = hashlib.sha256()
    for recipe in recipes:
        for file in sorted(recipe.folder.iterdir()):
            content = file.read_bytes()
            found.update(f"{recipe.name}/{file.name} {len(content)}\n".encode() + content)
    return found.hexdigest()


def pack(recipe: Recipe, site: Path | None, into: BinaryIO) -> None:
    """Write the context of a build as a tar, and rewind it.

    It has the files of the recipe, and as `site/` a folder of installed packages.
    """
    with tarfile.open(fileobj=into, mode="w") as tar:
        for file in sorted(recipe.folder.iterdir()):
            _add(tar, file, file.name)
        for parent, folders, files in os.walk(site, onerror=_stop) if site else ():
            folders.sort()
            for name in sorted(files):
                path = Path(parent, name)
                _add(tar, path, f"site/{path.relative_to(site or parent)}")
    into.seek(0, io.SEEK_SET)


def _stop(exc: OSError) -> NoReturn:
    """For `os.walk`, which otherwise skips a folder that it cannot read."""
    raise exc


def _add(tar: tarfile.TarFile, file: Path, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = file.stat().st_size, EPOCH
    entry.mode = 0o755 if os.access(file, os.X_OK) else 0o644
    with open(file, "rb") as content:
        tar.addfile(entry, content)
