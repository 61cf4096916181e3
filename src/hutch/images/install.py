"""Installs packages with uv into a folder that is a virtual environment when mounted at /opt/env.

The packages are not trusted, so none of their code runs on this machine: only wheels are installed
(building from source runs code), and the interpreter that uv queries, and that compiles, is the
base one, which imports nothing from the folder.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hutch.errors import BackendUnavailable, InvalidRequest

from .environment import (
    ENVIRONMENT,
    VERSION,
    Image,
    base_interpreter,
    base_prefix,
    interpreter_in_box,
)
from .installer import confinement, outside_usr, started
from .requirements import local_wheels, parse_requirement
from .uv import Progress, Report, pip_install

__all__ = [
    "RECORD",
    "SITE_PACKAGES",
    "Progress",
    "Report",
    "compile_modules",
    "errors_of_packages",
    "install",
    "is_script",
    "make_readable",
]

SITE_PACKAGES = f"lib/python{VERSION}/site-packages"
RECORD = "hutch.json"
LARGEST = 64 << 20  # bytes of a script or a RECORD, which are read whole


def install(image: Image, folder: Path, lock: int, report: Report) -> None:
    """Install the packages of this image into `folder`, which must exist and be empty.

    `lock` is a descriptor that stays locked while the programs started here run, even if this
    process is killed. Raises InvalidRequest if the packages are not available, or not together,
    BackendUnavailable if the cause is this machine or its network, and NoSpace.
    """
    if sys.platlibdir != "lib":
        (folder / sys.platlibdir).symlink_to("lib")
    # Parsed again, as the image may not have been made by Image.python.
    packages = [*map(parse_requirement, image.packages)]
    words = ["--prefix", str(folder), "--", "pip", *packages]
    pip_install(words, folder, lock, report, shown=local_wheels(packages))
    with errors_of_packages():
        _take_out_what_tells_of_this_machine(folder)
    place = folder / SITE_PACKAGES
    if not place.is_dir():  # it was a link, or below one, and links have been removed
        raise InvalidRequest(f"the packages left no folder {SITE_PACKAGES}")
    compile_modules(place, f"{ENVIRONMENT}/{SITE_PACKAGES}", lock, report)
    with errors_of_packages():
        _add_interpreter(folder)
        (folder / RECORD).unlink(missing_ok=True)
    installed = [_name_of(path) for path in place.glob("*.dist-info")]
    about = {
        "packages": image.described(),
        "installed": sorted(installed),
        "python": sys.version.partition(" ")[0],
        "bytes": make_readable(folder),
    }
    (folder / RECORD).write_text(json.dumps(about, indent=2) + "\n")
    (folder / RECORD).chmod(0o644)


@contextmanager
def errors_of_packages() -> Iterator[None]:
    """Raises InvalidRequest for errors that are caused by the content of a package."""
    try:
        yield
    except (IsADirectoryError, NotADirectoryError, FileExistsError) as exc:
        name = os.path.basename(exc.filename or "")
        raise InvalidRequest(f"a package is malformed: {name!r}: {exc.strerror}") from None
    except (ValueError, csv.Error) as exc:  # not UTF-8, a NUL in a name, or malformed CSV
        raise InvalidRequest(f"a package is malformed: {exc}") from None


# --- the folder --------------------------------------------------------------------------


def _take_out_what_tells_of_this_machine(folder: Path) -> None:
    """Remove links, uv's own files, and paths of this machine in scripts.

    Wheels have no links, so none is needed, and one could lead out of the folder.
    """
    for parent, folders, files in os.walk(folder, onerror=_stop):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if path.is_symlink() and not _is_our_link(path, folder):
                path.unlink()
                if name in folders:
                    folders.remove(name)  # or `os.walk` would try to enter it
    (folder / ".lock").unlink(missing_ok=True)
    outer, inner = str(base_interpreter()).encode(), f"{ENVIRONMENT}/bin/python3".encode()
    scripts = {}
    for script in filter(is_script, (folder / "bin").glob("*")):
        lines = script.read_bytes().split(b"\n", 3)
        # Three lines: an interpreter path too long for #! is in a line of sh below it.
        head, rest = lines[:3], lines[3:]
        if head[0].startswith(b"#!") and any(outer in line for line in head):
            content = b"\n".join([*(line.replace(outer, inner) for line in head), *rest])
            script.write_bytes(content)
            scripts[f"../../../bin/{script.name}"] = content
    for record in (folder / SITE_PACKAGES).glob("*.dist-info/RECORD"):
        _mend(record, scripts)


def _stop(exc: OSError) -> NoReturn:
    """For `os.walk`, which otherwise skips a folder that it cannot read."""
    raise exc


def _is_our_link(path: Path, folder: Path) -> bool:
    """Whether it is the link from lib64 to lib that `install` made, unchanged."""
    ours = sys.platlibdir != "lib" and path == folder / sys.platlibdir
    return ours and os.readlink(path) == "lib"


def is_script(path: Path) -> bool:
    """Whether it is a regular file that starts with #! and is at most LARGEST bytes."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > LARGEST:
        return False
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _mend(record: Path, scripts: dict[str, bytes]) -> None:
    """Update a RECORD: new hashes for changed scripts, and without uv's own files."""
    if record.stat().st_size > LARGEST:
        raise InvalidRequest(f"{record.parent.name}: its RECORD is too large")
    with record.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    kept = []
    for row in rows:
        name = row[0]
        if re.fullmatch(r"[^/]+\.dist-info/(direct_url|uv_cache|uv_build)\.json", name):
            (record.parent.parent / name).unlink(missing_ok=True)
            continue
        if name in scripts:
            digest = base64.urlsafe_b64encode(hashlib.sha256(scripts[name]).digest())
            row = [name, f"sha256={digest.decode().rstrip('=')}", str(len(scripts[name]))]
        kept.append(row)
    with record.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(kept)


