"""The server's own log: its last records, for operators, and a limit that protects the disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import get_args

from hutch.serving import LogLevel, LogRecord

MAX_RECORDS = 2000
MAX_MESSAGE = 4000  # characters
MAX_TRACEBACK = 16_000
_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
_NUMBERS = {level: logging.getLevelNamesMapping()[level.upper()] for level in _LEVELS}


class ServerLog(logging.Handler):
    """Records of all loggers that it is a handler of, numbered from 1."""

    def __init__(self, most: int = MAX_RECORDS) -> None:
        super().__init__()
        self._records: deque[LogRecord] = deque(maxlen=most)
        self._last = 0
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging, in any thread, with the handler's lock held. Never raises."""
        try:
            message = _shown(record.getMessage(), MAX_MESSAGE)
            traceback = ""
            if record.exc_info:
                lines = (self.formatter or logging.Formatter()).formatException(record.exc_info)
                traceback = _shown(lines, MAX_TRACEBACK, keep="\n")
        except Exception:
            self.handleError(record)
            return
        self._last += 1
        level = max(
            (name for name in _LEVELS if _NUMBERS[name] <= record.levelno),
            key=_NUMBERS.__getitem__,
            default=_LEVELS[0],
        )
        self._records.append(
            LogRecord(
                self._last, record.created, level, _shown(record.name, 200), message, traceback
            )
        )
        for added, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(added.set)
            except RuntimeError:
                pass  # its loop is closed

    def read(self, after: int, limit: int, level: LogLevel) -> list[LogRecord]:
        """Records after number `after`, oldest first; with 0, the newest `limit`."""
        self.acquire()
        try:
            records = list(self._records)
        finally:
            self.release()
        least = _NUMBERS[level]
        wanted = [r for r in records if r.number > after and _NUMBERS[r.level] >= least]
        return wanted[:limit] if after else wanted[-limit:]

    async def follow(self, after: int, level: LogLevel) -> AsyncGenerator[LogRecord, None]:
        """Records after number `after`, and those to come.

        A reader that is too slow misses those that were dropped: numbers then have gaps.
        """
        added = asyncio.Event()
        self._followers[added] = asyncio.get_running_loop()
        try:
            while True:
                added.clear()
                for record in self.read(after, MAX_RECORDS, level):
                    after = record.number
                    yield record
                await added.wait()
        finally:
            del self._followers[added]


def _shown(text: str, most: int, keep: str = "") -> str:
    """Text of one line, in which nothing acts on a terminal or changes the direction of text."""
    if len(text) > most:
        text = f"{text[:most]}… ({len(text) - most} more characters)"
    if text.isprintable():
        return text
    return "".join(
        letter if letter in keep or letter.isprintable() else ascii(letter)[1:-1] for letter in text
    )


# --- a rate limit for lines of each kind, so that clients cannot fill the log ----------------

LINES = 10  # per minute, of one kind
KINDS = 100  # that are told apart; the rest is one kind
# Loggers of request errors. A traceback per request would be a way to fill the disk.
LOGGERS = ("uvicorn.error", "websockets", "asyncio", "hutch.server.http")


@dataclass
class _Kind:
    began: float
    written: int = 0
    dropped: int = 0


class LogLimit(logging.Filter):
    """Counts lines by their text before arguments are put in. Says how many were left out."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not any(f"{record.name}.".startswith(f"{name}.") for name in LOGGERS):
            return True
        name = (record.name, str(record.msg)[:200])
        now = self._clock()
        if name not in self._kinds and len(self._kinds) >= KINDS:
            # A kind with dropped lines stays for another minute, to report how many there were.
            self._kinds = {
                known: kind
                for known, kind in self._kinds.items()
                if now - kind.began < (120 if kind.dropped else 60)
            }
            if len(self._kinds) >= KINDS:
                name = ("", "")
        kind = self._kinds.setdefault(name, _Kind(now))
        dropped = 0
        if now - kind.began >= 60:
            dropped = kind.dropped
            kind = self._kinds[name] = _Kind(now)
        if kind.written >= LINES:
            kind.dropped += 1
            return False
        kind.written += 1
        if dropped:
            record.msg = f"{record.getMessage()} ({dropped} more like this were left out)"
            record.args = None
        return True


class _SharedLimit(LogLimit):
    """The limit of several handlers, which all get the same records."""

    def filter(self, record: logging.LogRecord) -> bool:
        verdict = record.__dict__.get("hutch_verdict")
        if not isinstance(verdict, bool):
            verdict = record.__dict__["hutch_verdict"] = super().filter(record)
        return verdict


def limit_logs() -> None:
    """Call this once, after logging was set up and before the first request."""
    # A filter of a logger does not see what its children log, as "websockets.server" does. One of
    # a handler does.
    limit = _SharedLimit()
    for handler in logging.getLogger().handlers:
        handler.addFilter(limit)
