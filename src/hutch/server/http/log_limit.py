"""A rate limit for log lines of each kind, so that clients cannot fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

LINES = 10  # per minute, of one kind
KINDS = 100  # that are told apart; the rest is one kind
# What logs whatever goes wrong while somebody is served. A traceback per request would be a way
# to fill the disk.
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
            # A kind with lines left out stays for another minute, to tell how many there were.
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


def limit_logs() -> None:
    """To be called once, before anybody is served, and after logging was set up."""
    # A filter of a logger does not see what its children log, as "websockets.server" does. One of
    # a handler does.
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())
