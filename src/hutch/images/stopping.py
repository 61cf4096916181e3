"""Runs work on images in a thread that ends soon after its caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from hutch.errors import HutchError

P = TypeVar("P")
T = TypeVar("T")


class WorkStopped(HutchError):
    """The caller was cancelled. Raised in the thread, to end its work."""

    def __init__(self) -> None:
        super().__init__("the work was stopped: its caller has stopped waiting")


async def in_thread(work: Callable[[Callable[[P], None]], T], report: Callable[[P], None]) -> T:
    """Run `work` in a thread, with a function that it must call often to report its progress.

    When this coroutine is cancelled, that function raises WorkStopped, and the cancellation waits
    until the thread has ended. Raises what `work` raises.
    """
    is_cancelled = False

    def checked(progress: P) -> None:
        if is_cancelled:
            raise WorkStopped
        report(progress)

    running = asyncio.ensure_future(asyncio.to_thread(work, checked))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        is_cancelled = True
        await asyncio.gather(running, return_exceptions=True)
        raise
