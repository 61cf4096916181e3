"""What shortening has saved: one line per call in a file of the user, for `hutch gain`.

Of a command, only the family and the name of its program are recorded. Output that a model would
not have seen anyway (agents cut long output) does not count as saved, and what was recalled is
subtracted. A failure to record never breaks a call. HUTCH_GAIN=off turns it off.
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

# Characters of a tool's output that agents show to their models; of longer output, they cut it.
SHOWN_ANYWAY = 30_000
MAX_FILE = 256 * 1024  # bytes; then the calls of one program on one day become one line
MAX_DAYS = 400


@dataclass(frozen=True)
class UsageEntry:
    """Calls of one program on one day."""

    day: str  # "2025-06-30"
    family: str
    program: str
    calls: int = 0
    raw_bytes: int = 0  # that a model would have seen without shortening
    shown_bytes: int = 0
    recalled_bytes: int = 0
    raw_tokens: int = 0  # where a tokenizer is installed
    shown_tokens: int = 0
    recalled_tokens: int = 0
    counted_calls: int = 0  # whose tokens were counted

    def plus(self, other: UsageEntry) -> UsageEntry:
        sums = {
            number.name: getattr(self, number.name) + getattr(other, number.name)
            for number in fields(self)
            if isinstance(number.default, int)
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
    """Record a command. `output`: what it printed, or both ends of it."""
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
    """Sums by day, family and program, from the day `since` on."""
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
            # Held only while a line is written, so other processes wait for no more than that.
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
    # If the sums alone still fill the file, keep the newer half: there is no limit on names.
    data = b"".join(map(_line, kept))[-MAX_FILE // 2 :]
    os.ftruncate(fd, 0)
    os.write(fd, data)


def _line(entry: UsageEntry) -> bytes:
    values = {name: value for name, value in asdict(entry).items() if value}
    return json.dumps(values).encode() + b"\n"


def _parsed(lines: Iterable[str]) -> Iterator[UsageEntry]:
    blank = asdict(UsageEntry("", "", ""))
    for line in lines:
        with contextlib.suppress(ValueError):  # half a line: the disk was full
            values = json.loads(line)
            if isinstance(values, dict) and set(values) <= set(blank):
                known = {name: type(blank[name])(value) for name, value in values.items()}
                yield UsageEntry(**{**blank, **known})


def _added(several: Iterable[UsageEntry]) -> list[UsageEntry]:
    sums: dict[tuple[str, str, str], UsageEntry] = {}
    for entry in several:
        key = (entry.day, entry.family, entry.program)
        sums[key] = sums[key].plus(entry) if key in sums else entry
    return list(sums.values())
