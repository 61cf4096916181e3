"""What a box of an imported image needs from it: its user, its variables, its /etc.

The image's users are read here, on the host, from its layers: with a limit on everything, without
following links, and without NSS, which would load libraries that the image names. The result is the
box's /etc/passwd, so that host, guest and programs agree on its users.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from hutch.errors import InvalidRequest, StartFailed
from hutch.types import Root

from .plan import AGENT, HIDES, HOME, OWN_FILES, USER, uid_of

MAX_FILE = 32 * 1024  # bytes of /etc/passwd or /etc/group; the rest is ignored
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\$?")
_WORDS = re.compile(r"[^:\x00-\x1f\x7f]{0,256}")
_REPLACED = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf")
# Variables about the image's own user. A box with another user does not get them.
_PERSONAL = ("HOME", "USER", "LOGNAME")


class PasswdEntry(NamedTuple):
    name: str
    uid: int
    gid: int
    home: str = HOME
    shell: str = "/bin/sh"

    @property
    def line(self) -> str:
        return f"{self.name}:x:{self.uid}:{self.gid}::{self.home}:{self.shell}\n"


class GroupEntry(NamedTuple):
    name: str
    gid: int
    members: str = ""

    @property
    def line(self) -> str:
        return f"{self.name}:x:{self.gid}:{self.members}\n"


ROOT, DEFAULT = PasswdEntry("root", 0, 0, "/root"), PasswdEntry("user", USER, USER)
NOBODY = PasswdEntry("nobody", 65534, 65534, "/", "/bin/false")
GUEST = PasswdEntry("hutch", AGENT, AGENT, "/", "/bin/false")


def request_for(root: Root, user: str, *, ranged: bool) -> dict[str, object]:
    """What the launcher must know about a root.

    Raises InvalidRequest for a user that the image does not have, and StartFailed if its layers
    cannot be read.
    """
    try:
        files = _look_into(root.layers)
    except OSError as exc:
        raise StartFailed(f"the image's layers cannot be read: {exc}. Pull it again") from exc
    users, groups = _parse(files)
    if ranged:
        is_own = user == DEFAULT.name and root.user.partition(":")[0] != ""
        who = _find(root.user if is_own else user, users, groups)
        # Only the caller can ask for root. If it is the image's user, by any name, ignore that.
        if user == DEFAULT.name and not who.uid:
            is_own = False
            who = _find(user, [entry for entry in users if entry.uid], groups)
    else:
        uid_of(user, ranged=False)
        who, is_own = DEFAULT, False
    entries = [who, *(entry for entry in users if entry.name != who.name)]
    names = {entry.name for entry in entries}
    entries += [entry for entry in (ROOT, DEFAULT, NOBODY, GUEST) if entry.name not in names]
    have = {group.gid for group in groups}
    groups += [GroupEntry(entry.name, entry.gid) for entry in entries if entry.gid not in have]
    return {
        "layers": list(files.layers),
        "user": who.name,
        "uid": who.uid,
        "gid": who.gid,
        "env": {k: v for k, v in root.env if is_own or k not in _PERSONAL},
        "files": {
            **{path: OWN_FILES[path] for path in _REPLACED},
            "/etc/passwd": "".join(entry.line for entry in entries),
            "/etc/group": "".join(group.line for group in groups),
        },
    }


def _find(user: str, users: list[PasswdEntry], groups: list[GroupEntry]) -> PasswdEntry:
    """A user by name or number, with or without a group, as an image or a caller gives it.

    Raises InvalidRequest for a name that the image does not have, and for the guest's uid.
    """
    name, _, group = user.partition(":")
    account = next((entry for entry in users if name in (entry.name, str(entry.uid))), None)
    if account is None:
        try:
            uid = uid_of(name, ranged=True)
        except InvalidRequest:
            raise InvalidRequest(
                f"no user {name!r} in this image: name one that its /etc/passwd has, or a number "
                "below 65534, such as user='1000'"
            ) from None
        account = next((entry for entry in (ROOT, NOBODY) if entry.uid == uid), None)
        taken = DEFAULT.name in {entry.name for entry in users}
        account = account or PasswdEntry(f"user{uid}" if taken else DEFAULT.name, uid, uid)
    if account.uid == AGENT:
        raise InvalidRequest(f"uid {AGENT} is reserved for the guest: choose another user")
    gids = [entry.gid for entry in groups if group in (entry.name, str(entry.gid))]
    if group.isascii() and group.isdigit() and len(group) < 6:
        gids.append(int(group))
    gid = gids[0] if group and gids else account.gid
    return account._replace(gid=gid if gid < 65535 else account.gid)


class UserFiles(NamedTuple):
    layers: tuple[str, ...]  # the visible ones
    passwd: str
    group: str


@lru_cache(maxsize=64)
def _look_into(layers: tuple[str, ...]) -> UserFiles:
    """Cached, as layers do not change: they are named by their content."""
    for number in reversed(range(len(layers))):
        # The kernel honours this mark on folders inside a layer, not on the layer itself.
        if _hides_below(layers[number]):
            layers = layers[number:]
            break
    return UserFiles(layers, _read(layers, "passwd"), _read(layers, "group"))


def _parse(files: UserFiles) -> tuple[list[PasswdEntry], list[GroupEntry]]:
    users = {
        row[0]: PasswdEntry(row[0], int(row[2]), int(row[3]), row[5], row[6])
        for row in _rows(files.passwd, 7)
        if _is_id(row[2]) and _is_id(row[3])
    }
    groups = {
        row[0]: GroupEntry(row[0], int(row[2]), row[3])
        for row in _rows(files.group, 4)
        if _is_id(row[2])
    }
    return list(users.values()), list(groups.values())


def _rows(text: str, length: int) -> Iterator[list[str]]:
    for line in text.split("\n"):
        row = line.split(":")
        if len(row) == length and _NAME.fullmatch(row[0]) and all(map(_WORDS.fullmatch, row)):
            yield row


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 6 and int(word) < 65535


def _read(layers: tuple[str, ...], name: str) -> str:
    """A file of /etc as the image has it: from the uppermost layer that has or hides it."""
    for layer in reversed(layers):
        top = os.open(layer, _LOOK | os.O_DIRECTORY)
        try:
            info = os.stat("etc", dir_fd=top, follow_symlinks=False)
            if not stat.S_ISDIR(info.st_mode):
                return ""  # removed, or a link: a box gets a folder of its own
            etc = os.open("etc", _LOOK | os.O_DIRECTORY, dir_fd=top)
        except FileNotFoundError:
            continue
        finally:
            os.close(top)
        try:
            fd = os.open(name, _LOOK, dir_fd=etc)
        except FileNotFoundError:
            if _hides_below(f"/proc/self/fd/{etc}"):
                return ""
            continue
        finally:
            os.close(etc)
        try:
            return _content(fd)
        finally:
            os.close(fd)
    return ""


def _hides_below(folder: str) -> bool:
    try:
        return os.getxattr(folder, HIDES) == b"y"
    except OSError:
        return False


def _content(fd: int) -> str:
    """The text of a regular file. Anything else is not opened, as it may be a FIFO."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return ""
    try:
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            return file.read(MAX_FILE).decode("utf-8", "replace")
    except PermissionError:
        return ""
