"""`hutch dashboard`: open the dashboard of a server in a browser, logged in."""

from __future__ import annotations

import argparse
import errno
import html
import ipaddress
import os
import stat
import tempfile
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

from hutch import pidfile, serving
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest, ServerUnavailable

from .options import Parser, make_parser
from .place import data_folder
from .program import Launcher
from .screen import complain
from .server import add_server_option, run_at_server, server_of

# Without one of these, `webbrowser` would start a browser for terminals, which has no scripts.
SCREENS = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch dashboard",
        "hutch dashboard [--print]",
        "Open the dashboard of a server in a browser, logged in. The address has a\n"
        "ticket in it, which works once and for a minute. The browser exchanges it for a\n"
        "temporary key with the rights of the key in HUTCH_API_KEY. On the server's own\n"
        "machine and as its user no key is needed, and the temporary one is an admin key.",
        "exit codes: 0, or 125 if hutch failed.",
    )
    parser.add_argument(
        "--print",
        "--no-browser",
        action="store_true",
        dest="only_print",
        help="print the address, and open no browser",
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    return run_at_server(build_parser(), words, _open)


async def _open(args: argparse.Namespace, transport: AsyncTransport) -> int:
    base = _address(args.url)
    ticket = await transport.perform(serving.MakeTicket())
    address = f"{base}/#ticket={ticket.ticket}"
    print(address, flush=True)
    if args.only_print:
        return 0
    has_screen = any(os.environ.get(name) for name in SCREENS)
    if not has_screen or not webbrowser.open(_page_leading_to(address).as_uri()):
        complain(
            "there is no browser here: open this address in one within a minute. From another "
            f"machine, forward the port first: ssh -L {urlsplit(base).port or 80}:"
            f"{urlsplit(base).netloc} HOST"
        )
    return 0


def _page_leading_to(address: str) -> Path:
    """A file that only this user can read. Raises InvalidRequest.

    All users of this machine can read the arguments of its programs, and one of them could redeem
    the ticket before the browser does.
    """
    page = (
        '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
        f'<meta http-equiv="refresh" content="0; url={html.escape(address)}">'
        "<title>Hutch</title>\n"
    )
    # Of this user: the data folder may be that of a server of someone else.
    own = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(own, "hutch") if own and os.access(own, os.W_OK) else data_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(errno.EPERM, "other users can write there")
        # The ticket in it is over in a minute: one such file is enough.
        fd, name = tempfile.mkstemp(prefix=".dashboard-", dir=folder)  # has the mode 600
        with open(fd, "w", encoding="utf-8") as file:
            file.write(page)
        return Path(name).replace(folder / "dashboard.html")
    except OSError as exc:
        raise InvalidRequest(
            f"cannot write a page for the browser in {folder} ({exc.strerror}): use --print"
        ) from None


def _address(url: str | None) -> str:
    """Where a browser finds the server. Raises InvalidRequest or ServerUnavailable."""
    url = server_of(url).url
    if url.startswith("unix:"):
        socket = Path(url.removeprefix("unix:"))
        card = pidfile.server_of(socket.parent.parent) or pidfile.server_of(data_folder())
        if card is None or Path(card.socket).resolve() != socket.resolve():
            raise ServerUnavailable(
                f"cannot find the address of the server at {socket}: name it with --url"
            )
        url = card.url
    parts = urlsplit(url)
    if parts.path.strip("/"):
        raise InvalidRequest(f"the dashboard is at the root of a server, not at {url[:200]}")
    try:
        is_any = ipaddress.ip_address(parts.hostname or "").is_unspecified
    except ValueError:
        is_any = False
    if is_any:
        host = "[::1]" if ":" in (parts.hostname or "") else "127.0.0.1"
        return f"{parts.scheme}://{host}:{parts.port}"
    return f"{parts.scheme}://{parts.netloc}"
