"""Secrets that stand for a caller for a while: tickets for a browser, and previews of a port.

A caller with a key, or on the server's own machine, asks for a ticket, and opens a page with it.
The page exchanges it for a temporary key, so no key has to be typed. A ticket is valid once, and
for a minute, so that one in a browser's history or in a list of processes opens nothing.

A preview is a path at which a browser can open a port of a box without sending a key. The token in
it is all that it takes to use the port, as long as its session lives, its key is valid and the hour
is not over; so it works only for the address that asked for it.

Both are kept in memory, and only their digests: how long it takes to look up a digest tells nothing
about the secrets that there are.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from hutch.engine.clock import SteadyClock
from hutch.errors import NotFound, Unauthorized
from hutch.serving import Key, Preview, Ticket

from .keys import Caller, Keys, secret_digest
from .quotas import Budget, RateLimited

TICKET_SECONDS = 60.0
KEY_SECONDS = 12 * 3600.0
LABEL = "dashboard"
MAX_TICKETS = 16  # of one caller; with one more, the oldest is forgotten
MAX_ALL = 4096  # likewise, of all callers
# (at once, per minute): wrong tickets from one address, and from all. A right one is never refused.
WRONG_EACH, WRONG_TOGETHER = (10, 6), (100, 60)


class Tickets:
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
        self._tickets[secret_digest(text)] = (caller, expires_at)
        return Ticket(text, expires_at)

    async def redeem(self, text: str, peer: str) -> Key:
        """The temporary key for a ticket. `peer` is the address of the client.

        Raises Unauthorized, and RateLimited after too many wrong tickets.
        """
        self._forget_expired()
        caller, _ = self._tickets.pop(secret_digest(text), (None, 0.0))
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


# --- previews ---------------------------------------------------------------------------

PREVIEW_SECONDS = 3600.0
MAX_PREVIEWS = 1000  # previews; the oldest goes first
MAX_PREVIEWS_OF_OWNER = 100


@dataclass(frozen=True)
class PreviewedPort:
    session: str
    port: int
    caller: Caller  # who asked for it
    expires_at: float


class Previews:
    def __init__(
        self,
        keys: Keys,
        is_live: Callable[[str], bool],
        now: Callable[[], float] | None = None,
    ) -> None:
        """`is_live`: whether a session with this id has not ended."""
        self._keys, self._is_live = keys, is_live
        self._now = now or SteadyClock()
        self._ports: dict[bytes, PreviewedPort] = {}  # by the digest of the token; oldest first

    def make(self, session: str, port: int, caller: Caller) -> Preview:
        for digest in [d for d, known in self._ports.items() if not self._is_valid(known)]:
            del self._ports[digest]
        own = [d for d, known in self._ports.items() if known.caller.owner == caller.owner]
        if len(own) >= MAX_PREVIEWS_OF_OWNER:
            del self._ports[own[0]]
        elif len(self._ports) >= MAX_PREVIEWS:
            del self._ports[next(iter(self._ports))]
        token = secrets.token_urlsafe(32)
        expires_at = self._now() + PREVIEW_SECONDS
        self._ports[secret_digest(token)] = PreviewedPort(session, port, caller, expires_at)
        return Preview(f"/preview/{token}/", expires_at)

    def find(self, token: str, peer: str) -> PreviewedPort:
        """Raises NotFound, which does not say why."""
        known = self._ports.get(secret_digest(token))
        if known is None or not self._is_valid(known) or not _is_same(known.caller.peer, peer):
            raise NotFound("there is no such preview, or it has expired: make another")
        return known

    def _is_valid(self, known: PreviewedPort) -> bool:
        is_in_time = self._now() < known.expires_at
        return is_in_time and self._is_live(known.session) and self._keys.is_valid(known.caller)


def _is_same(asked: str, peer: str) -> bool:
    """Whether a request comes from where the preview was asked for."""
    return asked == peer or (_is_this_machine(asked) and _is_this_machine(peer))


def _is_this_machine(peer: str) -> bool:
    try:
        return peer == "local" or ipaddress.ip_address(peer).is_loopback
    except ValueError:
        return False
