"""The user that a box runs as, and whether it got the folders that are mounted for that user.

The image is not trusted: its /etc/passwd is read with limits on everything, never through NSS, and
boxes see a file in its place that we write, line by line.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from hutch.backends import linux
from hutch.backends.contained import HOME, OWN, OWN_OF_FEW
from hutch.backends.linux.mounts import FoundMount
from hutch.errors import InvalidRequest
from hutch.guest.relay import RELAY

MAX_SIZE = 256 * 1024  # bytes of either file
MAX_LINES = 2000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}\$?")
PATH = re.compile(r"/[A-Za-z0-9_./+-]{0,254}|")

KNOWN = {"root": 0, "nobody": 65534, "nogroup": 65534}  # if the image does not define them


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
