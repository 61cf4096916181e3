"""Carries out a plan: from a fork of the zygote to a box, in the order SECURITY.md gives.

Every function here runs in a process that is already alone in its namespaces and is on its
way to having no rights at all. A step that fails ends the box before user code exists.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hutch.backends import linux
from hutch.backends.linux import seccomp
from hutch.guest.agent import GuestConfig
from hutch.guest.main import serve
from hutch.guest.reaper import Calls
from hutch.types import Limits, Mount

from .plan import AGENT, HOST_NAME, OWN, BoxImage, BoxPlan, Imported, SetupStep, plan

ROOT = "/box"  # where the new root is built, in the zygote's
IMAGE = "/image"  # the image's mounts, in the zygote's root
DISK = "/disk"

CAP_KILL, CAP_SETGID, CAP_SETUID = 5, 6, 7
_QUIET = linux.NOSUID | linux.NODEV

# What the kernel counts for a user it counts for the makers of his user namespace too, up to a
# user of the host. Without a bound here, a box that opens 128 inotify instances or leaves 96,000
# signals pending takes the last ones: then the host's own inotify_init and timer_create fail.
_USER_LIMITS = {"user_namespaces": 0, "inotify_instances": 32, "inotify_watches": 32768}
_RLIMITS = {"CORE": 1, "MEMLOCK": 8 << 20, "MSGQUEUE": 0, "RTPRIO": 0, "NICE": 0,
            "SIGPENDING": 2048}  # fmt: skip


def become(
    body: dict[str, Any], image: BoxImage, fds: list[int], program: bytes, calls: Calls
) -> None:
    """The life of a new process, from the word that its ids are mapped on. Never returns."""
    linux.set_name(b"hutch-guest")
    sync, guest, status, door = (socket.socket(fileno=fd) for fd in fds[:4])
    for sock in (guest, door):
        sock.set_inheritable(False)
    try:
        mounts = tuple(Mount(**mount) for mount in body.pop("mounts"))
        limits = Limits(**body.pop("limits"))
        files = frozenset(body.pop("files"))
        root = body.pop("root", None)
        root = Imported(**root) if root else None
        wanted = plan(image, limits, mounts=mounts, files=files, root=root, **body)
        if sync.recv(1) != b"m":
            os._exit(1)
        sync.close()
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        lower = len(fds) - wanted.layers
        count = lower - len(wanted.attach)
        host, handed = (guest, door), (fds[count:lower], fds[lower:])
        _become_box(wanted, program, host, status, fds[4], fds[5:count], handed, calls)
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
    handed: tuple[list[int], list[int]],
    calls: Calls,
) -> None:
    """Pid 1's whole life: build the box, drop everything, serve. Never returns.

    `host` is the first connection to it, and the door through which others come; `handed`, the
    mounts of the caller's and the layers of the image.
    """
    step = "start"
    mounts, layers = handed
    listeners: list[int] = []
    try:
        for name, act in _steps(plan, mounts, filter, layers, listeners):
            step = name
            act()
        status.send(b"ok")
    except BaseException as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        status.send(f"{step}: {reason}".encode()[:1000])
        os._exit(1)
    status.close()
    limits = tuple((getattr(resource, f"RLIMIT_{name}"), value) for name, value in plan.rlimits)
    place = GuestConfig(
        **plan.place,
        cgroups=tuple(cgroups),
        limits=limits,
        swap=swap,
        denials=listeners[0],
        denied_calls=seccomp.reported(),
    )
    serve(host[0], place, calls, host[1])
    os._exit(0)


def forbid_imports() -> None:
    sys.meta_path[:] = [_NoImports()]
    sys.path.clear()


class _NoImports:
    """After the root has changed, an import would run the image's code with the guest's rights."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        raise ImportError(f"{name} was not imported before the box was closed")


def _steps(
    plan: BoxPlan, mounts: list[int], filter: bytes, layers: Sequence[int], listeners: list[int]
) -> list[tuple[str, Callable[[], None]]]:
    """What is done, in order: each step relies on the ones before it."""
    return [
        ("ids", lambda: _take_ids(plan.ranged)),
        ("keyring", linux.new_keyring),
        ("disk", lambda: _new_disk(plan)),
        ("root", lambda: _stack(layers) if layers else _new_root()),
        *((f"{s.do} {s.path}", lambda s=s: _ACTIONS[s.do](s, plan)) for s in plan.steps),
        *((f"mount {t}", lambda fd=fd, t=t: _attach(fd, ROOT, t))
          for fd, t in zip(mounts, plan.attach, strict=True)),
        ("pivot", lambda: linux.pivot(ROOT)),
        ("close the root", lambda: linux.set_mount(OWN if layers else "/", linux.ATTR_RDONLY)),
        ("host name", lambda: linux.set_hostname(HOST_NAME)),
        ("loopback", linux.raise_loopback),
        ("rights", lambda: _drop_rights(plan)),
        ("landlock", lambda: _fence(plan)),
        ("seccomp", lambda: listeners.append(seccomp.install_reporting(filter))),
        ("imports", forbid_imports),
    ]  # fmt: skip


