"""What runs in a preloaded process: it imports the packages of its image, and is cloned on request.

See zygote.py for who asks. Everything that a new box needs is imported here, before the first
clone; what user code needs was imported with the packages.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from typing import NoReturn

from hutch_kernel import main as kernels  # type: ignore[import-not-found]
from hutch_kernel import warm

from hutch.backends import linux
from hutch.backends.linux import seccomp
from hutch.guest.kernel import CHANNEL
from hutch.guest.reaper import ProgramJob

from .launch import become
from .plan import LIB, BoxImage, Python


def main(fd: int) -> NoReturn:
    zygote = socket.socket(fileno=fd)
    linux.set_name(b"hutch-preload")
    body = json.loads(zygote.recv(1 << 20))
    python = Python(**body.pop("python"))
    image = BoxImage(**body, python=python)
    standard = [path for path in sys.path if not path.startswith("/.hutch")]
    sys.path[:] = [*standard, python.packages, LIB]
    failure = _import(python.preload)
    program = seccomp.build(report=True)
    warm.remember()
    path = (*standard, python.own_packages, python.packages, LIB)
    gc.collect()
    gc.freeze()  # the collector must not write to pages that are shared with every box
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    zygote.send(failure.encode() or b"ready")
    while not failure:
        message, fds, _, _ = socket.recv_fds(zygote, 256 * 1024, 64)
        if not message:
            break
        _answer(zygote, {**json.loads(message), "kernel_path": path}, image, list(fds), program)
        for fd in fds:
            os.close(fd)
    os._exit(0)


def _import(modules: tuple[str, ...]) -> str:
    """Import the modules. Returns what went wrong, or ""."""
    for name, why in warm.preload(list(modules)):
        return f"cannot preload {name}: {why}"
    warm.rehearse()
    threads = _other_threads()
    if threads:
        return (
            f"importing {', '.join(modules)} started threads ({', '.join(threads)}), which a fork "
            "would not have: leave what starts them out of `preload`"
        )
    return ""


def _other_threads() -> list[str]:
    """The names of all threads of this process but the first."""
    names = []
    for number in sorted(os.listdir("/proc/self/task"), key=int)[1:]:
        with open(f"/proc/self/task/{number}/comm") as file:
            names.append(file.read().strip())
    return names


def _answer(
    zygote: socket.socket, body: dict[str, object], image: BoxImage, fds: list[int], program: bytes
) -> None:
    # A child's id maps can be written only while it is dumpable, which it inherits from us.
    linux.prctl(linux.PR_SET_DUMPABLE, 1)
    try:
        pid = linux.clone(linux.ALL_NAMESPACES)
        if pid == 0:
            zygote.close()
            become(body, image, fds, program, {"kernel": _run_kernel})
        pidfd = os.pidfd_open(pid)
    except OSError:
        zygote.send(b"no")
        return
    finally:
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
    socket.send_fds(zygote, [b"yes"], [pidfd])
    os.close(pidfd)


def _run_kernel(job: ProgramJob) -> NoReturn:
    kernels.main(CHANNEL, forked=True, environ=job["env"])
    raise AssertionError("a kernel came back")
