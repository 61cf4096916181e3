"""Programs in the background: their output is collected as it comes.

The guest knows a program by its name, and keeps output that was not collected yet. So it outlives
the link it was started on, and this process: the next one continues where the output on disk ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass

from hutch import wire
from hutch.errors import (
    BoxLost,
    CallerError,
    Conflict,
    GuestMisbehaved,
    HutchError,
    InvalidRequest,
    NotFound,
    TimedOut,
)
from hutch.types import Chunk, Process, Result

from .check import guest_field, seconds_of, whole_of
from .link import GRACE, GuestCall, Link
from .links import Links
from .output import make_result
from .outputs import Outputs
from .survey import SurveyedJob

MAX_TOTAL = 1 << 60  # bytes; no program prints that much
_PIECE = 64 * 1024


def size_of(size: tuple[int, int]) -> list[int]:
    """Columns and rows of a terminal. Raises InvalidRequest."""
    if not all(isinstance(n, int) and 1 <= n <= 10_000 for n in size):
        raise InvalidRequest(f"not a terminal size: {size!r}")
    return list(size)


@dataclass(frozen=True)
class _Ending:
    """How a program ended."""

    exit_code: int
    seconds: float
    answer: Mapping[str, object]

    @classmethod
    def read(cls, answer: dict[str, object]) -> _Ending:
        """From what the guest sent. Raises GuestMisbehaved."""
        exit_code = guest_field(answer, "exit_code", int)
        seconds = guest_field(answer, "seconds", float)
        if not 0 <= seconds < 1e9:
            raise GuestMisbehaved(f"the guest sent seconds={seconds}")
        return cls(exit_code, seconds, answer)


class Follower:
    """What one reader of a program's output has not read yet."""

    def __init__(self) -> None:
        self.chunks: deque[Chunk] = deque()
        self.changed = asyncio.Event()

    @property
    def is_full(self) -> bool:
        return len(self.chunks) >= 16

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class BackgroundJob:
    def __init__(
        self, id: str, argv: tuple[str, ...], links: Links, outputs: Outputs, terminal: bool
    ) -> None:
        self.id, self.output = id, outputs.of_program(id)
        self._outputs = outputs
        self._argv, self._links, self._terminal = argv, links, terminal
        self._pid = 0
        self._began = time.monotonic()
        self._started_at = time.time()
        self._call: GuestCall | None = None  # None: it ended before this process started
        self._task: asyncio.Task[None] | None = None
        self._followers: set[Follower] = set()
        self._input_closed = self._dying = False
        self._input_turn = asyncio.Lock()
        self._over = asyncio.Event()
        self._ending: _Ending | None = None
        self._failure: Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def process(self) -> Process:
        code = self._ending.exit_code if self._ending else None
        return Process(self.id, self._pid, self._argv, self._started_at, self._terminal, code)

    async def start(self, request: wire.Start) -> None:
        """Returns when the program runs; raises HutchError if it cannot be started."""
        self._pid = guest_field(await self._links.current.ask(request), "pid", int)
        self._attach()

    def go_on(self, surveyed: SurveyedJob) -> None:
        """Continue with one that was started before this process, and may have ended since."""
        self._pid, self._started_at = surveyed.pid, surveyed.started_at
        self._began -= max(0.0, time.time() - surveyed.started_at)
        self._input_closed = not surveyed.takes_input and not surveyed.terminal
        if surveyed.answer is not None and self.output.total == surveyed.total:
            self._ending = _Ending.read(surveyed.answer)
            self._outputs.settle(self.output)
            self._over.set()
        else:
            self._attach()

    async def forget(self) -> None:
        """Let the guest forget it."""
        with contextlib.suppress(CallerError):
            await self._links.current.ask(wire.Forget(self.id))

    def _attach(self) -> None:
        self._outputs.resume(self.output)
        call = self._call = self._call_on(self._links.current)
        self._task = asyncio.create_task(self._collect(call))

    def _call_on(self, link: Link) -> GuestCall:
        return link.call(wire.Attach(self.id, self.output.total))

    def go_on_with(self, link: Link) -> None:
        """Continue on another link, after the last one broke."""
        if self._call and not self.is_over:
            # The guest sends again what was not read yet.
            self._call.drop_unread()
            self._call = self._call_on(link)

    async def _collect(self, call: GuestCall) -> None:
        try:
            while not await self._collect_from(call):
                link = await self._links.after(call.link)  # raises why there is none
                if self._call is call:
                    self.go_on_with(link)
                call = self._call or call
            self._ending = _Ending.read(call.result)
            self._outputs.settle(self.output)
        except asyncio.CancelledError:
            self._failure = BoxLost("the box was closed")
            raise
        except Exception as exc:
            self._failure = exc
        finally:
            # Not `Outputs.settle`: the program may still run, and must not be evicted.
            self.output.settle()
            (self._call or call).close()
            self._over.set()
            for follower in self._followers:
                follower.changed.set()

    async def _collect_from(self, call: GuestCall) -> bool:
        """False if its link ended before the program did."""
        try:
            async for event in call:
                if isinstance(event, wire.Data):
                    await self._pass_on(self.output.take(event))
                    continue
                start = guest_field(event.body, "offset", int)
                if not self.output.total <= start < MAX_TOTAL:
                    raise GuestMisbehaved("the guest sent output from a wrong offset")
                self.output.skip(start)
        except HutchError as exc:
            if exc is not call.failure:
                raise
            return False
        return True

    async def _pass_on(self, chunk: Chunk) -> None:
        for follower in list(self._followers):
            # A slow follower slows the program down, and does not fill the host's memory. But a
            # follower that has stopped reading must not prevent a kill.
            while follower.is_full and follower in self._followers and not self._dying:
                await follower.wait()
            follower.chunks.append(chunk)
            follower.changed.set()

    def so_far(self) -> Result:
        """The result; while it runs, the output so far with exit_code -1."""
        if self._failure:
            raise self._failure
        ending = self._ending
        if ending is None:
            return make_result(self.output, -1, time.monotonic() - self._began, {})
        return make_result(self.output, ending.exit_code, ending.seconds, ending.answer)

    async def wait(self) -> Result:
        await self._over.wait()
        return self.so_far()

    async def follow(
        self, timeout: float | None, offset: int | None = None
    ) -> AsyncGenerator[Chunk | Result, None]:
        start = None if offset is None else whole_of("offset", offset)
        return self._follow(seconds_of(timeout), start)

    async def _follow(
        self, timeout: float | None, offset: int | None
    ) -> AsyncGenerator[Chunk | Result, None]:
        follower = Follower()
        self._followers.add(follower)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            # Nothing is missed: what is printed after `end` waits in the follower.
            end = self.output.total
            past = self._clipped() if offset is None else self._between(offset, end)
            # A reader may know more than this process: after a crash, the guest sends again what
            # was not stored yet.
            known = max(0, (offset or 0) - end)
            for chunk in past:
                yield chunk
            while follower.chunks or not self._over.is_set():
                if follower.chunks:
                    chunk = follower.chunks.popleft()
                    follower.changed.set()
                    known, skipped = max(0, known - len(chunk.data)), known
                    if rest := chunk.data[skipped:]:
                        yield Chunk(rest, chunk.stream)
                    continue
                try:
                    left = None if deadline is None else max(0, deadline - time.monotonic())
                    await asyncio.wait_for(follower.wait(), left)
                except TimeoutError:
                    message = f"still running after {timeout} s"
                    raise TimedOut(message, self.so_far()) from None
            yield await self.wait()
        finally:
            self._followers.discard(follower)
            follower.changed.set()

    def _clipped(self) -> list[Chunk]:
        """The output so far; of long output, the beginning and the end."""
        both = (
            Chunk(self.output.stdout.data(), "stdout"),
            Chunk(self.output.stderr.data(), "stderr"),
        )
        return [chunk for chunk in both if chunk.data]

    def _between(self, offset: int, end: int) -> Iterator[Chunk]:
        """All of the output between two offsets. Raises NotFound if a part is not kept any more."""
        while offset < end:
            piece = self.output.read(offset, min(_PIECE, end - offset))
            if piece.start > offset or not piece.data:
                raise NotFound(f"byte {offset} of the output is not kept any more")
            yield Chunk(piece.data, "stdout")
            offset += len(piece.data)

    async def send(self, data: bytes) -> None:
        """Write to its stdin. Raises Conflict once that is closed."""
        # One at a time: input longer than the guest's window is sent in parts, and nothing else
        # may come between them.
        async with self._input_turn:
            if self._input_closed:
                raise Conflict(f"the input of {self.id} was closed")
            if call := self._call:
                await call.send(data)
                self._check_link(call)

    async def end_input(self) -> None:
        if self._terminal:
            await self.send(b"\x04")  # ^D: a terminal cannot be half-closed
            return
        async with self._input_turn:
            if (call := self._call) and not self._input_closed:
                self._check_link(call)
                self._input_closed = True
                call.end_input()

    def signal(self, number: int) -> None:
        """Raises InvalidRequest for a number that is not a signal."""
        if not 1 <= whole_of("a signal", number) <= 64:
            raise InvalidRequest(f"not a signal: {number}")
        self._tell(signal=number)

    async def kill(self) -> None:
        """Everything it started is dead when this returns. Raises BoxLost if that cannot be."""
        self._dying = True
        for follower in self._followers:
            follower.changed.set()
        call = self._call
        self._tell(signal=9, tree=True)
        try:
            await asyncio.wait_for(self._over.wait(), GRACE)
        except TimeoutError:
            if call:
                self._check_link(call)
            raise BoxLost("the guest ignored a kill: close this box") from None

    def resize(self, columns: int, rows: int) -> None:
        self._tell(size=size_of((columns, rows)))

    def _tell(self, **body: object) -> None:
        if self._call:
            self._check_link(self._call)
            self._call.tell(**body)

    def _check_link(self, call: GuestCall) -> None:
        """Raises what ended the link of a call, if it did before the program."""
        if call.failure and not self.is_over:
            raise call.failure

    async def stop(self) -> None:
        """Stop collecting output. The program keeps running."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def end(self) -> None:
        """Its box is gone, and the program with it."""
        self._outputs.settle(self.output)
