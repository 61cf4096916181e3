"""Unpacks one layer of an image, in a process that could do no harm if the layer took it over.

It is alone in its own namespaces, and its root is the folder of the layer: no name, link or hard
link can lead out of it. It has three capabilities, all for files of its own range of user ids; no
network, no other process, no environment, and the seccomp filter of a box. The input is a plain
tar. The output is what an overlay expects of a layer: a device 0:0 stands for a path that is
removed from the layers below, and an attribute marks a folder that hides those below.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat

from hutch.backends import linux
from hutch.errors import BackendUnavailable, HutchError, InvalidRequest, NoSpace
from hutch.guest.tar import FULL
from hutch.tar import (
    CHUNK,
    FIFO,
    FILES,
    FOLDER,
    HARD_LINK,
    SYMLINK,
    InvalidTar,
    TarMember,
    TarReader,
    TarSource,
    number,
)

from .launch import confine_parser
from .plan import HIDES, STORE_BASE, UIDS_PER_BOX
from .rights import map_ids, take_mount_rights

WHITEOUT, OPAQUE, OTHER_MARKS = ".wh.", ".wh..wh..opq", ".wh..wh."
DEVICES = (b"3", b"4")
MAX_ID, NOBODY = 65535, 65534
ATTRIBUTE = "SCHILY.xattr."

MAX_TIME = 1 << 33  # in 2242; every file system can store it
MAX_MEMORY = 1 << 30
MAX_SECONDS = 3600  # of the processor
CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER = 0, 1, 3
_STAGE = "/tmp"  # exists everywhere; only our own namespace sees the mount


def main(tar: int, folder: int, out: int, most_bytes: int, most_entries: int) -> None:
    """Unpack in a child, and wait for it. It writes its error, or {}, to `out` as JSON."""
    path = os.readlink(f"/proc/self/fd/{folder}")
    ranged = take_mount_rights().ranged
    layer = linux.copy_mount(path, recursive=False)
    linux.set_mount(layer, linux.ATTR_NOSUID | linux.ATTR_NODEV | linux.ATTR_NOEXEC)
    sync, theirs = socket.socketpair()
    pid = linux.clone(linux.ALL_NAMESPACES)
    if not pid:
        sync.close()
        _work(theirs, tar, layer, out, (ranged, most_bytes, most_entries))
    theirs.close()
    text = f"0 {STORE_BASE} {UIDS_PER_BOX}" if ranged else "0 0 1"
    map_ids(pid, text, text, ranged)
    sync.send(b"m")
    os.close(tar)
    os.waitpid(pid, 0)


def _work(
    sync: socket.socket, tar: int, layer: int, out: int, bounds: tuple[bool, int, int]
) -> None:
    """Run in the child. Never returns."""
    ranged, most_bytes, most_entries = bounds
    code, message = "", ""
    try:
        if sync.recv(1) != b"m":  # our user ids are mapped now
            os._exit(1)
        _confine(tar, layer, out, ranged, most_bytes)
        # Not before: a change of user ids clears this.
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        with open(tar, "rb", buffering=CHUNK) as file:
            LayerUnpacker(file, ranged, most_bytes, most_entries).run()
            while file.read(CHUNK):  # so that the sender can finish
                continue
    except InvalidTar as exc:
        code, message = InvalidRequest.code, str(exc)
    except MemoryError:
        code, message = InvalidRequest.code, "it has too many names"
    except OSError as exc:
        code = NoSpace.code if exc.errno in FULL else BackendUnavailable.code
        message = str(exc)
    except BaseException as exc:
        code, message = HutchError.code, repr(exc)
    answer = {"code": code, "message": f"cannot unpack a layer: {message[:1000]}"} if code else {}
    os.write(out, json.dumps(answer).encode())
    os._exit(0)


def _confine(tar: int, layer: int, out: int, ranged: bool, most_bytes: int) -> None:
    if ranged:
        linux.take_root_ids()
    os.umask(0)
    quiet = linux.NOSUID | linux.NODEV | linux.NOEXEC
    linux.mount("", "/", None, linux.REC | linux.PRIVATE)
    linux.mount("stage", _STAGE, "tmpfs", quiet, "size=64k,nr_inodes=8,mode=755")
    os.mkdir(_STAGE + "/layer")
    linux.attach_mount(layer, _STAGE, "/layer")
    linux.pivot(_STAGE)
    os.chdir("/layer")
    os.chroot(".")
    # Close all descriptors but the standard ones and these two.
    low = 3
    for fd in (*sorted((tar, out)), 1 << 20):
        os.closerange(low, fd)
        low = fd + 1
    limits = {"FSIZE": most_bytes, "CPU": MAX_SECONDS, "AS": MAX_MEMORY}
    confine_parser(limits, (CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER), ["/"])


class LayerUnpacker:
    """Unpacks the tar of a layer into the root folder. Later entries replace earlier ones."""

    def __init__(self, source: TarSource, ranged: bool, most_bytes: int, most_entries: int) -> None:
        # Some programs that write layers leave out the zeros at the end.
        self._tar, self._ranged = TarReader(source, needs_end=False), ranged
        self._bytes, self._entries = most_bytes, most_entries
        self._known = {""}  # folders that exist
        self._times: list[tuple[str, float]] = []  # of folders: set last, as entries change them

    def run(self) -> None:
        """Raises InvalidTar for a bad archive, and OSError if there is no room for it."""
        for member in self._tar:
            self._entries -= 1
            self._bytes -= member.size
            if min(self._entries, self._bytes) < 0:
                raise OSError(errno.ENOSPC, "it has more than there is room for")
            member.mtime = min(max(member.mtime, 0), MAX_TIME)
            try:
                self._make(member)
            except (OSError, ValueError) as exc:
                if isinstance(exc, OSError) and exc.errno in FULL:
                    raise
                raise InvalidTar(f"{member.name[:200]!r}: {exc}") from None
        for path, mtime in reversed(self._times):
            try:
                os.utime(path, (mtime, mtime), follow_symlinks=False)
            except OSError:
                continue  # something else took its place

    def _make(self, member: TarMember) -> None:
        if any(key.startswith("GNU.sparse") for key in member.extra):
            raise InvalidTar("sparse files in an unsupported format")
        path = _inside(member.name)
        parent, _, name = path.rpartition("/")
        kind = FOLDER if member.kind in FILES and member.name.endswith("/") else member.kind
        if name.startswith(WHITEOUT):
            self._see_to(parent)
            self._remove_below(parent, name)
        elif kind == FOLDER and path:
            self._see_to(parent)
            self._make_folder(path, links=False)
            self._known.add(path)
            self._dress(path, member, chmod=True)
            self._times.append((path, member.mtime))
        elif kind == FOLDER:
            return  # each box has its own root
        elif not path:
            raise InvalidTar("it has no name")
        elif kind in FILES or kind in (HARD_LINK, SYMLINK, FIFO):
            self._see_to(parent)
            self._replace(path, member)
        elif kind not in DEVICES:  # devices are skipped: a box has its own
            raise InvalidTar(f"an entry of the unsupported kind {kind!r}")

    def _replace(self, path: str, member: TarMember) -> None:
        target = _inside(member.target) if member.kind == HARD_LINK else member.target
        if member.kind == HARD_LINK and target == path:
            return
        for again in (True, False):
            try:
                if member.kind == HARD_LINK:
                    os.link(target, path, follow_symlinks=False)
                    return
                if member.kind == SYMLINK:
                    os.symlink(target, path)
                elif member.kind == FIFO:
                    os.mkfifo(path, member.mode & 0o777)
                else:
                    self._write(path, member)
                break
            except FileExistsError:
                if not again:
                    raise
                self._clear(path)
        self._dress(path, member)
        os.utime(path, (member.mtime, member.mtime), follow_symlinks=False)

    def _write(self, path: str, member: TarMember) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(path, flags, member.mode & 0o777), "wb", 0) as file:
            while data := self._tar.read():
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]

    def _dress(self, path: str, member: TarMember, *, chmod: bool = False) -> None:
        """Set its owner and attributes and, with `chmod`, its mode."""
        owner = _owner(member)
        if self._ranged and (chmod or owner != (0, 0)):
            os.chown(path, *owner, follow_symlinks=False)
        if chmod:
            os.chmod(path, member.mode)
        for key, value in member.extra.items():
            attribute = key.removeprefix(ATTRIBUTE)
            if attribute.startswith("user.") and not attribute.startswith("user.overlay."):
                try:
                    os.setxattr(path, attribute, value, follow_symlinks=False)
                except OSError:
                    continue  # the file system may have no room for it, or no attributes

    def _see_to(self, path: str) -> None:
        """Make sure that a folder exists. A link will do, if it leads to a folder of this layer."""
        end = len(path)
        while path[:end] not in self._known:
            end = max(path.rfind("/", 0, end), 0)
        while end < len(path):
            end = path.find("/", end + 1)
            end = len(path) if end < 0 else end
            self._make_folder(path[:end], links=True)
            self._known.add(path[:end])

    def _make_folder(self, path: str, *, links: bool) -> None:
        try:
            os.mkdir(path, 0o755)
            return
        except FileExistsError:
            found = os.lstat(path)
        if stat.S_ISDIR(found.st_mode) or (links and os.path.isdir(path)):
            return
        if links and not stat.S_ISCHR(found.st_mode):
            raise InvalidTar("the parent of a file is not a folder")
        self._clear(path)
        os.mkdir(path, 0o755)
        if stat.S_ISCHR(found.st_mode):  # a whiteout: hide the one in the layers below
            _hide_below(path)

    def _remove_below(self, parent: str, name: str) -> None:
        """Remove from the layers below: one path, or everything in a folder."""
        removed = name.removeprefix(WHITEOUT)
        path = f"{parent}/{removed}" if parent else removed
        if name == OPAQUE:
            _hide_below(parent or ".")
        elif name.startswith(OTHER_MARKS):
            return  # metadata of AUFS, which is obsolete
        elif removed in ("", ".", ".."):
            raise InvalidTar("a whiteout without a name")
        else:
            try:
                os.mknod(path, stat.S_IFCHR, 0)
            except FileExistsError:
                if stat.S_ISDIR(os.lstat(path).st_mode):
                    _hide_below(path)  # the folder is of this layer, and stays

    def _clear(self, path: str) -> None:
        """Remove what this layer made here before, whatever it is."""
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return
        self._known = {""}
        folders = [path]
        for folder in folders:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    else:
                        os.unlink(entry.path)
        for folder in reversed(folders):
            os.rmdir(folder)


def _hide_below(folder: str) -> None:
    try:
        os.setxattr(folder, HIDES, b"y")
    except OSError as exc:
        text = f"layers need a file system that keeps attributes of files ({exc.strerror})"
        raise OSError(errno.ENOSPC, text) from None


def _inside(name: str) -> str:
    """The path below the root for a name in a tar; "" for the root itself.

    Raises InvalidTar if the name contains `..`.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidTar(f"{name[:200]!r} leads out of it")
    return "/".join(parts)


def _owner(member: TarMember) -> tuple[int, int]:
    """The ids of its owner. Ids that a box does not have become those of `nobody`."""
    found = []
    for key, field in (("uid", member.owner[:8]), ("gid", member.owner[8:])):
        text = member.extra.get(key)
        value = int(text) if text is not None else number(field)
        found.append(value if 0 <= value <= MAX_ID else NOBODY)
    return found[0], found[1]
