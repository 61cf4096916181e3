"""Kept shells: one real bash each (sh where there is none), alive from call to call.

A command can neither eat the next one nor forge an answer: what it reads and prints goes
elsewhere, what it starts inherits neither of our sockets (the redirections close both, and what
bash saves meanwhile is close-on-exec), and an answer begins with a token that was made for this
command. An answer is

    token NUL exit status NUL working directory NUL `export -p` NUL

and the environment in it is what a successor starts with, should the shell end.

To stop a command without losing the shell, bash gets a signal; see dialects.py for its trap.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import struct
import termios
from typing import Any, NamedTuple

from hutch import wire

from . import dialects
from .agent import RequestError, Responder
from .dialects import Dialect
from .pipes import OutputPipe, Relay
from .process import TIMED_OUT
from .spawn import Program, Programs
from .tree import Moment, kill_all, send

ABORT = signal.SIGRTMIN + 7
ABORT_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds until the next, stronger wish
STATE_LIMIT = 4 * 1024 * 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ShellState(NamedTuple):
    """What a shell says about itself after a command."""

    status: int
    cwd: str
    exports: str


class KeptShell:
    """One kept shell. Commands queue for it and run one at a time, in order."""

    def __init__(
        self, name: str, programs: Programs, cwd: str, env: dict[str, str], user: str | None
    ) -> None:
        self.name = name
        self._programs, self._env, self.user = programs, env, user
        self.cwd, self._exports = cwd, ""
        self._turn = asyncio.Lock()
        self._process: ShellProcess | None = None  # None: the next command starts one
        self._had_one = self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "busy" if self._turn.locked() else "free"
        return f"<KeptShell {self.name}, {state}>"

    async def run(self, request: wire.Shell, responder: Responder) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        deadline = None if request.timeout is None else loop.time() + request.timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
        except TimeoutError:
            text = f"shell {self.name!r} was busy with another command all the time\n"
            await responder.send(text.encode(), wire.STDERR)
            return self._result(TIMED_OUT, timed_out=True)
        try:
            command = request.command
            if command is None:  # not before it is our turn: a later one shall not overtake it
                data = b"".join([piece async for piece in responder.incoming()])
                command = data.decode("utf-8", "surrogateescape")
            return await self._run(command, deadline, responder)
        finally:
            self._turn.release()

    async def _run(
        self, command: str, deadline: float | None, responder: Responder
    ) -> dict[str, Any]:
        restarted = await self._start()
        process = self._process
        assert process
        since = Moment.now()
        watch = asyncio.create_task(process.watch(since))
        state: ShellState | None = None
        timed_out = whole = False
        try:
            async with Relay(
                responder, {wire.STDOUT: process.out, wire.STDERR: process.err}
            ) as relay:
                try:
                    async with asyncio.timeout_at(deadline):
                        state = await process.ask(command)
                except TimeoutError:
                    timed_out = True
                watch.cancel()
                relay.stop()
                if state is None:
                    state = await process.abort(since)
                await relay.finished()
                whole = not timed_out
        except BaseException:
            # The host wants no answer any more, and the next command nothing of this one.
            if state is None:
                state = await asyncio.shield(process.abort(since))
            raise
        finally:
            watch.cancel()
            if not whole:
                process.out.drop()
                process.err.drop()
            code = self._take(process, state)
        return self._result(TIMED_OUT if timed_out else code, timed_out, restarted)

    def _result(self, code: int, timed_out: bool, restarted: bool = False) -> dict[str, Any]:
        return {
            "exit_code": code, "cwd": self.cwd, "timed_out": timed_out, "restarted": restarted,
        }  # fmt: skip

    def _take(self, process: ShellProcess, state: ShellState | None) -> int:
        """What the next command, or the next shell, starts from; and the exit code."""
        if state is None:
            state = process.last_words()
            process.release()
            self._process = None
        if state is None:  # killed, or replaced by exec: what was before this command stands
            return process.exit_code
        self._exports = state.exports
        if state.cwd.startswith("/") and len(state.cwd) < 4096:  # PWD may be set to anything
            self.cwd = state.cwd
        return state.status

    async def open(self) -> None:
        """Returns when the shell runs."""
        async with self._turn:
            await self._start()

    async def _start(self) -> bool:
        """See that one runs: whether it had to take the place of another.

        It stands where that stood, and has what that had exported.
        """
        if self._closed:
            raise RequestError("not_found", f"shell {self.name!r} was closed")
        if self._process and self._process.program.exit_code is not None:
            self._take(self._process, None)  # it ended between two commands
        if self._process:
            return False
        cwd = self.cwd if os.path.isdir(self.cwd) else "/"
        # The box's user can write to this folder: at a name that can be guessed, a pipe would
        # block the shell's exit, and a file prepared there would get to see the token.
        last_words = f"{self._programs.config.private}/{os.urandom(16).hex()}"
        process = ShellProcess(self._programs, dialects.find(), last_words)
        try:
            await process.start(cwd, self._env, self.user, self._exports)
        except BaseException:
            process.release()
            raise
        self._process = process
        restarted, self._had_one = self._had_one, True
        return restarted

    async def close(self) -> None:
        """End the shell and everything it started. A command that runs is its last."""
        self._closed = True
        if self._process:
            await self._programs.kill(self._process.program)
        async with self._turn:
            if self._process:
                await self._programs.kill(self._process.program)
                self._process.release()
                self._process = None


class ShellProcess:
    """One shell process, and our ends of what it reads and writes."""

    program: Program

    def __init__(self, programs: Programs, dialect: Dialect, last_words: str) -> None:
        self._programs, self._dialect, self._last_words = programs, dialect, last_words
        self._loop = asyncio.get_running_loop()
        self._prelude = b""  # not sent yet
        self._token = b""
        self._last_token = os.urandom(8).hex()
        self._heard = b""
        self._torn = False  # it has part of a line, and can never be given another
        self._listens = True
        with contextlib.ExitStack() as undo:
            self._commands, self._their_commands = socket.socketpair()
            undo.callback(self._commands.close)
            undo.callback(self._their_commands.close)
            self._answers, self._their_answers = socket.socketpair()
            undo.callback(self._answers.close)
            undo.callback(self._their_answers.close)
            self.out = OutputPipe()
            undo.callback(self.out.close)
            self.err = OutputPipe()
            undo.pop_all()

    async def start(self, cwd: str, env: dict[str, str], user: str | None, exports: str) -> None:
        dialect = self._dialect
        executable = self._programs.unreadable(dialect.argv[0])
        null = os.open("/dev/null", os.O_RDWR)
        try:
            self.program = await self._programs.start(
                list(dialect.argv), cwd=cwd, user=user, executable=executable,
                env={**env, "SHELL": dialect.argv[0], "PWD": cwd},
                fds={
                    0: self._their_commands.fileno(), 1: null, 2: null,
                    dialect.out: self.out.writer, dialect.err: self.err.writer,
                    dialect.answers: self._their_answers.fileno(),
                },
            )  # fmt: skip
        finally:
            os.close(null)
            self._their_commands.close()
            self._their_answers.close()
        self.out.started()
        self.err.started()
        self._commands.setblocking(False)
        self._answers.setblocking(False)
        self._prelude = dialect.prelude(cwd, exports, self._last_words, self._last_token)
        self.program.when_ended = self._stop_listening
        if self.program.exit_code is not None:
            self._stop_listening()

    def _stop_listening(self) -> None:
        # A child may hold the other end for ever. What was said is still heard.
        with contextlib.suppress(OSError):
            self._answers.shutdown(socket.SHUT_RD)

    async def ask(self, command: str) -> ShellState | None:
        """Give the shell a command; its state afterwards, or None if it ended instead."""
        token = os.urandom(8).hex()
        self._token = token.encode()
        loop = self._programs.config.loop
        line = self._dialect.line(command, token, loop)
        self._torn = True
        with contextlib.suppress(OSError):  # it ended: the answer says so
            await self._loop.sock_sendall(self._commands, self._prelude + line)
            self._prelude, self._torn = b"", False
            # A space belongs to no command. Once it is read, the shell waits for its next line.
            await self._loop.sock_sendall(self._commands, b" ")
        return await self._answer()

    async def _answer(self) -> ShellState | None:
        start = self._token + b"\0"
        while True:
            _, found, said = self._heard.partition(start)
            if found and said.count(b"\0") >= 3:
                self._heard = b""
                return _state(said)
            # Whatever came before the token was no answer to this command.
            self._heard = found + said if found else self._heard[-len(start) :]
            if len(self._heard) > STATE_LIMIT:
                await self._programs.kill(self.program)
                return None
            try:
                data = await self._loop.sock_recv(self._answers, 65536)
            except OSError:
                data = b""
            if not data:
                # It has ended, or exec has put something in its place that has yet to end.
                self._listens = False
                await self.program.ended.wait()
                return None
            self._heard += data

    async def watch(self, since: Moment) -> None:
        """While a command runs: wake what has stopped itself, end a shell that cannot answer."""
        pause, idle = 0.5, 0
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 5)
            self.program.keep_moving(since)
            # `set -n`, say, or `builtin` redefined: it has run the line, and has said nothing.
            idle = idle + 1 if self._dialect.can_abort and self._waits_for_a_line() else 0
            if idle > 1:
                await self._programs.kill(self.program)

    def _waits_for_a_line(self) -> bool:
        if self._torn or not self._listens:
            return False
        unread = fcntl.ioctl(self._commands, termios.TIOCOUTQ, b"\0" * 4)
        return bool(struct.unpack("i", unread)[0] == 0)

    async def abort(self, since: Moment) -> ShellState | None:
        """Stop the running command. The shell survives if it can; if not, None."""
        program = self.program
        if self._dialect.can_abort and not self._torn:
            for pause in ABORT_PAUSES:
                if program.exit_code is not None:
                    return None
                send(program.pid, ABORT)
                kill_all(lambda: program.children(since))
                send(program.pid, signal.SIGCONT)
                try:
                    async with asyncio.timeout(pause):
                        if state := await self._answer():
                            return state
                except TimeoutError:
                    continue
        if program.exit_code is None:
            await self._programs.kill(program)
        return None

    def last_words(self) -> ShellState | None:
        """The state that an ended shell left behind, if it had the time to."""
        try:
            # Its folder is the user's: this may be anything by now.
            fd = os.open(self._last_words, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError:
            return None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            return None
        with open(fd, "rb") as file:
            token, _, state = file.read(STATE_LIMIT).partition(b"\0")
        if token != self._last_token.encode():
            return None
        # A child may have seen the token, now that it is in a file, and have written another.
        cwd, _, exports = state.partition(b"\0")
        only = dialects.only_exports(os.fsdecode(exports))
        return ShellState(self.exit_code, os.fsdecode(cwd), only)

    @property
    def exit_code(self) -> int:
        code = self.program.exit_code
        return 128 + signal.SIGKILL if code is None else code

    def release(self) -> None:
        with contextlib.suppress(OSError):  # most shells left nothing
            os.unlink(self._last_words)
        for sock in (self._commands, self._answers, self._their_commands, self._their_answers):
            sock.close()
        self.out.abandon()
        self.err.abandon()


def _state(said: bytes) -> ShellState:
    status, cwd, exports = (os.fsdecode(part) for part in said.split(b"\0")[:3])
    return ShellState(int(status) if status.isdigit() else 1, cwd, exports)


class Shells:
    """The shells of this box, by name. `main` is there whenever it is asked for."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._shells: dict[str, KeptShell] = {}

    async def run(self, request: wire.Shell, responder: Responder) -> dict[str, Any]:
        shell = self._shells.get(request.shell)
        if shell is None:
            if request.shell != "main":
                raise RequestError("not_found", f"no shell {request.shell!r} in this box")
            shell = self._make(wire.OpenShell("main"))
        return await shell.run(request, responder)

    def pids(self) -> list[int]:
        return [s._process.program.pid for s in self._shells.values() if s._process]

    def entries(self) -> list[dict[str, Any]]:
        return [{"name": shell.name, "user": shell.user} for shell in self._shells.values()]

    async def open(self, request: wire.OpenShell, responder: Responder) -> dict[str, Any]:
        if not NAME.fullmatch(request.shell):
            raise RequestError("invalid_request", f"not a name for a shell: {request.shell!r}")
        if request.shell in self._shells:
            raise RequestError("conflict", f"there is a shell {request.shell!r} already")
        shell = self._make(request)
        try:
            if not os.path.isdir(shell.cwd):
                raise RequestError("not_found", f"no such folder in the box: {request.cwd}")
            await shell.open()
        except BaseException:
            del self._shells[request.shell]
            raise
        return {}

    async def close(self, request: wire.CloseShell, responder: Responder) -> dict[str, Any]:
        shell = self._shells.pop(request.shell, None)
        if shell is None:
            raise RequestError("not_found", f"no shell {request.shell!r} in this box")
        await asyncio.shield(shell.close())
        return {}

    def _make(self, request: wire.OpenShell) -> KeptShell:
        cwd = os.path.join(self._programs.config.workdir, request.cwd or "")
        cwd = cwd.rstrip("/") or "/"
        shell = KeptShell(request.shell, self._programs, cwd, request.env, request.user)
        self._shells[request.shell] = shell
        return shell
