"""What an installer wrote, which is not trusted: walked, checked and removed (see hutch/tree.py).

After `claim_tree`, the usual functions (`os.walk`) are safe to use.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from hutch import tree
from hutch.backends.spawn import boot
from hutch.errors import InvalidRequest

DEEPEST = 100  # folders in folders; packages have a dozen
MOST = 1_000_000  # files and folders; the largest environments have some 100,000
LONGEST = 2048  # bytes of a path below the top; the kernel takes 4096 for a whole one


def walk_tree(
    folder: str | Path, *, skip_errors: bool = False
) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder, by path from there, with its own status. Follows no link.

    With `skip_errors`, what cannot be read or vanishes is left out. Raises OSError, and
    InvalidRequest for a tree that is too deep or has too many entries.
    """
    fd = os.open(folder, tree.FOLDER)
    try:
        for entry in tree.walk(
            fd,
            onerror=_ignore if skip_errors else tree.stop,
            max_depth=DEEPEST,
            max_path=LONGEST,
            max_entries=MOST,
        ):
            yield entry.path, entry.status
    except tree.TreeTooLarge as exc:
        raise InvalidRequest(f"the packages have {exc}") from None
    finally:
        os.close(fd)


def _ignore(exc: OSError) -> None:
    pass


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
                    if count > MOST:
                        raise InvalidRequest(
                            f"the packages have more than {MOST} files and folders"
                        )
    return size


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
                    f"the packages contain {path[:200]!r}, which is not a file, folder or link"
                )
            if status.st_uid != us[0]:
                os.chown(os.path.join(folder, path), *us, follow_symlinks=False)
    except FileNotFoundError:
        return  # nothing was written
    except PermissionError as exc:
        raise InvalidRequest(f"the packages contain what cannot be read: {exc}") from None


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
        tree.remove(folder)


# Removes a folder in a process of its own, for callers that must not wait.
#
# Ten thousand files take a busy disk half a minute: too long after Ctrl-C.


def remove_in_background(folder: str | Path) -> None:
    """Start the removal and return. Never raises; if no process can be started, removes here."""
    argv = boot("hutch.backends.namespaces.foreign", os.path.abspath(folder))
    quiet = subprocess.DEVNULL
    try:
        subprocess.run(
            argv,
            env={},
            cwd="/",
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            check=True,
            start_new_session=True,
        )
    except (OSError, subprocess.SubprocessError):
        remove_tree(folder)


def main(folder: str) -> None:
    """Remove the folder in a child, so that our parent need not wait for it."""
    if not os.fork():
        os.nice(10)
        remove_tree(folder)
