"""A watchdog for machines where no cgroup bounds a box: it sums, and kills the largest."""

from __future__ import annotations

import asyncio
import os
import signal

from .tree import helpers, send, table

PAGE = os.sysconf("SC_PAGE_SIZE")
# Each process is bounded by RLIMIT_DATA already; this catches many that are small one by one.
INTERVAL = 0.1


async def watch_memory(limit: int) -> None:
    """Keep the sum of resident memory of user programs below `limit`, ten times a second."""
    me = os.getpid()
    seen: set[int] = set()
    while True:
        await asyncio.sleep(INTERVAL)
        rows = [row for row in table() if row.pid != me and row.pid not in helpers]
        if rows and sum(row.resident for row in rows) * PAGE > limit:
            # What was forked just now is still as large as its keeper, and may be anything.
            known = [row for row in rows if row.pid in seen] or rows
            # As the kernel chooses: a process that offers itself first, then the largest.
            doomed = max(known, key=lambda row: (_oom_score_adj(row.pid), row.resident))
            send(doomed.pid, signal.SIGKILL)
        seen = {row.pid for row in rows}


def _oom_score_adj(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/oom_score_adj", "rb", buffering=0) as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0
