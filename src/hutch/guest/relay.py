"""`python -m hutch.guest.relay`: copies bytes between its standard streams and the guest.

The container engine starts it for each connection of a host that cannot share a socket with the
guest (see contained.py). Its user id distinguishes it from the programs of the box.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
import time

NAME = "\0hutch"  # in the network namespace of the box, and in no file system
RELAY = 65533  # the user id of relays; no program of a box can have it
HELLO = b"r"

PATIENCE = 20.0  # seconds for a guest to start
AGAIN = 0.005  # seconds between two attempts

PR_SET_DUMPABLE = 4
F_SETPIPE_SZ = 1031
SIZE = 1 << 20


def main() -> None:
    # First of all: no other process may read what passes through here.
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, *map(ctypes.c_ulong, (0, 0, 0, 0)))
    try:
        guest = _connect()
        who = struct.pack("iII", os.getpid(), os.getuid(), os.getgid())
        guest.sendmsg([HELLO], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    except OSError as exc:
        sys.exit(f"hutch: the guest cannot be reached: {exc.strerror}")
    for pipe in (0, 1):
        os.set_blocking(pipe, True)
        try:
            fcntl.fcntl(pipe, F_SETPIPE_SZ, SIZE)
        except OSError:
            pass  # not a pipe, or over the quota of this user: only slower
    threading.Thread(target=_give, args=(guest,), daemon=True).start()
    _carry(guest.fileno(), 1)
    # The guest has hung up, or its output is not read any more. The thread may still wait for bytes
    # that never come.
    os._exit(0)


def _connect() -> socket.socket:
    """Connect to the guest, and try again while it starts. Raises OSError."""
    deadline = time.monotonic() + PATIENCE
    while True:
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            guest.connect(NAME)
            return guest
        except ConnectionRefusedError:
            guest.close()
            if time.monotonic() > deadline:
                raise
        time.sleep(AGAIN)


def _give(guest: socket.socket) -> None:
    _carry(0, guest.fileno())
    try:
        guest.shutdown(socket.SHUT_WR)
    except OSError:
        os._exit(0)  # it has ended


def _carry(source: int, target: int) -> None:
    """Copy until the source ends or the target is closed.

    Not with splice(2): while it waits for the socket, data that is in the pipe cannot be read.
    """
    try:
        while data := os.read(source, SIZE):
            view = memoryview(data)
            while view:
                view = view[os.write(target, view) :]
    except OSError:
        return  # one end is gone


if __name__ == "__main__":
    main()
