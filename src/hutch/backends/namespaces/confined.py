"""Runs one program on untrusted input, with access to almost nothing.

    your process -> supervisor (here, until `clone`) -> the program, pid 1 of its own namespaces

The program sees only the folders it was given: system libraries read-only, what it may write, and
a private /tmp. It has its own namespaces except for the network, no capabilities, no /proc, and a
filter that keeps it from AF_UNIX sockets, including abstract ones. If root runs us, it has a user
id that nothing else has, and what it may write is mounted id-mapped, or belongs to that user while
it runs.

It dies with the supervisor. Only the supervisor holds the caller's lock. It ends with the process
that started it, or on SIGTERM, but not before the program has ended.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import NamedTuple, TypedDict

from hutch.backends import linux
from hutch.backends.linux import cgroup, seccomp
from hutch.types import Limits

from .foreign import give_tree
from .plan import STORE_BASE, UIDS_PER_BOX
from .rights import id_map, map_ids, take_mount_rights

INSTALLER_UID = STORE_BASE - UIDS_PER_BOX  # on the host, if root runs us; no other user has it
OWN_CACHE = "hutch-installer"  # the installer's folder in a cache whose owner cannot be mapped
NAMESPACES = linux.ALL_NAMESPACES & ~linux.NEWNET  # it has to reach registries
BOUNDED = ("memory", "pids")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_STAGE = "/tmp"  # exists everywhere; only our own namespace sees what is mounted there
_QUIET = linux.ATTR_NOSUID | linux.ATTR_NODEV
_HEARD = (signal.SIGTERM, signal.SIGCHLD)


class ConfinedSpec(TypedDict):
    """What to run and what it sees; paths are the same inside as outside."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    system: list[str]  # readable by everyone: shown read-only, with links as links
    readable: list[str]  # the caller's own: shown read-only, regardless of owner
    writable: list[str]
    filled: list[str]  # those of `writable` that are new; the others are caches
    files: dict[str, str]  # small files by content: bytes, as Latin-1
    rlimits: dict[str, int]
    temp_bytes: int  # size of /tmp
    memory: int  # of all processes together, if there are cgroups
    processes: int


class Shown(NamedTuple):
    path: str
    is_folder: bool
    mount: int  # a detached one


