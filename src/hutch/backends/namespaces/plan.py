"""What a box is made of, as values. Nothing here touches the machine.

A box's root is a list of steps, which `launch` carries out in order, similar to bubblewrap. Paths
are as the box will see them; `launch` puts its own prefix before them.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hutch.backends.linux.folders import MASKED_FILES, MASKED_FOLDERS, READ_ONLY
from hutch.errors import InvalidRequest
from hutch.types import Limits, Mount

# Where the uids of boxes begin on the host, if root runs us: systemd's documentation reserves a
# range for containers that ends at 0x6FFFFFFF, and nspawn picks from its start.
UID_BASE = 0x10000000
UIDS_PER_BOX = 65536
MAX_BOXES = 24_000
# The uids that own files of imported images on the host: just below, in a range of no box.
STORE_BASE = UID_BASE - UIDS_PER_BOX
# From here on, the ids of a zygote are those of the machine, if mounts cannot be id-mapped.
OTHER_IDS = UIDS_PER_BOX * (MAX_BOXES + 1)
HIDES = "user.overlay.opaque"  # on a folder in a layer: hides it in the layers below

# Their descriptors go through a socket in one message, which can have 253.
MAX_LAYERS = 160

USER = 1000
AGENT = 65533  # uid of the guest, which images do not use
WORKDIR = "/workspace"
HOME = "/home/user"
OWN = "/.hutch"
PRIVATE = OWN + "/run"
LOOP = "/.hutch/bash"
ALIASES = "/.hutch/aliases"
LIB = "/.hutch/lib"  # on the path of every kernel, after all else
PICKLER = LIB + "/cloudpickle"
SOURCE = "/.hutch/src"  # our own code; a preloaded process needs it, and no box sees it

# An image with Python packages: the interpreter, unless it is below /usr, and the packages. Both
# are read-only; what is installed in a box goes to a virtual environment of the box's own.
INTERPRETER, ENVIRONMENT = "/opt/python", "/opt/env"
LIBRARIES = "/opt/lib"  # a shared libpython that would be looked for on the host's path
VENV = HOME + "/.venv"

KERNELS_THAT_SLEEP = 4  # each has its own part of the box's swap file, as large as its memory

# Device nodes that programs expect, and that are harmless.
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

# From the machine's /etc: what programs need to run, and nothing secret.
# Folders are mounted, files are copied into an /etc of our own.
ETC_FOLDERS = (
    "/etc/alternatives",
    "/etc/ssl/certs",
    "/etc/fonts",
    "/etc/terminfo",
    "/etc/perl",
    "/etc/python3",
    "/etc/java-17-openjdk",
    "/etc/java-21-openjdk",
    "/etc/vim",
)
ETC_FILES = (
    "/etc/ld.so.cache",
    "/etc/ssl/openssl.cnf",
    "/etc/localtime",
    "/etc/protocols",
    "/etc/services",
    "/etc/mime.types",
    "/etc/magic",
    "/etc/ca-certificates.conf",
    "/etc/debian_version",
    "/etc/lsb-release",
)
TOP = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")

BOOT_ID = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True)
class Python:
    """The interpreter and the packages of an image, as its boxes see them."""

    executable: str
    version: str  # "3.11"
    preload: tuple[str, ...] = ()  # modules that are imported before there is a box

    @property
    def packages(self) -> str:
        return f"{ENVIRONMENT}/lib/python{self.version}/site-packages"

    @property
    def own_packages(self) -> str:
        return f"{VENV}/lib/python{self.version}/site-packages"


@dataclass(frozen=True)
class BoxImage:
    """What a box sees of the machine and of its packages. Laid out once, by the zygote."""

    mounted: dict[str, str]  # place in the box -> host path; read-only
    links: dict[str, str]  # path -> target
    files: dict[str, bytes]  # path -> content
    python: Python | None = None

    @property
    def tops(self) -> tuple[str, ...]:
        """The folders that a box takes over as a whole."""
        shared = ("/opt", "/.hutch")  # others put things there too
        own = {p for p in self.mounted if p.startswith(shared) and not p.startswith(SOURCE)}
        own |= {LIBRARIES for path in self.links if path.startswith(LIBRARIES)}
        tops = {"/" + path.split("/")[1] for path in (*self.mounted, *self.files)}
        return tuple(sorted(own | tops - {*shared}))


class SetupStep(NamedTuple):
    """One thing to do. `do` names a function of launch; the other fields are its arguments."""

    do: str
    path: str
    text: str = ""
    mode: int = 0o755
    mine: bool = False  # owned by the box's user


@dataclass(frozen=True)
class Imported:
    """A root made of layers, whose descriptors come along, instead of this machine's."""

    layers: int
    user: str
    uid: int
    gid: int
    env: dict[str, str]
    files: dict[str, str]  # in /etc, in place of the image's


