"""Programs with pipes or a terminal: run to their end (`Exec`), or in the background (`Start`).

A background program belongs to no connection, and its output waits for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable

from hutch import wire

from .agent import NAME, READ_SIZE, RequestError, Responder
from .pipes import InputPipe, Keyboard, OutputPipe, Relay, Sink, TerminalPipe
from .procfs import send
from .spawn import Program, Programs

TIMED_OUT = 124  # as timeout(1)
# What is written to a terminal can be read a moment later, not at once as from a pipe.
TERMINAL_LAG = 0.2  # seconds


class Attended:
    """A running program, and our ends of its pipes or terminal."""

    def __init__(
        self,
        program: Program,
        programs: Programs,
        outputs: dict[int, OutputPipe],
        stdin: InputPipe | None,
    ) -> None:
        self.program, self.stdin = program, stdin
        self._programs, self._outputs = programs, outputs
        self._screen = outputs.get(wire.STDOUT)

    async def see_through(
        self, sink: Sink, deadline: float | None, first: Awaitable[None] | None = None
    ) -> bool:
        """Pass on its output until it ends or the deadline passes. True if it timed out.

        `first` is awaited before the end of the program.
        """
        program = self.program
        is_terminal = isinstance(self._screen, TerminalPipe)
        moving = None if is_terminal else asyncio.ensure_future(_keep_moving(program))
        timed_out = False
        try:
            async with Relay(sink, self._outputs) as relay:
                try:
                    async with asyncio.timeout_at(deadline):
                        if first:
                            await first
                        await program.ended.wait()
                except TimeoutError:
                    timed_out = True
                if is_terminal and not timed_out:
                    await relay.linger(TERMINAL_LAG)
                relay.stop()
                if timed_out:
                    await self._programs.kill(program)
                await relay.finished()
        except asyncio.CancelledError:
            await asyncio.shield(self._programs.kill(program))
            raise
        finally:
            if moving:
                moving.cancel()
        return timed_out

    async def obey(self, responder: Responder) -> None:
        """Handle Notes of the host while a program runs: signals, a new window size."""
        async for body in responder.notes():
            if "signal" in body and self.program.exit_code is None:
                if body.get("tree"):
                    await self._programs.kill(self.program)
                else:
                    send(self.program.pid, int(body["signal"]))
            if "size" in body and isinstance(self._screen, TerminalPipe) and self._screen.fd >= 0:
                self._screen.resize(*body["size"])


async def start(
    request: wire.Exec | wire.Start,
    programs: Programs,
    held: contextlib.ExitStack,
    *,
    stdin: bool,
    become: str | None = None,
) -> Attended:
    """Start a program with pipes or a terminal, which `held` releases in the end.

    `become`: fork and run this function of ours instead of a program.
    """
    feed: InputPipe | None = None
    if request.tty:
        terminal = TerminalPipe(*os.openpty())
        held.callback(terminal.abandon)
        terminal.resize(*request.tty)
        outputs: dict[int, OutputPipe] = {wire.STDOUT: terminal}
        feed = Keyboard(terminal)
        fds = dict.fromkeys((0, 1, 2), terminal.writer)
    else:
        null = os.open("/dev/null", os.O_RDONLY)
        held.callback(os.close, null)
        out = OutputPipe()
        held.callback(out.abandon)
        err = OutputPipe()
        held.callback(err.abandon)
        outputs = {wire.STDOUT: out, wire.STDERR: err}
        if stdin:
            feed = InputPipe()
        fds = {0: feed.reader if feed else null, 1: out.writer, 2: err.writer}
    if feed:
        held.callback(feed.close)
    program = await programs.start(
        request.argv,
        cwd=request.cwd,
        env=request.env,
        user=request.user,
        fds=fds,
        tty=bool(request.tty),
        call=become,
    )
    for output in outputs.values():
        output.started()
    if feed:
        feed.started()
    return Attended(program, programs, outputs, feed)


class Collector:
    """A sink that collects stdout of a fork of ours, and passes stderr to the host."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self.stdout = b""

    def send_now(self, data: bytes, channel: int) -> bool:
        if channel == wire.STDOUT:
            self.stdout += data
            return True
        return self._responder.send_now(data, channel)

    async def send(self, data: bytes, channel: int) -> None:
        await self._responder.send(data, channel)


async def run_exec(
    request: wire.Exec,
    responder: Responder,
    programs: Programs,
    *,
    become: str | None = None,
    sink: Sink | None = None,
) -> dict[str, object]:
    """Answer an Exec. `become`: see `start`. `sink`: where its output goes, if not to the host."""
    loop = asyncio.get_running_loop()
    deadline = None if request.timeout is None else loop.time() + request.timeout
    with contextlib.ExitStack() as held:
        run = await start(request, programs, held, stdin=request.stdin, become=become)
        beside = [
            asyncio.ensure_future(work)
            for work in (run.obey(responder), _feed(responder, run.stdin))
        ]
        try:
            timed_out = await run.see_through(
                sink or responder, deadline, responder.note(pid=run.program.pid)
            )
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
    return {"exit_code": TIMED_OUT if timed_out else run.program.exit_code, "timed_out": timed_out}


