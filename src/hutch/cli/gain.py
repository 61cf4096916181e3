"""`hutch gain`: how many tokens agents saved because output was condensed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from hutch.errors import InvalidRequest
from hutch.tools import tokens, usage
from hutch.tools.condense import custom
from hutch.tools.condense.condenser import condense
from hutch.tools.usage import UsageEntry

from .options import Parser, make_parser
from .program import Launcher
from .screen import print_table

HEADER = ("PROGRAM", "FAMILY", "CALLS", "PRINTED", "SHOWN", "RECALLED", "SAVED")
DAY = 24 * 3600
ANY = re.compile("")


def build_parser() -> Parser:
    parser = make_parser(
        "hutch gain",
        "hutch gain [--since DAYS] [--json] [--reset] [--check-filters FILE]",
        "Show how much of the output of commands agents had to read, by program and by\n"
        "the family of its filter. Output that agents would have cut anyway does not\n"
        "count as saved, and recalled output is subtracted. HUTCH_GAIN=off turns counting\n"
        "off.",
        "exit codes: 0, 1 if a filter fails its tests, or 125 if hutch failed.",
    )
    parser.add_argument("--since", metavar="DAYS", help="only the last DAYS days: 7, 7d or 2w")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.add_argument("--reset", action="store_true", help="delete all counts")
    parser.add_argument(
        "--check-filters", metavar="FILE", help="run the tests in a file of filters"
    )
    return parser


def main(words: list[str], launcher: Launcher) -> int:
    args = build_parser().parse_args(words)
    if args.check_filters:
        return _check(Path(args.check_filters))
    if args.reset:
        usage.reset()
        return 0
    since = ""
    if args.since is not None:
        since = time.strftime("%Y-%m-%d", time.localtime(time.time() - _days(args.since) * DAY))
    _show(_by_program(usage.entries(since)), args.json)
    return 0


def _days(text: str) -> int:
    found = re.fullmatch(r"([1-9][0-9]{0,4})([dw]?)", text)
    if not found:
        raise InvalidRequest(f"--since must be a number of days, like 7, 7d or 2w, not {text!r}")
    return int(found[1]) * (7 if found[2] == "w" else 1)


def _by_program(entries: Iterable[UsageEntry]) -> list[UsageEntry]:
    """Summed up by program and family, largest saving first."""
    sums: dict[tuple[str, str], UsageEntry] = {}
    for entry in entries:
        key = (entry.program, entry.family)
        sums[key] = sums[key].plus(entry) if key in sums else replace(entry, day="")
    return sorted(sums.values(), key=_saved_bytes, reverse=True)


def _saved_bytes(entry: UsageEntry) -> int:
    return entry.raw_bytes - entry.shown_bytes - entry.recalled_bytes


def _show(programs: list[UsageEntry], as_json: bool) -> None:
    total = UsageEntry("", "", "total")
    for entry in programs:
        total = total.plus(entry)
    unit, how = _unit(total)
    rows = [_numbers(entry, unit) for entry in (*programs, total)]
    if as_json:
        names = [name.lower() for name in HEADER]
        listed = [dict(zip(names, row, strict=True)) for row in rows]
        print(
            json.dumps(
                {"unit": unit, "counted": how, "programs": listed[:-1], "total": listed[-1]},
                indent=2,
            )
        )
        return
    if not programs:
        print("nothing counted yet: only commands that agents run with the tool `bash` count")
        return
    print_table(HEADER, [_row(row) for row in rows], right=HEADER[2:])
    print(f"\nin {unit}: {how}")


def _unit(total: UsageEntry) -> tuple[str, str]:
    if total.calls and total.counted_calls == total.calls:
        tokenizer = tokens.found()
        return "tokens", f"counted by {tokenizer[0]}" if tokenizer else "counted by a tokenizer"
    if total.counted_calls:
        return "bytes", "tokens were counted for some of these calls only"
    return "bytes", "no tokenizer that works offline was installed: try `pip install rs-bpe`"


def _numbers(entry: UsageEntry, unit: str) -> tuple[str, str, int, int, int, int, int]:
    raw, shown, recalled = (
        getattr(entry, f"{what}_{unit}") for what in ("raw", "shown", "recalled")
    )
    return entry.program, entry.family, entry.calls, raw, shown, recalled, raw - shown - recalled


def _row(numbers: tuple[str, str, int, int, int, int, int]) -> list[str]:
    program, family, *counts = numbers
    raw, saved = counts[1], counts[-1]
    share = f" ({100 * saved / raw:.0f} %)" if raw else ""
    return [program, family, *(f"{count:,}" for count in counts[:-1]), f"{saved:,}{share}"]


def _check(path: Path) -> int:
    filters = custom.load(path)
    failed = 0
    for rule in filters:
        for number, sample in enumerate(rule.samples, 1):
            text = condense("", sample.output.encode(), filters=(replace(rule, match=ANY),)).text
            if text.rstrip("\n") != sample.shows.rstrip("\n"):
                failed += 1
                print(f"{rule.name}, test {number}: expected\n{sample.shows}\nbut got\n{text}\n")
    count = sum(len(rule.samples) for rule in filters)
    print(f"{len(filters)} filters, {count} tests, {failed} failed")
    return 1 if failed else 0
