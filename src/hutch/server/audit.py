"""The audit log: who did what, when, with which key.

JSON lines in `audit/` of the data folder, in files that are only appended to and are named after
the number of their first line. Each line has the SHA-256 of the one before it, so a line that was
changed, removed or inserted later is found (`verify`). What commands did is in the journals of
sessions; no key, command, file or environment is ever here.

A line is written before its request is answered, so it survives `kill -9`; it is synced to disk
within a second or two, so a power failure can cost that much. A full disk does not stop the
server: lines that cannot be written are counted, an error is logged, and the next line that can be
written is preceded by one that says how many are missing.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hutch.errors import InvalidRequest
from hutch.serving import AUDIT_EVENTS, AuditEntry

from .times import parse_since

log = logging.getLogger("hutch.audit")
MAX_TEXT = 256  # characters, of any one text in a line
MAX_DETAILS = 64
MAX_LINE = 32 * 1024  # bytes
FILE_SIZE = 8 << 20  # bytes, after which the next file begins
START = "0" * 64  # what stands in the place of a hash in the first line of all
TAIL = 2 * MAX_LINE
DAY = 86_400.0  # seconds, after which the next file begins
REPEAT = 60.0  # seconds between two error lines about the same full disk
PAGE = 1000  # lines that are read at once
LOOK_AGAIN = 0.5  # seconds between two looks at a log that is followed


class _Line(msgspec.Struct):
    """A line as it is on disk."""

    number: int
    happened_at: str
    event: str
    previous: str
    owner: str = ""
    key: str = ""
    operation: str = ""
    target: str = ""
    outcome: str = ""
    peer: str = ""
    request: str = ""
    detail: dict[str, str] = msgspec.field(default_factory=dict)


_decode = msgspec.json.Decoder(_Line).decode


@dataclass(frozen=True)
class AuditFilter:
    """Which lines to read; empty: all. Raises InvalidRequest if there is no such event."""

    owner: str = ""
    key: str = ""
    event: str = ""
    since: float = 0.0

    @classmethod
    def parse(cls, since: str, owner: str, key: str, event: str) -> AuditFilter:
        """`since` is like 30m, 7d or 2027-01-01. Raises InvalidRequest if it is not."""
        return cls(owner, key, event, parse_since(since, time.time()) if since else 0.0)

    def __post_init__(self) -> None:
        if self.event and self.event not in AUDIT_EVENTS:
            known = ", ".join(AUDIT_EVENTS)
            raise InvalidRequest(f"no event {self.event[:64]!r}: there are {known}")

    def may_match(self, line: bytes) -> bool:
        """A cheap check of the bytes, because most lines do not match."""
        return all(
            json.dumps(text).encode() in line for text in (self.owner, self.key, self.event) if text
        )

    def matches(self, entry: AuditEntry) -> bool:
        return (
            self.owner in ("", entry.owner)
            and self.key in ("", entry.key)
            and self.event in ("", entry.event)
            and entry.happened_at >= self.since
        )


ALL = AuditFilter()


class Audit:
    """The log of one server. There is one writer; other processes may read.

    `max_size` bytes and `max_age` seconds are what is kept; whole files go, the oldest first.
    """

    def __init__(
        self, folder: Path, max_size: int = 1 << 30, max_age: float = 365 * 86_400
    ) -> None:
        self.folder = folder
        self._max_size, self._max_age = max_size, max_age
        self._fd: int | None = None
        self._size = 0  # of the file that is written to
        self._number, self._previous = 0, START  # of the last line
        self._begun = 0.0  # when its first line was written
        self._dirty = False
        self._is_new = False  # whether its name may not be on disk yet
        self._missing = 0  # lines that could not be written, and that no line mentions yet
        self.dropped = 0  # the same, since the start of the server
        self._complained = -REPEAT

    def add(
        self,
        event: str,
        *,
        owner: str = "",
        key: str = "",
        operation: str = "",
        target: str = "",
        outcome: str = "",
        peer: str = "",
        request: str = "",
        detail: Mapping[str, str] | None = None,
    ) -> None:
        """Write one line. Never raises: a line that cannot be written is counted and logged."""
        entry = AuditEntry(
            0,
            time.time(),
            event,
            owner=owner,
            key=key,
            operation=operation,
            target=target,
            outcome=outcome,
            peer=peer,
            request=request,
            detail=detail or {},
        )
        try:
            self._open()
            if self._missing:
                gap = AuditEntry(
                    0, entry.happened_at, "dropped", detail={"lines": str(self._missing)}
                )
                self._write(gap)
                self._missing = 0
            self._write(entry)
        except OSError as exc:
            self._missing += 1
            self.dropped += 1
            now = time.monotonic()
            if now - self._complained >= REPEAT:
                self._complained = now
                log.error(
                    "cannot write the audit log in %s: %s; requests are still answered, "
                    "and lines that are missing are counted",
                    self.folder,
                    exc.strerror or exc,
                )

    async def sync(self) -> None:
        """Sync what was written to disk. Never raises OSError."""
        if not self._dirty or self._fd is None:
            return
        is_new, self._is_new, self._dirty = self._is_new, False, False
        fd = os.dup(self._fd)  # the next file may begin before this is done
        try:
            await asyncio.to_thread(os.fsync, fd)
            if is_new:
                await asyncio.to_thread(_sync_folder, self.folder)
            if os.fstat(fd).st_nlink == 0:  # it was removed: write to a new file
                self._begin_file()
        except OSError as exc:
            self._is_new, self._dirty = self._is_new or is_new, True  # tried again
            log.error("cannot sync the audit log in %s: %s", self.folder, exc.strerror)
        finally:
            os.close(fd)

    async def sync_each_second(self) -> None:
        """Sync until cancelled. Run it in its own task, so that nothing waits for a slow disk."""
        while True:
            await asyncio.sleep(1)
            try:
                await self.sync()
            except Exception:
                log.exception("cannot sync the audit log in %s; trying again", self.folder)

    def prune(self) -> None:
        """Remove files that are too old, or beyond the size. The one that is written to stays.

        Never raises. Safe to call in a thread.
        """
        oldest = time.time() - self._max_age
        try:
            found = [(path, path.stat()) for path in _files(self.folder)[:-1]]
            total = sum(info.st_size for _, info in found) + self._size
            for path, info in found:
                if total <= self._max_size and info.st_mtime >= oldest:
                    break
                path.unlink(missing_ok=True)
                total -= info.st_size
        except OSError as exc:  # the line that is being written must not be lost for this
            log.error("cannot remove old lines of the audit log: %s", exc)

    async def prune_in_thread(self) -> None:
        """Call it every hour."""
        await asyncio.to_thread(self.prune)

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.fsync(fd)
            except OSError:
                pass
            os.close(fd)

    # --- the file -------------------------------------------------------------------------

    def _open(self) -> None:
        """Find the end of the log. An incomplete last line is cut off: it was not acknowledged."""
        if self._fd is not None:
            return
        self.folder.mkdir(mode=0o700, exist_ok=True)
        files = _files(self.folder)
        if not files:
            self._begin_file()
            return
        # The last file may be empty, if it was begun and nothing was written.
        for path in reversed(files):
            if (found := _last_line(path)) is not None:
                self._number, self._previous = found
                break
        fd = os.open(files[-1], os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._size = _cut_torn_line(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self._begun = _first_time(files[-1]) or time.time()

    def _begin_file(self) -> None:
        path = self.folder / f"{self._number + 1:012}.jsonl"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, flags, 0o600)
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size, self._begun = fd, os.fstat(fd).st_size, time.time()
        self._is_new = True

    def _write(self, entry: AuditEntry) -> None:
        entry = replace(entry, number=self._number + 1, previous=self._previous)
        line = _encode(entry)
        is_full = self._size + len(line) > min(FILE_SIZE, max(self._max_size // 4, MAX_LINE))
        # A file of a few quiet months could not be removed before its last line is too old.
        if self._size and (is_full or entry.happened_at - self._begun >= DAY):
            self._begin_file()
            self.prune()
        assert self._fd is not None
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            # Part of the line may have been written. Opening the file again cuts that off.
            os.close(self._fd)
            self._fd = None
            raise
        self._size += len(line)
        self._number, self._previous = entry.number, _hash(line)
        self._dirty = True


def _encode(entry: AuditEntry) -> bytes:
    """ASCII in one line, whatever is in it; every text is bounded."""
    detail = {
        _short(name): _short(value) for name, value in list(entry.detail.items())[:MAX_DETAILS]
    }
    body: dict[str, object] = {
        "number": entry.number,
        "happened_at": datetime.fromtimestamp(entry.happened_at, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z"),
        "event": _short(entry.event),
    }
    for name in ("owner", "key", "operation", "target", "outcome", "peer", "request"):
        if text := getattr(entry, name):
            body[name] = _short(text)
    if detail:
        body["detail"] = detail
    body["previous"] = entry.previous
    line = json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_LINE:  # escapes are long; without details it always fits
        return _encode(replace(entry, detail={"too_large": str(len(line))}))
    return line


def _short(text: str) -> str:
    if len(text) <= MAX_TEXT and text.isascii():  # nearly always
        return text
    # A lone surrogate would be an escape that strict readers refuse.
    clean = text[: MAX_TEXT + 1].encode("utf-8", "backslashreplace").decode()
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 3] + "..."


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _files(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("*.jsonl") if path.stem.isdigit())


def _last_line(path: Path) -> tuple[int, str] | None:
    """The number and the hash of the last whole line, if there is one."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        data = file.read()
    for line in reversed(data[: data.rfind(b"\n") + 1].splitlines(keepends=True)):
        if (found := _parsed(line)) is not None:
            return found.number, _hash(line)
    return None


