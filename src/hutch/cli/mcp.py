"""`hutch mcp`: serve tools to an MCP client, over stdin and stdout."""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from hutch import factory, serving
from hutch import operations as op
from hutch.client import transport
from hutch.client.parse import parse_server
from hutch.errors import InvalidRequest
from hutch.types import Limits

from .options import Parser, add_box_options, make_parser, seconds, to_operation
from .place import use_its_images
from .program import Launcher, own_stdin, run_to_end
from .screen import OutputStream, complain


def build_parser() -> Parser:
    parser = make_parser(
        "hutch mcp",
        "hutch mcp [options]",
        "Serve tools to a client of the Model Context Protocol, over stdin and stdout:\n"
        "a shell, Python and files, in a box that is made when it is first needed and\n"
        "ends with the client. A server offers the same at /mcp.",
        "exit codes: 0 when the client has gone; 128+n if signal n stopped it; 125 if\n"
        "hutch failed.\n"
        "\n"
        "examples:\n"
        "  claude mcp add hutch -- hutch mcp --workspace .\n"
        "  hutch mcp --image data --memory 4g --timeout 5m\n"
        "  hutch mcp --only bash,read,write,edit --url http://127.0.0.1:8080",
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        help="how long a command may run at most: 90, 5m (default: as the model says)",
    )
    parser.add_argument(
        "--only", metavar="TOOLS", help="offer only these tools, separated by commas"
    )
    parser.add_argument(
        "--raw", action="store_true", help="show the output of commands unshortened"
    )
    parser.add_argument(
        "--structured",
        action="store_true",
        help="send results as JSON, too; some clients then show the model only the JSON",
    )
    add_box_options(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    args.seconds = None if args.timeout is None else seconds(args.timeout)
    box = to_operation(args)
    # A client may open several boxes, and can recall the output of each.
    limits = replace(box.limits, output=Limits().output)
    return run_to_end(_serve(args, replace(box, warm=True, limits=limits)))


async def _serve(args: argparse.Namespace, box: op.OpenSession) -> int:
    gc.disable()  # saves 80 of 700 ms of imports, for which the client waits
    try:
        from hutch.mcp import boxes, clients, server, stdio
    except ModuleNotFoundError as exc:
        if (exc.name or "").startswith("hutch"):
            raise
        from hutch.extras import install_command

        raise InvalidRequest(f"{exc.name} is not installed: {install_command('mcp')}") from None
    finally:
        gc.enable()
    options = clients.ToolOptions(
        only=clients.names(args.only),
        raw=args.raw,
        structured=args.structured,
        timeout=args.seconds,
    )
    async with _transport(args, box) as connect:
        client = clients.McpClient(connect, box, options)
        client_boxes = boxes.McpBoxes()
        try:
            serving = server.make_server(client_boxes, lambda context: client)
            if os.isatty(0):
                complain("waiting for an MCP client on stdin; press Ctrl-C to quit")
            await stdio.serve(serving, own_stdin(), _wire().write, complain)
        finally:
            await client_boxes.close_made()
    return 0


@asynccontextmanager
async def _transport(
    args: argparse.Namespace, box: op.OpenSession
) -> AsyncIterator[Callable[[], transport.AsyncTransport]]:
    """How to get the transport to boxes: in this process, or to the server that is named."""
    server = parse_server(args.url, None)
    if server is None:
        if box.image not in ("", "host"):
            use_its_images()
            _check_image(box)
        yield _embedded
        return
    if box.mounts:
        raise InvalidRequest(
            "--workspace and --mount show folders of this machine, which a server cannot see: "
            "leave out --url and HUTCH_URL, or --workspace and --mount"
        )
    from hutch.client._async_http import AsyncHttpTransport  # importing it takes longer than a box

    remote = AsyncHttpTransport(server)
    try:
        # A wrong URL or key is reported to the user now, and not to a model later.
        await remote.perform(serving.GetInfo())
        yield lambda: remote
    finally:
        await remote.aclose()


def _embedded() -> transport.AsyncTransport:
    """To the engine in this process, which ends with the event loop."""
    from hutch import local  # noqa: F401 - importing it takes 40 ms, for which a client would wait

    return transport.embedded_async()


def _check_image(box: op.OpenSession) -> None:
    """Raises NotFound if there is no such image. Other backends may pull it."""
    if (box.backend or factory.default()) != "namespaces":
        return
    from hutch.images import store
    from hutch.images.oci import store as oci

    if store.look_up(box.image) is None:
        oci.find(box.image)


def _wire() -> OutputStream:
    """Our stdout, reserved for the protocol: anything else that is printed goes to stderr."""
    wire = os.dup(1)
    os.dup2(2, 1)
    return OutputStream(wire, raw=True)
