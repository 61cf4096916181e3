"""Trees that a program wrote which is not trusted: walked, checked and removed.

Such a tree may be nested deeper than Python can recurse or a path can be long, and hold FIFOs, and
folders without rights. So nothing here recurses, and folders are opened by their name in the one
above, never through a link. After `claim_tree`, the usual functions (`os.walk`) are safe to use.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hutch.errors import InvalidRequest

DEEPEST = 100  # folders in folders; packages have a dozen
MOST = 1_000_000  # files and folders; the largest environments have some 100,000
LONGEST = 2048  # bytes of a path below the top; the kernel takes 4096 for a whole one

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_HANDLE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def walk_tree(
    folder: str | Path, *, skip_errors: bool = False
) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, by path from there, with its own status. Follows no link.

    With `skip_errors`, what cannot be read or vanishes meanwhile is left out. Raises OSError, and
    InvalidRequest for a tree that is too deep or has too many entries.
    """
    levels = [("", os.open(folder, _FOLDER))]
    names: list[list[str]] = []
    count = 0
    try:
        names.append(os.listdir(levels[0][1]))
        while levels:
            if not names[-1]:
                os.close(levels.pop()[1])
                names.pop()
                continue
            count += 1
            _check_count(count)
            (path, fd), name = levels[-1], names[-1].pop()
            inner = f"{path}/{name}" if path else name
            try:
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode):
                    if len(levels) >= DEEPEST or len(os.fsencode(inner)) > LONGEST:
                        raise InvalidRequest(
                            "the packages have folders that are nested too deeply: "
                            f"{inner[:100]!r}…"
                        )
                    levels.append((inner, os.open(name, _FOLDER, dir_fd=fd)))
                    names.append([])
                    names[-1] += os.listdir(levels[-1][1])
            except OSError:
                if not skip_errors:
                    raise
                continue
            yield inner, status
    finally:
        for _, fd in levels:
            os.close(fd)


def size_of_tree(folder: str | Path) -> int:
    """Bytes on disk, while it is written. Raises InvalidRequest as `walk_tree`."""
    try:
        return sum(status.st_blocks * 512 for _, status in walk_tree(folder, skip_errors=True))
    except FileNotFoundError:
        return 0


def size_of_paths(paths: Iterable[str]) -> int:
    """Bytes on disk of files and folders, while they are written. Follows no link.

    Raises InvalidRequest for more entries in all of them together than `MOST`, or too deep ones.
    """
    size = count = 0
    for path in paths:
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            size += status.st_blocks * 512
            if stat.S_ISDIR(status.st_mode):
                for _, inner in walk_tree(path, skip_errors=True):
                    size += inner.st_blocks * 512
                    count += 1
                    _check_count(count)
    return size


def _check_count(count: int) -> None:
    if count > MOST:
        raise InvalidRequest(f"the packages have more than {MOST} files and folders")


def give_tree(folder: str | Path, user: int) -> None:
    """Make a user the owner of a folder and all in it, of which no other user may write to it."""
    for path, _ in walk_tree(folder):
        os.chown(os.path.join(folder, path), user, user, follow_symlinks=False)
    os.chown(folder, user, user)


def claim_tree(folder: str | Path) -> None:
    """Make all in it ours. The program that wrote it has ended, and could set no set-id bits.

    Raises InvalidRequest unless all are files, folders and links that can be read.
    """
    us = os.geteuid(), os.getegid()
    try:
        if os.stat(folder).st_uid != us[0]:
            os.chown(folder, *us)
        for path, status in walk_tree(folder):
            if not (
                stat.S_ISREG(status.st_mode)
                or stat.S_ISDIR(status.st_mode)
                or stat.S_ISLNK(status.st_mode)
            ):
                raise InvalidRequest(
                    f"the packages hold {path[:200]!r}, which is no file, folder or link"
                )
            if status.st_uid != us[0]:
                os.chown(os.path.join(folder, path), *us, follow_symlinks=False)
    except FileNotFoundError:
        return  # nothing was written
    except PermissionError as exc:
        raise InvalidRequest(f"the packages hold what cannot be read: {exc}") from None


def check_links(folder: Path) -> None:
    """Raises InvalidRequest if a link in the tree leads out of it."""
    top = os.path.realpath(folder)
    for path, status in walk_tree(folder):
        if stat.S_ISLNK(status.st_mode):
            target = os.path.realpath(os.path.join(top, path))
            if not target.startswith(f"{top}/"):
                raise InvalidRequest(f"a package has a link that leads out of it: {path[:200]!r}")


def remove_tree(folder: str | Path) -> None:
    """Remove a folder and all in it. Best-effort: never raises, and leaves what cannot go."""
    with suppress(OSError):
        _unlock(os.fspath(folder), None)
        top = os.open(folder, _FOLDER)
        try:
            while sum([_take_apart(name, top) for name in os.listdir(top)]):
                pass
        finally:
            os.close(top)
        os.rmdir(folder)


def _take_apart(name: str, top: int) -> bool:
    """Remove one entry of the top folder. Folders in it are moved up to the top first, so that
    no more than two levels are ever open. Answers whether anything was done."""
    done = False
    try:
        if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=top)
            return True
        _unlock(name, top)
        fd = os.open(name, _FOLDER, dir_fd=top)
        try:
            for inner in os.listdir(fd):
                with suppress(OSError):
                    try:
                        os.unlink(inner, dir_fd=fd)
                    except (IsADirectoryError, PermissionError):
                        _unlock(inner, fd)  # a folder that is moved is written to: its `..`
                        os.rename(inner, secrets.token_hex(8), src_dir_fd=fd, dst_dir_fd=top)
                    done = True
        finally:
            os.close(fd)
        os.rmdir(name, dir_fd=top)
    except OSError as exc:
        return done or exc.errno == errno.ENOENT
    return True


def _unlock(name: str, above: int | None) -> None:
    """Let the owner of a folder change it."""
    fd = os.open(name, _HANDLE, dir_fd=above)
    try:
        mode = stat.S_IMODE(os.fstat(fd).st_mode)
        if mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{fd}", mode | 0o700)
    finally:
        os.close(fd)
