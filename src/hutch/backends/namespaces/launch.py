"""Carries out a plan: from a fork of the zygote to a box, in the order SECURITY.md gives.

Every function here runs in a process that is already alone in its namespaces and is on its
way to having no rights at all. A step that fails ends the box before user code exists.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from hutch.guest.agent import Place
from hutch.guest.keeper import Calls
from hutch.guest.main import serve
from hutch.types import Limits, Mount

from . import kernel, seccomp
from .plan import AGENT, HOST_NAME, BoxPlan, Image, Step, plan

ROOT = "/box"  # where the new root is built, in the zygote's
IMAGE = "/image"  # the image's mounts, in the zygote's root
DISK = "/disk"

CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
_QUIET = kernel.NOSUID | kernel.NODEV

# What the kernel counts for a user it counts for the makers of his user namespace too, up to a
# user of the host. Without a bound here, a box that opens 128 inotify instances or leaves 96,000
# signals pending takes the last ones: then the host's own inotify_init and timer_create fail.
_USER_LIMITS = {"user_namespaces": 0, "inotify_instances": 32, "inotify_watches": 32768}
_RLIMITS = {"CORE": 1, "MEMLOCK": 8 << 20, "MSGQUEUE": 0, "RTPRIO": 0, "NICE": 0,
            "SIGPENDING": 2048}  # fmt: skip


def become(
    body: dict[str, Any], image: Image, fds: list[int], program: bytes, calls: Calls
) -> None:
    """The life of a new process, from the word that its ids are mapped on. Never returns."""
    kernel.set_name(b"hutch-guest")
    sync, guest, status, door = (socket.socket(fileno=fd) for fd in fds[:4])
    for sock in (guest, door):
        sock.set_inheritable(False)
    try:
        mounts = tuple(Mount(**mount) for mount in body.pop("mounts"))
        limits = Limits(**body.pop("limits"))
        files = frozenset(body.pop("files"))
        wanted = plan(image, limits, mounts=mounts, files=files, **body)
        if sync.recv(1) != b"m":
            os._exit(1)
        sync.close()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        count = len(fds) - len(wanted.attach)
        host = (guest, door)
        _become_box(wanted, program, host, status, fds[4], fds[5:count], fds[count:], calls)
    except BaseException as exc:
        status.send(f"fork: {exc}".encode())
    os._exit(1)


def _become_box(
    plan: BoxPlan,
    filter: bytes,
    host: tuple[socket.socket, socket.socket],
    status: socket.socket,
    swap: int,
    cgroups: list[int],
    mounts: list[int],
    calls: Calls,
) -> None:
    """Pid 1's whole life: build the box, drop everything, serve. Never returns.

    `host` is the first connection to it, and the door through which others come.
    """
    step = "start"
    try:
        for name, act in _steps(plan, mounts, filter):
            step = name
            act()
        status.send(b"ok")
    except BaseException as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        status.send(f"{step}: {reason}".encode()[:1000])
        os._exit(1)
    status.close()
    limits = tuple((getattr(resource, f"RLIMIT_{name}"), value) for name, value in plan.rlimits)
    place = Place(**plan.place, cgroups=tuple(cgroups), limits=limits, swap=swap)
    serve(host[0], place, calls, host[1])
    os._exit(0)


def _forbid_imports() -> None:
    sys.meta_path[:] = [_NoImports()]
    sys.path.clear()


class _NoImports:
    """After the root has changed, an import would run the image's code with the guest's rights."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        raise ImportError(f"{name} was not imported before the box was closed")


def _steps(plan: BoxPlan, mounts: list[int], filter: bytes) -> list[tuple[str, Callable[[], None]]]:
    """What is done, in order: each step relies on the ones before it."""
    return [
        ("ids", lambda: _take_ids(plan.ranged)),
        ("keyring", kernel.new_keyring),
        ("root", _new_root),
        *((f"{s.do} {s.path}", lambda s=s: _ACTIONS[s.do](s, plan)) for s in plan.steps),
        *((f"mount {t}", lambda fd=fd, t=t: _attach(fd, t))
          for fd, t in zip(mounts, plan.attach, strict=True)),
        ("pivot", lambda: kernel.pivot(ROOT)),
        ("close the root", lambda: kernel.set_mount("/", kernel.ATTR_RDONLY)),
        ("host name", lambda: kernel.set_hostname(HOST_NAME)),
        ("loopback", kernel.raise_loopback),
        ("rights", lambda: _drop_rights(plan)),
        ("landlock", lambda: _fence(plan)),
        ("seccomp", lambda: seccomp.install(filter)),
        ("imports", _forbid_imports),
    ]  # fmt: skip


def _take_ids(ranged: bool) -> None:
    if ranged:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def _new_root() -> None:
    kernel.mount("", "/", None, kernel.REC | kernel.PRIVATE)
    kernel.mount("box", ROOT, "tmpfs", _QUIET, "size=16m,nr_inodes=8192,mode=755")


