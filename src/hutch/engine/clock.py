"""Clocks for deadlines that do not depend on the time of day.

Deadlines use CLOCK_BOOTTIME, which cannot be set and which continues while the machine is
suspended. It starts over at each boot; after a reboot, the time of day has to do.
"""

from __future__ import annotations

import time
from pathlib import Path


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """The time of day, which never goes back while this process runs.

    Keys expire at a time of day, because they outlive reboots. Setting the clock back must not
    revive an expired key, so time passes at least as fast as CLOCK_BOOTTIME. A clock that was ahead
    and is corrected is trusted again: jumps are not remembered.
    """

    def __init__(self) -> None:
        self._began, self._since_boot = time.time(), since_boot()

    def __call__(self) -> float:
        return max(time.time(), self._began + since_boot() - self._since_boot)