@dataclass(frozen=True)
class BoxPlan:
    """Everything a fork of the zygote must know to become a box."""

    disk: str  # options of the file system to which the box writes
    layers: int  # of the root; 0: the steps alone make it
    steps: tuple[SetupStep, ...]
    attach: tuple[str, ...]  # targets of the mounts whose descriptors come along, in order
    writable: tuple[str, ...]  # trees that user code may change
    ranged: bool  # a range of uids: the agent has one of its own
    user_is_root: bool  # that of this machine, without its rights; the agent then has another uid
    user: int
    group: int
    place: dict[str, Any] = field(default_factory=dict)
    rlimits: tuple[tuple[str, int], ...] = ()


def uid_range(number: int) -> int:
    """The first uid of box `number`, as the zygote counts: its own namespace starts at 0."""
    return UIDS_PER_BOX * (number + 1)


def id_maps(
    slot: int | None,
    user: tuple[int, int] = (USER, USER),
    owner: tuple[int, int] | None = None,
    *,
    stored: bool = False,
) -> tuple[str, str]:
    """A box's map of user ids, and of group ids, to those of the zygote.

    `owner`: who the box's `user` is on this machine, where mounts cannot be id-mapped. `stored`:
    all other ids are those of the files of imported images, for the same reason.
    """
    if slot is None:
        return f"{USER} 0 1", f"{USER} 0 1"
    base = OTHER_IDS + STORE_BASE if stored else uid_range(slot)
    if owner is None:
        return f"0 {base} {UIDS_PER_BOX}", f"0 {base} {UIDS_PER_BOX}"
    uids, gids = (
        "\n".join(
            f"{first} {outside} {count}"
            for first, outside, count in (
                (0, base, id),
                (id, OTHER_IDS + owns, 1),
                (id + 1, base + id + 1, UIDS_PER_BOX - id - 1),
            )
            if count
        )
        for id, owns in zip(user, owner, strict=True)
    )
    return uids, gids


