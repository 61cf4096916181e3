"""Starts processes of our own. Imports next to nothing, as programs start with it."""

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
    pass  # our parent ended before we were up
os._exit(0)  # Python's own shutdown would take 15 ms
"""


def boot(module: str, *arguments: int | str, root: str = "") -> list[str]:
    """The argv of a fresh Python that runs `main` of a module of ours, and no other code.

    `root`: the folder that `hutch` is in; by default, that of the installed package.
    """
    root = root or os.path.dirname(builds.HUTCH)
    text = _BOOT.format(root=root, module=module, arguments=", ".join(map(repr, arguments)))
    return [builds.interpreter(), "-I", "-S", "-c", text]


def spawn_launcher() -> tuple[int, int]:
    """Start a launcher, with an empty environment. Returns its pid and its control socket."""
    build = builds.for_process()
    root = ROOT if build else ""
    argv = boot("hutch.backends.namespaces.launcher", 3, os.getpid(), root=root)
    try:
        return _spawn(argv, [(os.POSIX_SPAWN_DUP2, build.fd, CODE)] if build else [])
    finally:
        if build:
            os.close(build.fd)


def spawn_lasting_launcher(folder: int, build: builds.Build) -> tuple[int, int]:
    """Start a launcher that is not our child: the pid is of its parent, which exits at once.

    `folder`: a descriptor, above 5, of the folder for its socket, which also has the copy of the
    code that it runs. It gets a lock of its own on the copy. Raises OSError if that is gone.
    """
    own = builds.hold(folder, build.name)
    if own is None:
        raise OSError(2, f"the private copy of the code is gone: {builds.PREFIX}{build.name}")
    argv = boot("hutch.backends.namespaces.lasting", 3, 4, build.name, root=ROOT)
    more = [
        (os.POSIX_SPAWN_DUP2, folder, 4),
        (os.POSIX_SPAWN_DUP2, own.fd, CODE),
        (os.POSIX_SPAWN_DUP2, 0, 2),  # it may outlive the reader of our stderr
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
            # Programs in a box start with default signals, whatever our caller ignores or blocks.
            # Four cannot be set: KILL, STOP, and two that belong to libc.
            setsigmask=(),
            setsigdef=[number for number in range(1, 65) if number not in (9, 19, 32, 33)],
        )
    finally:
        theirs.close()
    return pid, ours.detach()
