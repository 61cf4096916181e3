"""The zygote: confined, and forked for the boxes of its image. Here are both ends of its socket.

It is a fork of the launcher in namespaces of its own, in which it is pid 1: when it dies,
the kernel kills its boxes. Its root holds the image's mounts and nothing else; it has no
secrets, no network and no rights outside its user namespace. It takes requests from the launcher
only; its preloaded process sends it nothing but a status and descriptors.

Where an image has packages to preload, a *preloaded process* (see below) is forked in its
place: packages are other people's code, so they are imported in a process that lacks even the
rights of the zygote. The zygote still writes the maps of user ids. Boxes outlive the preloaded
process that they came from. One that dies, or is old, is replaced; until the next is ready, boxes
start without it.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, NoReturn

from hutch.backends import linux
from hutch.backends.linux import seccomp
from hutch.errors import BackendUnavailable, InvalidRequest, StartFailed

from .launch import DISK, IMAGE, ROOT, become
from .plan import DEVICES, LIB, LIBRARIES, OTHER_IDS, OWN_LINKS, SOURCE, UID_BASE, BoxImage
from .rights import Rights, map_ids

_STAGE = "/tmp"  # any folder that exists everywhere; only our own namespace sees the mount
# A zygote answers in milliseconds. One that does not is hung: it is killed and replaced. Becoming
# ready may take much longer, as packages are imported; the launcher does not block on that.
ANSWER_TIMEOUT = 10
# Imports may be slow. A fork takes milliseconds: a process that takes longer is hung.
PRELOAD_TIMEOUT = 120
CLONE_TIMEOUT = 5
# After so many forks, or seconds, another takes its place: what was mapped where, and the seed of
# string hashes, is the same in all its boxes.
MAX_FORKS, MAX_AGE = 1000, 3600
LOG = "/tmp/preload"  # of the zygote's own root: what Python said when it could not go on


def run(
    launcher: socket.socket,
    sync: socket.socket,
    image: BoxImage,
    mounts: list[tuple[str, int]],
    ranged: bool,
    warm: bool,
) -> None:
    """Never returns. `mounts` are the image's: where, and their descriptors."""
    try:
        if sync.recv(1) != b"m":  # our uids are mapped now
            os._exit(1)
        if ranged:
            linux.take_root_ids()
        os.umask(0o022)  # not the caller's: every user of a box must be able to read its root
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a lasting launcher has a handler
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        linux.set_name(b"hutch-zygote")
        linux.forget_command_line()  # it says where on the host we are installed
        _build_root(image, mounts)
        null = os.open("/dev/null", os.O_RDWR)
        control = launcher.fileno()
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, control)
        os.closerange(control + 1, 1 << 20)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps our boxes
        zygote = Zygote(launcher, image)
        gc.collect()
        gc.freeze()  # the collector must not write to pages that are shared with every box
        if warm:
            zygote.warm_up()
            zygote.wait_until_warm()
        launcher.send(b"{}")
    except Unfit as exc:
        launcher.send(json.dumps({"unfit": f"{exc}"}).encode())
        os._exit(1)
    except BaseException as exc:
        launcher.send(json.dumps({"failed": f"{exc}"}).encode())
        os._exit(1)
    zygote.serve()


