"""What this process may do with user ids and mounts.

- Root with CAP_SYS_ADMIN and CAP_SYS_PTRACE: a range of user ids for each box, and mounts in which
  the owner of a folder is the user of the box (id-mapped mounts).
- Root without them, as in a Docker container: a range for each box. Mounts are made in a user
  namespace of our own, in which all ids are the same, and they cannot be id-mapped: the user of a
  box with mounts is their owner.
- Other users: one user id, that of the caller, and a user namespace with that one.

The machine's root must not be the only user of a box: the kernel does not count root's processes,
and the /proc files that it hides from other users belong to root.

Here is also how a process takes these rights, how it maps the ids of others, and what a container
that we run in must be given.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from functools import cache

from hutch.backends import builds, linux
from hutch.backends.spawn import CODE, ROOT

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

DOCKER, PODMAN = "/.dockerenv", "/run/.containerenv"
RESTRICTED = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"

# Calls that Docker's filter refuses with EPERM. The kernel itself refuses these arguments with
# other errors.
_CALLS = (
    ("pivot_root", b"", b""),
    ("open_tree", -1, b"", 0),
    ("move_mount", -1, b"", -1, b"", 0),
    ("mount_setattr", -1, b"", 0, b"", 0),
    ("keyctl", 9999, 0, 0, 0, 0),
)


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


# --- user namespaces ------------------------------------------------------------------------


def take_mount_rights() -> Rights:
    """Find out our rights, and enter a user namespace if mounts need one.

    Raises OSError if this user cannot make mounts at all.
    """
    rights = find()
    if rights.idmaps:
        return rights
    if rights.is_weak_root:
        needs = ", ".join(f"CAP_{name}" for name in rights.lacks) or "more user ids than are mapped"
        raise OSError(errno.EPERM, f"root needs {needs}")
    if rights.ranged:
        _unshare_with_all_ids()
    else:
        _unshare_with_own_id()
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    if builds.HUTCH.startswith(ROOT):
        builds.reopen(CODE)
    return rights


def _unshare_with_own_id() -> None:
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(linux.NEWUSER | linux.NEWNS)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _unshare_with_all_ids() -> None:
    """Only a process outside the namespace, with our capabilities, may map more than one id."""
    maps = {
        f"/proc/{os.getpid()}/{kind}_map": "\n".join(
            f"{first} {first} {count}" for first, _, count in extents(f"/proc/self/{kind}_map")
        )
        for kind in ("uid", "gid")
    }
    reader, writer = os.pipe()
    helper = os.fork()
    if not helper:
        os.close(writer)
        code = 1
        try:
            if os.read(reader, 1):  # the namespace exists, and its creator is alive
                for path, text in maps.items():
                    _write(path, text)
                code = 0
        except OSError as exc:
            code = exc.errno or 1
        os._exit(code)
    os.close(reader)
    try:
        linux.unshare(linux.NEWUSER | linux.NEWNS)
        os.write(writer, b"m")
    finally:
        os.close(writer)
        _, status = os.waitpid(helper, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise OSError(code, f"user ids: {os.strerror(code)}")


def id_map(uids: str, gids: str) -> int:
    """A user namespace with these maps, for a mount, as a descriptor."""
    pid = linux.clone_idle(linux.NEWUSER)  # its maps are written through a process in it
    try:
        _write(f"/proc/{pid}/uid_map", uids)
        _write(f"/proc/{pid}/gid_map", gids)
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def map_ids(pid: int, uids: str, gids: str, may_set_groups: bool) -> None:
    """Write the maps of a process in a new user namespace."""
    if not may_set_groups:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", gids)
    _write(f"/proc/{pid}/uid_map", uids)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


# --- containers that we run in --------------------------------------------------------------


def is_container() -> bool:
    return os.path.exists(DOCKER) or os.path.exists(PODMAN)


def container_program() -> str:
    return "docker run" if os.path.exists(DOCKER) else "podman run"


def missing_options() -> list[str]:
    """The options of `docker run` or `podman run` without which no boxes can be made in here.

    Forks, so it is for processes with one thread.
    """
    if not is_container():
        return []
    options = []
    if _is_filtered():
        options.append("--security-opt seccomp=unconfined")
    if _is_masked():
        all_paths = "systempaths=unconfined" if os.path.exists(DOCKER) else "unmask=ALL"
        options.append(f"--security-opt {all_paths}")
    if read("/proc/self/attr/current").endswith("(enforce)"):
        options.append("--security-opt apparmor=unconfined")
    mine = find()
    if mine.is_weak_root:
        options += [f"--cap-add {name}" for name in mine.lacks]
    if read(RESTRICTED) == "1" and not mine.is_admin:
        options += ["--cap-add SYS_ADMIN"] if mine.is_root else ["--user 0", "--cap-add SYS_ADMIN"]
    folders = ("/tmp", "/run") if mine.ranged else ("/tmp",)
    options += [f"--tmpfs {folder}" for folder in folders if not os.access(folder, os.W_OK)]
    return options


def explain(error: Exception) -> str:
    """Why no box can be made here, and what to do."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if options := missing_options():
        return (
            f"this container does not allow boxes ({reason}): "
            f"add {' '.join(options)} to `{container_program()}`"
        )
    return f"{reason}. {ADVICE}"


def _is_filtered() -> bool:
    """Whether a seccomp filter refuses the calls that make boxes. Tried in a child."""
    if "Seccomp:\t0" in read("/proc/self/status"):
        return False
    pid = os.fork()
    if not pid:
        code = 0
        try:
            code = int(_has_refusal())
        finally:
            os._exit(code)  # the child must never run its parent's code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _has_refusal() -> bool:
    try:
        linux.unshare(linux.NEWUSER | linux.NEWNS)
    except OSError as exc:
        return exc.errno == errno.EPERM
    for name, *args in _CALLS:
        try:
            linux.call(name, *args)
        except OSError as exc:
            if exc.errno == errno.EPERM:
                return True
    return False


def _is_masked() -> bool:
    """Whether parts of /proc are covered: then the kernel does not allow to mount another /proc.

    The kernel's own mount point in it does not count.
    """
    points = [line.split(" ")[4] for line in read("/proc/self/mountinfo").splitlines()]
    return any(p.startswith("/proc/") and p != "/proc/sys/fs/binfmt_misc" for p in points)


def read(path: str) -> str:
    """The content of a small file; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""
