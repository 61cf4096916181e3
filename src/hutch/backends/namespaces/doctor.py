"""Tries each layer of isolation on this machine, and suggests fixes for what is missing.

`main` runs in a fresh process. Each trial runs in a child of that, so that one that hangs, or
cannot be undone, ends with its child. Nothing is concluded from a version or a setting: Ubuntu, for
example, lets everyone make a user namespace, but do nothing in it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NoReturn

from hutch.backends import linux
from hutch.backends.base import Spec
from hutch.backends.linux import cgroup, seccomp
from hutch.errors import HutchError
from hutch.types import Grade, Layer, Report, Status, plain

from . import NamespacesBackend, rights
from .plan import UID_BASE, UIDS_PER_BOX, USER
from .rights import id_map, read

TRIAL_TIMEOUT = 10  # seconds; a trial takes milliseconds
BOX_TIMEOUT = 30
STAGE = "/tmp"  # exists everywhere; only the child's own namespace sees what we mount

ROOT_IS_BETTER = "sudo hutch run -- COMMAND"


class Weak(Exception):
    """The layer works in part. `fix`: the command that would make it complete."""

    status = Status.DEGRADED

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.fix = fix


class Absent(Weak):
    """The layer does not work at all."""

    status = Status.MISSING


@dataclass(frozen=True)
class Check:
    """`act` returns what works, in words, or raises Weak, Absent or OSError."""

    name: str
    act: Callable[[], str]
    required: bool = True

    def layer(self) -> Layer:
        try:
            return Layer(self.name, Status.ACTIVE, self.act(), required=self.required)
        except Weak as exc:
            return Layer(self.name, exc.status, str(exc), exc.fix, self.required)
        except OSError as exc:
            why = exc.strerror or str(exc)
            return Layer(self.name, Status.MISSING, why, cure(exc), self.required)


def main() -> None:
    print(json.dumps(plain(report())))


def report() -> Report:
    leftovers = LEFTOVERS.layer()  # first, as starting a box sweeps some of them away
    layers = (*(check.layer() for check in CHECKS), leftovers)
    whole = all(layer.status is not Status.MISSING for layer in layers if layer.required)
    grade: Grade = "ns" if whole else "none"
    return Report(NamespacesBackend.name, grade, layers)


# --- trials ---------------------------------------------------------------------------

MINE = rights.find()  # before any trial: user ids differ in a new namespace
RANGED = MINE.ranged


def trial(act: Callable[[], str], namespaces: int = 0) -> str:
    """Run `act` in a child: as root of new namespaces, if any are given. Returns its result.

    Raises OSError if it raises anything, hangs or dies.
    """
    ours, theirs = socket.socketpair()
    pid = linux.clone(namespaces) if namespaces else os.fork()
    if not pid:
        ours.close()
        _answer(act, bool(namespaces), theirs)
    theirs.close()
    try:
        if namespaces:
            _map_ids(pid)
        ours.send(b"m")
        ours.settimeout(TRIAL_TIMEOUT)
        reply = ours.recv(65536)
    except TimeoutError:
        raise OSError(errno.ETIMEDOUT, "it hangs") from None
    finally:
        ours.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    answer = json.loads(reply or b'{"errno": 0, "why": "the trial died"}')
    if "errno" in answer:
        raise OSError(answer["errno"], answer["why"])
    return str(answer["result"])


def _answer(act: Callable[[], str], mapped: bool, sock: socket.socket) -> NoReturn:
    """Run in the child. Never returns."""
    try:
        if sock.recv(1) != b"m":  # our uids are mapped now
            os._exit(1)
        if mapped:
            if RANGED:
                linux.take_root_ids()
            linux.mount("", "/", None, linux.REC | linux.PRIVATE)
        answer: dict[str, object] = {"result": act()}
    except OSError as exc:
        answer = {"errno": exc.errno or 0, "why": exc.strerror or str(exc)}
    except BaseException as exc:
        answer = {"errno": 0, "why": repr(exc)}
    sock.send(json.dumps(answer).encode())
    os._exit(0)


def _map_ids(pid: int) -> None:
    uids, gids = (os.geteuid(), 1), (os.getegid(), 1)
    if RANGED:
        uids = gids = (UID_BASE, UIDS_PER_BOX)
    else:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"0 {uids[0]} {uids[1]}")
    _write(f"/proc/{pid}/gid_map", f"0 {gids[0]} {gids[1]}")


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError as exc:
        name = os.path.basename(path)
        raise OSError(exc.errno, f"{name}: {os.strerror(exc.errno or 0)}") from None


def _setting(name: str) -> str:
    return read("/proc/sys/" + name.replace(".", "/"))


def _stage() -> None:
    linux.mount("stage", STAGE, "tmpfs", linux.NOSUID | linux.NODEV, "size=1m,mode=755")


def refused(call: Callable[..., object], *args: object) -> bool:
    try:
        call(*args)
    except OSError:
        return True
    return False


# --- the layers -------------------------------------------------------------------------

IN_A_BOX = linux.NEWUSER | linux.NEWNS


def kernel_and_machine() -> str:
    system = os.uname()
    if system.machine not in seccomp.TABLES:
        raise Absent(f"no table of system calls for {system.machine}, only for x86_64 and aarch64")
    return f"Linux {system.release}, {system.machine}"


def user_namespaces() -> str:
    def act() -> str:
        _stage()
        return "made one, and mounted a file system in it"

    return trial(act, IN_A_BOX)


def mounts() -> str:
    def act() -> str:
        _stage()
        os.mkdir(f"{STAGE}/usr")
        linux.mount("/usr", f"{STAGE}/usr", None, linux.BIND | linux.REC)
        linux.set_mount(f"{STAGE}/usr", linux.ATTR_RDONLY | linux.ATTR_NOSUID, recursive=True)
        if not refused(os.mkdir, f"{STAGE}/usr/hutch-doctor"):
            os.rmdir(f"{STAGE}/usr/hutch-doctor")
            raise OSError(0, "a read-only mount could be written to")
        return "showed /usr read-only"

    return trial(act, IN_A_BOX)


def detached_mounts() -> str:
    def act() -> str:
        _stage()
        os.mkdir(f"{STAGE}/usr")
        copy = linux.copy_mount("/usr")
        linux.set_mount(copy, linux.ATTR_RDONLY, recursive=True)
        linux.attach_mount(copy, STAGE, "/usr")
        os.stat(f"{STAGE}/usr/bin")
        return "copied a mount, and put it elsewhere"

    return trial(act, IN_A_BOX)


def new_root() -> str:
    def act() -> str:
        _stage()
        linux.pivot(STAGE)
        if os.listdir("/"):
            raise OSError(0, "pivot_root: the old root is still there")
        return "left this machine's root for an empty one"

    return trial(act, IN_A_BOX)


def layers() -> str:
    def act() -> str:
        _stage()
        lower, upper, work, root = (f"{STAGE}/{n}" for n in ("lower", "upper", "work", "root"))
        for path in (lower, upper, work, root):
            os.mkdir(path)
        linux.mount_layers(root, [lower], upper, work)
        return "stacked two folders: imported images can be used"

    return trial(act, IN_A_BOX)


def processes() -> str:
    def act() -> str:
        _stage()
        linux.mount("proc", STAGE, "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
        seen = [name for name in os.listdir(STAGE) if name.isdigit()]
        if os.getpid() != 1 or seen != ["1"]:
            raise OSError(0, f"{len(seen)} processes are to be seen, and not one")
        return "saw itself alone in a /proc of its own"

    return trial(act, IN_A_BOX | linux.NEWPID)


def network() -> str:
    def act() -> str:
        linux.raise_loopback()
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.connect(server.getsockname())
        lines = read("/proc/self/net/dev").splitlines()[2:]
        names = sorted(line.partition(":")[0].strip() for line in lines)
        if not set(names) <= HARMLESS_INTERFACES:
            raise OSError(0, f"interfaces in a new network: {', '.join(names)}")
        return "one of its own, with localhost and nothing else"

    return trial(act, IN_A_BOX | linux.NEWNET)


# Some kernels put these into every new network namespace. They are down.
HARMLESS_INTERFACES = {
    "lo",
    "tunl0",
    "gre0",
    "gretap0",
    "erspan0",
    "ip_vti0",
    "ip6_vti0",
    "sit0",
    "ip6tnl0",
    "ip6gre0",
    "teql0",
}


def names() -> str:
    def act() -> str:
        linux.set_hostname("box")
        if os.uname().nodename != "box":
            raise OSError(0, "sethostname had no effect")
        return "own host name, message queues, control groups"

    return trial(act, IN_A_BOX | linux.NEWUTS | linux.NEWIPC | linux.NEWCGROUP)


def nested_namespaces() -> str:
    def act() -> str:
        _stage()
        linux.mount("proc", STAGE, "proc", linux.NOSUID | linux.NODEV | linux.NOEXEC)
        _write(f"{STAGE}/sys/user/max_user_namespaces", "0")
        if not refused(linux.unshare, linux.NEWUSER):
            raise OSError(0, "another one could still be made inside")
        return "none can be made in a box"

    return trial(act, IN_A_BOX | linux.NEWPID)


def user_ids() -> str:
    if not RANGED:
        why = "one only, yours: a box has a single user, who is also its guest"
        raise Weak(why, "" if MINE.is_root or rights.missing_options() else ROOT_IS_BETTER)

    def act() -> str:
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        return f"{UIDS_PER_BOX} for each box, which no user of this machine has"

    return trial(act, IN_A_BOX)


def owners() -> str:
    if not RANGED:
        return "not needed: the user of a box is you"
    if not MINE.idmaps:
        why = "id-mapped mounts need CAP_SYS_ADMIN: the user of a box with mounts is their owner"
        raise Weak(why)
    for folder in dict.fromkeys((os.getcwd(), tempfile.gettempdir())):
        try:
            trial(partial(_show_as_owned, folder))
        except OSError as exc:
            why = f"{folder} ({exc.strerror}): no folder there can be a workspace"
            fix = "keep workspaces on ext4, xfs, btrfs or tmpfs"
            raise Weak(why, fix) from None
    return "kept in workspaces (id-mapped mounts)"


def _show_as_owned(folder: str) -> str:
    info = os.stat(folder)
    uid, gid = (f"{id} {UID_BASE + USER} 1" for id in (info.st_uid, info.st_gid))
    namespace = id_map(uid, gid)
    copy = linux.copy_mount(folder, recursive=False)
    linux.set_mount(copy, linux.ATTR_IDMAP, user_namespace=namespace)
    if os.stat(f"/proc/self/fd/{copy}").st_uid != UID_BASE + USER:
        raise OSError(0, "the owner did not change")
    return ""


def call_filter() -> str:
    program = seccomp.build()

    def act() -> str:
        seccomp.install(program)
        if "Seccomp:\t2" not in read("/proc/self/status"):
            raise OSError(0, "loaded, and not there")
        for call, *args in (("unshare", linux.NEWUSER), ("ptrace", 0, 0, 0, 0), ("bpf", 0, 0, 0)):
            if not refused(linux.call, call, *args):
                raise OSError(0, f"loaded, and {call} was not refused")
        return f"refused what it should ({len(program) // 8} instructions)"

    return trial(act)


def no_new_privileges() -> str:
    def act() -> str:
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        if "NoNewPrivs:\t1" not in read("/proc/self/status"):
            raise OSError(0, "set, and not there")
        return "set-user-ID programs gain nothing"

    return trial(act)


def landlock() -> str:
    version = linux.landlock_version()
    if not version:
        now = read("/sys/kernel/security/lsm") or "capability"
        fix = "" if "landlock" in now else f"boot the kernel with lsm=landlock,{now}"
        raise Absent("this kernel has none: mounts are the only fence around files", fix)

    def act() -> str:
        linux.landlock(["/usr"], [], [])
        if not refused(os.listdir, "/"):
            raise OSError(0, "loaded, and / could still be read")
        return f"version {version}: a second fence around files"

    return trial(act)


def keyring() -> str:
    def act() -> str:
        linux.new_keyring()
        return "a box sees none of your keys"

    return trial(act)


def system_calls() -> str:
    def act() -> str:
        missing = []
        how = struct.pack("=QQQ", os.O_RDONLY | os.O_CLOEXEC, 0, 0)
        for name, *args in (
            ("pidfd_open", os.getpid(), 0),
            ("pidfd_send_signal", -1, 0, 0, 0),
            ("openat2", -100, b"/", how, len(how)),
            ("close_range", 1 << 20, 1 << 20, 0),
        ):
            try:
                linux.call(name, *args)
            except OSError as exc:
                if exc.errno in (errno.ENOSYS, errno.EPERM):
                    missing.append(name)
        if missing:
            raise OSError(errno.ENOSYS, f"missing, or forbidden: {', '.join(missing)}")
        return "pidfd, openat2 and close_range"

    return trial(act)


def limit(controller: str) -> Callable[[], str]:
    def act() -> str:
        found = hierarchy()
        if controller in found.folders:
            return f"made a control group (version {found.version})"
        why = found.missing.get(controller, "no such controller")
        rest = UNLIMITED[controller]
        raise Weak(f"{why}; {rest}", _delegation(found.version))

    return act


UNLIMITED = {
    "memory": "the guest watches a box's memory itself, which is slower to notice",
    "pids": "processes are counted per user, not per box",
    "cpu": "a box may use all processors",
}

_hierarchy: list[cgroup.Hierarchy] = []


def hierarchy() -> cgroup.Hierarchy:
    if not _hierarchy:
        _hierarchy.append(cgroup.find())
    return _hierarchy[0]


def _delegation(version: int) -> str:
    if RANGED or rights.is_container():
        return ""
    if version == 2:
        return "systemd-run --user --scope -p Delegate=yes hutch run -- COMMAND"
    return ROOT_IS_BETTER


def a_box() -> str:
    async def start() -> float:
        backend = NamespacesBackend()
        began = time.monotonic()
        try:
            async with asyncio.timeout(BOX_TIMEOUT):
                box = await backend.start(Spec())
                took = time.monotonic() - began
                await box.kill()
            return took
        finally:
            await backend.close()

    try:
        return f"started and gone; the first one took {asyncio.run(start()) * 1000:.0f} ms"
    except (HutchError, TimeoutError) as exc:
        if fix := _options():
            raise Absent("could not be started", fix) from None
        raise Absent(f"could not be started: {exc}") from None


@dataclass(frozen=True)
class KernelSetting:
    """A sysctl, and its lowest good value (with `at_most`, its highest).

    One that this kernel does not have is fine.
    """

    name: str
    good: int
    at_most: bool = False

    def is_wrong(self) -> bool:
        value = _setting(self.name)
        if not value.lstrip("-").isdigit():
            return False
        return int(value) > self.good if self.at_most else int(value) < self.good


# Boxes do not depend on these: they are the machine's own second line of defence.
SETTINGS = (
    KernelSetting("fs.protected_symlinks", 1),
    KernelSetting("fs.protected_hardlinks", 1),
    KernelSetting("fs.protected_fifos", 1),
    KernelSetting("fs.protected_regular", 1),
    KernelSetting("kernel.kptr_restrict", 1),
    KernelSetting("kernel.unprivileged_bpf_disabled", 1),
    KernelSetting("kernel.yama.ptrace_scope", 1),
    KernelSetting("vm.unprivileged_userfaultfd", 0, at_most=True),
    KernelSetting("dev.tty.legacy_tiocsti", 0, at_most=True),
)


def kernel_settings() -> str:
    wrong = [setting for setting in SETTINGS if setting.is_wrong()]
    if wrong:
        why = "laxer than they could be: " + ", ".join(s.name for s in wrong)
        raise Weak(why, "sudo sysctl -w " + " ".join(f"{s.name}={s.good}" for s in wrong))
    return "as strict as they should be"


def leftovers() -> str:
    groups = [
        f"{folder}/{name}"
        for folder in sorted(set(hierarchy().folders.values()))
        for name in os.listdir(folder)
        if _is_orphan(name)
    ]
    top = tempfile.gettempdir()
    folders = [f"{top}/{name}" for name in os.listdir(top) if _is_orphan(name)]
    folders = [path for path in folders if RANGED or os.lstat(path).st_uid == os.geteuid()]
    if not groups and not folders:
        return "none"
    fixes = []
    if groups:
        fixes.append("rmdir " + " ".join(sorted(groups)))
    if folders:
        fixes.append("rm -r " + " ".join(sorted(folders)))
    raise Weak("of processes that were killed before they could clean up", "\n".join(fixes))


def _is_orphan(name: str) -> bool:
    """Whether it is called hutch-PID-…, and that process has ended."""
    parts = name.split("-")
    return (
        parts[0] == "hutch"
        and len(parts) > 2
        and parts[1].isdigit()
        and not os.path.exists(f"/proc/{parts[1]}")
    )


CHECKS = (
    Check("kernel", kernel_and_machine),
    Check("system calls", system_calls),
    Check("user namespaces", user_namespaces),
    Check("mounts", mounts),
    Check("detached mounts", detached_mounts),
    Check("new root", new_root),
    Check("layers", layers, required=False),
    Check("processes", processes),
    Check("network", network),
    Check("names", names),
    Check("nested namespaces", nested_namespaces),
    Check("user ids", user_ids, required=False),
    Check("owners of files", owners, required=False),
    Check("call filter", call_filter),
    Check("no new privileges", no_new_privileges),
    Check("keyring", keyring),
    Check("landlock", landlock, required=False),
    Check("memory limit", limit("memory"), required=False),
    Check("process limit", limit("pids"), required=False),
    Check("cpu limit", limit("cpu"), required=False),
    Check("a box", a_box),
    Check("kernel settings", kernel_settings, required=False),
)
LEFTOVERS = Check("leftovers", leftovers, required=False)


# --- what helps ---------------------------------------------------------------------------

# How distributions turn namespaces off: the setting, the value that does it, and the fix.
SWITCHES = (
    ("kernel.unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
    ("user.max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        f"{ROOT_IS_BETTER}\n# or, for every program on this machine:\n"
        "sudo sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
    ),
)


def cure(error: OSError) -> str:
    """The command that would fix this error, as far as we can tell, or ""."""
    if error.errno == errno.ENOSYS:
        return _options() or "use Linux 5.12 or newer"
    if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSPC, errno.EUSERS):
        if fix := _options():
            return fix
        for name, value, fix in SWITCHES:
            if _setting(name) == value:
                return fix
        if not MINE.is_root:
            return ROOT_IS_BETTER
    return ""


@cache
def _options() -> str:
    """How to start the container that we are in, if its options are the cause; else ""."""
    if options := rights.missing_options():
        return f"{rights.container_program()} {' '.join(options)} IMAGE"
    return ""
