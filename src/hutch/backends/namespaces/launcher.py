"""The launcher: the one process of ours with rights on the host, and the last to leave.

    host process ──control──> launcher ──> zygote ──> box, box, box
                  (requests)  (privileged)  (confined)

It is exec'ed fresh with an empty environment, imports the standard library and Hutch only,
and never reads a byte that a box wrote. It makes what needs rights (uid ranges, cgroups,
copies of mounts) and cleans it up. When the host process goes away, in whatever manner, the
launcher kills the zygotes, and so every box, removes what is left, and ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hutch.errors import BackendUnavailable, HutchError, InvalidRequest
from hutch.types import Limits, Mount, Packages

from . import cgroup, kernel
from .image import host_image, image_with
from .plan import MAX_BOXES, PICKLER, UID_BASE, check_mounts, uid_of, uid_range
from .zygotes import Zygote, kill

# What holds where a control group is missing.
WEAKER = {
    "memory": "memory is watched, not enforced",
    "pids": "processes are counted by rlimit",
    "cpu": "cpu is not bounded",
}

# Beyond so many, those whose last box has gone are ended, oldest first: each holds 100 MB.
MAX_ZYGOTES = 8

LOOP_FILE = os.path.join(os.path.dirname(__file__), "..", "..", "guest", "loop.sh")


@dataclass
class Running:
    """A box that was started, or is being."""

    id: str
    pidfd: int
    group: cgroup.Group | None
    slot: int | None
    packages: Packages | None  # whose zygote it came from
    request: int | None  # not answered yet
    status: socket.socket | None
    host_end: socket.socket | None
    waiting_kills: list[int] = field(default_factory=list)


class Slots:
    """Uid ranges, one per box on this machine: a byte lock each, which cannot outlive us."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._fd = os.open(f"{folder}/uids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mine: set[int] = set()

    def take(self) -> int:
        for _ in range(1000):
            slot = int.from_bytes(os.urandom(4), "little") % MAX_BOXES
            if slot in self._mine:
                continue
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except OSError:
                continue
            self._mine.add(slot)
            return slot
        raise Refusal("no_capacity", "no range of user ids is free for another box")

    def give_back(self, slot: int) -> None:
        self._mine.discard(slot)
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)


