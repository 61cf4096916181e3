"""Control groups, version 1 and 2: limits for the memory, processes and cpu time of a box.

There is one group per box and controller, for user programs only. The agent stays outside, so that
it can still answer when the programs of the box have used up everything. A program joins by
writing to a file that was opened outside of the box: the kernel checks the rights of the opener.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass

from hutch.types import Limits

PERIOD = 100_000  # microseconds, for which a quota of cpu time is given
WANTED = ("memory", "pids", "cpu")
ROOM = "hutch-host"  # the child group that `_make_room` moves us to
COUNTING = "cpuacct"  # has no limits, only counts; in version 2 it is part of cpu


@dataclass(frozen=True)
class Hierarchy:
    """Where we can make groups, and for which controllers."""

    version: int
    folders: dict[str, str]  # controller -> folder in which we may make groups
    missing: dict[str, str]  # controller -> why not


@dataclass(frozen=True)
class Mounts:
    """What /proc says about this process and the machine's cgroup mounts."""

    v1: dict[str, str]  # controller -> mount point
    v2: str | None
    own_v1: dict[str, str]  # controller -> our path in it
    own_v2: str


def parse(mountinfo: str, own: str) -> Mounts:
    """Parse the contents of /proc/self/mountinfo and /proc/self/cgroup. Touches nothing."""
    v1: dict[str, str] = {}
    v2 = None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = [*after.split(" "), "", ""][:3]
        point = before.split(" ")[4].replace("\\040", " ")
        if kind == "cgroup2":
            v2 = v2 or point
        elif kind == "cgroup":
            for option in options.split(","):
                if option in (*WANTED, COUNTING):
                    v1[option] = point
    own_v1, own_v2 = {}, "/"
    for line in own.splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" and not names:
            own_v2 = path
        for name in names.split(","):
            own_v1[name] = path
    return Mounts(v1, v2, own_v1, own_v2)


def find() -> Hierarchy:
    """Find out where we can make groups, by trying it."""
    with open("/proc/self/mountinfo") as info, open("/proc/self/cgroup") as own:
        mounts = parse(info.read(), own.read())
    if mounts.v1.keys() & set(WANTED):
        return _find_v1(mounts)
    if mounts.v2:
        return _find_v2(mounts)
    return Hierarchy(0, {}, dict.fromkeys(WANTED, "no cgroup file system is mounted"))


def _find_v1(mounts: Mounts) -> Hierarchy:
    folders, missing = {}, {}
    for name in (*WANTED, COUNTING):
        point = mounts.v1.get(name)
        if point is None:
            missing[name] = "this controller is not mounted"
            continue
        folder = os.path.join(point, mounts.own_v1.get(name, "/").strip("/"))
        if not os.path.isdir(folder):
            folder = point  # a container shows its own group as the root
        if why := _try(folder):
            missing[name] = why
        else:
            folders[name] = folder
    missing.pop(COUNTING, None)  # no limit depends on it
    return Hierarchy(1, folders, missing)


def _find_v2(mounts: Mounts) -> Hierarchy:
    """The top of the tree if we may change it; else our own group, if it was delegated to us."""
    assert mounts.v2
    # If we made room before, we are in that child group.
    own = os.path.join(mounts.v2, mounts.own_v2.strip("/")).removesuffix(f"/{ROOM}")
    why = "not permitted"
    for folder in (os.path.join(mounts.v2, "hutch"), own):
        try:
            if folder != own:
                _enable(mounts.v2)
                os.makedirs(folder, exist_ok=True)
            elif os.path.exists(f"{own}/cgroup.events"):
                _make_room(own)
            else:
                # Only the top of the whole machine has no such file: do not move its processes.
                continue
            _enable(folder)
        except OSError as exc:
            why = f"{folder}: {exc.strerror}"
            continue
        with open(f"{folder}/cgroup.subtree_control") as file:
            have = file.read().split()
        if not have:
            continue
        absent = {name: "not enabled for this group" for name in WANTED if name not in have}
        return Hierarchy(2, {name: folder for name in WANTED if name in have}, absent)
    return Hierarchy(2, {}, dict.fromkeys(WANTED, why))


