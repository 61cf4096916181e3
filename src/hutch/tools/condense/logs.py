"""Logs: the day once; of messages that differ only in numbers, the first two, the last, the count.

Of errors and warnings more are shown, and some of every kind.
"""

from __future__ import annotations

import re
from collections import Counter

from .family import CommandLine, Family, Gap, Hidden, Shown, count
from .generic import shapes
from .sift import failing, is_like, looks_like_failure

_STAMP = re.compile(
    r"\[?(\d{4}[-/]\d\d[-/]\d\d)[T ](\d\d:\d\d:\d\d(?:[.,]\d+)?)(Z|[+-]\d\d:?\d\d)?\]?\s*"
    r"|([A-Z][a-z]{2} [ \d]\d) (\d\d:\d\d:\d\d)\s+"
)
_ACCESS = re.compile(r"\S+ \S+ \S+ \[\d\d/[A-Z][a-z]{2}/\d{4}[: ]\d\d:\d\d:\d\d")
_REFUSED = re.compile(r'" [45]\d\d\b')  # what a web server answered
_SOME = 4  # messages of one shape: so few are all shown
_FAILURES = 8  # messages of one shape that are shown if they report a failure or a warning
_WARNS = re.compile(r"\bwarn(?:ing)?s?\b", re.IGNORECASE)


def shorten(call: CommandLine, lines: list[str]) -> Shown:
    stamps = [_STAMP.match(line) for line in lines]
    if not _are_log(lines, stamps):
        return list(lines)
    days = Counter(stamp[1] or stamp[4] for stamp in stamps if stamp)
    day = next(iter(days)) if len(days) == 1 and sum(days.values()) * 2 > len(lines) else ""
    texts = [_dayless(line, stamp, day) for line, stamp in zip(lines, stamps, strict=True)]
    # A failure is never of the same kind as another message, even if their shapes are equal.
    is_failure = failing(texts)
    pairs = zip(texts, shapes(texts), strict=True)
    shown = _first_and_last(texts, [kind + "!" * is_failure(text) for text, kind in pairs])
    return [f"[all on {day}]", *shown] if day else shown


def _are_log(lines: list[str], stamps: list[re.Match[str] | None]) -> bool:
    if len(lines) < 8:
        return False
    dated = sum(map(bool, stamps)) or sum(is_like(_ACCESS, line) for line in lines)
    return dated * 2 > len(lines)


def _dayless(line: str, stamp: re.Match[str] | None, day: str) -> str:
    if not (stamp and day) or isinstance(line, Gap):
        return line
    time = f"{stamp[2]}{stamp[3] or ''}" if stamp[1] else stamp[5]
    return f"{time} {line[stamp.end() :]}"


def _first_and_last(texts: list[str], kinds: list[str]) -> Shown:
    times, seen = Counter(kinds), Counter[str]()
    shown: Shown = []
    hidden = 0
    for text, kind in zip(texts, kinds, strict=True):
        seen[kind] += 1
        is_end = seen[kind] <= 2 or seen[kind] == times[kind]
        is_rare = times[kind] <= _SOME or (seen[kind] <= _FAILURES and _matters(text))
        if isinstance(text, Gap) or is_end or is_rare:
            if hidden:
                shown.append(Hidden(hidden, "messages like others here"))
                hidden = 0
            shown.append(text)
        else:
            hidden += count(text)
    if hidden:
        shown.append(Hidden(hidden, "messages like others here"))
    return shown


def _matters(line: str) -> bool:
    return bool(looks_like_failure(line) or _WARNS.search(line) or _REFUSED.search(line))


def _reads_log(call: CommandLine) -> bool:
    if call.program in ("journalctl", "dmesg"):
        return True
    files = [word for word in call.argv[1:] if not word.startswith("-")]
    return bool(files) and files[-1].rpartition("/")[2].endswith((".log", "syslog", "messages"))


def _looks_like(lines: list[str]) -> bool:
    some = lines[:200]
    dated = sum(bool(_STAMP.match(line)) or is_like(_ACCESS, line) for line in some)
    return len(some) >= 20 and dated * 10 > len(some) * 8


LOGS = (
    Family(
        "logs",
        ("journalctl", "dmesg", "cat", "tail", "head", "zcat"),
        shorten,
        _reads_log,
        _looks_like,
        is_content=True,
        has_failures=True,
    ),
)
