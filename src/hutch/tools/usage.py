"""What was saved by showing less: a line per call in a file of the user's, for `hutch gain`.

Of a command only the family and the name of its program are written down. What is counted is
honest: nothing that a model would not have been shown anyway (agents cut what a tool prints), and
what was recalled is taken off again. Writing it never hurts a call, and HUTCH_GAIN=off stops it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from . import tokens
from .condense import CondensedOutput

# Characters of a tool's output that agents show to their models; of more, they cut the middle.
SHOWN_ANYWAY = 30_000
MAX_FILE = 256 * 1024  # bytes; then all calls of a day become one line
MAX_DAYS = 400


@dataclass(frozen=True)
class UsageEntry:
    """Calls of one program on one day."""

    day: str  # "2025-06-30"
    family: str
    program: str
    calls: int = 0
    raw_bytes: int = 0  # that a model would have been shown
    shown_bytes: int = 0
    recalled_bytes: int = 0
    raw_tokens: int = 0  # where a tokenizer is installed
    shown_tokens: int = 0
    recalled_tokens: int = 0
    counted_calls: int = 0  # those of which tokens were counted

    def plus(self, other: UsageEntry) -> UsageEntry:
        sums = {
            each.name: getattr(self, each.name) + getattr(other, each.name)
            for each in fields(self)
            if isinstance(each.default, int)
        }
        return replace(self, **sums)


def is_on() -> bool:
    return os.environ.get("HUTCH_GAIN", "on").lower() not in ("off", "0", "no", "false")


def file() -> Path:
    given = os.environ.get("HUTCH_DATA_DIR")
    if given:
        return Path(given, "gain.jsonl")
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share", "hutch/gain.jsonl")


def note_run(condensed: CondensedOutput, output: str) -> None:
    """`output`: what was printed, or both ends of it."""
    if not (is_on() and condensed.raw_bytes):
        return
    raw = output[:SHOWN_ANYWAY]
    entry = UsageEntry(
        _today(),
        condensed.family or "none",
        condensed.program,
        1,
        min(_size(raw), condensed.raw_bytes),
        _size(condensed.text),
    )
    if count := tokens.counter():
        entry = replace(
            entry,
            raw_tokens=count(raw),
            shown_tokens=count(condensed.text),
            counted_calls=1,
        )
    _write(entry)


def note_recall(family: str, program: str, text: str) -> None:
    if not is_on():
        return
    entry = UsageEntry(_today(), family or "none", program, recalled_bytes=_size(text))
    if count := tokens.counter():
        entry = replace(entry, recalled_tokens=count(text))
    _write(entry)


def entries(since: str = "") -> list[UsageEntry]:
    """By day, family and program; from a day on."""
    try:
        text = file().read_text("utf-8", "replace")
    except FileNotFoundError:
        return []
    return [entry for entry in _added(_parsed(text.splitlines())) if entry.day >= since]


def reset() -> None:
    file().unlink(missing_ok=True)


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _size(text: str) -> int:
    return len(text.encode("utf-8", "replace"))


def _write(entry: UsageEntry) -> None:
    with contextlib.suppress(OSError):
        path = file()
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            # Held for as long as a line is written, and never while anything is waited for.
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, _line(entry))
            if os.fstat(fd).st_size > MAX_FILE:
                _add_up(fd)
        finally:
            os.close(fd)


def _add_up(fd: int) -> None:
    text = os.pread(fd, 16 * MAX_FILE, 0).decode("utf-8", "replace")
    days = sorted({entry.day for entry in _parsed(text.splitlines())})[-MAX_DAYS:]
    kept = [entry for entry in _added(_parsed(text.splitlines())) if entry.day in days]
    # Of a file that is full all the same, the newer half: there is no end to what can be named.
    data = b"".join(map(_line, kept))[-MAX_FILE // 2 :]
    os.ftruncate(fd, 0)
    os.write(fd, data)


def _line(entry: UsageEntry) -> bytes:
    said = {name: value for name, value in asdict(entry).items() if value}
    return json.dumps(said).encode() + b"\n"


def _parsed(lines: Iterable[str]) -> Iterator[UsageEntry]:
    blank = asdict(UsageEntry("", "", ""))
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line: the disk was full
            said = json.loads(line)
            if isinstance(said, dict) and set(said) <= set(blank):
                known = {name: type(blank[name])(value) for name, value in said.items()}
                yield UsageEntry(**{**blank, **known})


def _added(found: Iterable[UsageEntry]) -> list[UsageEntry]:
    sums: dict[tuple[str, str, str], UsageEntry] = {}
    for entry in found:
        key = (entry.day, entry.family, entry.program)
        sums[key] = sums[key].plus(entry) if key in sums else entry
    return list(sums.values())
