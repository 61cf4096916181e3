"""Carries out a plan: from a fork of the zygote to a box, in the order SECURITY.md gives.

Every function here runs in a process that is already alone in its namespaces and is giving up
its rights. A step that fails ends the box before user code exists.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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

# The kernel charges what a user holds to the creators of its user namespace too, up to a user of
# the host. Without a bound here, a box with 128 inotify instances or 96,000 pending signals uses
# up the host's own: then inotify_init and timer_create fail outside the box.
_USER_LIMITS = {"user_namespaces": 0, "inotify_instances": 32, "inotify_watches": 32768}
_RLIMITS = {
    "CORE": 1,
    "MEMLOCK": 8 << 20,
    "MSGQUEUE": 0,
    "RTPRIO": 0,
    "NICE": 0,
    "SIGPENDING": 2048,
}


def become(
    body: dict[str, Any], image: BoxImage, fds: list[int], program: bytes, calls: Calls
) -> None:
    """The whole life of a new process, once its ids are mapped. Never returns."""
    linux.set_name(b"hutch-guest")
    # Four sockets, the swap file, the cgroups, the caller's mounts, the layers of the image.
    sync, guest, status, listener = (socket.socket(fileno=fd) for fd in fds[:4])
    for sock in (guest, listener):
        sock.set_inheritable(False)
    try:
        mounts = tuple(Mount(**mount) for mount in body.pop("mounts"))
        limits = Limits(**body.pop("limits"))
        files = frozenset(body.pop("files"))
        root = body.pop("root", None)
        root = Imported(**root) if root else None
        box_plan = plan(image, limits, mounts=mounts, files=files, root=root, **body)
        if sync.recv(1) != b"m":
            os._exit(1)
        sync.close()
        # Not before: the id maps of a process can be written only while it is dumpable.
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        lower = len(fds) - box_plan.layers
        count = lower - len(box_plan.attach)
        host, passed_fds = (guest, listener), (fds[count:lower], fds[lower:])
        _become_box(box_plan, program, host, status, fds[4], fds[5:count], passed_fds, calls)
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
    passed_fds: tuple[list[int], list[int]],
    calls: Calls,
) -> None:
    """Pid 1's whole life: build the box, drop everything, serve. Never returns.

    `host`: the first connection, and the listener through which later ones come. `passed_fds`: the
    caller's mounts, and the layers of the image.
    """
    step = "start"
    mounts, layers = passed_fds
    denial_fds: list[int] = []
    try:
        for name, act in _steps(plan, mounts, filter, layers, denial_fds):
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
        denials=denial_fds[0],
        denied_calls=seccomp.reported(),
    )
    serve(host[0], place, calls, host[1])
    os._exit(0)


def confine_parser(limits: Mapping[str, int], keep: tuple[int, ...], writable: list[str]) -> None:
    """Take everything from a process that parses hostile data, and needs no program or socket.

    `keep`: the capabilities that it has from now on, in its own user namespace.
    """
    alone = {"CORE": 0, "NPROC": 1, "NOFILE": 64, "MEMLOCK": 0}
    linux.set_limits({**limits, **alone})
    linux.forbid_capabilities()
    linux.set_capabilities(keep)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    linux.landlock([], [], writable)
    seccomp.install(seccomp.build())
    forbid_imports()


def forbid_imports() -> None:
    sys.meta_path[:] = [_NoImports()]
    sys.path.clear()


class _NoImports:
    """After the root has changed, an import would run the image's code with the guest's rights."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        raise ImportError(f"{name} was not imported before the box was closed")


