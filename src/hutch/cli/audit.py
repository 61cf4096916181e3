"""`hutch audit`: who did what at a server."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from hutch import serving
from hutch.engine.audit import Filter, scan, verify
from hutch.engine.times import parse_since
from hutch.errors import HutchError, InvalidRequest, ServerUnavailable
from hutch.serving import AuditEntry
from hutch.types import plain

from .options import Parser, make_parser
from .place import data_folder
from .program import FAILED, Launcher, run_to_end
from .screen import Screen, complain, visible
from .server import add_server_option, reach

PAGE = 1000
LOOK_AGAIN = 0.5  # seconds, for a log that grows
BROKEN = 1  # exit code of --verify

# Lines after a number, and the number after which the next page begins.
Page = Callable[[int], Awaitable[tuple[list[AuditEntry], int]]]


def parser() -> Parser:
    made = make_parser(
        "hutch audit",
        "hutch audit [-f] [--since WHEN] [--owner NAME] [--key ID] [--event NAME]\n"
        "                   [--json]\n"
        "       hutch audit --verify",
        "Show the audit log of a server, oldest first: every request that changed\n"
        "something, every request that was denied, failed authentications, and when the\n"
        "server was started and stopped. What commands did is in `hutch logs`. On the\n"
        "machine of the server the files are read, so it need not run; elsewhere it\n"
        "takes an admin key.",
        "exit codes: 0; 1 if --verify finds that the log was changed; 125 if hutch\n"
        "failed.\n"
        "\n"
        "examples:\n"
        "  hutch audit --since 1h\n"
        "  hutch audit -f --event auth_failed\n"
        "  hutch audit --key 1f4c9a02 --json",
    )
    made.add_argument(
        "-f", "--follow", action="store_true", help="go on as more comes, until Ctrl-C"
    )
    made.add_argument(
        "--since", default="", metavar="WHEN", help="30m, 12h, 7d, or 2027-01-01 (UTC)"
    )
    made.add_argument("--owner", default="", metavar="NAME", help="what this owner did")
    made.add_argument("--key", default="", metavar="ID", help="what this key did")
    made.add_argument(
        "--event",
        default="",
        metavar="NAME",
        help="request, denied, auth_failed, server_started, server_stopped or dropped",
    )
    made.add_argument("--json", action="store_true", help="print an object in each line")
    made.add_argument(
        "--verify",
        action="store_true",
        help="check that no line of the log on this machine was changed, removed or inserted",
    )
    add_server_option(made)
    return made


def main(words: list[str], launcher: Launcher) -> int:
    try:
        chosen = parser().parse_args(words)
        if chosen.since:
            parse_since(chosen.since, time.time())
        if chosen.verify and (chosen.url or chosen.follow or chosen.json):
            raise InvalidRequest("--verify reads the files of this machine, and prints one line")
        if chosen.verify:
            return _verify(_folder())
    except HutchError as exc:
        complain(str(exc))
        return FAILED
    return run_to_end(_show(chosen))


def _folder() -> Path:
    folder = data_folder() / "audit"
    try:
        os.listdir(folder)
    except OSError as exc:
        raise InvalidRequest(
            f"cannot read {folder}: {exc.strerror}; it is made by `hutch init` and `hutch serve`"
        ) from None
    return folder


def _verify(folder: Path) -> int:
    found = verify(folder)
    if found.problem:
        complain(f"the audit log was changed, or is damaged: {found.problem}")
        return BROKEN
    if not found.last:
        print("the audit log is empty")
    else:
        print(f"lines {found.first} to {found.last} are as they were written; head {found.head}")
    return 0


async def _show(chosen: argparse.Namespace) -> int:
    screen = Screen(1)
    async with AsyncExitStack() as stack:
        page: Page
        if chosen.url or os.environ.get("HUTCH_URL"):
            perform = await stack.enter_async_context(reach(chosen.url))

            async def page(after: int) -> tuple[list[AuditEntry], int]:
                asked = serving.ReadAudit(
                    after, PAGE, chosen.since, chosen.owner, chosen.key, chosen.event
                )
                found: list[AuditEntry] = await perform(asked)
                return found, found[-1].number if found else after
        else:
            folder = _folder()
            since = parse_since(chosen.since, time.time()) if chosen.since else 0.0
            only = Filter(chosen.owner, chosen.key, chosen.event, since)

            async def page(after: int) -> tuple[list[AuditEntry], int]:
                return await asyncio.to_thread(scan, folder, after, PAGE, only)

        await _print(page, screen, follow=chosen.follow, as_json=chosen.json)
    await screen.finish()
    return 0


async def _print(page: Page, screen: Screen, *, follow: bool, as_json: bool) -> None:
    after = 0
    while True:
        try:
            entries, after = await page(after)
        except ServerUnavailable:
            if not follow or not after:
                raise
            entries = []  # it is being started again
        for entry in entries:
            line = json.dumps(plain(entry)) if as_json else describe(entry)
            await screen.write(line.encode("utf-8", "backslashreplace") + b"\n")
        if len(entries) < PAGE:
            if not follow:
                return
            await asyncio.sleep(LOOK_AGAIN)


def describe(entry: AuditEntry) -> str:
    """One line: when, what kind, who, what, and how it went."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.happened_at))
    who = f"{entry.owner or '-'}/{entry.key or '-'}"
    words = [when, entry.event.ljust(14), who.ljust(16), entry.peer or "-"]
    words += [word for word in (entry.operation, entry.target, entry.outcome) if word]
    words += [f"{name}={value}" for name, value in entry.detail.items()]
    return visible("  ".join(words)).replace("\n", "\\n")
