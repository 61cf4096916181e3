"""What the connections of one server have in common: its patience, and who is there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

HEAD_TIME = 10.0  # seconds
BODY_WINDOW = 15.0  # seconds, in each of which a body must grow
# Seconds in which something must be read, or the peer is gone, or wants us to hold things for it.
WRITE_STALL = 60.0


class Visitor(Protocol):
    """A connection from some address."""

    @property
    def may_be_replaced(self) -> bool:
        """Whether it asks for nothing, and never said who it is."""

    def cut(self) -> None: ...


@dataclass
class Watch:
    max_connections: int = 256  # from one address
    head_time: float = HEAD_TIME
    body_window: float = BODY_WINDOW
    write_stall: float = WRITE_STALL
    peers: dict[str, dict[Visitor, None]] = field(default_factory=dict)  # the oldest first
    dated: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)  # connections that we ended, by reason

    def enter(self, peer: str, visitor: Visitor) -> bool:
        """Whether there is room: if need be, that of the oldest who only stands there."""
        here = self.peers.setdefault(peer, {})
        if len(here) >= self.max_connections:
            oldest = next((each for each in here if each.may_be_replaced), None)
            if oldest is None:
                return False
            del here[oldest]
            oldest.cut()
        here[visitor] = None
        return True

    def leave(self, peer: str, visitor: Visitor) -> None:
        here = self.peers.get(peer, {})
        here.pop(visitor, None)
        if not here:
            self.peers.pop(peer, None)
