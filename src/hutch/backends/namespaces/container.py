"""Whether we run in a container, and which options it needs for boxes."""

from __future__ import annotations

import errno
import os

from hutch.backends import linux

from . import rights
from .rights import ADVICE

DOCKER, PODMAN = "/.dockerenv", "/run/.containerenv"
RESTRICTED = "/proc/sys/kernel/apparmor_restrict_unprivileged_userns"

# Calls that Docker's filter refuses with EPERM. The kernel itself refuses these arguments with
# other errors.
_CALLS = (
    ("pivot_root", b"", b""),
    ("open_tree", -1, b"", 0),
    ("move_mount", -1, b"", -1, b"", 0),
    ("mount_setattr", -1, b"", 0, b"", 0),
    ("keyctl", 9999, 0, 0, 0, 0),
)


def is_container() -> bool:
    return os.path.exists(DOCKER) or os.path.exists(PODMAN)


def program() -> str:
    return "docker run" if os.path.exists(DOCKER) else "podman run"


def missing_options() -> list[str]:
    """The options of `docker run` or `podman run` without which no boxes can be made in here.

    Forks, so it is for processes with one thread.
    """
    if not is_container():
        return []
    options = []
    if _is_filtered():
        options.append("--security-opt seccomp=unconfined")
    if _is_masked():
        all_paths = "systempaths=unconfined" if os.path.exists(DOCKER) else "unmask=ALL"
        options.append(f"--security-opt {all_paths}")
    if read("/proc/self/attr/current").endswith("(enforce)"):
        options.append("--security-opt apparmor=unconfined")
    mine = rights.find()
    if mine.is_weak_root:
        options += [f"--cap-add {name}" for name in mine.lacks]
    if read(RESTRICTED) == "1" and not mine.is_admin:
        options += ["--cap-add SYS_ADMIN"] if mine.is_root else ["--user 0", "--cap-add SYS_ADMIN"]
    folders = ("/tmp", "/run") if mine.ranged else ("/tmp",)
    options += [f"--tmpfs {folder}" for folder in folders if not os.access(folder, os.W_OK)]
    return options


def explain(error: Exception) -> str:
    """Why no box can be made here, and what to do."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if options := missing_options():
        return (
            f"this container does not allow boxes ({reason}): "
            f"add {' '.join(options)} to `{program()}`"
        )
    return f"{reason}. {ADVICE}"


def _is_filtered() -> bool:
    """Whether a seccomp filter refuses the calls that make boxes. Tried in a child."""
    if "Seccomp:\t0" in read("/proc/self/status"):
        return False
    pid = os.fork()
    if not pid:
        code = 0
        try:
            code = int(_has_refusal())
        finally:
            os._exit(code)  # the child must never run its parent's code
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0


def _has_refusal() -> bool:
    try:
        linux.unshare(linux.NEWUSER | linux.NEWNS)
    except OSError as exc:
        return exc.errno == errno.EPERM
    for name, *args in _CALLS:
        try:
            linux.call(name, *args)
        except OSError as exc:
            if exc.errno == errno.EPERM:
                return True
    return False


def _is_masked() -> bool:
    """Whether parts of /proc are covered: then the kernel does not allow to mount another /proc.

    The kernel's own mount point in it does not count.
    """
    points = [line.split(" ")[4] for line in read("/proc/self/mountinfo").splitlines()]
    return any(p.startswith("/proc/") and p != "/proc/sys/fs/binfmt_misc" for p in points)


def read(path: str) -> str:
    """The content of a small file; "" if it cannot be read."""
    try:
        with open(path) as file:
            return file.read(1 << 20).strip()
    except OSError:
        return ""
