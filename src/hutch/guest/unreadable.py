"""A copy of a program that can be executed but not read.

The kernel closes a process that runs a file which its user may not read: no other process of that
user can open its memory or its descriptors in /proc. It is the effect of PR_SET_DUMPABLE=0 (see
prctl(2)), but in force from the first instruction, and it survives exec, which resets the flag.
What the process executes later is open again, unless that is unreadable too.

A shell needs this: its children have its uid, and one that could write to its memory could
decide what every later command returns. A memfd has no name, so the mode of the copy cannot be
changed back: the only ways to it are our descriptor and /proc/PID/exe, and both are closed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat

MAX_SIZE = 32 * 1024 * 1024  # a shell has 1 MB; an image's may be anything
_ELF = b"\x7fELF"
_MFD_EXEC = 0x10  # since Linux 6.3; where vm.memfd_noexec is 1, nothing can be executed without


def unreadable_copy(path: str) -> int | None:
    """A descriptor of an unreadable copy of a program, to be executed by.

    None where there can be none: a script (its interpreter has to read it), a file that cannot be
    read anyway, a machine that forbids to execute a memfd. Raises OSError where it only failed
    this time, so that nothing a box does can have its shell run unprotected.
    """
    try:
        # Not waiting: in an image of unknown origin it may be a FIFO.
        source = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (PermissionError, FileNotFoundError):
        return None
    try:
        info = os.fstat(source)
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_SIZE:
            return None
        if os.pread(source, len(_ELF), 0) != _ELF:
            return None
        return _copy(source, info.st_size, os.path.basename(path))
    except PermissionError:  # vm.memfd_noexec
        return None
    finally:
        os.close(source)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_EXEC)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _copy(source: int, size: int, name: str) -> int:
    writable = _memfd(name)
    try:
        done = 0
        while done < size:
            sent = os.sendfile(writable, source, done, size - done)
            if not sent:
                raise OSError(errno.EIO, "it shrank while it was copied")
            done += sent
        os.fchmod(writable, 0o111)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, seals)
        # The kernel executes nothing that is open for writing (ETXTBSY).
        return os.open(f"/proc/self/fd/{writable}", os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(writable)