async def _feed(responder: Responder, stdin: InputPipe | None) -> None:
    """Write the host's Data to a program's stdin, and close that after Eof."""
    async for data in responder.incoming():
        if stdin:
            await stdin.write(data)
    if stdin and not isinstance(stdin, Keyboard):
        stdin.close()


async def _keep_moving(program: Program) -> None:
    pause = 0.5
    while True:
        await asyncio.sleep(pause)
        program.keep_moving()
        pause = min(pause * 1.5, 5)


# --- in the background ------------------------------------------------------------------


RUN = 64  # approximate bytes of bookkeeping per run of bytes


class Backlog:
    """Output that the host may still ask for: a Sink that keeps it, by offset.

    It holds at most a window. When it is full, nothing more is read from the program until the
    host has credited some of it. So nothing is lost if a host dies, and memory stays bounded.
    """

    def __init__(self) -> None:
        self.base = 0  # offset of the oldest byte that is kept
        self._data = bytearray()
        self._ends: list[int] = []  # end offset of each run of bytes of one channel
        self._channels = bytearray()  # of each run
        self._is_abandoned = False
        self._room = asyncio.Event()
        self.changed = asyncio.Event()  # there is more to read, or the program has ended

    def __repr__(self) -> str:
        return f"<Backlog {self.base}-{self.total}>"

    @property
    def total(self) -> int:
        """Bytes received so far."""
        return self.base + len(self._data)

    @property
    def _is_full(self) -> bool:
        return len(self._data) + RUN * len(self._ends) >= wire.WINDOW

    def send_now(self, data: bytes, channel: int) -> bool:
        if self._is_full:
            return False
        self._add(data, channel)
        return True

    async def send(self, data: bytes, channel: int) -> None:
        while self._is_full:
            self._room.clear()
            await self._room.wait()
        self._add(data, channel)

    def _add(self, data: bytes, channel: int) -> None:
        if self._is_abandoned:
            return
        self._data += data
        if self._ends and self._channels[-1] == channel:
            self._ends[-1] = self.total
        else:
            self._ends.append(self.total)
            self._channels.append(channel)
        self.changed.set()

    def read(self, offset: int) -> tuple[bytes, int] | None:
        """Bytes from `offset` on, of one channel, and that channel; None if there are none yet."""
        run = bisect_right(self._ends, offset)
        if run == len(self._ends):
            return None
        start, end = offset - self.base, self._ends[run] - self.base
        return bytes(self._data[start : min(end, start + READ_SIZE)]), self._channels[run]

    def forget(self, until: int) -> None:
        """Drop everything before this offset: the host has it."""
        if until > self.base:
            runs = bisect_right(self._ends, until)
            del self._data[: until - self.base], self._ends[:runs], self._channels[:runs]
            self.base = until
            self._room.set()

    def abandon(self) -> None:
        """Drop everything, and all that follows."""
        self._is_abandoned = True
        self.forget(self.total)
        self._room.set()


MAX_ARGV = 16 * 1024  # characters of a program's arguments in a survey


