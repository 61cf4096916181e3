"""P: processes, terminals and descriptors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import signal
import struct
import termios

from .base import (
    BORN_WITH,
    CANARY,
    Blocked,
    call,
    family,
    guest,
    keeper,
    probe,
    reaches,
    read,
    status,
    token_in,
    writable,
)


@probe("P01.process_of_the_host")
def _() -> str:
    return token_in(f"/proc/{CANARY['pid']}/environ")


@probe("P01.kernel_threads")
def _() -> str:
    names = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            names.append(read(f"/proc/{pid}/comm").decode().strip())
        except OSError:
            continue
    if "kthreadd" not in names:
        raise Blocked(f"{len(names)} processes, all of the box")
    return f"{len(names)} processes"


@probe("P02.signal")
def _() -> str:
    os.kill(CANARY["pid"], 0)
    return "may be sent"


@probe("P02.signal_by_descriptor")
def _() -> str:
    fd = os.pidfd_open(CANARY["pid"])
    signal.pidfd_send_signal(fd, 0)
    return "may be sent"


SEIZE, ATTACH = 0x4206, 16
BUFFER = ctypes.create_string_buffer(16)
VECTOR = struct.pack("@PN", ctypes.addressof(BUFFER), 1)


def _prlimit(pid: int) -> str:
    now = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, now)
    return "limits may be set"


def _priority(pid: int) -> str:
    os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, pid))
    return "priority may be set"


def _write_own(pid: int, name: str) -> str:
    return writable(f"/proc/{pid}/{name}")


family("P03", {
    "trace_guest": lambda: f"{call('ptrace', SEIZE, guest(), 0, 0)}",
    "trace_keeper": lambda: f"{call('ptrace', SEIZE, keeper(), 0, 0)}",
    "read_guest": lambda: reaches("process_vm_readv", guest(), VECTOR, 1, VECTOR, 1, 0),
    "write_guest": lambda: reaches("process_vm_writev", guest(), None, 0, None, 0, 0),
    "take_descriptor": lambda: _take_descriptor(guest()),
    "take_descriptor_of_keeper": lambda: _take_descriptor(keeper()),
    "memory": lambda: writable(f"/proc/{guest()}/mem", os.O_RDWR),
    "memory_of_keeper": lambda: writable(f"/proc/{keeper()}/mem", os.O_RDWR),
    "out_of_memory_score": lambda: _write_own(guest(), "oom_score_adj"),
    "references": lambda: _write_own(guest(), "clear_refs"),
    "user_map": lambda: _write_own(guest(), "uid_map"),
    "limits": lambda: _prlimit(guest()),
    "limits_of_keeper": lambda: _prlimit(keeper()),
    "priority": lambda: _priority(guest()),
    # Of a user that does not exist: where this is allowed, no priority changes.
    "priority_of_all": lambda: reaches("setpriority", os.PRIO_USER, 54321, 0),
    "affinity": lambda: f"{os.sched_setaffinity(guest(), os.sched_getaffinity(guest()))}",
})  # fmt: skip


def _take_descriptor(pid: int) -> str:
    return reaches("pidfd_getfd", os.pidfd_open(pid), 0, 0)


@probe("P05.descriptors")
def _() -> str:
    if not BORN_WITH:
        raise Blocked("0, 1 and 2 only")
    return str(BORN_WITH)


@probe("P05.folder")
def _() -> str:
    here = os.readlink("/proc/self/cwd")
    if "(" not in here:
        raise Blocked(here)
    return here


@probe("P08.type_on_a_terminal")
def _() -> str:
    _, slave = os.openpty()
    os.setsid()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    fcntl.ioctl(slave, termios.TIOCSTI, b"#")
    return "typed"


@probe("P08.driver")
def _() -> str:
    _, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSETD, struct.pack("i", 0))  # the usual one, which it has
    return "may be chosen"


@probe("P08.terminal_of_the_operator")
def _() -> str:
    return writable("/dev/tty", os.O_RDWR)


@probe("P09.environment")
def _() -> str:
    if CANARY["token"] not in "".join(os.environ.values()):
        raise Blocked(" ".join(sorted(os.environ)))
    return "the token"


@probe("P09.environment_of_others")
def _() -> str:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if CANARY["token"].encode() in read(f"/proc/{pid}/environ"):
                return f"the token, of {pid}"
        except OSError:
            continue
    raise Blocked("no token anywhere")


family("P12", {
    "capabilities": lambda: _bits("CapInh", "CapPrm", "CapEff", "CapAmb"),
    "bounding_set": lambda: _bits("CapBnd"),
})  # fmt: skip


def _bits(*fields: str) -> str:
    held = [f"{field}={status(field)}" for field in fields if int(status(field) or "0", 16)]
    if not held:
        raise Blocked("none")
    return " ".join(held)


@probe("P12.groups")
def _() -> str:
    more = set(os.getgroups()) - {os.getgid()}
    if not more:
        raise Blocked("none")
    return str(more)