class Refusal(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Launcher:
    def __init__(self, control: socket.socket, host: int) -> None:
        self._control = control
        self._host = os.pidfd_open(host)
        if os.getppid() != host:  # it died already, and its number may be somebody else's
            raise OSError(3, "the process that wanted boxes is gone")
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[str, Running] = {}
        self._zygotes: dict[Packages | None, Zygote] = {}
        self._folder: str | None = None
        self.ranged = os.geteuid() == 0
        self._hierarchy = cgroup.find()
        cgroup.sweep(self._hierarchy)
        self._slots = Slots("/run/hutch") if self.ranged else None
        if not self.ranged:
            enter_user_namespace()
        self._image = host_image()
        with open(LOOP_FILE) as file:
            self._loop = file.read()

    def run(self) -> None:
        self._zygote_for(None, warm=False)
        self._selector.register(self._control, selectors.EVENT_READ, self._hear)
        self._selector.register(self._host, selectors.EVENT_READ, self._host_died)
        try:
            while True:
                for key, _ in self._selector.select():
                    key.data()
        except _Over:
            pass
        finally:
            self._clean_up()

    # --- requests -------------------------------------------------------------------

    def _hear(self) -> None:
        try:
            message = self._control.recv(256 * 1024)
        except OSError:
            message = b""
        if not message:
            raise _Over
        body = json.loads(message)
        act = getattr(self, "_do_" + body.pop("do"))
        self._try(body.pop("request"), lambda number: act(number, **body))

    def _try(self, number: int, act: Callable[[int], None]) -> None:
        try:
            act(number)
        except Refusal as exc:
            self._answer(number, code=exc.code, message=str(exc))
        except HutchError as exc:
            self._answer(number, code=exc.code, message=str(exc))
        except OSError as exc:
            self._answer(number, code="start_failed", message=str(exc))

    def _answer(self, number: int, fds: Sequence[int] = (), **body: Any) -> None:
        data = json.dumps({"request": number, **body}).encode()
        try:
            socket.send_fds(self._control, [data], list(fds))
        except OSError:
            raise _Over from None

    def _do_folder(self, number: int, path: str) -> None:
        """A folder of the host process that is removed with it."""
        self._folder = path
        sweep_folders(os.path.dirname(path))
        self._answer(number)

    def _do_start(self, number: int, id: str, spec: dict[str, Any]) -> None:
        given = spec.pop("packages")
        packages = Packages(**{**given, "preload": tuple(given["preload"])}) if given else None
        zygote = self._zygote_for(packages, warm=spec["warm"])
        if zygote.is_ready:
            self._start(packages, number, id, spec)
        else:
            zygote.waiting.append((number, lambda n: self._start(packages, n, id, spec)))

    def _start(self, packages: Packages | None, number: int, id: str, spec: dict[str, Any]) -> None:
        zygote = self._zygotes[packages]
        limits = Limits(**spec["limits"])
        # Outer folders first: one that came later would hide what is mounted inside it.
        spec["mounts"].sort(key=lambda mount: mount["target"])
        mounts = tuple(Mount(**m) for m in spec["mounts"])
        check_mounts(mounts)
        uid = uid_of(spec["user"], ranged=self.ranged)
        pickler = spec.pop("pickler")
        slot = self._slots.take() if self._slots else None
        group, sockets, fds = None, [], [open_swap()]
        try:
            if self._hierarchy.folders:
                group = cgroup.Group(self._hierarchy, f"hutch-{os.getpid()}-{id}", limits)
            files = [m.target for m in mounts if not os.path.isdir(m.source)]
            sockets = [*socket.socketpair(), *socket.socketpair()]
            host_end, guest_end, status, their_status = sockets
            fds += group.open() if group else []
            for mount in mounts:
                fds.append(self._copy(mount, slot, uid))
            if pickler:
                fds.append(kernel.copy_mount(pickler))
                kernel.set_mount(fds[-1], kernel.ATTR_RDONLY | kernel.ATTR_NOSUID)
                spec["mounts"].append({"source": "", "target": PICKLER, "read_only": True})
            # Where on the host they come from is nobody's business there: what a nursery has read
            # once is in the memory of every box after it.
            spec["mounts"] = [{**mount, "source": ""} for mount in spec["mounts"]]
            request = {
                **spec, "files": files, "slot": slot, "machine_id": os.urandom(16).hex(),
                "cgroup": {"memory", "pids"} <= self._hierarchy.folders.keys(),
                "loop_script": self._loop,
            }  # fmt: skip
            pidfd = zygote.fork(request, [guest_end.fileno(), their_status.fileno(), *fds])
        except BaseException:
            if not zygote.is_ready:
                self._lose_zygote(packages)
            for sock in sockets:
                sock.close()
            if group:
                group.remove()
            if slot is not None and self._slots:
                self._slots.give_back(slot)
            raise
        finally:
            for fd in fds:
                os.close(fd)
        guest_end.close()
        their_status.close()
        box = Running(id, pidfd, group, slot, packages, number, status, host_end)
        self._boxes[id] = box
        self._selector.register(status, selectors.EVENT_READ, lambda: self._status(box))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._died(box))

    def _do_kill(self, number: int, id: str) -> None:
        box = self._boxes.get(id)
        if box is None:
            self._answer(number)
            return
        box.waiting_kills.append(number)
        kill(box.pidfd)

    def _do_stats(self, number: int, id: str) -> None:
        box = self._boxes.get(id)
        if box is None:
            raise Refusal("box_lost", f"box {id} is gone")
        empty = {"memory": None, "pids": None, "cpu_seconds": None, "oom_kills": None}
        self._answer(number, stats=box.group.read() if box.group else empty)

    def _do_list(self, number: int) -> None:
        self._answer(number, boxes=[b.id for b in self._boxes.values() if b.request is None])

    # --- boxes ----------------------------------------------------------------------

    def _status(self, box: Running) -> None:
        assert box.status and box.host_end and box.request is not None
        try:
            said = box.status.recv(4096)
        except OSError:
            said = b""
        self._selector.unregister(box.status)
        box.status.close()
        box.status = None
        number, box.request = box.request, None
        if said == b"ok":
            degraded = [f"{WEAKER[n]} ({why})" for n, why in self._hierarchy.missing.items()]
            if not kernel.landlock_version():
                degraded.append("no second fence around files (this kernel has no Landlock 2)")
            kills = box.group.open_kills() if box.group else None
            fds = [box.host_end.fileno(), *([kills] if kills is not None else [])]
            self._answer(number, fds, ranged=self.ranged, degraded=degraded)
            if kills is not None:
                os.close(kills)
        else:
            kill(box.pidfd)
            message = said.decode(errors="replace") or "it died while it was being made"
            self._answer(number, code="start_failed", message=message)
        box.host_end.close()
        box.host_end = None

    def _died(self, box: Running) -> None:
        if box.status:
            self._status(box)
        self._selector.unregister(box.pidfd)
        os.close(box.pidfd)
        if box.group:
            box.group.remove()
        if box.slot is not None and self._slots:
            self._slots.give_back(box.slot)
        del self._boxes[box.id]
        for number in box.waiting_kills:
            self._answer(number)

    def _copy(self, mount: Mount, slot: int | None, user: int) -> int:
        """A detached copy of a host folder, in which its owner is the box's user."""
        try:
            info = os.stat(mount.source)
        except OSError as exc:
            message = f"cannot mount {mount.source}: {exc.strerror}"
            raise InvalidRequest(message) from None
        if not (stat.S_ISDIR(info.st_mode) or stat.S_ISREG(info.st_mode)):
            raise InvalidRequest(f"cannot mount {mount.source}: not a folder and not a file")
        source = os.path.realpath(mount.source)
        if source == "/" or source.split("/")[1] in ("proc", "sys", "dev"):
            message = f"cannot mount {source}: it would hand this whole machine to the box"
            raise InvalidRequest(message)
        fd = kernel.copy_mount(source)
        try:
            attributes = kernel.ATTR_NOSUID | kernel.ATTR_NODEV
            attributes |= kernel.ATTR_RDONLY if mount.read_only else 0
            kernel.set_mount(fd, attributes, recursive=True)
            if slot is not None:
                base = UID_BASE + uid_range(slot)
                mapped = id_map(info.st_uid, info.st_gid, base + user)
                try:
                    kernel.set_mount(fd, kernel.ATTR_IDMAP, recursive=True, user_namespace=mapped)
                finally:
                    os.close(mapped)
        except OSError as exc:
            os.close(fd)
            raise InvalidRequest(
                f"cannot mount {mount.source} so that its files keep their owner ({exc.strerror}): "
                "its file system does not support id-mapped mounts. Copy the folder to one that "
                "does (ext4, xfs, btrfs, tmpfs), or run Hutch as the folder's owner"
            ) from None
        return fd

    # --- zygotes ----------------------------------------------------------------------

    def _zygote_for(self, packages: Packages | None, *, warm: bool) -> Zygote:
        """The zygote of an image. It may not be ready yet, unless it is that of the host's own."""
        if packages not in self._zygotes:
            self._make_room()
            image = image_with(packages, self._image) if packages else self._image
            made = Zygote(image, ranged=self.ranged, warm=warm)
            self._selector.register(
                made.pidfd, selectors.EVENT_READ, lambda: self._lose_zygote(packages)
            )
            self._zygotes[packages] = made
            if packages:
                self._selector.register(
                    made.sock, selectors.EVENT_READ, lambda: self._zygote_ready(packages)
                )
            else:
                self._zygote_ready(packages)
        return self._zygotes[packages]

    def _make_room(self) -> None:
        """End the zygotes that have no boxes and were made first, if there are too many."""
        used = {box.packages for box in self._boxes.values()}
        idle = [p for p, z in self._zygotes.items() if p and z.is_ready and p not in used]
        for packages in idle[: max(0, len(self._zygotes) - MAX_ZYGOTES)]:
            self._lose_zygote(packages)

    def _zygote_ready(self, packages: Packages | None) -> None:
        zygote = self._zygotes[packages]
        waiting, zygote.waiting = zygote.waiting, []
        if packages:
            self._selector.unregister(zygote.sock)
        try:
            zygote.become_ready()
        except (BackendUnavailable, InvalidRequest) as exc:
            self._lose_zygote(packages)
            if not waiting:
                raise
            for number, _ in waiting:
                self._answer(number, code=exc.code, message=str(exc))
            return
        for number, start in waiting:
            self._try(number, start)

    def _lose_zygote(self, packages: Packages | None) -> None:
        zygote = self._zygotes.pop(packages, None)
        if zygote:
            self._selector.unregister(zygote.pidfd)
            if zygote.sock in self._selector.get_map():
                self._selector.unregister(zygote.sock)
            zygote.kill()
            for number, _ in zygote.waiting:
                self._answer(number, code="start_failed", message="the zygote died: try again")

    def _host_died(self) -> None:
        raise _Over

    def _clean_up(self) -> None:
        for zygote in self._zygotes.values():
            zygote.kill()
        for box in self._boxes.values():
            kill(box.pidfd)
            if box.group:
                box.group.remove()
        if self._folder:
            remove_folder(self._folder)


