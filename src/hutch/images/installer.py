"""Runs installers (uv, npm, the compiler of modules) confined, and decides what they see.

An installer runs in a confined process (`backends/namespaces/confined.py`). Of the user's own files
it sees only those that tell where packages come from: see `_SHOWN` and `CONFIGURATION`.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote

from hutch.backends.namespaces.confine import Bounds, Confinement, InstallWatch, start, stop
from hutch.backends.namespaces.foreign import (
    check_links,
    remove_in_background,
    remove_tree,
    size_of_paths,
    walk_tree,
)
from hutch.errors import BackendUnavailable

__all__ = [
    "cache_for",
    "check_links",
    "confinement",
    "data_dir",
    "outside_usr",
    "remove_in_background",
    "remove_tree",
    "size_of_paths",
    "started",
    "walk_tree",
]

SILENCE = 0.25  # seconds
LARGEST = 1 << 20  # bytes of a configuration file

# Variables whose values may contain paths of this machine, which are shown read-only.
_SHOWN = re.compile(
    r"UV_(FIND_LINKS|INDEX|DEFAULT_INDEX|EXTRA_INDEX_URL|CONFIG_FILE)|NETRC|SSL_CLIENT_CERT"
    r"|SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|(npm_config|NPM_CONFIG)_(cafile|CAFILE|userconfig"
    r"|USERCONFIG)"
)
# Files in the home folder; an installer sees copies of them.
CONFIGURATION = (".netrc", ".npmrc", ".config/uv/uv.toml")


def data_dir() -> Path:
    """Where Hutch keeps its data: HUTCH_DATA_DIR, or `hutch` in the XDG data directory."""
    given = os.environ.get("HUTCH_DATA_DIR")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share", "hutch")


def cache_for(tool: str, chosen: str | None) -> str:
    """The download cache of a tool: the folder the user chose, or one in the data folder.

    Never the tool's default: other programs trust what is there, and an installer that a package
    has taken over could write to it. Raises BackendUnavailable if the folder cannot be made.
    """
    folder = Path(chosen) if chosen else data_dir() / "cache" / tool
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise BackendUnavailable(f"{folder} cannot be used ({exc.strerror})") from None
    return os.path.abspath(folder)


def confinement(
    env: Mapping[str, str],
    writable: Iterable[str | Path],
    readable: Iterable[str | Path] = (),
    measured: Iterable[str | Path] = (),
    bounds: Bounds | None = None,
    growing: Iterable[str] = (),
) -> Confinement:
    """What an installer with these environment variables sees."""
    home = env.get("HOME", "")
    files = dict(_contents(f"{home}/{name}" for name in CONFIGURATION if home))
    if config := env.get("XDG_CONFIG_HOME"):
        files |= _contents([f"{config}/uv/uv.toml"])
    for folder in env.get("XDG_CONFIG_DIRS", "/etc").split(":"):
        files |= _contents([f"{folder}/uv/uv.toml"])
    shown = [place for name in env if _SHOWN.fullmatch(name) for place in _places(env[name])]
    return Confinement(
        readable=tuple({*map(str, readable), *shown}),
        writable=tuple(map(str, writable)),
        files=files,
        measured=tuple(map(str, measured)),
        bounds=bounds or Bounds(),
        growing=tuple(growing),
    )


def outside_usr(paths: Iterable[Path]) -> list[Path]:
    """The paths that must be shown to an installer explicitly, as it always sees /usr."""
    return [path for path in paths if not path.is_relative_to("/usr")]


def _places(value: str) -> Iterator[str]:
    """Paths in the value of a variable: one, or a list of paths and URLs, some after `NAME=`."""
    for word in (value, *re.split(r"[\s,]+", value)):
        place = re.sub(r"^[\w.-]+=", "", word)
        place = unquote(place.removeprefix("file://")) if place.startswith("file://") else place
        if place.startswith("/") and os.path.exists(place):
            yield os.path.abspath(place)


def _contents(paths: Iterable[str]) -> Iterator[tuple[str, bytes]]:
    for path in paths:
        try:
            if os.path.isfile(path) and os.path.getsize(path) <= LARGEST:
                yield os.path.abspath(path), Path(path).read_bytes()
        except OSError:
            continue


@contextmanager
def started(
    argv: list[str], env: Mapping[str, str], lock: int, seen: Confinement, cwd: str = "/"
) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[str]]]:
    """Run a confined program. Yields the process, and the lines that it prints to either output.

    `lock` is a descriptor that stays open until the program has ended, even if this process is
    killed. The program and everything it started have ended when the `with` block is left. An empty
    line means that it printed nothing for SILENCE seconds, so that the caller can check for
    cancellation. Raises BackendUnavailable or NoSpace if it exceeds its bounds, and InvalidRequest
    if it left something in the measured folders that is not safe to use.
    """
    process = start(argv, {**env, "TMPDIR": "/tmp"}, cwd, seen, lock)
    assert process.stdout
    watch = InstallWatch(seen)
    with process.stdout as output:
        try:
            yield process, _lines(output.fileno(), watch)
            while process.poll() is None:  # it may have closed its output and still run
                watch.check()
                time.sleep(0.01)
            watch.check(at_end=True)
        except BaseException:
            stop(process)
            raise


def _lines(output: int, watch: InstallWatch) -> Iterator[str]:
    held = b""
    while True:
        watch.check()
        if not select.select([output], [], [], SILENCE)[0]:
            yield ""
            continue
        data = os.read(output, 65536)
        *whole, held = (held + data).split(b"\n")
        if not data and held:
            whole.append(held)
        if len(held) > LARGEST:  # no real line is that long, and memory must stay bounded
            held = b""
        for line in whole:
            if text := line.decode(errors="replace").rstrip():
                yield text
        if not data:
            return
