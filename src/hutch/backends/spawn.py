"""Starts processes of our own. Imports next to nothing, to be the first thing a program does."""

from __future__ import annotations

import os
import socket
import sys

_BOOT = """\
import sys
sys.path.append({root!r})
sys.modules["ssl"] = None  # asyncio would load it, and no box needs it
from {module} import main
main({arguments})
"""


def boot(module: str, *arguments: int) -> list[str]:
    """The argv of a fresh Python that runs `main` of a module of ours, and nobody else's code."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
    text = _BOOT.format(root=root, module=module, arguments=", ".join(map(str, arguments)))
    return [sys.executable, "-I", "-S", "-c", text]


def spawn_launcher() -> tuple[int, socket.socket]:
    """Its pid and the control socket. It has no environment, and no descriptor but that one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        pid = os.posix_spawn(
            sys.executable,
            boot("hutch.backends.namespaces.launcher", 3, os.getpid()),
            {},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs.fileno(), 3),
                (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
                (os.POSIX_SPAWN_DUP2, 0, 1),
            ],
            setsid=True,
        )
    return pid, ours
