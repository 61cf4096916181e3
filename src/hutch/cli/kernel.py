"""`hutch kernel`: a Python kernel behind a UNIX socket, for programs written for KernelLite."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hutch.client.parse import parse_size
from hutch.compat.kernellite import empty_folder
from hutch.compat.kernellite_server import STARTED, KernelLiteServer
from hutch.compat.kernellite_socket import UnixListener
from hutch.errors import InvalidRequest
from hutch.local import AsyncSandbox
from hutch.types import Mount

from .boxes import warn_of_limits
from .options import Parser, make_parser, number, seconds
from .program import Launcher, run_to_end
from .screen import complain


def build_parser() -> Parser:
    parser = make_parser(
        "hutch kernel",
        "hutch kernel --project DIR [options]",
        "Run a Python kernel in a box, with a project's folder at /workspace, and answer\n"
        "on a UNIX socket in the protocol of KernelLite: four bytes of length, then JSON\n"
        "with op exec, ping, interrupt or shutdown. It runs until it is shut down. You\n"
        "and your group may open the socket, and so run code in the box.",
        "exit codes: 0 after a shutdown; 128+n if signal n stopped it; 125 if hutch\n"
        "failed.\n"
        "\n"
        "examples:\n"
        "  hutch kernel --project .\n"
        "  hutch kernel --project . --socket /run/me/kernel.sock --memory 2g",
    )
    parser.add_argument(
        "--project", required=True, metavar="DIR", help="the folder to show at /workspace"
    )
    parser.add_argument(
        "--socket",
        metavar="PATH",
        help="where to listen (default: DIR/.sandbox/kernel.sock); a log is written beside it",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="interrupt every cell after 90, 90s, 5m or 1h (default: when its client goes away)",
    )
    parser.add_argument(
        "--idle-hibernate",
        default="900",
        metavar="TIME",
        help="give back the memory of large tables and arrays after this long "
        "without a cell (default: 900)",
    )
    parser.add_argument(
        "--image",
        default="data",
        metavar="NAME",
        help="the image of the box (default: data, with pandas and more)",
    )
    parser.add_argument("--memory", default="4g", metavar="SIZE", help="memory (default: 4g)")
    parser.add_argument("--cpus", default="1", metavar="N", help="CPUs (default: 1)")
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    args.given = words
    args.project = Path(os.path.abspath(args.project))
    default = args.project / ".sandbox/kernel.sock"
    args.socket = Path(os.path.abspath(args.socket or default))
    args.timeout = args.timeout and seconds(args.timeout)
    args.idle_hibernate = seconds(args.idle_hibernate, "--idle-hibernate")
    args.memory = parse_size("--memory", args.memory)
    args.cpus = number("--cpus", args.cpus)
    if not args.project.is_dir():
        raise InvalidRequest(f"the project is not a folder: {args.project}")
    return run_to_end(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    listener = UnixListener(args.socket, args.project)
    try:
        log = listener.open_log()
        try:
            mounts = _hidden(args.socket.parent, args.project)

            async def make_box() -> AsyncSandbox:
                box = await AsyncSandbox.create(
                    image=args.image,
                    workspace=args.project,
                    mounts=mounts,
                    memory=args.memory,
                    cpus=args.cpus,
                    idle_hibernate=args.idle_hibernate,
                )
                warn_of_limits(args.given, box.info)
                return box

            await KernelLiteServer(listener, make_box, log, args.timeout).serve(_say_started)
        finally:
            log.close()
    finally:
        listener.close()
    return 0


def _hidden(folder: Path, project: Path) -> list[Mount]:
    """A mount that hides the socket from the box, which could answer in our place or stop us."""
    if folder == project:
        complain(
            "the socket is in the workspace, where code in the box finds it: a folder of "
            "its own, such as .sandbox, would be hidden from it"
        )
    if folder == project or not folder.is_relative_to(project):
        return []
    place = Path("/workspace", folder.relative_to(project))
    return [Mount(str(empty_folder()), str(place), read_only=True)]


def _say_started() -> None:
    print(STARTED, flush=True)
