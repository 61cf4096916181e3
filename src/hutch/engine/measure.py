"""What a box uses, and whether a program of it was killed for lack of memory.

The backend measures that. Where it cannot, as in a cluster, the guest reads it inside the box. That
is the box's own word about itself, so nothing is decided by it: it is only shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import cast

from hutch import wire
from hutch.backends.base import Box
from hutch.errors import GuestMisbehaved, HutchError
from hutch.types import Stats

from .check import guest_field
from .link import Link

PATIENCE = 5  # seconds for a guest that may be busy
LARGEST = 1 << 63


async def measure(box: Box, link: Link) -> Stats:
    """What a box uses now. Raises BoxLost if it is gone, and GuestMisbehaved."""
    stats = await box.stats()
    if None not in (stats.memory, stats.pids, stats.cpu_seconds, stats.oom_kills):
        return stats
    try:
        async with asyncio.timeout(PATIENCE):
            answer = await link.ask(wire.Activity())
    except (HutchError, TimeoutError):
        return stats  # it is not known
    uses = guest_field(answer, "uses", dict) if "uses" in answer else {}
    spent = stats.cpu_seconds
    return Stats(
        memory=_whole(stats.memory, uses, "memory"),
        pids=_whole(stats.pids, uses, "pids"),
        cpu_seconds=_number(uses, "cpu_seconds") if spent is None else spent,
        oom_kills=_whole(stats.oom_kills, uses, "oom_kills"),
    )


def was_oom_killed(box: Box, before: int | None, answer: Mapping[str, object]) -> bool:
    """Whether a program was OOM-killed while a request was answered.

    `before`: what the backend had counted when it was sent. Raises GuestMisbehaved.
    """
    after = box.oom_kills()
    if after is not None:
        return before is not None and after > before
    return "oom_kills" in answer and guest_field(answer, "oom_kills", int) > 0


def _whole(known: int | None, uses: Mapping[str, object], name: str) -> int | None:
    told = _number(uses, name) if known is None else known
    return None if told is None else int(told)


def _number(uses: Mapping[str, object], name: str) -> float | None:
    value = uses.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= (number := cast(float, value)) < LARGEST:
        raise GuestMisbehaved(f"the guest sent {name}={value!r:.100}")
    return number
