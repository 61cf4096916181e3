"""`hutch create`: open a session on a server."""

from __future__ import annotations

import argparse

from hutch import operations as op
from hutch.client.parse import parse_size
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest
from hutch.types import Limits

from .options import Parser, add_env_option, add_relax_option, make_parser, seconds, variables
from .program import Launcher
from .screen import print_json
from .server import add_server_option, run_at_server


def build_parser() -> Parser:
    parser = make_parser(
        "hutch create",
        "hutch create [options]",
        "Open a session on a server, and print its id. It runs until its deadline, or\n"
        "until `hutch rm`.",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch create\n"
        "  hutch create --image data --ttl 2h --idle 10m --on-idle hibernate\n"
        "  hutch exec $(hutch create --workspace-id notes) -- ls -l",
    )
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)  # as docker takes them
    parser.add_argument(
        "--image", default="", metavar="NAME", help="the image (default: the server's)"
    )
    parser.add_argument(
        "--ttl", metavar="TIME", help="how long it lives: 90, 30m, 2h, 1d (default: the server's)"
    )
    parser.add_argument(
        "--idle", metavar="TIME", help="when it counts as idle (default: the server's)"
    )
    parser.add_argument(
        "--on-idle",
        choices=("kill", "hibernate"),
        default="kill",
        help="what to do when it is idle (default: kill)",
    )
    parser.add_argument(
        "--workspace-id",
        metavar="NAME",
        help="a workspace of the server, at /workspace; created if needed",
    )
    parser.add_argument(
        "--exclusive", action="store_true", help="no other session may use the workspace"
    )
    add_env_option(parser, "-e", "--env")
    parser.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a label to find it by; may be repeated",
    )
    parser.add_argument(
        "-m", "--memory", metavar="SIZE", help="like 512m or 2g (default: the server's)"
    )
    parser.add_argument(
        "--runtime",
        default="",
        metavar="NAME",
        help="of a container: runsc for gVisor (default: the server's)",
    )
    add_relax_option(parser)
    parser.add_argument("--json", action="store_true", help="print its whole record as JSON")
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _create, to_operation)


def to_operation(args: argparse.Namespace) -> op.OpenSession:
    """The session that the options describe. Raises InvalidRequest."""
    if args.words:
        raise InvalidRequest(
            f"unexpected argument {args.words[0]!r}: an image is named with --image NAME, and "
            "`hutch exec` runs commands in the session"
        )
    if args.exclusive and not args.workspace_id:
        raise InvalidRequest("--exclusive needs a workspace: name one with --workspace-id")
    return op.OpenSession(
        image=args.image,
        env=variables(args.env),
        labels=dict(map(_label, args.label)),
        ttl_seconds=seconds(args.ttl, "--ttl") if args.ttl else None,
        idle=seconds(args.idle, "--idle") if args.idle else None,
        on_idle=args.on_idle,
        workspace_id=args.workspace_id,
        exclusive=args.exclusive,
        limits=Limits(memory=parse_size("--memory", args.memory)) if args.memory else Limits(),
        runtime=args.runtime,
        relax=tuple(args.relax),
    )


async def _create(args: argparse.Namespace, transport: AsyncTransport) -> int:
    try:
        info = await transport.perform(to_operation(args))
    except InvalidRequest as exc:
        raise InvalidRequest(str(exc).replace("ttl_seconds", "--ttl", 1)) from None
    if args.json:
        print_json(info)
    else:
        print(info.id)
    if args.memory:
        from .boxes import warn_of_limits  # it imports all that makes boxes

        warn_of_limits(["--memory"], info)
    return 0


def _label(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given:
        raise InvalidRequest(f"--label must be NAME=VALUE, not {text!r}")
    return name, value
