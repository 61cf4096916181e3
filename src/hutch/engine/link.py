"""The connection to one guest: the only host code that does I/O for the wire protocol."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Iterable
from types import TracebackType
from typing import cast

from hutch import wire
from hutch.backends.base import Box, ByteStream
from hutch.errors import (
    BoxLost,
    GuestMisbehaved,
    HutchError,
    IncompatibleBox,
    InvalidRequest,
    from_code,
)

READ_SIZE = 1 << 20
# Credit goes back in quarters of a window: often enough that the guest never waits for it,
# seldom enough that it costs nothing.
CREDIT_STEP = wire.WINDOW // 4
HELLO_TIMEOUT = 10
STOP_TIMEOUT = 10  # seconds for a guest to end what it was told to stop
# Errors that a guest may report. It may not claim that its box is lost, or that a command failed.
GUEST_ERRORS = frozenset(
    (
        "invalid_request",
        "is_folder",
        "not_folder",
        "not_found",
        "conflict",
        "not_permitted",
        "no_space",
        "limit_reached",
        "timed_out",
    )
)


class Link:
    """Requests to one guest, any number at once. Ends for good when the guest does."""

    def __init__(self, stream: ByteStream) -> None:
        self._connection = wire.Connection(wire.HOST)
        self._stream = stream
        self._calls: dict[int, GuestCall] = {}
        self._outbox: deque[bytes] = deque()
        self._outgoing = asyncio.Event()
        self._failure: HutchError | None = None
        self.over = asyncio.Event()
        self.is_abandoned = False  # the event loop ended, which says nothing about the box
        self._greeted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        state = "over" if self._failure else "up"
        return f"<Link {state}, {len(self._calls)} calls>"

    @classmethod
    async def open(cls, stream: ByteStream) -> Link:
        """Returns once the guest has said hello.

        Raises IncompatibleBox if it has another version of the protocol, and BoxLost.
        """
        link = cls(stream)
        link._tasks = [asyncio.create_task(link._read()), asyncio.create_task(link._write())]
        try:
            async with asyncio.timeout(HELLO_TIMEOUT):
                await link._greeted.wait()
            if link._failure:
                raise link._failure
        except TimeoutError:
            await link.close()
            raise BoxLost(f"the guest did not answer within {HELLO_TIMEOUT} seconds") from None
        except BaseException:
            await link.close()
            raise
        return link

    def call(self, request: wire.GuestRequest) -> GuestCall:
        """Send a request. Iterate over the call to carry it out. Raises HutchError."""
        return GuestCall(self, request)

    async def ask(self, request: wire.GuestRequest) -> dict[str, object]:
        """Send a request, and return its result. Output is discarded."""
        async with self.call(request) as call:
            async for _ in call:
                pass
            return call.result

    @property
    def failure(self) -> HutchError | None:
        """Why this link is over, or None while it is up."""
        return self._failure

    def hang_up(self, why: str) -> None:
        """End it for a reason of ours. All calls fail with a BoxLost."""
        self._end(BoxLost(why))

    async def close(self) -> None:
        self.hang_up("the box was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._stream.close()

    def send(self, event: wire.Event) -> None:
        # Does not wait: Data is bounded by the guest's credit, and everything else is small.
        self._outbox.append(self._connection.send(event))
        self._outgoing.set()

    def open_call(self, call: GuestCall, request: wire.GuestRequest) -> int:
        """Send a request, and return the stream of its answer.

        Raises BoxLost or what else ended the link, IncompatibleBox if the guest's version has no
        such request, and InvalidRequest if it does not fit into a frame.
        """
        if self._failure:
            raise self._failure
        stream = self._connection.next_stream()
        try:
            self.send(wire.Open(stream, request))
        except wire.TooNew as exc:
            raise IncompatibleBox(
                f"this session's box was started by an older version of Hutch: {exc}. Hibernate "
                "the session, and it wakes in a box of this version. If it cannot be hibernated "
                "for the same reason, copy its files to a new session"
            ) from exc
        except wire.LocalProtocolError as exc:
            limit = wire.MAX_PAYLOAD // 1024
            message = f"too long: a command and its arguments may have {limit} KiB in all"
            raise InvalidRequest(message) from exc
        except (TypeError, ValueError) as exc:
            raise InvalidRequest(f"cannot be sent to a box: {exc}") from exc
        self._calls[stream] = call
        return stream

    def room(self, stream: int) -> int:
        return self._connection.room(stream)

    def close_call(self, stream: int, *, cancel: bool) -> None:
        self._calls.pop(stream, None)
        if cancel and not self._failure and self._connection.is_open(stream):
            self.send(wire.Cancel(stream))

    async def _write(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self._stream.write(self._outbox.popleft())
                self._outgoing.clear()
                await self._outgoing.wait()
        except OSError as exc:
            self._end(BoxLost(f"the guest hung up ({exc.strerror})"))

    async def _read(self) -> None:
        error: HutchError = BoxLost("the guest hung up")
        try:
            while data := await self._stream.read(READ_SIZE):
                for event in self._connection.receive(data):
                    if call := self._calls.get(event.stream):
                        call.deliver(event)
                    elif isinstance(event, wire.Hello):
                        self.send(self._connection.hello())
                        self._greeted.set()
        except wire.OtherVersion as exc:
            error = IncompatibleBox(f"its box is of another version of Hutch: {exc}")
        except wire.RemoteProtocolError as exc:
            error = GuestMisbehaved(f"the guest broke the protocol: {exc}")
        except OSError as exc:
            error = BoxLost(f"the guest hung up ({exc.strerror})")
        except asyncio.CancelledError:
            self.is_abandoned = self._failure is None
            raise
        finally:
            self._end(error)
            if isinstance(error, (GuestMisbehaved, IncompatibleBox)):
                self._stream.close()  # trust nothing more from it

    def _end(self, error: HutchError) -> None:
        if self._failure is None:
            self._failure = error
            self.over.set()
        self._greeted.set()
        self._outbox.clear()
        for call in list(self._calls.values()):
            call.fail(self._failure)


class GuestCall:
    """One request and its answer: Data and Note as they arrive, then `result`.

    Leaving it early cancels the request, and kills what the guest started for it.
    """

    def __init__(self, link: Link, request: wire.GuestRequest) -> None:
        self._link = link
        self._inbox: deque[wire.Event] = deque()
        self._changed = asyncio.Event()  # an event, credit, a failure or the end
        self._failure: HutchError | None = None
        self._read = 0  # the cost of the event that the reader has
        self._owed = 0  # credit for events that the reader is done with
        self._over = False
        self.result: dict[str, object] = {}
        self._stream = link.open_call(self, request)

    async def __aenter__(self) -> GuestCall:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    @property
    def link(self) -> Link:
        return self._link

    @property
    def failure(self) -> HutchError | None:
        """What ended its link before it was answered."""
        return self._failure

    def drop_unread(self) -> None:
        """Forget what has arrived and was not read, as it was not credited either."""
        self._inbox.clear()

    def close(self) -> None:
        self._link.close_call(self._stream, cancel=not self._over)
        self._over = True
        self._changed.set()

    async def stop(self) -> None:
        """Cancel the request, and return when the guest has ended what it started for it.

        Returns anyway after STOP_TIMEOUT, for a guest need not answer.
        """
        if self._over or self._failure:
            return
        self._link.send(wire.Cancel(self._stream))
        try:
            async with asyncio.timeout(STOP_TIMEOUT):
                async for _ in self:
                    pass
        except (HutchError, TimeoutError):
            pass  # it was stopped, or its box is gone, or it does not answer
        finally:
            self._over = True

    def __aiter__(self) -> GuestCall:
        return self

    async def __anext__(self) -> wire.Data | wire.Note:
        # Asking for the next event releases the credit of the last one.
        self._repay()
        while True:
            while not self._inbox:
                if self._failure:
                    self._over = True
                    raise self._failure
                if self._over:
                    raise StopAsyncIteration
                self._changed.clear()
                await self._changed.wait()
            event = self._inbox.popleft()
            if isinstance(event, (wire.Data, wire.Note)):
                self._read = wire.cost(event)
                return event
            self._over = True
            self._link.close_call(self._stream, cancel=False)
            if isinstance(event, wire.Fail):
                code = event.code if event.code in GUEST_ERRORS else HutchError.code
                raise from_code(code, event.message)
            if isinstance(event, wire.End):
                self.result = event.result
            raise StopAsyncIteration

    async def send(self, data: bytes | bytearray | memoryview, channel: int = wire.STDIN) -> None:
        """Send input; waits while the guest has no credit for it."""
        view = memoryview(data).cast("B")
        while view and not self._over and not self._failure:
            room = min(self._link.room(self._stream), wire.MAX_PAYLOAD - 1024)
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            self._link.send(wire.Data(self._stream, bytes(view[:room]), channel))
            view = view[room:]

    async def feed(self, data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> None:
        """Send all of the input, and its end. If the source fails, so does the request."""
        try:
            async for piece in pieces_of(data):
                await self.send(piece)
        except Exception:
            self.close()
            raise
        self.end_input()

    def tell(self, **body: object) -> None:
        if not self._over and not self._failure:
            self._link.send(wire.Note(self._stream, body))

    def end_input(self) -> None:
        if not self._over and not self._failure:
            self._link.send(wire.Eof(self._stream))

    def deliver(self, event: wire.Event) -> None:
        if not isinstance(event, wire.Credit):
            self._inbox.append(event)
        self._changed.set()

    def fail(self, error: HutchError) -> None:
        self._failure = error
        self._changed.set()

    def _repay(self) -> None:
        self._owed += self._read
        self._read = 0
        if self._owed >= CREDIT_STEP and not self._over and not self._failure:
            self._link.send(wire.Credit(self._stream, self._owed))
            self._owed = 0


async def pieces_of(data: bytes | Iterable[bytes] | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data in pieces. Raises InvalidRequest if it, or a piece of it, is not bytes."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        yield cast(bytes, data)
    elif isinstance(data, AsyncIterable):
        async for piece in data:
            yield _checked(piece)
    elif isinstance(data, Iterable):
        # It may read from a disk or a network, which must not block the event loop.
        source, end = iter(data), object()
        while (item := await asyncio.to_thread(lambda: next(source, end))) is not end:
            yield _checked(item)
    else:
        raise InvalidRequest(
            f"data must be bytes or an iterable of bytes, not {type(data).__name__}"
        )


def _checked(piece: object) -> bytes:
    if not isinstance(piece, (bytes, bytearray, memoryview)):
        raise InvalidRequest(f"a piece of data must be bytes, not {type(piece).__name__}")
    return cast(bytes, piece)


# Seconds that a guest has to report its own deadline; one that does not is hung.
GRACE = 20


async def with_deadline(
    call: GuestCall, box: Box, timeout: float | None
) -> AsyncIterator[wire.Data | wire.Note]:
    """The events of a call until it is answered.

    Raises BoxLost if the guest ignores `timeout`, and kills the box; or hangs up, if the answer may
    be stuck on its way: then another link shows whether the guest hangs.
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
            if box.outlives_links:
                call.link.hang_up("no word from the guest long after a deadline")
                continue  # the call fails with that
            await box.kill()
            raise BoxLost("the guest ignored a deadline, and was killed") from None
        if left is not None:
            left = max(0.0, left - (time.monotonic() - before))
        yield event


async def finished(work: Awaitable[object]) -> bool:
    """Wait for the end of `work`, even if we are cancelled. Returns whether we were.

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
