"""Folders of one process, which the next one of ours removes if it was killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat


def prefix() -> str:
    """How the names of our folders begin, so that others can sweep them if we are killed."""
    return f"hutch-{os.getpid()}-{world()}-"


def new_folder() -> str:
    """A folder that only we may look into. Raises OSError if it cannot be made."""
    parent = os.environ.get("TMPDIR") or "/tmp"
    path = os.path.join(parent, prefix() + os.urandom(8).hex())
    os.mkdir(path, 0o700)
    return path


def sweep_folders() -> list[str]:
    """Remove the folders of processes that were killed before they could. Returns their paths."""
    parent, ours = os.environ.get("TMPDIR") or "/tmp", world()
    removed = []
    with os.scandir(parent) as entries:
        for entry in entries:
            found = re.fullmatch("hutch-([0-9]+)-([0-9]+)-[0-9a-z_]+", entry.name)
            # We cannot know whether a process of another pid namespace is alive.
            if not found or found[2] != ours or os.path.exists(f"/proc/{found[1]}"):
                continue
            with contextlib.suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                    shutil.rmtree(entry.path)
                    removed.append(entry.path)
    return removed


def world() -> str:
    """Our pid namespace: a pid means nothing in another one."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")