def _steps(
    plan: BoxPlan, mounts: list[int], filter: bytes, layers: Sequence[int], denial_fds: list[int]
) -> list[tuple[str, Callable[[], None]]]:
    """The steps in order: each relies on the ones before it."""
    return [
        ("ids", linux.take_root_ids if plan.ranged else lambda: None),
        ("keyring", linux.new_keyring),
        ("disk", lambda: _new_disk(plan)),
        ("root", lambda: _stack(layers) if layers else _new_root()),
        *((f"{s.do} {s.path}", lambda s=s: _ACTIONS[s.do](s, plan)) for s in plan.steps),
        *(
            (f"mount {t}", lambda fd=fd, t=t: _attach(fd, ROOT, t))
            for fd, t in zip(mounts, plan.attach, strict=True)
        ),
        ("pivot", lambda: linux.pivot(ROOT)),
        ("close the root", lambda: linux.set_mount(OWN if layers else "/", linux.ATTR_RDONLY)),
        ("host name", lambda: linux.set_hostname(HOST_NAME)),
        ("loopback", linux.raise_loopback),
        ("rights", lambda: _drop_rights(plan)),
        ("landlock", lambda: _fence(plan)),
        ("seccomp", lambda: denial_fds.append(seccomp.install_reporting(filter))),
        ("imports", forbid_imports),
    ]


def _new_disk(plan: BoxPlan) -> None:
    """One file system for all that the box may write, so that one size bounds it."""
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    linux.mount("disk", DISK, "tmpfs", _QUIET, plan.disk)


def _new_root() -> None:
    linux.mount("box", ROOT, "tmpfs", _QUIET, "size=16m,nr_inodes=8192,mode=755")


def _stack(layers: Sequence[int]) -> None:
    """Mount the image's layers, lowest first, with a folder of the disk as the upper one."""
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
    """Mount an empty folder for our own files over whatever the image has there."""
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
    with mount_point(ROOT, step.path) as target:
        if owner := _owner(step, plan):
            os.chown(target, *owner)


def _owner(step: SetupStep, plan: BoxPlan) -> tuple[int, int] | None:
    return (plan.user, plan.group) if step.mine and plan.ranged else None


def _spot(step: SetupStep, plan: BoxPlan) -> None:
    """Make the mount point of one of the caller's mounts."""
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
    """Mount a file of ours over another."""
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
    "own": _own,
    "show": _show,
    "link": _link,
    "file": _file,
    "folder": _folder,
    "spot": _spot,
    "shm": _shm,
    "terminals": _terminals,
    "proc": _proc,
    "mask": _mask,
    "hide": _hide,
    "cover": _cover,
    "freeze": _freeze,
    "room": _room,
}


def _drop_rights(plan: BoxPlan) -> None:
    linux.set_limits(_RLIMITS)
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
    # The /proc files of a process that is not dumpable belong to the machine's root. A box whose
    # user is that root could read them, so there the agent stays dumpable.
    linux.prctl(linux.PR_SET_DUMPABLE, int(plan.user_is_root))
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)


def _fence(plan: BoxPlan) -> None:
    linux.landlock(["/"], ["/dev", "/proc"], list(plan.writable))


# Paths in the root of a new box, resolved without following links.
#
# The image is untrusted, and its root is not our root yet: any name in it can be a link that leads
# to the host, and following one with our rights would mount or write there. So nothing here
# follows links. Whatever is in the way of a path is replaced, in the box's own layer.


_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def folder(root: str, path: str) -> Iterator[int]:
    """A descriptor of this folder below `root`. It is created if it does not exist."""
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
    """The same folder, as a path for mount(2) that cannot be redirected."""
    with folder(root, path) as fd:
        yield f"/proc/self/fd/{fd}"


def write(root: str, path: str, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a file, replacing whatever is there."""
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
    """Make a link, unless something is there."""
    outer, name = os.path.split(path)
    with folder(root, outer) as fd:
        try:
            os.symlink(target, name, dir_fd=fd)
        except FileExistsError:
            return
        if owner:
            os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)


def touch(root: str, path: str) -> None:
    """Make sure that there is a file; its content does not matter."""
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
    except NotADirectoryError:  # with O_NOFOLLOW, also raised for a link
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
