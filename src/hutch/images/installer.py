"""What an installer (uv, npm, the compiler of modules) sees of this machine, and runs it there.

It runs in a confined process (`backends/namespaces/confined.py`). Of the user's own files it is
shown those by which packages are found, and no others: see `_SHOWN` and `CONFIGURATION`.
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

# Variables whose values may be places on this machine, which are shown read-only.
_SHOWN = re.compile(
    r"UV_(FIND_LINKS|INDEX|DEFAULT_INDEX|EXTRA_INDEX_URL|CONFIG_FILE)|NETRC|SSL_CLIENT_CERT"
    r"|SSL_CERT_(FILE|DIR)|NODE_EXTRA_CA_CERTS|(npm_config|NPM_CONFIG)_(cafile|CAFILE|userconfig"
    r"|USERCONFIG)"
)
# Below the home folder; their content is copied.
CONFIGURATION = (".netrc", ".npmrc", ".config/uv/uv.toml")


def data_dir() -> Path:
    """Where Hutch keeps what lasts: HUTCH_DATA_DIR, or where the desktop standard says."""
    given = os.environ.get("HUTCH_DATA_DIR")
    if given:
        return Path(given).absolute()
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share", "hutch")


def cache_for(tool: str, chosen: str | None) -> str:
    """The folder that a tool keeps downloads in: the one the user chose, or one of our own.

    Never the tool's usual one. Other programs trust what is there, and an installer that a package
    took over could write to it.
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
    """What an installer with these variables sees."""
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
    """Those that an installer does not see anyway."""
    return [path for path in paths if not path.is_relative_to("/usr")]


def _places(value: str) -> Iterator[str]:
    """Paths in a variable's value: one, or a list of paths and URLs, which may have names."""
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
    """A confined program and the lines it says, on either output.

    It has ended, with all that it started, when the `with` is left. A line that is empty says that
    it has been silent for a moment: time to look whether anybody still waits for it. Raises
    BackendUnavailable and NoSpace when it goes beyond its bounds, and InvalidRequest if it left
    something in the measured folders that is not safe to work with.
    """
    process = start(argv, {**env, "TMPDIR": "/tmp"}, cwd, seen, lock)
    assert process.stdout
    watch = InstallWatch(seen)
    with process.stdout as output:
        try:
            yield process, _lines(output.fileno(), watch)
            while process.poll() is None:  # it may have closed its output and gone on
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
        if len(held) > LARGEST:  # no line is that long: what is said without end is dropped
            held = b""
        for line in whole:
            if text := line.decode(errors="replace").rstrip():
                yield text
        if not data:
            return
