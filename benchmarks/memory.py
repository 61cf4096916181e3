"""What processes hold, as the kernel counts it."""

from __future__ import annotations

import os
from collections.abc import Iterable

MIB = 1024 * 1024


def below(root: int) -> set[int]:
    """The pids of all descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found: set[int] = set()
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            found.add(pid)
            todo.append(pid)
    return found


def proportional(pids: Iterable[int]) -> float:
    """MiB of these processes; a page shared by n counts for one nth (PSS)."""
    return sum(_field(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids) / 1024


def resident(pid: int) -> float:
    """MiB that a process has in memory, shared or not (RSS)."""
    return _field(f"/proc/{pid}/status", "VmRSS") / 1024


def available() -> float:
    """MiB that the machine could still hand out."""
    return _field("/proc/meminfo", "MemAvailable") / 1024


def forget_peak() -> None:
    """From now on, `peak` counts from what this process holds now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak() -> float:
    """MiB that this process held at its largest since `forget_peak`."""
    return _field("/proc/self/status", "VmHWM") / 1024


def _field(path: str, name: str) -> int:
    """A number of kB from a file of `Name:   123 kB` lines; 0 for a process that has gone."""
    try:
        with open(path) as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0
