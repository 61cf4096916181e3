"""Limits for the connections of one server: timeouts, and how many there may be.

A connection counts against its address until it has sent a key, and from then on against the key's
owner. So clients without a key cannot use up the connections of owners, not even behind one proxy,
and no owner can use up those of another. At a limit, an idle connection is closed first; among
clients without a key, otherwise the oldest one. Beyond the total, connections are accepted in
reserve: each gets one request, to /healthz or /readyz only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from hutch.errors import QuotaReached

HEAD_TIME = 10.0  # seconds
BODY_WINDOW = 15.0  # seconds, in each of which a body must grow
# Seconds in which a peer must read something; otherwise it is gone, or wants us to buffer.
WRITE_STALL = 60.0
MAX_PER_ADDRESS = 256
MAX_PER_OWNER = 512
MAX_TOTAL = 8192
MAX_RESERVE = 32


class ClientConnection(Protocol):
    """A connection that is counted."""

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a request, and nothing is being answered."""

    def cut(self) -> None: ...


class TooManyConnections(QuotaReached):
    """The owner has as many requests in progress as they may."""

    retry_after = 1.0


Group = dict[ClientConnection, None]  # the one that was used longest ago first


@dataclass
class ConnectionLimits:
    max_connections: int = MAX_PER_ADDRESS  # from one address, without a key
    max_per_owner: int = MAX_PER_OWNER
    max_total: int = MAX_TOTAL
    head_time: float = HEAD_TIME
    body_window: float = BODY_WINDOW
    write_stall: float = WRITE_STALL
    peers: dict[str, Group] = field(default_factory=dict)  # strangers, by address
    owners: dict[str, Group] = field(default_factory=dict)
    reserve: dict[str, Group] = field(default_factory=dict)  # one group, named ""
    dated: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)  # connections that we ended, by reason
    _places: dict[ClientConnection, tuple[dict[str, Group], str]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self._places)

    def enter(self, peer: str, connection: ClientConnection) -> bool:
        """Count a connection that has sent no key yet. Returns False if it is only in reserve."""
        strangers = self.peers.get(peer, {})
        if len(strangers) >= self.max_connections:
            self._end(_idle(strangers) or next(iter(strangers)), "address")
        if self.count >= self.max_total and not self._make_room():
            reserve = self.reserve.get("", {})
            if len(reserve) >= MAX_RESERVE:
                self._end(next(iter(reserve)), "reserve")
            self._put(connection, self.reserve, "")
            return False
        self._put(connection, self.peers, peer)
        return True

    def identify(self, connection: ClientConnection, owner: str) -> None:
        """Count a connection against the owner of its key. Raises TooManyConnections.

        Connections that were never entered, on the server's Unix socket, are not counted.
        """
        place = self._places.get(connection)
        if place is None or place[0] is self.reserve:
            return
        own = self.owners.get(owner, {})
        if connection not in own and len(own) >= self.max_per_owner:
            idle = _idle(own)
            if idle is None:
                raise TooManyConnections(
                    f"this owner has {self.max_per_owner} requests in progress, which is the limit"
                )
            self._end(idle, "owner")
        self.leave(connection)
        self._put(connection, self.owners, owner)

    def replace(self, connection: ClientConnection, by: ClientConnection) -> None:
        """The same connection, with another protocol."""
        place = self._places.get(connection)
        if place is not None:
            self.leave(connection)
            self._put(by, *place)

    def leave(self, connection: ClientConnection) -> None:
        groups, name = self._places.pop(connection, ({}, ""))
        if name in groups:
            del groups[name][connection]
            if not groups[name]:
                del groups[name]

    def _put(self, connection: ClientConnection, groups: dict[str, Group], name: str) -> None:
        groups.setdefault(name, {})[connection] = None
        self._places[connection] = (groups, name)

    def _make_room(self) -> bool:
        """End a connection of the address, or else of the owner, that has the most."""
        if self.peers:
            strangers = max(self.peers.values(), key=len)
            self._end(_idle(strangers) or next(iter(strangers)), "total")
            return True
        for own in sorted(self.owners.values(), key=len, reverse=True):
            if (idle := _idle(own)) is not None:
                self._end(idle, "total")
                return True
        return False

    def _end(self, connection: ClientConnection, reason: str) -> None:
        self.leave(connection)
        self.ended[reason] += 1
        connection.cut()


def _idle(group: Group) -> ClientConnection | None:
    return next((connection for connection in group if connection.is_idle), None)
