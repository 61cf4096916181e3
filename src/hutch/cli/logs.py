"""`hutch logs`: the journal of a session, or the log of this machine's server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing

from hutch import operations as op
from hutch import serving
from hutch.client._async_stream import AsyncItems
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest, ServerUnavailable
from hutch.serving import JournalEntry
from hutch.types import ENDED

from .options import Parser, make_parser
from .place import data_folder, log_file
from .program import Launcher, run_to_end
from .screen import OutputStream, local_time, moment, to_json
from .server import add_server_option, full_id, reach

FORMATS = ("text", "json", "asciicast", "notebook")
# The field of an entry that is printed first, without its name.
SUBJECTS = ("command", "code", "argv", "path", "message", "call")
LEFT_OUT = ("output", "stdout", "stderr", "results")  # too long for one line
PAGE = 1000
WIDTH = len("broken_off")  # of the longest kind
LOOK_AGAIN = 0.2  # seconds between two reads of a log


def build_parser() -> Parser:
    parser = make_parser(
        "hutch logs",
        "hutch logs [-f] [-n COUNT] [--format FORMAT] SESSION\n"
        "       hutch logs --security SESSION\n"
        "       hutch logs [-f] --daemon",
        "Show the journal of a session, even after its end: each command, cell, written\n"
        "file, start, wake, limit and deadline is one line. The format asciicast is a\n"
        "recording for asciinema, notebook one for Jupyter.",
        "exit codes: 0, or 125 if hutch failed.\n"
        "\n"
        "examples:\n"
        "  hutch logs -f 3f9d0c1a-77e\n"
        "  hutch logs --format notebook 3f9d0c1a-77e > session.ipynb",
    )
    parser.add_argument("session", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing until the session ends"
    )
    parser.add_argument(
        "-n", "--tail", type=int, metavar="COUNT", help="only the last COUNT entries"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        metavar="FORMAT",
        help="text (default), json (an object in each line), asciicast or notebook",
    )
    parser.add_argument(
        "--security",
        action="store_true",
        help="only denied system calls: which program, which call, how often since the "
        "box was made, and when",
    )
    parser.add_argument(
        "--daemon",
        action="store_true",
        help="the log of this machine's server, if it was started with --detach",
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    if bool(args.session) == args.daemon:
        raise InvalidRequest("give a session, or --daemon; `hutch ps --all` lists sessions")
    if args.tail is not None and args.tail < 0:
        raise InvalidRequest("--tail must be a number of entries, at least 0")
    if args.tail is not None and (args.daemon or args.format in ("asciicast", "notebook")):
        raise InvalidRequest("--tail is for the formats text and json, of a session")
    if args.follow and args.format in ("asciicast", "notebook"):
        raise InvalidRequest(f"{args.format} needs the whole journal: leave out -f")
    if args.security and (args.daemon or args.follow):
        raise InvalidRequest("--security cannot be combined with -f or --daemon")
    if args.security and args.format not in ("text", "json"):
        raise InvalidRequest(f"--security has the formats text and json, not {args.format}")
    return run_to_end(_daemon(follow=args.follow) if args.daemon else _journal(args))


async def _journal(args: argparse.Namespace) -> int:
    output = OutputStream(1)
    async with reach(args.url) as transport:
        args.session = await full_id(transport, args.session)
        if args.format in ("asciicast", "notebook"):
            export = serving.ExportJournal(args.session, args.format)
            pieces: AsyncItems[bytes] = await transport.stream(export)
        elif args.follow:
            pieces = _lines(_follow(transport, args.session, args.tail), args.format)
        else:
            entries = _read(transport, args.session)
            if args.security:
                entries = _only_denied(entries)
            if args.tail is not None:
                entries = _last(entries, args.tail)
            pieces = _lines(entries, args.format)
        async with aclosing(pieces):
            async for piece in pieces:
                await output.write(piece)
    await output.finish()
    return 0


async def _read(transport: AsyncTransport, session: str) -> AsyncGenerator[JournalEntry, None]:
    after = 0
    while page := await transport.perform(serving.ReadJournal(session, after, PAGE)):
        for entry in page:
            yield entry
        after = page[-1].number


async def _only_denied(entries: AsyncIterator[JournalEntry]) -> AsyncGenerator[JournalEntry, None]:
    async for entry in entries:
        if entry.kind == "denied":
            yield entry


async def _last(
    entries: AsyncIterator[JournalEntry], count: int
) -> AsyncGenerator[JournalEntry, None]:
    for entry in deque([entry async for entry in entries], maxlen=count):
        yield entry


async def _follow(
    transport: AsyncTransport, session: str, tail: int | None
) -> AsyncGenerator[JournalEntry, None]:
    """Follow the journal until the session ends, also across restarts of the server."""
    after = 0
    if tail is not None:
        known = [entry async for entry in _read(transport, session)]
        for entry in deque(known, maxlen=tail):
            yield entry
        after = known[-1].number if known else 0
    while True:
        try:
            async with aclosing(
                await transport.stream(serving.FollowJournal(session, after))
            ) as entries:
                async for entry in entries:
                    yield entry
                    after = entry.number
            if (await transport.perform(op.GetSession(session))).status in ENDED:
                return
        except ServerUnavailable:
            # Waits until the server is back; raises if the session is gone.
            await transport.perform(op.GetSession(session))
        await asyncio.sleep(LOOK_AGAIN)


async def _lines(entries: AsyncIterator[JournalEntry], format: str) -> AsyncGenerator[bytes, None]:
    async for entry in entries:
        line = json.dumps(_record(entry)) if format == "json" else describe(entry)
        yield line.encode("utf-8", "backslashreplace") + b"\n"


def _record(entry: JournalEntry) -> dict[str, object]:
    body = {
        name: moment(it) if name.endswith("_at") and isinstance(it, float) else it
        for name, it in entry.body.items()
    }
    return {**to_json(entry), "body": body}


def describe(entry: JournalEntry) -> str:
    """One line: the time, the kind, the subject, and the other fields."""
    when = local_time(entry.happened_at)
    body = {name: it for name, it in entry.body.items() if name not in LEFT_OUT}
    kind = "terminal" if body.pop("terminal", False) else entry.kind
    subject = next((body.pop(name) for name in SUBJECTS if name in body), None)
    rest = [
        f"{name}={_show_value(name, value)}"
        for name, value in body.items()
        if value not in (None, "", False)
    ]
    words = [when, kind.ljust(WIDTH), *([] if subject is None else [_short(subject)]), *rest]
    return "  ".join(words).rstrip()


def _show_value(name: str, value: object) -> str:
    if name.endswith("_at") and isinstance(value, int | float):
        return local_time(value)
    if name == "error" and isinstance(value, Mapping):
        return _short(f"{value.get('name')}: {value.get('value')}")
    return _short(value)


def _short(value: object, most: int = 200) -> str:
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        value = shlex.join(value)
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    line = text.replace("\n", "\\n")
    return line if len(line) <= most else f"{line[: most - 3]}..."


# --- the server's own --------------------------------------------------------------------


async def _daemon(*, follow: bool) -> int:
    output = OutputStream(1)
    path = log_file(data_folder())
    try:
        log = os.open(path, os.O_RDONLY)
    except OSError as exc:
        raise InvalidRequest(
            f"cannot read {path}: {exc.strerror}; it is written by `hutch serve --detach`"
        ) from None
    try:
        while True:
            while data := os.read(log, 1 << 16):
                await output.write(data)
            if not follow:
                await output.finish()
                return 0
            await asyncio.sleep(LOOK_AGAIN)
    finally:
        os.close(log)