def _build_root(image: BoxImage, mounts: list[tuple[str, int]]) -> None:
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    flags = linux.NOSUID | linux.NODEV
    linux.mount("zygote", _STAGE, "tmpfs", flags, "size=16m,mode=755")
    for path in (IMAGE, ROOT, DISK, "/proc", "/dev", "/tmp"):
        os.mkdir(_STAGE + path)
    linux.mount("proc", _STAGE + "/proc", "proc", flags | linux.NOEXEC)
    os.symlink(IMAGE + "/dev/null", _STAGE + "/dev/null")
    os.symlink(IMAGE + "/dev/urandom", _STAGE + "/dev/urandom")
    top = _STAGE + IMAGE
    for path in ("/dev/shm", "/dev/pts"):
        os.makedirs(top + path)
    for path, target in {**image.links, **OWN_LINKS}.items():
        if path.count("/") > 1:
            os.makedirs(os.path.dirname(top + path), exist_ok=True)
            os.symlink(target, top + path)
    for path, content in image.files.items():
        os.makedirs(os.path.dirname(top + path), exist_ok=True)
        with open(top + path, "xb") as file:
            file.write(content)
    for path, fd in mounts:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(top + path, exist_ok=True)
        else:
            os.close(os.open(top + path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        linux.attach_mount(fd, top, path)
        os.close(fd)
    for path in ("/dev", *(path for path in image.tops if path not in image.mounted)):
        # A mount of its own each, so that it can be read-only and be handed on whole.
        linux.mount(top + path, top + path, None, linux.BIND | linux.REC)
        linux.set_mount(top + path, linux.ATTR_RDONLY)
    if image.python:
        _show_to_preloader(image, top)
    linux.pivot(_STAGE)


def _show_to_preloader(image: BoxImage, top: str) -> None:
    """Show the image at the paths of a box, as a preloaded process runs the image's Python.

    By mounts, not by links: packages remember where they were, and resolve links.
    """
    for name in os.listdir(top):
        if not os.path.lexists(f"{_STAGE}/{name}"):
            os.mkdir(f"{_STAGE}/{name}")
            linux.mount(f"{top}/{name}", f"{_STAGE}/{name}", None, linux.BIND | linux.REC)
    for path, target in image.links.items():
        if path.count("/") == 1:
            os.symlink(target, _STAGE + path)


class Unfit(Exception):
    """The packages of the image cannot be preloaded."""


class Zygote:
    def __init__(self, launcher: socket.socket, image: BoxImage) -> None:
        self._launcher, self._image = launcher, image
        self._program = seccomp.build(report=True)
        self._selector = selectors.DefaultSelector()
        self._selector.register(launcher, selectors.EVENT_READ)
        self._warm: Preloader | None = None
        self._warming: Preloader | None = None

    def serve(self) -> None:
        """Never returns."""
        while True:
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is self._launcher:
                    self._read_request()
                else:
                    self._look_after(key.data)
            if self._warm and self._warm.is_old and not self._warming:
                self.warm_up()

    def _pause(self) -> float | None:
        return self._warm.seconds_left if self._warm and not self._warming else None

    def _read_request(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._launcher, 256 * 1024, 253)
        if not message:
            os._exit(0)  # the launcher is gone: so are we, and with us every box
        body = json.loads(message)
        if body.pop("warm") and not self._warm and not self._warming:
            self.warm_up()
        answer, pidfd = self._fork(body, list(fds))
        for fd in fds:
            os.close(fd)
        if pidfd is None:
            self._launcher.send(json.dumps(answer).encode())
        else:
            socket.send_fds(self._launcher, [json.dumps(answer).encode()], [pidfd])
            os.close(pidfd)

    # --- the preloaded process ----------------------------------------------------------

    def warm_up(self) -> None:
        """Begin to make a preloaded process, which replaces the one before when it is ready."""
        if self._image.python:
            self._warming = Preloader(self._image)
            self._selector.register(self._warming.sock, selectors.EVENT_READ, self._warming)

    def wait_until_warm(self) -> None:
        """For the first box. Raises Unfit with the reason if it cannot be."""
        if self._warming:
            warming = self._warming
            self._look_after(warming)
            if warming.failure:
                raise Unfit(warming.failure)

    def _look_after(self, preloader: Preloader) -> None:
        if preloader is self._warming:
            self._warming = None
            if preloader.become_ready():
                if self._warm:
                    self._dismiss(self._warm)
                self._warm = preloader
            else:
                self._dismiss(preloader)
        elif preloader is self._warm:  # it sends nothing unasked, so it died
            self._replace(preloader)

    def _replace(self, preloader: Preloader) -> None:
        self._warm = None
        self._dismiss(preloader)
        if not self._warming:
            self.warm_up()

    def _dismiss(self, preloader: Preloader) -> None:
        """It ends; what was forked from it does not."""
        self._selector.unregister(preloader.sock)
        preloader.close()

    # --- boxes ------------------------------------------------------------------------

    def _fork(self, body: dict[str, Any], fds: list[int]) -> tuple[dict[str, object], int | None]:
        ours, theirs = socket.socketpair()
        uids, gids = body.pop("ids")
        try:
            pidfd = self._clone(body, fds, ours, theirs)
            pid = _number_of(pidfd)
            try:
                map_ids(pid, uids, gids, body["slot"] is not None)
                ours.send(b"m")
            except OSError as exc:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
                return {"failed": f"user ids: {exc}"}, None
            return {"pid": pid}, pidfd
        except OSError as exc:
            return {"failed": str(exc)}, None
        finally:
            linux.prctl(linux.PR_SET_DUMPABLE, 0)
            ours.close()
            theirs.close()

    def _clone(
        self, body: dict[str, object], fds: list[int], ours: socket.socket, theirs: socket.socket
    ) -> int:
        """A descriptor of a process in new namespaces that waits for its ids on `theirs`."""
        if self._warm:
            pidfd = self._warm.clone(body, [theirs.fileno(), *fds])
            if pidfd is not None:
                return pidfd
            self._replace(self._warm)
        # A child's id maps can be written only while it is dumpable, which it inherits from us.
        linux.prctl(linux.PR_SET_DUMPABLE, 1)
        pid = linux.clone(linux.ALL_NAMESPACES)
        if pid == 0:
            # A box may hold no socket over which it could talk to the launcher or to the zygote.
            for sock in (self._launcher, ours):
                sock.close()
            for preloader in (self._warm, self._warming):
                if preloader:
                    preloader.forget()
            become(body, self._image, [theirs.detach(), *fds], self._program, {})
        return os.pidfd_open(pid)


def _number_of(pidfd: int) -> int:
    """The pid in this namespace. A preloaded process is not trusted to tell it."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        for line in file:
            if line.startswith("Pid:") and int(line[4:]) > 0:
                return int(line[4:])
    raise OSError(3, "the new process ended at once")


# --- the preloaded process ------------------------------------------------------------------
#
# The image's own Python, with its packages imported, forked into boxes.
#
#     zygote ──requests──> preloaded process ──clone──> box
#
# It runs other people's code (whatever the packages do when they are imported), so it has less than
# the zygote has: no capability, and no way to gain one. A process without rights may still clone
# itself into new namespaces, and the child has rights in those; but it has no user id there until
# the zygote has mapped one. This is the zygote's end; preloaded.py is what runs at the other.


_BOOT = """\
import sys
sys.path.append({source!r})
sys.path.append({lib!r})
from hutch.backends.namespaces.preloaded import main
main(3)
"""


class Preloader:
    """A preloaded process. Until `become_ready` it is still importing."""

    def __init__(self, image: BoxImage) -> None:
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.failure = ""
        self._forks, self._since = 0, time.monotonic()
        assert image.python
        pid = os.fork()
        if not pid:
            _become_python(theirs, image.python.executable)
        self._pidfd = os.pidfd_open(pid)
        theirs.close()
        names = replace(image, files=dict.fromkeys(image.files, b""))
        self.sock.send(json.dumps(asdict(names), default=bytes.decode).encode())

    @property
    def is_old(self) -> bool:
        return self._forks >= MAX_FORKS or self.seconds_left == 0

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._since + MAX_AGE - time.monotonic())

    def become_ready(self) -> bool:
        """Wait until it is warm; if it fails instead, `failure` says how."""
        self.sock.settimeout(PRELOAD_TIMEOUT)
        try:
            reply = self.sock.recv(65536)
        except TimeoutError:
            self.failure = f"its packages were not imported after {PRELOAD_TIMEOUT} seconds"
            return False
        except OSError:
            reply = b""
        self._since = time.monotonic()
        self.failure = reply.decode(errors="replace") if reply else _last_words()
        if self.failure == "ready":
            self.failure = ""
        return not self.failure

    def clone(self, body: dict[str, object], fds: list[int]) -> int | None:
        """The pidfd of a new process; None if this preloaded process failed."""
        self._forks += 1
        self.sock.settimeout(CLONE_TIMEOUT)
        try:
            socket.send_fds(self.sock, [json.dumps(body).encode()], fds)
            _, received, _, _ = socket.recv_fds(self.sock, 64, 1)
        except OSError:
            received = []
        return received[0] if received else None

    def close(self) -> None:
        """End it. Its boxes become the zygote's own."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)  # it may be hung
        except OSError:
            pass
        self.forget()

    def forget(self) -> None:
        """Close our descriptors without ending it: for a fork of the zygote."""
        self.sock.close()
        os.close(self._pidfd)


def _last_words() -> str:
    try:
        with open(LOG, errors="replace") as file:
            last = file.read(1 << 20).strip().rpartition("\n")[2]
    except OSError:
        last = ""
    return f"the image's Python ended: {last or 'it said nothing'}"


def _become_python(zygote: socket.socket, executable: str) -> NoReturn:
    try:
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(log, 2)
        os.dup2(zygote.fileno(), 3)
        os.closerange(4, 1 << 20)
        linux.forbid_capabilities()
        linux.set_capabilities(())
        linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
        boot = _BOOT.format(source=SOURCE, lib=LIB)
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": LIBRARIES,
            # No threads at the time of a fork: locks that they hold are never released in it.
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
            "MPLCONFIGDIR": "/tmp",
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "MPLBACKEND": "module://hutch_kernel.figures",
        }
        os.execve(executable, [executable, "-I", "-S", "-c", boot], env)
    except BaseException as exc:
        os.write(2, f"{exc}\n".encode())
    finally:
        os._exit(127)


# --- the launcher's end ---------------------------------------------------------------------


class ZygoteProcess:
    """A confined process that is forked into boxes, and dies with its last descriptor here."""

    def __init__(self, image: BoxImage, rights: Rights, *, warm: bool) -> None:
        """Returns at once. `sock` is readable when `become_ready` can be called."""
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.sock, theirs):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.is_ready = False
        # Starts that wait until it is ready: the number of the request, and what to do.
        self.waiting: list[tuple[int, Callable[[int], None]]] = []
        sync, their_sync = socket.socketpair()
        mounts: list[tuple[str, int]] = []
        try:
            devices = {f"/dev/{name}": f"/dev/{name}" for name in DEVICES}
            for mountpoint, source in {**image.mounted, **devices}.items():
                fd = linux.copy_mount(source)
                mounts.append((mountpoint, fd))
                attributes = linux.ATTR_NOSUID
                if mountpoint not in devices:
                    attributes |= linux.ATTR_NODEV | linux.ATTR_RDONLY
                linux.set_mount(fd, attributes, recursive=True)
            pid = _clone_as(UID_BASE) if rights.ranged else linux.clone(linux.ALL_NAMESPACES)
            if pid == 0:
                self.sock.close()
                sync.close()
                run(theirs, their_sync, image, mounts, rights.ranged, warm)
            self.pidfd = os.pidfd_open(pid)
            # When memory runs out, boxes are killed before processes of the host.
            with open(f"/proc/{pid}/oom_score_adj", "w") as file:
                file.write("500")
            text = f"0 {UID_BASE} {OTHER_IDS}" if rights.ranged else "0 0 1"
            if rights.ranged and not rights.idmaps:  # a box may need the owner of a mount
                text += f"\n{OTHER_IDS} 0 {UID_BASE}"
            map_ids(pid, text, text, rights.ranged)
            sync.send(b"m")
        except BaseException:
            self.sock.close()
            raise
        finally:
            for _, fd in mounts:
                os.close(fd)
            for sock in (theirs, sync, their_sync):
                sock.close()

    def become_ready(self) -> None:
        """Read its first message. Raises BackendUnavailable if it could not start.

        Raises InvalidRequest if the packages of the image cannot be preloaded.
        """
        self.sock.settimeout(ANSWER_TIMEOUT)
        try:
            body = json.loads(self.sock.recv(65536) or b'{"failed": "it died"}')
        except OSError as exc:
            body = {"failed": str(exc)}
        if "unfit" in body:
            raise InvalidRequest(f"this image cannot be used: {body['unfit']}")
        if "failed" in body:
            raise BackendUnavailable(f"the zygote could not start: {body['failed']}")
        self.is_ready = True

    def fork(self, request: dict[str, object], fds: list[int]) -> int:
        """Fork a box. Returns its pidfd.

        Raises StartFailed, with `is_ready` False if the zygote died, and OSError if no descriptor
        is left for the pidfd: then nothing was forked.
        """
        os.close(os.dup(self.pidfd))  # there is one thread, so this number stays free until then
        try:
            socket.send_fds(self.sock, [json.dumps(request).encode()], fds)
            message, received, _, _ = socket.recv_fds(self.sock, 65536, 1)
        except OSError:
            message, received = b"", []
        if not message:
            self.is_ready = False
            raise StartFailed("the zygote died; the next start makes a new one")
        body = json.loads(message)
        if "failed" in body:
            raise StartFailed(body["failed"])
        return received[0]

    def kill(self) -> None:
        """Kill it, and with it every box."""
        kill(self.pidfd)
        os.close(self.pidfd)
        self.sock.close()


def kill(pidfd: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass


def _clone_as(uid: int) -> int:
    """Clone into namespaces whose creator is `uid` instead of root.

    The kernel charges what a user of a namespace holds (inotify instances, pending signals) to
    its creator too. No other process has this `uid`; root's limits are shared with the host.
    """
    NO_SETUID_FIXUP = 4  # keep our capabilities when the uid changes
    linux.prctl(linux.PR_SET_SECUREBITS, NO_SETUID_FIXUP)
    os.seteuid(uid)
    pid = -1
    try:
        pid = linux.clone(linux.ALL_NAMESPACES)
        return pid
    finally:
        if pid:  # the child has the credentials of its own namespace
            os.seteuid(0)
            linux.prctl(linux.PR_SET_SECUREBITS, 0)
