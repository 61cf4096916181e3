"""`hutch key`: keys to a server."""

from __future__ import annotations

import argparse
import json
import time

from hutch import serving
from hutch.errors import InvalidRequest
from hutch.types import plain

from .options import Parser, make_parser
from .program import Launcher, Perform
from .screen import complain, visible
from .server import add_server_option, talk
from .tables import print_table, since

HEADER = ("KEY", "BEGINS", "OWNER", "SCOPE", "CREATED", "LAST USED", "LABEL")


def parser() -> Parser:
    made = make_parser(
        "hutch key",
        "hutch key create --owner NAME [--scope read|run|admin] [--label TEXT]\n"
        "       hutch key ls [--all] [--json]\n"
        "       hutch key revoke KEY...",
        "Keys to a server. Sessions, workspaces and quotas belong to owners, and a key\n"
        "opens what belongs to its own.\n"
        "\n"
        "  create   make a key, and print it: this once, for only a hash of it is kept\n"
        "  ls       list them, by their id\n"
        "  revoke   from now on, these open nothing",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch key create --owner agents --label 'build machine'\n"
        "  hutch key revoke 1f4c9a02",
    )
    made.add_argument("action", choices=("create", "ls", "revoke"), help=argparse.SUPPRESS)
    made.add_argument("keys", nargs="*", help=argparse.SUPPRESS)
    made.add_argument("--owner", metavar="NAME", help="whose sessions it opens")
    made.add_argument("--scope", choices=serving.SCOPES, metavar="SCOPE",
                      help="read: look at things; run: also use sessions (default); admin: also "
                      "keys, quotas, images, and what belongs to others")  # fmt: skip
    made.add_argument("--label", metavar="TEXT", help="a note, to know it again")
    made.add_argument("--all", action="store_true", help="those that were revoked, too")
    made.add_argument("--json", action="store_true", help="print JSON")
    add_server_option(made)
    return made


def main(words: list[str], launcher: Launcher) -> int:
    if not words:
        parser().print_help()
        return 0
    return talk(parser(), words, _act, _check)


def _check(chosen: argparse.Namespace) -> None:
    if chosen.action == "create" and (not chosen.owner or chosen.keys):
        raise InvalidRequest("whose key? For example: hutch key create --owner me")
    if chosen.action == "ls" and chosen.keys:
        raise InvalidRequest(f"hutch key ls takes no name: {chosen.keys[0]!r}")
    if chosen.action == "revoke" and not chosen.keys:
        raise InvalidRequest("which keys? `hutch key ls` lists their ids")


async def _act(chosen: argparse.Namespace, perform: Perform) -> int:
    await {"create": _create, "ls": _list, "revoke": _revoke}[chosen.action](chosen, perform)
    return 0


async def _create(chosen: argparse.Namespace, perform: Perform) -> None:
    scope: serving.Scope = chosen.scope or "run"
    made = await perform(serving.MakeKey(chosen.owner, scope, chosen.label or ""))
    if chosen.json:
        print(json.dumps(plain(made), indent=2))
        return
    print(made.key, flush=True)
    complain(f"this is key {made.id}, and it is shown this once; "
             f"clients have it in HUTCH_API_KEY")  # fmt: skip


async def _list(chosen: argparse.Namespace, perform: Perform) -> None:
    keys = [key for key in await perform(serving.ListKeys())
            if chosen.all or key.revoked_at is None]  # fmt: skip
    if chosen.json:
        print(json.dumps([plain(key) for key in keys], indent=2))
        return
    now = time.time()
    print_table(HEADER, [
        (key.id, key.prefix, key.owner, key.scope if key.revoked_at is None else "revoked",
         since(key.created_at, now), since(key.last_used_at, now), key.label)
        for key in keys
    ])  # fmt: skip


async def _revoke(chosen: argparse.Namespace, perform: Perform) -> None:
    for key in chosen.keys:
        await perform(serving.RevokeKey(key))
        print(visible(key), flush=True)
