"""`hutch audit`: show and verify the audit log of a server."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

from hutch import serving
from hutch.client.transport import AsyncTransport
from hutch.errors import InvalidRequest, ServerUnavailable
from hutch.server.audit import LOOK_AGAIN, PAGE, AuditFilter, entries, verify
from hutch.serving import AUDIT_EVENTS, AuditEntry

from .options import Parser, make_parser
from .place import data_folder
from .program import Launcher, run_to_end
from .screen import OutputStream, complain, local_time, visible
from .server import add_server_option, reach

BROKEN = 1  # exit code of --verify


def build_parser() -> Parser:
    parser = make_parser(
        "hutch audit",
        "hutch audit [-f] [--since WHEN] [--owner NAME] [--key ID] [--event NAME]\n"
        "                   [--json]\n"
        "       hutch audit --verify",
        "Show the audit log of a server, oldest first: every request that changed\n"
        "something, every request that was denied, failed authentications, and when the\n"
        "server was started and stopped. `hutch logs` shows what commands did. On the\n"
        "server's machine, the files are read, so the server need not run; elsewhere,\n"
        "this needs an admin key.",
        "exit codes: 0; 1 if --verify finds that the log was changed; 125 if hutch\n"
        "failed.\n"
        "\n"
        "examples:\n"
        "  hutch audit --since 1h\n"
        "  hutch audit -f --event auth_failed\n"
        "  hutch audit --key 1f4c9a02 --json",
    )
    parser.add_argument(
        "-f", "--follow", action="store_true", help="keep printing new lines, until Ctrl-C"
    )
    parser.add_argument(
        "--since", default="", metavar="WHEN", help="30m, 12h, 7d, or 2027-01-01 (UTC)"
    )
    parser.add_argument("--owner", default="", metavar="NAME", help="only what this owner did")
    parser.add_argument("--key", default="", metavar="ID", help="only what this key did")
    parser.add_argument(
        "--event",
        default="",
        metavar="NAME",
        help=f"only these events: {', '.join(AUDIT_EVENTS[:-1])} or {AUDIT_EVENTS[-1]}",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the lines as they are stored, as JSON"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check that no line of the log on this machine was changed, removed or inserted",
    )
    add_server_option(parser)
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    only = AuditFilter.parse(args.since, args.owner, args.key, args.event)
    if args.verify:
        _check_alone(args)
        return _verify(_folder())
    return run_to_end(_show(args, only))


def _check_alone(args: argparse.Namespace) -> None:
    """--verify checks the whole log on this machine: it can take no filter and no URL."""
    for option in ("url", "follow", "json", "since", "owner", "key", "event"):
        if getattr(args, option):
            raise InvalidRequest(
                f"--verify checks the whole log on this machine: leave --{option} out"
            )


def _folder() -> Path:
    folder = data_folder() / "audit"
    try:
        os.listdir(folder)
    except OSError as exc:
        raise InvalidRequest(
            f"cannot read {folder}: {exc.strerror}; `hutch init` and `hutch serve` create it"
        ) from None
    return folder


def _verify(folder: Path) -> int:
    verdict = verify(folder)
    if verdict.problem:
        complain(f"the audit log was changed, or is damaged: {verdict.problem}")
        return BROKEN
    if not verdict.last:
        print(f"the audit log in {folder} is empty")
    else:
        lines = f"lines {verdict.first} to {verdict.last}"
        print(f"{lines} are as they were written; head {verdict.head}")
        print(f"the log is in {folder}")
    return 0


async def _show(args: argparse.Namespace, only: AuditFilter) -> int:
    output = OutputStream(1)
    async with AsyncExitStack() as stack:
        if args.url or os.environ.get("HUTCH_URL"):
            transport = await stack.enter_async_context(reach(args.url))
            log = (_follow if args.follow else _read)(transport, args)
        else:
            log = entries(_folder(), 0, only, follow=args.follow)
        async with aclosing(log):
            async for entry in log:
                line = entry.line if args.json else describe(entry)
                await output.write(line.encode("utf-8", "backslashreplace") + b"\n")
    await output.finish()
    return 0


async def _read(
    transport: AsyncTransport, args: argparse.Namespace
) -> AsyncGenerator[AuditEntry, None]:
    after, wanted = 0, (args.since, args.owner, args.key, args.event)
    while page := await transport.perform(serving.ReadAudit(after, PAGE, *wanted)):
        for entry in page:
            yield entry
        if len(page) < PAGE:
            return
        after = page[-1].number


async def _follow(
    transport: AsyncTransport, args: argparse.Namespace
) -> AsyncGenerator[AuditEntry, None]:
    """Follow the log, also across restarts of the server."""
    after, wanted = 0, (args.since, args.owner, args.key, args.event)
    has_connected = False
    while True:
        try:
            async with aclosing(
                await transport.stream(serving.FollowAudit(after, *wanted))
            ) as stream:
                has_connected = True
                async for entry in stream:
                    yield entry
                    after = entry.number
        except ServerUnavailable:
            if not has_connected:
                raise
        await asyncio.sleep(LOOK_AGAIN)


def describe(entry: AuditEntry) -> str:
    """One line: when, what kind, who, what, and how it went."""
    when = local_time(entry.happened_at)
    who = f"{entry.owner or '-'}/{entry.key or '-'}"
    words = [when, entry.event.ljust(14), who.ljust(16), entry.peer or "-"]
    words += [word for word in (entry.operation, entry.target, entry.outcome) if word]
    words += [f"{name}={value}" for name, value in entry.detail.items()]
    return visible("  ".join(words)).replace("\n", "\\n")
