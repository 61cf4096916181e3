"""Many boxes at once, and what they hold."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from hutch import AsyncSandbox, Sandbox

from . import memory

AT_ONCE = 50  # boxes being started at one time, where the time is not measured

# A guest keeps a helper for the next program for five seconds; a box is idle after that.
IDLE_AFTER = 6


def start_at_once(count: int) -> float:
    """Seconds in which `count` boxes were made, and each had run its first command."""

    async def measure() -> float:
        async with await AsyncSandbox.create():  # starts the launcher
            began = time.perf_counter()
            boxes = await asyncio.gather(*[_start() for _ in range(count)])
            took = time.perf_counter() - began
            await _close(boxes)
        return took

    return asyncio.run(measure())


def own_memory(with_shell: bool) -> float:
    """MiB of the processes of one box that did something and now does nothing."""
    with Sandbox.create() as reference:  # the launcher and the zygote are there already
        reference.commands.run(["true"])
        before = memory.below(os.getpid())
        with Sandbox.create() as box:
            box.commands.run(["true"])
            if with_shell:
                box.shell.run("true")
            time.sleep(IDLE_AFTER)
            return memory.proportional(_settled() - before)


def shared_memory(count: int) -> float:
    """MiB of the processes of one of `count` idle boxes, on average."""

    async def measure(boxes: list[AsyncSandbox], before: set[int]) -> float:
        return memory.proportional(_settled() - before) / count

    return asyncio.run(_with_idle(count, measure))


def taken_memory(count: int) -> float:
    """MiB that the machine has less for each of `count` idle boxes: the kernel's part too."""

    async def measure(boxes: list[AsyncSandbox], before: set[int]) -> float:
        with_boxes = memory.available()
        await _close(boxes)
        await asyncio.sleep(1)  # the kernel frees namespaces and groups in its own time
        return (memory.available() - with_boxes) / count

    return asyncio.run(_with_idle(count, measure))


def answering(count: int) -> float:
    """How many of `count` boxes, all alive together, answer."""

    async def measure(boxes: list[AsyncSandbox], before: set[int]) -> float:
        answers = [await box.commands.run(["echo", "here"]) for box in boxes]
        return sum(answer.stdout == "here\n" for answer in answers)

    return asyncio.run(_with_idle(count, measure))


async def _with_idle(
    count: int, measure: Callable[[list[AsyncSandbox], set[int]], Awaitable[float]]
) -> float:
    async with await AsyncSandbox.create(), _crowd(count) as (boxes, before):
        return await measure(boxes, before)


@asynccontextmanager
async def _crowd(count: int) -> AsyncIterator[tuple[list[AsyncSandbox], set[int]]]:
    before = memory.below(os.getpid())
    boxes: list[AsyncSandbox] = []
    try:
        while len(boxes) < count:
            some = min(AT_ONCE, count - len(boxes))
            boxes += await asyncio.gather(*[_start() for _ in range(some)])
        yield boxes, before
    finally:
        await _close(boxes)


async def _start() -> AsyncSandbox:
    box = await AsyncSandbox.create()
    await box.commands.run(["true"], check=True)
    return box


async def _close(boxes: list[AsyncSandbox]) -> None:
    await asyncio.gather(*[box.close() for box in boxes])


def _settled() -> set[int]:
    """Our descendants, once nothing ends or starts among them any more."""
    last: set[int] = set()
    for _ in range(100):
        now = memory.below(os.getpid())
        if now == last:
            return now
        last = now
        time.sleep(0.05)
    raise RuntimeError("processes of idle boxes keep coming and going")
