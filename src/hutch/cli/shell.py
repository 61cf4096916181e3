"""`hutch shell`: open a terminal in a box."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import termios
import tty
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import HutchError
from hutch.types import Result

from . import FAILED, may_be_session
from .boxes import box_for, dismiss, refuse_box_options, warn_of_limits
from .options import Parser, add_box_options, make_parser, split, to_operation
from .program import HUNG_UP, Launcher, explained, own_stdin, run_to_end, text_of
from .screen import OutputStream, complain

LOGIN_SHELL = ("/bin/sh", "-c", "[ -x /bin/bash ] && exec /bin/bash -l; exec /bin/sh -l")

# What a program must know about the user's terminal.
PASSED_ON = ("TERM", "COLORTERM")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch shell",
        "hutch shell [options] [--] [COMMAND [ARGUMENT...]]\n"
        "       hutch shell [--url URL] SESSION [--] [COMMAND [ARGUMENT...]]",
        "Open a terminal in a fresh box, for a shell or the given command. `exit` or\n"
        "Ctrl-D leaves it, and nothing is left but what was written to a workspace or\n"
        "mount. A box has no network. A session of a server stays open when you leave.",
        "exit codes: as for hutch run.\n"
        "\n"
        "examples:\n"
        "  hutch shell --workspace .\n"
        "  hutch shell --mount ~/notes:/notes:ro -- vim /notes/today.md\n"
        "  hutch shell 3f9d0c1a-77e",
    )
    add_box_options(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    try:
        parser = build_parser()
        options, command = split(words, parser.with_value())
        args = parser.parse_args(options)
        args.given = options
        args.session = None
        if command and may_be_session(command[0]) and "--" not in words[: len(options) + 1]:
            refuse_box_options(options, ())
            args.session, *command = command
            command = command[1:] if command[:1] == ["--"] else command
        box = to_operation(args)
    except HutchError:
        dismiss(launcher)
        raise
    return run_in_terminal(box, args, command, launcher)


def run_in_terminal(
    box: op.OpenSession, args: argparse.Namespace, command: list[str], launcher: Launcher
) -> int:
    """Run the command in a terminal of a new box, or of the session in `args`."""
    if not os.isatty(0):
        complain(
            "stdin is not a terminal. To run a script from stdin: hutch run --stdin -- sh, or "
            "hutch exec --stdin SESSION -- sh",
            error=True,
        )
        dismiss(launcher)
        return FAILED
    passed_on = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name)}
    variables = passed_on | dict(box.env)
    args.argv = tuple(map(text_of, command)) or LOGIN_SHELL
    args.session = getattr(args, "session", None)
    args.env = variables if args.session else {}
    return run_to_end(_run(replace(box, env=variables), args, launcher))


async def _run(box: op.OpenSession, args: argparse.Namespace, launcher: Launcher) -> int:
    async with box_for(args, box, launcher) as (transport, info):
        warn_of_limits(args.given, info)
        program = op.StartProgram(info.id, args.argv, env=args.env, terminal=_window())
        async with explained(transport, info, args.argv):
            process = await transport.perform(program)
        try:
            return await _attach(transport, info.id, process.id)
        finally:
            if args.session:  # the session stays open, and its program would go on unseen
                await transport.perform(op.SignalProgram(info.id, process.id, tree=True))


async def _attach(transport: AsyncTransport, session: str, process: str) -> int:
    with raw_terminal() as modes:
        showing = asyncio.ensure_future(_show(transport, session, process, modes))
        typing = asyncio.ensure_future(_type(transport, session, process))
        sizing = asyncio.ensure_future(_resize(transport, session, process))
        try:
            await asyncio.wait((showing, typing), return_when=asyncio.FIRST_COMPLETED)
            return showing.result() if showing.done() else HUNG_UP
        finally:
            for task in (showing, typing, sizing):
                task.cancel()
            await asyncio.gather(showing, typing, sizing, return_exceptions=True)


async def _show(transport: AsyncTransport, session: str, process: str, modes: TerminalModes) -> int:
    output = OutputStream(1, raw=True)
    async with aclosing(await transport.stream(op.FollowProgram(session, process))) as stream:
        async for item in stream:
            if isinstance(item, Result):
                return item.exit_code
            modes.watch(item.data)
            await output.write(item.data)
    raise AssertionError("a terminal ended without a result")


async def _type(transport: AsyncTransport, session: str, process: str) -> None:
    """Send what is typed. Returns only if our terminal hangs up."""
    try:
        async for data in own_stdin():
            await transport.perform(op.SendInput(session, process, data))
    except HutchError:
        await asyncio.Event().wait()  # the box is gone, and `_show` reports why


async def _resize(transport: AsyncTransport, session: str, process: str) -> None:
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGWINCH, changed.set)
    # While we were stopped, the user's shell changed the terminal's mode.
    loop.add_signal_handler(signal.SIGCONT, tty.setraw, 0)
    while True:
        columns, rows = _window()
        await transport.perform(op.ResizeTerminal(session, process, columns, rows))
        await changed.wait()
        changed.clear()


def _window() -> tuple[int, int]:
    """Columns and rows; 80 by 24 if the terminal does not know."""
    columns, rows = os.get_terminal_size(0)
    return columns or 80, rows or 24


@contextmanager
def raw_terminal() -> Iterator[TerminalModes]:
    """Send every key to the box. The terminal is restored however the `with` ends."""
    before = termios.tcgetattr(0)
    modes = TerminalModes()
    try:
        tty.setraw(0)
        yield modes
    finally:
        try:
            # Keys meant for the box, and the terminal's replies to it, must not reach the user's
            # shell.
            termios.tcflush(0, termios.TCIFLUSH)
            termios.tcsetattr(0, termios.TCSANOW, before)
            os.write(1, modes.back())
        except (OSError, termios.error):
            pass  # the terminal is gone


class TerminalModes:
    """Terminal modes that a box has set, to be reset if it does not reset them itself.

    A box that is killed while it shows an editor would leave the alternate screen, no cursor, and
    mouse clicks that type.
    """

    _SWITCH = re.compile(rb"\x1b\[\?([0-9;]{1,30})([hl])")
    _USUALLY_ON = frozenset({25})  # the cursor
    _KNOWN = frozenset(
        {1, 9, 25, 47, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007, 1015, 1016, 1047, 1049, 2004}
    )

    def __init__(self) -> None:
        self._on: dict[int, bool] = {}
        self._last = b""
        self._plain = True

    def watch(self, data: bytes) -> None:
        data = self._last + data
        for numbers, how in self._SWITCH.findall(data):
            for number in filter(None, numbers.split(b";")):
                self._on[int(number)] = how == b"h"
        self._last = data[-40:]  # a sequence may be cut in two
        self._plain = self._plain and b"\x1b" not in data

    def back(self) -> bytes:
        """The bytes that reset the terminal."""
        wrong = [n for n, on in self._on.items() if on != (n in self._USUALLY_ON)]
        undo = [
            b"\x1b[?%d%c" % (n, b"h" if n in self._USUALLY_ON else b"l")
            for n in wrong
            if n in self._KNOWN
        ]
        return b"" if self._plain else b"".join(undo) + b"\x1b[0m"