def compile_modules(place: Path, inside: str, lock: int, report: Report) -> None:
    """Compile all modules below `place`, a folder that boxes have at `inside`.

    Python never checks this byte code against the source. Raises BackendUnavailable if compiling
    fails, and what `started` raises.
    """
    total = sum(1 for _ in place.rglob("*.py"))
    report(Progress("compiling", None, 0, total))
    script = str(Path(__file__).with_name("compile.py"))
    argv = [str(base_interpreter()), "-I", "-S", script, str(place), inside]
    seen = confinement({}, [place], [*outside_usr([base_prefix(), Path(script)])], [place])
    with started([*argv, str(os.cpu_count() or 1)], {}, lock, seen) as (process, lines):
        progress, done = Progress("compiling", None, 0, total), 0
        for line in lines:
            if line:
                done += 1
                package = line.partition("/")[0]
                progress = Progress("compiling", package, min(done, total), total)
            report(progress)
    if process.returncode:
        raise BackendUnavailable("compiling the packages was cut short: is there room enough?")


def _add_interpreter(folder: Path) -> None:
    inner = interpreter_in_box()
    (folder / "bin").mkdir(exist_ok=True)
    links = {"python3": inner, "python": "python3", f"python{VERSION}": "python3"}
    for name, target in links.items():
        (folder / "bin" / name).unlink(missing_ok=True)
        (folder / "bin" / name).symlink_to(target)
    settings = folder / "pyvenv.cfg"
    settings.unlink(missing_ok=True)
    settings.write_text(
        f"home = {os.path.dirname(inner)}\n"
        "include-system-site-packages = false\n"
        f"version = {sys.version.partition(' ')[0]}\n"
    )


def make_readable(folder: Path) -> int:
    """Make the folder readable for all users, and return the bytes that it takes on disk."""
    size = 0
    for parent, _, files in os.walk(folder, onerror=_stop):
        os.chmod(parent, 0o755)
        for name in files:
            path = Path(parent, name)
            status = path.lstat()
            size += status.st_blocks * 512
            if not path.is_symlink():
                path.chmod(0o755 if status.st_mode & 0o100 else 0o644)
    return size


def _name_of(info: Path) -> str:
    name, _, version = info.name.removesuffix(".dist-info").rpartition("-")
    return f"{name.replace('_', '-').lower()}=={version}"
