"""Starts processes of our own. Imports next to nothing, to be the first thing a program does."""

from __future__ import annotations

import _socket  # not `socket`, which loads 10 ms of other modules before anything is started
import os
import sys

_BOOT = """\
import os, sys
sys.path.append({root!r})
sys.modules["ssl"] = None  # asyncio would load it, and no box needs it
from {module} import main
try:
    main({arguments})
    print(end="", flush=True)
except BrokenPipeError:
    pass  # whoever started us was gone before we were up
os._exit(0)  # all is done, and Python would take 15 ms to take itself apart
"""


def boot(module: str, *arguments: int) -> list[str]:
    """The argv of a fresh Python that runs `main` of a module of ours, and nobody else's code."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    text = _BOOT.format(root=root, module=module, arguments=", ".join(map(str, arguments)))
    return [sys.executable, "-I", "-S", "-c", text]


def spawn_launcher() -> tuple[int, int]:
    """Its pid, and a descriptor of the control socket. It has no other, and no environment."""
    return _spawn(boot("hutch.backends.namespaces.launcher", 3, os.getpid()), [])


def spawn_lasting_launcher(folder: int) -> tuple[int, int]:
    """The same, but it leaves us: the pid is of a process that ends as soon as it has.

    `folder` is a descriptor, above 4, of where others will find it.
    """
    argv = boot("hutch.backends.namespaces.lasting", 3, 4)
    # It may outlive whoever reads our complaints.
    more = [(os.POSIX_SPAWN_DUP2, folder, 4), (os.POSIX_SPAWN_DUP2, 0, 2)]
    return _spawn(argv, more)


def _spawn(argv: list[str], more: list[tuple[int, int, int]]) -> tuple[int, int]:
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        for sock in (ours, theirs):
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 1 << 20)
        pid = os.posix_spawn(
            sys.executable,
            argv,
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
                *more,
            ],
            setsid=True,
            # Whatever our caller ignores or blocks, programs in a box start with the defaults.
            # Four numbers cannot be set: KILL, STOP, and two that belong to libc.
            setsigmask=(),
            setsigdef=[number for number in range(1, 65) if number not in (9, 19, 32, 33)],
        )
    finally:
        theirs.close()
    return pid, ours.detach()
