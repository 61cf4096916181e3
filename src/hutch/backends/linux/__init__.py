"""System calls that Python does not wrap, each as a function that raises OSError.

There is no policy here: `plan` says what a box is made of, and `launch` does it in order.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct
from collections.abc import Mapping

from .syscalls import AARCH64, X86_64

NUMBERS = AARCH64 if platform.machine() == "aarch64" else X86_64
_libc = ctypes.CDLL(None, use_errno=True)
# Holds the GIL during the call: the child of a raw clone must have it.
_pylib = ctypes.PyDLL(None, use_errno=True)

NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL_NAMESPACES = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWUSER | NEWPID | NEWNET

RDONLY, NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC, ATTR_IDMAP = 1, 2, 4, 8, 0x100000

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_EMPTY_PATH = 1, 0x4, 0x40
_RESOLVE_NO_MAGICLINKS, _RESOLVE_NO_SYMLINKS, _RESOLVE_IN_ROOT = 0x2, 0x4, 0x10

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_NAME = 1, 4, 8, 15
PR_CAPBSET_READ, PR_CAPBSET_DROP, PR_SET_SECUREBITS = 23, 24, 28
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 38, 47


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def call(name: str, *args: object) -> int:
    """One system call by name, checked."""
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    return _check(_libc.syscall(ctypes.c_long(NUMBERS[name]), *converted), name)


def clone(flags: int) -> int:
    """Like `os.fork`, but into new namespaces. Returns 0 in the child."""
    SIGCHLD = 17
    number = ctypes.c_long(NUMBERS["clone"])
    zero = ctypes.c_long(0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _pylib.syscall(number, ctypes.c_long(flags | SIGCHLD), zero, zero, zero, zero)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone")


_idle_stack = ctypes.create_string_buffer(16 * 1024)


def clone_idle(flags: int) -> int:
    """Start a process in new namespaces that only sleeps, in pause(2). The caller must kill it.

    It shares our memory, as copying that would be most of the cost. There can be only one at a
    time, as there is only one stack for it.
    """
    VM, SIGCHLD = 0x100, 17
    # The stack grows down, and must be aligned to 16 bytes.
    top = (ctypes.addressof(_idle_stack) + len(_idle_stack)) & ~15
    code = ctypes.cast(_libc.pause, ctypes.c_void_p)
    pid = _libc.clone(code, ctypes.c_void_p(top), ctypes.c_int(flags | VM | SIGCHLD), None)
    return _check(pid, "clone")


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    result = _libc.mount(
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {kind or source} at {target}")


def mount_layers(target: str, lower: list[str], upper: str, work: str) -> None:
    """Mount an overlay of the `lower` folders, the lowest first. Writes go to `upper`."""
    below = ":".join(reversed(lower))
    options = f"lowerdir={below},upperdir={upper},workdir={work},userxattr"
    mount("image", target, "overlay", NOSUID | NODEV, options)


def unmount(target: str) -> None:
    MNT_DETACH = 2
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def set_mount(
    where: int | str, attributes: int, *, recursive: bool = False, user_namespace: int = 0
) -> None:
    """Add attributes to a mount, given by path or by the descriptor of a detached one."""
    flags = _AT_RECURSIVE if recursive else 0
    fd, path = (_AT_FDCWD, os.fsencode(where)) if isinstance(where, str) else (where, b"")
    # A detached copy of a shared mount would still share mounts with the original.
    propagation = PRIVATE if not isinstance(where, str) else 0
    args = struct.pack("=QQQQ", attributes, 0, propagation, user_namespace)
    flags |= 0 if path else _AT_EMPTY_PATH
    call("mount_setattr", fd, path, flags, args, len(args))


def copy_mount(where: int | str, *, recursive: bool = True) -> int:
    """A detached copy of what is mounted there, as a descriptor that others can be given."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0)
    fd, path = (_AT_FDCWD, os.fsencode(where)) if isinstance(where, str) else (where, b"")
    flags |= 0 if path else _AT_EMPTY_PATH
    try:
        return call("open_tree", fd, path, flags)
    except OSError as exc:
        raise OSError(exc.errno, f"{where}: {os.strerror(exc.errno or 0)}") from None


def open_plain(path: str, root: int | None = None) -> int:
    """Open a path for `fstat` and for mounting, but not for reading (O_PATH).

    No symbolic link is followed: one anywhere in the path is an error (ELOOP). With `root`, the
    path is resolved inside of that folder.
    """
    links = _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS
    links |= 0 if root is None else _RESOLVE_IN_ROOT
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, links)
    top = _AT_FDCWD if root is None else root
    return call("openat2", top, os.fsencode(path), how, len(how))