def _first_time(path: Path) -> float | None:
    """When the first line of a file was written."""
    for line in _whole_lines(path):
        entry = _entry(line)
        return entry.happened_at if entry else None
    return None


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cut_torn_line(fd: int) -> int:
    """Cut off an incomplete last line. Returns the new size."""
    size = os.fstat(fd).st_size
    start = max(0, size - TAIL)
    whole = start + os.pread(fd, size - start, start).rfind(b"\n") + 1
    if whole < size:
        os.ftruncate(fd, whole)
    return whole


def _parsed(line: bytes) -> _Line | None:
    try:
        return _decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _entry(stored: bytes) -> AuditEntry | None:
    line = _parsed(stored)
    if line is None:
        return None
    try:
        happened_at = datetime.fromisoformat(line.happened_at).timestamp()
    except ValueError:
        return None
    return AuditEntry(
        line.number,
        happened_at,
        line.event,
        owner=line.owner,
        key=line.key,
        operation=line.operation,
        target=line.target,
        outcome=line.outcome,
        peer=line.peer,
        request=line.request,
        detail=line.detail,
        previous=line.previous,
        line=stored.decode("ascii", "backslashreplace").removesuffix("\n"),
    )


# --- reading -------------------------------------------------------------------------------


def read(
    folder: Path, after: int = 0, limit: int = 1000, only: AuditFilter = ALL
) -> list[AuditEntry]:
    """Lines after number `after`, oldest first. Safe to call in a thread, or another process,
    while the log is written."""
    return scan(folder, after, limit, only)[0]


