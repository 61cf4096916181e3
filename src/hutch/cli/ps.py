"""`hutch ps`: list the sessions of a server, or all containers of Hutch on an engine."""

from __future__ import annotations

import argparse
import time

from hutch import factory
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest
from hutch.types import BoxInfo

from .options import Parser, make_parser
from .program import Launcher, run_to_end
from .screen import print_json, print_table, since, until
from .server import add_server_option, all_sessions, run_at_server

BOXES = ("BOX", "IMAGE", "STATUS", "RUNTIME", "CREATED", "OWNER")
_WAITS = ", not running: the box waits for it"
HEADER = ("SESSION", "IMAGE", "STATUS", "CREATED", "EXPIRES", "OWNER", "WORKSPACE")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch ps",
        "hutch ps [--all] [--label NAME[=VALUE]] [--quiet | --json] [--url URL]\n"
        "       hutch ps --backend docker [--json]",
        "List the sessions of a server, newest first. With --backend docker: all\n"
        "containers of Hutch on this engine, including those of other programs.",
        "exit codes: 0, or 125 if hutch failed.",
    )
    parser.add_argument("-a", "--all", action="store_true", help="list ended sessions, too")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="only sessions with this label; may be repeated",
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print only ids")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--backend", metavar="NAME", help="list the boxes of this backend: docker")
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    if args.backend is not None:
        _check(args)
        return run_to_end(_list_boxes(as_json=args.json, is_quiet=args.quiet))
    return run_at_server(build_parser(), words, _list)


def _check(args: argparse.Namespace) -> None:
    if args.backend != "docker":
        raise InvalidRequest(f"--backend {args.backend}: only docker has boxes to list")
    for option in ("all", "label", "url"):
        if getattr(args, option):
            raise InvalidRequest(
                f"--{option} is for a server and cannot be combined with --backend"
            )


async def _list_boxes(*, as_json: bool, is_quiet: bool) -> int:
    owner_scope = factory.docker(".backends.docker.owner_scope")
    async with factory.docker(".backends.docker.images").opened() as images:
        boxes = await owner_scope.boxes(images.engine)
    if as_json:
        print_json(boxes)
        return 0
    if is_quiet:
        print("".join(f"{box.id}\n" for box in boxes), end="")
        return 0
    now = time.time()
    print_table(
        BOXES,
        [
            (
                box.id,
                box.image,
                box.status,
                box.runtime,
                since(box.created_at, now),
                box.owner + (", dead" if box.is_abandoned else _WAITS if box.is_waiting else ""),
            )
            for box in boxes
        ],
    )
    return 0


async def _list(args: argparse.Namespace, transport: AsyncTransport) -> int:
    first, *others = args.label or [None]
    listed = await all_sessions(transport, None if args.all else "live", first)
    # A server filters by one label only.
    sessions = [it for it in listed if all(_has_label(it, label) for label in others)]
    if args.json:
        print_json(sessions)
        return 0
    if args.quiet:
        print("".join(f"{session.id}\n" for session in sessions), end="")
        return 0
    now = time.time()
    print_table(HEADER, [_row(session, now) for session in sessions])
    return 0


def _has_label(session: BoxInfo, wanted: str) -> bool:
    name, given, value = wanted.partition("=")
    return name in session.labels and (not given or session.labels[name] == value)


def _row(session: BoxInfo, now: float) -> tuple[str, ...]:
    expires = "" if session.ended_at is not None else until(session.expires_at, now)
    created = since(session.created_at, now)
    return (
        session.id,
        session.image,
        session.status,
        created,
        expires,
        session.owner,
        session.workspace_id or "",
    )
