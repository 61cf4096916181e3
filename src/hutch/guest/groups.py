"""What a box uses, as its own control groups tell it.

For hosts that cannot read these groups themselves, such as those of a Pod.
"""

from __future__ import annotations

import os

ROOT = "/sys/fs/cgroup"  # where a container finds its own groups, in either version
Numbers = dict[str, float | None]


class ControlGroups:
    def __init__(self, root: str = ROOT) -> None:
        """`root`: the folder with the groups, which may be missing."""
        self._root = root
        self._is_unified = os.path.exists(f"{root}/cgroup.controllers")

    def oom_kills(self) -> int | None:
        """How many programs were OOM-killed so far. None if that is not told."""
        if self._is_unified:
            return self._field("memory.events", "oom_kill")
        return self._field("memory/memory.oom_control", "oom_kill")

    def numbers(self) -> Numbers:
        """What is used now, in the fields of `Stats`. None for what is not told."""
        if self._is_unified:
            spent, unit = self._field("cpu.stat", "usage_usec"), 1e6
            memory, pids = "memory.current", "pids.current"
        else:
            spent, unit = self._number("cpuacct/cpuacct.usage"), 1e9
            memory, pids = "memory/memory.usage_in_bytes", "pids/pids.current"
        return {
            "memory": self._number(memory),
            "pids": self._number(pids),
            "cpu_seconds": None if spent is None else spent / unit,
            "oom_kills": self.oom_kills(),
        }

    def _number(self, file: str) -> int | None:
        text = self._text(file).strip()
        return int(text) if text.isdigit() else None

    def _field(self, file: str, name: str) -> int | None:
        for line in self._text(file).splitlines():
            field, _, value = line.partition(" ")
            if field == name and value.isdigit():
                return int(value)
        return None

    def _text(self, file: str) -> str:
        try:
            with open(f"{self._root}/{file}", "rb", buffering=0) as opened:
                return opened.read(4096).decode("ascii", "replace")
        except OSError:
            return ""
