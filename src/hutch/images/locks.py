"""A lock beside a file or a folder: who uses it shares it, who makes or removes it has it alone.

The kernel lets go of it for those who die.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(thing: Path, how: int) -> Iterator[int | None]:
    """The lock for the length of a `with`; None if others have it and we do not wait."""
    try:
        held = lock(thing, how)
    except BlockingIOError:
        yield None
        return
    try:
        yield held
    finally:
        if how & fcntl.LOCK_EX and not thing.exists():
            # Nothing is left to be locked. Those who wait will see that their file is gone.
            _beside(thing).unlink(missing_ok=True)
        os.close(held)


def lock(thing: Path, how: int) -> int:
    """A descriptor that has it until it is closed. FileNotFoundError: not even the folder is."""
    path = _beside(thing)
    while True:
        held = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(held, how)
            if _is(held, path):
                return held  # and not of a file that was removed while we waited
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
