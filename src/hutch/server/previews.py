"""Paths at which a browser can open a port of a box without sending a key.

The token in a path is all that it takes to use the port, as long as its session lives, its key is
valid and the hour is not over; so it works only for the address that asked for it. Only its digest
is kept, in memory.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from hutch.engine.clock import SteadyClock
from hutch.errors import NotFound
from hutch.serving import Preview

from .keys import Caller, Keys

SECONDS = 3600.0
MOST = 1000  # previews; the oldest goes first
MOST_OF_OWNER = 100


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
        if len(own) >= MOST_OF_OWNER:
            del self._ports[own[0]]
        elif len(self._ports) >= MOST:
            del self._ports[next(iter(self._ports))]
        token = secrets.token_urlsafe(32)
        expires_at = self._now() + SECONDS
        self._ports[_digest(token)] = PreviewedPort(session, port, caller, expires_at)
        return Preview(f"/preview/{token}/", expires_at)

    def find(self, token: str, peer: str) -> PreviewedPort:
        """Raises NotFound, which does not say why."""
        known = self._ports.get(_digest(token))
        if known is None or not self._is_valid(known) or not _is_same(known.caller.peer, peer):
            raise NotFound("there is no such preview, or it is over: make another")
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


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
