"""The process table, and how to end a whole tree of processes that does not want to end."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")

# Forks of the agent: their memory is the agent's, counted again and again.
helpers: set[int] = set()


@dataclass(frozen=True)
class Row:
    pid: int
    parent: int
    state: str
    started: int  # clock ticks since boot
    resident: int  # pages


@dataclass(frozen=True)
class Moment:
    """A point in time that tells processes before it from those after it.

    The clock of the process table ticks a hundred times a second, and a shell runs ten commands
    in one tick; within a tick, the pid that was given last decides.
    """

    tick: int
    last_pid: int

    @classmethod
    def now(cls) -> Moment:
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
        with open("/proc/loadavg", "rb") as file:
            return cls(tick, int(file.read().split()[-1]))

    def before(self, row: Row) -> bool:
        return row.started > self.tick or (row.started == self.tick and row.pid > self.last_pid)


def table() -> list[Row]:
    """Every process of the box, from /proc."""
    rows = (row_of(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return [row for row in rows if row]


def row_of(pid: int) -> Row | None:
    """None if there is no such process any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # After the last ")": a program may name itself anything.
            rest = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return None
    return Row(pid, int(rest[1]), rest[0].decode(), int(rest[19]), int(rest[21]))


def children_of(pid: int) -> list[int] | None:
    """The children of a process. None if the kernel does not list them (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                found += map(int, file.readall().split())
        except OSError:
            if not _lists_children():
                return None
    return found


@functools.cache
def _lists_children() -> bool:
    me = os.getpid()
    return os.path.exists(f"/proc/{me}/task/{me}/children")


def below(root: int) -> list[Row]:
    """The live descendants of `root`.

    By asking each for its children: the whole table has every program of the box, and whoever
    reads it once for each of them does work that grows with the square of their number.
    """
    children: Callable[[int], list[int] | None] = children_of
    look: Callable[[int], Row | None] = row_of
    if not _lists_children():
        rows, listed = {row.pid: row for row in table()}, dict[int, list[int]]()
        for row in rows.values():
            listed.setdefault(row.parent, []).append(row.pid)
        children, look = listed.get, rows.get
    found: list[Row] = []
    todo, seen = [root], {root}
    while todo:
        for pid in children(todo.pop()) or ():
            if pid not in seen:  # it may get another parent while we look
                seen.add(pid)
                todo.append(pid)
                if (one := look(pid)) and one.state not in "ZX":
                    found.append(one)
    return found


def kill_all(members: Callable[[], list[Row]]) -> None:
    """Kill what `members` lists, again and again until it lists nothing new.

    Stop first, kill after: what is stopped cannot fork, so a fork bomb runs out of bombs.
    """
    stopped: set[int] = set()
    for _ in range(50):
        fresh = {row.pid for row in members()} - stopped
        if not fresh:
            break
        for pid in fresh:
            send(pid, signal.SIGSTOP)
        stopped |= fresh
    for pid in stopped:
        send(pid, signal.SIGKILL)


def waits_for_nobody(pid: int) -> bool:
    """Whether a process made its stderr its stdin, as vim does where it finds no terminal.

    It waits for a key that nobody can press, at the end of a pipe that can only be written to.
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
