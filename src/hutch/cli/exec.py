"""`hutch exec`: a command in a session that is there already."""

from __future__ import annotations

import argparse
import asyncio

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import HutchError, InvalidRequest
from hutch.types import Process, Result

from .options import Parser, add_terminal_options, make_parser, seconds, split, user_of, variables
from .program import (
    FAILED,
    TIMED_OUT,
    Launcher,
    explained,
    follow,
    own_stdin,
    run_to_end,
    tell_of_unread_stdin,
    text_of,
)
from .screen import Screen, complain
from .server import add_server_option, in_session

EXAMPLE = "hutch exec SESSION -- echo hello (see hutch exec --help)"


def parser() -> Parser:
    made = make_parser(
        "hutch exec",
        "hutch exec [options] SESSION [--] COMMAND [ARGUMENT...]\n"
        "       hutch exec --shell [options] SESSION [--] TEXT...",
        "Run a command in a session. Its output comes as it is made, and its exit code is\n"
        "ours. If hutch is stopped, so is the command. With --shell, the words are typed\n"
        "into the session's own shell, where folder and variables stay from one command\n"
        "to the next.",
        "exit codes: as those of hutch run.\n"
        "\n"
        "examples:\n"
        "  hutch exec 3f9d0c1a-77e -- python3 -V\n"
        "  hutch exec --shell 3f9d0c1a-77e 'cd /tmp; export A=1'\n"
        "  tar c src | hutch exec --stdin 3f9d0c1a-77e -- tar x",
    )
    made.add_argument("--shell", action="store_true", help="in the session's own shell")
    made.add_argument("--timeout", metavar="TIME", help="stop it after 90, 90s, 5m or 1h")
    add_terminal_options(made)
    made.add_argument("-w", "--workdir", metavar="PATH", help="where to start")
    made.add_argument("-e", "--env", action="append", default=[], metavar="NAME[=VALUE]",
                      help="set a variable; without a value, yours is passed on; may be "
                      "repeated")  # fmt: skip
    made.add_argument(
        "-u", "--user", metavar="NAME", help="who to be: user, root, nobody or a number"
    )
    add_server_option(made)
    return made


def main(words: list[str], launcher: Launcher) -> int:
    made = parser()
    options, rest = split(words, made.with_value())
    try:
        chosen = made.parse_args(options)
        if not rest:
            raise InvalidRequest(f"in which session? For example: {EXAMPLE}")
        chosen.session, chosen.command = rest[0], list(map(text_of, rest[1:]))
        if chosen.command[:1] == ["--"]:
            del chosen.command[0]
        if not chosen.command:
            raise InvalidRequest(f"what shall it run? For example: {EXAMPLE}")
        if chosen.shell and (chosen.stdin or chosen.workdir or chosen.env or chosen.user):
            raise InvalidRequest("--shell has its own folder, variables, user and stdin")
        if chosen.tty and (chosen.shell or chosen.timeout or chosen.workdir or chosen.user):
            raise InvalidRequest("--tty has no --shell, --timeout, --workdir or --user")
        chosen.seconds = None if chosen.timeout is None else seconds(chosen.timeout)
        chosen.env = variables(chosen.env)
        chosen.user = user_of(chosen.user) if chosen.user else None
    except HutchError as exc:
        complain(str(exc), error=True)
        return FAILED
    if chosen.tty:
        from . import shell

        chosen.given = []
        return shell.attend(op.OpenSession(env=chosen.env), chosen, chosen.command, launcher)
    return run_to_end(_run(chosen))


async def _run(chosen: argparse.Namespace) -> int:
    async with in_session(chosen.url, chosen.session) as (transport, info):
        chosen.session = info.id
        if info.status == "asleep":  # what keeps it from waking is no fault of the command
            await transport.perform(op.Wake(chosen.session))
        async with explained(transport, chosen.session, chosen.command[0]):
            result = await _execute(transport, chosen)
    if not (chosen.stdin or chosen.shell):
        tell_of_unread_stdin("hutch exec")
    if result.timed_out:
        complain(f"timed out after {chosen.seconds:g} s, and stopped")
    elif result.oom:
        complain("out of memory: something in the session was killed for want of it")
    return TIMED_OUT if result.timed_out else result.exit_code


async def _execute(transport: AsyncTransport, chosen: argparse.Namespace) -> Result:
    session, screens = chosen.session, (Screen(1), Screen(2))
    if chosen.shell:
        text = " ".join(chosen.command)
        return await follow(transport, op.RunShell(session, text, timeout=chosen.seconds), screens)
    program = {
        "session": session, "argv": tuple(chosen.command), "cwd": chosen.workdir,
        "env": chosen.env, "user": chosen.user, "timeout": chosen.seconds,
    }  # fmt: skip
    if not chosen.stdin:
        return await follow(transport, op.RunProgram(**program), screens)
    process = await transport.perform(op.StartProgram(**program))
    feeding = asyncio.ensure_future(_feed(transport, session, process))
    try:
        return await follow(transport, op.FollowProgram(session, process.id), screens)
    except asyncio.CancelledError:
        await transport.perform(op.SignalProgram(session, process.id, tree=True))
        raise
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(transport: AsyncTransport, session: str, process: Process) -> None:
    try:
        async for data in own_stdin():
            await transport.perform(op.SendInput(session, process.id, data))
        await transport.perform(op.CloseInput(session, process.id))
    except HutchError:
        pass  # it has closed its stdin, or ended, which is its own business
