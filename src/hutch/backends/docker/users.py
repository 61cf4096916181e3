"""The user that a box runs as, and the folders of this machine that are mounted for that user.

The image is not trusted: its /etc/passwd is read with limits on everything, never through NSS, and
boxes see a file in its place that we write, line by line.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from hutch.backends import linux
from hutch.backends.contained import HOME, OWN
from hutch.backends.linux.folders import check_mounts, open_source, path_of
from hutch.errors import InvalidRequest
from hutch.guest.relay import RELAY
from hutch.types import Mount

MAX_SIZE = 256 * 1024  # bytes of either file
MAX_LINES = 2000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?")
PATH = re.compile(r"/[A-Za-z0-9_./+-]{0,254}|")

KNOWN = {"root": 0, "nobody": 65534, "nogroup": 65534}  # if the image does not define them
OWN_OF_FEW = range(20_000, 60_000)  # the same, if containers have 65,536 ids only
# Reserved in containers, besides what is reserved in every box: the folder with our socket.
RESERVED = "/.hutch-host"


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    gid: int
    home: str = "/"
    shell: str = "/bin/sh"


@dataclass(frozen=True)
class Users:
    """The users and groups of an image."""

    users: tuple[User, ...] = ()
    groups: tuple[tuple[str, int], ...] = ()

    def user(self, name: str) -> User | None:
        """Find a user by name or number. A number need not be in the file."""
        number = _number(name)
        for user in self.users:
            if user.uid == number if number is not None else user.name == name:
                return user
        if name in KNOWN:
            return User(name, KNOWN[name], KNOWN[name])
        return None if number is None else User(name, number, 0)

    def group(self, name: str) -> int | None:
        number = _number(name)
        if number is not None:
            return number
        return next((gid for group, gid in self.groups if group == name), KNOWN.get(name))


@dataclass(frozen=True)
class BoxUser:
    """The user and group ids of a box."""

    uid: int
    gid: int
    is_own: bool = False  # no user of the engine's machine and no other box has this uid

    def __str__(self) -> str:
        return f"{self.uid}:{self.gid}"


def parse(passwd: bytes, group: bytes) -> Users:
    """Parse the files of an image. Lines that are not well-formed are ignored."""
    users = []
    for row in _rows(passwd, 7):
        uid, gid, home, shell = _number(row[2]), _number(row[3]), row[5], row[6]
        is_whole = PATH.fullmatch(home) and PATH.fullmatch(shell)
        if uid is not None and gid is not None and is_whole:
            users.append(User(row[0], uid, gid, home, shell))
    groups = [(row[0], gid) for row in _rows(group, 4) if (gid := _number(row[2])) is not None]
    return Users(tuple(users), tuple(groups))


def _rows(content: bytes, fields: int) -> Iterator[list[str]]:
    for line in content[:MAX_SIZE].decode("ascii", "replace").split("\n")[:MAX_LINES]:
        row = line.split(":")
        if len(row) == fields and NAME.fullmatch(row[0]):
            yield row


def _number(text: str) -> int | None:
    if not re.fullmatch("[0-9]{1,10}", text, re.ASCII):
        return None
    number = int(text)
    return number if number < (1 << 32) - 2 else None  # the last two are not ids of users


def choose(
    requested: str,
    image: str,
    users: Users,
    owner: tuple[int, int] | None,
    *,
    few: bool,
    relaxed: bool,
) -> BoxUser:
    """The user that a box runs as.

    `requested`: by the caller; "user" if no other. `image`: the image's own user. `owner`: of what
    is mounted writable. `few`: the engine has few user ids to give. `relaxed`: it may be
    root. Raises InvalidRequest if the user is unknown, reserved, or root and not `relaxed`.
    """
    if requested != "user":
        who = _who(requested, users, f"user {requested!r}")
    elif owner and not (relaxed and not owner[0]):
        who = BoxUser(*owner)
    elif image and (relaxed or _who(image, users, "the image").uid):
        who = _who(image, users, "the image")
    elif relaxed:
        who = BoxUser(0, 0)
    else:
        uid = secrets.choice(OWN_OF_FEW if few else OWN)
        return BoxUser(uid, uid, is_own=True)
    if not who.uid and not relaxed:
        raise InvalidRequest("a box runs as root only with relax user")
    if who.uid == RELAY:
        raise InvalidRequest(f"uid {RELAY} is reserved: choose another user")
    # Many images leave the group at root's, which often has access to root's files.
    return BoxUser(who.uid, who.gid or who.uid)


def _who(wanted: str, users: Users, whose: str) -> BoxUser:
    """Look up `name` or `name:group`, each of which may be a number.

    Raises InvalidRequest if the image does not have it.
    """
    name, _, group = wanted.partition(":")
    found = users.user(name)
    gid = users.group(group) if group else found.gid if found else None
    if found is None or gid is None:
        raise InvalidRequest(
            f"{whose} names a user or group that the image's /etc/passwd does not have "
            f"({wanted!r}): choose another with user=, a number for one"
        )
    return BoxUser(found.uid, gid)


def passwd(users: Users, who: BoxUser, requested: str) -> str:
    """The /etc/passwd of a box, in which its user has a name and a writable home."""
    known = next((user for user in users.users if user.uid == who.uid), None)
    name = known.name if known else requested if NAME.fullmatch(requested) else "user"
    shell = known.shell if known else "/bin/sh"
    rows = [User(name, who.uid, who.gid, HOME, shell)]
    rows += [user for user in users.users if user.uid != who.uid and user.name != name]
    if not any(row.name == "root" for row in rows):
        rows.append(User("root", 0, 0, "/root"))
    return "".join(f"{u.name}:x:{u.uid}:{u.gid}::{u.home}:{u.shell}\n" for u in rows)


def group(users: Users, who: BoxUser) -> str:
    """The /etc/group of a box, in which root's group and that of its user have names."""
    rows = list(users.groups)
    for name, gid in (("root", 0), ("user", who.gid)):
        if all(gid != known for _, known in rows):
            rows = [row for row in rows if row[0] != name] + [(name, gid)]
    return "".join(f"{name}:x:{gid}:\n" for name, gid in rows)


