"""`hutch cp`: files and folders between this machine, sessions and workspaces."""

from __future__ import annotations

import argparse
import posixpath

from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest

from .copying import Local, Remote, Side, Standard, copy
from .options import Parser, make_parser
from .program import Launcher
from .server import add_server_option, full_id, run_at_server


def build_parser() -> Parser:
    parser = make_parser(
        "hutch cp",
        "hutch cp [--url URL] SOURCE DESTINATION",
        "Copy a file or a folder. Each side is a path of this machine, SESSION:PATH, or\n"
        "workspace/NAME:PATH; a path without / at its front begins at the session's\n"
        "folder. A file arrives whole or not at all. `-` is stdin or stdout. Links are\n"
        "left out. A folder that is there already gets the copy inside of it.",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch cp report.py 3f9d0c1a-77e:/workspace/\n"
        "  hutch cp 3f9d0c1a-77e:results ./results\n"
        "  hutch cp workspace/notes:today.md -",
    )
    parser.add_argument("source", help=argparse.SUPPRESS)
    parser.add_argument("destination", help=argparse.SUPPRESS)
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _copy)


async def _copy(args: argparse.Namespace, transport: AsyncTransport) -> int:
    await copy_between(args.source, args.destination, transport)
    return 0


async def copy_between(source: str, destination: str, transport: AsyncTransport) -> None:
    here, there = await _side(source, transport), await _side(destination, transport)
    if not isinstance(here[0], Remote) and not isinstance(there[0], Remote):
        raise InvalidRequest(
            "neither side is a session or workspace: write SESSION:PATH or workspace/NAME:PATH"
        )
    await copy(*here, *there)


async def _side(text: str, transport: AsyncTransport) -> tuple[Side, str]:
    place, colon, path = text.partition(":")
    if text == "-":
        return Standard(), "-"
    if not colon or text.startswith(("/", ".")):
        return Local(), text
    if not place or ("/" in place and not place.startswith("workspace/")):
        raise InvalidRequest(
            f"{text}: write SESSION:PATH, workspace/NAME:PATH, or ./{text} for a local file"
        )
    if "/" not in place:
        place = await full_id(transport, place)
    return Remote(transport, place), path if path == "/" else posixpath.normpath(path or ".") + (
        "/" if path.endswith("/") else ""
    )