def _take_ids(ranged: bool) -> None:
    if ranged:
        os.setgroups([])
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)


def _new_disk(plan: BoxPlan) -> None:
    """One file system for all that the box may write, so that one size bounds it."""
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    linux.mount("disk", DISK, "tmpfs", _QUIET, plan.disk)


def _new_root() -> None:
    linux.mount("box", ROOT, "tmpfs", _QUIET, "size=16m,nr_inodes=8192,mode=755")


def _stack(layers: Sequence[int]) -> None:
    """The image's layers, the lowest first, and a folder of the disk above them all."""
    lower = []
    for number, fd in enumerate(layers):
        place = f"{DISK}/{number}"
        os.mkdir(place)
        _attach(fd, DISK, f"/{number}")
        lower.append(place)
    upper, work = DISK + "/upper", DISK + "/work"
    os.mkdir(upper, 0o755)
    os.mkdir(work, 0o755)
    linux.mount_layers(ROOT, lower, upper, work)


def _own(step: SetupStep, plan: BoxPlan) -> None:
    """A folder for what is ours, instead of what the image has there."""
    with mount_point(ROOT, step.path) as target:
        linux.mount("hutch", target, "tmpfs", _QUIET, step.text)


def _show(step: SetupStep, plan: BoxPlan) -> None:
    with mount_point(ROOT, step.path) as target:
        linux.mount(IMAGE + step.path, target, None, linux.BIND | linux.REC)


def _link(step: SetupStep, plan: BoxPlan) -> None:
    link(ROOT, step.path, step.text, _owner(step, plan))


def _file(step: SetupStep, plan: BoxPlan) -> None:
    write(ROOT, step.path, step.text, step.mode, _owner(step, plan))


def _folder(step: SetupStep, plan: BoxPlan) -> None:
    with mount_point(ROOT, step.path) as made:
        if owner := _owner(step, plan):
            os.chown(made, *owner)


def _owner(step: SetupStep, plan: BoxPlan) -> tuple[int, int] | None:
    return (plan.user, plan.group) if step.mine and plan.ranged else None


def _spot(step: SetupStep, plan: BoxPlan) -> None:
    """Where a mount of the caller's will be. Below another mount, it must be there already."""
    if step.text:
        touch(ROOT, step.path)
    else:
        with folder(ROOT, step.path):
            pass


def _shm(step: SetupStep, plan: BoxPlan) -> None:
    linux.mount("shm", ROOT + step.path, "tmpfs", _QUIET | linux.NOEXEC, step.text)


def _terminals(step: SetupStep, plan: BoxPlan) -> None:
    flags = linux.NOSUID | linux.NOEXEC
    linux.mount("devpts", ROOT + step.path, "devpts", flags, step.text)


def _proc(step: SetupStep, plan: BoxPlan) -> None:
    with mount_point(ROOT, step.path) as target:
        linux.mount("proc", target, "proc", _QUIET | linux.NOEXEC)
    for name, value in _USER_LIMITS.items():
        with open(f"{ROOT}{step.path}/sys/user/max_{name}", "w") as file:
            file.write(str(value))


def _mask(step: SetupStep, plan: BoxPlan) -> None:
    if os.path.lexists(ROOT + step.path):
        linux.mount(IMAGE + "/dev/null", ROOT + step.path, None, linux.BIND)


def _cover(step: SetupStep, plan: BoxPlan) -> None:
    """A file of ours in the place of another."""
    path = ROOT + step.path
    if os.path.lexists(path):
        linux.mount(ROOT + step.text, path, None, linux.BIND)
        quiet = linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC
        linux.set_mount(path, linux.ATTR_RDONLY | quiet)


def _hide(step: SetupStep, plan: BoxPlan) -> None:
    if os.path.isdir(ROOT + step.path):
        flags = _QUIET | linux.NOEXEC | linux.RDONLY
        linux.mount("hidden", ROOT + step.path, "tmpfs", flags, "size=4k,nr_inodes=2,mode=555")


