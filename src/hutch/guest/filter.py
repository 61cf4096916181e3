"""Filters of system calls, put in place by the guest itself: see seccomp(2).

What a box may call is decided elsewhere; here is how such a program is installed, and one that is
needed only where the kernel is not Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_INSTRUCTION = struct.Struct("=HBBI")  # struct sock_filter: operation, jump if, jump if not, value
_LOAD, _EQUALS, _RETURN = 0x20, 0x15, 0x06
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | errno.EPERM

_SET_MODE_FILTER, _TSYNC = 1, 1
_MACHINE = os.uname().machine
_SECCOMP = {"x86_64": 317, "aarch64": 277}
# kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo
_SIGNALS = {"x86_64": (62, 200, 234, 129, 297), "aarch64": (129, 130, 131, 138, 240)}
_GUEST, _EVERYBODY = 1, 0xFFFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)


def install(program: bytes) -> None:
    """Put this process under a filter, and all that it will ever start. Raises OSError."""
    instructions = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: how many, and where.
    count = len(program) // _INSTRUCTION.size
    header = struct.pack("@HP", count, ctypes.addressof(instructions))
    arguments = map(ctypes.c_ulong, (_SET_MODE_FILTER, _TSYNC))
    if _libc.syscall(ctypes.c_long(_SECCOMP[_MACHINE]), *arguments, header):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def protect_the_first() -> None:
    """Have nobody send a signal to process 1, nor to all there are.

    Linux sees to that by itself. gVisor lets a program of the same user kill process 1, and
    that is the guest. Raises OSError.
    """
    signals = _SIGNALS[_MACHINE]
    refused = (_GUEST, _EVERYBODY)
    lines = [(_LOAD, 0, 0, _NUMBER)]
    for left, number in enumerate(reversed(signals)):
        # To the second load, over the comparisons that are left and the first verdict.
        lines.insert(1, (_EQUALS, left + 1, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    for left, process in enumerate(reversed(refused)):
        lines.insert(len(signals) + 3, (_EQUALS, left + 1, 0, process))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)]
    install(b"".join(_INSTRUCTION.pack(*line) for line in lines))
