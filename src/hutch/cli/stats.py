"""`hutch stats`: show what sessions use now."""

from __future__ import annotations

import argparse
import json

from hutch import operations as op
from hutch.client.transport import AsyncTransport
from hutch.errors import BoxError
from hutch.types import BoxInfo, Stats, plain

from .options import Parser, make_parser
from .program import Launcher
from .screen import print_table, size
from .server import add_server_option, all_sessions, full_id, run_at_server

HEADER = ("SESSION", "STATUS", "MEMORY", "LIMIT", "PROCESSES", "CPU TIME", "OOM KILLS")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch stats",
        "hutch stats [SESSION...] [--json] [--url URL]",
        "Show the current usage of sessions; by default, of all that have not ended. A\n"
        "sleeping session uses nothing, and is not woken.",
        "exit codes: 0, or 125 if hutch failed.",
    )
    parser.add_argument("sessions", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _show)


async def _show(args: argparse.Namespace, transport: AsyncTransport) -> int:
    if args.sessions:
        ids = [await full_id(transport, session) for session in args.sessions]
        sessions = [await transport.perform(op.GetSession(id)) for id in ids]
    else:
        sessions = await all_sessions(transport)
    found = [(session, await _stats(transport, session)) for session in sessions]
    if args.json:
        rows = [
            {"session": session.id, "status": session.status, **(plain(stats) or {})}
            for session, stats in found
        ]
        print(json.dumps(rows, indent=2))
    else:
        print_table(HEADER, [_row(*pair) for pair in found], right=HEADER[2:])
    return 0


async def _stats(transport: AsyncTransport, session: BoxInfo) -> Stats | None:
    if session.status != "running":
        return None
    try:
        stats = await transport.perform(op.GetStats(session.id))
    except BoxError:
        return None  # it ended or went to sleep in the meantime
    return stats


def _row(session: BoxInfo, stats: Stats | None) -> tuple[str, ...]:
    limit = size(session.limits.memory)
    if stats is None:
        return (session.id, session.status, "", limit, "", "", "")
    seconds = "" if stats.cpu_seconds is None else f"{stats.cpu_seconds:.2f} s"
    return (
        session.id,
        session.status,
        size(stats.memory),
        limit,
        _text(stats.pids),
        seconds,
        _text(stats.oom_kills),
    )


def _text(count: int | None) -> str:
    return "" if count is None else str(count)
