"""Removes a folder in a process of its own, for callers that must not wait.

Ten thousand files take a busy disk half a minute: too long after Ctrl-C.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hutch.backends.spawn import boot

from .foreign import remove_tree


def remove_in_background(folder: str | Path) -> None:
    """Start the removal, and return. Never raises; where no process can be started, it waits."""
    argv = boot("hutch.backends.namespaces.removal", os.path.abspath(folder))
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            argv, env={}, cwd="/", stdin=quiet, stdout=quiet, stderr=quiet, check=True,
            start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        remove_tree(folder)


def main(folder: str) -> None:
    """Removes the folder in a child, so that whoever started us need not wait for it."""
    if not os.fork():
        os.nice(10)
        remove_tree(folder)
