"""How long a session has left, whatever is done to the clock on the wall.

While the machine is up, deadlines count on CLOCK_BOOTTIME, which nobody can set and which goes on
while the machine sleeps. It begins anew with each boot; then the time of day has to do.
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

    Keys expire at a time of day, because they outlive boots. But setting the clock back must not
    give an expired key its life back, so time goes on at least as fast as CLOCK_BOOTTIME does. A
    clock that was ahead and is put right is believed again: nothing is remembered of the jump.
    """

    def __init__(self) -> None:
        self._began, self._since_boot = time.time(), since_boot()

    def __call__(self) -> float:
        return max(time.time(), self._began + since_boot() - self._since_boot)