def _enable(folder: str) -> None:
    with open(f"{folder}/cgroup.controllers") as file:
        have = file.read().split()
    for name in WANTED:
        if name in have:
            with open(f"{folder}/cgroup.subtree_control", "w") as file:
                file.write(f"+{name}")


def _make_room(own: str) -> None:
    """Move the processes of a group to a child: controllers need a group without processes."""
    leaf = f"{own}/{ROOM}"
    os.makedirs(leaf, exist_ok=True)
    with open(f"{own}/cgroup.procs") as file:
        pids = file.read().split()
    for pid in pids:
        try:
            with open(f"{leaf}/cgroup.procs", "w") as file:
                file.write(pid)
        except ProcessLookupError:
            continue


def _try(folder: str) -> str:
    """Make a group and remove it. Returns why that failed, or ""."""
    path = f"{folder}/hutch-{os.getpid()}-try"
    try:
        os.mkdir(path)
        os.rmdir(path)
    except OSError as exc:
        return f"{folder}: {exc.strerror}"
    return ""


class Group:
    """The group of one box."""

    def __init__(self, hierarchy: Hierarchy, name: str, limits: Limits) -> None:
        """Make the group. Raises OSError, and leaves nothing behind then."""
        self._version = hierarchy.version
        self._folders = {c: f"{folder}/{name}" for c, folder in hierarchy.folders.items()}
        made: list[str] = []
        try:
            for folder in dict.fromkeys(self._folders.values()):
                os.mkdir(folder)
                made.append(folder)
            for controller, folder in self._folders.items():
                for file, value in settings(self._version, controller, limits):
                    _write(f"{folder}/{file}", value)
        except OSError:
            for folder in made:
                os.rmdir(folder)
            raise

    def open(self) -> list[int]:
        """A descriptor per hierarchy: a process joins by writing "0" to each."""
        folders = dict.fromkeys(self._folders.values())
        # Moving a process takes a lock of the whole machine, for up to 10 ms; moving a task does
        # not. A fork with one thread joins, so both are the same. Version 2 has no such file.
        file = "tasks" if self._version == 1 else "cgroup.procs"
        return [os.open(f"{f}/{file}", os.O_WRONLY | os.O_CLOEXEC) for f in folders]

    def add(self, pid: int) -> None:
        """Put a process with one thread into the group."""
        for fd in self.open():
            try:
                os.write(fd, str(pid).encode())
            finally:
                os.close(fd)

    def open_kills(self) -> int | None:
        """Open the file that `count_kills` reads. None if there is no memory controller."""
        file = "memory.oom_control" if self._version == 1 else "memory.events"
        try:
            path = f"{self._folders['memory']}/{file}"
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (KeyError, OSError):
            return None

    def read(self) -> dict[str, float | None]:
        if self._version == 1:
            spent = self._number(COUNTING, "cpuacct.usage")
            return {
                "memory": self._number("memory", "memory.usage_in_bytes"),
                "pids": self._number("pids", "pids.current"),
                "cpu_seconds": None if spent is None else spent / 1e9,
                "oom_kills": self._field("memory", "memory.oom_control", "oom_kill"),
            }
        usage = self._field("cpu", "cpu.stat", "usage_usec")
        return {
            "memory": self._number("memory", "memory.current"),
            "pids": self._number("pids", "pids.current"),
            "cpu_seconds": None if usage is None else usage / 1e6,
            "oom_kills": self._field("memory", "memory.events", "oom_kill"),
        }

    def remove(self) -> None:
        """Remove it. Its processes are dead or dying; the kernel may take a moment to see that."""
        for folder in dict.fromkeys(self._folders.values()):
            for _ in range(200):
                try:
                    os.rmdir(folder)
                    break
                except FileNotFoundError:
                    break
                except OSError as exc:
                    if exc.errno != errno.EBUSY:
                        break
                    time.sleep(0.005)

    def _number(self, controller: str, file: str) -> float | None:
        text = self._text(controller, file)
        return float(text) if text and text.strip().isdigit() else None

    def _field(self, controller: str, file: str, name: str) -> float | None:
        for line in (self._text(controller, file) or "").splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
        return None

    def _text(self, controller: str, file: str) -> str | None:
        folder = self._folders.get(controller)
        if folder is None:
            return None
        try:
            with open(f"{folder}/{file}") as opened:
                return opened.read()
        except OSError:
            return None


