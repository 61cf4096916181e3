"""`python -m hutch.guest.contained ORDERS`: the guest as the first process of a container.

The engine has made the container: its root, its namespaces, its user, its limits. What an engine
does not do is done here, before anybody is answered, and a step that fails ends the container with
one line that names it. ORDERS is JSON, and anyone in the box can read it:

    workdir   where programs start
    user      what the box's one user is called; the engine has made us that user
    env       variables of every program: the image's
    rooms     folders of the box's own disk
    private   a folder to be made for shells to write to, on a file system that can be written to
    limits    rlimits of programs, by name: {"NPROC": 256}
    meeting   the path of the host's socket; null: the host comes by relay (see acceptor.py)
    filter    whether to put in place our filter of system calls
    gain      whether programs may gain rights by a set-user-ID file. Then there can be no filter
              of ours, for the kernel lets only those have one who never gain any
    foreign   whether the runtime has a kernel of its own, as gVisor: what that does not know of
              our limits and filter is not needed there

Beside this package, the bundle holds `kernel/` with the code of kernels, and `filter`.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from . import filter, quick  # noqa: F401  quick: before what it makes quick
from .acceptor import Acceptor
from .agent import GuestConfig
from .main import Handlers, serve_hosts
from .reaper import close_all_but

# As for a box of the namespaces backend: what one user takes of these, others lack.
RLIMITS = {
    "CORE": 1, "MEMLOCK": 8 << 20, "MSGQUEUE": 0, "RTPRIO": 0, "NICE": 0, "SIGPENDING": 2048,
}  # fmt: skip

PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_NO_NEW_PRIVS = 4, 15, 38

_libc = ctypes.CDLL(None, use_errno=True)


def main(orders: str) -> NoReturn:
    step = "orders"
    try:
        wanted = json.loads(orders)
        config = _config(wanted)
        for name, act in _steps(wanted, config):
            step = name
            act()
    except BaseException as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else repr(exc)
        os.write(2, f"hutch: the guest could not start: {step}: {reason}\n".encode()[:1000])
        os._exit(1)

    async def hosts(handlers: Handlers) -> None:
        await Acceptor(wanted["meeting"]).serve(handlers)

    gc.enable()  # see quick.py
    serve_hosts(hosts, config, {})
    os._exit(0)


def _config(wanted: dict[str, Any]) -> GuestConfig:
    limits = wanted["limits"].items()
    return GuestConfig(
        workdir=wanted["workdir"],
        user=wanted["user"],
        env=wanted["env"],
        rooms=tuple(wanted["rooms"]),
        private=wanted["private"],
        limits=tuple((getattr(resource, f"RLIMIT_{name}"), value) for name, value in limits),
        loop=os.path.join(os.path.dirname(os.path.abspath(__file__)), "loop.sh"),
        lib=sys.prefix + "/kernel",
        aliases=sys.prefix + "/aliases",
        oom=_open_oom(),
    )


def _open_oom() -> int:
    try:
        return os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return -1  # only who is killed first depends on it


def _steps(wanted: dict[str, Any], config: GuestConfig) -> list[tuple[str, Callable[[], None]]]:
    """What is done, in order: each step relies on the ones before it."""
    return [
        ("bundle", _check_bundle),
        ("private folder", lambda: os.makedirs(wanted["private"], 0o700, exist_ok=True)),
        ("limits", lambda: _limit_ourselves(wanted["foreign"])),
        ("name", lambda: _prctl(PR_SET_NAME, b"hutch-guest")),
        ("dumpable", lambda: _prctl(PR_SET_DUMPABLE, 0)),
        ("no new privileges", lambda: None if wanted["gain"] else _prctl(PR_SET_NO_NEW_PRIVS, 1)),
        ("seccomp", lambda: _filter(wanted["foreign"]) if wanted["filter"] else None),
        ("signals", lambda: filter.protect_the_first() if wanted["foreign"] else None),
        ("imports", _forbid_imports),
        ("descriptors", lambda: _leave_streams(config.oom)),
    ]


def _check_bundle() -> None:
    """An image may have a link where the engine mounts something: then that is over our code."""
    with open("/proc/self/mountinfo", "rb") as file:
        places = [line.split()[4] for line in file]
    over = [place for place in places if place.startswith(os.fsencode(sys.prefix) + b"/")]
    if over:
        raise OSError(errno.EPERM, f"{os.fsdecode(over[0])} is hidden: the image has a link there")


def _limit_ourselves(foreign: bool) -> None:
    for name, value in RLIMITS.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except ValueError:  # as Python says EPERM here
            if not foreign:
                raise
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _filter(foreign: bool) -> None:
    with open(sys.prefix + "/filter", "rb") as file:
        program = file.read()
    try:
        filter.install(program)
    except OSError:
        if not foreign:
            raise


def _forbid_imports() -> None:
    """All that we need is there. What came now could only be somebody else's wish."""
    sys.meta_path.clear()
    sys.path.clear()


def _leave_streams(keep: int) -> None:
    null = os.open("/dev/null", os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    close_all_but({0, 1, 2, keep} - {-1})


def _prctl(option: int, value: int | bytes) -> None:
    first = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    _check(_libc.prctl(option, first, *map(ctypes.c_ulong, (0, 0, 0))))


def _check(result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    main(sys.argv[1])
