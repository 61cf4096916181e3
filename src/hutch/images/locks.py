"""Locks for files and folders: shared while in use, exclusive to make or remove them.

The lock of `x` is a flock on `x.lock`, which the kernel releases if its owner dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(thing: Path, how: int) -> Iterator[int | None]:
    """Hold the lock during the `with` block. Yields None if it is taken, with LOCK_NB.

    `how`: as for `flock`. Raises FileNotFoundError if the parent folder does not exist.
    """
    try:
        held = lock(thing, how)
    except BlockingIOError:
        yield None
        return
    try:
        yield held
    finally:
        if how & fcntl.LOCK_EX and not thing.exists():
            # There is nothing left to lock. Waiters notice that their lock file is gone.
            _beside(thing).unlink(missing_ok=True)
        os.close(held)


def lock(thing: Path, how: int) -> int:
    """Take the lock. Returns a descriptor that holds it until it is closed.

    Raises FileNotFoundError if the parent folder does not exist, and BlockingIOError if the lock
    is taken, with LOCK_NB.
    """
    path = _beside(thing)
    while True:
        held = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(held, how)
            # The file may have been removed while we waited; then a new one has the lock.
            if _is(held, path):
                return held
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _is(held: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), path.stat())
    except FileNotFoundError:
        return False


def _beside(thing: Path) -> Path:
    return thing.with_name(f"{thing.name}.lock")
