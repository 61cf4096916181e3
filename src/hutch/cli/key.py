"""`hutch key`: manage the keys of a server."""

from __future__ import annotations

import argparse
import time

from hutch import serving
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest

from .options import Parser, as_ls, make_parser
from .program import Launcher
from .screen import complain, local_time, print_json, print_table, since, until, visible
from .server import add_server_option, run_at_server

HEADER = ("KEY", "BEGINS", "OWNER", "SCOPE", "CREATED", "LAST USED", "EXPIRES", "LABEL")
ACTIONS = ("create", "ls", "extend", "rotate", "revoke")
# Options that only some actions have.
OF_ACTION = {
    "owner": ("create",),
    "scope": ("create",),
    "label": ("create",),
    "image": ("create",),
    "workspace": ("create",),
    "expires": ("create", "extend", "rotate"),
    "overlap": ("rotate",),
}


def build_parser() -> Parser:
    parser = make_parser(
        "hutch key",
        "hutch key create --owner NAME [--scope SCOPE] [--expires WHEN]\n"
        "                        [--image NAME] [--workspace NAME] [--label TEXT]\n"
        "       hutch key ls [--all] [--json]\n"
        "       hutch key extend KEY... --expires WHEN\n"
        "       hutch key rotate KEY [--overlap TIME] [--expires WHEN]\n"
        "       hutch key revoke KEY...",
        "Manage the keys of a server. Sessions, workspaces and quotas belong to owners,\n"
        "and a key gives access to those of its owner.\n"
        "\n"
        "  create   make a key, and print it; only a hash of it is stored\n"
        "  ls       list the keys, by their id\n"
        "  extend   change when keys expire: later, sooner, or never\n"
        "  rotate   make and print a key that replaces another, which expires soon\n"
        "  revoke   end keys now",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch key create --owner agents --label 'build machine' --expires 90d\n"
        "  hutch key create --owner agents --image python --workspace notes\n"
        "  hutch key create --owner monitoring --scope metrics\n"
        "  hutch key rotate 1f4c9a02 --overlap 1d\n"
        "  hutch key revoke 1f4c9a02",
    )
    parser.add_argument("action", choices=ACTIONS, help=argparse.SUPPRESS)
    parser.add_argument("keys", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--owner", metavar="NAME", help="the owner whose sessions it may use")
    parser.add_argument(
        "--scope",
        choices=serving.SCOPES,
        metavar="SCOPE",
        help="metrics: only GET /metrics; read: look, but change nothing; run: also use "
        "sessions (default); admin: also keys, quotas, images, the audit log, and "
        "what belongs to other owners",
    )
    parser.add_argument(
        "--expires",
        metavar="WHEN",
        help="12h, 30d, 2027-01-01 (UTC), or never (default: as the server is configured, or "
        "never; of rotate: when the old key does)",
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME",
        help="limit it to sessions with this image; workspaces are not limited; may be repeated",
    )
    parser.add_argument(
        "--workspace",
        action="append",
        default=[],
        metavar="NAME",
        help="limit it to this workspace, and to sessions with it or with none; may be repeated",
    )
    parser.add_argument(
        "--overlap",
        metavar="TIME",
        help="how long the old key still works: 0s, 30m, 7d (default: 1h)",
    )
    parser.add_argument("--label", metavar="TEXT", help="a note, to recognize it by")
    parser.add_argument("--all", action="store_true", help="list revoked keys, too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    if not words:
        build_parser().print_help()
        return 0
    return run_at_server(build_parser(), as_ls(words), _act, _check)


def _check(args: argparse.Namespace) -> None:
    for option, actions in OF_ACTION.items():
        if getattr(args, option) and args.action not in actions:
            raise InvalidRequest(f"--{option} is for hutch key {' and '.join(actions)}")
    if args.action == "create" and (not args.owner or args.keys):
        raise InvalidRequest("a key needs an owner. For example: hutch key create --owner me")
    if args.action == "ls" and args.keys:
        raise InvalidRequest(f"hutch key ls takes no name: {args.keys[0]!r}")
    if args.action in ("revoke", "extend") and not args.keys:
        raise InvalidRequest("no key given; `hutch key ls` lists their ids")
    if args.action == "rotate" and len(args.keys) != 1:
        raise InvalidRequest("give one key; `hutch key ls` lists their ids")
    if args.action == "extend" and not args.expires:
        raise InvalidRequest(
            "--expires is missing. For example: hutch key extend KEY --expires 30d"
        )
    for option in ("expires", "overlap"):
        if getattr(args, option) == "":
            raise InvalidRequest(f"--{option} is empty: give it a time like 12h, or leave it out")


async def _act(args: argparse.Namespace, transport: AsyncTransport) -> int:
    acts = {
        "create": _create,
        "ls": _list,
        "extend": _extend,
        "rotate": _rotate,
        "revoke": _revoke,
    }
    await acts[args.action](args, transport)
    return 0


async def _create(args: argparse.Namespace, transport: AsyncTransport) -> None:
    scope: serving.Scope = args.scope or "run"
    key = await transport.perform(
        serving.MakeKey(
            args.owner,
            scope,
            args.label or "",
            expires=args.expires or "",
            images=tuple(args.image),
            workspaces=tuple(args.workspace),
        )
    )
    _show_new(key, args.json)


def _show_new(key: serving.Key, as_json: bool) -> None:
    if as_json:
        print_json(key)
        return
    print(key.key, flush=True)
    ends = "never expires"
    if key.expires_at is not None:
        ends = f"expires at {local_time(key.expires_at)}"
    complain(
        f"this is key {key.id}, and it is shown only once; clients need it in HUTCH_API_KEY. "
        f"It {ends}"
    )


async def _extend(args: argparse.Namespace, transport: AsyncTransport) -> None:
    keys = [await transport.perform(serving.ExtendKey(key, args.expires)) for key in args.keys]
    if args.json:
        print_json(keys)
        return
    for key in keys:
        print(key.id, "never" if key.expires_at is None else local_time(key.expires_at), flush=True)


async def _rotate(args: argparse.Namespace, transport: AsyncTransport) -> None:
    (old,) = args.keys
    overlap = args.overlap or "1h"
    key = await transport.perform(serving.RotateKey(old, overlap, args.expires or ""))
    _show_new(key, args.json)
    if not args.json:
        at_once = not overlap.rstrip("smhdw").strip("0")
        complain(
            f"key {old} no longer works"
            if at_once
            else f"key {old} still works for {overlap}, unless it expires before"
        )


async def _list(args: argparse.Namespace, transport: AsyncTransport) -> None:
    keys = [
        key
        for key in await transport.perform(serving.ListKeys())
        if args.all or key.revoked_at is None
    ]
    if args.json:
        print_json(keys)
        return
    now = time.time()
    print_table(
        HEADER,
        [
            (
                key.id,
                key.prefix,
                key.owner,
                _scope(key),
                since(key.created_at, now),
                since(key.last_used_at, now),
                _expiry(key, now),
                key.label,
            )
            for key in keys
        ],
    )


def _scope(key: serving.Key) -> str:
    """The scope of a key, and the images and workspaces it is limited to."""
    if key.revoked_at is not None:
        return "revoked"
    limits = [f"image={name}" for name in key.images]
    limits += [f"workspace={name}" for name in key.workspaces]
    return " ".join([key.scope, *limits])


def _expiry(key: serving.Key, now: float) -> str:
    if key.expires_at is None:
        return "never"
    if key.expires_at <= now:
        return f"expired {since(key.expires_at, now)}"
    return until(key.expires_at, now)


async def _revoke(args: argparse.Namespace, transport: AsyncTransport) -> None:
    for key in args.keys:
        await transport.perform(serving.RevokeKey(key))
        print(visible(key), flush=True)