def plan(
    image: BoxImage,
    limits: Limits,
    *,
    mounts: tuple[Mount, ...],
    files: frozenset[str],
    user: str,
    workdir: str,
    slot: int | None,
    cgroup: bool,
    machine_id: str = "",
    loop_script: str = "",
    kernel_path: tuple[str, ...] | None = None,
    root: Imported | None = None,
    user_is_root: bool = False,
) -> BoxPlan:
    """The plan of a box. `slot` None: one uid only. `files`: targets of mounts that are files.

    `root`: used instead of the image's files. `kernel_path`: the sys.path of kernels that are
    forked from a guest in which the image's packages are already imported. Raises InvalidRequest
    for an unknown user.
    """
    uid = root.uid if root else uid_of(user, ranged=slot is not None)
    own = ["/tmp", "/var/tmp", HOME, PRIVATE]
    if WORKDIR not in {m.target for m in mounts}:
        own.append(WORKDIR)
    boot_id = uuid.uuid5(uuid.NAMESPACE_OID, machine_id)
    steps = [
        *(_imported(root) if root else _of_this_machine(image)),
        *_system(limits),
        *(
            SetupStep("room", path, mode=_mode(path), mine=path not in ("/tmp", "/var/tmp"))
            for path in own
        ),
        *(_virtual_environment(image.python) if image.python else ()),
        SetupStep("link", ALIASES + "/python", "/usr/bin/python3"),
        SetupStep("file", LOOP, loop_script, 0o644),
        SetupStep("file", "/.hutch/machine-id", machine_id + "\n", 0o644),
        # The machine's own id would tell boxes which machine this is, and when it was booted.
        SetupStep("file", "/.hutch/boot-id", f"{boot_id}\n", 0o444),
        SetupStep("cover", BOOT_ID, "/.hutch/boot-id"),
        *(SetupStep("spot", m.target, "file" if m.target in files else "") for m in mounts),
    ]
    # Larger than the disk, so that writes to a full disk fail with ENOSPC before SIGXFSZ. This also
    # limits the swap file.
    largest = max(limits.disk_size + (1 << 20), KERNELS_THAT_SLEEP * limits.memory)
    rlimits = [("NOFILE", limits.open_files), ("FSIZE", largest)]
    if not cgroup:
        rlimits += [("NPROC", limits.pids), ("DATA", limits.memory)]
    writable = (*own, "/dev/shm", *(m.target for m in mounts if not m.read_only))
    env = root.env if root else _environment(image) if image.python else {}
    disk = f"size={limits.disk_size},nr_inodes={_inodes(limits)},mode=755"
    return BoxPlan(
        layers=root.layers if root else 0,
        disk=disk,
        steps=tuple(steps),
        attach=tuple(m.target for m in mounts),
        writable=("/",) if root else writable,  # owners and modes of its files decide
        ranged=slot is not None,
        user_is_root=user_is_root,
        user=uid,
        group=root.gid if root else uid,
        place={
            "workdir": workdir,
            "user": root.user if root else user,
            "private": PRIVATE,
            "loop": LOOP,
            "may_switch_user": slot is not None,
            "memory": None if cgroup else limits.memory,
            "rooms": tuple(room for room in own if room != PRIVATE),
            "lib": LIB,
            "swap_size": limits.memory,
            "swap_slots": KERNELS_THAT_SLEEP,
            "env": env,
            "kernel": None
            if kernel_path is None
            else {
                "path": list(kernel_path),
                "prefix": VENV,
                "executable": VENV + "/bin/python3",
            },
        },
        rlimits=tuple(rlimits),
    )


def _of_this_machine(image: BoxImage) -> list[SetupStep]:
    return [
        *(SetupStep("show", path) for path in image.tops),
        *(
            SetupStep("link", path, target)
            for path, target in image.links.items()
            if path.count("/") == 1
        ),
        *(SetupStep("folder", path) for path in ("/run", "/var", "/var/lib", "/var/log", "/srv")),
        SetupStep("link", "/var/run", "../run"),
    ]


def _imported(root: Imported) -> list[SetupStep]:
    return [
        SetupStep("own", OWN, "size=1m,nr_inodes=64,mode=755"),
        SetupStep("show", LIB + "/hutch_kernel"),
        *(SetupStep("file", path, text, 0o644) for path, text in root.files.items()),
    ]


def _system(limits: Limits) -> list[SetupStep]:
    return [
        SetupStep("show", "/dev"),
        SetupStep("shm", "/dev/shm", f"size={limits.shared_memory},nr_inodes=4096,mode=1777"),
        # `max`, as the machine has 3,072 for all boxes together.
        SetupStep("terminals", "/dev/pts", "newinstance,ptmxmode=0666,mode=620,max=256"),
        SetupStep("proc", "/proc"),
        *(SetupStep("mask", f"/proc/{name}") for name in MASKED_FILES),
        *(SetupStep("hide", f"/proc/{name}") for name in MASKED_FOLDERS),
        *(SetupStep("freeze", f"/proc/{name}") for name in READ_ONLY),
    ]


