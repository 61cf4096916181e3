"""The launcher: the only process of ours with rights on the host, and the last to exit.

    host process ──control──> launcher ──> zygote ──> box, box, box
                  (requests)  (privileged)  (confined)

It is exec'ed fresh with an empty environment, imports only the standard library and Hutch, and
never reads a byte that a box wrote. It makes what needs rights (uid ranges, cgroups, copies of
mounts) and cleans it up. When the host process ends, however it ends, the launcher kills the
zygotes, and with them every box, cleans up, and exits. (lasting.py has one that outlives its
host.)

Each box has a *listener*: a socket over which the launcher passes new connections to the guest.
Nothing is ever read from it.
"""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hutch.backends import linux
from hutch.backends.builds import HUTCH
from hutch.backends.linux import cgroup
from hutch.backends.linux.folders import check_mounts, open_source
from hutch.errors import (
    TOO_MANY_FILES,
    BackendUnavailable,
    BoxLost,
    Conflict,
    HutchError,
    InvalidRequest,
    NoCapacity,
    StartFailed,
)
from hutch.types import Limits, Mount, Packages

from . import rights
from .plan import MAX_BOXES, PICKLER, id_maps, uid_of
from .rights import take_mount_rights
from .sources import copy_folder, copy_layers, host_image, image_with, open_swap, owner_of
from .zygote import ZygoteProcess, kill

# What is weaker where a control group is missing.
WEAKER = {
    "memory": "memory is watched, not enforced",
    "pids": "processes are counted by rlimit",
    "cpu": "cpu is not bounded",
}
UNCOUNTED = "processes are not bounded: the kernel does not count those of root"
# What is weaker where mounts cannot be id-mapped.
OWNED = "user ids: the user of the box is the owner of what is mounted"
SHARED = "user ids: the same in all boxes of imported images"
NO_IDMAPS = "id-mapped mounts need CAP_SYS_ADMIN and CAP_SYS_PTRACE"

# Above this number, zygotes without boxes are ended, oldest first: each uses about 100 MB.
MAX_ZYGOTES = 8

MAX_OPEN = 65_536  # descriptors, if the hard limit allows it
MIN_OPEN = 256  # files: the lowest limit that a box can have

LOOP_FILE = os.path.join(HUTCH, "guest", "loop.sh")
OWN_PICKLER = os.path.join(os.path.dirname(HUTCH), "cloudpickle")  # of a private copy


@dataclass
class RunningBox:
    """A box that is running or starting."""

    id: str
    pidfd: int
    group: cgroup.Group | None
    slot: int | None
    packages: Packages | None  # whose zygote it came from
    digest: str | None  # of its image
    owner: tuple[int, int] | None  # its user's ids on this machine, if those are not in a range
    listener: socket.socket
    request: int | None  # the `start` request, until it is answered
    status: socket.socket | None  # until it is up
    host_end: socket.socket | None
    waiting_kills: list[int] = field(default_factory=list)
    is_doomed: bool = False  # it was killed, and is not dead yet
    until: float | None = None  # deadline without a host, in seconds since boot

    @property
    def is_up(self) -> bool:
        return self.status is None and not self.is_doomed


