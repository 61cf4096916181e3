"""An image as a value: the Python packages that a box has, and what is imported before it starts.

Two images with the same list are the same folder on disk, whoever made them and whatever they are
called: the folder's name, `key`, is a hash of the list and of the interpreter it is for. Modules
to preload are not in it; they change what a warm process has imported, not what is installed.

Where a box sees it: the folder at /opt/env, laid out like a virtual environment; and the
interpreter that it belongs to at /opt/python, unless that is under /usr, which boxes have anyway.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from urllib.parse import unquote

from hutch.errors import InvalidRequest

from .requirements import HASHED, parse_requirement

FORMAT = 1  # of the folder; a new number, and all are built anew
ENVIRONMENT, PYTHON = "/opt/env", "/opt/python"
VERSION = "{}.{}".format(*sys.version_info)

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Image:
    """A set of Python packages. Made with `Image.python`, which checks them."""

    packages: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    name: str | None = None

    @classmethod
    def python(
        cls, packages: Iterable[str] = (), preload: Iterable[str] = (), name: str | None = None
    ) -> Image:
        """An image with these packages, for `Sandbox.create(image=...)`.

        `packages` are written as pip has them: "polars", "pandas>=2,<3", "httpx[http2]", or the
        path of a wheel, "./mine-1.0-py3-none-any.whl", whose content counts, not its place.
        `preload` are modules to import before a box is there, so that importing them costs it
        nothing. Raises InvalidRequest.
        """
        for given in (packages, preload):
            if isinstance(given, str):
                raise InvalidRequest(f"packages and preload are lists: [{given!r}]")
        packages, preload = list(packages), list(preload)
        for word in (*packages, *preload):
            if not isinstance(word, str):
                raise InvalidRequest(f"packages and preload are lists of text: {word!r} is none")
        wanted = {parse_requirement(text) for text in packages}
        modules = dict.fromkeys(map(_module, preload))  # in order: one may need another first
        return cls(tuple(sorted(wanted)), tuple(modules), name)

    @property
    def key(self) -> str:
        """The name of the folder that holds these packages for this interpreter."""
        about = [
            f"hutch environment {FORMAT}",
            sys.implementation.name,
            ".".join(map(str, sys.version_info)),
            EXTENSION_SUFFIXES[0],  # the ABI and the platform, as they are in names of files
            str(base_prefix()),
            *map(_identity, self.packages),
        ]
        return hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]

    def described(self) -> list[str]:
        """The packages as people would write them, with no path of this machine."""
        return [_identity(package).partition(HASHED)[0] for package in self.packages]


@dataclass(frozen=True)
class BuiltImage:
    """An image that is built, and how to use it in a box."""

    folder: Path  # to be mounted, read-only, at /opt/env
    site_packages: Path  # in that folder, as this machine sees it
    preload: tuple[str, ...]
    python: str  # the interpreter, in a box
    prefix: Path  # where that is on this machine; at /opt/python in a box, unless below /usr
    version: str  # "3.11"

    @property
    def key(self) -> str:
        return self.folder.name


_DATA = ("matplotlib", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy")
_DATA_MODULES = (
    "numpy", "numpy.random", "pandas", "pyarrow", "pyarrow.parquet", "scipy", "scipy.stats",
    "scipy.optimize", "matplotlib", "matplotlib.pyplot", "sklearn", "sklearn.linear_model",
    "sklearn.model_selection",
)  # fmt: skip
_CHEM_MODULES = ("rdkit", "rdkit.Chem", "rdkit.Chem.AllChem", "rdkit.Chem.Descriptors")

BUILT_IN = {
    "python": Image(name="python"),
    "data": Image(_DATA, _DATA_MODULES, "data"),
    "chem": Image(tuple(sorted((*_DATA, "rdkit"))), (*_DATA_MODULES, *_CHEM_MODULES), "chem"),
}


def base_prefix() -> Path:
    """Where the interpreter that runs Hutch is installed; in a venv, the one it was made from."""
    return Path(sys.base_prefix).resolve()


def base_interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def interpreter_in_box() -> str:
    """The interpreter under the name that it has in a box."""
    if base_prefix().is_relative_to("/usr"):
        return str(base_interpreter())
    return f"{PYTHON}/bin/python{VERSION}"


def _identity(package: str) -> str:
    """What decides the content: of a wheel on this machine its name and hash, not its place."""
    _, _, place = package.partition(" @ file://")
    return unquote(place.rpartition("/")[2]) if place else package


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name.strip()):
        raise InvalidRequest(f"{name!r} is no module to preload; write it like: scipy.stats")
    return name.strip()
