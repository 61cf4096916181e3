"""A watchdog for machines where no cgroup bounds a box: it sums, and kills the largest."""

from __future__ import annotations

import asyncio
import os
import signal

from .tree import Row, helpers, send, table

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
            # What was forked just now is still as large as its subreaper, and may be anything.
            known = [row for row in rows if row.pid in seen] or rows
            send(_victim(known).pid, signal.SIGKILL)
        seen = {row.pid for row in rows}


def _victim(rows: list[Row]) -> Row:
    """The largest, unless one at least half as large offers itself by its oom_score_adj.

    Every program may offer itself: small ones that did would die in place of a large one.
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
