"""Answers `Exec`: a program with pipes or a terminal, attended to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os

from hutch import wire

from .agent import Call
from .pipes import Input, Keyboard, Output, Relay, Terminal
from .spawn import Program, Programs
from .tree import send

TIMED_OUT = 124  # as timeout(1) says it
# What goes into a terminal comes out a moment later, not at once as from a pipe.
TERMINAL_LAG = 0.2  # seconds


async def run_exec(
    request: wire.Exec, call: Call, programs: Programs, *, become: str | None = None
) -> dict[str, object]:
    """Answer an Exec: output as it comes, input as it comes, the true exit code at the end.

    `become`: not a program, but a fork of ours that goes on as this.
    """
    loop = asyncio.get_running_loop()
    deadline = None if request.timeout is None else loop.time() + request.timeout
    with contextlib.ExitStack() as held:
        stdin: Input | None = None
        if request.tty:
            terminal = Terminal(*os.openpty())
            held.callback(terminal.abandon)
            terminal.resize(*request.tty)
            outputs: dict[int, Output] = {wire.STDOUT: terminal}
            stdin = Keyboard(terminal)
            fds = dict.fromkeys((0, 1, 2), terminal.writer)
        else:
            null = os.open("/dev/null", os.O_RDONLY)
            held.callback(os.close, null)
            out = Output()
            held.callback(out.abandon)
            err = Output()
            held.callback(err.abandon)
            outputs = {wire.STDOUT: out, wire.STDERR: err}
            if request.stdin:
                stdin = Input()
            fds = {0: stdin.reader if stdin else null, 1: out.writer, 2: err.writer}
        if stdin:
            held.callback(stdin.close)
        program = await programs.start(
            request.argv, cwd=request.cwd, env=request.env, user=request.user, fds=fds,
            tty=bool(request.tty), call=become,
        )  # fmt: skip
        for output in outputs.values():
            output.started()
        if stdin:
            stdin.started()
        timed_out = await _attend(program, programs, call, outputs, stdin, deadline)
    return {"exit_code": TIMED_OUT if timed_out else program.exit_code, "timed_out": timed_out}


async def _attend(
    program: Program,
    programs: Programs,
    call: Call,
    outputs: dict[int, Output],
    stdin: Input | None,
    deadline: float | None,
) -> bool:
    """See a program to its end, or to its deadline: whether it was that."""
    screen = outputs[wire.STDOUT]
    beside = [_obey(call, program, programs, screen), _feed(call, stdin)]
    if not isinstance(screen, Terminal):
        beside.append(_keep_moving(program))
    tasks = [asyncio.ensure_future(work) for work in beside]
    timed_out = False
    try:
        async with Relay(call, outputs) as relay:
            try:
                async with asyncio.timeout_at(deadline):
                    await call.note(pid=program.pid)
                    await program.ended.wait()
            except TimeoutError:
                timed_out = True
            if isinstance(screen, Terminal) and not timed_out:
                await relay.linger(TERMINAL_LAG)
            relay.stop()
            if timed_out:
                await programs.kill(program)
            await relay.finished()
    except asyncio.CancelledError:
        # The host wants no answer any more. The tree dies before this call does.
        await asyncio.shield(programs.kill(program))
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return timed_out


async def _obey(call: Call, program: Program, programs: Programs, screen: Output) -> None:
    """What the host says while a program runs: signals, a new window size."""
    async for body in call.told():
        if "signal" in body and program.exit_code is None:
            if body.get("tree"):
                await programs.kill(program)
            else:
                send(program.pid, int(body["signal"]))
        if "size" in body and isinstance(screen, Terminal):
            screen.resize(*body["size"])


async def _feed(call: Call, stdin: Input | None) -> None:
    """A program's input, and its end. Waits for the program; nothing else waits with it."""
    async for data in call.incoming():
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