class BackgroundProgram:
    """A background program, its output, and the input that it has not read yet."""

    def __init__(
        self, name: str, request: wire.Start, run: Attended, held: contextlib.ExitStack
    ) -> None:
        self.name, self._request, self._run = name, request, run
        self.program = run.program
        self.backlog = Backlog()
        self.result: dict[str, object] | None = None  # None until all output was read
        self._input: deque[bytes | None] = deque()  # None: the end of it
        self._has_input, self._all_written = asyncio.Event(), asyncio.Event()
        self._reader: asyncio.Task[object] | None = None
        self._task = asyncio.create_task(self._live(held))

    def __repr__(self) -> str:
        state = "ended" if self.result else "running"
        return f"<BackgroundProgram {self.name} {state}, {self.backlog!r}>"

    async def _live(self, held: contextlib.ExitStack) -> None:
        loop = asyncio.get_running_loop()
        began, timeout = loop.time(), self._request.timeout
        typing = asyncio.create_task(self._write_input())
        with held:
            try:
                deadline = None if timeout is None else began + timeout
                timed_out = await self._run.see_through(self.backlog, deadline)
            finally:
                typing.cancel()
        code = TIMED_OUT if timed_out else self.program.exit_code
        seconds = loop.time() - began
        self.result = {"exit_code": code, "timed_out": timed_out, "seconds": seconds}
        self._input.clear()
        self._all_written.set()
        self.backlog.changed.set()

    @property
    def entry(self) -> dict[str, object]:
        request = self._request
        return {
            "name": self.name,
            "argv": _cut(request.argv),
            "pid": self.program.pid,
            "tty": request.tty is not None,
            "started": self.program.started,
            "input": self._takes_input,
            "total": self.backlog.total,
            "result": self.result,
        }

    @property
    def _takes_input(self) -> bool:
        stdin = self._run.stdin
        return self.result is None and None not in self._input and bool(stdin and stdin.fd >= 0)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    # --- input: written even if the connection that sent it is gone ---------------------------

    async def _write_input(self) -> None:
        stdin = self._run.stdin
        assert stdin
        while True:
            while self._input:
                data = self._input[0]
                if data is not None:
                    await stdin.write(data)
                elif not isinstance(stdin, Keyboard):
                    stdin.close()
                self._input.popleft()
            self._all_written.set()
            self._has_input.clear()
            await self._has_input.wait()

    def _put(self, data: bytes | None) -> None:
        if self.result is None:
            self._input.append(data)
            self._all_written.clear()
            self._has_input.set()

    async def _feed(self, responder: Responder) -> None:
        async for data in responder.incoming():
            self._put(data)
            await self._all_written.wait()
        self._put(None)

    # --- a reader ---------------------------------------------------------------------------

    async def attach(self, offset: int, responder: Responder) -> dict[str, object]:
        """Send output to this reader, in place of the one before, until the program ends."""
        me = asyncio.current_task()
        before, self._reader = self._reader, me
        if before:
            before.cancel()
        beside = [
            asyncio.create_task(work) for work in (self._run.obey(responder), self._feed(responder))
        ]
        try:
            return await self._read(offset, responder)
        except asyncio.CancelledError:
            if self._reader is not me:
                raise RequestError("conflict", f"{self.name} has another reader now") from None
            raise
        finally:
            if self._reader is me:
                self._reader = None
            for task in beside:
                task.cancel()
            for data in responder.unread():
                self._put(data)

    async def _read(self, offset: int, responder: Responder) -> dict[str, object]:
        log = self.backlog
        if offset > log.total:
            raise RequestError(
                "invalid_request", f"{self.name} has printed {log.total} bytes so far"
            )
        log.forget(offset)
        offset = max(offset, log.base)
        await responder.note(pid=self.program.pid, offset=offset)
        # What was spent up to an offset. Once that is credited, the host has the output.
        marks: deque[tuple[int, int]] = deque()

        def settle() -> None:
            while marks and marks[0][0] <= responder.credited:
                log.forget(marks.popleft()[1])

        responder.when_credited = settle
        while True:
            while piece := log.read(offset):
                await responder.send(*piece)
                offset += len(piece[0])
                marks.append((responder.spent, offset))
            if self.result:
                return self.result
            log.changed.clear()
            await log.changed.wait()


class Jobs:
    """The background programs of this box, by name, until they are forgotten."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._jobs: dict[str, BackgroundProgram | None] = {}  # None: being started

    def entries(self) -> list[dict[str, object]]:
        return [job.entry for job in self._jobs.values() if job]

    async def start(self, request: wire.Start, responder: Responder) -> dict[str, object]:
        name = request.name
        if not NAME.fullmatch(name):
            raise RequestError("invalid_request", f"invalid program name: {name!r}")
        if name in self._jobs:
            raise RequestError("conflict", f"there is a program {name!r} already")
        self._jobs[name] = None
        try:
            with contextlib.ExitStack() as held:
                run = await start(request, self._programs, held, stdin=True)
                job = self._jobs[name] = BackgroundProgram(name, request, run, held.pop_all())
        except BaseException:
            del self._jobs[name]
            raise
        return {"pid": job.program.pid}

    async def attach(self, request: wire.Attach, responder: Responder) -> dict[str, object]:
        return await self._find(request.name).attach(request.offset, responder)

    async def forget(self, request: wire.Forget, responder: Responder) -> dict[str, object]:
        job = self._find(request.name)
        if job.program.exit_code is None:
            raise RequestError("conflict", f"{request.name} has not ended: kill it first")
        del self._jobs[request.name]
        job.backlog.abandon()  # a child of it may still wait for room in the backlog
        return {}

    async def close(self) -> None:
        await asyncio.gather(*(job.close() for job in self._jobs.values() if job))

    def _find(self, name: str) -> BackgroundProgram:
        job = self._jobs.get(name)
        if job is None:
            raise RequestError("not_found", f"no program {name!r} in this box")
        return job


def _cut(argv: list[str]) -> list[str]:
    """Arguments, cut so that they fit into a frame."""
    cut, room = [], MAX_ARGV
    for argument in argv:
        cut.append(argument[:room])
        room -= len(argument) + 1
        if room <= 0:
            break
    return cut
