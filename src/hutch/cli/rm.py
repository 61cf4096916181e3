"""`hutch rm`: end sessions."""

from __future__ import annotations

import argparse

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import BoxLost, InvalidRequest

from . import FAILED
from .options import Parser, make_parser
from .program import Launcher
from .screen import complain
from .server import add_server_option, all_sessions, full_id, run_at_server


def build_parser() -> Parser:
    parser = make_parser(
        "hutch rm",
        "hutch rm [-f] SESSION... | --all",
        "End sessions: all that runs in them, and their files except those in a\n"
        "workspace. Prints the ids of the ended sessions.",
        "exit codes: 0, or 125 if hutch failed or there is no such session.",
    )
    parser.add_argument("sessions", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--all", action="store_true", help="end all sessions")
    parser.add_argument(
        "-f",
        "--force",
        action="store_true",
        help="accepted and ignored: what still runs in them is ended anyway",
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _end, _check)


def _check(args: argparse.Namespace) -> None:
    if bool(args.sessions) == args.all:
        raise InvalidRequest("give sessions, or --all; `hutch ps` lists them")


async def _end(args: argparse.Namespace, transport: AsyncTransport) -> int:
    sessions = args.sessions or [info.id for info in await all_sessions(transport)]
    code = 0
    for session in sessions:
        try:
            session = await full_id(transport, session)
            await transport.perform(op.CloseSession(session))
        except (BoxLost, InvalidRequest) as exc:
            complain(str(exc), error=True)
            code = FAILED
        else:
            print(session, flush=True)
    return code