def scan(
    folder: Path, after: int = 0, limit: int = 1000, only: AuditFilter = ALL
) -> tuple[list[AuditEntry], int]:
    """As `read`; also the number of the last line that was scanned, to continue after it."""
    entries: list[AuditEntry] = []
    line = b""
    for path in _files_after(folder, after, only.since):
        for line in _whole_lines(path):
            if not only.may_match(line):
                continue
            entry = _entry(line)
            if entry is not None and entry.number > after and only.matches(entry):
                entries.append(entry)
                if len(entries) >= limit:
                    return entries, entry.number
    last = _parsed(line)
    # The last line may be malformed; lines that were returned are not scanned again.
    return entries, max([after, *(entry.number for entry in entries), last.number if last else 0])


async def entries(
    folder: Path, after: int = 0, only: AuditFilter = ALL, *, follow: bool = False
) -> AsyncGenerator[AuditEntry, None]:
    """All lines after number `after`, oldest first; with `follow` also those to come, forever."""
    seen: tuple[str, int] | None = None
    while True:
        end = await asyncio.to_thread(_end, folder)
        if end != seen:  # otherwise up to FILE_SIZE would be read for nothing
            page, after = await asyncio.to_thread(scan, folder, after, PAGE, only)
            for entry in page:
                yield entry
            if len(page) >= PAGE:
                continue
            seen = end
        if not follow:
            return
        await asyncio.sleep(LOOK_AGAIN)


def _end(folder: Path) -> tuple[str, int] | None:
    """The last file, and its size."""
    try:
        return (last := _files(folder)[-1]).name, last.stat().st_size
    except (IndexError, FileNotFoundError):
        return None


def _files_after(folder: Path, after: int, since: float) -> list[Path]:
    files = _files(folder)
    wanted = []
    for place, path in enumerate(files):
        following = files[place + 1 : place + 2]
        if following and int(following[0].stem) <= after + 1:
            continue
        try:
            if path.stat().st_mtime >= since:
                wanted.append(path)
        except FileNotFoundError:
            continue  # it was too old, and is gone
    return wanted


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
    except FileNotFoundError:
        return


@dataclass(frozen=True)
class Verified:
    """What `verify` found. `problem` empty: every line follows from the one before it."""

    first: int = 0
    last: int = 0
    head: str = START  # the hash of the last line
    problem: str = ""


def verify(folder: Path) -> Verified:
    """Check numbers and hashes of the whole log, and stop at the first that is wrong."""
    first = last = 0
    head = ""
    for path in _files(folder):
        for place, line in enumerate(_whole_lines(path), 1):
            where = f"{path.name}, line {place}"
            parsed = _parsed(line)
            if parsed is None:
                return Verified(first, last, head, f"{where}: not a line of the audit log")
            if last and parsed.number != last + 1:
                problem = f"{where}: has number {parsed.number} after {last}"
                return Verified(first, last, head, problem)
            # If older files were removed, the first line left cannot be checked.
            expected = head if last else (START if parsed.number == 1 else parsed.previous)
            if parsed.previous != expected:
                problem = f"{where}: does not follow from the line before it"
                return Verified(first, last, head, problem)
            first, last, head = first or parsed.number, parsed.number, _hash(line)
    return Verified(first, last, head or START)
