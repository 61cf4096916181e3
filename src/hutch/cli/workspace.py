"""`hutch workspace`: manage the workspaces of a server."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from contextlib import aclosing, suppress

from hutch import serving
from hutch.client.transport import AsyncTransport
from hutch.errors import HutchError, InvalidRequest, NotFound

from .cp import Local, Standard, copy_between
from .options import Parser, as_ls, make_parser
from .program import Launcher
from .screen import complain, print_json, print_table, since, size, visible
from .server import add_server_option, run_at_server

HEADER = ("WORKSPACE", "SIZE", "QUOTA", "CREATED", "OWNER", "SESSIONS")
ARGUMENTS = {  # the least and most arguments of each action, and what is wrong otherwise
    "ls": (0, 0, "takes no name"),
    "rm": (1, 1000, "needs names: `hutch workspace ls` lists them"),
    "cp": (2, 2, "needs two places: hutch workspace cp data.csv NAME:"),
    "import": (1, 2, "needs a name, and a file: hutch workspace import notes notes.tar"),
    "export": (1, 2, "needs a name: hutch workspace export notes notes.tar"),
}


def build_parser() -> Parser:
    parser = make_parser(
        "hutch workspace",
        "hutch workspace ls [--owner NAME] [--json]\n"
        "       hutch workspace rm NAME... [--owner NAME]\n"
        "       hutch workspace cp SOURCE DESTINATION\n"
        "       hutch workspace import NAME [FILE]\n"
        "       hutch workspace export NAME [FILE] [--owner NAME]",
        "Manage workspaces: folders of a server that outlive sessions. A session that\n"
        "names one has it at /workspace.\n"
        "\n"
        "  ls       list them, with their size\n"
        "  rm       remove them with all their files, unless a session uses them\n"
        "  cp       copy a file or folder: NAME:PATH is one in a workspace, other paths\n"
        "           are local\n"
        "  import   unpack a tar or tar.gz (default: stdin) into a workspace, which is\n"
        "           created if needed\n"
        "  export   write all files as a tar (default: to stdout)",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch workspace cp data.csv notes:\n"
        "  hutch workspace export notes notes.tar",
    )
    parser.add_argument("action", choices=ARGUMENTS, help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument(
        "--owner", metavar="NAME", help="workspaces of this owner (needs an admin key)"
    )
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    if not words:
        build_parser().print_help()
        return 0
    return run_at_server(build_parser(), as_ls(words), _act, _check)


def _check(args: argparse.Namespace) -> None:
    least, most, what = ARGUMENTS[args.action]
    if not least <= len(args.words) <= most:
        raise InvalidRequest(f"hutch workspace {args.action} {what}")
    # No name of a workspace has a dot or a slash.
    if args.action == "import" and len(args.words) == 1 and set(args.words[0]) & {".", "/"}:
        file = shlex.quote(args.words[0])
        raise InvalidRequest(f"no name given. For example: hutch workspace import notes {file}")
    if args.json and args.action != "ls":
        raise InvalidRequest(f"hutch workspace {args.action} has no option --json")
    if args.action == "import" and args.words[1:] in ([], ["-"]) and os.isatty(0):
        raise InvalidRequest(
            f"no file given. For example: hutch workspace import {args.words[0]} files.tar"
        )
    if args.owner and args.action in ("cp", "import"):
        raise InvalidRequest(f"hutch workspace {args.action} has no option --owner")


async def _act(args: argparse.Namespace, transport: AsyncTransport) -> int:
    acts = {"ls": _list, "rm": _remove, "cp": _copy, "import": _import, "export": _export}
    await acts[args.action](args, transport)
    return 0


async def _list(args: argparse.Namespace, transport: AsyncTransport) -> None:
    named = await transport.perform(serving.ListWorkspaces(args.owner))
    found = [await transport.perform(serving.GetWorkspace(it.id, args.owner)) for it in named]
    if args.json:
        print_json(found)
        return
    now = time.time()
    rows = [
        (
            it.id,
            size(it.size),
            size(it.quota),
            since(it.created_at, now),
            it.owner,
            " ".join(it.sessions),
        )
        for it in found
    ]
    print_table(HEADER, rows, right=("SIZE", "QUOTA"))


async def _remove(args: argparse.Namespace, transport: AsyncTransport) -> None:
    for name in args.words:
        await transport.perform(serving.RemoveWorkspace(name, args.owner))
        print(visible(name), flush=True)


async def _copy(args: argparse.Namespace, transport: AsyncTransport) -> None:
    source, destination = map(_full, args.words)
    await copy_between(source, destination, transport)


def _full(text: str) -> str:
    is_local = text == "-" or ":" not in text or text.startswith(("/", ".", "workspace/"))
    return text if is_local else f"workspace/{text}"


async def _import(args: argparse.Namespace, transport: AsyncTransport) -> None:
    name, file = args.words[0], (args.words[1:] or ["-"])[0]
    source = Standard().read("-") if file == "-" else Local().read(file)
    is_new = not await _exists(name, transport)
    try:
        count = await transport.perform(serving.ImportWorkspace(name, source))
    except BaseException as exc:
        if is_new:  # remove the half-filled workspace
            with suppress(HutchError):
                await transport.perform(serving.RemoveWorkspace(name))
        if isinstance(exc, InvalidRequest):
            raise InvalidRequest(f"{'stdin' if file == '-' else file}: {exc}") from None
        raise
    complain(f"unpacked {count} {'file' if count == 1 else 'files'} into {name}")


async def _exists(name: str, transport: AsyncTransport) -> bool:
    try:
        await transport.perform(serving.GetWorkspace(name))
    except NotFound:
        return False
    return True


async def _export(args: argparse.Namespace, transport: AsyncTransport) -> None:
    name, file = args.words[0], (args.words[1:] or ["-"])[0]
    target = Standard() if file == "-" else Local()
    async with aclosing(
        await transport.stream(serving.ExportWorkspace(name, args.owner))
    ) as stream:
        await target.write(file, stream, None)
