"""Kept shells: one bash each (sh in an image without bash), alive from call to call.

A shell reads its script from a socket: first a prelude, then one line per command. The line
evaluates the command with its own stdin, stdout and stderr, then answers on another socket.
A command can neither read the next one nor forge an answer: its children inherit neither socket
(the redirections close both, and the copies that bash saves are close-on-exec), and an answer
begins with a token that is made for this command. An answer is

    token NUL exit status NUL working directory NUL `export -p` NUL

If the shell ends, the next one starts with that environment.

To stop a command without losing the shell, bash gets a signal, for which the prelude sets a trap.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shlex
import signal
import socket
import stat
import struct
import termios
from dataclasses import dataclass
from typing import NamedTuple

from hutch import wire

from .agent import NAME, RequestError, Responder
from .pipes import OutputPipe, Relay
from .procfs import Moment, kill_all, send
from .programs import TIMED_OUT
from .spawn import Program, Programs

# In bash, a backslash avoids aliases of the user, and `builtin` avoids functions.
#
# The first trap stops a command: it sets a DEBUG trap for every command that follows, which unwinds
# functions and loops up to loop.sh. That file is sourced only so that there is something to return
# from. Both traps do nothing between commands, so a late signal is harmless. Any process of the box
# can send the signal, so the line itself removes the second trap: a signal stops at most the
# command that runs.
_BASH = r"""\shopt -s expand_aliases
\builtin trap '[[ $__hutch_busy ]] && { __hutch_stopped=1; \builtin set -T
  \builtin trap "[[ \$__hutch_busy ]] && \builtin return 130" DEBUG; \builtin return 130; }' RTMIN+7
\builtin trap LAST_WORDS EXIT
__hutch_last=0 __hutch_busy= __hutch_stopped=
__hutch_status() { return "$1"; }
__hutch_answer() { { \builtin printf '%s\0%d\0%s\0' "$1" "$__hutch_last" "${PWD-}"
  \builtin export -p; \builtin printf '\0'; } >&254; }
\builtin eval EXPORTS
PWD=CWD
"""
_BASH_LAST_WORDS = r"""{ \builtin printf '%s\0%s\0' TOKEN "${PWD-}"; \builtin export -p; } >|PATH"""
# After `set -a`, the command would be exported, and a long one breaks every exec.
_BASH_LINE = (
    r"__hutch_command=COMMAND;\builtin export -n __hutch_command;"
    r"\. LOOP;__hutch_last=$? __hutch_busy=;"
    r"[[ ${__hutch_stopped-} ]]&&{ \builtin trap - DEBUG;\builtin set +T;__hutch_stopped=;};"
    r"__hutch_answer TOKEN"
)

# `command` keeps a syntax error from ending the shell. dash knows only one-digit descriptors.
_SH = r"""trap LAST_WORDS 0
__hutch_last=0
__hutch_status() { return "$1"; }
__hutch_answer() { { printf '%s\0%d\0%s\0' "$1" "$__hutch_last" "${PWD-}"
  export -p; printf '\0'; } >&9; }
