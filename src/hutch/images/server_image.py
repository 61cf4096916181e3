"""What `hutch serve` needs in an image, beside the runtime bundle at its root:

    server/bin/hutch   the command
    server/site        Hutch and the packages it needs, and what of Python a bundle leaves out
    server/lib         libraries of those
    lib64              where the kernel looks for the loader

Variables of the image say where these are. The programs of boxes do not heed them (see `bundle`),
so boxes may use this image as their runtime image, too. Nothing else is in it: no shell, and
nothing that belongs to a distribution.
"""

from __future__ import annotations

import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import IO

from packaging.requirements import Requirement

from hutch.errors import BackendUnavailable

from .bundle import HUTCH, Bundle, copy_file, loader_of, needed_libraries, trimmed

USER = 65532  # who the image runs as, unless it is told otherwise
PORT = 8080
ENV = {
    "PATH": "/server/bin:/bin",
    # Python does not look for itself in "/".
    "PYTHONHOME": "/",
    "PYTHONPATH": "/server/site",
    "PYTHONSAFEPATH": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUTF8": "1",
    "LD_LIBRARY_PATH": "/lib:/server/lib",
    "HUTCH_BUNDLE": "/",
}
COMMAND = "#!/bin/python3\nfrom hutch.cli import main\n\nmain()\n"

# What a bundle leaves out of Python, and a server needs.
MODULES = ("ssl.py", "sqlite3")
EXTENSIONS = ("_hashlib", "_sqlite3", "_ssl")
# Builds images, which a cluster does not ask its server for: 60 MB.
NOT_NEEDED = ("uv",)


def config() -> dict[str, object]:
    """How a container is started from the image."""
    return {
        "Entrypoint": ["hutch"],
        "Env": [f"{name}={value}" for name, value in ENV.items()],
        "ExposedPorts": {f"{PORT}/tcp": {}},
        "User": f"{USER}:{USER}",
    }


def write_layer(bundle: Bundle, layer: IO[bytes]) -> None:
    """Write the layer on top of that of the bundle.

    The same installation gives the same bytes, but for byte code: `marshal` writes the same code
    differently, depending on what else the process has loaded.

    Raises BackendUnavailable if something of it is not installed here.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _lay_out(bundle, folder)
        with tarfile.open(fileobj=layer, mode="w", format=tarfile.GNU_FORMAT) as archive:
            for path in sorted(folder.rglob("*")):
                archive.add(path, str(path.relative_to(folder)), recursive=False, filter=_of_nobody)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Nothing in the image tells who wrote it, where or when."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    may_run = entry.isdir() or entry.name.startswith(("server/bin/", "server/lib/"))
    entry.mode = 0o755 if may_run else 0o644
    return entry


def _lay_out(bundle: Bundle, folder: Path) -> None:
    interpreter = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    loader, site, lib = loader_of(interpreter), folder / "server/site", folder / "server/lib"
    files = dict(_python_files())
    for found in _distributions():
        files |= _files(found)
    files |= {
        f"hutch/{path.relative_to(HUTCH)}": path
        for path in HUTCH.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    lib.mkdir(parents=True)
    for name, source in files.items():
        copy_file(source, site / name)
        if ".so" not in source.suffixes:
            continue
        # None: one is missing, so that it cannot be imported here either.
        for library, where in (needed_libraries(loader, source) or {}).items():
            is_own = where in files.values()  # its wheel brings it, and it is found beside it
            if not is_own and not (bundle.path / "lib" / library).exists():
                (lib / library).write_bytes(trimmed(where.read_bytes()))
    command = folder / "server/bin/hutch"
    command.parent.mkdir()
    command.write_text(COMMAND)
    if loader.parent != Path("/lib"):
        link = folder / loader.relative_to("/")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"/lib/{loader.name}")


def _python_files() -> Iterator[tuple[str, Path]]:
    stdlib = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = stdlib / module
        for source in [path] if path.is_file() else path.rglob("*.py"):
            yield str(source.relative_to(stdlib)), source
    extensions = Path(sys.base_exec_prefix, sys.platlibdir, stdlib.name, "lib-dynload")
    for name in EXTENSIONS:
        if name not in sys.builtin_module_names:
            for source in extensions.glob(f"{name}.*.so"):
                yield source.name, source


def _distributions() -> Iterator[metadata.Distribution]:
    """What Hutch requires, and what that requires, as it is installed here."""
    waiting, seen = [Requirement("hutch")], {"hutch"}
    while waiting:
        wanted = waiting.pop()
        try:
            found = metadata.distribution(wanted.name)
        except metadata.PackageNotFoundError:
            raise BackendUnavailable(
                f"{wanted.name} is not installed: install Hutch again"
            ) from None
        if wanted.name != "hutch":
            yield found
        for line in found.requires or ():
            requirement = Requirement(line)
            marker, key = requirement.marker, str(requirement.name).lower()
            extras = [*wanted.extras, ""]
            if marker and not any(marker.evaluate({"extra": extra}) for extra in extras):
                continue
            key += "".join(sorted(f"[{extra}]" for extra in requirement.extras))
            if key not in seen and requirement.name not in NOT_NEEDED:
                seen.add(key)
                waiting.append(requirement)


def _files(found: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    if found.files is None:
        raise BackendUnavailable(f"{found.name}: it is not known which files it installed")
    for file in found.files:
        source = Path(str(found.locate_file(file)))
        # "..": commands, which nothing here runs.
        if ".." not in file.parts and "__pycache__" not in file.parts and source.is_file():
            yield str(file), source.resolve()
