"""F: files, devices and views of the kernel."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import time
from collections.abc import Iterator

from .base import (
    BORN_WITH,
    CANARY,
    NAMESPACES,
    Blocked,
    call,
    content,
    family,
    first_of,
    guest,
    keeper,
    probe,
    reaches,
    read,
    status,
    token_in,
    writable,
)

family("F01", {
    "path": lambda: token_in(CANARY["file"]),
    "relative": lambda: token_in("../" * 30 + CANARY["file"].lstrip("/")),
    "own_root": lambda: token_in("/proc/self/root/../.." + CANARY["file"]),
    "root_of_guest": lambda: token_in(f"/proc/{guest()}/root{CANARY['file']}"),
    "folder_of_guest": lambda: token_in(f"/proc/{guest()}/cwd/{'../' * 30}{CANARY['file']}"),
    "shared_memory": lambda: token_in(CANARY["shm_file"]),
    "shadow": lambda: content("/etc/shadow"),
    "home_of_root": lambda: str(len(os.listdir("/root"))),
    "old_root": lambda: token_in("/oldroot" + CANARY["file"]),
})  # fmt: skip


@probe("F01.temporary_files")
def _() -> str:
    folder = os.path.dirname(CANARY["file"])
    if os.path.basename(folder) not in os.listdir(os.path.dirname(folder)):
        raise Blocked("not listed")
    return folder


@probe("F01.inherited_folder")
def _() -> str:
    for fd in BORN_WITH:
        try:
            return token_in(f"/proc/self/fd/{fd}/" + "../" * 30 + CANARY["file"].lstrip("/"))
        except OSError:
            continue
    raise Blocked("no descriptor leads out")


family("F02", {
    "environment": lambda: f"{len(read(f'/proc/{guest()}/environ'))} bytes",
    "memory": lambda: writable(f"/proc/{guest()}/mem", os.O_RDONLY),
    "memory_map": lambda: content(f"/proc/{guest()}/maps"),
    "descriptors": lambda: str(len(os.listdir(f"/proc/{guest()}/fd"))),
    "root": lambda: os.readlink(f"/proc/{guest()}/root"),
    "folder": lambda: os.readlink(f"/proc/{guest()}/cwd"),
    "program": lambda: os.readlink(f"/proc/{guest()}/exe"),
    "environment_of_keeper": lambda: f"{len(read(f'/proc/{keeper()}/environ'))} bytes",
    "memory_of_keeper": lambda: writable(f"/proc/{keeper()}/mem", os.O_RDONLY),
    "descriptors_of_keeper": lambda: str(len(os.listdir(f"/proc/{keeper()}/fd"))),
})  # fmt: skip


@probe("F02.command_line")
def _() -> str:
    for pid in (guest(), keeper()):
        line = read(f"/proc/{pid}/cmdline")
        if b"/" in line:
            return repr(line[:60])
    raise Blocked("no path of the host in it")


@probe("F02.name_of_the_host")
def _() -> str:
    if os.uname().nodename != CANARY["hostname"]:
        raise Blocked(os.uname().nodename)
    return os.uname().nodename


family("F03", {name.replace("/", "_"): lambda name=name: writable("/proc/" + name) for name in (
    "sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/vm/drop_caches", "sys/kernel/hostname",
    "sys/fs/binfmt_misc/register", "sys/net/ipv4/ip_forward", "sys/user/max_user_namespaces",
    "sys/kernel/ns_last_pid", "sysrq-trigger", "irq/default_smp_affinity", "mtrr",
)})  # fmt: skip


@probe("F04.listed")
def _() -> str:
    if not (names := os.listdir("/sys")):
        raise Blocked("empty")
    return str(names[:4])


@probe("F04.cgroup_mount")
def _() -> str:
    with open("/proc/self/mountinfo") as file:
        found = [line.split()[4] for line in file if " - cgroup" in line]
    if not found:
        raise Blocked("none")
    return found[0]


family("F04", {
    "uevent_helper": lambda: writable("/sys/kernel/uevent_helper"),
    "huge_pages": lambda: writable("/sys/kernel/mm/transparent_hugepage/enabled"),
    "cgroup": lambda: first_of(writable, "/sys/fs/cgroup/cgroup.procs",
                             "/sys/fs/cgroup/memory/cgroup.procs"),
})  # fmt: skip


family("F05", {name.replace(".", "_"): lambda name=name: content("/proc/" + name) for name in (
    "kcore", "keys", "timer_list", "sched_debug", "interrupts", "softirqs", "config.gz",
    "slabinfo", "vmallocinfo", "iomem", "ioports", "kpageflags", "modules", "key-users",
)})  # fmt: skip
family("F05", {f"dev_{name}": lambda name=name: content("/dev/" + name)
               for name in ("mem", "kmem", "kmsg", "port")})  # fmt: skip


@probe("F05.kmsg")
def _() -> str:
    # Reading it would take messages from those who need them: only check that it is the real one.
    with open("/proc/kmsg") as file:
        if os.fstat(file.fileno()).st_rdev == os.stat("/dev/null").st_rdev:
            raise Blocked("masked")
    return "the log of the kernel"


@probe("F05.addresses")
def _() -> str:
    line = read("/proc/kallsyms").partition(b"\n")[0]
    if not line.split() or not int(line.split()[0], 16):
        raise Blocked("no addresses")
    return line.decode()


def _device(major: int, minor: int, kind: int = 0o020000) -> str:
    path = f"/tmp/probe-{os.getpid()}"
    os.mknod(path, kind | 0o600, os.makedev(major, minor))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as exc:
        if exc.errno == errno.ENXIO:
            return "made, and open to who has the hardware"
        raise
    finally:
        os.unlink(path)
    return "made and opened"


family("F06", {
    "disk": lambda: _device(*CANARY["disk"], kind=0o060000),
    "zero": lambda: _device(1, 5),
    "tunnel": lambda: _device(10, 200),
    "fuse": lambda: _device(10, 229),
    "gift": lambda: content(CANARY["gift"] + "/random"),
})  # fmt: skip


@probe("F07.devices")
def _() -> str:
    known = {"null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts", "shm", "fd",
             "stdin", "stdout", "stderr"}  # fmt: skip
    more = set(os.listdir("/dev")) - known
    if not more:
        raise Blocked("none but the usual")
    return " ".join(sorted(more)[:8])


def step_aside() -> None:
    """Outside a box, into a mount namespace of our own, so that the host sees nothing of this."""
    if not CANARY["inside"]:
        call("unshare", NAMESPACES["mount"])
        call("mount", None, b"/", None, 1 << 18 | 16384, None)  # private, and all below


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> str:
    step_aside()
    call("mount", source, target, kind, flags, None)
    return "mounted"


family("F08", {
    "tmpfs": lambda: _mount(b"probe", b"/tmp", b"tmpfs", 0),
    "proc": lambda: _mount(b"probe", b"/tmp", b"proc", 0),
    "bind": lambda: _mount(b"/", b"/tmp", None, 4096),
    "remount": lambda: _mount(b"none", b"/", None, 32 | 4096),
})  # fmt: skip

family("F09", {
    "fsopen": lambda: reaches("fsopen", b"tmpfs", 0),
    "open_tree": lambda: reaches("open_tree", -100, b"/", 1),
    "mount_setattr": lambda: reaches("mount_setattr", -1, b"", 0, b"", 0),
    "move_mount": lambda: reaches("move_mount", -1, b"", -1, b"", 0),
    "open_tree_attr": lambda: reaches("open_tree_attr", -1, b"", 0, b"", 0),
    "fspick": lambda: reaches("fspick", -1, b"", 0),
    "fsmount": lambda: reaches("fsmount", -1, 0, 0),
    "listmount": lambda: reaches("listmount", None, None, 0, 0),
    "statmount": lambda: reaches("statmount", None, None, 0, 0),
    "pivot_root": lambda: reaches("pivot_root", b"/nowhere", b"/nowhere"),
    "chroot": lambda: reaches("chroot", b"/nowhere"),
    "by_handle": lambda: reaches("open_by_handle_at", -1, None, 0),
    "handle": lambda: reaches("name_to_handle_at", -100, b"/", None, None, 0),
})  # fmt: skip


@probe("F10.unmask")
def _() -> str:
    step_aside()
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4].encode() for line in file]
    failure: OSError | None = None
    for point in points:
        if point.startswith((b"/proc", b"/sys")):
            try:
                call("umount2", point, 2 | 8)
                return point.decode()
            except OSError as exc:
                failure = exc
    assert failure
    raise failure


def _gift(program: str) -> Iterator[str]:
    """Status lines of a program from a folder of the host's that was mounted."""
    path = f"{CANARY['gift']}/{program}"
    with subprocess.Popen([path, "5"]) as child:
        try:
            time.sleep(0.1)  # exec is seen before its credentials are
            with open(f"/proc/{child.pid}/status") as file:
                yield from file.read().splitlines()
        finally:
            child.kill()