def _show(step: Step, plan: BoxPlan) -> None:
    os.makedirs(ROOT + step.path)
    kernel.mount(IMAGE + step.path, ROOT + step.path, None, kernel.BIND | kernel.REC)


def _link(step: Step, plan: BoxPlan) -> None:
    path = ROOT + step.path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.lexists(path):
        os.symlink(step.text, path)
        _give(path, step, plan)


def _file(step: Step, plan: BoxPlan) -> None:
    path = ROOT + step.path
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "x") as file:
        file.write(step.text)
    os.chmod(path, step.mode)
    _give(path, step, plan)


def _folder(step: Step, plan: BoxPlan) -> None:
    os.makedirs(ROOT + step.path, exist_ok=True)
    _give(ROOT + step.path, step, plan)


def _give(path: str, step: Step, plan: BoxPlan) -> None:
    if step.mine and plan.ranged:
        os.chown(path, plan.user, plan.user, follow_symlinks=False)


def _spot(step: Step, plan: BoxPlan) -> None:
    """Where a mount of the caller's will be. Below another mount, it must be there already."""
    path = ROOT + step.path
    if step.text:
        _touch(path)
    else:
        os.makedirs(path, exist_ok=True)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))


def _shm(step: Step, plan: BoxPlan) -> None:
    kernel.mount("shm", ROOT + step.path, "tmpfs", _QUIET | kernel.NOEXEC, step.text)


def _terminals(step: Step, plan: BoxPlan) -> None:
    flags = kernel.NOSUID | kernel.NOEXEC
    kernel.mount("devpts", ROOT + step.path, "devpts", flags, step.text)


def _proc(step: Step, plan: BoxPlan) -> None:
    os.makedirs(ROOT + step.path, exist_ok=True)
    kernel.mount("proc", ROOT + step.path, "proc", _QUIET | kernel.NOEXEC)
    for name, value in _USER_LIMITS.items():
        with open(f"{ROOT}{step.path}/sys/user/max_{name}", "w") as file:
            file.write(str(value))


def _mask(step: Step, plan: BoxPlan) -> None:
    if os.path.lexists(ROOT + step.path):
        kernel.mount(IMAGE + "/dev/null", ROOT + step.path, None, kernel.BIND)


def _hide(step: Step, plan: BoxPlan) -> None:
    if os.path.isdir(ROOT + step.path):
        flags = _QUIET | kernel.NOEXEC | kernel.RDONLY
        kernel.mount("hidden", ROOT + step.path, "tmpfs", flags, "size=4k,nr_inodes=2,mode=555")


def _freeze(step: Step, plan: BoxPlan) -> None:
    path = ROOT + step.path
    if os.path.isdir(path):
        kernel.mount(path, path, None, kernel.BIND | kernel.REC)
        quiet = kernel.ATTR_NOSUID | kernel.ATTR_NODEV | kernel.ATTR_NOEXEC
        kernel.set_mount(path, kernel.ATTR_RDONLY | quiet, recursive=True)


def _disk(step: Step, plan: BoxPlan) -> None:
    """One file system for all that the box may write, so that one size bounds it."""
    kernel.mount("disk", DISK, "tmpfs", _QUIET, step.text)


def _room(step: Step, plan: BoxPlan) -> None:
    inside, target = DISK + "/" + step.path.strip("/").replace("/", "-"), ROOT + step.path
    os.mkdir(inside)
    _give(inside, step, plan)
    os.chmod(inside, step.mode)
    os.makedirs(target, exist_ok=True)
    kernel.mount(inside, target, None, kernel.BIND)


def _attach(fd: int, target: str) -> None:
    kernel.attach_mount(fd, ROOT, target)
    os.close(fd)


_ACTIONS: dict[str, Callable[[Step, BoxPlan], None]] = {
    "show": _show, "link": _link, "file": _file, "folder": _folder, "spot": _spot,
    "shm": _shm, "terminals": _terminals, "proc": _proc, "mask": _mask,
    "hide": _hide, "freeze": _freeze, "disk": _disk, "room": _room,
}  # fmt: skip


def _drop_rights(plan: BoxPlan) -> None:
    for name, value in _RLIMITS.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.forbid_capabilities()
    if plan.ranged:
        # The agent acts on processes under a uid of its own, and on files as the box's user.
        kernel.prctl(kernel.PR_SET_KEEPCAPS, 1)
        os.setresgid(AGENT, AGENT, AGENT)
        os.setresuid(AGENT, AGENT, AGENT)
        kernel.set_capabilities((CAP_KILL, CAP_SETGID, CAP_SETUID))
        kernel.set_filesystem_user(plan.user, plan.user)
    else:
        kernel.set_capabilities(())
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)


def _fence(plan: BoxPlan) -> None:
    kernel.landlock(["/"], ["/dev", "/proc"], list(plan.writable))
