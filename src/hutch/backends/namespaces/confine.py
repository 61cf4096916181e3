"""Starts a program in a confined process (see confined.py), and checks that it keeps its bounds."""

from __future__ import annotations

import glob
import json
import os
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hutch.backends.spawn import boot
from hutch.errors import BackendUnavailable, NoSpace

from .foreign import claim_tree, size_of_paths, size_of_tree

MiB = 1 << 20
MODULE = "hutch.backends.namespaces.confined"

# What a dynamically linked program needs to run, to find hosts and to trust certificates.
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
# Often links into /run, which is not shown: their content is copied instead.
COPIED = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf")
USERS = b"root:x:0:0:root:/:/bin/false\n"
LARGEST_COPY = 1 * MiB


@dataclass(frozen=True)
class Bounds:
    """What a confined program may use."""

    seconds: float = 3600
    memory: int = 4096 * MiB  # of each process, and of all of them where there are cgroups
    processes: int = 1024  # threads count, too
    file_bytes: int = 8192 * MiB  # of one file
    disk_bytes: int = 32768 * MiB  # of the folders that are measured
    disk_reserve: int = 256 * MiB  # bytes that stay free on their disks
    files_reserve: int = 1024  # inodes that stay free on their disks
    temp_bytes: int = 256 * MiB


@dataclass(frozen=True)
class Confinement:
    """What a confined program sees beside the system's libraries."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    measured: tuple[str, ...] = ()  # the writable folders that `disk_bytes` bounds
    # Patterns of paths in a cache. What appears there while the program runs is bounded by
    # `disk_bytes` as well; what was there before does not count.
    growing: tuple[str, ...] = ()
    bounds: Bounds = Bounds()


def start(
    argv: list[str], env: Mapping[str, str], cwd: str, confinement: Confinement, lock: int
) -> subprocess.Popen[bytes]:
    """Start a program, with stdout and stderr in one pipe.

    `lock`: a descriptor that stays open until the program has ended, even if we are killed. The
    program itself does not get it.

    Raises BackendUnavailable where a process cannot be confined: then nothing was run.
    """
    bounds = confinement.bounds
    rlimits = {
        "DATA": bounds.memory,
        "NPROC": bounds.processes,
        "FSIZE": bounds.file_bytes,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
        "RTPRIO": 0,
        "NICE": 0,
    }
    readable = _absolute(confinement.readable)
    private = _copies(filter(_is_private, readable))
    files = {"/etc/passwd": USERS} | _copies(COPIED) | private | dict(confinement.files)
    spec = {
        "argv": argv,
        "env": dict(env),
        "cwd": cwd,
        "system": SYSTEM,
        "rlimits": rlimits,
        "readable": [path for path in readable if path not in private],
        "writable": _absolute(confinement.writable),
        "filled": _absolute(confinement.measured),
        "files": {path: content.decode("latin-1") for path, content in files.items()},
        "temp_bytes": bounds.temp_bytes,
        "memory": bounds.memory,
        "processes": bounds.processes,
    }
    reader, writer = os.pipe()
    with open(reader, "rb") as status, tempfile.TemporaryFile() as request:
        request.write(json.dumps(spec).encode())
        request.seek(0)
        try:
            process = subprocess.Popen(
                boot(MODULE, request.fileno(), writer, lock, os.getpid()),
                pass_fds=(request.fileno(), writer, lock),
                env={},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            failure = status.read().decode(errors="replace")
        except BaseException:
            stop(process)
            raise
    if failure:
        stop(process)
        raise BackendUnavailable(
            f"packages are installed in a confined process only, and none can be made here "
            f"({failure}). `hutch doctor --backend namespaces` says what is missing; in a "
            "container, allow it user namespaces, or install where Hutch runs on the machine itself"
        )
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End it, and wait until all that it started is gone."""
    process.terminate()
    if process.stdout:
        with process.stdout:
            while process.stdout.read(65536):
                continue
    process.wait()


class InstallWatch:
    """Checks, when asked, whether a program is within its bounds."""

    def __init__(self, confinement: Confinement) -> None:
        self._bounds, self._folders = confinement.bounds, confinement.measured
        self._disks = confinement.writable
        self._growing = confinement.growing
        self._before = self._cached()
        self._deadline = time.monotonic() + self._bounds.seconds
        self._next = 0.0

    def check(self, *, at_end: bool = False) -> None:
        """Raises BackendUnavailable after the deadline, and NoSpace if too much disk is used.

        Raises InvalidRequest for trees or files that packages do not have. `at_end`: the program
        has ended, and its folders become ours.
        """
        now = time.monotonic()
        if now > self._deadline:
            raise BackendUnavailable(
                f"installing the packages took longer than {self._bounds.seconds:.0f} seconds, "
                "and was stopped"
            )
        if now < self._next and not at_end:
            return
        for folder in self._disks:
            disk = os.statvfs(folder)
            if disk.f_bavail * disk.f_frsize < self._bounds.disk_reserve:
                raise NoSpace(
                    f"less than {self._bounds.disk_reserve // MiB} MiB are free on the disk of "
                    f"{os.path.dirname(folder)}: installing the packages was stopped; free some "
                    "space, or set HUTCH_DATA_DIR to a folder of another disk"
                )
            # Empty files take no blocks. Some file systems, as btrfs, do not count files.
            if disk.f_files and disk.f_favail < self._bounds.files_reserve:
                raise NoSpace(
                    f"there is almost no room for more files on the disk of {folder}: "
                    "installing the packages was stopped"
                )
        cached = size_of_paths(self._cached() - self._before)
        if max(cached, sum(map(size_of_tree, self._folders))) > self._bounds.disk_bytes:
            raise NoSpace(
                f"the packages take more than {self._bounds.disk_bytes // MiB} MiB, and "
                "installing them was stopped"
            )
        if at_end:
            for folder in self._folders:
                claim_tree(folder)
        after = time.monotonic()
        self._next = after + max(0.5, 10 * (after - now))

    def _cached(self) -> set[str]:
        return {path for pattern in self._growing for path in glob.iglob(pattern)}


def _absolute(paths: Iterable[str]) -> list[str]:
    return [os.path.abspath(path) for path in paths if os.path.exists(path)]


def _is_private(path: str) -> bool:
    """Whether it is a file, such as a key, that the program's user may be unable to read."""
    status = os.stat(path)
    return stat.S_ISREG(status.st_mode) and not status.st_mode & stat.S_IROTH


def _copies(paths: Iterable[str]) -> dict[str, bytes]:
    """The content of small files, by path. Those that cannot be read are left out."""
    contents = {}
    for path in paths:
        try:
            if os.path.getsize(path) <= LARGEST_COPY:
                contents[path] = Path(path).read_bytes()
        except OSError:
            continue
    return contents
