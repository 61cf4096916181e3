"""What the commands that run something share: exit codes, signals, stdin."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shlex
import signal
import stat
import struct
import termios
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import CallerError, HutchError, NotFound
from hutch.operations import StreamOperation
from hutch.types import BoxInfo, Chunk, Result

from . import BROKEN_PIPE, FAILED
from .screen import OutputStream, cannot_go_on, complain

Launcher = tuple[int, int] | None

TIMED_OUT, NOT_EXECUTABLE, NOT_FOUND = 124, 126, 127
HUNG_UP = 128 + signal.SIGHUP

_LARGE = re.compile(r"(?<![\w.:/-])(\d{7,})(?: bytes)?(?![\w.:/-])")
_OF_PYTHON = re.compile(r", or (?:pass )?api_key=")  # which only the SDK has
READ_SIZE = 64 * 1024
IMAGES = ("alpine", "busybox", "debian", "fedora", "node", "ubuntu")  # users of docker type these
NO_PROGRAM = "no such program in the box"  # the guest's words
WRONG_SCOPE = "this key has scope"  # the server's words, if the key is at fault and not the box


def run_to_end(work: Coroutine[object, object, int]) -> int:
    """Run `work`. Returns its exit code, or the one for a signal, an error or a closed pipe."""
    try:
        return asyncio.run(_cancel_on_signals(work))
    except HutchError as exc:
        complain(_LARGE.sub(_shorten_size, _OF_PYTHON.sub("", str(exc))), error=True)
        return exc.exit_code if isinstance(exc, CannotStart) else FAILED
    except BrokenPipeError:
        return BROKEN_PIPE
    except OSError as exc:
        complain(cannot_go_on(exc), error=True)
        return FAILED


def _shorten_size(match: re.Match[str]) -> str:
    """A size in bytes as people write it: 64g."""
    count = int(match[1])
    for unit, letter in ((1 << 30, "g"), (1 << 20, "m")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return match[0]


class CannotStart(HutchError):
    """A program could not be started. The exit codes are those of env(1) and docker(1)."""

    def __init__(self, cause: HutchError, exit_code: int) -> None:
        super().__init__(str(cause))
        self.code, self.exit_code = cause.code, exit_code  # type: ignore[misc]


@asynccontextmanager
async def explained(
    transport: AsyncTransport, info: BoxInfo, command: Sequence[str]
) -> AsyncIterator[None]:
    """Turn a failure to start a program into CannotStart, which says what is missing."""
    try:
        yield
    except NotFound as exc:
        if NO_PROGRAM not in str(exc):
            raise
        program, problem = command[0], f"there is {NO_PROGRAM}"
        advice = network_advice(command, NOT_FOUND, "")
        if advice and "network" not in info.relaxed:
            problem += f"; {advice}"
        if ":" in program or program in IMAGES:
            problem += f"; if it is an image: hutch run --image {program} -- COMMAND"
        if " " in program:
            problem += f"; to run it in a shell: hutch run -- sh -c {shlex.quote(program)}"
        if "/" in program and await _exists(transport, info.id, program):
            problem = "the interpreter in its first line is not in the box"
        raise CannotStart(NotFound(f"cannot run {program}: {problem}"), NOT_FOUND) from None
    except CallerError as exc:
        if WRONG_SCOPE in str(exc):
            raise
        raise CannotStart(type(exc)(f"cannot run it: {exc}"), NOT_EXECUTABLE) from None


async def _exists(transport: AsyncTransport, session: str, path: str) -> bool:
    try:
        await transport.perform(op.StatFile(session, path))
    except CallerError:
        return False
    return True


async def follow(
    transport: AsyncTransport,
    operation: StreamOperation[Chunk | Result, Result],
    outputs: tuple[OutputStream, OutputStream] | None,
) -> Result:
    """Copy what a command prints to `outputs`, if given, and return its Result."""
    async with aclosing(await transport.stream(operation)) as stream:
        async for item in stream:
            if isinstance(item, Result):
                for output in outputs or ():
                    await output.finish()
                return item
            if outputs:
                await outputs[item.stream == "stderr"].write(item.data)
    raise AssertionError("a command ended without a result")


def text_of(word: str) -> str:
    """The bytes of a command-line word as UTF-8 text, whatever our locale is."""
    return os.fsencode(word).decode("utf-8", "surrogateescape")


async def own_stdin() -> AsyncIterator[bytes]:
    """Our stdin, read only as fast as it is consumed."""
    loop = asyncio.get_running_loop()
    while True:
        readable: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(0, _settle, readable)
        except PermissionError:
            readable.set_result(None)  # a regular file: epoll refuses it, and it is always readable
        try:
            await readable
        finally:
            loop.remove_reader(0)
        try:
            data = os.read(0, READ_SIZE)
        except BlockingIOError:
            continue
        except OSError:
            return  # the terminal hung up
        if not data:
            return
        yield data


def tell_of_unread_stdin(command: str) -> None:
    """Warn if data was piped to a command without --stdin, since it was not passed on.

    Stdin is not forwarded by default: a box would swallow the rest of a script or of a loop's list,
    and a program that reads to the end would hang on a pipe that a CI job never closes.
    """
    if _has_unread_stdin():
        complain(f"your stdin was not passed on; to give it to the command: {command} -i")


def _has_unread_stdin() -> bool:
    """Whether data waits on a stdin meant for us, as in `echo data | hutch run`."""
    try:
        ours = os.fstat(0)
        if stat.S_ISREG(ours.st_mode):
            waiting = ours.st_size if os.lseek(0, 0, os.SEEK_CUR) == 0 else 0
        elif stat.S_ISFIFO(ours.st_mode) or stat.S_ISSOCK(ours.st_mode):
            (waiting,) = struct.unpack("i", fcntl.ioctl(0, termios.FIONREAD, bytes(4)))
        else:
            return False
    except OSError:
        return False
    return waiting > 0 and not _is_stdin_of_parent(ours)


def _is_stdin_of_parent(ours: os.stat_result) -> bool:
    """Whether stdin is only inherited: a script that a shell reads, or the list of a loop."""
    try:
        return os.path.samestat(ours, os.stat(f"/proc/{os.getppid()}/fd/0"))
    except OSError:
        return False


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _cancel_on_signals(work: Coroutine[object, object, int]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(work)
    received: list[int] = []

    def stop(number: int) -> None:
        if not received:  # only once: ending a box takes milliseconds and must not be interrupted
            received.append(number)
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a job in the background
            loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if received:
            return 128 + received[0]
        raise


MOST_PACKAGES = 5  # named in an example
NO_HOST = {"curl": (6, 7), "wget": (4,)}  # exit codes: with -s and -q they print nothing

_PACKAGES = re.compile(r"\b(?:pip[0-9.]*|uv)\s+(?:pip\s+)?(?:install|add)\b([^;&|\n]*)")
_REDIRECTION = re.compile(r"\s\d?[<>]")
_NAMED = re.compile(r"[A-Za-z0-9][\w.-]*(?:\[[\w,.-]*\])?(?:[<>=!~].*)?|\S+\.whl")
_TAKES_VALUE = {"-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-t", "--target",
                "-i", "--index-url", "--extra-index-url", "-f", "--find-links"}  # fmt: skip
_INSTALLS = re.compile(r"\b(?:pip[0-9.]*|uv|npm|yarn|pnpm)\s+(?:pip\s+)?(?:install|add|sync|ci)\b")
_TOOL = re.compile(
    r"(?<![\w./-])(?:\S*/)?(pip[0-9.]*|uvx?|npm|npx|yarn|pnpm|git|curl|wget|apt|apt-get)(?=\s)"
)
_FAILED = re.compile(
    "externally-managed-environment|No matching distribution found|Could not find a version|"
    "Failed to establish a new connection|[Nn]ame resolution|dns error|"
    "[Cc]ould not resolve host|unable to resolve host|Temporary failure resolving|"
    "Network is unreachable|EAI_AGAIN|ENOTFOUND|"
    "dpkg frontend lock|Unable to locate package|apt/lists"
)
_LOOPBACK = re.compile(r"\b(?:localhost|127\.0\.0\.1)\b|\[::1\]")
_INSTALL = "`hutch run --project .` installs what a project asks for"
_FETCH = "Fetch it outside, and show the box the folder: --workspace DIR or -v DIR:/data"
_INSTEAD = {
    "npm": _INSTALL,
    "npx": _INSTALL,
    "yarn": _INSTALL,
    "pnpm": _INSTALL,
    "git": _FETCH,
    "curl": _FETCH,
    "wget": _FETCH,
    "apt": "An image can have the program: hutch image pull IMAGE, then hutch run --image IMAGE",
}


def network_advice(command: Sequence[str], exit_code: int, output: str) -> str:
    """One line of advice; an empty string if the command did not fail for lack of a network."""
    text = " ".join(command)
    tool = _TOOL.search(text)
    if not exit_code or not tool:
        return ""
    name = "apt" if tool[1] == "apt-get" else tool[1]
    has_no_host = exit_code in NO_HOST.get(name, ()) and not _LOOPBACK.search(text)
    has_no_installer = exit_code == NOT_FOUND and _INSTALLS.search(text)
    if not has_no_host and not has_no_installer and not _FAILED.search(output):
        return ""
    instead = _INSTEAD.get(name) or _instead_of_pip(text)
    network = "with network: --backend docker --relax network"
    return f"a box has no network for {name}. {instead}; {network}"


def _instead_of_pip(text: str) -> str:
    install = _PACKAGES.search(text)
    packages = _named_packages(install[1]) if install else ["PACKAGE"]
    if not packages:  # what is installed is a project or a file of requirements
        return _INSTALL
    return (
        f"{_INSTALL}; for other packages: hutch image build mine --packages "
        f"{shlex.join(packages[:MOST_PACKAGES])}, then hutch run --image mine"
    )


def _named_packages(arguments: str) -> list[str]:
    """The packages among the arguments of an installer."""
    try:
        words = iter(shlex.split(_REDIRECTION.split(arguments)[0]))
    except ValueError:  # a quote without an end
        return ["PACKAGE"]
    named = []
    for word in words:
        if word in _TAKES_VALUE:
            next(words, None)
        elif _NAMED.fullmatch(word):
            named.append(word)
    return named
