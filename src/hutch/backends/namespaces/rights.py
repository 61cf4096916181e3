"""What this process may do with user ids and mounts.

- Root with CAP_SYS_ADMIN and CAP_SYS_PTRACE: a range of user ids for each box, and mounts in which
  the owner of a folder is the user of the box (id-mapped mounts).
- Root without them, as in a Docker container: a range for each box. Mounts are made in a user
  namespace of our own, in which all ids are the same, and they cannot be id-mapped: the user of a
  box with mounts is their owner.
- Other users: one user id, that of the caller, and a user namespace with that one.

The machine's root must not be the only user of a box: the kernel does not count root's processes,
and the /proc files that it hides from other users belong to root.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from .plan import MAX_BOXES, UID_BASE, UIDS_PER_BOX

ADVICE = "`hutch doctor` shows what this machine lacks"
# What root needs to map ids; root of a Docker container has it.
_TO_MAP = {"CHOWN": 0, "SETGID": 6, "SETUID": 7, "SETFCAP": 31}
# What it needs in addition to do without a user namespace of our own.
_TO_MOUNT = {
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "KILL": 5,
    "SETPCAP": 8,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
}
_ALL_IDS = UID_BASE + UIDS_PER_BOX * (MAX_BOXES + 1)  # ids that we use, and all below them


@dataclass(frozen=True)
class Rights:
    ranged: bool  # each box gets a range of user ids
    idmaps: bool  # mounts can be id-mapped; else they are made in a user namespace of our own
    is_root: bool
    is_admin: bool  # has CAP_SYS_ADMIN
    lacks: tuple[str, ...]  # capabilities that root needs to map ids
    # The machine's root, which cannot give a box user ids other than its own.
    is_weak_root: bool


@cache
def find() -> Rights:
    """Cached, and called before a namespace is entered: ids and rights differ in a new one."""
    has = _capabilities()
    maps = [extents(f"/proc/self/{kind}_map") for kind in ("uid", "gid")]
    is_root = os.geteuid() == 0
    lacks = tuple(name for name, number in _TO_MAP.items() if not has & 1 << number)
    has_all_ids = all(first == 0 and count >= _ALL_IDS for ((first, _, count), *_) in maps)
    ranged = is_root and not lacks and has_all_ids
    idmaps = ranged and all(has & 1 << number for number in _TO_MOUNT.values())
    is_weak_root = is_root and not ranged and maps[0][0][:2] == (0, 0)
    is_admin = bool(has & 1 << _TO_MOUNT["SYS_ADMIN"])
    return Rights(ranged, idmaps, is_root, is_admin, lacks, is_weak_root)


def _capabilities() -> int:
    """The effective set of this process, a bit for each."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 16) for line in file if line.startswith("CapEff:"))


def extents(path: str) -> list[tuple[int, int, int]]:
    """The lines of an id map: first id inside, first id outside, and how many."""
    with open(path) as file:
        rows = [line.split() for line in file]
    ranges = [(int(inside), int(outside), int(count)) for inside, outside, count in rows]
    return ranges or [(0, 0, 0)]
