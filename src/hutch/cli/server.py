"""The server that a command talks to: the one that is named, or this machine's.

This machine's server is reached by its socket, which only its own user may open; no key is
needed. The key of any other comes from HUTCH_API_KEY only: all users of a machine can read
command lines.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path

from hutch import operations as op
from hutch.client._async_http import AsyncHttpTransport
from hutch.client.parse import key_of_environment
from hutch.client.transport import AsyncTransport, Server
from hutch.errors import InvalidRequest, NoSession, NotPermitted, ServerUnavailable
from hutch.types import BoxInfo

from . import is_session
from .options import Parser
from .place import data_folder
from .program import WRONG_SCOPE, run_to_end

Check = Callable[[argparse.Namespace], object]
Work = Callable[[argparse.Namespace, AsyncTransport], Coroutine[object, object, int]]
PAGE = 100
MATCHES = 5  # sessions that a message about an ambiguous id names


def add_server_option(parser: Parser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        help="the server to ask, with the key in HUTCH_API_KEY (default: "
        "HUTCH_URL, or the server of this machine)",
    )


def run_at_server(parser: Parser, words: list[str], work: Work, check: Check | None = None) -> int:
    """Run a command that talks to a server, and return its exit code.

    `check` validates its options first.
    """
    args = parser.parse_args(words)
    if check:
        check(args)

    async def run() -> int:
        async with reach(args.url) as transport:
            return await work(args, transport)

    return run_to_end(run())


@asynccontextmanager
async def reach(url: str | None) -> AsyncIterator[AsyncTransport]:
    """A transport to the server. Raises InvalidRequest or ServerUnavailable."""
    server = server_of(url)
    transport = AsyncHttpTransport(server)
    try:
        yield transport
    except NotPermitted as exc:
        if WRONG_SCOPE not in str(exc) or server.api_key is None:
            raise
        raise NotPermitted(
            f"{exc}: use another key in HUTCH_API_KEY; or, on the machine of the server and as its "
            "user, unset HUTCH_URL to use its socket, which needs no key"
        ) from None
    finally:
        await transport.aclose()


@asynccontextmanager
async def in_session(
    url: str | None, session: str
) -> AsyncIterator[tuple[AsyncTransport, BoxInfo]]:
    """A transport to an existing session, which stays open when the `with` ends."""
    async with reach(url) as transport:
        yield transport, await transport.perform(op.GetSession(await full_id(transport, session)))


async def full_id(transport: AsyncTransport, word: str) -> str:
    """The id of the one session whose id starts with `word`.

    Ended sessions count too: a prefix must not come to mean another session, and perhaps that
    of another owner. Raises NoSession if no id matches, and InvalidRequest if several do.
    """
    if is_session(word) or not word:
        return word
    ids = [info.id for info in await all_sessions(transport, None) if info.id.startswith(word)]
    if len(ids) == 1:
        return ids[0]
    if ids:
        matches = ", ".join(ids[:MATCHES]) + (", ..." if len(ids) > MATCHES else "")
        raise InvalidRequest(f"{word!r} is ambiguous ({matches}): give more of the id")
    raise NoSession(f"there is no session {word!r}; `hutch ps --all` lists them")


@asynccontextmanager
async def open_session(
    url: str | None, operation: op.OpenSession
) -> AsyncIterator[tuple[AsyncTransport, BoxInfo]]:
    """A session on a server that lives as long as the `with`."""
    if operation.mounts:
        raise InvalidRequest(
            "--workspace and --mount show folders of this machine, which a server cannot see; "
            "use `hutch cp`, or run it here, without --url and HUTCH_URL"
        )
    async with reach(url) as transport:
        info = await transport.perform(operation)
        try:
            yield transport, info
        finally:
            await transport.perform(op.CloseSession(info.id))


def server_of(url: str | None) -> Server:
    url = url or os.environ.get("HUTCH_URL")
    if url:
        return Server(url, key_of_environment())
    return Server(f"unix:{_socket_here()}")


def _socket_here() -> Path:
    path = data_folder() / "run" / "hutch.sock"
    how = "start one with `hutch serve --detach`, or name one with --url or HUTCH_URL"
    try:
        # A socket that another user put there would receive what is meant for our server.
        if path.stat().st_uid not in (0, os.geteuid()):
            raise ServerUnavailable(f"{path} belongs to another user: {how}")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(path))
    except FileNotFoundError:
        raise ServerUnavailable(
            f"no server is running here ({path} does not exist): {how}"
        ) from None
    except ConnectionRefusedError:
        raise ServerUnavailable(f"no server is running here: {how}") from None
    except PermissionError:
        raise ServerUnavailable(
            f"cannot use {path}: run this as the server's user, or name the server with --url "
            "or HUTCH_URL and put a key in HUTCH_API_KEY"
        ) from None
    except OSError as exc:
        raise ServerUnavailable(f"cannot reach {path}: {exc.strerror or exc}; {how}") from None
    return path


async def all_sessions(
    transport: AsyncTransport, status: str | None = "live", label: str | None = None
) -> list[BoxInfo]:
    """The sessions, newest first. With status None, ended ones too."""
    sessions: list[BoxInfo] = []
    before = None
    while True:
        wanted = op.ListSessions(status=status, label=label, before=before, limit=PAGE)
        page = await transport.perform(wanted)
        sessions += page
        if len(page) < PAGE:
            return sessions
        before = page[-1].id
