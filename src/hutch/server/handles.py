"""Names of files that stay the same wherever a file is moved: name_to_handle_at(2).

Only root may open by them, and not every file system has them.
"""

from __future__ import annotations

import ctypes
import os

_BYTES = 128  # MAX_HANDLE_SZ
_EMPTY_PATH = 0x1000

_libc = ctypes.CDLL(None, use_errno=True)


class _Handle(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_uint),
        ("kind", ctypes.c_int),
        ("data", ctypes.c_ubyte * _BYTES),
    )


def handle_of(name: str, folder: int) -> bytes:
    """Of a name in an open folder, without following links; of the folder itself for ''."""
    handle, mount = _Handle(size=_BYTES), ctypes.c_int()
    flags = 0 if name else _EMPTY_PATH
    result = _libc.name_to_handle_at(
        folder, os.fsencode(name), ctypes.byref(handle), ctypes.byref(mount), flags
    )
    if result < 0:
        raise _failure()
    return bytes(handle)[: 8 + handle.size]


def open_handle(handle: bytes, mount: int, flags: int) -> int:
    """A descriptor. `mount` is an open file of the same mount. FileNotFoundError or ESTALE if the
    file is gone."""
    found = _Handle.from_buffer_copy(handle.ljust(ctypes.sizeof(_Handle), b"\0"))
    fd = int(_libc.open_by_handle_at(mount, ctypes.byref(found), flags | os.O_CLOEXEC))
    if fd < 0:
        raise _failure()
    return fd


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
