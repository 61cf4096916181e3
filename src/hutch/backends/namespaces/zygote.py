"""The zygote: warm, confined, and forked for every box.

It is a fork of the launcher in namespaces of its own, in which it is pid 1: when it dies,
the kernel kills every box. Its root holds the image's mounts and nothing else; it has no
secrets, no network and no rights outside its user namespace. It hears the launcher only.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
from typing import Any

from hutch.types import Limits, Mount

from . import kernel, seccomp
from .launch import DISK, IMAGE, ROOT, become_box
from .plan import OWN_LINKS, Image, id_map, plan

_STAGE = "/tmp"  # any folder that exists everywhere; only our own namespace sees the mount


def run(
    launcher: socket.socket,
    sync: socket.socket,
    image: Image,
    mounts: list[tuple[str, int]],
    ranged: bool,
) -> None:
    """Never returns. `mounts` are the image's: where, and their descriptors."""
    try:
        if sync.recv(1) != b"m":  # our uids are mapped now
            os._exit(1)
        if ranged:
            os.setgroups([])
            os.setresgid(0, 0, 0)
            os.setresuid(0, 0, 0)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.set_name(b"hutch-zygote")
        kernel.forget_command_line()  # it says where on the host we are installed
        _build_root(image, mounts)
        null = os.open("/dev/null", os.O_RDWR)
        control = launcher.fileno()
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, control)
        os.closerange(control + 1, 1 << 20)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps our boxes
        program = seccomp.build()
        gc.collect()
        gc.freeze()  # what is shared with every box shall not be written to by the collector
        launcher.send(b"{}")
    except BaseException as exc:
        launcher.send(json.dumps({"failed": f"{exc}"}).encode())
        os._exit(1)
    _serve(launcher, program, image)


def _build_root(image: Image, mounts: list[tuple[str, int]]) -> None:
    kernel.mount("", "/", None, kernel.REC | kernel.PRIVATE)
    flags = kernel.NOSUID | kernel.NODEV
    kernel.mount("zygote", _STAGE, "tmpfs", flags, "size=16m,mode=755")
    for path in (IMAGE, ROOT, DISK, "/proc", "/dev"):
        os.mkdir(_STAGE + path)
    kernel.mount("proc", _STAGE + "/proc", "proc", flags | kernel.NOEXEC)
    os.symlink(IMAGE + "/dev/null", _STAGE + "/dev/null")
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
        kernel.attach_mount(fd, top, path)
        os.close(fd)
    for path in ("/etc", "/dev"):
        # A mount of its own each, so that it can be read-only and be handed on whole.
        kernel.mount(top + path, top + path, None, kernel.BIND | kernel.REC)
        kernel.set_mount(top + path, kernel.ATTR_RDONLY)
    kernel.pivot(_STAGE)


def _serve(launcher: socket.socket, program: bytes, image: Image) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(launcher, 256 * 1024, 64)
        if not message:
            os._exit(0)  # the launcher is gone: so are we, and with us every box
        body = json.loads(message)
        answer, pidfd = _fork(body, image, list(fds), program, launcher)
        for fd in fds:
            os.close(fd)
        if pidfd is None:
            launcher.send(json.dumps(answer).encode())
        else:
            socket.send_fds(launcher, [json.dumps(answer).encode()], [pidfd])
            os.close(pidfd)


def _fork(
    body: dict[str, Any], image: Image, fds: list[int], program: bytes, launcher: socket.socket
) -> tuple[dict[str, object], int | None]:
    ours, theirs = socket.socketpair()
    # Its maps can be written only while it is dumpable; it is not for a moment longer.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    try:
        pid = kernel.clone(kernel.ALL_NAMESPACES)
        if pid == 0:
            _child(body, image, fds, program, theirs, (launcher, ours))
        theirs.close()
        pidfd = os.pidfd_open(pid)
        try:
            map_ids(pid, id_map(body["slot"]), body["slot"] is not None)
            ours.send(b"m")
        except OSError as exc:
            os.kill(pid, signal.SIGKILL)
            os.close(pidfd)
            return {"failed": f"user ids: {exc}"}, None
        return {"pid": pid}, pidfd
    except OSError as exc:
        return {"failed": str(exc)}, None
    finally:
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        ours.close()


def map_ids(pid: int, text: str, may_set_groups: bool) -> None:
    """Write the uid and gid map of a process in a new user namespace."""
    if not may_set_groups:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", text)
    _write(f"/proc/{pid}/uid_map", text)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _child(
    body: dict[str, Any],
    image: Image,
    fds: list[int],
    program: bytes,
    sync: socket.socket,
    close: tuple[socket.socket, ...],
) -> None:
    """Never returns."""
    status = socket.socket(fileno=fds[1])
    try:
        for sock in close:
            sock.close()
        mounts = tuple(Mount(**mount) for mount in body.pop("mounts"))
        limits = Limits(**body.pop("limits"))
        files = frozenset(body.pop("files"))
        wanted = plan(image, limits, mounts=mounts, files=files, **body)
        guest = socket.socket(fileno=fds[0])
        count = len(fds) - len(wanted.attach)
        if sync.recv(1) != b"m":
            os._exit(1)
        sync.close()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        become_box(wanted, program, guest, status, fds[2:count], fds[count:])
    except BaseException as exc:
        status.send(f"fork: {exc}".encode())
    os._exit(1)