class Launcher:
    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._selector = selectors.DefaultSelector()
        self._boxes: dict[str, RunningBox] = {}
        self._zygotes: dict[Packages | None, ZygoteProcess] = {}
        self._folder: str | None = None
        self._hierarchy = cgroup.find()
        cgroup.sweep(self._hierarchy)
        self._rights = take_mount_rights()
        self._slots = Slots("/run/hutch") if self._rights.ranged else None
        self._image = host_image()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # a box takes two
        if hard != resource.RLIM_INFINITY and hard < MIN_OPEN:
            # Fail here: otherwise each program in a box fails, and the error blames its caller.
            raise BackendUnavailable(
                f"processes may open {hard} files here, and boxes take {MIN_OPEN}: raise the hard "
                "limit (`ulimit -Hn`, or LimitNOFILE= of a systemd unit)"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_OPEN)), hard))
        with open(LOOP_FILE) as file:
            self._loop = file.read()

    def serve(self, control: socket.socket) -> None:
        """Take requests from this host."""
        self._control = control
        self._selector.register(control, selectors.EVENT_READ, self._read_request)

    def end_with(self, host: int) -> None:
        """End with this process, even if its children keep our socket open."""
        pidfd = os.pidfd_open(host)
        if os.getppid() != host:  # it died already, and its pid may have been reused
            raise OSError(3, "the process that started the launcher is gone")
        self._selector.register(pidfd, selectors.EVENT_READ, self._lose_host)

    def run(self) -> None:
        try:
            self._zygote_for(None, warm=False)
            while True:
                for key, _ in self._selector.select(self._expire()):
                    # Handling an earlier event may have closed this one.
                    if self._selector.get_map().get(key.fd) is key:
                        key.data()
        except HostsGone:
            pass
        finally:
            self._clean_up()

    def _expire(self) -> float | None:
        """End boxes past their deadline. Returns the seconds until the next one, or None."""
        return None

    # --- requests -------------------------------------------------------------------

    def _read_request(self) -> None:
        assert self._control
        try:
            message = self._control.recv(256 * 1024)
        except OSError:
            message = b""
        if not message:
            self._lose_host()
            return
        body = json.loads(message)
        act = getattr(self, "_do_" + body.pop("do"), self._do_not)
        self._try(body.pop("request"), lambda number: act(number, **body))

    def _try(self, number: int, act: Callable[[int], None]) -> None:
        try:
            act(number)
        except HutchError as exc:
            self._answer(number, code=exc.code, message=str(exc))
        except OSError as exc:
            if exc.errno in (errno.EMFILE, errno.ENFILE):
                self._answer(
                    number, code=NoCapacity.code, message=f"the launcher has {TOO_MANY_FILES}"
                )
            else:
                self._answer(number, code="start_failed", message=str(exc))
        except HostsGone:
            raise
        except Exception as exc:  # answer even after a bug of ours, or the host waits forever
            self._answer(number, code=HutchError.code, message=f"the launcher failed: {exc!r}")

    def _do_not(self, number: int, **body: object) -> None:
        raise InvalidRequest("the launcher does not know this request")

    def _answer(self, number: int, fds: Sequence[int] = (), **body: object) -> None:
        """Answer a request, unless the host is gone."""
        if self._control is None:
            return
        data = json.dumps({"request": number, **body}).encode()
        try:
            socket.send_fds(self._control, [data], list(fds))
        except OSError:
            self._lose_host()

    def _lose_host(self) -> None:
        raise HostsGone

    def _do_folder(self, number: int, path: str) -> None:
        """Remember a folder of the host process, to remove it when that ends."""
        self._folder = path
        sweep_folders(os.path.dirname(path))
        self._answer(number)

    def _do_start(self, number: int, id: str, spec: dict[str, Any]) -> None:
        given = spec.pop("packages")
        packages = Packages(**{**given, "preload": tuple(given["preload"])}) if given else None
        zygote = self._zygote_for(packages, warm=spec["warm"])
        if zygote.is_ready:
            try:
                self._start(packages, number, id, copy.deepcopy(spec))
                return
            except StartFailed:
                if zygote.is_ready:
                    raise
            # It is dying, which its pidfd does not say before its boxes are dead.
            zygote = self._zygote_for(packages, warm=spec["warm"])
        if zygote.is_ready:
            self._start(packages, number, id, spec)
        else:
            zygote.waiting.append((number, lambda n: self._start(packages, n, id, spec)))

    def _start(self, packages: Packages | None, number: int, id: str, spec: dict[str, Any]) -> None:
        if id in self._boxes:
            raise Conflict(f"box {id} already exists")
        zygote = self._zygotes[packages]
        limits = Limits(**spec["limits"])
        # Outer folders first: mounted later, they would hide what is mounted inside them.
        spec["mounts"].sort(key=lambda mount: mount["target"])
        mounts = tuple(Mount(**m) for m in spec["mounts"])
        check_mounts(mounts)
        root, layers = spec["root"], []
        if root:
            layers, root["layers"] = root["layers"], len(root["layers"])
            who = (root["uid"], root["gid"])
        else:
            who = (uid_of(spec["user"], ranged=self._rights.ranged),) * 2
        pickler, digest = spec.pop("pickler"), spec.pop("digest")
        slot = self._slots.take() if self._slots else None
        group, sockets, fds = None, [], [open_swap()]
        sources: list[int] = []
        try:
            for mount in mounts:
                sources.append(open_source(mount.source))
            if self._hierarchy.folders:
                group = cgroup.Group(self._hierarchy, f"hutch-{os.getpid()}-{id}", limits)
            opened = list(zip(mounts, sources, strict=True))
            mapped_slot, owner = slot, None
            if slot is not None and not self._rights.idmaps:
                mapped_slot, owner = None, owner_of(opened)
                if owner and layers and not who[0]:
                    raise InvalidRequest(
                        "root of an imported image cannot use mounts here: the image's files "
                        f"would not be root's ({NO_IDMAPS}). Choose another user"
                    )
            files = [m.target for m, fd in opened if stat.S_ISREG(os.fstat(fd).st_mode)]
            sockets = [*socket.socketpair(), *socket.socketpair(), *_listener_pair()]
            host_end, guest_end, status, their_status, listener, their_listener = sockets
            fds += group.open() if group else []
            for mount, source in opened:
                fds.append(copy_folder(mount, source, mapped_slot, who))
            if os.path.isdir(OWN_PICKLER):
                pickler = OWN_PICKLER
            if pickler:
                fds.append(linux.copy_mount(pickler))
                quiet = linux.ATTR_RDONLY | linux.ATTR_NOSUID | linux.ATTR_NODEV
                linux.set_mount(fds[-1], quiet)
                spec["mounts"].append({"source": "", "target": PICKLER, "read_only": True})
            if layers:
                fds += copy_layers(layers, mapped_slot)
            # Boxes must not learn paths of the host: what a preloaded process has read once is in
            # the memory of every box forked from it.
            spec["mounts"] = [{**mount, "source": ""} for mount in spec["mounts"]]
            request = {
                **spec,
                "files": files,
                "slot": slot,
                "ids": id_maps(slot, who, owner, stored=bool(layers) and mapped_slot != slot),
                "machine_id": os.urandom(16).hex(),
                "user_is_root": owner is not None and owner[0] == 0,
                "cgroup": {"memory", "pids"} <= self._hierarchy.folders.keys(),
                "loop_script": self._loop,
            }
            ends = [sock.fileno() for sock in (guest_end, their_status, their_listener)]
            pidfd = zygote.fork(request, [*ends, *fds])
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
            for fd in (*fds, *sources):
                os.close(fd)
        for sock in (guest_end, their_status, their_listener):
            sock.close()
        box = RunningBox(
            id, pidfd, group, slot, packages, digest, owner, listener, number, status, host_end
        )
        self._boxes[id] = box
        self._selector.register(status, selectors.EVENT_READ, lambda: self._status(box))
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._died(box))

    def _do_kill(self, number: int, id: str) -> None:
        box = self._boxes.get(id)
        if box is None:
            self._answer(number)
            return
        box.waiting_kills.append(number)
        self._end(box)

    def _do_adopt(self, number: int, id: str) -> None:
        self._answer_with(number, self._box(id))

    def _do_connect(self, number: int, id: str) -> None:
        box = self._box(id)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                socket.send_fds(box.listener, [b"c"], [theirs.fileno()])
            except OSError as exc:
                message = f"box {id} takes no connection: its guest hangs ({exc.strerror})"
                raise BoxLost(message) from None
            self._answer(number, [ours.fileno()])

    def _do_stats(self, number: int, id: str) -> None:
        box = self._box(id)
        used = dict.fromkeys(("memory", "pids", "cpu_seconds", "oom_kills"))
        if box.group:
            used = cgroup.with_process(box.group.read(), box.pidfd)
        self._answer(number, stats=used)

    def _do_list(self, number: int) -> None:
        self._answer(number, boxes=[box.id for box in self._boxes.values() if box.is_up])

    # --- boxes ----------------------------------------------------------------------

    def _box(self, id: str) -> RunningBox:
        """Raises BoxLost if there is no such box, or it is not up."""
        box = self._boxes.get(id)
        if box is None or not box.is_up:
            raise BoxLost(f"box {id} is gone")
        return box

    def _answer_with(self, number: int, box: RunningBox, fds: Sequence[int] = ()) -> None:
        """Answer with what a host must know of a box, and the file that counts its OOM kills."""
        mine = self._rights
        weaker = dict(WEAKER)
        if box.owner and not box.owner[0]:
            weaker["pids"] = UNCOUNTED
        degraded = [f"{weaker[n]} ({why})" for n, why in self._hierarchy.missing.items()]
        if box.owner:
            degraded.append(f"{OWNED} ({NO_IDMAPS})")
        if box.digest and mine.ranged and not mine.idmaps:
            degraded.append(f"{SHARED} ({NO_IDMAPS})")
        if not linux.landlock_version():
            degraded.append("no second fence around files (this kernel has no Landlock 2)")
        kills = box.group.open_kills() if box.group else None
        counted = [kills] if kills is not None else []
        self._answer(
            number,
            [*fds, *counted],
            ranged=mine.ranged,
            degraded=degraded,
            digest=box.digest,
        )
        for fd in counted:
            os.close(fd)

    def _status(self, box: RunningBox) -> None:
        assert box.status and box.host_end
        try:
            status = box.status.recv(4096)
        except OSError:
            status = b""
        self._selector.unregister(box.status)
        box.status.close()
        box.status = None
        number, box.request = box.request, None
        if number is None:
            self._end(box)  # the host that asked for it is gone
        elif status == b"ok":
            self._answer_with(number, box, [box.host_end.fileno()])
        else:
            self._end(box)
            message = status.decode(errors="replace") or "it died while it was being made"
            self._answer(number, code="start_failed", message=message)
        box.host_end.close()
        box.host_end = None

    def _end(self, box: RunningBox) -> None:
        box.is_doomed = True
        kill(box.pidfd)

    def _died(self, box: RunningBox) -> None:
        if box.status:
            self._status(box)
        self._selector.unregister(box.pidfd)
        os.close(box.pidfd)
        box.listener.close()
        if box.group:
            box.group.remove()
        if box.slot is not None and self._slots:
            self._slots.give_back(box.slot)
        del self._boxes[box.id]
        for number in box.waiting_kills:
            self._answer(number)

    # --- zygotes ----------------------------------------------------------------------

    def _zygote_for(self, packages: Packages | None, *, warm: bool) -> ZygoteProcess:
        """The zygote of an image. It may not be ready yet, unless the image is `host`."""
        if packages not in self._zygotes:
            self._make_room()
            image = image_with(packages, self._image) if packages else self._image
            zygote = ZygoteProcess(image, self._rights, warm=warm)
            self._selector.register(
                zygote.pidfd, selectors.EVENT_READ, lambda: self._lose_zygote(packages)
            )
            self._zygotes[packages] = zygote
            if packages:
                self._selector.register(
                    zygote.sock, selectors.EVENT_READ, lambda: self._zygote_ready(packages)
                )
            else:
                self._zygote_ready(packages)
        return self._zygotes[packages]

    def _make_room(self) -> None:
        """If there are too many zygotes, end the oldest that have no boxes."""
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
        host = self._control
        for number, start in waiting:
            if self._control is host:  # a start may have found it gone
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

    def _clean_up(self) -> None:
        for zygote in self._zygotes.values():
            zygote.kill()
        for box in self._boxes.values():
            kill(box.pidfd)
        for box in self._boxes.values():
            if box.group:
                box.group.remove()
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder:
            remove_folder(self._folder)
            self._folder = None


