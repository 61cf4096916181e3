"""Which process or server owns a box: an engine may hold the boxes of many.

An *owner scope* is all boxes of one process, or of one server. That of a process is named after the
process, so that a box shows whether its owner still runs; that of a server has a name
that is kept in the folder of the server.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from hutch import pidfile
from hutch.backends.linux.folders import open_folder
from hutch.errors import BackendUnavailable, BoxLost

NAME_FILE = "docker.yard"
PARTS = 5  # of the name of a process's scope
BOXES = "docker"  # in a lasting folder: one folder for each box


@dataclass(frozen=True)
class OwnerScope:
    id: str
    boxes: str  # the folder in which each box has its own
    swept: int = 0  # folders of dead processes that were removed on the way

    def name_of(self, box: str) -> str:
        """What its container is called. Two scopes may have boxes of the same name."""
        return f"hutch-{hashlib.sha256(self.id.encode()).hexdigest()[:8]}-{box}"

    def make(self, box: str) -> str:
        """A new folder for a box, which the box's user may look into."""
        path = os.path.join(self.boxes, f"{box}-{os.urandom(4).hex()}")
        os.mkdir(path)
        os.chmod(path, 0o755)  # regardless of our umask
        return path

    def place(self, name: str) -> str:
        """The folder of a box, by its name. Raises BoxLost if the name is invalid."""
        if not re.fullmatch("[0-9a-z-]{1,80}", name):
            raise BoxLost(f"there is no folder {name!r} of a box")
        return os.path.join(self.boxes, name)

    def places(self) -> list[str]:
        """The folders of boxes that are there."""
        try:
            return [entry.path for entry in os.scandir(self.boxes)]
        except FileNotFoundError:  # removed by something that cleans up
            return []

    def clear(self, path: str) -> None:
        if path:
            shutil.rmtree(path, ignore_errors=True)


def of_process() -> OwnerScope:
    """The scope of this process, which ends with it."""
    swept = len(sweep_folders())
    return OwnerScope(name_of_process(), new_folder(), swept)


def lasting(folder: str) -> OwnerScope:
    """The scope of a folder, which is made if it is missing.

    Raises BackendUnavailable if the folder is not ours alone, or if the name in it is damaged.
    """
    os.close(open_folder(folder))
    boxes, name = os.path.join(folder, BOXES), os.path.join(folder, NAME_FILE)
    with contextlib.suppress(FileExistsError):
        os.mkdir(boxes, 0o700)
    with contextlib.suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600)
        os.write(fd, secrets.token_hex(16).encode())
        os.close(fd)
    with open(name) as file:
        id = file.read().strip()
    if not re.fullmatch("[0-9a-f]{32}", id):
        raise BackendUnavailable(f"{name} is not whole: remove it, and boxes of before are lost")
    return OwnerScope(id, boxes)


# --- processes --------------------------------------------------------------------------


def name_of_process() -> str:
    pid = os.getpid()
    # Several backends may be in one process, and none knows the boxes of another.
    return f"{pidfile.boot()}/{_world()}/{pid}/{pidfile.began(pid) or 0}/{secrets.token_hex(4)}"


def is_dead(scope: str) -> bool:
    """Whether it belongs to a process of this machine that has ended.

    False if we cannot know: for a process of another machine, or of another pid namespace.
    """
    parts = scope.split("/")
    if len(parts) != PARTS or not (parts[2].isdigit() and parts[3].isdigit()):
        return False
    boot, world, pid, began, _ = parts
    if (boot, world) != (pidfile.boot(), _world()):
        return False
    return not pidfile.PidFile(int(pid), int(began), boot).is_alive


def is_of_process(scope: str) -> bool:
    return scope.count("/") == PARTS - 1


def is_without_server(scope: str, place: str) -> bool:
    """Whether it belongs to a data folder of this machine that no server uses at the moment."""
    try:
        with open(os.path.join(place, "run", NAME_FILE)) as file:
            is_here = place.startswith("/") and file.read(64).strip() == scope
    except (OSError, ValueError):
        return False
    return is_here and pidfile.server_of(Path(place)) is None


def _world() -> str:
    """Our pid namespace: a pid means nothing in another one."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


# --- folders ----------------------------------------------------------------------------


def prefix() -> str:
    """How the names of our folders begin, so that others can sweep them if we are killed."""
    return f"hutch-{os.getpid()}-{_world()}-"


def new_folder() -> str:
    parent = os.environ.get("TMPDIR") or "/tmp"
    path = os.path.join(parent, prefix() + os.urandom(8).hex())
    os.mkdir(path, 0o700)
    return path


def sweep_folders() -> list[str]:
    """Remove the folders of processes that were killed before they could. Returns their paths."""
    parent, world = os.environ.get("TMPDIR") or "/tmp", _world()
    removed = []
    with os.scandir(parent) as entries:
        for entry in entries:
            found = re.fullmatch("hutch-([0-9]+)-([0-9]+)-[0-9a-z_]+", entry.name)
            # We cannot know whether a process of another pid namespace is alive.
            if not found or found[2] != world or os.path.exists(f"/proc/{found[1]}"):
                continue
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                    shutil.rmtree(entry.path)
                    removed.append(entry.path)
    return removed
