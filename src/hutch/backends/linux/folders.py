"""Folders of this machine: those that are ours alone, and those that boxes may see."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat

from hutch.backends import linux
from hutch.errors import BackendUnavailable, InvalidRequest
from hutch.types import Mount

MAX_MOUNTS = 48

# Files and folders in /proc that no box sees.
MASKED_FILES = (
    "kcore", "keys", "timer_list", "timer_stats", "latency_stats", "sched_debug", "interrupts",
    "kallsyms", "config.gz", "sysrq-trigger", "kmsg", "kpagecount", "kpageflags", "kpagecgroup",
    "slabinfo", "vmallocinfo", "key-users", "softirqs", "iomem", "ioports", "modules",
    # Which machine this is, how it was started, what its disks and memory are doing. Not masked,
    # as programs need them: cpuinfo, meminfo, stat, vmstat, loadavg, uptime, version.
    "cmdline", "bootconfig", "partitions", "diskstats", "mdstat", "swaps", "consoles", "misc",
    "buddyinfo", "pagetypeinfo", "allocinfo", "zoneinfo", "schedstat", "version_signature",
)  # fmt: skip
MASKED_FOLDERS = ("acpi", "asound", "scsi", "driver", "pressure", "dynamic_debug")
# Folders in /proc that a box may only read.
READ_ONLY = ("sys", "bus", "fs", "irq", "tty")

# A mount must not hide what isolates the box or runs in it.
_RESERVED = ("/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64")
_OURS = ("/.hutch", "/.hutch-host")  # the bundle, and the folder with a socket of the host


def open_folder(path: str) -> int:
    """Open a folder, which is made if it is missing.

    The descriptor is at least 10, above those that a new process is given. Raises
    BackendUnavailable if it cannot be made or opened, is a link, or is not ours alone.
    """
    path = os.path.normpath(path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError as exc:
        raise BackendUnavailable(f"cannot make the folder {path}: {exc.strerror}") from None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        message = f"cannot use {path}: it must be a folder, not a link ({exc.strerror})"
        raise BackendUnavailable(message) from None
    try:
        check_owner(path, os.fstat(fd))
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    finally:
        os.close(fd)


def kept_name(folder: str, file: str) -> str:
    """A random name that is kept in a file of a folder of ours. Both are made if missing.

    Raises BackendUnavailable if the folder is not ours alone, or if the name in it is damaged.
    """
    os.close(open_folder(folder))
    path = os.path.join(folder, file)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # another process may be about to write it
        name = os.read(fd, 64).decode("ascii", "replace").strip()
        if not name:  # new, or its maker was killed before it wrote
            name = secrets.token_hex(16)
            os.write(fd, name.encode())
    finally:
        os.close(fd)
    if not re.fullmatch("[0-9a-f]{32}", name):
        raise BackendUnavailable(f"{path} is damaged: remove it; earlier boxes are then lost")
    return name


def check_owner(name: str, info: os.stat_result) -> None:
    """Raises BackendUnavailable if other users own it, or have any rights to it."""
    if info.st_uid != os.getuid():
        raise BackendUnavailable(f"{name} belongs to another user: use a folder of your own")
    if info.st_mode & 0o077:
        raise BackendUnavailable(f"{name} is open to other users: take their rights (chmod go=)")


# --- mounts ---------------------------------------------------------------------------------


def check_mounts(mounts: tuple[Mount, ...]) -> None:
    """Raises InvalidRequest for a mount that is not allowed. Looks at no file."""
    if len(mounts) > MAX_MOUNTS:
        raise InvalidRequest(f"a box can have {MAX_MOUNTS} mounts, not {len(mounts)}")
    seen: set[str] = set()
    for mount in mounts:
        target = mount.target
        if not target.startswith("/") or "\0" in target or os.path.normpath(target) != target:
            raise InvalidRequest(f"a mount's place in the box must be a plain path: {target!r}")
        if target == "/" or any(
            (target + "/").startswith(reserved + "/") for reserved in (*_RESERVED, *_OURS)
        ):
            raise InvalidRequest(f"nothing can be mounted at {target} in a box")
        if target in seen:
            raise InvalidRequest(f"two mounts at {target}")
        seen.add(target)


def open_source(source: str) -> int:
    """Open a folder or file that may be mounted, so that what we check is what is mounted.

    The caller has resolved links, and checked that the result is allowed. A link that is there now
    is newer, and may come from a box that can write to a folder on the way. Raises InvalidRequest
    if it cannot be opened, or must not be mounted.
    """
    if not source.startswith("/") or "\0" in source:
        raise InvalidRequest(f"cannot mount {source!r}: not an absolute path")
    try:
        fd = linux.open_plain(source)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            message = f"{source}: a link is on the way: it may not be mounted"
        else:
            message = f"cannot mount {source}: {os.strerror(exc.errno or 0)}"
        raise InvalidRequest(message) from None
    try:
        mode, real = os.fstat(fd).st_mode, path_of(fd)
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise InvalidRequest(f"cannot mount {source}: not a folder and not a file")
        if real == "/" or real.split("/")[1] in ("proc", "sys", "dev"):
            message = f"cannot mount {real}: it would hand this whole machine to the box"
            raise InvalidRequest(message)
    except BaseException:
        os.close(fd)
        raise
    return fd


def path_of(fd: int) -> str:
    """The path of an open file, according to the kernel."""
    return os.readlink(f"/proc/self/fd/{fd}")