command eval EXPORTS
PWD=CWD
"""
_SH_LAST_WORDS = r"""{ printf '%s\0%s\0' TOKEN "${PWD-}"; export -p; } >|PATH"""
_SH_LINE = (
    r"__hutch_command=COMMAND;"
    r'case $- in *e*) ;; *) __hutch_status "$__hutch_last";; esac;'
    r'command eval "$__hutch_command" </dev/null >&7 2>&8 7>&- 8>&- 9>&-;'
    r"__hutch_last=$?;__hutch_answer TOKEN"
)


@dataclass(frozen=True)
class Dialect:
    """How to talk to one kind of shell, and the descriptors that it uses."""

    argv: tuple[str, ...]
    out: int
    err: int
    answers: int
    can_abort: bool  # a command can be stopped without losing the shell
    _prelude: str
    _last_words: str
    _line: str

    def prelude(self, cwd: str, exports: str, last_words: str, token: str) -> bytes:
        """Script that sets a shell up. When it exits, it writes the token and its state to a file.

        `last_words` is that file. Only the shell knows its name and the token until it is written,
        so a file that a child made there can be told apart.
        """
        trap = _fill(self._last_words, PATH=last_words, TOKEN=token)
        return os.fsencode(_fill(self._prelude, LAST_WORDS=trap, CWD=cwd, EXPORTS=exports))

    def line(self, command: str, token: str, loop: str) -> bytes:
        """Script that runs one command and answers with the token."""
        text = _fill(self._line, TOKEN=token, LOOP=loop, COMMAND=command)
        return os.fsencode(text + "\n")


def _fill(template: str, **words: str) -> str:
    """Fill in a template, quoted. All words at once, as one value may contain another word."""
    return re.sub("|".join(words), lambda word: shlex.quote(words[word[0]]), template)


# What `export -p` prints, in bash, dash and busybox: one variable per statement, its value quoted,
# with nothing in it that a shell would expand. An integer variable (-i) is evaluated as arithmetic
# when it is assigned, and that can run a command: it must be a number.
_VALUE = r"""(?:"(?:[^"\\$`]|\\[\s\S])*"|\$'(?:[^'\\]|\\[\s\S])*'|'[^']*'|\\')*"""
_NAME = "(?!__hutch)[A-Za-z_][A-Za-z0-9_]*"
_EXPORT = re.compile(
    rf"(?:export|declare -[rxlut]+) {_NAME}(?:={_VALUE})?\n"
    rf'|declare -[rxluti]+ {_NAME}="-?[0-9]+"\n'
)


def only_exports(text: str) -> str:
    """The statements of an `export -p` that can do nothing but set a variable.

    For text that other programs could have written: the next shell evaluates it, and a function in
    it could replace a builtin.
    """
    kept, at = [], 0
    while at < len(text):
        if statement := _EXPORT.match(text, at):
            kept.append(statement[0])
            at = statement.end()
        else:
            at = text.find("\n", at) + 1 or len(text)
    return "".join(kept)


def find_dialect() -> Dialect:
    """bash if the box has it, else sh."""
    for path in ("/bin/bash", "/usr/bin/bash"):
        if os.access(path, os.X_OK):
            return Dialect(
                (path, "--norc", "--noprofile"),
                251,
                252,
                254,
                True,
                _BASH,
                _BASH_LAST_WORDS,
                _BASH_LINE,
            )
    return Dialect(("/bin/sh",), 7, 8, 9, False, _SH, _SH_LAST_WORDS, _SH_LINE)


ABORT = signal.SIGRTMIN + 7
ABORT_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)  # seconds between attempts to stop a command
STATE_LIMIT = 4 * 1024 * 1024


class ShellState(NamedTuple):
    """The state of a shell after a command."""

    status: int
    cwd: str
    exports: str


class KeptShell:
    """One kept shell. Commands queue and run one at a time, in order."""

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

    async def run(self, request: wire.ShellCommand, responder: Responder) -> dict[str, object]:
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
            if command is None:  # read only now, so that a later command cannot overtake it
                data = b"".join([piece async for piece in responder.incoming()])
                command = data.decode("utf-8", "surrogateescape")
            return await self._run(command, deadline, responder)
        finally:
            self._turn.release()

    async def _run(
        self, command: str, deadline: float | None, responder: Responder
    ) -> dict[str, object]:
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
            # Cancelled: the next command must see nothing of this one.
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

    def _result(self, code: int, timed_out: bool, restarted: bool = False) -> dict[str, object]:
        return {
            "exit_code": code,
            "cwd": self.cwd,
            "timed_out": timed_out,
            "restarted": restarted,
        }

    def _take(self, process: ShellProcess, state: ShellState | None) -> int:
        """Take over the state that the next command or shell starts with. Returns the exit code."""
        if state is None:
            state = process.last_words()
            process.release()
            self._process = None
        if state is None:  # killed, or replaced by exec: the state before this command stays
            return process.exit_code
        self._exports = state.exports
        if state.cwd.startswith("/") and len(state.cwd) < 4096:  # user code can set PWD to anything
            self.cwd = state.cwd
        return state.status

    async def open(self) -> None:
        """Returns when the shell runs."""
        async with self._turn:
            await self._start()

    async def _start(self) -> bool:
        """Start the shell if none runs. True if it replaces one that ended.

        It starts in the folder and with the exports of that one. Raises RequestError if the shell
        was closed or cannot be started.
        """
        if self._closed:
            raise RequestError("not_found", f"shell {self.name!r} was closed")
        if self._process and self._process.program.exit_code is not None:
            self._take(self._process, None)  # it ended between two commands
        if self._process:
            return False
        cwd = self.cwd if os.path.isdir(self.cwd) else "/"
        # User code can write to this folder. At a name that it could guess, a pipe would block the
        # exit of the shell, and a file would receive the token.
        last_words = f"{self._programs.config.private}/{os.urandom(16).hex()}"
        process = ShellProcess(self._programs, find_dialect(), last_words)
        try:
            await process.start(cwd, self._env, self.user, self._exports)
        except BaseException:
            process.release()
            raise
        self._process = process
        restarted, self._had_one = self._had_one, True
        return restarted

    async def close(self) -> None:
        """End the shell and everything it started. A running command is killed."""
        self._closed = True
        if self._process:
            await self._programs.kill(self._process.program)
        async with self._turn:
            if self._process:
                await self._programs.kill(self._process.program)
                self._process.release()
                self._process = None


class ShellProcess:
    """One shell process, and our ends of its sockets and pipes."""

    program: Program

    def __init__(self, programs: Programs, dialect: Dialect, last_words: str) -> None:
        self._programs, self._dialect, self._last_words = programs, dialect, last_words
        self._loop = asyncio.get_running_loop()
        self._prelude = b""  # not sent yet
        self._token = b""
        self._last_token = os.urandom(8).hex()
        self._received = b""
        self._torn = False  # a line was sent in part, so no other can follow
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
                list(dialect.argv),
                cwd=cwd,
                user=user,
                executable=executable,
                env={**env, "SHELL": dialect.argv[0], "PWD": cwd},
                fds={
                    0: self._their_commands.fileno(),
                    1: null,
                    2: null,
                    dialect.out: self.out.writer,
                    dialect.err: self.err.writer,
                    dialect.answers: self._their_answers.fileno(),
                },
            )
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
        # A child may hold the other end forever. What was sent can still be read.
        with contextlib.suppress(OSError):
            self._answers.shutdown(socket.SHUT_RD)

    async def ask(self, command: str) -> ShellState | None:
        """Run a command. Returns the state after it, or None if the shell ended."""
        token = os.urandom(8).hex()
        self._token = token.encode()
        loop = self._programs.config.loop
        line = self._dialect.line(command, token, loop)
        # If this is cancelled while it sends, part of a line is in the socket. Bash would join the
        # next line to it.
        self._torn = True
        with contextlib.suppress(OSError):  # it ended: the answer says so
            await self._loop.sock_sendall(self._commands, self._prelude + line)
            self._prelude, self._torn = b"", False
            # Once this space is read, the shell waits for its next line.
            await self._loop.sock_sendall(self._commands, b" ")
        return await self._answer()

    async def _answer(self) -> ShellState | None:
        start = self._token + b"\0"
        while True:
            _, token, answer = self._received.partition(start)
            if token and answer.count(b"\0") >= 3:
                self._received = b""
                return _state(answer)
            # What comes before the token is not the answer to this command.
            self._received = token + answer if token else self._received[-len(start) :]
            if len(self._received) > STATE_LIMIT:
                await self._programs.kill(self.program)
                return None
            data = await receive(self._answers)
            if not data:
                # It has ended, or exec has replaced it by a program that still runs.
                self._listens = False
                await self.program.ended.wait()
                return None
            self._received += data

    async def watch(self, since: Moment) -> None:
        """While a command runs: continue stopped processes, and kill a shell that cannot answer."""
        pause, idle = 0.5, 0
        while True:
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, 5)
            self.program.keep_moving(since)
            # After `set -n`, or with `builtin` redefined, it runs the line and does not answer.
            idle = idle + 1 if self._dialect.can_abort and self._waits_for_a_line() else 0
            if idle > 1:
                await self._programs.kill(self.program)

    def _waits_for_a_line(self) -> bool:
        if self._torn or not self._listens:
            return False
        unread = fcntl.ioctl(self._commands, termios.TIOCOUTQ, b"\0" * 4)
        return bool(struct.unpack("i", unread)[0] == 0)

    async def abort(self, since: Moment) -> ShellState | None:
        """Stop the running command. Returns the state after it, or None if the shell was killed."""
        program = self.program
        if self._dialect.can_abort and not self._torn:
            for pause in ABORT_PAUSES:
                if program.exit_code is not None:
                    return None
                # Bash runs a trap only when the program that it waits for has ended, so that is
                # killed; and not while bash itself is stopped. It may have started another program
                # in between, hence several attempts.
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
        """The state that the shell wrote when it exited, or None."""
        try:
            # User code can write to this folder, so the file may be anything.
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
        # A child may have read the token from the file and written another one: nothing in it is
        # trusted.
        cwd, _, exports = state.partition(b"\0")
        return ShellState(self.exit_code, os.fsdecode(cwd), only_exports(os.fsdecode(exports)))

    @property
    def exit_code(self) -> int:
        code = self.program.exit_code
        return 128 + signal.SIGKILL if code is None else code

    def release(self) -> None:
        with contextlib.suppress(OSError):  # most shells do not leave this file
            os.unlink(self._last_words)
        for sock in (self._commands, self._answers, self._their_commands, self._their_answers):
            sock.close()
        self.out.abandon()
        self.err.abandon()


async def receive(sock: socket.socket) -> bytes:
    """What comes from a socket, or b"" at its end.

    A caller that is cancelled loses nothing. `sock_recv` of the loop would: what it has just read.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            return sock.recv(65536)
        except BlockingIOError:
            readable = asyncio.Event()
            loop.add_reader(sock, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(sock)
        except OSError:
            return b""


def _state(answer: bytes) -> ShellState:
    status, cwd, exports = (os.fsdecode(part) for part in answer.split(b"\0")[:3])
    return ShellState(int(status) if status.isdigit() else 1, cwd, exports)


class ShellHandlers:
    """The shells of this box, by name. `main` is made when it is first used."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        self._shells: dict[str, KeptShell] = {}

    async def run(self, request: wire.ShellCommand, responder: Responder) -> dict[str, object]:
        shell = self._shells.get(request.shell)
        if shell is None:
            if request.shell != "main":
                raise RequestError("not_found", f"no shell {request.shell!r} in this box")
            shell = self._make(wire.StartShell("main"))
        return await shell.run(request, responder)

    def pids(self) -> list[int]:
        return [s._process.program.pid for s in self._shells.values() if s._process]

    def entries(self) -> list[dict[str, object]]:
        return [{"name": shell.name, "user": shell.user} for shell in self._shells.values()]

    async def open(self, request: wire.StartShell, responder: Responder) -> dict[str, object]:
        if not NAME.fullmatch(request.shell):
            raise RequestError("invalid_request", f"invalid shell name: {request.shell!r}")
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

    async def close(self, request: wire.EndShell, responder: Responder) -> dict[str, object]:
        shell = self._shells.pop(request.shell, None)
        if shell is None:
            raise RequestError("not_found", f"no shell {request.shell!r} in this box")
        await asyncio.shield(shell.close())
        return {}

    def _make(self, request: wire.StartShell) -> KeptShell:
        cwd = os.path.join(self._programs.config.workdir, request.cwd or "")
        cwd = cwd.rstrip("/") or "/"
        shell = KeptShell(request.shell, self._programs, cwd, request.env, request.user)
        self._shells[request.shell] = shell
        return shell
