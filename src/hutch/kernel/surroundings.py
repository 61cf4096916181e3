"""What user code may rely on besides its variables: directory, environment, paths, chance, sources.

Only changes since the kernel began are kept: what the box itself provides may be different, and
right, in the next one.
"""

from __future__ import annotations

import gc
import importlib
import linecache
import os
import random
import sys
import threading
from typing import Any

from .pickling import in_short

Lost = list[list[str]]

# How cells are named in tracebacks, and where `linecache` has their source.
CELL = "<cell "


_environ_then = dict(os.environ)
_path_then = list(sys.path)


def begin() -> None:
    """From here on, a change is the user's."""
    _environ_then.clear()
    _environ_then.update(os.environ)
    _path_then[:] = sys.path


def gather() -> dict[str, Any]:
    """What has changed, as plain values."""
    now = dict(os.environ)
    return {
        "directory": _directory(),
        "path": [one for one in sys.path if isinstance(one, str) and one not in _path_then],
        "environ": {k: v for k, v in now.items() if _environ_then.get(k) != v},
        "unset": [key for key in _environ_then if key not in now],
        "random": random.getstate(),
        "numpy": _numpy_random(),
        "sources": {k: v[2] for k, v in linecache.cache.items() if k.startswith(CELL)},  # type: ignore
    }


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _numpy_random() -> Any:
    chance = getattr(sys.modules.get("numpy"), "random", None)
    if chance is None:
        return None
    try:
        kind, keys, *rest = chance.get_state()
        return [kind, keys.tolist(), *rest]
    except Exception:
        return None  # a generator of the user's own choosing, which has no such state


def apply(kept: dict[str, Any]) -> Lost:
    """Make it so again, as far as loading variables may depend on it."""
    os.environ.update(kept["environ"])
    for key in kept["unset"]:
        os.environ.pop(key, None)
    sys.path += [one for one in kept["path"] if one not in sys.path]
    for name, lines in kept["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if kept["directory"]:
        try:
            os.chdir(kept["directory"])
        except OSError as error:
            return [["directory", f"{kept['directory']}: {error.strerror}"]]
    return []


def apply_chance(kept: dict[str, Any]) -> Lost:
    """Set the random generators, once nothing of ours draws from them any more."""
    random.setstate(kept["random"])
    if kept["numpy"] is not None:
        try:
            importlib.import_module("numpy").random.set_state(tuple(kept["numpy"]))
        except Exception as error:
            return [["numpy.random", in_short(error)]]
    return []


def running() -> Lost:
    """What goes on now besides us, and ends with this process."""
    threads = [one for one in threading.enumerate() if one is not threading.main_thread()]
    return [
        *[[f"thread {one.name}", "a thread cannot be saved"] for one in threads],
        *[[f"process {one}", "a running process cannot be saved"] for one in _children()],
        *[[f"task {one}", "a running task cannot be saved"] for one in _tasks()],
    ]


def _children() -> list[str]:
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                head, _, tail = file.read().rpartition(b")")
        except OSError:
            continue
        state, parent = tail.split()[:2]
        if int(parent) == os.getpid() and state != b"Z":
            found.append(f"{process} ({head.partition(b'(')[2].decode(errors='replace')})")
    return found


def _tasks() -> list[str]:
    kind = getattr(sys.modules.get("asyncio"), "Task", None)
    if kind is None:
        return []
    return [one.get_name() for one in gc.get_objects() if isinstance(one, kind) and not one.done()]
