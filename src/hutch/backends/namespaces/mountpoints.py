"""Places in the root of a new box, found without following a link.

The root may be an image of somebody's own making, where any name can be a link that leads out of
it, for it is not the root yet: whoever follows one with rights mounts or writes on the host. So
nothing here does. What is in the way of a place is replaced, in the box's own layer.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder(root: str, path: str) -> Iterator[int]:
    """A descriptor of this folder below `root`. It is made if it is not there."""
    fd = os.open(root, _LOOK | os.O_DIRECTORY)
    try:
        for name in path.split("/"):
            if name:
                outer, fd = fd, _step(fd, name)
                os.close(outer)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mount_point(root: str, path: str) -> Iterator[str]:
    """The same, as a name that mount(2) takes and that leads nowhere else."""
    with folder(root, path) as fd:
        yield f"/proc/self/fd/{fd}"


def write(root: str, path: str, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """A file with this content, instead of whatever is there."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        _clear(fd, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, mode, dir_fd=fd), "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
            if owner:
                os.fchown(file.fileno(), *owner)


def link(root: str, path: str, target: str, owner: tuple[int, int] | None) -> None:
    """A link, unless something is there."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        try:
            os.symlink(target, name, dir_fd=fd)
        except FileExistsError:
            return
        if owner:
            os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)


def touch(root: str, path: str) -> None:
    """A file, whatever is in it."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        try:
            if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                return
        except FileNotFoundError:
            pass
        _clear(fd, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o644, dir_fd=fd))


def _step(outer: int, name: str) -> int:
    try:
        return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=outer)
    except FileNotFoundError:
        pass
    except NotADirectoryError:  # a link, too, is none
        os.unlink(name, dir_fd=outer)
    os.mkdir(name, 0o755, dir_fd=outer)
    return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=outer)


def _clear(outer: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=outer)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        _clear_folder(outer, name)


def _clear_folder(outer: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=outer)
    except OSError as exc:
        raise OSError(exc.errno, f"{name} is a folder in this image, and must be a file") from None
