"""Attacks, each harmless if it succeeds. A program of its own: it runs in a box, and outside.

    python3 -m probes canary.json

prints a line `ID OPEN detail` or `ID BLOCKED detail` for each. OPEN means that the kernel did what
was asked, or would have done it for better arguments: EINVAL, EFAULT and EBADF come from behind the
fence. The groups are those of SECURITY.md: F files, K kernel, P processes, N network, S sessions.

The canary says what lies outside: a file and a process with a token, sockets, numbers of calls.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys

from . import PROBES
from .base import CANARY, Blocked


def answer(id: str) -> str:
    try:
        return f"OPEN {PROBES[id]()}"
    except Blocked as exc:
        return f"BLOCKED {exc}"
    except (OSError, PermissionError) as exc:
        return f"BLOCKED {errno.errorcode.get(exc.errno or 0, exc)}"
    except KeyError as exc:
        return f"BLOCKED ENOSYS no number for {exc}"


def run(id: str) -> str:
    """In a process of its own, which has five seconds."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            signal.alarm(5)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.write(writer, answer(id).encode())
        except BaseException as exc:
            os.write(writer, f"BROKEN {exc!r}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    _, code = os.waitpid(pid, 0)
    if os.WIFSIGNALED(code):
        name = signal.Signals(os.WTERMSIG(code)).name
        return f"{'BLOCKED' if name == 'SIGSYS' else 'BROKEN'} {name}"
    return said


def main(path: str, *ids: str) -> None:
    with open(path) as file:
        CANARY.update(json.load(file))
    for id in ids or PROBES:
        print(id, run(id).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