@probe("F13.set_user_id")
def _() -> str:
    ids = next(line.split() for line in _gift("set-user-id") if line.startswith("Uid:"))
    if ids[2] == str(os.getuid()):
        raise Blocked("effective uid unchanged")
    return f"effective uid {ids[2]}"


@probe("F13.no_new_privileges")
def _() -> str:
    if status("NoNewPrivs") == "1":
        raise Blocked("set")
    return "not set"


@probe("F13.mounts")
def _() -> str:
    with open("/proc/self/mountinfo") as file:
        loose = [line.split()[4] for line in file if "nosuid" not in line.split()[5].split(",")]
    if not loose:
        raise Blocked("nosuid everywhere")
    return " ".join(loose[:5])


@probe("F13.devices")
def _() -> str:
    with open("/proc/self/mountinfo") as file:
        mounts = [line.split() for line in file if " - devpts " not in line]
    loose = [fields[4] for fields in mounts if "nodev" not in fields[5].split(",")]
    # What is itself a harmless device needs it: /dev/null and the like, also where it hides a file.
    loose = [path for path in loose if not _is_device(path)]
    if not loose:
        raise Blocked("nodev everywhere")
    return str(loose[:4])


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False  # in a folder that is closed to us


@probe("F14.file_capabilities")
def _() -> str:
    held = next(line.split()[1] for line in _gift("capable") if line.startswith("CapEff:"))
    if not int(held, 16):
        raise Blocked("none gained")
    return held


family("F15", {
    "program": lambda: writable("/usr/bin/env"),
    "library": lambda: writable("/usr/lib/os-release"),
    "users": lambda: writable("/etc/passwd"),
    "loader": lambda: writable("/etc", os.O_TMPFILE | os.O_WRONLY),
    "usr": lambda: writable("/usr", os.O_TMPFILE | os.O_WRONLY),
    "top": lambda: writable("/", os.O_TMPFILE | os.O_WRONLY),
    "machine": lambda: writable("/etc/machine-id"),
})  # fmt: skip
