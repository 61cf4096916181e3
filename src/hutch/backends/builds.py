"""The code of a launcher and its boxes, in a folder that no upgrade touches.

`pip install -U` deletes the files of an installed package while launchers and boxes that came
from it still run. A launcher forks, mounts and imports for as long as it lives, and a kernel in
a box imports when it starts, so both run from a private copy instead:

    <build>/hutch/        the part of the package that launchers and boxes use
    <build>/cloudpickle/  what kernels pickle with

The name of a copy, its *build*, is a digest of its content, the interpreter and the boot id:
copies are never changed, and one that a power cut may have damaged is not used again. A process
that runs from a copy holds a shared lock on its folder. A copy without a lock can be removed.

`hutch run` imports this before anything else, so it imports next to nothing.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

# Everything that a launcher, a zygote, a preloaded process, a guest or a kernel imports.
PARTS = (
    "__init__.py",
    "errors.py",
    "types.py",
    "tar.py",
    "tree.py",
    "backends/__init__.py",
    "backends/base.py",
    "backends/builds.py",
    "backends/spawn.py",
    "backends/linux",
    "backends/namespaces",
    "guest",
    "wire",
    "kernel",
)
PICKLER = "cloudpickle"
HUTCH = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNFINISHED = ".new-"
PREFIX = "code-"
ATTEMPTS = 5
STALE = 60  # seconds; a copy takes milliseconds
SPARE = 4  # unused copies of other builds, kept for their next `hutch run`

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Build(NamedTuple):
    """A private copy that is in use: `fd` is its folder, with a shared lock."""

    name: str
    fd: int


class File(NamedTuple):
    """One of the installed files: its name in the copy, where it is, and its status."""

    name: str
    path: str
    status: os.stat_result


class CannotCopy(OSError):
    """A private copy cannot be made or trusted."""


def for_process() -> Build | None:
    """A copy for the launcher of this process; None where no folder can hold one.

    Shared by all processes of this user that have the same files installed. Files are compared by
    date, size and inode: reading them all would delay every `hutch run`.
    """
    try:
        parent = _runtime_folder()
    except OSError:
        return None
    try:
        return take(parent, contents=False, spare=SPARE)
    except OSError:
        return None
    finally:
        os.close(parent)


def take(parent: int, *, contents: bool = True, spare: int = 0) -> Build:
    """The copy of the installed files in this folder, made if missing. Raises OSError.

    `contents`: whether its name is a digest of what the files contain, or only of their dates,
    sizes and inodes. `spare`: how many unused copies are kept.
    """
    for _ in range(ATTEMPTS):
        files = _files()
        name = _digest(files, contents=contents)
        build = hold(parent, name)
        if build is not None:
            return build
        sweep(parent, spare)
        _make(parent, name, files, contents=contents)
    raise CannotCopy("the installed files of Hutch keep changing: try again")


def installed() -> str:
    """The build of the installed files, by their contents."""
    return _digest(_files(), contents=True)


def hold(parent: int, name: str) -> Build | None:
    """The copy of this name, locked against removal; None if it does not exist."""
    try:
        fd = os.open(PREFIX + name, _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        return None
    try:
        _check_owner(fd)
        fcntl.flock(fd, fcntl.LOCK_SH)
        # It may have been removed before we had the lock.
        there = os.stat(PREFIX + name, dir_fd=parent, follow_symlinks=False)
        if os.path.samestat(there, os.fstat(fd)):
            # Above the numbers that a new process gets. A duplicate shares the lock.
            return Build(name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        return None
    except FileNotFoundError:
        return None
    finally:
        os.close(fd)


def reopen(fd: int) -> None:
    """In a new mount namespace: open the folder of `fd` again, under the same number.

    A descriptor from another mount namespace cannot be mounted here.
    """
    new = os.open(os.readlink(f"/proc/self/fd/{fd}"), _DIRECTORY)
    try:
        if not os.path.samestat(os.fstat(new), os.fstat(fd)):
            raise CannotCopy("the private copy of the code was replaced by another folder")
        fcntl.flock(new, fcntl.LOCK_SH)
        os.dup2(new, fd, inheritable=False)
    finally:
        os.close(new)


def release(parent: int, build: Build) -> None:
    """Release a copy. It is removed unless another process holds it."""
    os.close(build.fd)
    remove(parent, PREFIX + build.name)


def sweep(parent: int, spare: int = 0) -> None:
    """Remove stale unfinished copies, and unused ones except the `spare` newest."""
    names = [name for name in os.listdir(parent) if name.startswith((PREFIX, UNFINISHED))]
    finished = []
    for name in names:
        try:
            mtime = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mtime
        except FileNotFoundError:
            continue
        if not name.startswith(UNFINISHED):
            finished.append((-mtime, name))
        elif time.time() - mtime > STALE:
            remove(parent, name)
    unused = [name for _, name in sorted(finished) if not spare or not _is_held(parent, name)]
    for name in unused[spare:]:
        remove(parent, name)


def _is_held(parent: int, entry: str) -> bool:
    """Whether a process holds a copy at this moment."""
    try:
        fd = os.open(entry, _DIRECTORY, dir_fd=parent)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def remove(parent: int, entry: str) -> None:
    """Remove a copy unless a process holds it. Never raises."""
    try:
        fd = os.open(entry, _DIRECTORY, dir_fd=parent)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # It may have been removed, and made again, before we had the lock.
        there = os.stat(entry, dir_fd=parent, follow_symlinks=False)
        if not os.path.samestat(there, os.fstat(fd)):
            return
        # Rename it first, so that a half-removed copy is never found under its name.
        gone = UNFINISHED + os.urandom(8).hex()
        os.rename(entry, gone, src_dir_fd=parent, dst_dir_fd=parent)
        _remove_tree(parent, gone)
    except OSError:
        pass  # in use, or being removed by another process
    finally:
        os.close(fd)


# --- the files ------------------------------------------------------------------------------


def _files() -> list[File]:
    """Each file that belongs to a copy."""
    files: list[File] = []
    for part in PARTS:
        path = f"{HUTCH}/{part}"
        if part.endswith(".py"):
            files.append(File(f"hutch/{part}", path, os.stat(path)))
        else:
            files += _below(f"hutch/{part}", path)
    if pickler := _pickler():
        files += _below(PICKLER, pickler)
    files.sort(key=lambda file: file.name)
    return files


def _below(name: str, path: str) -> Iterator[File]:
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _below(f"{name}/{entry.name}", entry.path)
            else:
                yield File(f"{name}/{entry.name}", entry.path, entry.stat())


def _pickler() -> str | None:
    # By hand: importlib.util takes longer to import than this.
    for folder in (os.path.dirname(HUTCH), *sys.path):
        if os.path.isfile(f"{folder}/{PICKLER}/__init__.py"):
            return f"{folder}/{PICKLER}"
    return None


def _digest(files: list[File], *, contents: bool) -> str:
    try:
        from _blake2 import blake2b  # hashlib loads OpenSSL, which takes several milliseconds
    except ImportError:
        from hashlib import blake2b
    with open("/proc/sys/kernel/random/boot_id", "rb", 0) as file:
        boot = file.read()
    digest = blake2b(f"{sys.version}\0{interpreter()}\0".encode() + boot, digest_size=12)
    for name, path, status in files:
        if contents:
            with open(path, "rb", 0) as file:
                data = file.read()
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
        else:
            key = (name, path, status.st_size, status.st_mtime_ns, status.st_ino)
            digest.update(repr(key).encode())
    return digest.hexdigest()


def interpreter() -> str:
    """The Python that launchers run on: not that of a venv, which an upgrade may replace."""
    return getattr(sys, "_base_executable", "") or sys.executable


# --- making and removing a copy -------------------------------------------------------------


def _make(parent: int, name: str, files: list[File], *, contents: bool) -> None:
    """Make a copy, unless the installed files change while they are read.

    Never leaves part of one. Another process may make the same copy at the same time.
    """
    part = UNFINISHED + os.urandom(8).hex()
    os.mkdir(part, 0o700, dir_fd=parent)
    fd = os.open(part, _DIRECTORY, dir_fd=parent)
    try:
        try:
            for relative, path, status in files:
                _copy(path, f"/proc/self/fd/{fd}/{relative}", status)
                _copy_byte_code(path, f"/proc/self/fd/{fd}/{relative}")
            is_whole = _digest(_files(), contents=contents) == name
        except FileNotFoundError:
            is_whole = False  # an upgrade is under way
        if is_whole:
            try:
                os.rename(part, PREFIX + name, src_dir_fd=parent, dst_dir_fd=parent)
                return
            except OSError:
                if not os.path.isdir(f"/proc/self/fd/{parent}/{PREFIX}{name}"):
                    raise
        _remove_tree(parent, part)
    except BaseException:
        _remove_tree(parent, part)
        raise
    finally:
        os.close(fd)


def _copy(source: str, target: str, status: os.stat_result) -> None:
    _make_folder(os.path.dirname(target))
    # Buffered: a single raw write to a nearly full disk may be short, and raise nothing.
    with open(source, "rb", 0) as file, open(target, "xb") as copy:
        copy.write(file.read())
        os.fchmod(copy.fileno(), 0o644)
    # Byte code is valid for the date of its source.
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


def _copy_byte_code(source: str, target: str) -> None:
    folder, file = os.path.split(source)
    stem, _, suffix = file.rpartition(".")
    name = f"__pycache__/{stem}.{sys.implementation.cache_tag}.pyc"
    if suffix == "py" and os.path.isfile(cached := f"{folder}/{name}"):
        # Without it, Python compiles the module when it is first imported.
        _copy(cached, f"{os.path.dirname(target)}/{name}", os.stat(cached))


def _make_folder(path: str) -> None:
    if not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        os.mkdir(path)
        os.chmod(path, 0o755)  # boxes read it under other user ids


def _remove_tree(parent: int, name: str) -> None:
    """Best-effort: what cannot be removed stays."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=parent)
    except OSError:
        return
    try:
        with os.scandir(fd) as entries:
            inner = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_directory in inner:
            if is_directory:
                _remove_tree(fd, entry)
            else:
                os.unlink(entry, dir_fd=fd)
        os.rmdir(name, dir_fd=parent)
    except OSError:
        pass
    finally:
        os.close(fd)


# --- where copies of processes are ----------------------------------------------------------


def _runtime_folder() -> int:
    """A descriptor of the folder for copies of this user. Raises OSError."""
    if os.geteuid() == 0:
        path = "/run/hutch"
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = f"{runtime}/hutch"
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        path = f"{cache}/hutch"
    os.makedirs(path, 0o700, exist_ok=True)
    fd = os.open(path, _DIRECTORY)
    try:
        _check_owner(fd)
        return fd
    except BaseException:
        os.close(fd)
        raise


def _check_owner(fd: int) -> None:
    """Raises CannotCopy if others can write there: its files run with all rights of this user."""
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise CannotCopy("the folder for private copies belongs to, or is open to, another user")
