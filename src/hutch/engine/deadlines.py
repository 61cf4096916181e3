"""How long to wait: for a guest that is silent, and for work that must not stop half-way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from hutch import wire
from hutch.backends.base import Box
from hutch.errors import BoxLost

from .link import GuestCall

# Past its own deadline a guest gets this long to say so; one that does not is hung.
GRACE = 20


async def with_deadline(
    call: GuestCall, box: Box, timeout: float | None
) -> AsyncIterator[wire.Data | wire.Note]:
    """What a guest says until it has answered. One that ignores `timeout` is killed."""
    # Only the time spent waiting for the guest counts: a reader may pause as it likes.
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
    """Do all of it, though we are cancelled meanwhile; whether we were. Raises what it raises.

    A coroutine becomes a task, which the end of a loop cancels as well. The future of a thread is
    out of its reach.
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