def _virtual_environment(python: Python) -> list[SetupStep]:
    """Where `pip install` puts things: found before the image's packages, and gone with the box."""
    home = os.path.dirname(python.executable)
    folders = (
        VENV,
        VENV + "/bin",
        VENV + "/lib",
        os.path.dirname(python.own_packages),
        python.own_packages,
    )
    return [
        *(SetupStep("folder", path, mine=True) for path in folders),
        SetupStep(
            "file",
            VENV + "/pyvenv.cfg",
            f"home = {home}\ninclude-system-site-packages = false\n",
            0o644,
            True,
        ),
        SetupStep("link", VENV + "/bin/python3", python.executable, mine=True),
        SetupStep("link", VENV + "/bin/python", "python3", mine=True),
        SetupStep("file", VENV + "/bin/pip", _PIP, 0o755, True),
        SetupStep("link", VENV + "/bin/pip3", "pip", mine=True),
        SetupStep("file", python.own_packages + "/_image.pth", python.packages + "\n", 0o644, True),
    ]


_PIP = f"#!{VENV}/bin/python3\nimport runpy\nrunpy.run_module('pip', run_name='__main__')\n"


def _environment(image: BoxImage) -> dict[str, str]:
    env = {
        "PATH": f"{VENV}/bin:{ENVIRONMENT}/bin:"
        "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "VIRTUAL_ENV": VENV,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_RETRIES": "0",  # there is no network to wait for
        "ARROW_DEFAULT_MEMORY_POOL": "system",  # sleeping kernels need a pool that they can swap
    }
    if any(path.startswith(LIBRARIES + "/") for path in image.links):
        env["LD_LIBRARY_PATH"] = LIBRARIES
    return env


def uid_of(user: str, *, ranged: bool) -> int:
    """The uid of a user, by name or number, if no image has other users.

    `ranged`: the box has a range of uids. Raises InvalidRequest if the user is unknown, reserved,
    or needs such a range.
    """
    uids = {"user": USER, "root": 0, "nobody": 65534}
    if user in uids:
        uid = uids[user]
    elif user.isascii() and user.isdigit() and len(user) < 6 and int(user) < 65534:
        uid = int(user)
    else:
        raise InvalidRequest(f"no user {user!r} in a box: user, root, nobody, or a number")
    if uid == AGENT:
        raise InvalidRequest(f"uid {AGENT} is reserved for the guest")
    if uid != USER and not ranged:
        raise InvalidRequest(
            f"run by an ordinary user, a box has one user, 'user': {user!r} needs a range of uids, "
            "which Hutch has when root runs it"
        )
    return uid


def _inodes(limits: Limits) -> int:
    # One per 4 KiB, as a small ext4 has; never so few that `npm install` fails.
    return max(16_384, limits.disk_size // 4096)


def _mode(path: str) -> int:
    return 0o1777 if path in ("/tmp", "/var/tmp") else 0o700 if path == PRIVATE else 0o755


HOST_NAME = "box"

# In every box's /etc, besides what comes from the machine.
OWN_FILES = {
    "/etc/passwd": (
        "root:x:0:0:root:/root:/bin/sh\n"
        f"hutch:x:{AGENT}:{AGENT}:guest:/nonexistent:/usr/sbin/nologin\n"
        f"user:x:{USER}:{USER}:user:{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "/etc/group": f"root:x:0:\ntty:x:5:\nhutch:x:{AGENT}:\nuser:x:{USER}:\nnogroup:x:65534:\n",
    "/etc/nsswitch.conf": (
        "passwd: files\ngroup: files\nhosts: files dns\nservices: files\nprotocols: files\n"
    ),
    "/etc/hostname": HOST_NAME + "\n",
    "/etc/hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n",
    "/etc/resolv.conf": "",
    "/etc/profile": 'PS1="\\u@\\h:\\w\\$ "\n',
}
OWN_LINKS = {
    "/etc/os-release": "../usr/lib/os-release",
    "/etc/mtab": "../proc/self/mounts",
    "/etc/machine-id": "../.hutch/machine-id",  # each box has its own
    "/dev/fd": "/proc/self/fd",
    "/dev/stdin": "/proc/self/fd/0",
    "/dev/stdout": "/proc/self/fd/1",
    "/dev/stderr": "/proc/self/fd/2",
    "/dev/ptmx": "pts/ptmx",
}
