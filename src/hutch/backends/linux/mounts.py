"""Folders of this machine that are mounted in boxes of an engine, and whose they are."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hutch.errors import InvalidRequest
from hutch.types import Mount

from .folders import check_mounts, open_source, path_of


@dataclass(frozen=True)
class FoundMount:
    """A mount whose source is open."""

    source: str  # without links
    target: str
    read_only: bool
    owner: tuple[int, int]
    fd: int = -1  # of the source
    is_given: bool = False  # a folder of the server itself, which others cannot replace


@contextmanager
def open_mounts(
    mounts: tuple[Mount, ...], give: tuple[str, ...] = (), data: str = ""
) -> Iterator[tuple[FoundMount, ...]]:
    """Open the sources of mounts for the duration of the `with`. Changes nothing.

    `data`: the folder of a server, of which only what is in `give` can be mounted. Raises
    InvalidRequest for a mount that is not allowed.
    """
    check_mounts(mounts)
    found: list[FoundMount] = []
    try:
        for mount in mounts:
            fd = open_source(mount.source)
            source, is_given = path_of(fd), mount.source in give
            found.append(
                FoundMount(source, mount.target, mount.read_only, _owner(fd), fd, is_given=is_given)
            )
            if data and not is_given and (_is_in(source, data) or _is_in(data, source)):
                raise InvalidRequest(f"{source} may not be mounted: the server lives there")
        if data:
            _check_places(mounts)
        yield tuple(found)
    finally:
        for opened in found:
            os.close(opened.fd)


def _owner(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_uid, info.st_gid


def _is_in(path: str, folder: str) -> bool:
    return (path + "/").startswith(folder.rstrip("/") + "/")


def _check_places(mounts: tuple[Mount, ...]) -> None:
    """For a server: raises InvalidRequest if a mount is inside another one.

    Other users of the outer folder could move what is mounted inside it.
    """
    targets = [mount.target for mount in mounts]
    for inner in targets:
        for outer in targets:
            if inner != outer and _is_in(inner, outer):
                raise InvalidRequest(
                    f"{inner} is inside {outer}, where a folder is mounted, too: containers of a "
                    "server have their folders beside each other"
                )


def owner_of_mounts(found: tuple[FoundMount, ...], *, relaxed: bool) -> tuple[int, int] | None:
    """The owner of what the box may write to: it runs as that user. None if there is nothing.

    Raises InvalidRequest if there are several owners, or if it is root and that is not `relaxed`.
    """
    writable = [mount for mount in found if not mount.read_only]
    owners = {mount.owner[0] for mount in writable}
    if len(owners) > 1:
        whose = ", ".join(f"{mount.source} (uid {mount.owner[0]})" for mount in writable)
        raise InvalidRequest(
            f"a box has one user, and these folders have several: {whose}. "
            "Give them to one user (chown -R), or mount some read-only"
        )
    if owners == {0} and not relaxed:
        raise InvalidRequest(
            f"{writable[0].source} belongs to root, and a box does not run as root: give it to a "
            "user (chown -R UID), mount it read-only, or run the box as root: user root, and relax "
            "user"
        )
    return writable[0].owner if writable else None


def give_away(found: tuple[FoundMount, ...], ids: range) -> tuple[FoundMount, ...]:
    """Give folders that belong to root one of these user ids, permanently, if that is allowed.

    For a server that root runs: it makes the folders of workspaces, and only boxes use them.
    """
    return tuple(_given(mount, ids) if mount.is_given else mount for mount in found)


def _given(mount: FoundMount, ids: range) -> FoundMount:
    owner = _owner(mount.fd)  # another start may have given it away since `open_mounts`
    if owner[0] or os.geteuid() or mount.read_only:
        return replace(mount, owner=owner)
    uid = secrets.choice(ids)
    # Links are given away, not followed. The folder itself comes last: if we are interrupted, it
    # is still root's, and the next start begins again.
    for _, folders, files, fd in os.fwalk(".", topdown=False, onerror=_stop, dir_fd=mount.fd):
        for name in (*folders, *files):
            try:
                os.chown(name, uid, uid, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed by a box that already has this folder
        os.chown(fd, uid, uid)
    return replace(mount, owner=(uid, uid))


def _stop(exc: OSError) -> None:
    """For `os.fwalk`, which by default skips a folder that it cannot read: it would stay root's."""
    if not isinstance(exc, FileNotFoundError):  # removed by a box, as above
        raise exc
