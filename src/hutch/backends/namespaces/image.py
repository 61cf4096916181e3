"""What the boxes of an image see of this machine."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import replace

from hutch.types import Packages

from .plan import (
    ENVIRONMENT,
    ETC_FILES,
    ETC_FOLDERS,
    INTERPRETER,
    LIB,
    LIBRARIES,
    OWN_FILES,
    SOURCE,
    TOP,
    BoxImage,
    Python,
)

# In a launcher, by the descriptor of its private copy (see backends/builds.py).
HUTCH = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))


def host_image() -> BoxImage:
    """Image `host`: the machine's own system."""
    mounted, links = {"/usr": "/usr", LIB + "/hutch_kernel": HUTCH + "/kernel"}, {}
    files = {path: text.encode() for path, text in OWN_FILES.items()}
    for path in (*TOP, *ETC_FOLDERS):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.isdir(path):
            mounted[path] = path
    for path in ETC_FILES:
        try:
            with open(path, "rb") as file:
                files[path] = file.read()
        except OSError:
            continue  # not every machine has every file
    return BoxImage(mounted, links, files)


def image_with(packages: Packages, host: BoxImage) -> BoxImage:
    """The machine's own system, with Python packages of its own."""
    mounted = {**host.mounted, ENVIRONMENT: packages.folder, SOURCE + "/hutch": HUTCH}
    links = dict(host.links)
    if not packages.prefix.startswith("/usr"):
        mounted[INTERPRETER] = packages.prefix
        library = sysconfig.get_config_var("INSTSONAME")
        if sysconfig.get_config_var("Py_ENABLE_SHARED") and library:
            links[f"{LIBRARIES}/{library}"] = f"{INTERPRETER}/lib/{library}"
    python = Python(packages.executable, packages.version, packages.preload)
    return replace(host, mounted=mounted, links=links, python=python)
