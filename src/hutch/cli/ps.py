"""`hutch ps`: the sessions of a server."""

from __future__ import annotations

import argparse
import json
import time

from hutch.types import BoxInfo, plain

from .options import Parser, make_parser
from .program import Launcher, Perform
from .server import add_server_option, all_sessions, talk
from .tables import print_table, since, until

HEADER = ("SESSION", "IMAGE", "STATUS", "CREATED", "EXPIRES", "OWNER", "WORKSPACE")


def parser() -> Parser:
    made = make_parser(
        "hutch ps",
        "hutch ps [--all] [--json] [--url URL]",
        "List the sessions of a server, newest first.",
        "exit codes: 0, or 125 if hutch failed.",
    )
    made.add_argument("--all", action="store_true", help="those that ended, too")
    made.add_argument("--json", action="store_true", help="print the list as JSON")
    add_server_option(made)
    return made


def main(words: list[str], launcher: Launcher) -> int:
    return talk(parser(), words, _list)


async def _list(chosen: argparse.Namespace, perform: Perform) -> int:
    sessions = await all_sessions(perform, None if chosen.all else "live")
    if chosen.json:
        print(json.dumps([plain(session) for session in sessions], indent=2))
        return 0
    now = time.time()
    print_table(HEADER, [_row(session, now) for session in sessions])
    return 0


def _row(session: BoxInfo, now: float) -> tuple[str, ...]:
    expires = "" if session.ended_at is not None else until(session.expires_at, now)
    created = since(session.created_at, now)
    return (session.id, session.image, session.status, created, expires, session.owner,
            session.workspace_id or "")  # fmt: skip
