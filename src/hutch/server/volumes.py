"""Workspaces as file systems: an ext4 image file for each, so that the kernel enforces its quota.

`OWNER/NAME.img` is mounted at `OWNER/NAME.mnt`, and the workspace is the folder `files` in it.
Without the mount there is no such folder, so a box never gets the unlimited folder below it.

Images are sparse: they take as much of the disk as their files do, and removed files give it back.
An image is made under another name and renamed when it is complete, so a crash leaves no incomplete
image. A loop device is freed with its last mount, even if that is in a box.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hutch.errors import BackendUnavailable
from hutch.types import MiB

MIN_SIZE = 4 * MiB
IMAGE, HALF_MADE, MOUNTPOINT = ".img", ".img.new", ".mnt"
TOOLS = ("mkfs.ext4", "e2fsck", "mount", "umount")
LOOP_CONTROL = "/dev/loop-control"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Nothing is zeroed in advance: a sparse file reads as zeros.
_MKFS = ("-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard")
_MOUNT = "loop,nosuid,nodev,discard,noinit_itable,errors=remount-ro"
_REPAIRED = 1  # exit code of e2fsck


@dataclass(frozen=True)
class Volume:
    image: Path

    @property
    def mountpoint(self) -> Path:
        return self.image.with_suffix(MOUNTPOINT)

    @property
    def folder(self) -> Path:
        """The files of the workspace. There only while it is mounted."""
        return self.mountpoint / "files"

    @property
    def size(self) -> int | None:
        """Of the whole file system; None if there is no image."""
        try:
            return self.image.stat().st_size
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return self.size is not None

    def used(self) -> int:
        """Bytes in use, those of removed files that are still open included."""
        try:
            info = os.statvfs(self.folder)
        except OSError:
            return self.image.stat().st_blocks * 512  # not mounted
        return (info.f_blocks - info.f_bfree) * info.f_frsize

    def provide(self, size: int | None) -> None:
        """Make and mount it as needed, so that its folder can be used.

        `size` is that of a new one. Raises BackendUnavailable if a tool fails, OSError if there
        is no room for it.
        """
        if size is not None and not self.exists():
            self._make(_rounded(size))
        self._mount()

    def unmount(self) -> bool:
        """Unmount it. Returns whether that worked: not while a process of the host uses it.

        Boxes have mounts of their own, and are not affected.
        """
        with suppress(BackendUnavailable):
            while os.path.ismount(self.mountpoint):
                _run("umount", str(self.mountpoint))
        return not os.path.ismount(self.mountpoint)

    def remove(self) -> None:
        """Remove it with all its files. Nothing happens if it does not exist."""
        if not self.unmount():
            _run("umount", "--lazy", str(self.mountpoint))
        self.image.unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.mountpoint.rmdir()

    def _make(self, size: int) -> None:
        self.image.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self.image.with_suffix(HALF_MADE)
        new.unlink(missing_ok=True)
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(fd, size)
                _run("mkfs.ext4", *_MKFS, str(new))
                os.fsync(fd)
            finally:
                os.close(fd)
            new.rename(self.image)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def _mount(self) -> None:
        if not os.path.ismount(self.mountpoint):
            self.mountpoint.mkdir(mode=0o700, exist_ok=True)
            # A box may still have it mounted. Then it must not be checked, and `mount` uses its
            # loop device: a second one on the same image would destroy the file system.
            if not self._is_attached():
                _run("e2fsck", "-p", str(self.image), allowed=_REPAIRED)
            _run("mount", "-t", "ext4", "-o", _MOUNT, str(self.image), str(self.mountpoint))
        self.folder.mkdir(mode=0o700, exist_ok=True)

    def _is_attached(self) -> bool:
        """Whether a loop device has its image."""
        image = os.path.realpath(self.image)
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            with suppress(OSError):  # detached just now
                if os.fsdecode(file.read_bytes()).removesuffix("\n") == image:
                    return True
        return False


def volumes_in(root: Path) -> Iterator[Volume]:
    """The volumes of all owners."""
    yield from map(Volume, sorted(root.glob(f"*/*{IMAGE}")))


def remove_half_made(root: Path) -> None:
    for image in root.glob(f"*/*{HALF_MADE}"):
        image.unlink(missing_ok=True)


def obstacle(folder: Path) -> str | None:
    """Why volumes do not work here, and what to do about it; None if a trial worked."""
    if os.geteuid() != 0:
        return "only root can mount file systems: run the server as root"
    if missing := [name for name in TOOLS if shutil.which(name, path=_PATH) is None]:
        return f"{', '.join(missing)} not found: install e2fsprogs and util-linux (mount)"
    if not os.path.exists(LOOP_CONTROL):
        return (
            f"there is no {LOOP_CONTROL}: load the module (`modprobe loop`), or give loop devices "
            "to the container that the server runs in"
        )
    trial = Volume(folder / f".trial{IMAGE}")
    try:
        trial.remove()
        trial.provide(MIN_SIZE)
        trial.remove()
    except (BackendUnavailable, OSError) as exc:
        with suppress(BackendUnavailable, OSError):
            trial.remove()
        return f"mounting an ext4 image failed: {exc}"
    return None


def _rounded(size: int) -> int:
    """To whole pages, for loop devices."""
    return max(MIN_SIZE, size // 4096 * 4096)


def _run(*command: str, allowed: int = 0) -> None:
    """Raises BackendUnavailable, with what the command said, if it fails."""
    env = {"PATH": _PATH, "LC_ALL": "C"}
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env
        )
    except OSError as exc:
        raise BackendUnavailable(f"cannot run {command[0]}: {exc.strerror}") from None
    if ended.returncode not in (0, allowed):
        output = " ".join((ended.stderr or ended.stdout).split())[:500]
        raise BackendUnavailable(f"{command[0]} failed ({ended.returncode}): {output}")