class _Over(Exception):
    """The host is gone."""


def open_swap() -> int:
    """A file without a name, on a disk if there is one: where a kernel's arrays go to sleep."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for folder in ("/var/tmp", "/tmp"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError:
            continue  # not there, not ours, or a file system that cannot
    return os.memfd_create("swap", os.MFD_CLOEXEC)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def remove_folder(path: str) -> None:
    """A folder of ours holds files and nothing else. One that does not is left alone."""
    try:
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass


def sweep_folders(parent: str) -> None:
    """Remove folders whose host process, and its launcher, were killed before they could."""
    with os.scandir(parent) as entries:
        for entry in entries:
            name, _, rest = entry.name.partition("-")
            owner = rest.partition("-")[0]
            if name != "hutch" or not owner.isdigit() or os.path.exists(f"/proc/{owner}"):
                continue
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                remove_folder(entry.path)


def enter_user_namespace() -> None:
    """Run by an ordinary user: rights over mounts of our own, in a namespace of our own."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(kernel.NEWUSER | kernel.NEWNS)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")
    kernel.mount("", "/", None, kernel.REC | kernel.PRIVATE)


def id_map(uid: int, gid: int, box_uid: int) -> int:
    """A user namespace in which the owner (uid, gid) is `box_uid` outside, as a descriptor."""
    ready, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        try:
            ready.close()
            kernel.unshare(kernel.NEWUSER)
            theirs.send(b"u")
            theirs.recv(1)  # until we have what we wanted of it
        finally:
            os._exit(0)
    try:
        theirs.close()
        if ready.recv(1) != b"u":
            raise OSError(1, "no user namespace for the mapping of owners")
        _write(f"/proc/{pid}/uid_map", f"{uid} {box_uid} 1")
        _write(f"/proc/{pid}/gid_map", f"{gid} {box_uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        ready.close()
        os.waitpid(pid, 0)


def main(fd: int, host: int) -> None:
    control = socket.socket(fileno=fd)
    kernel.set_name(b"hutch-launcher")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        Launcher(control, host).run()
    except (OSError, Refusal) as exc:
        body = {"request": 0, "code": "backend_unavailable", "message": str(exc)}
        control.send(json.dumps(body).encode())