class HostsGone(Exception):
    """The launcher has no host any more, and must end."""


def _listener_pair() -> tuple[socket.socket, socket.socket]:
    """Our end and the guest's. Sending never blocks: a guest that does not read is hung."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return ours, theirs


def remove_folder(path: str) -> None:
    """Remove a folder of files. One with folders in it is not ours, and stays."""
    try:
        for name in os.listdir(path):
            os.unlink(os.path.join(path, name))
        os.rmdir(path)
    except OSError:
        pass


def sweep_folders(parent: str) -> None:
    """Remove folders whose host process and launcher were both killed."""
    with os.scandir(parent) as entries:
        for entry in entries:
            name, _, rest = entry.name.partition("-")
            owner = rest.partition("-")[0]
            if name != "hutch" or not owner.isdigit() or os.path.exists(f"/proc/{owner}"):
                continue
            info = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                remove_folder(entry.path)


def main(fd: int, host: int) -> None:
    control = socket.socket(fileno=fd)
    linux.set_name(b"hutch-launcher")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        launcher = Launcher()
        launcher.end_with(host)
        launcher.serve(control)
        launcher.run()
    except (OSError, HutchError) as exc:
        refuse(control, BackendUnavailable.code, rights.explain(exc))


def refuse(control: socket.socket, code: str, message: str) -> None:
    """Tell a host why it gets no more answers."""
    try:
        control.send(json.dumps({"request": 0, "code": code, "message": message}).encode())
    except OSError:
        pass  # it is gone


class Slots:
    """Uid ranges, one per box on this machine. A byte lock claims one, and ends with us."""

    def __init__(self, folder: str) -> None:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._fd = os.open(f"{folder}/uids", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mine: set[int] = set()

    def take(self) -> int:
        """The number of a range that is free. Raises NoCapacity if none is found."""
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
        raise NoCapacity("no range of user ids is free for another box")

    def give_back(self, slot: int) -> None:
        self._mine.discard(slot)
        fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, slot)