def with_process(used: dict[str, float | None], pidfd: int) -> dict[str, float | None]:
    """Add what a process outside of the group uses: the agent of a box is part of the box."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            pid = _fields(file.read())["Pid"]
        with open(f"/proc/{pid}/stat") as file:
            times = file.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/status") as file:
            status = _fields(file.read())
    except (OSError, KeyError):
        return used  # it has just ended
    more = {
        "memory": _private_memory(pid, status),
        "pids": int(status.get("Threads", 1)),
        # utime and stime, see proc(5).
        "cpu_seconds": (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
    }
    return used | {name: value + more[name] for name in more if (value := used[name]) is not None}


def _private_memory(pid: str, status: dict[str, str]) -> int:
    """Bytes that it does not share: it is a fork, and shares most memory with its parent."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            rollup = _fields(file.read())
        return sum(_kib(rollup.get(name)) for name in ("Private_Clean", "Private_Dirty"))
    except OSError:  # an ordinary user may not read it: count all anonymous memory
        return _kib(status.get("RssAnon"))


def _kib(text: str | None) -> int:
    return int(text.split()[0]) * 1024 if text else 0


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def settings(version: int, controller: str, limits: Limits) -> list[tuple[str, str]]:
    """(file, value) for one controller, in the order they must be written."""
    quota = str(int(limits.cpus * PERIOD))
    table = {
        (1, "memory"): [
            ("memory.limit_in_bytes", str(limits.memory)),
            ("memory.memsw.limit_in_bytes", str(limits.memory)),
            # Memory of sockets (not only of TCP) is counted only if this is set.
            ("memory.kmem.tcp.limit_in_bytes", str(limits.memory // 4)),
        ],
        (1, "pids"): [("pids.max", str(limits.pids))],
        (1, COUNTING): [],
        (1, "cpu"): [("cpu.cfs_period_us", str(PERIOD)), ("cpu.cfs_quota_us", quota)],
        (2, "memory"): [
            ("memory.max", str(limits.memory)),
            ("memory.swap.max", "0"),
            ("memory.oom.group", "0"),
        ],
        (2, "pids"): [("pids.max", str(limits.pids))],
        (2, "cpu"): [("cpu.max", f"{quota} {PERIOD}")],
    }
    return table[version, controller]


def _write(path: str, value: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(value)
    except FileNotFoundError:
        # A kernel without swap, for example, has no such file, and nothing to limit.
        if not any(word in os.path.basename(path) for word in ("sw", "oom", "tcp")):
            raise


def count_kills(fd: int) -> int:
    """How many processes of a box the OOM killer has ended so far."""
    try:
        lines = os.pread(fd, 4096, 0).splitlines()
    except OSError:
        return 0  # the box is gone, and its group with it
    return next((int(line.split()[1]) for line in lines if line.startswith(b"oom_kill ")), 0)


def sweep(hierarchy: Hierarchy) -> None:
    """Remove groups whose launcher was killed before it could remove them."""
    for folder in set(hierarchy.folders.values()):
        for name in os.listdir(folder):
            owner = name.removeprefix("hutch-").partition("-")[0]
            if name.startswith("hutch-") and owner.isdigit() and not _lives(owner):
                try:
                    os.rmdir(f"{folder}/{name}")
                except OSError:
                    continue  # still in use, or gone


def _lives(pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # Zombies (Z), and those that are just being reaped (X), have ended.
            return file.read().rpartition(") ")[2][:1] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False
