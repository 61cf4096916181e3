"""Tickets: how a browser gets a key without anybody typing one.

A caller with a key, or on the server's own machine, asks for a ticket, and opens a page with it.
The page exchanges it for a temporary key. A ticket is valid once, and for a minute, so that one in
a browser's history or in a list of processes opens nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from hutch.engine.clock import SteadyClock
from hutch.errors import Unauthorized
from hutch.serving import Key, Ticket

from .audit import Budget
from .keys import Caller, Keys
from .quotas import RateLimited

TICKET_SECONDS = 60.0
KEY_SECONDS = 12 * 3600.0
LABEL = "dashboard"
MAX_TICKETS = 16  # of one caller; with one more, the oldest is forgotten
MAX_ALL = 4096  # likewise, of all callers
# (at once, per minute): wrong tickets from one address, and from all. A right one is never refused.
WRONG_EACH, WRONG_TOGETHER = (10, 6), (100, 60)


class Tickets:
    """Kept in memory, and only their hashes."""

    def __init__(self, keys: Keys, clock: Callable[[], float] | None = None) -> None:
        self._keys, self._now = keys, clock or SteadyClock()
        self._tickets: dict[bytes, tuple[Caller, float]] = {}  # the oldest first
        self._wrong = Budget(WRONG_EACH, WRONG_TOGETHER)

    def make(self, caller: Caller) -> Ticket:
        """Raises NotPermitted if the caller's key is itself that of a ticket."""
        self._keys.check_not_temporary(caller)
        self._forget_expired()
        same = [digest for digest, (asked, _) in self._tickets.items() if asked == caller]
        if len(same) >= MAX_TICKETS:
            del self._tickets[same[0]]
        elif len(self._tickets) >= MAX_ALL:
            del self._tickets[next(iter(self._tickets))]
        text = secrets.token_urlsafe(32)
        expires_at = self._now() + TICKET_SECONDS
        self._tickets[_digest(text)] = (caller, expires_at)
        return Ticket(text, expires_at)

    async def redeem(self, text: str, peer: str) -> Key:
        """The temporary key for a ticket. `peer` is the address of the client.

        Raises Unauthorized, and RateLimited after too many wrong tickets.
        """
        self._forget_expired()
        # How long a look-up of a digest takes tells nothing about the tickets that there are.
        caller, _ = self._tickets.pop(_digest(text), (None, 0.0))
        if caller is not None:
            return await self._keys.make_temporary(caller, KEY_SECONDS, LABEL)
        if not self._wrong.take(peer):
            raise RateLimited("too many wrong tickets: wait a minute", retry_after=60)
        raise Unauthorized(
            "this ticket was used, or is older than a minute: run `hutch dashboard` again, or log "
            "in with a key"
        )

    def _forget_expired(self) -> None:
        now = self._now()
        for digest, (_, expires_at) in list(self._tickets.items()):
            if expires_at > now:
                return
            del self._tickets[digest]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
