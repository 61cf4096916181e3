"""What happened in a session, one line for each thing, bounded on disk.

A file of JSON lines that is only ever appended to. When it has grown past its limit, the older
half goes, and a line says how much that was. Numbers go on, also after a crash that tore the last
line. To add never fails: what does not fit on a full disk is counted, and the next line that fits
is preceded by one that says so.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from hutch.serving import JournalEntry

TAIL = 64 * 1024  # bytes at the end of a file, in which its last number mostly is
GAP = 256  # bytes, more than the line that says what is missing has
DROPPED = "dropped"  # the kind of a line that says how many others are missing


class _Numbered(msgspec.Struct):
    number: int


_entry = msgspec.json.Decoder(JournalEntry)
_numbered = msgspec.json.Decoder(_Numbered)
_encode = msgspec.json.Encoder().encode


class Journal:
    """One session's. Only one of a file may be added to; it need not be there yet."""

    def __init__(self, path: Path, limit: int) -> None:
        self.path = path
        self.limit = limit
        self.dropped = 0  # entries that did not fit, and of which no line says so yet
        self._last: int | None = None  # number; None: the file was not looked at yet
        self._size = 0
        self._turns = 0  # how often the older half went
        self._closed = False
        self._followers: set[asyncio.Event] = set()

    def add(self, kind: str, **body: Any) -> JournalEntry:
        if self._last is None:
            try:
                self._last, self._size = self._look()
            except OSError:
                self.dropped += 1
                return JournalEntry(0, time.time(), kind, body)
            self._last += self.dropped
        self._last += 1
        entry = JournalEntry(self._last, time.time(), kind, body)
        line = _line(entry)
        if len(line) > self.limit // 2:
            line = _line(replace(entry, body={"too_large": len(line)}))
        if self.dropped:
            line = _gap(entry.number - 1, self.dropped) + line
        try:
            if self._size + len(line) > self.limit:
                self._turn(len(line))
            self._append(line)
            self.dropped = 0
        except OSError:
            self.dropped += 1
        for follower in self._followers:
            follower.set()
        return entry

    def read(self, after: int = 0, limit: int = 1000) -> list[JournalEntry]:
        """Entries after number `after`, oldest first. Safe, and meant, to be called in a thread."""
        reader = _Reader(self.path)
        try:
            return [entry for entry in reader.more() if entry.number > after][:limit]
        finally:
            reader.close()

    async def follow(self, after: int = 0) -> AsyncGenerator[JournalEntry, None]:
        """Entries after number `after`, and those to come, until the journal is closed."""
        added = asyncio.Event()
        self._followers.add(added)
        reader, turns = _Reader(self.path), self._turns
        try:
            while True:
                added.clear()
                over = self._closed
                if turns != self._turns:
                    reader.close()
                    reader, turns = _Reader(self.path), self._turns
                for entry in await asyncio.to_thread(reader.more):
                    if entry.number > after:
                        after = entry.number
                        yield entry
                if over:
                    return
                await added.wait()
        finally:
            self._followers.discard(added)
            reader.close()

    def close(self) -> None:
        """There will be no more: who follows ends when they have read all. Reading goes on."""
        self._closed = True
        for follower in self._followers:
            follower.set()

    def _append(self, line: bytes) -> None:
        # Opened each time: a thousand journals that are silent need no descriptors.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, size)
                raise OSError("the disk is full")
        finally:
            os.close(fd)
        self._size = size + len(line)

    def _turn(self, coming: int) -> None:
        """Leave the older half out, and enough that `coming` bytes fit."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return  # somebody removed it; it begins anew
        begin = len(data) - min(self.limit // 2, self.limit - coming - GAP)
        cut = data.find(b"\n", max(0, begin - 1)) + 1 or len(data)
        last_gone = _last_number(data[:cut])
        first = _gap(last_gone, last_gone)  # numbers begin at 1, and none is left out
        part = self.path.with_name(self.path.name + ".part")
        try:
            with open(part, "wb", opener=_private) as file:
                file.writelines([first, data[cut:]])
            part.rename(self.path)
        except OSError:
            part.unlink(missing_ok=True)
            raise
        self._size = len(first) + len(data) - cut
        self._turns += 1

    def _look(self) -> tuple[int, int]:
        """The last number and the size of the file, a torn last line cut off."""
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0, 0
        try:
            size = os.fstat(fd).st_size
            length = TAIL
            while True:
                start = max(0, size - length)
                data = os.pread(fd, size - start, start)
                # With `start` in the middle of a line, what comes before the first newline is none.
                last = _last_number(data[data.find(b"\n") + 1 if start else 0 :])
                if last or not start:
                    break
                length *= 4
            whole = start + data.rfind(b"\n") + 1
            if whole < size:
                os.ftruncate(fd, whole)
            return last, whole
        finally:
            os.close(fd)


class _Reader:
    """Reads a journal from its start on; what was read is not read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._at = 0
        self._closed = False
        self._lock = threading.Lock()  # who follows may leave while a thread reads for them

    def more(self) -> list[JournalEntry]:
        with self._lock:
            try:
                data = self._read()
            except OSError:
                return []
        return list(_entries(data))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _read(self) -> bytes:
        if self._closed:
            return b""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        size = os.fstat(self._file).st_size
        data = os.pread(self._file, max(0, size - self._at), self._at)
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole


def _entries(data: bytes) -> Iterator[JournalEntry]:
    for line in data.split(b"\n"):
        if (entry := _parsed(line)) is not None:
            yield entry


def _parsed(line: bytes) -> JournalEntry | None:
    try:
        return _entry.decode(line)
    except (msgspec.DecodeError, ValueError):
        return None


def _last_number(data: bytes) -> int:
    """That of the last whole line that has one; 0 if none has."""
    end = data.rfind(b"\n")
    while end >= 0:
        begin = data.rfind(b"\n", 0, end) + 1
        try:
            return _numbered.decode(data[begin:end]).number
        except (msgspec.DecodeError, ValueError):
            end = begin - 1
    return 0


def _line(entry: JournalEntry) -> bytes:
    try:
        return _encode(entry) + b"\n"
    except Exception:  # a name that is no Unicode, mostly; no entry may fail what it tells of
        return _encode(replace(entry, body={"text": _in_letters(entry.body)})) + b"\n"


def _in_letters(body: Mapping[str, Any]) -> str:
    try:
        return repr(body)[:4096]
    except Exception:
        return "it cannot be written down"


def _gap(last: int, entries: int) -> bytes:
    """A line in the place of so many entries, with the number of the last of them."""
    return _line(JournalEntry(last, time.time(), DROPPED, {"entries": entries}))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
