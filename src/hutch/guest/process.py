"""Run a program with pipes or a terminal to its end: the handler of `Exec`."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable

from hutch import wire

from .agent import Responder
from .pipes import InputPipe, Keyboard, OutputPipe, Relay, Sink, Terminal
from .spawn import Program, Programs
from .tree import send

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
        is_terminal = isinstance(self._screen, Terminal)
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
            if "size" in body and isinstance(self._screen, Terminal) and self._screen.fd >= 0:
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
        terminal = Terminal(*os.openpty())
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
