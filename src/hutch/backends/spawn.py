"""Starts processes of our own. Imports next to nothing, to be the first thing a program does."""

from __future__ import annotations

import _socket  # not `socket`, which loads 10 ms of other modules before anything is started
import os

from . import builds

CODE = 5  # in a launcher: the folder that it runs from, by a descriptor that locks it
ROOT = f"/proc/self/fd/{CODE}"

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


def boot(module: str, *arguments: int | str, root: str = "") -> list[str]:
    """The argv of a fresh Python that runs `main` of a module of ours, and nobody else's code.

    `root`: the folder that `hutch` is in; else the installed package is used.
    """
    root = root or os.path.dirname(builds.HUTCH)
    text = _BOOT.format(root=root, module=module, arguments=", ".join(map(repr, arguments)))
    return [builds.interpreter(), "-I", "-S", "-c", text]


def spawn_launcher() -> tuple[int, int]:
    """Its pid, and a descriptor of the control socket. It has no environment."""
    build = builds.for_process()
    root = ROOT if build else ""
    argv = boot("hutch.backends.namespaces.launcher", 3, os.getpid(), root=root)
    try:
        return _spawn(argv, [(os.POSIX_SPAWN_DUP2, build.fd, CODE)] if build else [])
    finally:
        if build:
            os.close(build.fd)


def spawn_lasting_launcher(folder: int, build: builds.Build) -> tuple[int, int]:
    """The same, but it leaves us: the pid is of a process that ends as soon as it has.

    `folder` is a descriptor, above 5, of where others will find it, and where the copy of the code
    is that it runs. It gets its own hold on the copy; ours stays ours.
    """
    own = builds.hold(folder, build.name)
    if own is None:
        raise OSError(2, f"the private copy of the code is gone: {builds.PREFIX}{build.name}")
    argv = boot("hutch.backends.namespaces.lasting", 3, 4, build.name, root=ROOT)
    more = [
        (os.POSIX_SPAWN_DUP2, folder, 4),
        (os.POSIX_SPAWN_DUP2, own.fd, CODE),
        (os.POSIX_SPAWN_DUP2, 0, 2),  # it may outlive whoever reads our complaints
    ]
    try:
        return _spawn(argv, more)
    finally:
        os.close(own.fd)


def _spawn(argv: list[str], more: list[tuple[int, int, int]]) -> tuple[int, int]:
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    try:
        for sock in (ours, theirs):
            sock.setsockopt(_socket.SOL_SOCKET, _socket.SO_SNDBUF, 1 << 20)
        pid = os.posix_spawn(
            argv[0],
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
