"""K: the surface of the kernel."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable

from .base import (
    CANARY,
    NAMESPACES,
    Blocked,
    call,
    family,
    guest,
    libc,
    probe,
    reaches,
    room,
    status,
)

family("K01", {name: lambda flag=flag: f"{call('unshare', flag)}"
               for name, flag in NAMESPACES.items()})  # fmt: skip


@probe("K01.clone")
def _() -> str:
    pid = call("clone", NAMESPACES["user"] | signal.SIGCHLD, 0, 0, 0, 0)
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    return "cloned"


probe("K01.clone3")(lambda: reaches("clone3", None, 0))


@probe("K02.depth")
def _() -> str:
    with open("/proc/sys/user/max_user_namespaces") as file:
        allowed = int(file.read())
    if not allowed:
        raise Blocked("0")
    return str(allowed)


def _enter(pid: int, name: str) -> str:
    return reaches("setns", os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY), 0)


family("K03", {name: lambda name=name: _enter(guest(), name)
               for name in ("user", "mnt", "pid", "net")})  # fmt: skip
family("K03", {f"own_{name}": lambda name=name: _enter(os.getpid(), name)
               for name in ("user", "mnt", "pid", "net")})  # fmt: skip

ZEROES = bytes(256)


@probe("K06.io_uring")
def _() -> str:
    return f"descriptor {call('io_uring_setup', 1, room(120))}"


@probe("K06.aio")
def _() -> str:
    context = ctypes.c_ulong(0)
    if libc.syscall(ctypes.c_long(CANARY["numbers"]["io_setup"]), 1, ctypes.byref(context)) < 0:
        raise OSError(ctypes.get_errno(), "io_setup")
    return "a context from the machine's 65536"


@probe("K07.perf")
def _() -> str:
    # Type software, size 64, the CPU clock, excluding kernel and hypervisor.
    flags = 1 << 0 | 1 << 5 | 1 << 6
    attribute = struct.pack("=IIQQQQQ16x", 1, 64, 0, 0, 0, 0, flags)
    return f"descriptor {call('perf_event_open', attribute, 0, -1, -1, 0)}"


family("K04", {
    "program": lambda: reaches("bpf", 5, ZEROES, 0),
    "map": lambda: reaches("bpf", 0, ZEROES, 72),
    "socket_filter": lambda: _attach_filter(),
})  # fmt: skip


def _attach_filter() -> str:
    code = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 1))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("@HP", 1, ctypes.addressof(code)))
    return "attached"


family("K09", {
    "init_module": lambda: reaches("init_module", None, 0, None),
    "finit_module": lambda: reaches("finit_module", -1, None, 0),
    "delete_module": lambda: reaches("delete_module", b"nowhere", 0),
    "kexec": lambda: reaches("kexec_load", 0, 0, None, -1),
    "reboot": lambda: reaches("reboot", 1, 2, 3, None),
    "swapon": lambda: reaches("swapon", b"/nowhere", 0),
    "swapoff": lambda: reaches("swapoff", b"/nowhere"),
    "accounting": lambda: reaches("acct", b"/nowhere"),
    "ports": lambda: reaches("ioperm", 0, 1, 0),
    "port_level": lambda: reaches("iopl", 0),
    "quota": lambda: reaches("quotactl", -1, None, 0, None),
    "host_name": lambda: reaches("sethostname", None, 65),
    "domain_name": lambda: reaches("setdomainname", None, 65),
    "kernel_log": lambda: reaches("syslog", 3, None, -1),
    "user_faults": lambda: reaches("userfaultfd", 1),
    "secret_memory": lambda: reaches("memfd_secret", 0),
    "descriptor_table": lambda: reaches("modify_ldt", 0, None, 0),
    "page_gift": lambda: reaches("vmsplice", -1, None, 0, 0),
    "new_key": lambda: reaches("add_key", None, None, None, 0, 0),
    "keyring": lambda: reaches("keyctl", 0, -3, 0, 0, 0),
    "ask_for_key": lambda: reaches("request_key", None, None, None, 0),
    "watch_the_disk": lambda: reaches("fanotify_init", 0x200, 0),
    "compare": lambda: reaches("kcmp", os.getpid(), os.getpid(), 0, 0, 0),
    "file_system_user": lambda: f"was {call('setfsuid', -1)}",
    "capabilities": lambda: reaches("capset", None, None),
    "move_pages": lambda: reaches("move_pages", 0, 0, None, None, None, 0),
    "remap_pages": lambda: reaches("remap_file_pages", 0, 0, 0, 0, 0),
    "advise_others": lambda: reaches("process_madvise", -1, None, 0, 0, 0),
    "security_modules": lambda: reaches("lsm_list_modules", None, None, 0),
    "kernel_types": lambda: reaches("sysfs", 3),
    "no_randomness": lambda: _personality(),
})  # fmt: skip


def _personality() -> str:
    before = libc.personality(ctypes.c_ulong(0xFFFFFFFF))
    call("personality", before | 0x40000)
    call("personality", before)
    return "addresses no longer random"


family("K10", {
    "set": lambda: reaches("clock_settime", 0, struct.pack("=qq", 0, 2**62)),
    "set_time_of_day": lambda: reaches("settimeofday", struct.pack("=qq", 0, 2**62), None),
    "adjust": lambda: reaches("adjtimex", room(208)),
    "adjust_clock": lambda: reaches("clock_adjtime", 0, room(208)),
})  # fmt: skip


@probe("K11.i386")
def _() -> str:
    if os.uname().machine != "x86_64":
        raise Blocked("not on this machine")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return f"getpid gave {ctypes.CFUNCTYPE(ctypes.c_int)(address)()}"


@probe("K11.x32")
def _() -> str:
    if os.uname().machine != "x86_64":
        raise Blocked("not on this machine")
    return f"getpid gave {call(0x40000000 | CANARY['numbers']['getpid'])}"


@probe("K16.filter")
def _() -> str:
    if status("Seccomp") in ("1", "2"):
        raise Blocked(f"mode {status('Seccomp')}")
    return "none"


@probe("K17.future")
def _() -> str:
    known = set(CANARY["numbers"].values())
    for number in range(470, 601):
        if number not in known:
            try:
                call(number, -1, -1, -1, -1, -1, -1)
            except OSError as exc:
                if exc.errno == errno.ENOSYS:
                    continue
            return str(number)
    raise Blocked("ENOSYS, all of them")


# What all users of the machine, or all of one, draw from together.


def _how_many(make: Callable[[], object], enough: int) -> str:
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for _ in range(enough):
        try:
            kept.append(make())
        except OSError as exc:
            raise Blocked(f"{len(kept)}, then {errno.errorcode[exc.errno or 0]}") from None
    return f"{enough} and more"


def _inotify() -> int:
    fd = int(libc.inotify_init1(0))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    return fd


def _leave_pending() -> None:
    if libc.sigqueue(os.getpid(), signal.SIGRTMIN + 1, ctypes.c_void_p(0)) < 0:
        raise OSError(ctypes.get_errno(), "sigqueue")


@probe("K18.pending_signals")
def _() -> str:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN + 1])
    return _how_many(_leave_pending, 8192)


family("K18", {
    "inotify": lambda: _how_many(_inotify, 64),
    "terminals": lambda: _how_many(lambda: os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY), 400),
})  # fmt: skip