def main(spec: int, status: int, lock: int, parent: int) -> None:
    """Read a ConfinedSpec, run its program, and exit with its code. Errors go to `status`."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the caller may have ignored it
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)  # `_wait` waits for them
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)  # the caller died before the signal was set
    for fd in (status, lock):  # the program gets its three standard descriptors, and no others
        os.set_inheritable(fd, False)
    try:
        with open(spec, "rb") as file:
            wanted: ConfinedSpec = json.load(file)
        with ExitStack() as cleanup:
            group = _make_group(wanted)
            if group:
                cleanup.callback(group.remove)
            code = _supervise(wanted, status, parent, group)
    except BaseException as exc:
        _fail(status, "namespaces", exc)
        code = 1
    os._exit(code)


def _make_group(spec: ConfinedSpec) -> cgroup.Group | None:
    """A control group that limits all processes together. None if we may not make one."""
    try:
        hierarchy = cgroup.find()
        cgroup.sweep(hierarchy)
        folders = {name: folder for name, folder in hierarchy.folders.items() if name in BOUNDED}
        limits = Limits(memory=spec["memory"], pids=spec["processes"])
        name = f"hutch-{os.getpid()}-{secrets.token_hex(4)}"
        return cgroup.Group(replace(hierarchy, folders=folders), name, limits)
    except OSError:
        return None


def _supervise(spec: ConfinedSpec, status: int, parent: int, group: cgroup.Group | None) -> int:
    rights = take_mount_rights()
    ranged = rights.ranged
    if not rights.idmaps:
        # We have entered a user namespace, which has cleared the parent-death signal.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise ProcessLookupError("its caller is gone")
    # Opened now, as the program's user may have no access to the caller's home.
    mounts = [
        Shown(path, os.path.isdir(path), _copy(path, spec, ranged)) for path in _mounted(spec)
    ]
    sync, theirs = socket.socketpair()
    pid = linux.clone(NAMESPACES)
    if not pid:
        sync.close()
        _become(spec, mounts, theirs, status, ranged)
    theirs.close()
    if group:
        with suppress(OSError):  # it could be made but not used: do without
            group.add(pid)
    text = f"0 {INSTALLER_UID} 1" if ranged else "0 0 1"
    map_ids(pid, text, text, ranged)
    os.close(status)  # not before: errors up to here are reported there
    sync.send(b"m")
    return os.waitstatus_to_exitcode(_wait(pid)) % 256


def _wait(pid: int) -> int:
    """Wait until the program and all that it started have ended. Kills them on SIGTERM.

    Returns the program's status.
    """
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if signal.sigwait(_HEARD) == signal.SIGTERM:
            os.kill(pid, signal.SIGKILL)


def _mounted(spec: ConfinedSpec) -> list[str]:
    """The paths to mount, outer folders first."""
    links = [path for path in spec["system"] if os.path.islink(path)]
    paths = {*spec["system"], *spec["readable"], *spec["writable"], *DEVICES} - {*links}
    return sorted(path for path in paths if os.path.exists(path))


def _copy(path: str, spec: ConfinedSpec, ranged: bool) -> int:
    """A detached copy of the mount at a path, with no more access than the spec gives."""
    real = os.path.realpath(path)
    fd = linux.copy_mount(real)
    if path in DEVICES:
        linux.set_mount(fd, linux.ATTR_NOSUID | linux.ATTR_NOEXEC)
        return fd
    writable = path in spec["writable"]
    if ranged and path not in spec["system"] and not _map_owner(fd, real) and writable:
        os.close(fd)
        fd = linux.copy_mount(_give(real, is_new=path in spec["filled"]))
    attributes = _QUIET | (0 if writable else linux.ATTR_RDONLY)
    linux.set_mount(fd, attributes, recursive=True)
    return fd


def _map_owner(fd: int, real: str) -> bool:
    """Make the program's user the owner of what is mounted, in this mount only.

    False if the file system does not support it, such as overlayfs on many kernels.
    """
    owner = os.stat(real)
    mapped = id_map(f"{owner.st_uid} {INSTALLER_UID} 1", f"{owner.st_gid} {INSTALLER_UID} 1")
    try:
        linux.set_mount(fd, linux.ATTR_IDMAP, recursive=True, user_namespace=mapped)
    except OSError:
        return False
    finally:
        os.close(mapped)
    return True


def _give(folder: str, *, is_new: bool) -> str:
    """A folder that belongs to the program's user on disk.

    If `folder` is new, it is that folder, and the caller takes it back when the program has ended.
    Otherwise it is a cache, which others may use, and the program gets a folder inside of it, which
    stays.
    """
    if is_new:
        give_tree(folder, INSTALLER_UID)
        return folder
    own = os.path.join(folder, OWN_CACHE)
    os.makedirs(own, mode=0o700, exist_ok=True)
    os.chown(own, INSTALLER_UID, INSTALLER_UID, follow_symlinks=False)
    return own


def _become(
    spec: ConfinedSpec, mounts: list[Shown], sync: socket.socket, status: int, ranged: bool
) -> None:
    """The program, from `clone` to `exec`. Never returns."""
    step = "start"
    try:
        if sync.recv(1) != b"m":  # our user ids are mapped now
            os._exit(1)
        step = "user ids"
        if ranged:
            linux.take_root_ids()
        os.umask(0o022)
        step = "file system"
        _build_root(spec, mounts)
        step = "rights"
        linux.set_hostname("hutch")
        linux.new_keyring()
        linux.set_limits(spec["rlimits"])
        linux.forbid_capabilities()
        linux.set_capabilities(())
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        # Not before: a change of user ids clears this.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if not _is_open(sync):
            os._exit(1)  # the supervisor died before the signal was set
        step = "landlock"
        linux.landlock(["/"], ["/dev"], ["/tmp", *spec["writable"]])
        step = "seccomp"
        seccomp.install(seccomp.build(unix_sockets=False))
        step = f"start {spec['argv'][0]}"
        os.chdir(spec["cwd"])
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(spec["argv"][0], spec["argv"], spec["env"])
    except BaseException as exc:
        _fail(status, step, exc)
    os._exit(1)


def _is_open(sync: socket.socket) -> bool:
    """Whether the supervisor still has its end."""
    sync.setblocking(False)
    try:
        return bool(sync.recv(1))
    except BlockingIOError:
        return True


def _build_root(spec: ConfinedSpec, mounts: list[Shown]) -> None:
    """Build the file system that the program sees, and make it the root."""
    quiet = linux.NOSUID | linux.NODEV
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    links = {path: os.readlink(path) for path in spec["system"] if os.path.islink(path)}
    linux.mount("root", _STAGE, "tmpfs", quiet, "size=16m,nr_inodes=8192,mode=755")
    for path, target in links.items():
        os.makedirs(_STAGE + os.path.dirname(path), exist_ok=True)
        os.symlink(target, _STAGE + path)
    os.makedirs(_STAGE + "/tmp")
    size = f"size={spec['temp_bytes']},nr_inodes=65536,mode=700"
    linux.mount("tmp", _STAGE + "/tmp", "tmpfs", quiet, size)
    for path, is_folder, fd in mounts:
        place = _STAGE + path
        if not os.path.lexists(place):
            os.makedirs(place if is_folder else os.path.dirname(place), exist_ok=True)
            if not is_folder:
                open(place, "xb").close()
        try:
            linux.attach_mount(fd, _STAGE, path)
        except OSError as exc:
            raise OSError(exc.errno, f"{path}: {exc.strerror}") from None
        os.close(fd)
    for path, text in spec["files"].items():
        if not os.path.lexists(_STAGE + path):
            os.makedirs(_STAGE + os.path.dirname(path), exist_ok=True)
            _write(_STAGE + path, text)
        elif not os.access(_STAGE + path, os.R_OK):
            _cover(path, text)
    os.makedirs(_STAGE + spec["env"].get("HOME", "/tmp"), exist_ok=True)
    linux.pivot(_STAGE)
    linux.set_mount("/", linux.ATTR_RDONLY)


def _write(place: str, text: str) -> None:
    with open(place, "xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text.encode("latin-1"))


def _cover(path: str, text: str) -> None:
    """Mount a copy over a file that its folder contains, but that we may not read."""
    copy = _STAGE + "/.hutch-copy"
    _write(copy, text)
    fd = linux.copy_mount(copy)
    linux.set_mount(fd, _QUIET | linux.ATTR_RDONLY)
    try:
        linux.attach_mount(fd, _STAGE, path)
    except OSError as exc:
        if exc.errno != errno.ELOOP:  # behind a link, which is not followed: leave it
            raise
    os.close(fd)
    os.unlink(copy)


def _fail(status: int, step: str, exc: BaseException) -> None:
    try:
        os.write(status, f"{step}: {exc}".encode(errors="replace")[:1000])
    except OSError:
        pass  # the reader is gone
