"""Deadlines for silent guests, and work that must not be cancelled half-way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from hutch import wire
from hutch.backends.base import Box
from hutch.errors import BoxLost

from .link import GuestCall

# Seconds that a guest has to report its own deadline; one that does not is hung.
GRACE = 20


async def with_deadline(
    call: GuestCall, box: Box, timeout: float | None
) -> AsyncIterator[wire.Data | wire.Note]:
    """The events of a call until it is answered.

    Kills the box and raises BoxLost if the guest ignores `timeout`.
    """
    # Only the time spent waiting for the guest counts, not that of a slow reader.
    left = None if timeout is None else timeout + GRACE
    while True:
        before = time.monotonic()
        try:
            async with asyncio.timeout(left):
                event = await anext(call)
        except StopAsyncIteration:
            return
        except TimeoutError:
            await box.kill()
            raise BoxLost("the guest ignored a deadline, and was killed") from None
        if left is not None:
            left = max(0.0, left - (time.monotonic() - before))
        yield event


async def finished(work: Coroutine[Any, Any, object] | asyncio.Future[Any]) -> bool:
    """Run `work` to its end, even if we are cancelled. Returns whether we were.

    A coroutine becomes a task, which is cancelled when the loop is torn down. The future of a
    thread is not.
    """
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    return is_cancelled
