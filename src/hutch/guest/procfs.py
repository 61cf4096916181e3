"""The process table: killing whole trees, and a memory watchdog for boxes without a cgroup."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")

KILL_ONLY = 3  # rounds of kills before what is left is taken for a fork bomb

# Forks of the agent: their memory is mostly shared with it, and would be counted once for each.
helpers: set[int] = set()


@dataclass(frozen=True)
class Row:
    """A process in the table."""

    pid: int
    parent: int
    state: str
    started: int  # clock ticks since boot
    resident: int  # pages


@dataclass(frozen=True)
class Moment:
    """A point in time, to tell processes that started before it from those after it.

    The clock of the process table ticks a hundred times a second, and a shell runs ten commands
    in one tick. Within a tick, the last pid that was assigned decides. gVisor says 0 for that, so
    there it is what existed at that moment.
    """

    tick: int
    last_pid: int
    existing: frozenset[int] = frozenset()

    @classmethod
    def now(cls) -> Moment:
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
        with open("/proc/loadavg", "rb") as file:
            last_pid = int(file.read().split()[-1])
        if last_pid:
            return cls(tick, last_pid)
        return cls(tick, 0, frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()))

    def before(self, row: Row) -> bool:
        if row.started != self.tick:
            return row.started > self.tick
        return row.pid > self.last_pid and row.pid not in self.existing


def table() -> list[Row]:
    """Every process of the box, from /proc."""
    rows = (row_of(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [row for row in rows if row]


def row_of(pid: int) -> Row | None:
    """None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # After the last ")": a program may name itself anything.
            rest = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return Row(pid, int(rest[1]), rest[0].decode(), int(rest[19]), int(rest[21]))


def children_of(pid: int) -> list[int] | None:
    """The children of a process. None if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    children: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                children += map(int, file.readall().split())
        except OSError:
            if not _lists_children():
                return None
    return children


@functools.cache
def _lists_children() -> bool:
    me = os.getpid()
    return os.path.exists(f"/proc/{me}/task/{me}/children")


def below(root: int) -> list[Row]:
    """The live descendants of `root`.

    Reads the children of each process, where the kernel lists them. Reading the whole table for
    each program of the box would take time quadratic in their number.
    """
    children: Callable[[int], list[int] | None] = children_of
    look: Callable[[int], Row | None] = row_of
    if not _lists_children():
        rows, listed = {row.pid: row for row in table()}, dict[int, list[int]]()
        for pid, child in rows.items():
            listed.setdefault(child.parent, []).append(pid)
        children, look = listed.get, rows.get
    descendants: list[Row] = []
    todo, seen = [root], {root}
    while todo:
        for pid in children(todo.pop()) or ():
            if pid not in seen:  # it may be reparented while we look
                seen.add(pid)
                todo.append(pid)
                if (row := look(pid)) and row.state not in "ZX":
                    descendants.append(row)
    return descendants


def kill_all(members: Callable[[], list[Row]]) -> None:
    """Kill what `members` lists, parents first, until it lists nothing new.

    What keeps forking is stopped before it is killed, which ends fork bombs. Others are not: under
    gVisor, a shell whose child is killed while it is stopped may get a SIGHUP, or wait forever.
    """
    killed: set[int] = set()
    stopped: dict[int, None] = {}
    for attempt in range(50):
        fresh = [row.pid for row in members() if row.pid not in killed and row.pid not in stopped]
        if not fresh:
            break
        for pid in fresh:
            if attempt < KILL_ONLY:
                send(pid, signal.SIGKILL)
                killed.add(pid)
            else:
                send(pid, signal.SIGSTOP)
                stopped[pid] = None
    for pid in stopped:
        send(pid, signal.SIGKILL)


def reads_stderr(pid: int) -> bool:
    """Whether a process uses its stderr as stdin, as vim does without a terminal.

    It then waits forever for a key, on the write end of a pipe.
    """
    try:
        ends = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 2)}
        with open(f"/proc/{pid}/fdinfo/0") as file:
            flags = int(file.read().partition("flags:")[2].split()[0], 8)
    except (OSError, ValueError, IndexError):
        return False
    one_pipe = len(ends) == 1 and ends.pop().startswith("pipe:")
    return one_pipe and flags & os.O_ACCMODE == os.O_WRONLY


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone already."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


PAGE = os.sysconf("SC_PAGE_SIZE")
# Each process is bounded by RLIMIT_DATA already; this catches many that are small one by one.
WATCH_INTERVAL = 0.1  # seconds


async def watch_memory(limit: int) -> None:
    """Keep the sum of resident memory of user programs below `limit`, ten times a second."""
    me = os.getpid()
    seen: set[int] = set()
    while True:
        await asyncio.sleep(WATCH_INTERVAL)
        rows = [row for row in table() if row.pid != me and row.pid not in helpers]
        if rows and sum(row.resident for row in rows) * PAGE > limit:
            # A new fork still has the memory of its subreaper, so it may look too large.
            known = [row for row in rows if row.pid in seen] or rows
            send(_victim(known).pid, signal.SIGKILL)
        seen = {row.pid for row in rows}


def _victim(rows: list[Row]) -> Row:
    """The one to kill: of those at least half as large as the largest, the highest oom_score_adj.

    Any program may raise its own score, so a small one must not be able to protect a large one.
    """
    half = max(row.resident for row in rows) // 2
    large = [row for row in rows if row.resident >= half]
    return max(large, key=lambda row: (_oom_score_adj(row.pid), row.resident))


def _oom_score_adj(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb", buffering=0) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