def _freeze(step: SetupStep, plan: BoxPlan) -> None:
    path = ROOT + step.path
    if os.path.isdir(path):
        linux.mount(path, path, None, linux.BIND | linux.REC)
        quiet = linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC
        linux.set_mount(path, linux.ATTR_RDONLY | quiet, recursive=True)


def _room(step: SetupStep, plan: BoxPlan) -> None:
    inside = DISK + "/room" + step.path.replace("/", "-")
    os.mkdir(inside)
    if owner := _owner(step, plan):
        os.chown(inside, *owner)
    os.chmod(inside, step.mode)
    with mount_point(ROOT, step.path) as target:
        linux.mount(inside, target, None, linux.BIND)


def _attach(fd: int, root: str, target: str) -> None:
    linux.attach_mount(fd, root, target)
    os.close(fd)


_ACTIONS: dict[str, Callable[[SetupStep, BoxPlan], None]] = {
    "own": _own, "show": _show, "link": _link, "file": _file, "folder": _folder, "spot": _spot,
    "shm": _shm, "terminals": _terminals, "proc": _proc, "mask": _mask,
    "hide": _hide, "cover": _cover, "freeze": _freeze, "room": _room,
}  # fmt: skip


def _drop_rights(plan: BoxPlan) -> None:
    for name, value in _RLIMITS.items():
        number = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    linux.forbid_capabilities()
    if plan.ranged:
        # The agent acts on processes under a uid of its own, and on files as the box's user.
        linux.prctl(linux.PR_SET_KEEPCAPS, 1)
        os.setresgid(AGENT, AGENT, AGENT)
        os.setresuid(AGENT, AGENT, AGENT)
        linux.set_capabilities((CAP_KILL, CAP_SETGID, CAP_SETUID))
        linux.set_filesystem_user(plan.user, plan.group)
    else:
        linux.set_capabilities(())
    # In /proc, what belongs to a process that is not dumpable belongs to the machine's root. A user
    # who is that root could read it, so there the agent stays dumpable.
    linux.prctl(linux.PR_SET_DUMPABLE, int(plan.user_is_root))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def _fence(plan: BoxPlan) -> None:
    linux.landlock(["/"], ["/dev", "/proc"], list(plan.writable))


# Places in the root of a new box, found without following a link.
#
# The root may be an image of somebody's own making, where any name can be a link that leads out of
# it, for it is not the root yet: whoever follows one with rights mounts or writes on the host. So
# nothing here does. What is in the way of a place is replaced, in the box's own layer.


_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder(root: str, path: str) -> Iterator[int]:
    """A descriptor of this folder below `root`. It is made if it is not there."""
    fd = os.open(root, _LOOK | os.O_DIRECTORY)
    try:
        for name in path.split("/"):
            if name:
                outer, fd = fd, _step(fd, name)
                os.close(outer)
        yield fd
    finally:
        os.close(fd)


@contextmanager
def mount_point(root: str, path: str) -> Iterator[str]:
    """The same, as a name that mount(2) takes and that leads nowhere else."""
    with folder(root, path) as fd:
        yield f"/proc/self/fd/{fd}"


def write(root: str, path: str, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """A file with this content, instead of whatever is there."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        _clear(fd, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(name, flags, mode, dir_fd=fd), "w") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
            if owner:
                os.fchown(file.fileno(), *owner)


def link(root: str, path: str, target: str, owner: tuple[int, int] | None) -> None:
    """A link, unless something is there."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        try:
            os.symlink(target, name, dir_fd=fd)
        except FileExistsError:
            return
        if owner:
            os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)


def touch(root: str, path: str) -> None:
    """A file, whatever is in it."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        try:
            if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                return
        except FileNotFoundError:
            pass
        _clear(fd, name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(name, flags, 0o644, dir_fd=fd))


def _step(outer: int, name: str) -> int:
    try:
        return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=outer)
    except FileNotFoundError:
        pass
    except NotADirectoryError:  # a link, too, is none
        os.unlink(name, dir_fd=outer)
    os.mkdir(name, 0o755, dir_fd=outer)
    return os.open(name, _LOOK | os.O_DIRECTORY, dir_fd=outer)


def _clear(outer: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=outer)
    except FileNotFoundError:
        pass
    except IsADirectoryError:
        _clear_folder(outer, name)


def _clear_folder(outer: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=outer)
    except OSError as exc:
        raise OSError(exc.errno, f"{name} is a folder in this image, and must be a file") from None
