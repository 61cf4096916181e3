"""An image as a value: the Python packages of a box, and the modules imported before it starts.

Images with the same packages share one folder on disk, whatever their names: the name of the
folder, `key`, is a hash of the packages and of the interpreter. Preloaded modules are not part of
it; they change what a warm process has imported, not what is installed.

In a box, the folder is at /opt/env, laid out like a virtual environment. Its interpreter is at
/opt/python, unless it is under /usr, which boxes have anyway.
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

FORMAT = 1  # of the folder; after a change, all environments are built again
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

        `packages`: requirements as for pip ("polars", "pandas>=2,<3", "httpx[http2]"), or paths of
        wheels ("./mine-1.0-py3-none-any.whl"), which are identified by content, not by path.
        `preload`: modules to import before the box starts, so that importing them there takes no
        time. Raises InvalidRequest if a package or a module is malformed.
        """
        for given in (packages, preload):
            if isinstance(given, str):
                raise InvalidRequest(f"packages and preload are lists: [{given!r}]")
        packages, preload = list(packages), list(preload)
        for word in (*packages, *preload):
            if not isinstance(word, str):
                raise InvalidRequest(f"packages and preload are lists of text, not {word!r:.200}")
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
            EXTENSION_SUFFIXES[0],  # the ABI and the platform, as in file names
            str(base_prefix()),
            *map(_identity, self.packages),
        ]
        return hashlib.sha256("\0".join(about).encode()).hexdigest()[:32]

    def described(self) -> list[str]:
        """The packages for display, without paths of this machine."""
        return [_identity(package).partition(HASHED)[0] for package in self.packages]


@dataclass(frozen=True)
class BuiltImage:
    """An image that is built, and how to use it in a box."""

    folder: Path  # to mount read-only at /opt/env
    site_packages: Path  # in that folder, on this machine
    preload: tuple[str, ...]
    python: str  # path of the interpreter in a box
    prefix: Path  # its prefix on this machine; at /opt/python in a box, unless below /usr
    version: str  # "3.11"

    @property
    def key(self) -> str:
        return self.folder.name


_DATA = ("matplotlib", "numpy", "pandas", "pyarrow", "scikit-learn", "scipy")
_DATA_MODULES = (
    "numpy",
    "numpy.random",
    "pandas",
    "pyarrow",
    "pyarrow.parquet",
    "scipy",
    "scipy.stats",
    "scipy.optimize",
    "matplotlib",
    "matplotlib.pyplot",
    "sklearn",
    "sklearn.linear_model",
    "sklearn.model_selection",
)
_CHEM_MODULES = ("rdkit", "rdkit.Chem", "rdkit.Chem.AllChem", "rdkit.Chem.Descriptors")

BUILT_IN = {
    "python": Image(name="python"),
    "data": Image(_DATA, _DATA_MODULES, "data"),
    "chem": Image(tuple(sorted((*_DATA, "rdkit"))), (*_DATA_MODULES, *_CHEM_MODULES), "chem"),
}


def base_prefix() -> Path:
    """The prefix of the interpreter that runs Hutch; in a venv, of the one it was made from."""
    return Path(sys.base_prefix).resolve()


def base_interpreter() -> Path:
    return Path(getattr(sys, "_base_executable", sys.executable)).resolve()


def interpreter_in_box() -> str:
    """The path of the interpreter in a box."""
    if base_prefix().is_relative_to("/usr"):
        return str(base_interpreter())
    return f"{PYTHON}/bin/python{VERSION}"


def _identity(package: str) -> str:
    """What identifies a package: for a wheel on this machine, its name and hash, not its path."""
    _, _, place = package.partition(" @ file://")
    return unquote(place.rpartition("/")[2]) if place else package


def _module(name: str) -> str:
    if not _MODULE.fullmatch(name.strip()):
        raise InvalidRequest(f"cannot preload {name!r}: write a module like scipy.stats")
    return name.strip()