# --- folders of this machine ----------------------------------------------------------------


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
            if (mount.target + "/").startswith(RESERVED + "/"):
                raise InvalidRequest(f"nothing can be mounted at {mount.target} in a box")
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

    Other users of the outer folder could move what is mounted inside it (see `check_mounted`).
    """
    targets = [mount.target for mount in mounts]
    for inner in targets:
        for outer in targets:
            if inner != outer and _is_in(inner, outer):
                raise InvalidRequest(
                    f"{inner} is inside {outer}, where a folder is mounted, too: containers of a "
                    "server have their folders beside each other"
                )


def check_mounted(found: tuple[FoundMount, ...], guest: int) -> None:
    """Raises InvalidRequest unless the container has the folders that `open_mounts` opened.

    The engine was given paths, and has followed any links that were there by then.
    """
    for mount in found:
        if not mount.is_given and not _is_mounted(guest, mount):
            raise InvalidRequest(
                f"{mount.source} may not be mounted at {mount.target}: it was another one a moment "
                "ago, or cannot be seen in the box (is a link on the way there in the image?)"
            )


def _is_mounted(guest: int, mount: FoundMount) -> bool:
    try:
        root = os.open(f"/proc/{guest}/root", os.O_PATH | os.O_CLOEXEC)
        try:
            place = linux.open_plain(mount.target, root)
        finally:
            os.close(root)
    except OSError:
        return False
    try:
        return os.path.samestat(os.fstat(place), os.fstat(mount.fd))
    finally:
        os.close(place)


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


def give_away(found: tuple[FoundMount, ...]) -> tuple[FoundMount, ...]:
    """Give folders that belong to root a user id of their own, permanently, if that is allowed.

    For a server that root runs: it makes the folders of workspaces, and only boxes use them.
    """
    return tuple(_given(mount) if mount.is_given else mount for mount in found)


def _given(mount: FoundMount) -> FoundMount:
    owner = _owner(mount.fd)  # another start may have given it away since `open_mounts`
    if owner[0] or os.geteuid() or mount.read_only:
        return replace(mount, owner=owner)
    uid = secrets.choice(OWN)
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