def attach_mount(fd: int, root: str, target: str) -> None:
    """Attach a detached mount at `target` below `root`. Follows no links.

    The path may go through a folder that a box has written to. As `root` is not our root yet, a
    link there would lead out of it (CVE-2026-87766).
    """
    top = os.open(root, os.O_PATH | os.O_CLOEXEC)
    try:
        spot = open_plain(target, top)
    finally:
        os.close(top)
    try:
        flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
        call("move_mount", fd, b"", spot, b"", flags)
    finally:
        os.close(spot)


def pivot(new_root: str) -> None:
    """Make `new_root` the root, and detach the old one with everything in it."""
    before = os.stat("/").st_dev
    os.chdir(new_root)
    # With the same path twice, the old root is stacked on the new one, and unmounted next.
    call("pivot_root", b".", b".")
    unmount(".")
    os.chdir("/")
    if os.stat("/").st_dev == before:
        raise OSError(0, "pivot_root: the root is still the old one")


def prctl(option: int, *args: int) -> int:
    rest = [ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *rest), f"prctl {option}")


def set_limits(limits: Mapping[str, int]) -> None:
    """Set soft and hard resource limits by name ("FSIZE"). A hard limit that is lower stays."""
    for name, value in limits.items():
        which = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def set_name(name: bytes) -> None:
    _libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)


def forget_command_line() -> None:
    """Leave only "hutch" in /proc/PID/cmdline: anyone may read it, dumpable or not."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, see proc(5)
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, b"hutch", 5)


def set_hostname(name: str) -> None:
    _check(_libc.sethostname(name.encode(), len(name)), "sethostname")


def take_root_ids() -> None:
    """Become root of our own user namespace, once its ids are mapped, without other groups."""
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def set_filesystem_user(uid: int, gid: int) -> None:
    """Access files as another user. Who may send signals to this process does not change."""
    _libc.setfsgid(gid)
    _libc.setfsuid(uid)
    # They report no errors. With an invalid id, they return the current one.
    if _libc.setfsuid(-1) != uid or _libc.setfsgid(-1) != gid:
        raise OSError(1, f"setfsuid {uid}: not permitted")


def new_keyring() -> None:
    """Join a new session keyring: the keys in the caller's cannot be reached from it."""
    JOIN_SESSION_KEYRING = 1
    try:
        call("keyctl", JOIN_SESSION_KEYRING, 0, 0, 0, 0)
    except OSError as exc:
        if exc.errno != 38:  # ENOSYS: a kernel without keyrings has none to leak
            raise


def forbid_capabilities() -> None:
    """Make sure that no program that this process executes can gain a capability, even as uid 0."""
    PR_CAP_AMBIENT_CLEAR_ALL, NOROOT, NOROOT_LOCKED = 4, 1, 2
    number = 0
    while _libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) == 0:
        number += 1  # until after the last one that this kernel knows
    if _libc.prctl(PR_CAPBSET_READ, 0, 0, 0, 0) != 0:
        raise OSError(1, "the capability bounding set could not be emptied")
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    prctl(PR_SET_SECUREBITS, NOROOT | NOROOT_LOCKED)


def set_capabilities(keep: tuple[int, ...]) -> None:
    """Have exactly the capabilities in `keep`: effective and permitted, none inheritable."""
    bits = sum(1 << number for number in keep)
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("=6I", bits, bits, 0, 0, 0, 0)), "capset")


def raise_loopback() -> None:
    SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))


# Landlock(7): all rights to files that each version of its ABI knows.
_FS_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_FS_ALL = (1 << 16) - 1
_FS_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
FS_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read a file, read a folder
FS_USE = FS_READ | 1 << 1 | 1 << 14 | 1 << 15  # ...write, truncate, ioctl


def landlock_version() -> int:
    """The version of Landlock's ABI, or 0 if the kernel has none that we can use."""
    number = ctypes.c_long(NUMBERS["landlock_create_ruleset"])
    version = int(_libc.syscall(number, None, 0, 1))
    return version if version >= 2 else 0  # version 1 refuses every rename into another folder


def landlock(readable: list[str], usable: list[str], writable: list[str]) -> bool:
    """Deny this process and its children access to all files outside of these trees.

    It is a second line of defence, after the mounts. Returns False if the kernel has no Landlock.
    """
    version = landlock_version()
    if not version:
        return False
    handled = _FS_RIGHTS.get(version, _FS_ALL)
    rules = call("landlock_create_ruleset", struct.pack("=Q", handled), 8, 0)
    try:
        for paths, rights in ((readable, FS_READ), (usable, FS_USE), (writable, _FS_ALL)):
            for path in paths:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    allowed = rights & handled
                    if not os.path.isdir(path):
                        allowed &= _FS_ON_FILES
                    call("landlock_add_rule", rules, 1, struct.pack("=Qi", allowed, fd), 0)
                finally:
                    os.close(fd)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)
    return True
