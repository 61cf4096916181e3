"""`hutch exec`: run a command in an existing session."""

from __future__ import annotations

import argparse
import asyncio

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import HutchError, InvalidRequest
from hutch.types import Process, Result

from .options import (
    Parser,
    add_env_option,
    add_terminal_options,
    make_parser,
    seconds,
    split,
    user_of,
    variables,
)
from .program import (
    TIMED_OUT,
    Launcher,
    explained,
    follow,
    network_advice,
    own_stdin,
    run_to_end,
    tell_of_unread_stdin,
    text_of,
)
from .screen import OutputStream, complain
from .server import add_server_option, in_session

EXAMPLE = "hutch exec SESSION -- echo hello (see hutch exec --help)"


def build_parser() -> Parser:
    parser = make_parser(
        "hutch exec",
        "hutch exec [options] SESSION [--] COMMAND [ARGUMENT...]\n"
        "       hutch exec --shell [options] SESSION [--] TEXT...",
        "Run a command in a session. Its output is printed as it comes, and hutch exits\n"
        "with its exit code. If hutch is stopped, so is the command. With --shell, the\n"
        "command runs in the session's own shell, which keeps its folder and variables\n"
        "from one command to the next.",
        "exit codes: as for hutch run.\n"
        "\n"
        "examples:\n"
        "  hutch exec 3f9d0c1a-77e -- python3 -V\n"
        "  hutch exec --shell 3f9d0c1a-77e 'cd /tmp; export A=1'\n"
        "  tar c src | hutch exec --stdin 3f9d0c1a-77e -- tar x",
    )
    parser.add_argument("--shell", action="store_true", help="use the session's own shell")
    parser.add_argument("--timeout", metavar="TIME", help="stop it after 90, 90s, 5m, 1h or 1d")
    add_terminal_options(parser)
    parser.add_argument("-w", "--workdir", metavar="PATH", help="the folder to run it in")
    add_env_option(parser, "-e", "--env")
    parser.add_argument(
        "-u", "--user", metavar="NAME", help="run as user, root, nobody or a user id"
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    parser = build_parser()
    options, rest = split(words, parser.with_value())
    args = parser.parse_args(options)
    if not rest:
        raise InvalidRequest(f"no session given. For example: {EXAMPLE}")
    args.session, args.command = rest[0], list(map(text_of, rest[1:]))
    if args.command[:1] == ["--"]:
        del args.command[0]
    if not args.command:
        raise InvalidRequest(f"no command given. For example: {EXAMPLE}")
    if args.shell and (args.stdin or args.workdir or args.env or args.user):
        raise InvalidRequest("--shell has its own folder, variables, user and stdin")
    if args.tty and (args.shell or args.timeout or args.workdir or args.user):
        raise InvalidRequest("--tty has no --shell, --timeout, --workdir or --user")
    args.seconds = None if args.timeout is None else seconds(args.timeout)
    args.env = variables(args.env)
    args.user = user_of(args.user) if args.user else None
    if args.tty:
        from . import shell

        args.given = []
        return shell.run_in_terminal(op.OpenSession(env=args.env), args, args.command, launcher)
    return run_to_end(_run(args))


async def _run(args: argparse.Namespace) -> int:
    async with in_session(args.url, args.session) as (transport, info):
        args.session = info.id
        if info.status == "asleep":  # first, so that a failure to wake is not blamed on the command
            await transport.perform(op.Wake(args.session))
        async with explained(transport, info, args.command):
            result = await _execute(transport, args)
    if not (args.stdin or args.shell):
        tell_of_unread_stdin("hutch exec")
    if result.timed_out:
        complain(f"timed out after {args.seconds:g} s, and stopped")
    elif result.oom:
        complain("out of memory: a process in the session was killed")
    elif "network" not in info.relaxed and (
        advice := network_advice(args.command, result.exit_code, result.output)
    ):
        complain(advice)
    return TIMED_OUT if result.timed_out else result.exit_code


async def _execute(transport: AsyncTransport, args: argparse.Namespace) -> Result:
    session, outputs = args.session, (OutputStream(1), OutputStream(2))
    if args.shell:
        text = " ".join(args.command)
        return await follow(transport, op.RunShell(session, text, timeout=args.seconds), outputs)
    program = {
        "session": session,
        "argv": tuple(args.command),
        "cwd": args.workdir,
        "env": args.env,
        "user": args.user,
        "timeout": args.seconds,
    }
    if not args.stdin:
        return await follow(transport, op.RunProgram(**program), outputs)
    process = await transport.perform(op.StartProgram(**program))
    feeding = asyncio.ensure_future(_feed(transport, session, process))
    try:
        return await follow(transport, op.FollowProgram(session, process.id), outputs)
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
        pass  # the program closed its stdin, or ended
